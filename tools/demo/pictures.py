"""Generated pictures of coloured shapes with captions, and the pixel rule that compares a picture with its caption.

The first object in a caption is the larger one, so the main object of any picture, drawn or sampled, has the colour
that covers most pixels.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (50, 80, 225),
    "yellow": (240, 205, 30),
    "purple": (160, 50, 190),
    "cyan": (20, 190, 205),
}
SHAPES = ("circle", "square", "triangle")
RELATIONS = ("above", "below", "left of", "right of")
SIZES_PX = ((128, 128), (96, 160), (160, 96))  # height, width: the three aspect ratios
SUPERSAMPLING = 3
PAIR_SHARE = 0.35  # of pictures with two objects
MAX_SHIFT = 0.15  # of a single object from the centre, as a share of the free room

MIN_CHROMA = 0.25  # below it a pixel is background (which is grey); the palette's own chroma is 0.55 or more
# Area over bounding box, measured on drawn pictures at 64 px: square 0.99 to 1, circle 0.75 to 0.84, triangle 0.56 to
# 0.67.
SQUARE_FILL = 0.91
CIRCLE_FILL = 0.71


@dataclass(frozen=True)
class Scene:
    """A picture: a main object, and optionally a smaller second one."""

    height_px: int
    width_px: int
    size: str  # "big" or "small"
    colour: str
    shape: str
    relation: str | None
    other_colour: str
    other_shape: str
    background: int  # grey level, 0 to 255
    shift: tuple[float, float]  # of a single object from the centre, -1 to 1 of what MAX_SHIFT allows

    @property
    def captions(self) -> list[str]:
        """Two captions, the full one first."""
        if self.relation is None:
            return [f"a {self.size} {self.colour} {self.shape}", f"a {self.colour} {self.shape}"]
        main, other = f"{self.colour} {self.shape}", f"{self.other_colour} {self.other_shape}"
        return [f"a {self.size} {main} {self.relation} a tiny {other}", f"a {main} and a {other}"]


def draw_scene(scene: Scene) -> Image.Image:
    """Draw one scene, antialiased: an RGB picture of (height_px, width_px)."""
    s = SUPERSAMPLING
    image = Image.new("RGB", (scene.width_px * s, scene.height_px * s), (scene.background,) * 3)
    draw = ImageDraw.Draw(image)
    short = min(scene.height_px, scene.width_px)
    radius = {"big": 0.30, "small": 0.21}[scene.size] * short
    other_radius = 0.11 * short
    centre_y, centre_x = scene.height_px / 2, scene.width_px / 2
    if scene.relation is None:
        centre_y += scene.shift[0] * (centre_y - radius) * MAX_SHIFT
        centre_x += scene.shift[1] * (centre_x - radius) * MAX_SHIFT
    else:
        # The pair lies on one axis: "a above b" puts a in the upper part.
        sign_y, sign_x = {"above": (-1, 0), "below": (1, 0), "left of": (0, -1), "right of": (0, 1)}[scene.relation]
        gap = 0.06 * short
        lead = other_radius + gap / 2  # so that the pair as a whole is centred
        other_y = centre_y - sign_y * (radius + gap / 2)
        other_x = centre_x - sign_x * (radius + gap / 2)
        centre_y, centre_x = centre_y + sign_y * lead, centre_x + sign_x * lead
        _draw_shape(draw, scene.other_shape, other_y * s, other_x * s, other_radius * s, COLOURS[scene.other_colour])
    _draw_shape(draw, scene.shape, centre_y * s, centre_x * s, radius * s, COLOURS[scene.colour])
    return image.resize((scene.width_px, scene.height_px), Image.Resampling.BOX)


def make_scenes(count: int, *, seed: int) -> list[Scene]:
    """``count`` random scenes; the same seed gives the same scenes."""
    rng = np.random.default_rng(seed)
    colours = list(COLOURS)
    scenes = []
    for i in range(count):
        height_px, width_px = SIZES_PX[i % len(SIZES_PX)]
        colour, other_colour = rng.permutation(len(colours))[:2]
        scenes.append(
            Scene(
                height_px=height_px,
                width_px=width_px,
                size=("big", "small")[rng.integers(2)],
                colour=colours[colour],
                shape=SHAPES[rng.integers(3)],
                relation=RELATIONS[rng.integers(4)] if rng.random() < PAIR_SHARE else None,
                other_colour=colours[other_colour],
                other_shape=SHAPES[rng.integers(3)],
                background=int(rng.choice((200, 225, 250))),
                shift=(float(rng.uniform(-1, 1)), float(rng.uniform(-1, 1))),
            )
        )
    return scenes


def read_main_object(picture: np.ndarray) -> tuple[str, str] | None:
    """Find the main object of a picture by counting pixels.

    Args:
      picture: (height, width, 3) uint8.
    Returns: (colour, shape), or None if under 1 % of the pixels are coloured.
    """
    nearest = nearest_colours(picture)
    if (nearest >= 0).mean() < 0.01:
        return None
    main = int(np.bincount(nearest[nearest >= 0], minlength=len(COLOURS)).argmax())
    return list(COLOURS)[main], _read_shape(nearest == main)


def nearest_colours(picture: np.ndarray) -> np.ndarray:
    """The colour of each pixel, (height, width) positions in ``COLOURS``; -1 for the grey background."""
    rgb = picture.astype(np.float32) / 255
    chroma = rgb.max(axis=2) - rgb.min(axis=2)
    hues = np.array([colorsys.rgb_to_hsv(*(c / 255 for c in colour))[0] for colour in COLOURS.values()])
    distance = np.abs(_hue(rgb, chroma)[..., None] - hues)
    nearest = np.minimum(distance, 1 - distance).argmin(axis=2)
    return np.where(chroma > MIN_CHROMA, nearest, -1)


def main_object_of(caption: str) -> tuple[str, str]:
    """The first colour and shape in a caption."""
    words = caption.split()
    return next(w for w in words if w in COLOURS), next(w for w in words if w in SHAPES)


def _read_shape(mask: np.ndarray) -> str:
    # A row or column belongs to the object when it holds more than a stray pixel or two of it.
    rows = np.flatnonzero(mask.sum(axis=1) > 2)
    columns = np.flatnonzero(mask.sum(axis=0) > 2)
    if not len(rows) or not len(columns):
        return SHAPES[0]
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    fill = box.mean()
    return "square" if fill > SQUARE_FILL else "circle" if fill > CIRCLE_FILL else "triangle"


def _hue(rgb: np.ndarray, chroma: np.ndarray) -> np.ndarray:
    """(height, width, 3) in 0..1 to hue in 0..1, where grey has hue 0."""
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    safe = np.where(chroma > 0, chroma, 1)
    sector = np.where(
        rgb.max(axis=2) == red,
        (green - blue) / safe % 6,
        np.where(rgb.max(axis=2) == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    return sector / 6


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, y: float, x: float, radius: float, colour: tuple) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
