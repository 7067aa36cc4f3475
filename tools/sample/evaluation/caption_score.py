"""CLIP score: how well pictures show what their captions say.

Source: Hessel et al. 2021, "CLIPScore", with the factor 100 of torchmetrics in place of 2.5: 100 * max(cosine, 0),
averaged over the pictures. torchmetrics takes the maximum after the average.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.disk.hashing import read_json
from ....datasets.errors import EncoderError, SourceError
from ....precompute.encoders.model_files import (
    CONFIG,
    LOADING_ERRORS,
    TEXT_WEIGHTS,
    TOKENIZER_FILES,
    check_depth,
    check_loaded,
    hash_files,
    read_config,
    resolve_model,
    shortened,
    weight_files,
    weight_names,
)
from ....precompute.encoders.text.tokenizer import load_tokenizer
from ....precompute.encoders.vision.normalisation import GREY_LEVELS, PREPROCESSOR, normalisation
from .networks.extractors import input_side_px
from .networks.resizing import centre_square, squares

WHAT = "--clip"
TEXT_KEYS = ("text", "caption", "captions")  # of several the first counts


class ClipScore:
    """A CLIP of two towers that compares pictures with captions.

    Args:
      model: folder or hub id, with tokenizer and preprocessor.
    Raises: EncoderError: missing, or not a CLIP.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        import transformers  # its models take two seconds to import

        transformers.utils.logging.disable_progress_bar()  # the command shows its own
        names = (*TOKENIZER_FILES, PREPROCESSOR, *weight_names(TEXT_WEIGHTS))
        folder, _ = resolve_model(model, "", "", files=names, what=WHAT)
        where, config = f"{WHAT} '{folder}'", read_config(folder, what=WHAT)
        text = config.get("text_config")
        if config.get("model_type") != "clip" or not isinstance(text, dict):
            raise EncoderError(f"{where}: its {CONFIG} is not that of a CLIP of two towers, which is needed.")
        preprocessor = read_config(folder, what=WHAT, name=PREPROCESSOR)
        weights = weight_files(folder, TEXT_WEIGHTS, what=WHAT)
        check_depth(config, weights, what=WHAT)
        try:
            model_class: Any = transformers.CLIPModel
            loaded, loading = model_class.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        except LOADING_ERRORS as error:
            raise EncoderError(f"{where}: cannot be loaded as a CLIPModel: {shortened(error)}") from error
        check_loaded(loading, where)
        self._model = loaded.to(device).eval().requires_grad_(False)
        sizes = self._model.config
        self._tokenizer = load_tokenizer(folder, sizes.text_config.vocab_size, what=WHAT)
        self._most_tokens = sizes.text_config.max_position_embeddings
        self._side_px = input_side_px(preprocessor, sizes.vision_config.image_size, where)
        mean, std = normalisation(preprocessor, where)
        self._mean, self._std = (torch.tensor(numbers, device=device)[:, None, None] for numbers in (mean, std))
        self._device = device
        self.description = {"network": model, "weights_sha256": hash_files(weights), "side_px": self._side_px}

    @torch.inference_mode()
    def scores(self, pictures: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
        """Score of each picture with its caption.

        Args:
          pictures: (height, width, 3) uint8 each; the centre square counts.
          captions: longer ones than the model reads are cut.
        Returns: (B, 2) float64: the score from 0 to 100, and 1 where the caption was cut.
        """
        batch = squares([centre_square(picture) for picture in pictures], self._side_px, self._device)
        limit = {"truncation": True, "max_length": self._most_tokens, "padding": "max_length"}
        tokens = self._tokenizer(list(captions), return_tensors="pt", **limit).to(self._device)
        lengths = [len(ids) for ids in self._tokenizer(list(captions))["input_ids"]]
        output = self._model(
            pixel_values=(batch / GREY_LEVELS - self._mean) / self._std,
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
        )
        cosines = torch.nn.functional.cosine_similarity(output.image_embeds.double(), output.text_embeds.double())
        was_cut = np.array(lengths) > self._most_tokens
        return np.stack([100 * cosines.clamp(min=0).cpu().numpy(), was_cut], axis=1)


def read_captions(file: Path, names: Sequence[str]) -> list[str]:
    """The caption of each picture.

    Args:
      file: ``samples.json`` of ``leandit sample``, in the order of the pictures; or lines of JSON with ``file_name``
        and ``text`` (or ``caption``).
      names: of the pictures, relative to their folder; numbers for those of a .npz.
    Raises: SourceError: it has no caption for a picture.
    """
    if not file.is_file():
        raise SourceError(f"captions '{file}': there is no such file. Give one with --captions.")
    if file.suffix != ".jsonl":
        found = read_json(file)
        listed = found.get("samples") if isinstance(found, dict) else None
        if not isinstance(listed, list) or len(listed) != len(names):
            got = len(listed) if isinstance(listed, list) else "no"
            raise SourceError(f"captions '{file}': {got} 'samples' for {len(names)} pictures. Needed one of each.")
        captions = list(map(str, listed))
        if all(caption.isdigit() for caption in captions):
            raise SourceError(f"captions '{file}': its 'samples' are classes. Needed captions, or no --clip.")
        return captions
    by_name = dict(_rows(file))
    if missing := [name for name in names if name not in by_name]:
        raise SourceError(f"captions '{file}': none for picture '{missing[0]}', and {len(missing) - 1} others.")
    return [by_name[name] for name in names]


def _rows(file: Path) -> list[tuple[str, str]]:
    with open(file, "rb") as lines:
        return [_row(file, number, line) for number, line in enumerate(lines, 1)]


def _row(file: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        row = json.loads(line)
        text = next(row[key] for key in TEXT_KEYS if key in row)
        return str(row["file_name"]), str(text[0] if isinstance(text, list) else text)
    except (ValueError, TypeError, LookupError, StopIteration, RecursionError) as error:
        raise SourceError(f"captions '{file}', line {number}: needed an object with file_name and text.") from error
