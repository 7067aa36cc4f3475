"""Memory of a training step under each strategy, traced without memory and without a device.

``tracing.py`` runs real steps on fake tensors, each strategy in an interpreter of its own. Two microbatch sizes produce
the same sequence of moments. At each moment memory is linear in the microbatch; the peak is the highest of these lines.

The traced step is eager: torch.compile fuses operations, so a compiled step takes less.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from ... import errors
from ...errors import LeanditError
from ...train.config import ParallelSection
from ...train.objectives.losses import GROUP
from .workload import TrainingWorkload

PARAMETERS, GRADIENTS, OPTIMIZER, EMA, ACTIVATIONS = "parameters", "gradients", "optimizer", "ema", "activations"
STATES = PARAMETERS, GRADIENTS, OPTIMIZER, EMA
CATEGORIES = *STATES, ACTIVATIONS
Progress = Callable[[str, int, int], None]
MAX_PROCESSES = 4  # of traces; each has 0.5 GiB of imports
Moments = Annotated[np.ndarray, PlainValidator(np.asarray), PlainSerializer(np.ndarray.tolist)]


class TraceError(LeanditError):
    """A step cannot be traced, or its memory is not linear in the microbatch size."""


@dataclass(frozen=True)
class Strategy:
    """How ranks share a step.

    Args:
      section: of the recipe that trains so.
      zero: section zero_optimization of its ds_config.json.
    """

    name: str
    section: ParallelSection = field(default_factory=ParallelSection)
    ranks: int = 1
    zero: Mapping[str, object] | None = None


@dataclass(frozen=True)
class TraceRequest:
    """What is traced.

    Args:
      bucket: "HxW" in pixels.
      precision: of the forward: "bf16" or "fp32"; float16 keeps as many bytes as bfloat16.
      device_type: "cpu" or "cuda": selects the allocator's rounding and the matrix products.
    """

    workload: TrainingWorkload
    bucket: str
    precision: str
    device_type: str
    strategy: Strategy


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step of one rank, for any microbatch size.

    Args:
      base, slope: (N, 5) bytes of each of ``CATEGORIES`` at each moment: constant part, and for each image.
      states: bytes of the rank's parameters, optimizer states and averages; gradients are those of whole weights.
      outside_blocks: parameter bytes outside of blocks.
      backward_moments: moments before the update.
      waiting: bytes for each image of a later microbatch.
      count: traced microbatches.
      noise: bytes of an image's noise, which is drawn for whole groups; the traced steps had one group.
    """

    base: Moments
    slope: Moments
    states: Mapping[str, int]
    outside_blocks: int
    backward_moments: int
    waiting: float
    count: int
    noise: int

    def peak(self, microbatch: int, *, batch: int = 0) -> dict[str, float]:
        """Bytes of each category at the moment of the peak.

        Args:
          batch: images of the step, if more than the traced number of microbatches.
        """
        moments = self.base + self.slope * microbatch
        peak: dict[str, float] = dict(zip(CATEGORIES, moments[moments.sum(1).argmax()].tolist(), strict=True))
        images = max(batch, self.count * microbatch)
        peak[ACTIVATIONS] += self.waiting * (images - self.count * microbatch)
        peak[ACTIVATIONS] += self.noise * GROUP * max(0, math.ceil(images / GROUP) - 1)
        return peak

    def total(self, microbatch: int, *, batch: int = 0) -> float:
        """All bytes at the peak."""
        return sum(self.peak(microbatch, batch=batch).values())

    def largest(self, room: float, *, batch: int = 0, most: int = 1 << 16) -> int:
        """Largest microbatch that fits into ``room`` bytes, at most ``most`` images; 0: not even one image fits."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.total(middle, batch=batch) <= room else (low, middle)
        return low

    def scaled(self, shares: Mapping[str, float]) -> StepMemory:
        """The same step where a rank holds another share of some categories, as with more ranks."""
        factors = np.array([shares.get(name, 1.0) for name in CATEGORIES])
        return replace(self, base=self.base * factors, slope=self.slope * factors)

    def offloaded(self, categories: Sequence[str]) -> StepMemory:
        """The same step with some categories, and the update, on the host."""
        forward = replace(self, base=self.base[: self.backward_moments], slope=self.slope[: self.backward_moments])
        return forward.scaled(dict.fromkeys(categories, 0.0))


@dataclass(frozen=True)
class Traced:
    """Memory of a strategy: of a step with one microbatch, and of one with several."""

    whole: StepMemory
    split: StepMemory

    def fit(self, room: float, batch: int, most: int) -> tuple[int, StepMemory]:
        """Largest microbatch and the memory of its step: the whole batch if it fits, else several microbatches."""
        if self.whole.largest(room, most=most) == batch:
            return batch, self.whole
        return self.split.largest(room, batch=batch, most=most), self.split

    def scaled(self, shares: Mapping[str, float]) -> Traced:
        """Both steps with ``StepMemory.scaled``."""
        return Traced(self.whole.scaled(shares), self.split.scaled(shares))

    def offloaded(self, categories: Sequence[str]) -> Traced:
        """Both steps with ``StepMemory.offloaded``."""
        return Traced(self.whole.offloaded(categories), self.split.offloaded(categories))

    @property
    def launches(self) -> tuple[int, int]:
        """Operations of a step with one microbatch, and of each further one: those that allocate, which is nearly all.

        Compiled or captured code has fewer.
        """
        return len(self.whole.base), len(self.split.base) - len(self.whole.base)


@dataclass(frozen=True)
class TraceAnswer:
    """What ``tracing.py`` answers: the memory, or the message and class of the error that the strategy raised."""

    traced: Traced | None
    error: str = ""
    error_class: str = ""


REQUEST, ANSWER = TypeAdapter(TraceRequest), TypeAdapter(TraceAnswer)


def trace_steps(
    workload: TrainingWorkload,
    bucket: str,
    strategies: Sequence[Strategy],
    *,
    precision: str,
    device_type: str = "cuda",
    progress: Progress = lambda *_: None,
) -> dict[str, Traced]:
    """Trace the steps of each strategy, in as many processes as there are cores.

    Args:
      strategies: the first is of one GPU without a process group; it also checks that memory is linear.
      progress: called with ("trace", strategies done, strategies).
    Returns: by name of the strategy.
    Raises: RecipeError: a strategy does not fit the recipe; TraceError.
    """
    low = "bf16" if precision in ("bf16", "fp16") else "fp32"
    requests = [TraceRequest(workload, bucket, low, device_type, one) for one in strategies]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_PROCESSES)) as pool:
        progress("trace", 0, len(requests))
        traces = list[Traced]()
        for traced in pool.map(run_trace, requests):
            traces.append(traced)
            progress("trace", len(traces), len(requests))
    waiting = traces[0].split.waiting  # the other strategies do not trace it
    return {
        strategy.name: replace(traced, split=replace(traced.split, waiting=waiting))
        for strategy, traced in zip(strategies, traces, strict=True)
    }


def run_trace(request: TraceRequest) -> Traced:
    """Run ``tracing.py`` in a clean interpreter, with which its patches of torch and cached fake tensors end.

    Raises: LeanditError: as it raised; TraceError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # those of a launched training
    command = [sys.executable, "-P", "-m", f"{__package__}.tracing"]
    ended = subprocess.run(command, input=REQUEST.dump_json(request), capture_output=True, env=environment, check=False)
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TraceError(
            f"bucket '{request.bucket}': a training step's trace exited with {ended.returncode}: {' '.join(last)}. "
            "Its memory is unknown."
        )
    answer = ANSWER.validate_json(ended.stdout)
    if answer.traced is None:
        raise getattr(errors, answer.error_class, TraceError)(answer.error)
    return answer.traced
