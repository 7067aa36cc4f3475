"""Seconds of a training step on many GPUs, by a model that is stated here. Pure functions; nothing is measured.

- Forward and backward of a rank: FLOPs / (peak x 0.78), and 0.0125 bytes of GPU memory moved for each FLOP (twice as
  many in float32), and 10 us for each operation of each microbatch, so small microbatches use a GPU badly. The first
  two constants are fitted to runs of other trainers on one machine in 16 bits (docs/planning.md lists them); the third
  is a rule, close to what fits best (12 us). The update reads and writes every byte of the rank's states once.
- Communication: ring collectives, (n - 1) / n of the bytes for a gather or a scatter and twice that for an all-reduce,
  at 0.8 of the slower of a GPU's link within its machine and all network adapters of the machine. Latency is that of
  NCCL's own cost model (protocol LL128): rings of n - 1 hops for gathers and scatters, the shorter of ring and tree
  for an all-reduce.
- Overlap: what is gathered for the forward hides behind it (1/3 of both); gradients, and what is gathered for
  the backward, behind that (2/3); those of DDP behind the last microbatch's. One collective of each phase never hides.
- Not in it: slow ranks, congestion, waiting for data, checkpoints, multiprocessors that NCCL takes from kernels.

Source: NVIDIA/nccl, src/graph/tuning.cc (latencies); data sheets (``train/metrics/gpus.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...train.metrics.gpus import Gpu
from .strategies import GPUS_PER_MACHINE

MATMUL_SHARE = 0.78  # of the peak, that matrix products reach; fitted
BYTES_PER_FLOP = 0.0125  # moved by all other operations, in 16 bits; fitted
LAUNCH_SECONDS = 10e-6  # a rule, not measured on a GPU: host time of an operation that is not compiled
BUS_SHARE = 0.8  # of a link's rate, that collectives reach
BASE_SECONDS = 14e-6  # of a collective
RING_HOP, RING_NET_HOP = 1.9e-6, 4.0e-6  # within a machine, between machines
TREE_HOP, TREE_NET_HOP = 1.25e-6, 8.5e-6
FORWARD = 1 / 3  # of forward and backward
NETWORK_GBIT = 400.0  # a GPU: one InfiniBand NDR or 400 Gbit Ethernet adapter
DDP_BUCKET = 25 * 2**20  # bytes: DistributedDataParallel's default
ZERO_BUCKET = 4 * 5e8  # bytes: DeepSpeed's default of reduce_bucket_size, in float32

Phase = Literal["forward", "backward", "last backward", "update"]


@dataclass(frozen=True)
class Cluster:
    """Equal machines.

    Args:
      network_gbit: Gbit/s of a GPU's share of the network between machines, in one direction.
    """

    gpu: Gpu
    network_gbit: float = NETWORK_GBIT
    gpus_per_machine: int = GPUS_PER_MACHINE


@dataclass(frozen=True)
class StepWork:
    """What a step computes and holds, whoever shares it.

    Args:
      flops: forward and backward of an image.
      tokens: of an image.
      weights, gradients, states: float32 bytes of all parameters, of those that train, and of everything that an update
        touches (parameters, gradients, optimizer, averages).
      blocks: of the model, each gathered by itself.
      gathered: bytes of the weights as FSDP gathers them.
      launches: operations of a step with one microbatch, and of each further microbatch.
    """

    flops: float
    tokens: int
    weights: float
    gradients: float
    states: float
    blocks: int
    gathered: float
    precision: str = "bf16"
    launches: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Collective:
    """Equal collectives of a step.

    Args:
      total_bytes: of all ranks together, of all calls.
      ranks: that take part, neighbours unless ``across``: then one of each machine.
    """

    phase: Phase
    total_bytes: float
    calls: int
    ranks: int
    is_all_reduce: bool = False
    across: bool = False

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends."""
        return (1 + self.is_all_reduce) * (self.ranks - 1) / self.ranks * self.total_bytes


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
    communication: float
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
        """The largest of the parts that do not shrink with the images of a GPU, in words."""
        parts = {
            "communication": self.exposed,
            "the update of weights and averages": self.update,
            f"launching operations ({LAUNCH_SECONDS * 1e6:.0f} us each, a rule)": self.launches,
        }
        return max(parts, key=lambda name: parts[name])


def traffic(
    strategy: str, work: StepWork, ranks: int, microbatches: int = 1, per_machine: int = GPUS_PER_MACHINE
) -> list[Collective]:
    """Collectives of a step under a strategy of ``strategies.py``; offloading does not change them."""
    name = strategy.removesuffix(", offloaded")
    n, k, units = ranks, microbatches, work.blocks + 1
    if n == 1 or name == "single":
        return []
    if name == "ddp":
        calls = math.ceil(work.gradients / DDP_BUCKET)
        return [Collective("last backward", work.gradients, calls, n, is_all_reduce=True)]
    if name in ("zero-1", "zero-2"):
        times = k if name == "zero-2" else 1
        phase: Phase = "backward" if name == "zero-2" else "last backward"
        calls = math.ceil(work.gradients / ZERO_BUCKET)
        scatter = Collective(phase, times * work.gradients, times * calls, n)
        return [scatter, Collective("update", work.weights, math.ceil(work.weights / ZERO_BUCKET), n)]
    group = min(n, per_machine) if name == "hsdp" else n
    gathered = k * (work.weights if name == "zero-3" else work.gathered)
    collectives = [
        Collective("forward", gathered, k * units, group),
        Collective("backward", k * work.gradients, k * units, group),
    ]
    if name != "fsdp, gradients":
        collectives.append(Collective("backward", gathered, k * units, group))
    if group < n:
        part = work.gradients / group  # reduced once, after the last microbatch
        collectives.append(Collective("last backward", part, units, n // group, is_all_reduce=True, across=True))
    return collectives


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Seconds of collectives, one after the other."""
    network = cluster.network_gbit / 8 * 1e9
    in_machine = 1 if collective.across else min(collective.ranks, cluster.gpus_per_machine)
    machines = math.ceil(collective.ranks / in_machine)
    rate = network if collective.across else cluster.gpu.link_gb_s * 1e9
    if machines > 1:
        rate = min(rate, in_machine * network)
    inside, between = collective.ranks - machines, machines - 1
    hops = inside * RING_HOP + between * RING_NET_HOP
    if collective.is_all_reduce:
        tree = (in_machine - 1) * TREE_HOP + math.floor(math.log2(machines)) * TREE_NET_HOP
        hops = 2 * min(hops, tree)
    return collective.sent_bytes / (BUS_SHARE * rate) + collective.calls * (BASE_SECONDS + hops)


def arithmetic_seconds(work: StepWork, gpu: Gpu, images: float) -> float:
    """Seconds of forward and backward of a rank's images on the GPU, without launches.

    Raises: ValueError: the GPU lacks the precision.
    """
    if not (peak := gpu.peak_flops(work.precision)):
        raise ValueError(f"a {gpu.name} has no {work.precision}. Needed another GPU or precision.")
    moved = BYTES_PER_FLOP * (1 if work.precision in ("bf16", "fp16") else 2)
    return images * work.flops * (1 / (peak * MATMUL_SHARE) + moved / (gpu.memory_gb_s * 1e9))


def update_share(strategy: str, ranks: int, per_machine: int = GPUS_PER_MACHINE) -> float:
    """Share of all states that a rank updates."""
    if ranks == 1 or strategy in ("single", "ddp"):
        return 1.0
    return 1 / (min(ranks, per_machine) if strategy == "hsdp" else ranks)


def step_time(
    work: StepWork, cluster: Cluster, strategy: str, ranks: int, images: int, microbatch: int, mfu: float | None = None
) -> StepTime:
    """Time of a step.

    Args:
      strategy: a name of ``strategies.py``.
      images: of the rank with most images.
      microbatch: images of each forward.
      mfu: measured, instead of the fit; of whole steps, so that it contains the update.
    """
    microbatches = math.ceil(images / microbatch)
    launches = (work.launches[0] + (microbatches - 1) * work.launches[1]) * LAUNCH_SECONDS
    if mfu:
        compute = max(launches, images * work.flops / (cluster.gpu.peak_flops(work.precision) * mfu))
    else:
        compute = launches + arithmetic_seconds(work, cluster.gpu, images)
    share = update_share(strategy, ranks, cluster.gpus_per_machine)
    update = 0.0 if mfu else 2 * work.states * share / (cluster.gpu.memory_gb_s * 1e9)
    collectives = traffic(strategy, work, ranks, microbatches, cluster.gpus_per_machine)
    hidden: dict[Phase, float] = {
        "forward": FORWARD * compute,
        "backward": (1 - FORWARD) * compute,
        "last backward": (1 - FORWARD) * compute / microbatches,
        "update": 0.0,
    }
    exposed = 0.0
    for phase, behind in hidden.items():
        here = [(one, collective_seconds(one, cluster)) for one in collectives if one.phase == phase]
        never = max((seconds / one.calls for one, seconds in here), default=0.0)
        exposed += max(never, sum(seconds for _, seconds in here) - behind)
    communication = sum(collective_seconds(one, cluster) for one in collectives)
    return StepTime(compute, launches, update, communication, exposed)
