"""Checkpoints of DiT: the official layout, which our model shares, and diffusers' ``DiTTransformer2DModel``.

The official layout is a flat state dict, or a trainer's ``{model, ema, opt, args}``, of which ``ema`` is used.
"""

from __future__ import annotations

import argparse
import io
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_of
from torch import Tensor

from ...datasets.disk.files import write_atomic
from ...datasets.errors import DamageError, RunError
from ..models.layers import position_table

POSITIONS = "pos_embed"
PROJECTORS = "projectors."  # to image features, which only training needs
# diffusers' name -> the official one; the modules of a block are below
TOP = {
    "pos_embed.proj": "x_embedder.proj",
    "proj_out_1": "final_layer.adaLN_modulation.1",
    "proj_out_2": "final_layer.linear",
}
IN_BLOCK = {
    "norm1.linear": "adaLN_modulation.1",
    "attn1.to_out.0": "attn.proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
LABEL_TABLE = "norm1.emb.class_embedder.embedding_table"
EMBEDDERS = {
    "norm1.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "norm1.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    LABEL_TABLE: "y_embedder.embedding_table",
}


def read_official(path: Path) -> dict[str, Tensor]:
    """The state dict of a ``.pt`` or ``.safetensors`` file in the official layout; the averaged one if there is one.

    Raises: RunError: the file is missing or has no state dict; DamageError: it cannot be read.
    """
    if not path.is_file():
        raise RunError(f"model.init_from '{path}': there is no such file.")
    content = read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    for group in ("ema", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(group), Mapping):
            content = content[group]
            break
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise RunError(f"model.init_from '{path}': needed a state dict, or a checkpoint with 'ema' or 'model'.")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _read_pickle(path: Path) -> Any:
    """Content of a ``.pt`` file: tensors, containers of them, and a trainer's arguments."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its message explains how to read it anyway
        raise RunError(f"model.init_from '{path}': it holds other objects than tensors, which are refused.") from error
    except (RuntimeError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise DamageError(f"model.init_from '{path}': not a file of tensors ({reason}). Fetch it again.") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, on the CPU.

    Raises: DamageError: it is not one.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DamageError(f"model.init_from '{path}': it holds no tensors ({error}). Fetch it again.") from error


def write_official(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a flat state dict in the official layout, as ``.safetensors`` or ``.pt``.

    Args:
      weights: state dict of a ``DiT``; of a denoiser, with the prefix "net.".
    Raises: ResourceError: the disk is full.
    """
    write_atomic(path, official_bytes(weights, path.suffix))


def official_bytes(weights: Mapping[str, Tensor], suffix: str) -> bytes:
    """Content of a file in the official layout, ".safetensors" or ".pt", without projectors; as ``write_official``."""
    flat = {name.removeprefix("net."): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    flat = {name: tensor for name, tensor in flat.items() if not name.startswith(PROJECTORS)}
    if suffix == ".safetensors":
        return safetensors_of(flat)
    content = io.BytesIO()
    torch.save(flat, content)
    return content.getvalue()


def computed_positions(shape: torch.Size) -> Tensor:
    """The published position table of a square grid, (1, T, E)."""
    side = math.isqrt(shape[1])
    return position_table(side, side, shape[2], side)[None]


def from_diffusers(found: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The official names of a ``DiTTransformer2DModel``, without the position table.

    diffusers has a time and label embedder in each block. Only while they are equal, as they are in what was converted
    and not trained there, is the model a DiT at all.

    Raises: RunError: the embedders differ, or a tensor is of no DiT.
    """
    official: dict[str, Tensor] = {}
    blocks: dict[int, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        match = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", name)
        if match:
            blocks.setdefault(int(match[1]), {})[match[2]] = tensor
            continue
        module, part = name.rsplit(".", 1)
        if module not in TOP:
            raise RunError(f"model.init_from '{source}': '{name}' is not part of a DiT. Check model.name.")
        official[f"{TOP[module]}.{part}"] = tensor
    for number, tensors in blocks.items():
        official |= _block_from_diffusers(number, dict(tensors), official, source)
    return official


def _block_from_diffusers(
    number: int, tensors: dict[str, Tensor], official: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    official_block: dict[str, Tensor] = {}
    for part in ("weight", "bias"):
        names = [f"attn1.to_{letter}.{part}" for letter in "qkv"]
        if all(name in tensors for name in names):
            official_block[f"blocks.{number}.attn.qkv.{part}"] = torch.cat([tensors.pop(name) for name in names])
    for name, tensor in tensors.items():
        module, part = name.rsplit(".", 1)
        if module in IN_BLOCK:
            official_block[f"blocks.{number}.{IN_BLOCK[module]}.{part}"] = tensor
            continue
        if module not in EMBEDDERS:
            raise RunError(f"model.init_from '{source}': block {number} has '{name}', which is not part of a DiT.")
        ours = f"{EMBEDDERS[module]}.{part}"
        if ours in official and not torch.equal(official[ours], tensor):
            raise RunError(
                f"model.init_from '{source}': '{name}' of block {number} differs between blocks. It was trained "
                "with diffusers' class, which has embedders in every block: no DiT computes its function."
            )
        official_block[ours] = tensor
    return official_block


def to_diffusers(weights: Mapping[str, Tensor], num_labels: int) -> dict[str, Tensor]:
    """State dict of a ``DiTTransformer2DModel``, with the embedders of time and label repeated in each block.

    Args:
      weights: state dict of a ``DiT`` on labels without options; of a denoiser, with the prefix "net.".
      num_labels: of the new label table; rows added before null's are copies of null's.
    """
    official = {name.removeprefix("net."): tensor.detach().cpu() for name, tensor in weights.items()}
    table = official[f"{EMBEDDERS[LABEL_TABLE]}.weight"]
    official[f"{EMBEDDERS[LABEL_TABLE]}.weight"] = torch.cat(
        [table, table[-1:].expand(num_labels + 1 - len(table), -1)]
    )
    depth = 1 + max(int(name.split(".")[1]) for name in official if name.startswith("blocks."))
    renamed: dict[str, Tensor] = {}
    for theirs, ours in TOP.items():
        renamed |= {f"{theirs}.{part}": official[f"{ours}.{part}"] for part in ("weight", "bias")}
    for number in range(depth):
        block = f"transformer_blocks.{number}"
        for part in ("weight", "bias"):
            thirds = official[f"blocks.{number}.attn.qkv.{part}"].chunk(3)
            renamed |= {f"{block}.attn1.to_{letter}.{part}": third for letter, third in zip("qkv", thirds, strict=True)}
            for theirs, ours in IN_BLOCK.items():
                renamed[f"{block}.{theirs}.{part}"] = official[f"blocks.{number}.{ours}.{part}"]
        for theirs, ours in EMBEDDERS.items():
            for part in ("weight", "bias"):
                if f"{ours}.{part}" in official:  # copies, because a file cannot hold a tensor twice
                    renamed[f"{block}.{theirs}.{part}"] = official[f"{ours}.{part}"].clone()
    return renamed
