"""What ``leandit bench gpu`` measures, the most worthy first. Plain values, for a process of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

SMOKE, TRAIN, BESIDE, FAST_DIT, PLANNER, ENCODE, CAPTIONS, CACHING, ATTENTION, CHECKPOINT = (
    "smoke",
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
XL, XL_512, B, PIXART = "DiT-XL/2, 256 px", "DiT-XL/2, 512 px", "DiT-B/2, 256 px", "PixArt-Sigma, 512 px"
SANA, SD3 = "Sana 1.6B, 1024 px", "SD3.5 Medium, 512 px"
ADAMW = "optimizer.name=adamw"  # beside the usual loops, which have no other


class Cell(NamedTuple):
    """One measurement, in a process of its own.

    Args:
      table: that it fills; the function of ``measure.py`` has the same name.
      row: of the table.
      limit_seconds: after which its process is killed. About twice what is expected.
      arguments: of the function.
      goal: that the table shows.
    """

    table: str
    row: str
    limit_seconds: float
    arguments: dict[str, Any]
    goal: str = ""

    @property
    def name(self) -> str:
        """For people, and for a file."""
        return f"{self.table}: {self.row}"


def _recipe(name: str, side_px: int, batch: int, microbatch: int) -> dict[str, Any]:
    sizes = [f"run.global_batch={batch}", f"run.microbatch={microbatch}"]
    return {"recipe": name, "side_px": side_px, "settings": sizes}


# Microbatches are such that each fits a GPU of 80 GB.
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
    recipe = RECIPES[row]
    settings = {"settings": [*recipe["settings"], *changes]}
    return Cell(BESIDE, row, limit, recipe | settings | {"rounds": 3, "steps": steps}, goal)


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
    Cell(SMOKE, "all parts of a run", 240, {"side_px": 256, "settings": ["run.global_batch=8"]}),
    _train(XL, 300, "40 % MFU"),
    _train(XL_512, 300, "38 % MFU"),
    _train(B, 200, "32 % MFU"),
    _beside(XL, 240, goal="1.15x"),
    Cell(FAST_DIT, XL, 300, RECIPES[XL] | {"rounds": 3, "steps": 4}, "2.5x"),
    _train(PIXART, 300, "38 % MFU"),
    _planner("dit-xl-2-256", 256, 64),
    _encode(256, 270),
    _caching(B, 200),
    _attention(XL),
    _attention(XL_512),
    _attention(PIXART),
    Cell(CHECKPOINT, XL, 240, RECIPES[XL] | {"steps": 12, "every": 4}),
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
    _beside(B, 200, goal="1.15x"),
    _caching(XL, 240),
    _encode(1024, 300),
    _beside(SD3, 300, ADAMW, steps=2),  # two models of 2.2 B parameters, with all that trains them: 100 GB
)

# One of each kind in seconds on a CPU, to see that all of it works: no figure of it means anything.
_DIT = {
    "recipe": "dit-s-2-256",
    "side_px": 64,
    "settings": ["model.name=DiT-Ti/4", "run.global_batch=2", "run.precision=fp32", "run.compile=false"],
}
_TEXT = {
    "recipe": "pixart-sigma-512",
    "side_px": 64,
    "settings": ["model.name=pixart-tiny", "run.global_batch=2", "run.precision=fp32", "run.compile=false", ADAMW],
}
_FAST_DIT = _DIT | {"settings": ["model.name=DiT-S/8", *_DIT["settings"][1:]]}  # it has no smaller one
_CASE = {"recipe": "dit-s-2-256", "side_px": 64, "microbatch": 2, "count": 1, "changes": ["model.name=DiT-Ti/4"]}
_SMALL = {"rounds": 1, "seconds": 0.01}
TINY = (
    Cell(SMOKE, "all parts of a run", 120, {"side_px": 64, "settings": _DIT["settings"][:2]}),
    Cell(TRAIN, "DiT-Ti/4, 64 px", 120, _DIT | {"rounds": 1, "steps": 1}),
    Cell(BESIDE, "DiT-Ti/4, 64 px", 120, _DIT | {"rounds": 1, "steps": 1}),
    Cell(BESIDE, "PixArt, 64 px", 120, _TEXT | {"rounds": 1, "steps": 1}),
    Cell(FAST_DIT, "DiT-S/8, 64 px", 120, _FAST_DIT | {"rounds": 1, "steps": 1}),
    Cell(PLANNER, "DiT-Ti/4, 1 x 2 images", 120, {"case": _CASE}),
    Cell(ENCODE, "32 px", 120, {"side_px": 32, "records": 4, "batch": 2, "vae": "shipped:vae"} | _SMALL),
    Cell(CACHING, "DiT-Ti/4, 64 px", 120, _DIT | {"vae": "shipped:vae", "text": None, "rounds": 1, "steps": 1}),
    Cell(ATTENTION, "DiT-Ti/4, 64 px", 120, _DIT | {"images": 2}),
    Cell(CHECKPOINT, "DiT-Ti/4, 64 px", 120, _DIT | {"steps": 6, "every": 2}),
    Cell(CAPTIONS, "T5", 120, {"text": "shipped:t5", "records": 4} | _SMALL),
)
