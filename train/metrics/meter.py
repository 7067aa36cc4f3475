"""Figures of a run: what its steps did, summed on the device until a report reads them, one step late."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.format.schema import LatentSpec
from ...datasets.store import LatentStore
from ...errors import RunError
from ..models.spec import ModelSpec
from ..optim.precision import SMALLEST_SCALE, LossScale, autocast_dtype
from ..parallel.ranks import Ranks, all_gather
from .flops import latent_size_of, mean_train_flops, tokens_per_image, train_flops
from .gpus import gpu_by_name
from .history import NUM_BANDS, StepReport

MOST_NAMED = 5  # records in a message


class StepResult(NamedTuple):
    """Losses and gradient norm of a step, on the device until they are reported.

    Args:
      loss: () this rank's share of the mean over the global batch, without added terms.
      terms: () of each term that the recipe adds, likewise.
      grad_norm: () over all ranks, before clipping.
      skipped: () 1 if the update was skipped, else 0.
      losses: (B,) of each image of this rank.
      time_shares: (B,) position of each image between data, 0, and noise, 1.
      records: (B,) positions in the records table.
      store: index of the store.
      num_images: seen since the start of the run.
    """

    step: int
    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    skipped: Tensor
    losses: Tensor
    time_shares: Tensor
    records: Tensor
    store: int
    epoch: int
    num_images: int
    learning_rate: float


class HostEvent:
    """This moment of a CPU, with the methods of ``torch.cuda.Event`` that a meter calls."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Whether the device has reached it."""
        return True

    def synchronize(self) -> None:
        """Wait until the device has reached it."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds until a later moment."""
        return 1000 * (end._seconds - self._seconds)


Event = HostEvent | torch.cuda.Event


def now(device: torch.device) -> Event:
    """This moment of a device, which a GPU reaches once it has done all work so far; nothing waits."""
    if device.type != "cuda":
        return HostEvent()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Event, end: Event) -> float:
    """Seconds by the clock of the device, which must have reached both."""
    return start.elapsed_time(end) / 1000  # pyright: ignore[reportArgumentType] - both are of one device


@dataclass
class _Interval:
    """Some steps, and once their report has begun, the figures that are on their way from the device.

    Args:
      start, end: of the steps.
      busy: start and end of each step, on a GPU.
      wait_seconds: spent waiting for batches.
      figures: (1 + N, S) loss and N added terms of each step, of all ranks; (S,) norms; (S,) skipped; ``band_sums``.
    """

    start: Event
    end: Event
    results: list[StepResult] = field(default_factory=list)
    busy: list[tuple[Event, Event]] = field(default_factory=list)
    wait_seconds: float = 0.0
    images: int = 0
    tokens: int = 0
    flops: float = 0.0
    memory_gib: float = 0.0
    scale: float | None = None
    figures: tuple[Tensor, ...] = ()


class Meter:
    """Adds up steps; reports are read while the device runs the next step. All ranks call it alike.

    Args:
      ranks: which report together.
      device: of this rank.
      stores: of the batches, to name records.
      spec, latent: of the model and the store, to count FLOPs and tokens.
      peak_flops: of all devices together, in FLOP/s; 0 if unknown.
      scale: of the loss, with float16: a gradient that is not finite is no error, but shrinks it.
      most_skipped: updates of the run that may be skipped because the loss or the gradient is not finite.
      num_skipped: updates that were skipped before the first step.
      warn: called with a line for each skipped update.

    Attributes:
      num_skipped: updates that were skipped up to the last report.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        stores: Sequence[LatentStore],
        spec: ModelSpec,
        latent: LatentSpec,
        *,
        peak_flops: float = 0.0,
        scale: LossScale | None = None,
        most_skipped: int = 0,
        num_skipped: int = 0,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ranks, self._device, self._stores, self._scale = ranks, device, stores, scale
        self._most_skipped = most_skipped
        self.num_skipped = num_skipped
        self._warn = warn
        self._spec, self._latent, self._peak = spec, latent, peak_flops
        self._begun: _Interval | None = None
        self.restart()

    def restart(self) -> None:
        """Start again from now, without steps."""
        start = now(self._device)
        self._interval = _Interval(start, start)

    @property
    def reads_at_once(self) -> bool:
        """The device has always done what it was given."""
        return self._device.type == "cpu"

    def next(self, batches: Iterator[Batch]) -> Batch:
        """The next batch, whose step begins now; the time until it is there counts as waiting for data."""
        before = time.perf_counter()
        batch = next(batches)
        self._interval.wait_seconds += time.perf_counter() - before
        self._step_start = now(self._device)
        return batch

    def add(self, batch: Batch, result: StepResult) -> None:
        """Count a step that has been launched."""
        interval, size = self._interval, latent_size_of(batch.bucket, self._latent)
        if self._device.type == "cuda":
            interval.busy.append((self._step_start, now(self._device)))
        interval.results.append(result)
        interval.images += batch.global_size
        interval.tokens += batch.global_size * tokens_per_image(self._spec, size)
        if self._peak:
            interval.flops += batch.global_size * self._flops_per_image(batch, size)

    def _flops_per_image(self, batch: Batch, latent_size: tuple[int, int]) -> float:
        """The mean over the images of this rank, which stands for all ranks."""
        if self._spec.texts:
            return train_flops(self._spec, latent_size, self._spec.joined_tokens)
        lengths = batch.text.lengths if batch.text else ()
        return mean_train_flops(self._spec, latent_size, lengths or (1,))  # this rank may have no image

    def flush(self, *, due: bool, at_once: bool) -> list[StepReport]:
        """Read the report that was due before; if one is due now, begin to copy its figures. A collective call.

        Args:
          at_once: wait for the report that is due now too.
        Raises: RunError: a loss or a gradient is not finite, naming the records; or the loss scale is too small.
        """
        reports = self._read()
        if due and self._interval.results:
            self._begin()
            if at_once or self.reads_at_once:
                reports += self._read()
        return reports

    def last(self) -> list[StepReport]:
        """The report that was due before, after an error of this rank; none if it is not finite, or if other ranks may
        never do what it would wait for."""
        alone = self._ranks.world_size == 1
        return self._read(checks=False) if self._begun and (alone or self._begun.end.query()) else []

    def _begin(self) -> None:
        """Copy the figures to the host without waiting for the device."""
        interval, results = self._interval, self._interval.results
        terms = torch.stack([torch.stack([one.loss, *one.terms.values()]) for one in results], dim=1)
        shares = torch.cat([one.time_shares for one in results])
        image_losses = torch.cat([one.losses for one in results])
        bands = band_sums(shares, image_losses, image_losses.isfinite())
        if self._ranks.world_size > 1:
            dist.all_reduce(terms)
            dist.all_reduce(bands)
        norms, skipped = (torch.stack([getattr(one, name) for one in results]) for name in ("grad_norm", "skipped"))
        interval.scale = self._scale.value() if self._scale else None  # waits for the device
        interval.memory_gib = peak_memory_gib(self._device)
        interval.figures = tuple(one.to("cpu", non_blocking=True) for one in (terms, norms, skipped, bands))
        interval.end = now(self._device)
        self._begun = interval
        self.restart()

    def _read(self, *, checks: bool = True) -> list[StepReport]:
        interval, self._begun = self._begun, None
        if interval is None:
            return []
        interval.end.synchronize()
        terms, norms, skipped, bands = interval.figures
        losses, last = terms[0], interval.results[-1]
        bad = ~losses.isfinite() | ((skipped != 0) & (self._scale is None))
        if bad.any():
            if not checks:
                return []
            pairs = zip(interval.results, bad.tolist(), strict=True)
            self._skip([result for result, is_bad in pairs if is_bad], skipped[bad])
        good = ~bad
        if checks and interval.scale is not None and interval.scale < SMALLEST_SCALE:
            raise RunError(
                f"step {last.step}: the loss scale of fp16 has shrunk to {interval.scale:g}, and gradients still "
                "overflow. Train with --set run.precision=bf16, or a lower optimizer.lr."
            )
        seconds, num_skipped = seconds_between(interval.start, interval.end), int(skipped.sum().item())
        busy = sum(seconds_between(start, end) for start, end in interval.busy)
        report = StepReport(
            step=last.step,
            num_images=last.num_images,
            epoch=last.epoch,
            loss=losses[good].mean().item() if good.any() else None,
            grad_norm=norms[skipped == 0].mean().item() if num_skipped < len(norms) else None,
            learning_rate=last.learning_rate,
            seconds_per_step=seconds / len(interval.results),
            images_per_second=interval.images / seconds,
            tokens_per_second=interval.tokens / seconds,
            mfu=interval.flops / (self._peak * seconds) if self._peak else None,
            data_wait_share=min(1.0, interval.wait_seconds / seconds),
            gpu_busy_share=min(1.0, busy / seconds) if interval.busy else None,
            memory_gib=interval.memory_gib,
            skipped_steps=num_skipped,
            loss_scale=interval.scale,
            loss_by_time=band_means(bands),
            loss_terms=dict(zip(last.terms, terms[1:, good].mean(1).tolist(), strict=True)) if good.any() else {},
            held_out=None,
        )
        return [report]

    def _skip(self, results: Sequence[StepResult], skipped: Tensor) -> None:
        """Count steps whose update was skipped, and warn of each; alike on all ranks.

        Args:
          results: of the steps that are not finite.
          skipped: (len(results),) 1 where the update was skipped.
        Raises: RunError: more were skipped than may be, or one was not.
        """
        for result, is_skipped in zip(results, skipped.tolist(), strict=True):
            problem = self._problem(result)
            if not is_skipped or self.num_skipped >= self._most_skipped:
                self._raise_not_finite(problem)
            self.num_skipped += 1
            if self._ranks.is_first:
                self._warn(
                    f"{problem}: its update was skipped, {self.num_skipped} of at most {self._most_skipped} "
                    "(run.skip_nonfinite)"
                )

    def _problem(self, result: StepResult) -> str:
        """What is not finite in a step, with its records; a collective call."""
        records = result.records[~result.losses.isfinite()].tolist()
        rank_keys = all_gather(self._ranks, [self._stores[result.store].record_at(record).key for record in records])
        keys = [key for of_rank in rank_keys for key in of_rank]
        names = ", ".join(f"'{key}'" for key in keys[:MOST_NAMED])
        more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
        what = f"the loss of records {names}{more} is" if keys else "the losses are finite, but the gradient is"
        return f"step {result.step}: {what} not finite"

    def _raise_not_finite(self, problem: str) -> NoReturn:
        """Raise the same RunError on every rank."""
        before = ""
        if self._most_skipped:
            before = f" {self.num_skipped} updates were skipped before, run.skip_nonfinite is {self._most_skipped}."
        raise RunError(
            f"{problem}. Nothing was saved since the last checkpoint.{before} Look at the records with 'leandit "
            "inspect STORE KEY'; train with a lower optimizer.lr or with run.grad_clip, in another --run, or from the "
            "last checkpoint with --continue-with."
        )


def band_sums(share: Tensor, losses: Tensor, counted: Tensor | None = None) -> Tensor:
    """Sums of losses and counts in equal bands of the time; add them over microbatches, steps and ranks.

    Every image is compared with every band, so that shapes and order of the sum are fixed, which atomic additions on a
    GPU are not. No matrix product, because TF32 would round it.

    Args:
      share: (B,) float32 position between data, 0, and noise, 1 (``losses.time_share``).
      losses: (B,).
      counted: (B,) bool, whether an image counts; None: all do.
    Returns: (2, NUM_BANDS) float32 on their device: sums of losses, counts. A loss that is not finite affects
      only its band.
    """
    band = (share.float() * NUM_BANDS).long().clamp(0, NUM_BANDS - 1)
    inside = band[:, None] == torch.arange(NUM_BANDS, device=share.device)  # (B, NUM_BANDS)
    if counted is not None:
        inside &= counted[:, None]
    sums = torch.where(inside, losses.detach().float()[:, None], 0.0).sum(0)
    return torch.stack([sums, inside.sum(0).float()])


def band_means(sums: Tensor) -> list[float | None]:
    """Mean loss of each band, None for a band without images; waits for the device."""
    totals, counts = sums.tolist()
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]


def peak_flops(device: torch.device, precision: str) -> float:
    """Peak of a device in FLOP/s, in the precision it computes in; 0: a CPU, or an unknown GPU.

    Args:
      precision: of the recipe.
    """
    gpu = gpu_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return gpu.peak_flops(computed_in(precision, device)) if gpu else 0.0


def computed_in(precision: str, device: torch.device) -> str:
    """The precision that a recipe's means on a device: without bf16 it computes in float32 instead."""
    return "fp32" if precision == "bf16" and autocast_dtype(precision, device) is None else precision


def peak_memory_gib(device: torch.device) -> float:
    """Peak of torch's allocations on the GPU since the last call; on a CPU, the process's peak so far."""
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak / 2**30
