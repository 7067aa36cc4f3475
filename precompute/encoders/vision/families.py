"""The supported vision transformers, and loading one; of a checkpoint of two towers its vision part alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ....datasets.errors import EncoderError
from ..model_files import LOADING_ERRORS, check_loaded, shortened


@dataclass(frozen=True)
class Family:
    """A kind of vision model.

    Args:
      class_name: in transformers; for a checkpoint of two towers, that of its vision part.
      has_class_token: before all other tokens.
      positions: name of the trained positions in its embeddings; empty if they are rotary.
      options: of a forward, so that positions are resampled.
    """

    class_name: str
    has_class_token: bool
    positions: str
    options: dict[str, Any] = field(default_factory=dict)


RESAMPLED = {"interpolate_pos_encoding": True}
CLIP = Family("CLIPVisionModel", True, "position_embedding.weight", RESAMPLED)
SIGLIP = Family("SiglipVisionModel", False, "position_embedding.weight", RESAMPLED)
FAMILIES = {  # by the model_type of config.json
    "dinov2": Family("Dinov2Model", True, "position_embeddings"),
    "dinov2_with_registers": Family("Dinov2WithRegistersModel", True, "position_embeddings"),
    "dinov3_vit": Family("DINOv3ViTModel", True, ""),
    "siglip": SIGLIP,
    "siglip_vision_model": SIGLIP,
    "clip": CLIP,
    "clip_vision_model": CLIP,
}


def family_of(config: dict[str, Any], where: str) -> Family:
    """The family of a model by its config.json.

    Raises: EncoderError: no vision model that is supported here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise EncoderError(f"{where}: its config.json says '{str(kind)[:80]}', needed one of {', '.join(FAMILIES)}.")
    if not isinstance(config.get("vision_config", {}), dict):
        raise EncoderError(f"{where}: 'vision_config' of its config.json is not an object. Fetch the model again.")
    return FAMILIES[kind]


@contextlib.contextmanager
def other_tower_unsaid() -> Iterator[None]:
    """Silence transformers' table of the weights that were left out: those of the text tower."""

    def is_other(record: logging.LogRecord) -> bool:
        return " LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def load_vision_model(family: Family, folder: Path, dtype: torch.dtype, where: str) -> Any:
    """Load a model of a family, from safetensors alone.

    Raises: EncoderError: cannot be loaded, or weights are missing.
    """
    import transformers  # its models take two seconds to import

    transformers.utils.logging.disable_progress_bar()  # the command shows its own
    try:
        with other_tower_unsaid():
            loaded, loading = getattr(transformers, family.class_name).from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except LOADING_ERRORS as error:
        raise EncoderError(f"{where}: cannot be loaded as a {family.class_name}: {shortened(error)}") from error
    check_loaded(loading, where)
    return loaded


def blocks_of(model: Any) -> Any:
    """The blocks of a vision transformer, in order: its outermost list of modules."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
