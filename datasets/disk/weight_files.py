"""Which files of a folder hold a model's weights, by the rules of diffusers and transformers.

A folder may also have variants (``STEM.bf16.safetensors``, ``STEM.non_ema.safetensors``) and files of an earlier save.
Without a variant, the libraries load either the shards that ``STEM.safetensors.index.json`` names or
``STEM.safetensors``. Where both exist, diffusers takes the shards, transformers the single file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ...errors import DamageError
from .hashing import read_json

MAX_INDEX_BYTES = 1 << 26


class WeightFilesError(ValueError):
    """A folder has no weights that its library would load; the message says what there is and what to do."""


def index_name(stem: str) -> str:
    """Name of the file that lists the shards."""
    return f"{stem}.safetensors.index.json"


def weight_names(stem: str) -> tuple[str, ...]:
    """File patterns of a model's safetensors on the hub, whole or sharded, without variants."""
    return f"{stem}.safetensors", index_name(stem), f"{stem}-?????-of-?????.safetensors"


def weight_files(folder: Path, stem: str, *, library: Literal["diffusers", "transformers"]) -> list[Path]:
    """The safetensors that ``from_pretrained`` of a library loads without a variant, sorted by name.

    Args:
      stem: of the names: "diffusion_pytorch_model" or "model".
    Raises: WeightFilesError: there are none, or the index is not valid or names files that are not there.
    """
    whole = folder / f"{stem}.safetensors"
    index = folder / index_name(stem)
    shards = _shards(index) if index.is_file() else []  # checked in any case, since other versions may read it
    if whole.is_file() and (library == "transformers" or not shards):
        return [whole]
    if shards:
        for path in shards:
            if not path.is_file():
                raise WeightFilesError(
                    f"'{index.name}' names '{path.name}', which is not there. Fetch or save the model again"
                )
        return shards
    names = sorted(path.name for path in folder.iterdir())
    message = f"there are no weights '{whole.name}', and no '{index.name}' that names their shards"
    if any(folder.glob(f"{stem}-*.safetensors")):
        raise WeightFilesError(f"{message}, only shards without it. Fetch the index too, or save the model again")
    if variants := sorted({path.name.split(".")[1] for path in folder.glob(f"{stem}.*.safetensors")}):
        raise WeightFilesError(
            f"{message}, only the variant '{variants[0]}'. Load it with from_pretrained(..., variant='{variants[0]}') "
            "and save it with save_pretrained"
        )
    raise WeightFilesError(
        f"{message} (found: {', '.join(names) or 'nothing'}). Only safetensors are read; convert other "
        "weights with save_pretrained(..., safe_serialization=True)"
    )


def _shards(index: Path) -> list[Path]:
    """The files that an index names, beside it; at least one, and they may be missing."""
    try:
        content = read_json(index, max_bytes=MAX_INDEX_BYTES)
    except DamageError as error:
        raise WeightFilesError(f"'{index.name}' is not valid JSON ({error})") from error
    weight_map = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise WeightFilesError(f"'{index.name}' has no 'weight_map'. Fetch or save the model again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightFilesError(f"'{index.name}' names '{name[:80]}', expected only safetensors beside it")
    return [index.parent / name for name in names]
