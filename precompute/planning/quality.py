"""Before a plan is frozen, a sample of what it stores as int8 is encoded, and the loss is measured in each layer.

Captions follow ``store.on_low_quality``: with "float16", an encoder whose sample is of low quality is planned in
float16. The dtype of an encoder's captions cannot change later, so it is decided when a revision begins to store them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from ...datasets.format.row_layout import FEATURES, LATENTS, caption_folder
from ...datasets.format.schema import LatentSpec, LayerQuality, StoreSpec, TextEncoder
from ...datasets.format.token_dtypes import StoredTokens, is_storable, narrow, ordinary_cosines, widen, widen_latents
from ...datasets.revisions.plan import FrozenPlan
from ..config import StoreSection
from ..encoders.loading import Encoders
from ..encoders.text.encoder import CaptionEncoder
from ..encoders.text.tokenizer import of_table
from ..images.decoders import Decoders
from ..run.columns import OWN, Column, image_columns, to_stored
from ..sources.source import OpenedSource
from .self_check import EncodedImage, checked_positions, encode_image

NUM_CAPTIONS = 32
NUM_IMAGES = 8
CANDIDATES = 4096  # captions, evenly spread over the lengths, of which those with the smallest hash are taken
DIGITS = 8  # of the recorded figures


class QualityMeter:
    """Collects what int8 cost the tokens of one group of arrays.

    Args:
      width: D, of a token.
      num_layers: hidden states that stand beside each other in a token.
    """

    def __init__(self, width: int, num_layers: int = 1) -> None:
        self._num_layers = num_layers
        self._cosines = list[np.ndarray]()  # (n, layers) each
        self._squared_error = np.zeros(width)
        self._squares = np.zeros(width)

    def add(self, before: np.ndarray, after: np.ndarray) -> None:
        """Add (n, D) float32 tokens, from the encoder and as stored."""
        self._cosines.append(ordinary_cosines(before, after, self._num_layers))
        self._squared_error += np.square(before - after, dtype=np.float64).sum(axis=0)
        self._squares += np.square(before, dtype=np.float64).sum(axis=0)

    def layers(self, group: str) -> list[LayerQuality]:
        """The quality of each layer; none if no token was added."""
        if not self._cosines:
            return []
        cosines = np.concatenate(self._cosines)
        squares = np.where(self._squares > 0, self._squares, 1)  # a channel of zeros has no error
        errors = np.sqrt(self._squared_error / squares).reshape(self._num_layers, -1)
        return [
            LayerQuality(
                group=group,
                layer=layer,
                num_tokens=len(cosines),
                min_cosine=round(float(cosines[:, layer].min()), DIGITS),
                median_cosine=round(float(np.median(cosines[:, layer])), DIGITS),
                median_channel_error=round(float(np.median(errors[layer])), DIGITS),
                max_channel_error=round(float(errors[layer].max()), DIGITS),
                worst_channel=int(errors[layer].argmax()),
            )
            for layer in range(self._num_layers)
        ]


def check_quality(
    plan: FrozenPlan,
    encoders: Encoders,
    decoders: Decoders,
    source: OpenedSource,
    *,
    store: StoreSection,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> FrozenPlan:
    """Measure the quality of the int8 groups that a plan begins to store.

    Args:
      plan: not frozen yet.
      store: section of the recipe.
      say: called with the figures of each layer, and with a warning about captions of low quality.
      progress: called with the number of captions that are encoded, and of all.
    Returns: the plan with the figures; captions that are to be stored in float16 instead have none.
    """
    earlier = {quality.group for quality in plan.before.quality} if plan.before else set()
    measured = list[LayerQuality]()
    for encoder in plan.spec.text_encoders:
        is_int8 = encoder.spec.has_tokens and encoder.spec.dtype == "int8"
        group = caption_folder(encoder.name)
        if not is_int8 or group in earlier:
            continue
        layers = _caption_quality(plan, encoder, encoders.captions[encoder.name], progress)
        smallest = min((layer.min_cosine for layer in layers), default=1.0)
        for line in describe(layers):
            say(f"quality: {line}")
        if smallest >= store.min_text_cosine:
            measured += layers
        elif store.on_low_quality == "float16":
            say(f"quality: {group}: below store.min_text_cosine = {store.min_text_cosine:g}, so stored as float16")
            plan = replace(plan, spec=_in_float16(plan.spec, encoder.name))
        else:
            say(
                f"warning: quality: {group}: below store.min_text_cosine = {store.min_text_cosine:g}. int8 rounds the "
                "numbers beside very large ones too coarsely: set store.on_low_quality=float16, or another "
                "store.text_dtype."
            )
            measured += layers
    image_layers = _image_quality(plan, encoders, decoders, source, earlier)
    for line in describe(image_layers):
        say(f"quality: {line}")
    return replace(plan, quality=[*measured, *image_layers])


def describe(layers: Sequence[LayerQuality]) -> list[str]:
    """A sentence for each layer of each group."""
    lines = []
    for layer in layers:
        num_layers = sum(other.group == layer.group for other in layers)
        name = f"{layer.group}, layer {layer.layer + 1} of {num_layers}" if num_layers > 1 else layer.group
        lines.append(
            f"{name}: cosine without the largest 1 % at least {layer.min_cosine:.4f}, median "
            f"{layer.median_cosine:.4f}, of {layer.num_tokens} tokens; error over RMS of a channel: median "
            f"{layer.median_channel_error:.2%}, channel {layer.worst_channel} {layer.max_channel_error:.2%}"
        )
    return lines


def _caption_quality(
    plan: FrozenPlan, encoder: TextEncoder, model: CaptionEncoder, progress: Callable[[int, int], None]
) -> list[LayerQuality]:
    """The quality of a sample of the captions that a plan encodes, each in a batch of its own."""
    meter = QualityMeter(encoder.spec.width, encoder.spec.num_layers)
    texts = _sampled_texts(plan)
    computed = model.computed
    for number, text in enumerate(texts):
        with of_table(encoder.name):
            tokens = model.encode([text], must_be_finite=False).row(0).tokens
        assert tokens is not None, "the encoder stores tokens"
        if np.isfinite(tokens).all():
            stored = narrow(tokens, "int8", encoder.spec.num_layers)
            if is_storable(stored, "int8"):
                meter.add(tokens, widen(stored, "int8"))
        progress(number + 1, len(texts))
    model.computed = computed  # counts the tokens of the store alone
    model.release()
    return meter.layers(caption_folder(encoder.name))


def _sampled_texts(plan: FrozenPlan) -> list[str]:
    """Texts of the captions that a plan adds, or of all if it adds none, spread by their hash; not the empty one."""
    texts = plan.captions["text"].slice(plan.first_caption)
    if not len(texts):
        texts = plan.captions["text"]
    spread = np.linspace(0, len(texts) - 1, min(CANDIDATES, len(texts))).round().astype(int)
    candidates = [text for text in texts.take(pa.array(np.unique(spread))).to_pylist() if text]
    return sorted(candidates, key=lambda text: xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))[:NUM_CAPTIONS]


def _in_float16(spec: StoreSpec, name: str) -> StoreSpec:
    """The spec of a store that has the captions of a text encoder in float16."""
    texts = [
        encoder.model_copy(update={"spec": encoder.spec.model_copy(update={"dtype": "float16"})})
        if encoder.name == name
        else encoder
        for encoder in spec.texts
    ]
    text = spec.text
    if text and not name:
        text = text.model_copy(update={"dtype": "float16"})
    return spec.model_copy(update={"text": text, "texts": texts}).with_fingerprint()


def _image_quality(
    plan: FrozenPlan, encoders: Encoders, decoders: Decoders, source: OpenedSource, earlier: set[str]
) -> list[LayerQuality]:
    """The quality of int8 features and latents, on a sample of the images of a plan."""
    columns = dict[str, Column]()
    for group, column in image_columns(encoders, plan.spec.latent).items():
        is_int8 = column.token_dtype == "int8" or (group == LATENTS and plan.spec.latent.dtype == "int8")
        if is_int8 and column.image == OWN and _group_name(group) not in earlier:
            columns[group] = column
    meters = dict[str, QualityMeter]()
    if columns:
        for image in _sampled_images(plan, list(columns.values()), decoders, source):
            for number, (group, column) in enumerate(columns.items()):
                for before, after in _tokens(column, image, number, plan.spec.latent):
                    meter = meters.setdefault(group, QualityMeter(before.shape[-1]))
                    meter.add(before, after)
    return [layer for group, meter in meters.items() for layer in meter.layers(_group_name(group))]


def _sampled_images(
    plan: FrozenPlan, columns: Sequence[Column], decoders: Decoders, source: OpenedSource
) -> Iterator[EncodedImage]:
    num_images = 0
    for position in checked_positions(plan):
        image = encode_image(plan, position, columns, decoders, source)
        if image:
            yield image
            num_images += 1
        if num_images == NUM_IMAGES:
            return


def _group_name(group: str) -> str:
    """The group of a column in ``LayerQuality``."""
    return "latents" if group == LATENTS else f"{FEATURES}/{group}"


def _tokens(
    column: Column, image: EncodedImage, number: int, latent: LatentSpec
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(n, D) float32 tokens of an image, from the encoder and as stored; nothing if int8 cannot hold them."""
    positions = np.array([image.position])
    outputs = image.outputs(number)
    rows = column.narrow(outputs, positions)
    if not all(np.isfinite(part).all() for part in [*outputs, *rows]):
        return
    if column.group == LATENTS:
        exact = to_stored(outputs[0], latent.model_copy(update={"dtype": "float32"}), positions)
        yield _positions(exact), _positions(widen_latents(rows[0]))
        return
    for output, tokens in enumerate(outputs):
        stored = StoredTokens(rows[2 * output], rows[2 * output + 1])
        width = tokens.shape[-1]
        yield tokens.reshape(-1, width), widen(stored, "int8").reshape(-1, width)


def _positions(latents: np.ndarray) -> np.ndarray:
    """(B H W, C) positions of (B, C, H, W) latents."""
    return np.moveaxis(latents, 1, -1).reshape(-1, latents.shape[1])
