"""Published weights of DiTs, converted to ours: DiT, SiT, LightningDiT, and DiT in the layout of diffusers.

The official layout, whose names our model shares, is a flat state dict, or a trainer's ``{model, ema, opt, args}`` or
``{state_dict, state_dict_ema}``, of which the averaged weights are used. Source: DiT, arXiv 2212.09748; SiT, arXiv
2401.08740; LightningDiT, arXiv 2501.01423, section 4.
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
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_of
from torch import Tensor

from ...datasets.disk.faults import named_faults
from ...errors import DamageError, RunError
from ..models.dit import size_of
from ..models.layers import position_table
from ..models.spec import ModelSpec

Weights = Mapping[str, Tensor]
POSITIONS, INPUT, OUTPUT = "pos_embed", "x_embedder.proj.weight", "final_layer.linear"
LAST = (f"{OUTPUT}.weight", f"{OUTPUT}.bias")
PROJECTORS = "projectors."  # to image features, which only training needs
LABEL_TABLE = "y_embedder.embedding_table"
# Averaged weights first: of DiT and its relatives, of PixArt; then those of the last step, also of DeepSpeed.
GROUPS = ("ema", "state_dict_ema", "model", "state_dict", "module")
# Modules that wrap another, whose names torch.compile, DDP, FSDP, checkpointing and Lightning put before those within.
WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
# diffusers' name of a module -> the official one; N is the number of a block. diffusers has the embedders of time and
# label in every block, and three layers for the thirds of qkv, which are numbered here.
MODULES = {
    "pos_embed.proj": "x_embedder.proj",
    "proj_out_1": "final_layer.adaLN_modulation.1",
    "proj_out_2": OUTPUT,
    "transformer_blocks.N.norm1.linear": "blocks.N.adaLN_modulation.1",
    "transformer_blocks.N.attn1.to_q": "blocks.N.attn.qkv.0",
    "transformer_blocks.N.attn1.to_k": "blocks.N.attn.qkv.1",
    "transformer_blocks.N.attn1.to_v": "blocks.N.attn.qkv.2",
    "transformer_blocks.N.attn1.to_out.0": "blocks.N.attn.proj",
    "transformer_blocks.N.ff.net.0.proj": "blocks.N.mlp.fc1",
    "transformer_blocks.N.ff.net.2": "blocks.N.mlp.fc2",
    "transformer_blocks.N.norm1.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "transformer_blocks.N.norm1.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "transformer_blocks.N.norm1.emb.class_embedder.embedding_table": LABEL_TABLE,
}
BLOCK = re.compile(r"transformer_blocks\.(\d+)\.")
TABLES = {f"{part}_feat_rope.freqs_{wave}" for part in ("enc", "dec") for wave in ("cos", "sin")}  # of a DiT^DH
MODULATED_NORMS = {"norm1": 1, "norm2": 4, "norm_final": 1}  # to the place of their scale in the modulation

# -------------------------------------------------------------------------------------------------------------- files


def read_official(path: Path) -> dict[str, Tensor]:
    """The state dict of a ``.pt`` or ``.safetensors`` file in the official layout; the averaged one if there is one.

    Raises: RunError: the file is missing or has no state dict; DamageError: it cannot be read.
    """
    if not path.is_file():
        raise RunError(f"model.init_from '{path}': there is no such file.")
    content = read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    for group in GROUPS:
        if isinstance(content, Mapping) and isinstance(content.get(group), Mapping):
            content = content[group]
            break
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        groups = ", ".join(f"'{group}'" for group in GROUPS)
        raise RunError(f"model.init_from '{path}': expected a state dict, or a checkpoint with one of {groups}.")
    weights = {str(name): tensor for name, tensor in content.items() if name != "n_averaged"}  # of an AveragedModel
    return without_wrappers(weights, str(path))


def without_wrappers(weights: Weights, source: str) -> dict[str, Tensor]:
    """The weights by their names in the plain model.

    Raises: RunError: two names differ by wrappers alone.
    """
    plain: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        inner = WRAPPERS.sub("", name)
        if inner in plain:
            raise RunError(f"model.init_from '{source}': it has two tensors '{inner}', one of them as '{name}'.")
        plain[inner] = tensor
    return plain


def _read_pickle(path: Path) -> Any:
    """Content of a ``.pt`` file: tensors, containers of them, and a trainer's arguments; nothing else is unpickled."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except pickle.UnpicklingError as error:  # its message explains how to read it anyway
        raise RunError(f"model.init_from '{path}': it holds objects other than tensors, which are refused.") from error
    except (RuntimeError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise DamageError(f"model.init_from '{path}': not a file of tensors ({reason}). Fetch it again.") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, on the CPU.

    Raises: DamageError: it is not one; ResourceError: the disk or this machine failed.
    """
    try:
        with named_faults(path):
            return load_file(path)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DamageError(f"model.init_from '{path}': it holds no tensors ({error}). Fetch it again.") from error


def official_bytes(weights: Weights, suffix: str, *, side: int = 0) -> bytes:
    """Content of a ".safetensors" or ".pt" file in the official layout, without projectors.

    Args:
      weights: state dict of a ``DiT``; of a denoiser, with the prefix "net.".
      side: tokens a side of the images to draw, whose positions official code reads from the file; 0: as many as the
        table of the weights spans.
    """
    flat = {name.removeprefix("net."): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    flat = {name: tensor for name, tensor in flat.items() if not name.startswith(PROJECTORS)}
    table = flat.get(POSITIONS)
    if side and table is not None and table.shape[1] != side * side:
        flat[POSITIONS] = position_table(side, side, table.shape[2], math.isqrt(table.shape[1]))[None]
    if suffix == ".safetensors":
        return safetensors_of(flat)
    content = io.BytesIO()
    torch.save(flat, content)
    return content.getvalue()


# ---------------------------------------------------------------------------------------------------------- diffusers


def from_diffusers(weights: Weights, source: str) -> dict[str, Tensor]:
    """The official names of a ``DiTTransformer2DModel``, without the position table.

    Only while the embedders of all blocks are equal, as in what was converted and not trained there, is it a DiT.

    Raises: RunError: the embedders differ, or a tensor is of no DiT.
    """
    official: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        block = BLOCK.match(name)
        module, _, part = BLOCK.sub("transformer_blocks.N.", name).rpartition(".")
        if module not in MODULES:
            raise RunError(f"model.init_from '{source}': '{name}' is not part of a DiT. Check model.name.")
        ours = f"{MODULES[module]}.{part}".replace(".N.", f".{block[1] if block else ''}.")
        if ours in official and not torch.equal(official[ours], tensor):
            raise RunError(
                f"model.init_from '{source}': '{name}' differs between blocks. It was trained with diffusers' class, "
                "which has embedders in every block: no DiT computes its function."
            )
        official[ours] = tensor
    thirds: dict[str, list[Tensor]] = {}
    for name in sorted(name for name in official if ".qkv." in name):
        thirds.setdefault(re.sub(r"\.qkv\.[012]\.", ".qkv.", name), []).append(official.pop(name))
    return official | {name: torch.cat(parts) for name, parts in thirds.items()}


def to_diffusers(weights: Weights, num_labels: int) -> dict[str, Tensor]:
    """State dict of a ``DiTTransformer2DModel``, with the embedders of time and label repeated in each block.

    Args:
      weights: state dict of a ``DiT`` on labels without options; of a denoiser, with the prefix "net.".
      num_labels: of the new label table; rows added before null's are copies of null's.
    """
    official = {name.removeprefix("net."): tensor.detach().cpu() for name, tensor in weights.items()}
    table = official[f"{LABEL_TABLE}.weight"]
    official[f"{LABEL_TABLE}.weight"] = torch.cat([table, table[-1:].expand(num_labels + 1 - len(table), -1)])
    for name in [name for name in official if ".qkv." in name]:
        module, _, part = name.rpartition(".")
        official |= {f"{module}.{number}.{part}": third for number, third in enumerate(official[name].chunk(3))}
    renamed: dict[str, Tensor] = {}
    for number in range(1 + max(int(name.split(".")[1]) for name in official if name.startswith("blocks."))):
        for theirs, ours in MODULES.items():
            for part in ("weight", "bias"):
                if (name := f"{ours}.{part}".replace(".N.", f".{number}.")) in official:
                    # Copies, because a file cannot hold a tensor twice.
                    renamed[f"{theirs}.{part}".replace(".N.", f".{number}.")] = official[name].clone()
    return renamed


# --------------------------------------------------------------------------------------------------- LightningDiT


def from_lightningdit(weights: Weights, spec: ModelSpec, source: str) -> dict[str, Tensor]:
    """The same function without gains of norms and with our order of rotated pairs; other DiTs are left as they are.

    A gain g before a modulation is part of it: g * x * (1 + s) + b = x * (1 + (g * (1 + s) - 1)) + b. Queries and keys
    are rotated in pairs of neighbors there, rows first; here in pairs of halves, columns first. A permutation of both
    changes no product of the two. Only its RMS norms have gains, so a file without them is of one with layer norms.

    Raises: RunError: the model has other norms or positions, or its modulations no shift.
    """
    modulation, embedding = weights.get("blocks.0.adaLN_modulation.1.bias"), weights.get("x_embedder.proj.bias")
    if modulation is not None and embedding is not None and len(modulation) == 4 * len(embedding):
        raise RunError(
            f"model.init_from '{source}': a LightningDiT with wo_shift = true, whose blocks have modulations of 4 "
            "vectors, scale and gate. Only blocks with 6 are supported: shift, scale and gate (wo_shift = false)."
        )
    has_rotation = any(name.startswith("feat_rope.") for name in weights)
    has_gains = any(name.endswith("norm1.weight") for name in weights)
    if not has_rotation and not has_gains:
        return dict(weights)
    norm, positions = "rms" if has_gains else "layer", "both" if has_rotation else "sincos"
    if (spec.options.norm, spec.options.positions) != (norm, positions):
        raise RunError(
            f"model.init_from '{source}': a LightningDiT with {'RMS' if has_gains else 'layer'} norms and "
            f"{'rotary' if has_rotation else 'added'} positions. Use --set model.norm={norm} --set "
            f"model.positions={positions} --set model.time=to_data; the recipe lightningdit-xl-1-256 has the rest."
        )
    num_heads = size_of(spec.name)[2]
    converted = {name: tensor for name, tensor in weights.items() if not name.startswith("feat_rope.")}
    for name in list(converted):
        module, _, part = name.rpartition(".")
        parent, _, norm = module.rpartition(".")
        if norm in MODULATED_NORMS and part == "weight":
            _fold_gain(converted, parent, converted.pop(name), MODULATED_NORMS[norm])
        elif has_rotation and ".attn." in name and norm in ("qkv", "q_norm", "k_norm"):
            converted[name] = _in_our_order(converted[name], num_heads, fused=norm == "qkv")
    return converted


def without_tables(weights: Weights) -> dict[str, Tensor]:
    """The weights of a DiT^DH, without the tables of its rotary positions, which are computed."""
    return {name: tensor for name, tensor in weights.items() if name not in TABLES}


def _fold_gain(weights: dict[str, Tensor], parent: str, gain: Tensor, scale: int) -> None:
    """Multiply the scale of a modulation, and the 1 that is added to it, by the gain of the norm before it."""
    for part in ("weight", "bias"):
        name = f"{parent}.adaLN_modulation.1.{part}"
        chunks = list(weights[name].float().unflatten(0, (-1, len(gain))).unbind())
        if part == "weight":
            chunks[scale] = gain.float()[:, None] * chunks[scale]
        else:
            chunks[scale] = gain.float() * (1 + chunks[scale]) - 1
        weights[name] = torch.cat(chunks)


def _in_our_order(tensor: Tensor, num_heads: int, *, fused: bool) -> Tensor:
    """Permute the entries of each head of queries and keys: (row, column) x pair x 2 to (column, row) x 2 x pair.

    Args:
      tensor: rows of the fused projection of queries, keys and values, or the gain of a head.
    """
    width = len(tensor) // (3 * num_heads if fused else 1)
    order = torch.arange(width).view(2, -1, 2).flip(0).transpose(1, 2).flatten()
    if not fused:
        return tensor[order]
    heads = tensor.unflatten(0, (3, num_heads, width))
    return torch.stack([heads[0][:, order], heads[1][:, order], heads[2]]).flatten(0, 2)


# -------------------------------------------------------------------------------------------------------- other sizes


def fitted(weights: Weights, wanted: Weights, spec: ModelSpec) -> tuple[dict[str, Tensor], list[str]]:
    """A DiT's weights for a model of other sizes, features or outputs; and what was changed, a phrase each.

    Args:
      wanted: the model's state dict, in the official layout; only shapes are used, and new projectors.
    """
    changes, new = list[str](), dict(weights)
    needed, table = wanted.get(POSITIONS), weights.get(POSITIONS)
    if needed is not None and (table is None or table.shape != needed.shape):  # diffusers' layout has no table
        side = math.isqrt(needed.shape[1])
        new[POSITIONS] = position_table(side, side, needed.shape[2], side)[None]
    projectors = {name: tensor for name, tensor in wanted.items() if name.startswith(PROJECTORS)}
    if not all(name in weights and weights[name].shape == tensor.shape for name, tensor in projectors.items()):
        new |= projectors
        changes.append("with new projectors")
    new = {name: tensor for name, tensor in new.items() if name in projectors or not name.startswith(PROJECTORS)}
    if spec.options.time == "to_data" and spec.out_channels == spec.channels and _has_variance(new):
        # SiT computes a variance and never uses it. The output layer has (p * p * 2C) rows, the channel last.
        new |= {name: new[name].unflatten(0, (-1, 2, spec.channels))[:, 0].flatten(0, 1) for name in LAST}
        changes.append("without outputs for a variance")
    return new, changes


def position_span(table: Tensor) -> int:
    """How many tokens a table of positions spans along an axis: its own side, or that of the grid it was learned on.

    A DiT that is trained on at another resolution keeps its span, so that its table has other steps than 1.

    Args:
      table: (1, side * side, E), of ``position_table`` or of any other kind.
    Returns: its side if it is of another kind.
    """
    side, width = math.isqrt(table.shape[1]), table.shape[2]
    if side < 2 or width < 4 or side * side != table.shape[1]:
        return side
    # The slowest wave of the last column: its angle is small, so it tells the position without ambiguity.
    waves = width // 4
    sine, cosine = table[0, side - 1, waves - 1].double(), table[0, side - 1, 2 * waves - 1].double()
    frequency = 10_000.0 ** -((waves - 1) / waves)
    last = float(torch.atan2(sine, cosine)) / frequency
    span = round(last * side / (side - 1))
    if span < 1 or not torch.allclose(position_table(side, side, width, span), table[0].float(), rtol=0, atol=1e-2):
        return side
    return span


def _has_variance(weights: Weights) -> bool:
    """Whether the output layer has twice as many rows as a patch has pixels and channels."""
    return all(name in weights for name in (INPUT, *LAST)) and len(weights[LAST[1]]) == 2 * weights[INPUT][0].numel()
