"""Figures of a run: what its steps did, summed on the device until a report reads them, one step late."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.errors import RunError
from ...datasets.format.schema import LatentSpec
from ...datasets.store import LatentStore
from ..models.spec import ModelSpec
from ..optim.loss_scale import SMALLEST_SCALE, LossScale
from ..parallel.ranks import Ranks, all_gather
from .device import Event, has_passed, now, peak_memory_gib, seconds_between, wait_for
from .flops import latent_size_of, tokens_per_image, train_flops
from .held_out import HeldOutLoss
from .loss_bands import band_means, band_sums

MOST_NAMED = 5  # records in a message


@dataclass(frozen=True)
class StepReport:
    """The figures of some steps.

    Args:
      step: last of them.
      num_images: seen since the start of the run.
      epoch: of the last batch.
      loss, grad_norm: means over the steps; the loss without added terms, the norm before clipping.
      learning_rate: of the last step.
      seconds_per_step, images_per_second: over the steps, of all ranks together.
      tokens_per_second: image tokens, of all ranks together.
      mfu: model FLOPs utilisation of all GPUs, 0 to 1 (``flops.py``); None on a CPU and on a GPU unknown to
        ``gpus.py``.
      data_wait_share: share of the time, 0 to 1, spent waiting for batches.
      gpu_busy_share: share of the time, 0 to 1, that this rank's GPU spent in steps; None on a CPU.
      memory_gib: peak of torch's allocations on this rank's GPU over the steps; on a CPU, the process's peak so far.
      skipped_steps: steps without an update, because gradients overflowed (float16).
      loss_scale: of the last step, or None if losses are not scaled.
      loss_by_time: mean loss in each of ``NUM_BANDS`` equal bands from data to noise; None for a band without images.
      loss_terms: means of the weighted terms that the recipe adds to the loss.
      held_out: loss of the held-out records, if the last step ended with an evaluation.
    """

    step: int
    num_images: int
    epoch: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    seconds_per_step: float
    images_per_second: float
    tokens_per_second: float
    mfu: float | None
    data_wait_share: float
    gpu_busy_share: float | None
    memory_gib: float
    skipped_steps: int
    loss_scale: float | None
    loss_by_time: list[float | None]
    loss_terms: dict[str, float]
    held_out: HeldOutLoss | None = None


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
    end: Event = 0.0
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
    """Adds up steps; reports are read while the device makes the next step. All ranks call it alike.

    Args:
      ranks: which report together.
      device: of this rank.
      stores: of the batches, to name records.
      spec, latent: of the model and the store, to count FLOPs and tokens.
      peak_flops: of all devices together, in FLOP/s; 0 if unknown.
      scale: of the loss, with float16: a gradient that is not finite is no error, but shrinks it.
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
    ) -> None:
        self._ranks, self._device, self._stores, self._scale = ranks, device, stores, scale
        self._spec, self._latent, self._peak = spec, latent, peak_flops
        self._begun: _Interval | None = None
        self.restart()

    def restart(self) -> None:
        """Start again from now, without steps."""
        self._interval = _Interval(now(self._device))

    @property
    def is_empty(self) -> bool:
        """No step since the last report."""
        return not self._interval.results

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
        if self._peak:  # all images as if with captions as long as this rank's padded ones
            captions = batch.captions if self._spec.takes_text else None
            length = self._spec.joined_tokens or (0 if captions is None else captions.shape[1])
            interval.flops += batch.global_size * train_flops(self._spec, size, length)

    def flush(self, *, due: bool, at_once: bool) -> list[StepReport]:
        """Read the report that was due before; if one is due now, begin to copy its figures. A collective call.

        Args:
          at_once: wait for the report that is due now too.
        Raises: RunError: a loss or a gradient is not finite, naming the records; or the loss scale is too small.
        """
        reports = self._read()
        if due and not self.is_empty:
            self._begin()
            if at_once or self.reads_at_once:
                reports += self._read()
        return reports

    def last(self) -> list[StepReport]:
        """The report that was due before, after an error of this rank; none if it is not finite, or if other ranks may
        never do what it would wait for."""
        alone = self._ranks.world_size == 1
        return self._read(checks=False) if self._begun and (alone or has_passed(self._begun.end)) else []

    def _begin(self) -> None:
        """Copy the figures to the host without waiting for the device."""
        interval = self._interval
        results = interval.results
        losses, norms, skipped = (
            torch.stack(column)
            for column in zip(*((one.loss, one.grad_norm, one.skipped) for one in results), strict=True)
        )
        shares = torch.cat([one.time_shares for one in results])
        bands = band_sums(shares, torch.cat([one.losses for one in results]))
        terms = torch.stack([losses, *(torch.stack([one.terms[name] for one in results]) for name in results[0].terms)])
        if self._ranks.world_size > 1:
            dist.all_reduce(terms)
            dist.all_reduce(bands)
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
        wait_for(interval.end)
        terms, norms, skipped, bands = interval.figures
        losses, last = terms[0], interval.results[-1]
        bad = ~losses.isfinite() | ((skipped != 0) & (self._scale is None))
        if bad.any():
            if not checks:
                return []
            self._raise_not_finite(interval.results[bad.tolist().index(True)])
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
            loss=losses.mean().item(),
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
            loss_terms=dict(zip(last.terms, terms[1:].mean(1).tolist(), strict=True)),
        )
        return [report]

    def _raise_not_finite(self, result: StepResult) -> NoReturn:
        """Raise the same RunError on every rank, with the records of the first step that is not finite."""
        records = result.records[~result.losses.isfinite()].tolist()
        rank_keys = all_gather(self._ranks, [self._stores[result.store].record_at(record).key for record in records])
        keys = [key for of_rank in rank_keys for key in of_rank]
        names = ", ".join(f"'{key}'" for key in keys[:MOST_NAMED])
        more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
        what = f"the loss of records {names}{more} is" if keys else "the losses are finite, but the gradient is"
        raise RunError(
            f"step {result.step}: {what} not finite. Nothing was saved since the last "
            "checkpoint. Look at the records with 'leandit inspect STORE KEY'; train with a lower optimizer.lr or with "
            "run.grad_clip, in another --run."
        )
