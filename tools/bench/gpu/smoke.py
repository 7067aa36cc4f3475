"""The first cell of ``leandit bench gpu``: what has to work before a figure means anything, in about a minute."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ....datasets.errors import LeanditError
from ....datasets.store import LatentStore
from ....train import loop
from ....train.metrics.window import StepReport
from ....train.parallel.ranks import ALONE
from ....train.parallel.stop import StopRequest
from ....train.run.data import build_loader
from ....train.step.train_step import train_step
from ...synthetic.batches import synthetic_batch, synthetic_learner
from ..harness.scratch import fresh_folder
from ..training.train import noise_store
from .measure import workload

RECIPE, STEPS, BATCHES = "dit-s-2-256", 4, 6
CPU = torch.device("cpu")
# Of torch, a driver, a compiler, the disk, or a check: they are the result. Any other is that of the whole cell.
FAILURES = (AssertionError, LeanditError, OSError, RuntimeError, TypeError, ValueError)
# Largest difference of a loss from that of float32, as a share of it.
CLOSE = {"bf16": 0.02, "fp16": 0.02, "tf32": 0.01, "compiled": 0.001, "resumed": 0.001}


def smoke(device: torch.device, scratch: Path, *, side_px: int, settings: list[str]) -> dict[str, Any]:
    """Every check by its name: "works" with a note, or how it failed; the next one runs in any case."""
    one = _Smoke(device, fresh_folder(scratch, "smoke"), side_px, settings)
    checks: dict[str, Callable[[], str]] = {
        "batches copied from pinned memory beside the computation": one.copies,
        **{f"steps in {name}": lambda name=name: one.precision(name) for name in ("bf16", "fp16", "tf32")},
        "compiled steps": one.compiled,
        "a run that is stopped and resumed": one.resumed,
    }
    said = {}
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            said[name] = f"works: {check()}, {time.perf_counter() - start:.1f} s"
        except FAILURES as error:
            traceback.print_exc()
            said[name] = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
    return {"checks": said}


class _Smoke:
    """The checks; each returns a note, or raises."""

    def __init__(self, device: torch.device, folder: Path, side_px: int, settings: list[str]) -> None:
        self._device, self._folder, self._side_px, self._settings = device, folder, side_px, settings
        self._float32: list[float] | None = None

    def copies(self) -> str:
        work = workload(RECIPE, self._side_px, [*self._settings, "conditioning.kind=caption"])
        store = LatentStore(noise_store(work, self._folder / "captions"))
        loaders = [build_loader(work.recipe, [store], work.spec, one, print, ALONE) for one in (self._device, CPU)]
        for here, there in zip(*(islice(loop.endless(loader), BATCHES) for loader in loaders), strict=True):
            torch.ones(4096, 1024, device=self._device).cumsum(0)  # the device is busy while the next batch comes
            assert torch.equal(here.stored.cpu(), there.stored), "latents differ from those on the CPU"
            assert torch.equal(here.labels.cpu(), there.labels), "labels differ from those on the CPU"
            assert torch.equal(_captions(here).cpu(), _captions(there)), "captions differ from those on the CPU"
        return f"{BATCHES} batches have the bits of a CPU's"

    def precision(self, name: str) -> str:
        return _near(self._steps(name), self._reference(), CLOSE[name])

    def compiled(self) -> str:
        if self._device.type != "cuda":
            return "not compiled on a CPU"
        return _near(self._steps("fp32", compiled=True), self._reference(), CLOSE["compiled"])

    def resumed(self) -> str:
        whole = self._run("whole", stop_after=STEPS)
        first = self._run("resumed", stop_after=STEPS // 2)
        assert len(first) == STEPS // 2, f"{len(first)} steps before the stop"
        return _near(first + self._run("resumed", stop_after=STEPS), whole, CLOSE["resumed"])

    def _reference(self) -> list[float]:
        self._float32 = self._float32 or self._steps("fp32")
        return self._float32

    def _steps(self, precision: str, *, compiled: bool = False) -> list[float]:
        """Losses of some steps on one batch; the noise is the same in each precision."""
        work = workload(RECIPE, self._side_px, [*self._settings, f"run.precision={precision}"])
        learner = synthetic_learner(
            work.recipe, work.spec, work.tokens, self._device, store=work.store, compiled=compiled
        )
        torch.manual_seed(0)
        size = work.recipe.run.global_batch
        batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, CPU).to(self._device)
        return [train_step(learner, batch).loss.item() for _ in range(STEPS)]

    def _run(self, name: str, *, stop_after: int) -> list[float]:
        """Losses of ``leandit train``, which resumes the run of this name."""
        settings = [f"run.steps={STEPS}", "run.log_every=1", "run.compile=false"]
        work = workload(RECIPE, self._side_px, [*self._settings, *settings])
        store, stop, losses = noise_store(work, self._folder / "labels"), StopRequest(), []

        def report(figures: StepReport) -> None:
            losses.append(figures.loss)
            if figures.step == stop_after:
                stop.set()

        run = self._folder / name
        loop.train(work.recipe, store_path=store, run=run, device=self._device, report=report, stop=stop, warn=print)
        return losses


def _captions(batch: Any) -> torch.Tensor:
    return next(iter(batch.texts.values())).tokens


def _near(found: Sequence[float], wanted: Sequence[float], share: float) -> str:
    """The largest difference of losses, as a share.

    Raises: AssertionError: it is too large, or a loss is missing or not finite.
    """
    assert len(found) == len(wanted), f"{len(found)} losses, needed {len(wanted)}"
    assert all(map(math.isfinite, found)), f"losses {found}"
    largest = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    assert largest <= share, f"losses {found} differ from {wanted} by {largest:.2g}"
    return f"losses within {largest:.1g}"
