"""CLIP score: how well images show what their captions say.

Source: Hessel et al. 2021, "CLIPScore", with the factor 100 of torchmetrics in place of 2.5: 100 * max(cosine, 0),
averaged over the images. torchmetrics takes the maximum after the average.
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
    TOKENIZER_FILES,
    check_loaded,
    hash_files,
    shortened,
)
from ....precompute.encoders.text.tokenizer import load_tokenizer
from .extractors import Preprocessing, find_model
from .resizing import centre_square

WHAT = "--clip"
TEXT_KEYS = ("text", "caption", "captions")  # of several the first counts


class ClipScore:
    """A CLIP of two towers that compares images with captions.

    Args:
      model: folder or hub id, with tokenizer and preprocessor.
    Raises: EncoderError: missing, or not a CLIP.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        import transformers  # its models take two seconds to import

        transformers.utils.logging.disable_progress_bar()  # the command shows its own
        files = find_model(model, WHAT, *TOKENIZER_FILES)
        if files.config.get("model_type") != "clip" or not isinstance(files.config.get("text_config"), dict):
            raise EncoderError(f"{files.where}: its {CONFIG} is not that of a CLIP of two towers.")
        try:
            model_class: Any = transformers.CLIPModel
            loaded, loading = model_class.from_pretrained(
                files.folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        except LOADING_ERRORS as error:
            raise EncoderError(f"{files.where}: cannot be loaded as a CLIPModel: {shortened(error)}") from error
        check_loaded(loading, files.where)
        self._model, self._device = loaded.to(device).eval().requires_grad_(False), device
        sizes = self._model.config
        self._tokenizer = load_tokenizer(files.folder, sizes.text_config.vocab_size, what=WHAT)
        self._most_tokens = sizes.text_config.max_position_embeddings
        self._prepare = Preprocessing(files, sizes.vision_config.image_size, device)
        hashed = hash_files(files.weights)
        self.description = {"network": model, "weights_sha256": hashed, "side_px": self._prepare.side_px}

    @torch.inference_mode()
    def scores(self, images: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
        """Score of each image with its caption.

        Args:
          images: (height, width, 3) uint8 each; the centre square counts.
          captions: longer ones than the model reads are cut.
        Returns: (B, 2) float64: the score from 0 to 100, and 1 where the caption was cut.
        """
        limit = {"truncation": True, "max_length": self._most_tokens, "padding": "max_length"}
        tokens = self._tokenizer(list(captions), return_tensors="pt", **limit).to(self._device)
        lengths = [len(ids) for ids in self._tokenizer(list(captions))["input_ids"]]
        output = self._model(
            pixel_values=self._prepare([centre_square(image) for image in images]),
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
        )
        cosines = torch.nn.functional.cosine_similarity(output.image_embeds.double(), output.text_embeds.double())
        was_cut = np.array(lengths) > self._most_tokens
        return np.stack([100 * cosines.clamp(min=0).cpu().numpy(), was_cut], axis=1)


def read_captions(file: Path, names: Sequence[str]) -> list[str]:
    """The caption of each image.

    Args:
      file: ``samples.json`` of ``leandit sample``, in the order of the images; or lines of JSON with ``file_name`` and
        ``text`` (or ``caption``).
      names: of the images, relative to their folder; numbers for those of a .npz.
    Raises: SourceError: it has no caption for an image.
    """
    if not file.is_file():
        raise SourceError(f"captions '{file}': there is no such file. Give one with --captions.")
    if file.suffix == ".jsonl":
        with open(file, "rb") as lines:
            by_name = dict(_row(file, number, line) for number, line in enumerate(lines, 1))
        if missing := [name for name in names if name not in by_name]:
            raise SourceError(f"captions '{file}': none for image '{missing[0]}', and {len(missing) - 1} others.")
        return [by_name[name] for name in names]
    found = read_json(file)
    listed = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(listed, list) or len(listed) != len(names):
        got = len(listed) if isinstance(listed, list) else "no"
        raise SourceError(f"captions '{file}': {got} 'samples' for {len(names)} images. Expected one of each.")
    captions = list(map(str, listed))
    if all(caption.isdigit() for caption in captions):
        raise SourceError(f"captions '{file}': its 'samples' are classes. Expected captions, or no --clip.")
    return captions


def _row(file: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        row = json.loads(line)
        text = next(row[key] for key in TEXT_KEYS if key in row)
        return str(row["file_name"]), str(text[0] if isinstance(text, list) else text)
    except (ValueError, TypeError, LookupError, StopIteration, RecursionError) as error:
        raise SourceError(f"captions '{file}', line {number}: expected an object with file_name and text.") from error
