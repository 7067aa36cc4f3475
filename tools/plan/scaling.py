"""Seconds of a training step on several GPUs, by a model that is stated here. Nothing is measured.

- Forward and backward of a rank: FLOPs / (peak x 0.78), and 0.0125 bytes of GPU memory moved for each FLOP (twice as
  many in float32), fitted to runs of other trainers on one machine in 16 bits (docs/planning.md lists them); and 10 us
  for each operation of each microbatch, a rule. The update reads and writes every byte of the rank's states once.
- Communication: (n - 1) / n of the bytes for a gather or a scatter and twice that for an all-reduce, at 0.8 of the
  slower of a GPU's link within its machine and all network adapters of the machine. No latency: with 16 images a GPU or
  more, as in all runs that it is checked against, bytes and arithmetic take the time.
- Overlap: what is gathered for the forward hides behind it (1/3 of both); gradients, and what is gathered for the
  backward, behind that (2/3); those of DDP behind the last microbatch's.
- Not in it: slow ranks, congestion, waiting for data, checkpoints, multiprocessors that NCCL takes from kernels. So it
  is optimistic: by 13 % for REPA on 8 H100, by 1 to 7 % for what more GPUs lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...train.metrics.gpus import Gpu
from ...units import readable_time
from ..terminal.text import aligned

MATMUL_SHARE = 0.78  # of the peak, that matrix products reach; fitted
BYTES_PER_FLOP = 0.0125  # moved by all other operations, in 16 bits; fitted
LAUNCH_SECONDS = 10e-6  # a rule, not measured on a GPU: host time of an operation that is not compiled
BUS_SHARE = 0.8  # of a link's rate, that collectives reach
FORWARD = 1 / 3  # of forward and backward
NETWORK_GBIT = 400.0  # a GPU: one InfiniBand NDR or 400 Gbit Ethernet adapter
GPUS_PER_MACHINE = 8
COUNTS = (1, 8, 16, 32, 64, 128)  # no published run that the model is checked against has more


@dataclass(frozen=True)
class StepWork:
    """What a step computes and holds, however many GPUs share it.

    Args:
      flops: forward and backward of an image, without recomputation.
      weights, gradients, states: float32 bytes of all parameters, of those that train, and of everything that an update
        touches (parameters, gradients, optimizer, averages).
      gathered: bytes of the weights as FSDP gathers them.
      launches: operations of a step with one microbatch, and of each further microbatch.
      recomputed: forward and backward, relative to those without activation checkpointing.
    """

    flops: float
    weights: float
    gradients: float
    states: float
    gathered: float
    precision: str = "bf16"
    launches: tuple[int, int] = (0, 0)
    recomputed: float = 1.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the rank with most images.

    Args:
      compute: forward and backward, with launches.
      launches: what the host takes to launch their operations.
      exposed: communication that nothing hides.
    """

    compute: float
    launches: float
    update: float
    exposed: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.update + self.exposed

    @property
    def is_launch_bound(self) -> bool:
        """Whether launches take most of forward and backward."""
        return self.launches >= self.compute / 2

    @property
    def limit(self) -> str:
        """The largest of the parts that do not shrink with the images of a GPU."""
        parts = {"communication": self.exposed, "update": self.update, "launches": self.launches}
        return max(parts, key=lambda part: parts[part])


def sent_bytes(strategy: str, work: StepWork, ranks: int, microbatches: int = 1) -> dict[str, float]:
    """Bytes that a rank sends in each phase of a step; "between": gradients of HSDP, between machines.

    Sources: PyTorch's documentation of DistributedDataParallel and fully_shard; Rajbhandari et al. 2020 (ZeRO).
    """
    name, k = strategy.removesuffix(", offloaded"), microbatches
    group = min(ranks, GPUS_PER_MACHINE) if name == "hsdp" else ranks
    share = (group - 1) / group
    if name in ("single", "ddp"):
        return {"last backward": 2 * share * work.gradients}
    if name == "zero-1":
        return {"last backward": share * work.gradients, "update": share * work.weights}
    if name == "zero-2":
        return {"backward": k * share * work.gradients, "update": share * work.weights}
    gathered = k * share * (work.weights if name == "zero-3" else work.gathered)
    again = 0.0 if name == "fsdp, gradients" else gathered
    machines = ranks // group
    between = 2 * (machines - 1) / machines * work.gradients / group  # reduced once, after the last microbatch
    return {"forward": gathered, "backward": again + k * share * work.gradients, "between": between}


def step_time(
    work: StepWork,
    gpu: Gpu,
    strategy: str,
    ranks: int,
    images: int,
    microbatch: int,
    *,
    network_gbit: float = NETWORK_GBIT,
    mfu: float | None = None,
) -> StepTime:
    """Time of a step.

    Args:
      strategy: a name of ``strategies.py``.
      images: of the rank with most images.
      microbatch: images of each forward.
      network_gbit: Gbit/s of a GPU's share of the network between machines, in one direction.
      mfu: measured, instead of the fit; of whole steps, so that it contains the update.
    Raises: ValueError: the GPU lacks the precision.
    """
    if not (peak := gpu.peak_flops(work.precision)):
        raise ValueError(f"GPU '{gpu.name}' has no {work.precision}. Expected another GPU or precision.")
    # Compute: arithmetic, memory traffic and launches; the update.
    microbatches, memory_rate = math.ceil(images / microbatch), gpu.memory_gb_s * 1e9
    launches = (work.launches[0] + (microbatches - 1) * work.launches[1]) * LAUNCH_SECONDS
    if mfu:
        compute, update = max(launches, images * work.flops / (peak * mfu)), 0.0
    else:
        moved = BYTES_PER_FLOP * (1 if work.precision in ("bf16", "fp16") else 2)
        flops = images * work.flops * work.recomputed
        compute = launches + flops * (1 / (peak * MATMUL_SHARE) + moved / memory_rate)
        sharers = {"single": 1, "ddp": 1, "hsdp": min(ranks, GPUS_PER_MACHINE)}.get(strategy, ranks)
        update = 2 * work.states / sharers / memory_rate
    # Bytes over the link, and what hides behind compute.
    network, rate = network_gbit / 8 * 1e9, gpu.link_gb_s * 1e9
    if ranks > GPUS_PER_MACHINE and strategy != "hsdp":
        rate = min(rate, GPUS_PER_MACHINE * network)
    backward = (1 - FORWARD) * compute
    hidden = {"forward": FORWARD * compute, "backward": backward, "update": 0.0}
    hidden |= dict.fromkeys(("last backward", "between"), backward / microbatches)
    sent = sent_bytes(strategy, work, ranks, microbatches)
    seconds = {phase: size / (BUS_SHARE * (network if phase == "between" else rate)) for phase, size in sent.items()}
    return StepTime(compute, launches, update, sum(max(0.0, seconds[phase] - hidden[phase]) for phase in seconds))


def scaling(
    time: Callable[[int, int], StepTime | None], strategy: str, *, batch: int, images: int, gpus: int
) -> dict[str, Any]:
    """The table as JSON values.

    Args:
      time: of a step, for ranks and images of each; None: it does not fit into the memory of a GPU.
      batch: run.global_batch.
      images: to train on.
      gpus: asked for; a row of its own.
    """
    rows, best = list[dict[str, Any]](), 0.0  # images a second of a GPU
    for n in sorted({*COUNTS, gpus}):
        step = time(n, -(-batch // n)) if n <= batch else None
        rate = step and batch / step.seconds
        best = max(best, (rate or 0.0) / n)
        rows.append(
            {
                "gpus": n,
                "images_a_gpu": -(-batch // n) if n <= batch else 0,
                "step_seconds": step and step.seconds,
                "images_per_second": rate,
                "of_linear": rate and rate / n / best,
                "exposed_communication": step and step.exposed / step.seconds,
                "seconds": rate and images / rate,
                "gpu_hours": rate and n * images / rate / 3600,
                "limit": step and step.limit,
            }
        )
    return {"strategy": strategy, "global_batch": batch, "images": images, "rows": rows}


def readable_rate(number: float) -> str:
    """Two digits at least: "0.31", "9.8", "1,234"."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "gpus": ("GPUs", str),
    "images_a_gpu": ("each", lambda images: str(images or "-")),
    "step_seconds": ("s/step", "{:.3f}".format),
    "images_per_second": ("images/s", readable_rate),
    "of_linear": ("linear", "{:.0%}".format),
    "exposed_communication": ("exposed", "{:.0%}".format),
    "seconds": ("time", readable_time),
    "gpu_hours": ("GPU h", readable_rate),
    "limit": ("does not shrink", str),
}


def render_scaling(result: Mapping[str, Any]) -> list[str]:
    """The table, below a line that says what it is of."""
    rows = result["rows"]
    cells = [["-" if row[key] is None else show(row[key]) for key, (_, show) in COLUMNS.items()] for row in rows]
    title = f"{result['images']:,} images on 1 to {rows[-1]['gpus']} {result['gpu']} by {result['strategy']}, "
    title += f"run.global_batch = {result['global_batch']}: predicted, not measured"
    lines = [title, *aligned([[head for head, _ in COLUMNS.values()], *cells])]
    if any(not row["images_a_gpu"] for row in rows):
        lines.append("each -: more GPUs than images in a global batch")
    if not any(row["seconds"] for row in rows):
        lines.append(
            f"no number of GPUs fits one image by {result['strategy']}: use parallel.strategy fsdp, bf16 or int8 in "
            "lora.frozen, or a GPU with more memory"
        )
    return lines
