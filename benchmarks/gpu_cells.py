"""What ``gpu.py`` measures, the most valuable first: each cell is a call of a function of this folder in a process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from training import noise_store

from leandit.tools.plan.workload import workload_at_resolution
from leandit.train import loop
from leandit.train.config import load
from leandit.train.metrics.flops import latent_size_of
from leandit.train.parallel.stop import StopRequest
from leandit.train.step.attention_kernels import attention_calls, kernel_seconds
from leandit.train.weights.folders import CHECKPOINT

TRAIN, BESIDE, FAST_DIT, PLANNER, ENCODE, CAPTIONS, CACHING, ATTENTION, CHECKPOINTS = (
    "train",
    "beside",
    "fast_dit",
    "planner",
    "precompute",
    "captions",
    "caching",
    "attention",
    "checkpoint",
)
FUNCTIONS = {
    TRAIN: ("training", "measure_store"),
    BESIDE: ("training", "measure_beside"),
    FAST_DIT: ("training", "measure_beside"),
    PLANNER: ("planner", "measure_planner"),
    ENCODE: ("encode", "measure_precompute"),
    CAPTIONS: ("encode", "measure_captions"),
    CACHING: ("encode", "measure_caching"),
    ATTENTION: ("gpu_cells", "measure_attention"),
    CHECKPOINTS: ("gpu_cells", "measure_checkpoint"),
}
NEEDS_SCRATCH = (ENCODE, CAPTIONS, CACHING)
XL, XL_512, B, PIXART = "DiT-XL/2, 256 px", "DiT-XL/2, 512 px", "DiT-B/2, 256 px", "PixArt-Sigma, 512 px"
SANA, SD3 = "Sana 1.6B, 1024 px", "SD3.5 Medium, 512 px"
ADAMW = "optimizer.name=adamw"  # beside the usual loops, which have no other


class Cell(NamedTuple):
    """One measurement, in a process of its own.

    Args:
      table: that it fills, a key of ``FUNCTIONS``.
      row: of the table.
      limit_seconds: after which its process is killed; about twice what is expected.
      arguments: of the function, without the device.
      goal: that the table shows.
    """

    table: str
    row: str
    limit_seconds: float
    arguments: dict[str, Any]
    goal: str = ""

    @property
    def name(self) -> str:
        """Unique, for people and for the results."""
        return f"{self.table}: {self.row}"


def _recipe(name: str, side_px: int, batch: int, microbatch: int) -> dict[str, Any]:
    sizes = [f"run.global_batch={batch}", f"run.microbatch={microbatch}"]
    return {"recipe": name, "side_px": side_px, "settings": sizes}


# Each microbatch fits a GPU of 80 GB.
RECIPES = {
    XL: _recipe("dit-xl-2-256", 256, 256, 64),
    XL_512: _recipe("dit-xl-2-512", 512, 64, 16),
    B: _recipe("dit-b-2-256", 256, 256, 128),
    PIXART: _recipe("pixart-sigma-512", 512, 64, 32),
    SANA: _recipe("sana-1600m-1024", 1024, 32, 16),
    SD3: _recipe("sd3.5-medium-512", 512, 32, 8),
}


def _train(row: str, limit: float, goal: str = "", steps: int = 20) -> Cell:
    return Cell(TRAIN, row, limit, RECIPES[row] | {"rounds": 2, "steps": steps}, goal)


def _beside(row: str, limit: float, *changes: str, goal: str = "", steps: int = 4) -> Cell:
    settings = {"settings": [*RECIPES[row]["settings"], *changes]}
    return Cell(BESIDE, row, limit, RECIPES[row] | settings | {"rounds": 3, "steps": steps}, goal)


def _planner(recipe: str, side_px: int, microbatch: int, count: int = 1, *changes: str) -> Cell:
    case = {"recipe": recipe, "side_px": side_px, "microbatch": microbatch, "count": count, "changes": list(changes)}
    row = " ".join([f"{recipe}, {count} x {microbatch} images", *changes])
    return Cell(PLANNER, row, 120, {"case": case}, "0.97 to 1.05")


def _encode(side_px: int, limit: float) -> Cell:
    sizes = {"side_px": side_px, "records": 2**20 // side_px, "batch": 8192 // side_px}
    return Cell(ENCODE, f"{side_px} px", limit, sizes | {"vae": "random:sd", "rounds": 2, "seconds": 5.0}, "0.95")


def _caching(row: str, limit: float, text: str | None = None) -> Cell:
    arguments = RECIPES[row] | {"settings": ["run.global_batch=64", *RECIPES[row]["settings"][1:]]}
    return Cell(CACHING, row, limit, arguments | {"vae": "random:sd", "text": text, "rounds": 2, "steps": 5})


def _attention(row: str) -> Cell:
    return Cell(ATTENTION, row, 90, RECIPES[row] | {"images": 32})


REAL = (
    _train(XL, 300, "40 % MFU"),
    _train(XL_512, 300, "38 % MFU"),
    _train(B, 200, "32 % MFU"),
    _beside(XL, 240, goal="1.5x"),
    Cell(FAST_DIT, XL, 300, RECIPES[XL] | {"rounds": 3, "steps": 4}, "2.5x"),
    _train(PIXART, 300, "38 % MFU"),
    _planner("dit-xl-2-256", 256, 64),
    _encode(256, 270),
    _caching(B, 200),
    _attention(XL),
    _attention(XL_512),
    _attention(PIXART),
    Cell(CHECKPOINTS, XL, 240, RECIPES[XL] | {"steps": 12, "every": 4}),
    Cell(CAPTIONS, "T5-XXL", 420, {"text": "random:t5-xxl", "records": 1024, "rounds": 2, "seconds": 5.0}, "4x"),
    _beside(PIXART, 300, ADAMW, steps=2),
    _caching(PIXART, 300, "random:t5-xxl"),
    _planner("dit-s-2-256", 256, 256),
    _planner("dit-b-2-256", 256, 128),
    _planner("dit-b-2-256", 256, 128, 2),
    _planner("dit-xl-2-256", 256, 64, 2, "run.activation_checkpointing=blocks"),
    _planner("dit-xl-2-512", 512, 16),
    _planner("pixart-sigma-512", 512, 16),
    _encode(512, 270),
    _train(SD3, 300),
    _train(SANA, 300),
    _beside(SANA, 300, ADAMW, steps=2),
    _beside(B, 200, goal="1.5x"),
    _caching(XL, 240),
    _encode(1024, 300),
    _beside(SD3, 300, ADAMW, steps=2),  # two models of 2.2 B parameters, with all that trains them: 100 GB
)

# One of each kind in seconds on a CPU, to see that all of it works: no figure of it means anything.
_PLAIN = ["run.global_batch=2", "run.precision=fp32", "run.compile=false"]
_DIT = {"recipe": "dit-s-2-256", "side_px": 64, "settings": ["model.name=DiT-Ti/4", *_PLAIN]}
_TEXT = {"recipe": "pixart-sigma-512", "side_px": 64, "settings": ["model.name=pixart-tiny", ADAMW, *_PLAIN]}
_FAST_DIT = _DIT | {"settings": ["model.name=DiT-S/8", *_PLAIN]}  # it has no smaller one
_CASE = {"recipe": "dit-s-2-256", "side_px": 64, "microbatch": 2, "count": 1, "changes": ["model.name=DiT-Ti/4"]}
_ONCE, _SHORT = {"rounds": 1, "steps": 1}, {"rounds": 1, "seconds": 0.01}
TINY = (
    Cell(TRAIN, "DiT-Ti/4, 64 px", 120, _DIT | _ONCE),
    Cell(BESIDE, "DiT-Ti/4, 64 px", 120, _DIT | _ONCE),
    Cell(BESIDE, "PixArt, 64 px", 120, _TEXT | _ONCE),
    Cell(FAST_DIT, "DiT-S/8, 64 px", 120, _FAST_DIT | _ONCE),
    Cell(PLANNER, "DiT-Ti/4, 1 x 2 images", 120, {"case": _CASE}),
    Cell(ENCODE, "32 px", 120, {"side_px": 32, "records": 4, "batch": 2, "vae": "shipped:vae"} | _SHORT),
    Cell(CACHING, "DiT-Ti/4, 64 px", 120, _DIT | {"vae": "shipped:vae", "text": None} | _ONCE),
    Cell(ATTENTION, "DiT-Ti/4, 64 px", 120, _DIT | {"images": 2}),
    Cell(CHECKPOINTS, "DiT-Ti/4, 64 px", 120, _DIT | {"steps": 6, "every": 2}),
    Cell(CAPTIONS, "T5", 120, {"text": "shipped:t5", "records": 4} | _SHORT),
)


def measure_attention(device: str, recipe: str, side_px: int, settings: list[str], images: int) -> dict[str, Any]:
    """Seconds of all attention of a forward and backward, by kernel; None for one that does not support it."""
    if torch.device(device).type != "cuda":
        return {"skipped": "attention has kernels to choose from on a GPU alone"}
    work = workload_at_resolution(load(recipe, settings), side_px)
    calls = attention_calls(work.spec, latent_size_of(work.largest_bucket, work.store.latent), work.tokens)
    return {"seconds": kernel_seconds(calls, images, torch.bfloat16, torch.device(device))}


def measure_checkpoint(
    device: str, recipe: str, side_px: int, settings: list[str], steps: int, every: int
) -> dict[str, Any]:
    """Seconds of a step, how many more the step after each checkpoint takes, and bytes of a checkpoint."""
    work, seconds = workload_at_resolution(load(recipe, settings), side_px), dict[int, float]()
    changed = {"steps": steps, "log_every": 1, "checkpoint_every": every}
    train_recipe = work.recipe.model_copy(update={"run": work.recipe.run.model_copy(update=changed)})
    with tempfile.TemporaryDirectory(prefix="leandit-benchmark-") as folder:
        run = Path(folder) / "run"
        loop.train(
            train_recipe,
            store_path=noise_store(work, Path(folder) / "store"),
            run=run,
            device=torch.device(device),
            report=lambda figures: seconds.update({figures.step: figures.seconds_per_step}),
            stop=StopRequest(),
        )
        checkpoints = run.glob(f"{CHECKPOINT}*")
        sizes = [sum(path.stat().st_size for path in one.rglob("*") if path.is_file()) for one in checkpoints]
    after = [step for step in seconds if step > every and step % every == 1]
    usual = median(seconds[step] for step in seconds if step > 2 and step not in after)
    return {"bytes": max(sizes), "step_seconds": usual, "stalls": [seconds[step] - usual for step in after]}
