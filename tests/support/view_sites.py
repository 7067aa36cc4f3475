"""A store with texts that are an attack on a page, and sites without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from making import CPU, caption_recipe, make_caption_folder, no_progress, read_metadata, write_metadata
from starlette.applications import Starlette
from starlette.testclient import TestClient

from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.tools.inspection.view.images import Decode
from leandit.tools.inspection.view.server import Guard
from leandit.tools.inspection.view.store_site import StoreSite

TOKEN = "t" * 43
ROOT = f"/{TOKEN}"
MARKUP = '<script>alert(1)</script><img src="https://elsewhere.example/x" onerror="alert(2)">'
CONTROL = "a bell\u0007, an escape\u001b[31m"
RIGHT_TO_LEFT = "user\u202egnp.exe\u2066"
HOSTILE = [MARKUP, CONTROL, RIGHT_TO_LEFT, "a red circle", '"quoted" & <b>bold</b>']


def hostile_store(folder: Path) -> LatentStore:
    """14 records whose captions hold markup, control characters and right-to-left marks, and 2 rejects."""
    source = make_caption_folder(folder / "source")
    lines = read_metadata(source)
    for number, line in enumerate(lines):
        line["captions"] = [HOSTILE[number % len(HOSTILE)], *line["captions"]]
    lines += [{"file_name": f"images/{name}", "captions": ["gone"]} for name in ("gone.png", "<b>gone.png")]
    write_metadata(source, lines)
    recipe = caption_recipe()
    precompute(recipe, source_path=source, store_path=folder / "store", device=CPU, progress=no_progress)
    return LatentStore(folder / "store")


def grey(rows: np.ndarray) -> np.ndarray:
    """A decoder for tests: 8 grey pixels for each place of a latent."""
    height_px, width_px = (8 * side for side in rows.shape[2:])
    return np.full((len(rows), height_px, width_px, 3), 77, np.uint8)


def site(store: LatentStore, load: Callable[[], Decode] = lambda: grey) -> Starlette:
    return StoreSite(store, load).app()


@contextmanager
def client(app: Starlette) -> Iterator[TestClient]:
    with TestClient(Guard(app, TOKEN), base_url="http://127.0.0.1", raise_server_exceptions=True) as one:
        yield one


class Elements(HTMLParser):
    """The elements of a page, their attributes and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)
