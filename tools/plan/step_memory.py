"""Memory of a training step under each strategy, traced without memory and without a device.

``tracing.py`` runs real steps on fake tensors in an interpreter of its own. Two microbatch sizes produce the same
sequence of moments. At each moment memory is linear in the microbatch; the peak is the highest of these lines.

The traced step is eager: torch.compile fuses operations, so a compiled step takes less.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from pydantic import TypeAdapter

from ...datasets import errors
from ...datasets.errors import LeanditError
from ...train.config import ParallelSection
from ...train.metrics.flops import latent_size_of
from ...train.objectives.draws import GROUP
from .workload import TrainingWorkload

CATEGORIES = PARAMETERS, GRADIENTS, OPTIMIZER, EMA, ACTIVATIONS = (
    "parameters",
    "gradients",
    "optimizer",
    "ema",
    "activations",
)
STATES = CATEGORIES[:-1]
MAX_PROCESSES = 4  # of traces; each has 0.5 GiB of imports
TOLERANCE = 0.01  # largest relative error of the check


class TraceError(LeanditError):
    """A step cannot be traced, or its memory is not linear in the microbatch size."""


@dataclass(frozen=True)
class Strategy:
    """How ranks share a step.

    Args:
      section: of the recipe that trains so.
      zero: section zero_optimization of its ds_config.json.
      to_host: keep the inputs of checkpointed blocks in host memory.
    """

    name: str
    section: ParallelSection = field(default_factory=ParallelSection)
    ranks: int = 1
    zero: Mapping[str, object] | None = None
    to_host: bool = False


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step of one rank, for any microbatch size.

    Args:
      base, slope: (N, 5) bytes of each of ``CATEGORIES`` at each moment: constant part, and for each image.
      states: bytes of the rank's parameters, gradients, optimizer states and averages.
      outside_blocks: parameter bytes outside of blocks.
      backward_moments: moments before the update.
      waiting: bytes for each image of a later microbatch.
      count: traced microbatches.
      noise: bytes of an image's noise, which is drawn for whole groups; the traced steps had one group.
      host: bytes in host memory: constant part, and for each image of a microbatch.
    """

    base: np.ndarray
    slope: np.ndarray
    states: Mapping[str, int]
    outside_blocks: int
    backward_moments: int
    waiting: float
    count: int
    noise: int
    host: tuple[int, int]

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

    def on_host(self, microbatch: int) -> int:
        """Bytes of activations in host memory."""
        return self.host[0] + self.host[1] * microbatch

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

    @property
    def launches(self) -> tuple[int, int]:
        """Operations of a step with one microbatch, and of each further one: those that allocate, which is nearly all.

        Compiled or captured code has fewer.
        """
        return len(self.whole.base), len(self.split.base) - len(self.whole.base)


@dataclass(frozen=True)
class StepTrace:
    """One traced step.

    Args:
      moments: (N, 5) bytes of each of ``CATEGORIES`` after each allocation.
      backward_moments: moments before the update.
      host: peak bytes on the host.
    """

    moments: Sequence[Sequence[int]]
    backward_moments: int
    host: int

    @property
    def peak(self) -> int:
        """Largest number of bytes at any moment."""
        return max(map(sum, self.moments))


@dataclass(frozen=True)
class StrategyTrace:
    """What ``tracing.py`` returns for a strategy.

    Args:
      steps: by images of a microbatch and number of microbatches, as "2x1".
      states, outside_blocks: as in ``StepMemory``.
    """

    steps: Mapping[str, StepTrace]
    states: Mapping[str, int]
    outside_blocks: int


@dataclass(frozen=True)
class TraceRequest:
    """What ``tracing.py`` gets as JSON.

    Args:
      bucket: "HxW" in pixels.
      precision: of the forward: "bf16" or "fp32"; float16 keeps as many bytes as bfloat16.
      device_type: "cpu" or "cuda": selects the allocator's rounding and the matrix products.
    """

    workload: TrainingWorkload
    bucket: str
    precision: str
    device_type: str
    strategies: Sequence[Strategy]


@dataclass(frozen=True)
class TraceAnswer:
    """What ``tracing.py`` answers as JSON.

    Args:
      traces: by name of the strategy.
      error: message of the error that a strategy raised; "" for none.
      error_class: its class, of ``datasets/errors.py``.
    """

    traces: Mapping[str, StrategyTrace]
    error: str = ""
    error_class: str = ""


REQUEST, ANSWER = TypeAdapter(TraceRequest), TypeAdapter(TraceAnswer)
TRACED = (2, 3)  # microbatch sizes that define the lines; a size of 1 skips some copies
STEPS = ("2x1", "3x1", "2x2", "3x2")  # images of a microbatch x microbatches
WAITING, CHECK = "2x3", "5x1"  # traced with one GPU alone: a later microbatch, and a size that checks the lines


def trace_steps(
    workload: TrainingWorkload,
    bucket: str,
    strategies: Sequence[Strategy],
    *,
    precision: str,
    device_type: str = "cuda",
) -> dict[str, Traced]:
    """Trace the steps of each strategy, in as many processes as there are cores.

    Args:
      strategies: the first is of one GPU without a process group, and checks that memory is linear.
    Returns: by name of the strategy.
    Raises: RecipeError: a strategy does not fit the recipe; TraceError.
    """
    low = "bf16" if precision in ("bf16", "fp16") else "fp32"
    number = min(os.cpu_count() or 1, MAX_PROCESSES)
    groups = [[one for one in strategies if one.ranks == ranks] for ranks in {one.ranks for one in strategies}]
    requests = [
        TraceRequest(workload, bucket, low, device_type, part)
        for group in groups  # a process has one process group
        for part in (group[i::number] for i in range(number))
        if part
    ]
    with ThreadPoolExecutor(number) as pool:
        traces = dict(chain.from_iterable(answer.items() for answer in pool.map(run_traces, requests)))
    latent, small = workload.store.latent, TRACED[0]
    noise = 4 * latent.channels * math.prod(latent_size_of(bucket, latent))
    steps = next(trace.steps for trace in traces.values() if WAITING in trace.steps)
    waiting = max(0.0, (steps[WAITING].peak - steps[f"{small}x2"].peak) / small)
    return {one.name: _lines(bucket, traces[one.name], noise, waiting) for one in strategies}


def run_traces(request: TraceRequest) -> dict[str, StrategyTrace]:
    """Run ``tracing.py`` in a clean interpreter.

    Its patches of torch, and the fake tensors that caches of libraries keep, end with it.

    Raises: LeanditError: as it raised; TraceError: it failed.
    """
    command = [sys.executable, "-P", "-m", f"{__package__}.tracing"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # those of a launched training
    ended = subprocess.run(command, input=REQUEST.dump_json(request), capture_output=True, env=environment, check=False)
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TraceError(
            f"bucket '{request.bucket}': the trace of a training step ended with {ended.returncode}: {' '.join(last)}. "
            "Its memory is unknown."
        )
    answer = ANSWER.validate_json(ended.stdout)
    if answer.error:
        raise getattr(errors, answer.error_class, LeanditError)(answer.error)
    return dict(answer.traces)


def _lines(bucket: str, traced: StrategyTrace, noise: int, waiting: float) -> Traced:
    """The lines through the two sizes; the others check them.

    Raises: TraceError: another size is not on the line.
    """
    small, large = TRACED
    memories = []
    for count in (1, 2):
        first, second = (traced.steps[f"{images}x{count}"] for images in TRACED)
        if len(first.moments) != len(second.moments):
            lengths = f"{len(first.moments)} and {len(second.moments)}"
            raise TraceError(f"bucket '{bucket}': {small} and {large} images run different steps ({lengths} moments).")
        moments = np.array(first.moments, np.int64)
        slope = (np.array(second.moments, np.int64) - moments) // (large - small)
        host_slope = (second.host - first.host) // (large - small)
        memories.append(
            StepMemory(
                base=moments - slope * small,
                slope=slope,
                states=traced.states,
                outside_blocks=traced.outside_blocks,
                backward_moments=first.backward_moments,
                waiting=waiting if count > 1 else 0.0,
                count=count,
                noise=noise,
                host=(first.host - host_slope * small, host_slope),
            )
        )
    if CHECK not in traced.steps:
        return Traced(*memories)
    num_images = int(CHECK.partition("x")[0])
    checked, predicted = traced.steps[CHECK].peak, memories[0].total(num_images)
    if abs(predicted - checked) > TOLERANCE * checked:
        raise TraceError(
            f"bucket '{bucket}': a step of {num_images} images takes {checked:,} bytes, {small} and {large} images "
            f"predict {predicted:,.0f}. The memory of other microbatches is unknown."
        )
    return Traced(*memories)
