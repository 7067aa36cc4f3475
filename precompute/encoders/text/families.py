"""Kinds of text encoders: their classes in transformers, and what their config.json says of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....datasets.remote.failures import one_line
from ....errors import EncoderError
from ...config import TextSection
from ..model_files import read_config

PROJECTED = "CLIPTextModelWithProjection"


@dataclass(frozen=True)
class Family:
    """A kind of text encoder: its model_type and keys in config.json, and its classes, which ``architectures`` names.

    Args:
      layers: hidden states that are usual; empty for the last one.
      masked: padding is masked, unless the recipe says otherwise.
    """

    model_type: str
    width_key: str
    layers_key: str
    class_names: tuple[str, ...]
    layers: tuple[int, ...] = ()
    masked: bool = True


FAMILIES = {
    "t5": Family("t5", "d_model", "num_layers", ("T5EncoderModel",)),
    "umt5": Family("umt5", "d_model", "num_layers", ("UMT5EncoderModel",)),
    "gemma2": Family("gemma2", "hidden_size", "num_hidden_layers", ("Gemma2Model",)),
    "clip": Family(
        "clip_text_model", "hidden_size", "num_hidden_layers", ("CLIPTextModel", PROJECTED), layers=(-2,), masked=False
    ),
    "causal_lm": Family("", "hidden_size", "num_hidden_layers", ()),  # of any type
}


def text_config(section: TextSection, folder: Path) -> dict[str, Any]:
    """The config.json of a text encoder; of a model that also reads images, the part of its language model.

    Raises: EncoderError: missing, or of an unknown architecture.
    """
    config = read_config(folder, what="text.model")
    return language_config(folder).to_dict() if section.kind == "causal_lm" else config


def language_config(folder: Path) -> Any:
    """The config of a language model, or of the one in a model that also reads images, with all defaults.

    Raises: EncoderError: of an unknown architecture.
    """
    from transformers import AutoConfig  # takes a second to import

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except Exception as error:  # whatever the library makes of it
        raise EncoderError(f"text.model '{folder}': no usable config.json: {one_line(error)}") from error


def whole_number(config: dict[str, Any], key: str, folder: Path) -> int:
    """A number of a config.json.

    Raises: EncoderError: missing, or not a positive whole number.
    """
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise EncoderError(f"text.model '{folder}': config.json has no whole number as '{key}'.")
    return value


def class_name(section: TextSection, config: dict[str, Any], folder: Path) -> str:
    """The class of transformers that loads an encoder.

    Raises: EncoderError: its config.json is of another kind.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    family, model_type = FAMILIES[section.kind], config.get("model_type")
    if section.kind == "causal_lm":
        name, is_in_other = MODEL_MAPPING_NAMES.get(str(model_type)), str(model_type).endswith("_text")
        if not (isinstance(name, str) and (is_in_other or model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
            raise EncoderError(
                f"text.model '{folder}': its config.json says '{model_type}', expected a decoder-only "
                "language model. Check text.kind."
            )
        return name
    if model_type != family.model_type:
        raise EncoderError(
            f"text.model '{folder}': its config.json says '{model_type}', expected '{family.model_type}'."
        )
    if len(family.class_names) == 1:
        return family.class_names[0]
    architectures = config.get("architectures")
    named = [name for name in family.class_names if isinstance(architectures, list) and name in architectures]
    if len(named) != 1:
        raise EncoderError(
            f"text.model '{folder}': config.json says architectures {str(architectures)[:80]}, expected one of "
            f"{', '.join(family.class_names)}, because their pooled vectors differ."
        )
    return named[0]


def check_request(section: TextSection, config: dict[str, Any], folder: Path) -> None:
    """Raise if the recipe asks for layers or positions that the model lacks.

    Raises: EncoderError.
    """
    num_layers = whole_number(config, FAMILIES[section.kind].layers_key, folder) if section.layers else 0
    if wrong := [layer for layer in section.layers if not -num_layers - 1 <= layer <= num_layers]:
        raise EncoderError(
            f"text.layers {wrong[0]}: '{folder}' has {num_layers} layers, expected a number from {-num_layers - 1} to "
            f"{num_layers}. 0 is the token embedding, -1 the last layer."
        )
    if section.kind != "clip":
        return
    longest = whole_number(config, "max_position_embeddings", folder)
    if section.max_tokens > longest:
        raise EncoderError(
            f"text.max_tokens {section.max_tokens}: CLIP '{folder}' reads at most {longest} tokens. "
            f"Set text.max_tokens = {longest}."
        )
