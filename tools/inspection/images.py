"""Images of latents, and sheets of images with their captions below, as one PNG."""

from __future__ import annotations

import contextlib
import io
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw, ImageFont

from ...datasets.disk.strays import write_output
from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import LatentSpec
from ...datasets.format.token_dtypes import widen_latents
from ...datasets.order.slices import spread
from ...datasets.revisions.local import vae_of
from ...datasets.store import LatentStore
from ...errors import EncoderError, RecordRejected, StoreError
from ...precompute.config import SourceSection, VaeSection
from ...precompute.images.decoders import Decoders
from ...precompute.images.pixels import color_of, max_megapixels_of
from ...precompute.planning.compare import DUPLICATE
from ...precompute.sources.several import SourcePaths, list_sources
from ...recipe import parse_stored
from ..terminal.text import printable
from .store_facts import StoreFacts

if TYPE_CHECKING:
    import torch

    from ...precompute.encoders.vae import ImageEncoder

TINY = "AutoencoderTiny"
CELL_PX, MARGIN_PX, GAP_PX = 192, 12, 4  # of a frame; between cells; inside a cell
FONT_PX, LINE_PX = 13, 17
COLUMNS, CAPTION_LINES = 6, 3
DECODED, EDITED = ("original", "decoded"), ("original", "edited")  # titles of two frames
MAX_CHARS, DOTS = 1000, "..."  # of a text that is measured; in place of what is cut
LIKE_ASCII = str.maketrans({"\u2013": "-", "\u2014": "-", "\u00d7": "x", "ß": "ss", "æ": "ae", "œ": "oe", "ø": "o"})
FRAME, EMPTY, KEY_COLOUR = (190, 190, 190), (236, 236, 236), (110, 110, 110)

# ------------------------------------------------------------------------------------------------------------- decoding


class LatentDecoder:
    """The VAE of a store or run, or the one that the user names.

    Only a VAE that the user names is fetched from the hub; that of a store or run has to be on this machine.

    Args:
      made_by: the VAE of the latents, as in ``vae_of``.
      spec: of the latents.
      vae: hub id or folder of another VAE for the same latents, such as a tiny one; None: that of ``made_by``.
      where: whose latents they are, for errors.
    Raises: EncoderError: it cannot be loaded, or is for other latents; ModuleNotFoundError: torch is not installed.
    """

    def __init__(
        self, made_by: Mapping[str, Any], spec: LatentSpec, vae: str | None, device: torch.device, *, where: str
    ) -> None:
        self._spec = spec
        self._encoder = encoder = _load(made_by["model"], vae, device)
        self.identity = encoder.identity
        self.is_own = self.identity.weights_sha256 == made_by["weights_sha256"]
        if (encoder.num_channels, encoder.downscale) != (spec.channels, spec.downscale) or not encoder.has_decoder:
            raise EncoderError(
                f"vae '{self.identity.model}': it decodes {encoder.num_channels if encoder.has_decoder else 'no'} "
                f"channels of 1/{encoder.downscale} of the pixels, the latents of {where} have {spec.channels} of "
                f"1/{spec.downscale}. Pass a VAE for these latents with --vae."
            )
        # The latents of a tiny VAE are those of its large one after shift and scale.
        is_rescaled = (self.identity.class_name == TINY) != (made_by.get("class_name") == TINY)
        self._rescaling = _rescaling(made_by, spec, encoder, where) if is_rescaled else None

    @classmethod
    def of_store(cls, store: LatentStore, vae: str | None, device: torch.device) -> LatentDecoder:
        """The decoder of a store's rows; arguments and errors as of the class."""
        made_by = vae_of(store.spec, store.path)
        return cls(made_by, store.spec.latent, vae, device, where=f"store '{store.path}'")

    def check_size(self, height_px: int, width_px: int) -> None:
        """Raise RecipeError for images of a size that the VAE does not take."""
        self._encoder.check_size(height_px, width_px)

    def raw(self, rows: np.ndarray) -> np.ndarray:
        """Raw latents, (B, C, H, W) float32, of rows as stored: (B, C, H, W), or the means of (B, 2C, H, W) moments."""
        import torch

        from ...datasets.batches.latents import raw_latents

        means = torch.from_numpy(widen_latents(rows)[:, : self._spec.channels].astype(np.float32))
        return raw_latents(means, self._spec).numpy()

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Raw latents of images, the means of moments: what ``decode`` takes.

        Args:
          pixels: (B, height_px, width_px, 3) uint8.
        Returns: (B, C, H, W) float32.
        """
        raw = self._encoder.encode(pixels)[:, : self._spec.channels]
        if self._rescaling:
            shift, scale, own_shift, own_scale = self._rescaling
            raw = (raw - own_shift) * own_scale / scale + shift
        return raw

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Images of raw latents.

        Args:
          raw: (B, C, H, W) float32, neither shifted nor scaled.
        Returns: (B, height_px, width_px, 3) uint8.
        """
        if self._rescaling:
            shift, scale, own_shift, own_scale = self._rescaling
            raw = (raw - shift) * scale / own_scale + own_shift
        decoding = self._spec.decoding
        return self._encoder.decode(raw, zero_to_one=decoding is not None and decoding.zero_to_one)

    def decode_rows(self, rows: np.ndarray) -> np.ndarray:
        """Images of rows as stored, (B, height_px, width_px, 3) uint8."""
        return self.decode(self.raw(rows))


def _load(section: Any, vae: str | None, device: torch.device) -> ImageEncoder:
    from ...precompute.encoders.model_files import nothing_fetched
    from ...precompute.encoders.vae import ImageEncoder

    other = {"model": vae, "subfolder": "", "revision": ""} if vae else {}
    try:
        vae_section, _ = parse_stored("vae", VaeSection, section | other | {"dtype": "float32"})
    except (ValueError, TypeError) as error:  # of pydantic too
        raise EncoderError(f"section [vae] of the recipe is invalid ({error}). Pass a VAE with --vae PATH.") from error
    try:
        with contextlib.nullcontext() if vae else nothing_fetched():
            return ImageEncoder(vae_section, device)
    except EncoderError as error:
        raise EncoderError(f"{error} If the VAE is in another folder, pass it with --vae.") from error


def _rescaling(made_by: Mapping[str, Any], spec: LatentSpec, encoder: ImageEncoder, where: str) -> list[np.ndarray]:
    """Shift and scale of the VAE of the latents, then of the decoder, (C, 1, 1) float32 each."""
    own = encoder.latent_spec(VaeSection(), "float32")
    # Snapshots of earlier releases have the normalization of the recipe only.
    numbers = made_by.get("shift", spec.shift), made_by.get("scale", spec.scale), own.shift, own.scale
    try:
        return [np.array(each, np.float32).reshape(spec.channels, 1, 1) for each in numbers]
    except (TypeError, ValueError) as error:
        raise EncoderError(
            f"vae '{encoder.identity.model}': it takes latents after the shift and scale of their VAE, and {where} "
            "does not have these. Pass the VAE itself with --vae."
        ) from error


# ----------------------------------------------------------------------------------------------------------- any sheets


class Cell(NamedTuple):
    """An image of a sheet.

    Args:
      pixels: (height, width, 3) uint8, of any size; None draws a gray field.
      caption: below the image, cut after ``CAPTION_LINES`` lines.
      key: one line in gray above the caption; a long key loses its middle.
      original: the source image, or the one that is edited, for the frame on the left.
    """

    pixels: np.ndarray | None
    caption: str = ""
    key: str = ""
    original: np.ndarray | None = None


def _drawable(text: str) -> str:
    """Text without accents and dashes, which Pillow's font draws as boxes."""
    parts = unicodedata.normalize("NFKD", text.translate(LIKE_ASCII))
    return "".join(character for character in parts if not unicodedata.combining(character))


def draw_sheet(cells: Sequence[Cell], *, columns: int = COLUMNS, titles: tuple[str, str] | None = None) -> Image.Image:
    """Lay out images in a grid, each scaled to its frame, with its key and caption below.

    Args:
      columns: largest number of images in a row; half as many with originals.
      titles: of the two frames of a cell, the original on the left; None: one frame, without a title.
    """
    font: Any = ImageFont.load_default(FONT_PX)
    frames = 2 if titles else 1
    columns = min(max(1, columns // frames), len(cells))
    width = frames * CELL_PX + (frames - 1) * GAP_PX
    texts = [_wrapped(_drawable(cell.caption), font, width) for cell in cells]
    keys = [_shortened(_drawable(cell.key), font, width) for cell in cells]
    num_lines = frames - 1 + any(keys) + max(map(len, texts))
    step_x, step_y = width + MARGIN_PX, CELL_PX + GAP_PX + num_lines * LINE_PX + MARGIN_PX
    size = columns * step_x + MARGIN_PX, -(-len(cells) // columns) * step_y + MARGIN_PX
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, (cell, key, lines) in enumerate(zip(cells, keys, texts, strict=True)):
        left, top = MARGIN_PX + i % columns * step_x, MARGIN_PX + i // columns * step_y
        below = top + CELL_PX + GAP_PX
        if titles:
            x = left + CELL_PX + GAP_PX
            _paste(sheet, cell.original, left, top)
            _paste(sheet, cell.pixels, x, top)
            draw.text((left, below), titles[0], fill=KEY_COLOUR, font=font)
            draw.text((x, below), titles[1], fill=KEY_COLOUR, font=font)
            below += LINE_PX
        else:
            _paste(sheet, cell.pixels, left, top)
        draw.text((left, below), key, fill=KEY_COLOUR, font=font)
        for number, text in enumerate(lines, int(any(keys))):
            draw.text((left, below + number * LINE_PX), text, fill="black", font=font)
    return sheet


def _paste(sheet: Image.Image, pixels: np.ndarray | None, left: int, top: int) -> None:
    """Draw a framed image in the middle of its square; a gray square without one."""
    if pixels is None:
        box = (left, top, left + CELL_PX - 1, top + CELL_PX - 1)
        ImageDraw.Draw(sheet).rectangle(box, fill=EMPTY, outline=FRAME)
        return
    image = Image.fromarray(pixels)
    scale = (CELL_PX - 2) / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    x, y = left + (CELL_PX - width) // 2, top + (CELL_PX - height) // 2
    ImageDraw.Draw(sheet).rectangle((x - 1, y - 1, x + width, y + height), outline=FRAME)
    sheet.paste(image, (x, y))


def _wrapped(text: str, font: Any, width_px: int) -> list[str]:
    """Lines of at most this width, broken between words where possible; the last one ends in dots if text is cut."""
    rest, lines = printable(" ".join(text[:MAX_CHARS].split())), []
    while rest and len(lines) < CAPTION_LINES:
        end = _num_fitting(rest, font, width_px)
        if end < len(rest) and " " in rest[: end + 1]:
            end = rest.rindex(" ", 0, end + 1)
        lines.append(rest[:end])
        rest = rest[end:].strip()
    if rest:
        lines[-1] = lines[-1][: _num_fitting(lines[-1], font, width_px - font.getlength(DOTS))].rstrip() + DOTS
    return lines


def _shortened(text: str, font: Any, width_px: int) -> str:
    """One line; dots replace its middle if it is too wide, since the ends of a key identify it."""
    text = printable(text[:MAX_CHARS])
    if font.getlength(text) <= width_px:
        return text
    half_px = (width_px - font.getlength(DOTS)) / 2
    return text[: _num_fitting(text, font, half_px)] + DOTS + text[-_num_fitting(text[::-1], font, half_px) :]


def _num_fitting(text: str, font: Any, width_px: float) -> int:
    """Number of characters from the start of a text that fit into a width, at least 1."""
    return max(1, bisect_right(range(1, len(text) + 1), width_px, key=lambda end: font.getlength(text[:end])))


# ---------------------------------------------------------------------------------------------------- sheets of a store


class ShownRecord(NamedTuple):
    """A stored record that is shown as an image; the caption is its first one, else its class, else empty."""

    position: int  # in the records table
    key: str
    bucket: str
    row: int  # in ``store.latents(bucket)``
    caption: str


def write_sheet(
    store: LatentStore,
    path: Path,
    *,
    key: str | None = None,
    rejects: bool = False,
    count: int = 24,
    bucket: str | None = None,
    class_name: str | None = None,
    source: SourcePaths | None = None,
    with_originals: bool = False,
    vae: str | None = None,
) -> str:
    """Write the contact sheet of ``leandit inspect --sheet`` as PNG.

    Args:
      key: of the only record to show.
      rejects: show rejected records, with their source images if ``source`` is given and they can be read.
      count: largest number of images.
      bucket, class_name: show records of these only.
      source: the images that the store was made from.
      with_originals: draw the source image to the left of each decoded one.
      vae: hub id or folder of the decoder; None: the store's own.
    Returns: what it shows, for the user.
    Raises: StoreError, SourceError, EncoderError, UnknownKey, RecipeError: an unknown class.
    """
    if rejects:
        rejected = StoreFacts(store).rejected.slice(0, count).to_pylist()
        if not rejected:
            raise StoreError(f"store '{store.path}': it has no rejects, so there is nothing to show.")
        originals = read_originals(store, source, [reject["key"] for reject in rejected]) if source else {}
        image, shown = draw_sheet(reject_cells(rejected, originals)), f"{len(rejected)} rejected records"
    else:
        import torch

        if key:
            record = store.record(key)
            if record.status != "stored" or record.bucket is None:
                raise StoreError(f"record '{key}': it is {record.status}, so there is nothing to decode.")
            place = np.flatnonzero(store.index(record.bucket).records == record.index)
            records = shown_records(store, {record.bucket: place})
        else:
            label = store.class_names.find(class_name) if class_name else None
            records = choose_records(store, count=count, bucket=bucket, label=label)
        keys = [record.key for record in records]
        originals = read_originals(store, source, keys) if source and with_originals else None
        decoder = LatentDecoder.of_store(store, vae, torch.device("cpu"))
        image, shown = store_sheet(store, decoder, records, originals=originals), f"{len(records)} records"
    write_output(path, png_bytes(image))
    return shown


def png_bytes(image: Image.Image) -> bytes:
    """An image as PNG."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def choose_records(
    store: LatentStore, *, count: int, bucket: str | None = None, label: int | None = None
) -> list[ShownRecord]:
    """Stored records, bucket after bucket, spread evenly over the store.

    Args:
      bucket, label: choose from these only.
    Raises: StoreError: no record matches; UnknownKey: the store has no such bucket.
    """
    buckets = [bucket] if bucket else list(store.buckets)
    labels = [store.index(name).labels for name in buckets]
    parts = [np.flatnonzero(each == label) if label is not None else np.arange(len(each)) for each in labels]
    numbers = np.repeat(np.arange(len(buckets)), [len(part) for part in parts])
    if not len(numbers):
        raise StoreError(f"store '{store.path}': it holds no such records, so there is nothing to show.")
    places, chosen = np.concatenate(parts), spread(len(numbers), count)
    return shown_records(store, {name: places[chosen[numbers[chosen] == i]] for i, name in enumerate(buckets)})


def shown_records(store: LatentStore, places: Mapping[str, np.ndarray]) -> list[ShownRecord]:
    """Records by their positions in the index of each bucket, in the order given."""
    keys, shown = store.record_columns(("key",))["key"], []
    for bucket, chosen in places.items():
        index = store.index(bucket)
        names = keys.take(pa.array(index.records[chosen], pa.int64())).to_pylist()
        for place, key in zip(chosen.tolist(), names, strict=True):
            caption, label = "", int(index.labels[place])
            if index.caption_starts[place] < index.caption_starts[place + 1]:
                caption = store.captions["text"][int(index.caption_ids[index.caption_starts[place]])].as_py()
            elif label >= 0 and store.num_classes:
                caption = f"{label}: {store.class_names.describe(label)}"
            shown.append(ShownRecord(int(index.records[place]), key, bucket, int(index.rows[place]), caption))
    return shown


def store_sheet(
    store: LatentStore,
    decoder: LatentDecoder,
    records: Sequence[ShownRecord],
    *,
    originals: Mapping[str, np.ndarray] | None = None,
) -> Image.Image:
    """Sheet of decoded records, with their source images by key on the left, where they are given."""
    cells = []
    for record in records:
        pixels = decoder.decode_rows(store.latents(record.bucket).take(np.array([record.row])))[0]
        cells.append(Cell(pixels, record.caption, record.key, (originals or {}).get(record.key)))
    return draw_sheet(cells, titles=DECODED if originals is not None else None)


def reject_cells(rejects: Sequence[Mapping[str, Any]], originals: Mapping[str, np.ndarray]) -> list[Cell]:
    """Rejected records: their source images if they can be read, and the reasons.

    A duplicate key has no image: the source image with that key belongs to the accepted record.
    """
    images = [None if one["reason"] == DUPLICATE else originals.get(one["key"]) for one in rejects]
    texts = [f"{one['reason']}: {one['detail'] or ''}" for one in rejects]
    return [Cell(image, text, one["key"]) for image, text, one in zip(images, texts, rejects, strict=True)]


def read_originals(store: LatentStore, source: SourcePaths, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Readable source images of some records by their keys, cropped and resized as the store has them.

    Returns: (height, width, 3) uint8 each.
    Raises: SourceError.
    """
    images = store.spec.images
    stored = store.spec.recipe.get("source", {})  # an imported store has none
    section, _ = parse_stored(f"recipe of store '{store.path}'", SourceSection, stored)
    listed = list_sources(source, section, needs_labels=False)
    remaining = set(keys)
    originals: dict[str, np.ndarray] = {}
    with Decoders(1, max_megapixels=max_megapixels_of(store.spec.recipe)) as decoders:
        for record in listed.records:
            if not remaining:
                break
            if record.key not in remaining:
                continue
            remaining.remove(record.key)
            bucket = store.record(record.key).bucket or f"{images.resolution_px}x{images.resolution_px}"
            with contextlib.suppress(RecordRejected):  # its cell stays gray
                place = listed.place(record.path, record.offset, record.num_bytes, stage="decode")
                decoded = decoders.decode(
                    *place,
                    bucket=bucket_size(bucket),
                    crop=images.crop,
                    resize_filter=images.resize_filter,
                    color=color_of(images.colour),
                )
                originals[record.key] = decoded.pixels
    return originals
