"""What a process that encodes does when it is asked: it loads its encoders once, then encodes shard after shard."""

from __future__ import annotations

import signal
import sys

import torch

from ...datasets.revisions.catalog import read_spec
from ..encoders.describe import describe_store
from ..encoders.vae import load_encoders
from ..images.decoders import Decoders
from ..planning.opening import check_fingerprint
from ..progress.clock import StageClock
from ..sources.several import open_sources
from .process_line import Line
from .processes import Describe, Job
from .worker import Order, Worker


def serve(line: Line) -> None:
    """Load the encoders, then do what is asked for, until this process is ended.

    Raises: LeanditError: of the class that says what to mend.
    """
    job: Job = line.next_request()
    torch.set_num_threads(job.num_threads)
    encoders = load_encoders(job.recipe, torch.device(job.device))
    # From here on there are leases to give back, so a signal unwinds; amid an import it would only look like a fault.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Decoders(job.num_decoders) as decoders:
        worker = Worker(job.recipe, encoders, decoders, StageClock())
        while True:
            match line.next_request():
                case Describe(known):
                    line.send(describe_store(job.recipe, None, encoders, known=known))
                case Order() as order:
                    planned = read_spec(job.root, order.revision)
                    check_fingerprint(job.root, planned, describe_store(job.recipe, None, encoders, known=planned))
                    origin = open_sources(order.source_paths, order.sources)
                    line.send(worker.carry_out(order, job.root, origin, line.send))
