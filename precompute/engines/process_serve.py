"""A process that encodes: it loads its encoders once, then answers its parent's requests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.catalog import read_spec
from ..config import PrecomputeRecipe
from ..encoders.describe import describe_store
from ..encoders.vae import load_encoders
from ..images.decoders import Decoders
from ..planning.opening import check_fingerprint
from ..progress.clock import StageClock
from ..sources.several import open_sources
from .worker import EncodeRequest, Worker


@dataclass(frozen=True)
class Job:
    """The job of an encoding process; the first message it receives.

    Args:
      device: of its encoders, as torch names it.
      num_decoders: pictures that it decodes concurrently.
      num_threads: of torch; on a CPU the number changes the bits.
    """

    recipe: PrecomputeRecipe
    root: Path
    device: str
    num_decoders: int
    num_threads: int


@dataclass(frozen=True)
class Describe:
    """Requests the spec of a store; ``known`` as in ``describe_store``."""

    known: StoreSpec | None


def serve(next_request: Callable[[], Any], send: Callable[[Any], None]) -> None:
    """Load the encoders, then answer requests until this process is ended.

    Raises: LeanditError: its class tells what to fix.
    """
    job: Job = next_request()
    torch.set_num_threads(job.num_threads)
    encoders = load_encoders(job.recipe, torch.device(job.device))
    # From here on a signal unwinds the stack to release leases; during an import it would look like a bug.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Decoders(job.num_decoders) as decoders:
        worker = Worker(job.recipe, encoders, decoders, StageClock())
        while True:
            match next_request():
                case Describe(known):
                    send(describe_store(job.recipe, None, encoders, known=known))
                case EncodeRequest() as request:
                    planned = read_spec(job.root, request.revision)
                    check_fingerprint(job.root, planned, describe_store(job.recipe, None, encoders, known=planned))
                    origin = open_sources(request.source_paths, request.sources)
                    send(worker.run_request(request, job.root, origin, send))
