"""The pages of a store: records by search, one record, and their images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ....datasets.format.row_layout import LATENTS, bucket_part, row_arrays
from ....datasets.format.table_schemas import REJECT_REASONS, suffixes
from ....datasets.format.token_dtypes import widen_latents
from ....datasets.revisions.writer import row_checksum
from ....datasets.store import LatentStore, Record
from ....errors import LeanditError, RecipeError, RowOutOfRange, StoreError, UnknownKey
from ..report.page import latent_pixels
from .images import Busy, Decode, ImageDecoder, principal_colors, webp
from .pages import application, render
from .tables import FIELDS, PAGE, Query, StoreTables

MAX_CLASSES = 1000  # that a list of suggestions has
KEEP = {"cache-control": "private, max-age=3600"}  # for images: while this runs, an address keeps its image
HASHED = ("checksum", "source_checksum")  # columns of 64 bits, shown as 16 hex digits


class StoreSite:
    """A store as pages.

    Args:
      store: opened; it is only read.
      load: returns the decoder of its rows; called in another thread.
    """

    def __init__(self, store: LatentStore, load: Callable[[], Decode]) -> None:
        self._store, self._tables = store, StoreTables(store)
        self._images = ImageDecoder(store, self._tables, load)
        self._name = str(store.remote.url if store.remote else store.path)
        self._counts = {name: self._tables.counts(name) for name in FIELDS}

    def app(self) -> Starlette:
        """The application, for ``Guard``."""
        routes = [
            Route("/", self._browse),
            Route("/record/{index:position}", self._record),
            Route("/image/{index:position}", self._image),
            Route("/channel/{index:position}/{number:position}", self._channel),
            Route("/feature/{index:position}/{name}", self._feature),
            Route("/status", self._status),
        ]
        return application(routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._images.start()
        yield
        self._images.stop()
        self._tables.close()

    def _browse(self, request: Request) -> Response:
        query, problem, status, num_hits, positions, start = Query(), "", 200, 0, [], time.perf_counter()
        try:
            query = Query.parse(request.query_params)
            num_hits, positions = self._tables.find(query)
            if not positions and query.page > 1:
                raise RecipeError(f"page {query.page}: the last one is {max(1, -(-num_hits // PAGE))}.")
        except LeanditError as error:  # a table that was replaced too: the page says so
            problem, status = str(error), 400 if isinstance(error, RecipeError) else 500
        names = self._store.class_names
        return self._page(
            request,
            "store.html",
            title=self._name,
            status=status,
            milliseconds=(time.perf_counter() - start) * 1000,
            query=query,
            problem=problem,
            cells=self._cells(positions, query),
            num_hits=num_hits,
            pages=max(1, -(-num_hits // PAGE)),
            first=(query.page - 1) * PAGE + 1,
            counts=self._counts,
            columns=list(self._tables.columns),
            classes=list(zip(names.classes, names.names, strict=True)) if len(names) <= MAX_CLASSES else [],
        )

    def _page(self, request: Request, template: str, *, title: str, status: int = 200, **values: Any) -> Response:
        page = render(
            template,
            root=request.scope["root_path"],
            title=title,
            store=self._store,
            store_name=self._name,
            num_records=self._tables.num_records,
            note=self._images.note,
            is_ready=self._images.is_ready,
            **values,
        )
        return HTMLResponse(page, status_code=status)

    def _cells(self, positions: list[int], query: Query) -> list[dict[str, Any]]:
        """The values of each record for its cell; the caption is the one that has the words, else the first."""
        rows = self._tables.rows(positions)
        captions = self._tables.captions({number for row in rows for number in row["caption_ids"] or ()}, query.words)
        cells = []
        for row in rows:
            own = [captions[number] for number in row["caption_ids"] or ()]
            shown = next((caption for caption in own if caption["is_hit"]), own[0] if own else {"text": ""})
            height_px, width_px = (row["bucket"] or "1x1").split("x")
            cell = {"record": row, "text": shown["text"], "more": max(0, len(own) - 1)}
            cell |= {"class_name": self._class_of(row["label"]), "height_px": height_px, "width_px": width_px}
            cells.append(cell | {"sort": query.sort and readable(row)[query.sort]})
        return cells

    def _class_of(self, label: int) -> str:
        return self._store.class_names.describe(label) if label >= 0 else ""

    def _record(self, request: Request) -> Response:
        record = self._tables.record(request.path_params["index"])
        values = readable(self._tables.rows([record.index])[0])
        captions, columns = self._tables.captions(record.caption_ids), suffixes(self._store.spec)
        where: dict[str, Any] = {"groups": [], "channels": []}
        if record.status == "stored" and record.bucket:
            where |= {"groups": list(groups_of(self._store, record, values)), "channels": channel_names(self._store)}
        return self._page(
            request,
            "record.html",
            title=record.key,
            record=record,
            reason=REJECT_REASONS.get(record.reason or "", ""),
            class_name=self._class_of(record.label),
            captions=[captions[number] for number in record.caption_ids],
            columns=columns,
            values=values,
            **where,
        )

    async def _image(self, request: Request) -> Response:
        name = request.query_params.get("companion", "")
        if name and name not in self._store.companions:
            raise UnknownKey(f"store '{self._name}': no companion image '{name}'.")
        try:
            content = await self._images.webp_for(request, request.path_params["index"], name)
        except Busy as error:
            return Response(str(error), status_code=503, headers={"retry-after": "1"})
        return Response(content, media_type="image/webp", headers=KEEP)

    def _channel(self, request: Request) -> Response:
        record, number = self._stored(request), request.path_params["number"]
        row = widen_latents(self._store.latents(record.bucket or "")[record.row])
        if number >= len(row):
            raise RowOutOfRange(f"record '{record.key}': channel {number} out of range: it has {len(row)}")
        return Response(webp(latent_pixels(row[number : number + 1])), media_type="image/webp", headers=KEEP)

    def _feature(self, request: Request) -> Response:
        record, name = self._stored(request), request.path_params["name"]
        arrays = self._store.feature(name, record.bucket or "")
        if "patches" not in arrays.outputs:
            raise StoreError(f"feature '{name}': it has no patches, so it has no image.")
        height_px, width_px = (int(side) for side in (record.bucket or "").split("x"))
        pixels = principal_colors(arrays.row(record.row), arrays.spec.grid(height_px, width_px))
        return Response(webp(pixels), media_type="image/webp", headers=KEEP)

    def _stored(self, request: Request) -> Record:
        record = self._tables.record(request.path_params["index"])
        if record.status != "stored":
            raise StoreError(f"record '{record.key}': it is {record.status}, so it has no latent.")
        return record

    def _status(self, request: Request) -> Response:
        return JSONResponse({"is_ready": self._images.is_ready, "note": self._images.note})


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row of ``StoreTables``, checksums as 16 hex digits."""
    return {
        name: f"{value:016x}" if name.startswith(HASHED) and value is not None else value
        for name, value in row.items()
        if name != "position"
    }


def channel_names(store: LatentStore) -> list[str]:
    """A name for each stored channel of a latent: "mean 0"."""
    spec = store.spec.latent
    second = {"mean_logvar": "log-variance", "mean_std": "deviation"}.get(spec.kind, "")
    names = ["mean" if second else "channel"] * spec.channels + [second] * (spec.stored_channels - spec.channels)
    return [f"{name} {number % spec.channels}" for number, name in enumerate(names)]


def groups_of(store: LatentStore, record: Record, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arrays of a stored record that share a checksum: its latents, each feature, each companion image.

    Args:
      values: the ``readable`` columns of the record.
    Returns: ``name``; ``places``, in each array the row's ``shape`` and ``dtype``, the ``file`` in the store and the
      first byte (``offset``) and ``num_bytes`` of the row or its compressed chunk; ``recorded``, XXH3-64 in the records
      table as 16 hex digits, and ``read``, that of the bytes as they are now; ``problem``, if they cannot be read.
    """
    for name in (LATENTS, *store.features, *store.companions):
        facts = {"name": name or "latent", "recorded": values[f"checksum_{name}" if name else "checksum"] or ""}
        try:
            places, rows = [], []
            for path, (shape, dtype) in row_arrays(store.spec, record.bucket or "", name).items():
                array = store.array(f"{bucket_part(record.bucket or '')}/{path}")
                place = dict(zip(("file", "offset", "num_bytes"), array.place(record.row), strict=True))
                places.append({"array": path, "shape": shape, "dtype": dtype, **place})
                rows.append(array[record.row])
            yield facts | {"places": places, "read": f"{row_checksum(*rows):016x}", "problem": ""}
        except LeanditError as error:
            yield facts | {"places": [], "read": "", "problem": str(error)}
