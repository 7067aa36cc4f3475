"""Figures of a run: what its steps did, summed on the device until a report reads them."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.errors import RunError
from ...datasets.store import LatentStore
from ..optim.loss_scale import SMALLEST_SCALE
from ..parallel.ranks import Ranks, all_gather
from .device import ComputeCounter, Gauges, Moment, busy_share
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
      num_images: of the global batch.
      losses: (B,) of each image of this rank.
      time_shares: (B,) position of each image between data, 0, and noise, 1.
      records: (B,) positions in the records table.
      store: index of the store.
    """

    step: int
    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    skipped: Tensor
    num_images: int
    losses: Tensor
    time_shares: Tensor
    records: Tensor
    store: int


class Begun(NamedTuple):
    """A report whose figures are on their way from the device.

    Args:
      known: figures that the host has.
      losses, norms, skipped: (S,) of its steps; losses of all ranks.
      terms: (N, S) that the recipe adds to the loss, by the names of each result.
      bands: see ``band_sums``.
      start, end: of its steps.
      wait: seconds spent waiting for batches.
      gpu_steps: start and end of each step, on a GPU.
    """

    known: dict[str, Any]
    results: list[StepResult]
    losses: Tensor
    norms: Tensor
    skipped: Tensor
    terms: Tensor
    bands: Tensor
    start: Moment
    end: Moment
    wait: float
    images: int
    compute: ComputeCounter
    gpu_steps: list[tuple[Moment, Moment]]


class Window:
    """Figures since the last report, whose figures come from the device while the next step is launched.

    Args:
      ranks: which report together.
      stores: of the batches, to name records.
      compute: counts FLOPs and tokens of the steps.
      gauges: of this rank's device.
      may_skip: a gradient that is not finite is no error, but shrinks the loss scale (float16).
    """

    def __init__(
        self,
        ranks: Ranks,
        stores: Sequence[LatentStore],
        compute: ComputeCounter,
        gauges: Gauges,
        *,
        may_skip: bool = False,
    ) -> None:
        self._ranks, self._stores, self._may_skip = ranks, stores, may_skip
        self._compute, self._gauges = compute, gauges
        self._begun: Begun | None = None
        self.reset()

    def reset(self) -> None:
        """Start again from now, without steps."""
        self._start, self._wait, self._images = Moment(self._gauges.device), 0.0, 0
        self._results: list[StepResult] = []
        self._compute.reset()

    @property
    def is_empty(self) -> bool:
        """No step since the last report."""
        return not self._results

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start

    def step(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Count the compute of a batch, and the device time of the block."""
        self._compute.add(batch)
        return self._gauges.step()

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self._results.append(result)
        self._images += result.num_images

    def begin_report(
        self, *, step: int, num_images: int, epoch: int, learning_rate: float, scale: float | None
    ) -> None:
        """Begin to read the figures, without waiting for the device, and reset them; a collective call.

        Args:
          scale: of the loss, with float16.
        """
        columns = [(result.loss, result.grad_norm, result.skipped) for result in self._results]
        losses, norms, skipped = (torch.stack(column) for column in zip(*columns, strict=True))
        shares = torch.cat([result.time_shares for result in self._results])
        bands = band_sums(shares, torch.cat([result.losses for result in self._results]))
        names = list(self._results[0].terms)
        terms = torch.stack([losses, *(torch.stack([one.terms[name] for one in self._results]) for name in names)])
        if self._ranks.world_size > 1:
            dist.all_reduce(terms)
            dist.all_reduce(bands)
        known = {"step": step, "num_images": num_images, "epoch": epoch, "learning_rate": learning_rate}
        known |= {"loss_scale": scale, "memory_gib": self._gauges.peak_memory_gib()}
        terms, norms, skipped, bands = (one.to("cpu", non_blocking=True) for one in (terms, norms, skipped, bands))
        self._begun = Begun(
            known=known,
            results=self._results,
            losses=terms[0],
            norms=norms,
            skipped=skipped,
            terms=terms[1:],
            bands=bands,
            start=self._start,
            end=Moment(self._gauges.device),
            wait=self._wait,
            images=self._images,
            compute=copy.copy(self._compute),
            gpu_steps=self._gauges.steps(),
        )
        self.reset()

    @property
    def ends_at_once(self) -> bool:
        """The device has always done what it was given."""
        return self._gauges.device.type == "cpu"

    @property
    def can_end(self) -> bool:
        """A report has begun, and to end it waits for nothing."""
        return self._begun is not None and self._begun.end.has_passed

    def end_report(self, *, alone: bool = False) -> StepReport | None:
        """The report that has begun, else None; a collective call where it raises.

        Args:
          alone: other ranks may not call it, so it raises nothing: None for figures that are not finite.
        Raises: RunError: a loss or a gradient is not finite, naming the records; or the loss scale is too small.
        """
        it, self._begun = self._begun, None
        if it is None:
            return None
        it.end.wait()
        seconds, good = it.end.since(it.start), it.skipped == 0
        loss, num_skipped = it.losses.mean().item(), int(it.skipped.sum().item())
        if not math.isfinite(loss) or (num_skipped and not self._may_skip):
            if alone:
                return None
            self._raise_not_finite(it)
        scale = it.known["loss_scale"]
        if scale is not None and scale < SMALLEST_SCALE and not alone:
            raise RunError(
                f"step {it.known['step']}: the loss scale of fp16 has shrunk to {scale:g}, and gradients still "
                "overflow. Train with --set run.precision=bf16, or a lower optimizer.lr."
            )
        return StepReport(
            **it.known,
            loss=loss,
            grad_norm=it.norms[good].mean().item() if num_skipped < len(it.norms) else None,
            seconds_per_step=seconds / len(it.results),
            images_per_second=it.images / seconds,
            tokens_per_second=it.compute.tokens_per_second(seconds),
            mfu=it.compute.mfu(seconds),
            data_wait_share=min(1.0, it.wait / seconds),
            gpu_busy_share=busy_share(it.gpu_steps, seconds),
            skipped_steps=num_skipped,
            loss_by_time=band_means(it.bands),
            loss_terms=dict(zip(it.results[0].terms, it.terms.mean(1).tolist(), strict=True)),
        )

    def _raise_not_finite(self, it: Begun) -> NoReturn:
        """Raise the same RunError on every rank: the first step that is not finite, and its records."""
        bad_update = (it.skipped != 0) & (not self._may_skip)
        result = it.results[(~it.losses.isfinite() | bad_update).tolist().index(True)]
        records = result.records[~result.losses.isfinite()].tolist()
        rank_keys = all_gather(self._ranks, [self._stores[result.store].record_at(record).key for record in records])
        keys = [key for of_rank in rank_keys for key in of_rank]
        names = ", ".join(f"'{key}'" for key in keys[:MOST_NAMED])
        more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
        what = f"the loss of records {names}{more} is" if keys else "the losses are finite, but the gradient is"
        raise RunError(
            f"step {result.step}: {what} not finite. The update was skipped, and nothing was saved since the last "
            "checkpoint. Look at the records with 'leandit inspect STORE KEY'; train with a lower optimizer.lr or with "
            "run.grad_clip, in another --run."
        )
