"""The demo's images and captions: one or two colored shapes on a gray background, in three aspect ratios."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from ...datasets.disk.files import write_atomic

COLORS = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (50, 80, 225),
    "yellow": (240, 205, 30),
    "purple": (160, 50, 190),
    "cyan": (20, 190, 205),
}
SHAPES = ("circle", "square", "triangle")
RELATIONS = {"above": (-1, 0), "below": (1, 0), "left of": (0, -1), "right of": (0, 1)}  # y, x of the main object
BACKGROUNDS = (200, 225, 250)  # gray levels
SIZES_PX = ((128, 128), (96, 160), (160, 96))  # height, width
# Shares of the image's shorter side: large enough that a corner covers several pixels at 64 px, small enough that two
# objects and their gap fit into it.
RADIUS = {"big": 0.34, "small": 0.25, "tiny": 0.11}
GAP = 0.06  # between two objects
PAIR_SHARE = 0.35  # of images with two objects
MAX_SHIFT = 0.15  # of a single object from the center, as a share of the free room
SUPERSAMPLING = 3


@dataclass(frozen=True)
class Scene:
    """An image: a main object, and optionally a smaller second one.

    Args:
      size: "big" or "small".
      relation: of the main object to the other one, or None for an image of one object.
      background: gray level, 0 to 255.
      shift: of a single object from the center, -1 to 1 of what ``MAX_SHIFT`` allows.
    """

    height_px: int
    width_px: int
    size: str
    color: str
    shape: str
    relation: str | None
    other_color: str
    other_shape: str
    background: int
    shift: tuple[float, float]

    @property
    def captions(self) -> list[str]:
        """Two captions, the full one first."""
        if self.relation is None:
            return [f"a {self.size} {self.color} {self.shape}", f"a {self.color} {self.shape}"]
        main, other = f"{self.color} {self.shape}", f"{self.other_color} {self.other_shape}"
        return [f"a {self.size} {main} {self.relation} a tiny {other}", f"a {main} and a {other}"]


def write_image_folder(folder: Path, count: int, progress: Callable[[str, int, int], None]) -> int:
    """Draw ``count`` images and their ``metadata.jsonl``, unless they exist.

    Returns: bytes of the images.
    """
    scenes = make_scenes(count, seed=0)
    rows = [{"file_name": f"images/{i:05d}.png", "captions": scene.captions} for i, scene in enumerate(scenes)]
    metadata = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / "metadata.jsonl"
    if not path.is_file() or path.read_bytes() != metadata:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for i, (scene, row) in enumerate(zip(scenes, rows, strict=True), 1):
            draw_scene(scene).save(folder / row["file_name"])
            progress("draw", i, count)
        write_atomic(path, metadata)
    return sum(file.stat().st_size for file in (folder / "images").iterdir())


def make_scenes(count: int, *, seed: int) -> list[Scene]:
    """``count`` random scenes; the same seed gives the same scenes."""
    rng = np.random.default_rng(seed)
    colors, scenes = list(COLORS), []
    for i in range(count):
        height_px, width_px = SIZES_PX[i % len(SIZES_PX)]
        color, other_color = rng.permutation(len(colors))[:2]
        scenes.append(
            Scene(
                height_px=height_px,
                width_px=width_px,
                size=("big", "small")[rng.integers(2)],
                color=colors[color],
                shape=SHAPES[rng.integers(3)],
                relation=list(RELATIONS)[rng.integers(4)] if rng.random() < PAIR_SHARE else None,
                other_color=colors[other_color],
                other_shape=SHAPES[rng.integers(3)],
                background=int(rng.choice(BACKGROUNDS)),
                shift=(float(rng.uniform(-1, 1)), float(rng.uniform(-1, 1))),
            )
        )
    return scenes


def draw_scene(scene: Scene) -> Image.Image:
    """Draw one scene, antialiased: an RGB image of (height_px, width_px)."""
    size_px = np.array([scene.height_px, scene.width_px]) * SUPERSAMPLING
    image = Image.new("RGB", (size_px[1], size_px[0]), (scene.background,) * 3)
    draw = ImageDraw.Draw(image)
    radius, other_radius, gap = (share * size_px.min() for share in (RADIUS[scene.size], RADIUS["tiny"], GAP))
    center = size_px / 2  # y, x
    if scene.relation is None:
        center += np.array(scene.shift) * (center - radius) * MAX_SHIFT
    else:  # both on one axis; the pair as a whole is centered
        towards = np.array(RELATIONS[scene.relation])
        other = center - towards * (radius + gap / 2)
        center += towards * (other_radius + gap / 2)
        _draw_shape(draw, scene.other_shape, other, other_radius, COLORS[scene.other_color])
    _draw_shape(draw, scene.shape, center, radius, COLORS[scene.color])
    return image.resize((scene.width_px, scene.height_px), Image.Resampling.BOX)


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, center: np.ndarray, radius: float, color: tuple[int, int, int]
) -> None:
    y, x = center
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=color)
    elif shape == "square":
        draw.rectangle(box, fill=color)
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=color)
