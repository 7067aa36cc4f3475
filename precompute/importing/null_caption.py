"""The null caption of imported features, for each text encoder: the user supplies it, or chooses zeros."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import SourceError
from ..config import TextSection
from .source import UNREADABLE
from .untrusted import MAX_ARRAY_BYTES, parse_npy, read_file, read_npz, read_tensors

ZEROS = "zeros"
TENSOR = "y_embedding"  # its name in PixArt's checkpoints ends so


class NullCaption(NamedTuple):
    """The null caption of a text encoder.

    Args:
      rows: (L, D) tokens at the padded length of the captions, or (P,) a pooled vector.
      num_tokens: of its rows, before the padding.
    """

    rows: np.ndarray
    num_tokens: int


def read_null(choice: str | None, section: TextSection, shape: tuple[int, ...], name: str) -> NullCaption:
    """The null caption of a text encoder, at the padded length and width of the captions.

    Zeros count as one token, which a model of valid tokens alone reads.

    Args:
      choice: "zeros", a .npy, a .npz with ``caption_feature``, or a checkpoint (.safetensors, .pt, .pth) with a tensor
        whose name ends in ``y_embedding``; for several text encoders a folder of NAME_empty.npy, as MLPerf's.
      section: of the text encoder. Of a language model whose padding is not stored, a file may hold the tokens of the
        empty caption alone, which are padded with zeros.
      shape: (L, D) of the captions, or (P,) of pooled vectors.
      name: of the text encoder.
    Raises: SourceError: none of these, or another shape.
    """
    if choice is None:
        raise SourceError(
            f"import: these features have captions, and training replaces some by a null caption of shape {shape}, "
            f"which they lack. Pass it with --null FILE (.npy, a checkpoint with '{TENSOR}', or a folder with "
            f"{name or 'NAME'}_empty.npy of each text encoder), or --null {ZEROS} if they were made for a model that "
            "takes zeros."
        )
    if choice == ZEROS:
        return NullCaption(np.zeros(shape, np.float32), num_tokens=1)
    path = Path(choice)
    path = path / f"{name}_empty.npy" if name and path.is_dir() else path
    try:
        if path.suffix == ".npy":
            rows = parse_npy(read_file(path))
        elif path.suffix == ".npz":
            (rows,) = read_npz(path, ["caption_feature"])
        else:
            rows = _from_checkpoint(path)
    except UNREADABLE as error:
        raise SourceError(f"--null '{path}': cannot be read as a null caption ({error}).") from error
    inner = rows.shape[-len(shape) :]
    rows = rows.reshape(inner) if rows.ndim > len(shape) and rows.size == np.prod(inner) else rows
    may_be_shorter = section.kind == "causal_lm" and not section.full_length
    is_shorter = rows.ndim == len(shape) and rows.shape[1:] == shape[1:] and 1 <= len(rows) < shape[0]
    has_shape = rows.shape == shape or (may_be_shorter and is_shorter)
    if not has_shape or rows.dtype.kind != "f" or not np.isfinite(rows).all():
        why = (
            "to which captions are padded: guidance keeps a caption's mask, so the null caption is read at full length"
        )
        if may_be_shorter:
            why = "or of fewer rows: the tokens of the empty caption, without padding"
        raise SourceError(
            f"--null '{path}': {rows.dtype} of shape {rows.shape}; expected finite numbers of shape {shape}, {why}."
        )
    if len(shape) == 1:  # a pooled vector
        return NullCaption(rows, num_tokens=0)
    padding = np.zeros((shape[0] - len(rows), shape[1]), rows.dtype)
    return NullCaption(np.concatenate([rows, padding]), num_tokens=len(rows))


def _from_checkpoint(path: Path) -> np.ndarray:
    """The tensor of a checkpoint, float32; raises OSError, SafetensorError, ValueError."""
    from safetensors import safe_open

    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            matching = [file.get_tensor(name) for name in file.keys() if name.endswith(TENSOR)]  # noqa: SIM118
    else:
        tensors = read_tensors(path)
        while isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
            tensors = tensors["state_dict"]
        named = tensors.items() if isinstance(tensors, dict) else ()
        matching = [tensor for name, tensor in named if str(name).endswith(TENSOR) and hasattr(tensor, "nbytes")]
    if len(matching) != 1 or matching[0].nbytes > MAX_ARRAY_BYTES:
        raise ValueError(f"{len(matching)} tensors whose name ends in '{TENSOR}'; expected one")
    return matching[0].float().numpy()
