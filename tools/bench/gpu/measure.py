"""What each cell of ``leandit bench gpu`` measures: a function for each table, on the benchmarks of their own commands.

Args of all: the device, a folder for stores and models, and those of the cell. They return JSON values; "skipped" has
the reason of a cell that cannot be measured here.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch

from ....datasets.disk.files import files_below
from ....precompute.encoders.model_files import local_folder
from ....train import loop
from ....train.config import load
from ....train.metrics.flops import latent_size_of
from ....train.parallel.stop import StopRequest
from ....train.step.attention_kernels import attention_calls, kernel_seconds
from ....train.weights.folders import CHECKPOINT
from ...plan.workload import TrainingWorkload, workload_at_resolution
from ...terminal.progress import ProgressLine
from ..encode import caching as bench_caching
from ..encode import precompute as bench_precompute
from ..encode.inputs import text_model
from ..encode.rates import PrecomputeRequest
from ..harness.scratch import fresh_folder
from ..training import planner as bench_planner
from ..training import train as bench_train
from ..training.steps import StepRequest
from .pictures import draw_pictures

Result = dict[str, Any]
PICTURES = 64  # drawn for a cell; a larger sample repeats them
TOKENIZER = "shipped:t5"  # a token for each of its words


def workload(recipe: str, side_px: int, settings: list[str]) -> TrainingWorkload:
    """The workload of a recipe on square pictures."""
    return workload_at_resolution(load(recipe, settings), side_px)


def train(device: torch.device, scratch: Path, *, rounds: int, steps: int, **how: Any) -> Result:
    """``leandit train`` on a store of noise, beside its step on one batch."""
    with ProgressLine() as progress:
        return bench_train.run(StepRequest(workload(**how), device, rounds, steps, "store"), progress)


def beside(device: torch.device, scratch: Path, *, rounds: int, steps: int, **how: Any) -> Result:
    """Our step beside that of the usual loop around diffusers' model."""
    return _beside(StepRequest(workload(**how), device, rounds, steps, "synthetic"))


def fast_dit(
    device: torch.device, scratch: Path, *, rounds: int, steps: int, checkout: str | None = None, **how: Any
) -> Result:
    """Our step beside that of fast-DiT's own loop, which is not part of leandit."""
    if checkout is None:
        how_to = "clone github.com/chuanyangjin/fast-DiT, and give --fast-dit DIR and --again"
        return {"skipped": f"fast-DiT is not part of leandit: {how_to}"}
    request = StepRequest(workload(**how), device, rounds, steps, "synthetic", fast_dit=Path(checkout))
    try:
        return _beside(request)
    except ModuleNotFoundError as error:
        return {"skipped": f"fast-DiT needs the package '{error.name}': install it, and give --again"}


def planner(device: torch.device, scratch: Path, *, case: dict[str, Any]) -> Result:
    """The predicted and the measured peak of a configuration, in bytes."""
    how: dict[str, Any] = case | {"changes": tuple(case["changes"])}
    one = bench_planner.Case(**how)
    with ProgressLine() as progress:
        (row,) = bench_planner.run(device, [], (one,), progress)["rows"]
    return row


def precompute(
    device: torch.device, scratch: Path, *, side_px: int, records: int, batch: int, vae: str, **how: Any
) -> Result:
    """A precompute of pictures beside its bare encoder and the loops of fast-DiT and PixArt."""
    source = fresh_folder(scratch, "pictures")
    draw_pictures(source, min(records, PICTURES), side_px)
    overrides = [f"images.resolution={side_px}", f"vae.batch_size={batch}", f"vae.dtype={_dtype(device)}"]
    return _precompute(device, scratch, source, vae=vae, records=records, overrides=overrides, **how)


def captions(device: torch.device, scratch: Path, *, text: str, records: int, **how: Any) -> Result:
    """The captions of a precompute beside PixArt's loop. Its pictures are small, and their rates are not shown."""
    source = fresh_folder(scratch, "captions")
    draw_pictures(source, records, 32)
    model = text_model(text, local_folder(TOKENIZER), scratch, device)
    overrides = ["images.resolution=32", "vae.batch_size=64", f"vae.dtype={_dtype(device)}"]
    small = {"vae": "shipped:vae", "records": records, "overrides": overrides}
    return _precompute(device, scratch, source, text=model, **small, **how)


def caching(
    device: torch.device, scratch: Path, *, recipe: str, side_px: int, settings: list[str], text: str | None, **how: Any
) -> Result:
    """Training on a store beside training that encodes every batch again."""
    model = text and text_model(text, local_folder(TOKENIZER), scratch, device)
    places = {"tokenizer": None, "scratch": scratch, "device": device}
    request = bench_caching.CachingRequest(load(recipe, settings), side_px, text=model, **places, **how)
    with ProgressLine() as progress:
        return bench_caching.run(request, progress)


def attention(device: torch.device, scratch: Path, *, images: int, **how: Any) -> Result:
    """Seconds of all attention of a forward and backward, by kernel."""
    if device.type != "cuda":
        return {"skipped": "attention has kernels to choose from on a GPU alone"}
    work = workload(**how)
    calls = attention_calls(work.spec, latent_size_of(work.largest_bucket, work.store.latent), work.tokens)
    return {"images": images, "seconds": kernel_seconds(calls, images, torch.bfloat16, device)}


def checkpoint(device: torch.device, scratch: Path, *, steps: int, every: int, **how: Any) -> Result:
    """How long a step takes, and how much longer the one after each checkpoint, while it is written."""
    work, folder = workload(**how), fresh_folder(scratch, "checkpoint")
    store, run, seconds = bench_train.noise_store(work, folder / "store"), folder / "run", dict[int, float]()
    changed = {"steps": steps, "log_every": 1, "checkpoint_every": every}
    recipe = work.recipe.model_copy(update={"run": work.recipe.run.model_copy(update=changed)})
    loop.train(
        recipe,
        store_path=store,
        run=run,
        device=device,
        report=lambda figures: seconds.update({figures.step: figures.seconds_per_step}),
        stop=StopRequest(),
        warn=print,
    )
    stalled = [step for step in seconds if step > every and step % every == 1]
    usual = median(seconds[step] for step in seconds if step > 2 and step not in stalled)
    sizes = [sum(path.stat().st_size for path in files_below(one)) for one in run.glob(f"{CHECKPOINT}*")]
    return {"bytes": max(sizes), "step_seconds": usual, "stalls": [seconds[step] - usual for step in stalled]}


def _beside(request: StepRequest) -> Result:
    with ProgressLine() as progress:
        return bench_train.run(request, progress)


def _precompute(device: torch.device, scratch: Path, source: Path, **how: Any) -> Result:
    request = PrecomputeRequest(str(source), scratch, device, quick=True, **how)
    with ProgressLine() as progress:
        return bench_precompute.run(request, progress)


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"
