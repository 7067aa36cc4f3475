"""What all encoders share: loading a published model, and its weights in float32 on demand."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ...datasets.remote.failures import one_line
from ...errors import EncoderError

_Output = TypeVar("_Output")

NUM_PROBES = 2
PROBE_BLOCKS = 16  # of each side
PROBED = "a black image and for one of colored blocks"

# Of each logger, what begins a note about unused weights or keys, which published models have.
NOISE = {
    "transformers.modeling_utils": "LOAD REPORT",
    "diffusers.configuration_utils": "The config attributes ",
}


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Silence the libraries' notes about unused weights and keys; missing weights are an error of ours."""
    with contextlib.ExitStack() as stack:
        for name, noise in NOISE.items():

            def is_other(record: logging.LogRecord, noise: str = noise) -> bool:
                return record.levelno >= logging.ERROR or noise not in record.getMessage()

            logger = logging.getLogger(name)
            logger.addFilter(is_other)
            stack.callback(logger.removeFilter, is_other)
        yield


def load_model(
    load: Callable[..., tuple[Any, dict[str, Any]]], *arguments: Any, where: str, class_name: str, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model, ready for inference.

    Args:
      load: called with the other arguments; returns the model, and its missing and unexpected keys.
      where: key of the recipe and folder, for messages.
    Returns: as ``load``.
    Raises: EncoderError: it cannot be loaded, or weights are missing, which the libraries fill with random numbers.
    """
    try:
        with silenced():
            model, loading = load(*arguments, **options)
    except Exception as error:  # of a config or weights, whatever a library makes of them
        raise EncoderError(f"{where}: cannot be loaded as {class_name}: {one_line(error)}") from error
    if missing := sorted(loading.get("missing_keys") or ()):
        raise EncoderError(
            f"{where}: {len(missing)} weights are missing from its safetensors, the first is '{missing[0]}'. "
            "Fetch or save the model again."
        )
    return model.eval().requires_grad_(False), loading


def load_transformer(class_name: str, folder: Path, dtype: torch.dtype, where: str, **options: Any) -> Any:
    """Load a model of transformers, from safetensors alone; raises as ``load_model``."""
    import transformers  # its models take two seconds to import

    transformers.utils.logging.disable_progress_bar()  # the command shows its own
    load = getattr(transformers, class_name).from_pretrained
    options |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    return load_model(load, folder, where=where, class_name=class_name, **options)[0]


class Pretrained:
    """A model on a device, and its weights in float32 where the recipe's dtype gives NaN or infinity.

    Args:
      dtype: that it computes in.
      load: the model in a dtype, on the CPU.
      where: key of the recipe and folder, for messages.
      dtype_key: key of the dtype in the recipe.
    Attributes:
      may_be_constant: its outputs need not depend on the image.
    """

    may_be_constant = False

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        load: Callable[[torch.dtype], Any],
        *,
        where: str,
        dtype_key: str,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._load = load
        self._where = where
        self._dtype_key = dtype_key
        self._model: Any = None
        self._exact: Any = None

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._device

    @property
    def label(self) -> str:
        """The model and the dtype that it computes in, for messages."""
        return f'{self._where}, {self._dtype_key} = "{str(self._dtype).removeprefix("torch.")}"'

    def nonfinite_message(self, tried: str, *, is_finite_in_float32: bool) -> str:
        """What to say of a model that gives NaN or infinity for all images that were tried."""
        if is_finite_in_float32:
            advice = f'In float32 it does not: set {self._dtype_key} = "float32", or "bfloat16".'
        else:
            also = "" if self._dtype == torch.float32 else "In float32 it does too. "
            advice = f"{also}Its weights are damaged: fetch or save the model again, or use another."
        return f"{self.label}: it gives NaN or infinity for {tried}. Nothing was written. {advice}"

    def constant_message(self, tried: str) -> str:
        """What to say of a model that gives the same for all images that were tried."""
        return (
            f"{self.label}: it gives the same for {tried}, although they differ. Nothing was written. Its weights are "
            "damaged or empty: fetch or save the model again, or use another."
        )

    def check_probes(self, encode: Callable[[np.ndarray], list[np.ndarray]], side_px: int) -> list[np.ndarray]:
        """Encode a black image and one of blocks in all colours.

        Args:
          encode: outputs, (B, ...) each, for (B, side_px, side_px, 3) uint8 pixels.
        Returns: the outputs.
        Raises: EncoderError: they are not finite, or the same for both.
        """
        outputs = encode(probes(side_px))
        if not any(is_finite([output[i] for output in outputs]) for i in range(NUM_PROBES)):
            with self.in_float32():
                exact = encode(probes(side_px))
            raise EncoderError(self.nonfinite_message(PROBED, is_finite_in_float32=is_finite(exact)))
        if not self.may_be_constant and all(np.array_equal(output[0], output[1]) for output in outputs):
            raise EncoderError(self.constant_message(PROBED))
        return outputs

    def _on_device(self, model: Any) -> Any:
        return model.to(self._device)

    @contextlib.contextmanager
    def in_float32(self, *, makes_room: bool = False) -> Iterator[None]:
        """Compute in float32 with the weights of the file, not rounded to the recipe's dtype.

        The first time loads them again; then they stay in the CPU's memory, and lie on the device only within.

        Args:
          makes_room: the other weights leave the device meanwhile.
        Raises: EncoderError: they can no longer be loaded.
        """
        model, dtype = self._model, self._dtype
        if dtype == torch.float32:
            yield
            return
        if makes_room:
            model.to("cpu")
        try:
            self._exact = self._load(torch.float32) if self._exact is None else self._exact
            self._model, self._dtype = self._on_device(self._exact), torch.float32
            yield
        finally:
            if self._exact is not None:
                self._exact.to("cpu")
            self._model, self._dtype = self._on_device(model) if makes_room else model, dtype


def probes(side_px: int) -> np.ndarray:
    """A black image, and one of blocks in all colours; (2, side_px, side_px, 3) uint8."""
    colours = np.random.default_rng(0).integers(0, 256, (PROBE_BLOCKS, PROBE_BLOCKS, 3), np.uint8)
    places = np.arange(side_px) * PROBE_BLOCKS // side_px
    blocks = colours[places][:, places]
    return np.stack([np.zeros_like(blocks), blocks])


def is_finite(outputs: Sequence[np.ndarray]) -> bool:
    """All numbers of some arrays are finite."""
    return all(bool(np.isfinite(output).all()) for output in outputs)


def encode_if_it_fits(encode: Callable[[np.ndarray], _Output], pixels: np.ndarray) -> _Output | None:
    """The encoder's output, or None if out of memory."""
    try:
        return encode(pixels)
    except torch.OutOfMemoryError:
        pass  # empty_cache below: the exception still holds the forward's tensors here
    torch.cuda.empty_cache()
    return None
