"""Several sources as one: the first keeps its keys, those of each later source are prefixed with its name.

So a store of one source grows by another without encoding anything again. The plan writes a path of a later source as
``//NAME//PATH``, which no path of the first source starts with. Classes are merged by name: those of the first source
keep their labels, new ones follow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...errors import RecipeError, SourceError
from ..config import SourceSection
from .files.ignored import Ignored
from .listing.classes import names_of_classes, read_class_names
from .listing.listing import PLACE, spool
from .source import MARK, NO_COMPANIONS, OpenedSource, Source, list_source, open_source

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

MAX_NAME_CHARS = 64
EXTENSION = re.compile(r"\.(tar|parquet|csv|tsv|json|jsonl)$")
SourcePaths = Path | str | Sequence[Path | str]
"""Path or URL of a source, or of each of several."""


def paths_of(sources: SourcePaths) -> list[str]:
    """The path or URL of each source."""
    return [str(sources)] if isinstance(sources, str | Path) else [str(path) for path in sources]


def source_names(paths: Sequence[str]) -> list[str]:
    """Short name of each source: the last part of its path, with the part before it if that is taken.

    Later sources do not affect earlier names; the first one's name is not used.

    Raises: RecipeError: a source is given twice.
    """
    names: list[str] = []
    seen: dict[str, str] = {}
    for path in paths:
        place = path.rstrip("/") if "://" in path else os.path.realpath(path)
        if place in seen:
            raise RecipeError(f"--source '{path}': the same source as '{seen[place]}'. Pass each source once.")
        seen[place] = path
        *above, last = (path if "://" in path else os.path.abspath(path)).rstrip("/").split("/")
        short = _plain(EXTENSION.sub("", last))
        candidates = [short, f"{_plain(above[-1] if above else '')}-{short}"]
        candidates += [f"{short}-{number}" for number in range(2, len(names) + 3)]
        names.append(next(name for name in candidates if name not in names[1:]))
    return names


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:MAX_NAME_CHARS] or "source"


def open_sources(
    sources: SourcePaths, asked: SourceSection, companions: Mapping[str, str] = NO_COMPANIONS
) -> OpenedSource:
    """Open one source or several without listing them, as ``open_source`` does."""
    paths = paths_of(sources)
    names = source_names(paths)
    first, *others = [open_source(path, asked, companions) for path in paths]
    return replace(first, others=tuple(zip(names[1:], others, strict=True))) if others else first


def list_sources(
    sources: SourcePaths,
    asked: SourceSection,
    companions: Mapping[str, str] = NO_COMPANIONS,
    *,
    needs_labels: bool = True,
    progress: Callable[[int], None] = lambda _: None,
) -> Source:
    """List one source or several as one; a key that an earlier source has is rejected as ``duplicate_key``.

    Args: as for ``list_source``.
    Raises: RecipeError: a source is given twice. SourceError: also if some have named labels and some numbers.
    """
    paths = paths_of(sources)
    if len(paths) == 1:
        return list_source(paths[0], asked, companions, needs_labels=needs_labels, progress=progress)
    names = source_names(paths)
    rows = read_class_names(asked.class_names) if asked.class_names else None  # before the long listing
    listed: list[Source] = []
    for path in paths:
        before = sum(len(source.records) for source in listed)
        settings = asked.model_copy(update={"class_names": ""})  # applied to all together
        listed.append(
            list_source(
                path,
                settings,
                companions,
                needs_labels=needs_labels,
                progress=lambda done, before=before: progress(before + done),
            )
        )
    _check_labels(listed)
    classes = list(dict.fromkeys(name for source in listed for name in source.classes or ())) or None
    batches = (
        batch
        for number, (name, source) in enumerate(zip(names, listed, strict=True))
        for batch in _joined(source, name if number else "", classes or [])
    )
    records = spool(batches, lambda _: None)
    notes = [f"'{source.name}': {note}" for source in listed for note in source.notes]
    notes += [f"'{path}': its keys begin with '{name}/'" for path, name in list(zip(paths, names, strict=True))[1:]]
    return Source(
        settings=listed[0].settings,
        files=listed[0].files,
        records=records,
        classes=classes,
        ignored=_all_ignored(listed),
        notes=notes,
        class_names=names_of_classes(asked.class_names, rows, classes) if rows else None,
        others=tuple(
            (name, OpenedSource(source.settings, source.files, companions=source.companions))
            for name, source in zip(names[1:], listed[1:], strict=True)
        ),
        counts=tuple(len(source.records) for source in listed),
        companions=dict(companions),
    )


def _check_labels(listed: Sequence[Source]) -> None:
    """Raise if some sources have class names and some numbers, which cannot be merged."""
    labelled = [source for source in listed if source.classes]
    named = next((source for source in labelled if source.has_class_names), None)
    numbered = next((source for source in labelled if not source.has_class_names), None)
    if named and numbered:
        raise SourceError(
            f"source '{named.name}' labels by names of classes, '{numbered.name}' by numbers. Expected the same for "
            "both; or leave labels out with --set source.labels=none."
        )


def _joined(source: Source, name: str, classes: list[str]) -> Iterator[pa.RecordBatch]:
    """Records of one source with prefixed keys and merged labels; unchanged if ``name`` is empty."""
    places = {name: i for i, name in enumerate(classes)}
    label_of = np.array(
        [*(places[name] for name in source.classes or ()), -1], np.int32
    )  # the last is that of label -1
    for batch in source.records.batches():
        if not name:  # labels of the first source stay
            paths = (batch["path"], batch["companions"].flatten().field("path"))
            if any(pc.any(pc.starts_with(texts, MARK)).as_py() for texts in paths):
                raise SourceError(f"source '{source.name}': a path begins with '{MARK}'. Pass it alone, or last.")
            yield batch
            continue
        columns = {field: batch[field] for field in batch.schema.names}
        columns["label"] = pa.array(label_of[batch["label"].to_numpy()])
        columns["key"] = pc.binary_join_element_wise(f"{name}/", batch["key"], "")
        columns["path"] = pc.binary_join_element_wise(f"{MARK}{name}{MARK}", batch["path"], "")
        paths, *others = batch["companions"].flatten().flatten()
        places = [pc.binary_join_element_wise(f"{MARK}{name}{MARK}", paths, ""), *others]
        ends = np.cumsum(pc.list_value_length(batch["companions"]).to_numpy())
        columns["companions"] = pa.ListArray.from_arrays(
            pa.array(np.append(0, ends), pa.int32()), pa.StructArray.from_arrays(places, fields=list(PLACE))
        )
        yield pa.RecordBatch.from_pydict(columns, batch.schema)


def _all_ignored(listed: Sequence[Source]) -> Ignored:
    ignored = Ignored()
    for source in listed:
        ignored.extensions += source.ignored.extensions
        ignored.folders += source.ignored.folders
        ignored.num_hidden_images += source.ignored.num_hidden_images
        ignored.hidden_image = ignored.hidden_image or source.ignored.hidden_image
    return ignored
