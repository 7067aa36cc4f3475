"""Contact sheets: pictures in a grid with their captions below, as one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pydantic import ValidationError

from ...datasets.batches.latents import raw_latents
from ...datasets.errors import EncoderError, RecordRejected, StoreError
from ...datasets.format.buckets import bucket_size
from ...datasets.format.encoder_paths import encoder_section
from ...datasets.format.schema import LatentSpec
from ...datasets.store import LatentStore
from ...precompute.config import SourceSection, VaeSection
from ...precompute.encoders.vae import ImageEncoder
from ...precompute.images.decoders import Decoders
from ...precompute.planning.compare import DUPLICATE
from ...precompute.sources.several import SourcePaths, list_sources
from .summary import ledger

Originals = Mapping[str, np.ndarray]
"""Source pictures by the key of their record, (height, width, 3) uint8 each."""

CELL_PX = 192
COLUMNS = 6
CAPTION_LINES = 3
FONT_PX, LINE_PX = 13, 17
MARGIN_PX, GAP_PX = 12, 4  # between cells; between what is in a cell
ORIGINAL, DECODED = "original", "decoded"  # below the two pictures of a cell
FRAME, EMPTY, KEY_COLOUR = (190, 190, 190), (236, 236, 236), (110, 110, 110)


@dataclass(frozen=True)
class Cell:
    """A picture of a sheet.

    Args:
      pixels: (height, width, 3) uint8, of any size; None: there is none, and a grey field takes its place.
      caption: below it, at most ``CAPTION_LINES`` lines; what is longer is cut.
      key: above the caption in grey, one line; its middle is left out where it is too long.
      original: the source picture, drawn on the left; None: without.
    """

    pixels: np.ndarray | None
    caption: str = ""
    key: str = ""
    original: np.ndarray | None = None


def draw_sheet(cells: Sequence[Cell], *, columns: int = COLUMNS, with_originals: bool = False) -> Image.Image:
    """Lay pictures out in a grid, each scaled to its frame, with its key and caption below.

    Args:
      columns: most pictures of a row; half as many with originals.
      with_originals: each cell has two frames, the original's on the left; below them stands which is which.
    """
    font: Any = ImageFont.load_default(FONT_PX)
    frames = 2 if with_originals else 1
    columns = min(max(1, columns // frames), len(cells))
    width = frames * CELL_PX + (frames - 1) * GAP_PX
    texts = [_wrapped(cell.caption, font, width) for cell in cells]
    keys = [_shortened(_printable(cell.key), font, width) for cell in cells]
    side_lines, key_lines, text_lines = frames - 1, int(any(keys)), max(map(len, texts))
    height = CELL_PX + GAP_PX + (side_lines + key_lines + text_lines) * LINE_PX
    rows = -(-len(cells) // columns)
    step_x, step_y = width + MARGIN_PX, height + MARGIN_PX
    sheet = Image.new("RGB", (columns * step_x + MARGIN_PX, rows * step_y + MARGIN_PX), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (cell, key, lines) in enumerate(zip(cells, keys, texts, strict=True)):
        left, top = MARGIN_PX + i % columns * step_x, MARGIN_PX + i // columns * step_y
        sides = [(ORIGINAL, cell.original), (DECODED, cell.pixels)] if with_originals else [("", cell.pixels)]
        below = top + CELL_PX + GAP_PX
        for number, (side, pixels) in enumerate(sides):
            x = left + number * (CELL_PX + GAP_PX)
            _paste(sheet, pixels, x, top)
            draw.text((x, below), side, fill=KEY_COLOUR, font=font)
        below += side_lines * LINE_PX
        draw.text((left, below), key, fill=KEY_COLOUR, font=font)
        for number, text in enumerate(lines, key_lines):
            draw.text((left, below + number * LINE_PX), text, fill="black", font=font)
    return sheet


def _paste(sheet: Image.Image, pixels: np.ndarray | None, left: int, top: int) -> None:
    """Draw a picture into the middle of its square, with a frame around the picture; a grey square where it is none."""
    box = (left, top, left + CELL_PX - 1, top + CELL_PX - 1)
    if pixels is None:
        ImageDraw.Draw(sheet).rectangle(box, fill=EMPTY, outline=FRAME)
        return
    picture, room = Image.fromarray(pixels), CELL_PX - 2
    scale = room / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    picture = picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    x, y = left + (CELL_PX - size[0]) // 2, top + (CELL_PX - size[1]) // 2
    ImageDraw.Draw(sheet).rectangle((x - 1, y - 1, x + size[0], y + size[1]), outline=FRAME)
    sheet.paste(picture, (x, y))


def _wrapped(text: str, font: Any, width_px: int) -> list[str]:
    """Lines that are no wider than this, as the font has them; the last one ends in dots where text is left over."""
    lines, words = [""], [part for word in _printable(text).split() for part in _pieces(word, font, width_px)]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width_px:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > CAPTION_LINES:
        last = lines[CAPTION_LINES - 1]
        while last and font.getlength(last + "...") > width_px:
            last = last[:-1]
        lines = [*lines[: CAPTION_LINES - 1], last.rstrip() + "..."]
    return [line for line in lines if line]


def _pieces(word: str, font: Any, width_px: int) -> list[str]:
    """A word cut into pieces that fit on a line."""
    pieces = [""]
    for character in word[:1000]:
        if font.getlength(pieces[-1] + character) > width_px:
            pieces.append("")
        pieces[-1] += character
    return pieces


def _shortened(text: str, font: Any, width_px: int) -> str:
    """One line, its middle replaced by dots where it is too wide: the ends of a key tell it apart."""
    if font.getlength(text) <= width_px:
        return text
    kept = len(text)
    while kept > 2 and font.getlength(text[: kept // 2] + "..." + text[-(kept // 2) :]) > width_px:
        kept -= 1
    return text[: kept // 2] + "..." + text[-(kept // 2) :]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


@dataclass(frozen=True)
class SheetOptions:
    """What a contact sheet shows.

    Args:
      key: this record alone.
      rejects: rejected records, with their source pictures if ``source`` is given and they can be read.
      count: largest number of pictures.
      bucket, class_name: records of these alone.
      source: the pictures that the store was made from.
      with_originals: the source picture on the left of each decoded one.
      vae: hub id or folder of the decoder; None: the store's own.
    """

    key: str | None = None
    rejects: bool = False
    count: int = 24
    bucket: str | None = None
    class_name: str | None = None
    source: SourcePaths | None = None
    with_originals: bool = False
    vae: str | None = None


def write_sheet(store: LatentStore, path: Path, options: SheetOptions) -> str:
    """Write the contact sheet of ``leandit inspect --sheet`` as PNG.

    Returns: a count of what it shows, for the user.
    Raises: StoreError, SourceError, EncoderError, UnknownKey, RecipeError: an unknown class.
    """
    if options.rejects:
        rejects = ledger(store)[: options.count]
        if not rejects:
            raise StoreError(f"store '{store.path}': it has no rejects, so there is nothing to show.")
        keys = [reject["key"] for reject in rejects]
        image = rejects_sheet(rejects, read_originals(store, options.source, keys) if options.source else {})
        shown = f"{len(rejects)} rejected records"
    else:
        positions = _chosen_positions(store, options)
        keys = [store.record_at(position).key for position in positions]
        originals = read_originals(store, options.source, keys) if options.source and options.with_originals else None
        decoder = load_decoder(encoder_section(store.spec, "vae", store.path), options.vae, torch.device("cpu"))
        image, shown = store_sheet(store, decoder, positions, originals=originals), f"{len(keys)} records"
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG")
    return shown


def _chosen_positions(store: LatentStore, options: SheetOptions) -> list[int]:
    if not options.key:
        label = store.class_names.find(options.class_name) if options.class_name else None
        return choose_records(store, count=options.count, bucket=options.bucket, label=label)
    record = store.record(options.key)
    if record.status != "stored":
        raise StoreError(f"record '{options.key}': it is {record.status}, so there is nothing to decode.")
    return [record.index]


def choose_records(store: LatentStore, *, count: int, bucket: str | None = None, label: int | None = None) -> list[int]:
    """Positions in the records table of stored records, spread evenly over the store, bucket after bucket.

    Args:
      bucket, label: of these alone.
    Raises: StoreError: there are none; UnknownKey: the store has no such bucket.
    """
    indexes = [store.index(name) for name in ([bucket] if bucket else store.buckets)]
    parts = [index.records if label is None else index.records[index.labels == label] for index in indexes]
    positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not len(positions):
        raise StoreError(f"store '{store.path}': it holds no such records, so there is nothing to show.")
    chosen = np.unique(np.linspace(0, len(positions) - 1, min(count, len(positions))).round().astype(int))
    return positions[chosen].tolist()


def store_sheet(
    store: LatentStore, decoder: ImageEncoder, positions: Sequence[int], *, originals: Originals | None = None
) -> Image.Image:
    """Contact sheet of decoded records.

    Args:
      decoder: of the store's VAE.
      positions: in the records table (``choose_records``).
      originals: the source pictures of the records by key, drawn beside them.
    """
    cells = []
    for position in positions:
        record = store.record_at(position)
        assert record.bucket is not None
        latent = stored_to_latent(store, store.latents(record.bucket).take(np.array([record.row])))
        pixels = decoder.decode(latent, zero_to_one=gives_zero_to_one(store.spec.latent))[0]
        caption = caption_of(store, record.caption_ids, record.label)
        cells.append(Cell(pixels, caption, record.key, originals.get(record.key) if originals else None))
    return draw_sheet(cells, with_originals=originals is not None)


def rejects_sheet(rejects: Sequence[Mapping[str, Any]], originals: Originals) -> Image.Image:
    """Contact sheet of rejected records: the source picture where it can be read, and the reason.

    A repeated key has no picture here: the one of that name is of the record that counts.

    Args:
      rejects: as ``inspector.ledger`` has them, at least one.
    """

    def picture(reject: Mapping[str, Any]) -> np.ndarray | None:
        return None if reject["reason"] == DUPLICATE else originals.get(reject["key"])

    return draw_sheet([Cell(picture(one), f"{one['reason']}: {one['detail'] or ''}", one["key"]) for one in rejects])


def read_originals(store: LatentStore, source: SourcePaths, keys: Sequence[str]) -> Originals:
    """Source pictures of some records, cropped and resized as the store has them; those that can be read.

    Args:
      source: path or URL of the source, or of each; its pictures as they are now.
    Raises: SourceError.
    """
    images = store.spec.images
    section = SourceSection.model_validate(store.spec.recipe.get("source", {}))  # an import has none
    listed = list_sources(source, section)
    wanted, found = set(keys), dict[str, np.ndarray]()
    with Decoders(1) as decoders:
        for record in listed.records:
            if not wanted:
                break
            if record.key not in wanted:
                continue
            wanted.remove(record.key)
            bucket = store.record(record.key).bucket or f"{images.resolution_px}x{images.resolution_px}"
            try:
                place = listed.place(record.path, record.offset, record.num_bytes, stage="decode")
                found[record.key] = decoders.picture(
                    *place,
                    bucket=bucket_size(bucket),
                    crop=images.crop,
                    resize_filter=images.resize_filter,
                    exif_orientation=images.exif_orientation,
                ).pixels
            except RecordRejected:
                continue  # what cannot be read has a grey field
    return found


def stored_to_latent(store: LatentStore, stored: np.ndarray) -> np.ndarray:
    """Raw latents to decode from stored rows: the mean where a posterior is stored; (B, C, H, W) float32."""
    rows = torch.from_numpy(stored.astype(np.float32)[:, : store.spec.latent.channels])
    return raw_latents(rows, store.spec.latent).numpy()


def gives_zero_to_one(spec: LatentSpec) -> bool:
    """The VAE's decoder was used on pictures from 0 to 1."""
    return spec.decoding is not None and spec.decoding.zero_to_one


def caption_of(store: LatentStore, caption_ids: Sequence[int], label: int) -> str:
    """What to write below a record beside its key: its first caption, else its class, else nothing."""
    if caption_ids:
        return store.captions["text"][caption_ids[0]].as_py()
    if label >= 0 and store.spec.classes:
        return f"{label}: {store.class_names.describe(label)}"
    return ""


def load_decoder(section: Any, vae: str | None, device: torch.device) -> ImageEncoder:
    """The VAE that a store or snapshot was made with, or another one that the user names.

    Args:
      section: [vae] of the store's recipe.
      vae: hub id or folder instead.
    Raises: EncoderError: it is not to be had; the message says how to name another.
    """
    chosen = {"model": vae, "subfolder": "", "revision": ""} if vae else {}
    try:
        wanted = VaeSection.model_validate(section | chosen | {"dtype": "float32"})
    except (ValidationError, TypeError) as error:
        raise EncoderError(f"the [vae] of the recipe is none ({error}). Name a VAE with --vae PATH.") from error
    try:
        return ImageEncoder(wanted, device)
    except EncoderError as error:
        raise EncoderError(f"{error} To decode with a VAE that lies elsewhere, give its folder with --vae.") from error
