"""The pages of a store: records by search, one record, and their pictures."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ....datasets.errors import RecipeError, RowOutOfRange, StoreError, UnknownKey
from ....datasets.format.layout import MANIFEST, revision_prefix
from ....datasets.format.schema import FeatureSpec
from ....datasets.store import LatentStore, Record
from .answers import answer_errors, static_route
from .pages import render
from .records import planes
from .records.decoder import preview_divisor
from .records.painter import Dropped, Painter, Subject
from .records.query import Query
from .records.record_facts import captions_of, column_values, commit_of, groups_of, reason_in_words
from .records.search import RecordSearch

PAGE = 24  # records
MOST_CLASSES = 1000  # that a list of suggestions has
KEEP = {"cache-control": "private, max-age=3600"}  # of pictures: an address never has another one while this runs


class StoreSite:
    """A store as pages.

    Args:
      store: opened; it is only read.
      painter: of its pictures; started and stopped with the site.
      has_previews: pages of several records show previews first, as a CPU decodes slowly.
    """

    def __init__(self, store: LatentStore, painter: Painter, *, has_previews: bool = False) -> None:
        self._store, self._painter = store, painter
        divisors = [preview_divisor(store, bucket) for bucket in store.buckets] if has_previews else []
        self._has_previews = max(divisors, default=1) > 1
        self._search = RecordSearch(store.records, store.captions, store.class_names)
        self._name = str(store.remote.url if store.remote else store.path)
        self._manifest = store.path / f"{revision_prefix(store.revision)}{MANIFEST}"
        self._opened = _identity(self._manifest)
        self._counts = {name: self._search.counts(name) for name in ("bucket", "status", "reason")}

    def app(self) -> Starlette:
        """The application, for ``Guard``."""
        routes = [
            Route("/", self._browse),
            Route("/record/{index:position}", self._record),
            Route("/picture/{index:position}", self._picture),
            Route("/channel/{index:position}/{number:position}", self._channel),
            Route("/feature/{index:position}/{name}", self._feature),
            Route("/status", self._status),
            static_route(),
        ]
        return answer_errors(Starlette(routes=routes, lifespan=self._lifespan))

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._painter.start()
        threading.Thread(target=self._search.prepare, name="leandit-words", daemon=True).start()
        yield
        self._painter.stop()

    def _browse(self, request: Request) -> Response:
        problem, found, began = "", np.empty(0, np.int32), time.perf_counter()
        try:
            query = Query.parse(request.query_params)
        except RecipeError as error:
            query, problem = Query(), str(error)
        if not problem:
            try:
                found = self._search.find(query)
            except RecipeError as error:
                problem = str(error)
        milliseconds = (time.perf_counter() - began) * 1000
        pages = max(1, -(-len(found) // PAGE))
        if query.page > pages:
            problem = f"page {query.page}: the last one is {pages}."
        shown = [self._cell(int(position), query) for position in found[(query.page - 1) * PAGE : query.page * PAGE]]
        page = render(
            "store.html",
            root=request.scope["root_path"],
            title=self._name,
            store=self._store,
            query=query,
            problem=problem,
            cells=shown,
            num_found=len(found),
            num_records=self._store.records.num_rows,
            milliseconds=milliseconds,
            pages=pages,
            first=(query.page - 1) * PAGE + 1,
            counts=self._counts,
            columns=self._search.columns,
            classes=self._classes,
            note=self._painter.note,
            is_ready=self._painter.is_ready,
            has_changed=self._has_changed,
            has_previews=self._has_previews and not (self._painter.is_ready and self._painter.note),
        )
        return HTMLResponse(page, status_code=400 if problem else 200)

    @property
    def _has_changed(self) -> bool:
        """Whether another store lies there now: tables that were read and pictures that are read would not fit."""
        return _identity(self._manifest) != self._opened

    @property
    def _classes(self) -> list[tuple[str, str]]:
        """Folder and name of each class."""
        names = self._store.class_names
        return list(zip(names.classes, names.names, strict=True)) if len(names) <= MOST_CLASSES else []

    def _cell(self, position: int, query: Query) -> dict[str, Any]:
        record = self._store.record_at(position)
        texts = [self._store.captions["text"][number].as_py() for number in record.caption_ids]
        shape = [int(side) for side in (record.bucket or "1x1").split("x")]
        sort = query.sort and column_values(self._store, record)[query.sort]
        return {
            "record": record,
            "text": self._search.best_caption(query, texts),
            "more": max(0, len(texts) - 1),
            "class_name": self._class_of(record),
            "height_px": shape[0],
            "width_px": shape[1],
            "sort": sort,
        }

    def _class_of(self, record: Record) -> str:
        return self._store.class_names.describe(record.label) if record.label >= 0 else ""

    def _record(self, request: Request) -> Response:
        record = self._store.record_at(request.path_params["index"])
        is_stored = record.status == "stored"
        page = render(
            "record.html",
            root=request.scope["root_path"],
            title=record.key,
            store=self._store,
            store_name=self._name,
            record=record,
            reason=reason_in_words(record),
            class_name=self._class_of(record),
            captions=captions_of(self._store, record),
            groups=list(groups_of(self._store, record)) if is_stored else [],
            commit=commit_of(self._store, record) if is_stored else "",
            values=column_values(self._store, record),
            channels=self._channel_names() if is_stored else [],
            num_records=self._store.records.num_rows,
            has_changed=self._has_changed,
            note=self._painter.note,
            is_ready=self._painter.is_ready,
        )
        return HTMLResponse(page)

    def _channel_names(self) -> list[str]:
        spec = self._store.spec.latent
        second = {"mean_logvar": "log-variance", "mean_std": "deviation"}.get(spec.kind, "")
        first = "mean" if second else "channel"
        return [
            f"{first if number < spec.channels else second} {number % spec.channels}"
            for number in range(spec.stored_channels)
        ]

    async def _picture(self, request: Request) -> Response:
        name = request.query_params.get("companion", "")
        if name and name not in self._store.pictures:
            raise UnknownKey(f"store '{self._name}': no picture '{name}'.")
        is_preview = self._has_previews and "preview" in request.query_params
        future = self._painter.paint(Subject(request.path_params["index"], name, is_preview))
        try:
            content = await asyncio.shield(asyncio.wrap_future(future))
        except Dropped as error:
            return Response(str(error), status_code=503, headers={"retry-after": "1"})
        return Response(content, media_type="image/webp", headers=KEEP if self._painter.is_ready else {})

    def _channel(self, request: Request) -> Response:
        record, number = self._stored(request), request.path_params["number"]
        row = self._store.latents(record.bucket or "")[record.row]
        if number >= len(row):
            raise RowOutOfRange(f"record '{record.key}': channel {number}, there are {len(row)}")
        return _webp(lambda: planes.channel(row[number]))

    def _feature(self, request: Request) -> Response:
        record, name = self._stored(request), request.path_params["name"]
        arrays = self._store.feature(name, record.bucket or "")
        spec: FeatureSpec = arrays.spec
        if "patches" not in arrays.outputs:
            raise StoreError(f"feature '{name}': it has no patches, so it has no picture.")
        height_px, width_px = (int(side) for side in (record.bucket or "").split("x"))
        return _webp(lambda: planes.principal_colours(arrays.row(record.row), spec.grid(height_px, width_px)))

    def _stored(self, request: Request) -> Record:
        record = self._store.record_at(request.path_params["index"])
        if record.status != "stored":
            raise StoreError(f"record '{record.key}': it is {record.status}, so it has no latent.")
        return record

    def _status(self, request: Request) -> Response:
        return JSONResponse({"is_ready": self._painter.is_ready, "note": self._painter.note})


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_ctime_ns  # a copy keeps the time of its content


def _webp(pixels: Callable[[], np.ndarray]) -> Response:
    return Response(planes.webp(pixels()), media_type="image/webp", headers=KEEP)
