"""The arguments of ``add``: a record or a batch becomes checked records, each with its values or with what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...errors import InvalidRecord, RecordRejected
from ..format.buckets import bucket_size
from ..format.row_layout import LATENTS
from ..format.table_schemas import ROW_RESULTS, STORED
from ..revisions.writer import row_checksum
from .declaration import Declaration
from .values import (
    CaptionRows,
    GroupRows,
    as_numbers,
    group_views,
    is_tensor,
    latent_views,
    narrow_caption,
    narrow_group,
    rejected,
)

MAX_KEY_BYTES = 1 << 12
MAX_CAPTION_BYTES = 1 << 16
MAX_CAPTIONS = 256  # of a record
MAX_SIDE_PX = (1 << 31) - 1

NewCaptions = dict[str, dict[str, CaptionRows]]
"""Rows of captions that a store does not have, by text, then by text encoder."""


class RecordInput(NamedTuple):
    """The arguments of ``add`` for one record."""

    key: str
    latent: Any
    label: Any
    caption: Any
    embeddings: Any
    features: Mapping[str, Any]
    companions: Mapping[str, Any]
    source_size: Any


def as_batch(
    key: str | Sequence[str],
    latent: Any,
    label: Any,
    caption: Any,
    embeddings: Any,
    features: Mapping[str, Any] | None,
    companions: Mapping[str, Any] | None,
    source_size: Any,
    *,
    has_pairs: bool,
) -> list[RecordInput]:
    """The records of a call of ``add``.

    Args:
      has_pairs: images are pairs of arrays, so a batch is a pair of batches.
    Raises: InvalidRecord: the arguments of a batch are not of one length.
    """
    if isinstance(key, str) or not isinstance(key, Iterable):
        return [RecordInput(key, latent, label, caption, embeddings, features or {}, companions or {}, source_size)]
    keys = list(key)

    def items(name: str, values: Any, *, is_image: bool = False) -> Sequence[Any]:
        if values is None:
            return [None] * len(keys)
        if is_tensor(values):
            values = as_numbers(values)  # at once: each copy from a device waits for it
        if is_image and has_pairs:
            return list(zip(*(items(name, view) for view in values), strict=True))
        if isinstance(values, Mapping):
            columns = {inner: items(f"{name}['{inner}']", column) for inner, column in values.items()}
            return [{inner: column[i] for inner, column in columns.items()} for i in range(len(keys))]
        if isinstance(values, str) or len(values) != len(keys):
            length = "a text" if isinstance(values, str) else f"{len(values)} values"
            first = keys[0] if keys else ""
            raise InvalidRecord(first, "wrong_shape", f"{name} is {length}, in a batch of {len(keys)} keys")
        return values

    def items_by_name(kind: str, groups: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        columns = {name: items(f"{kind}['{name}']", values, is_image=True) for name, values in (groups or {}).items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(len(keys))]

    columns = (
        keys,
        items("latent", latent, is_image=True),
        items("label", label),
        items("caption", caption),
        items("embeddings", embeddings),
        items_by_name("features", features),
        items_by_name("companions", companions),
        items("source_size", source_size),
    )
    return [RecordInput(*values) for values in zip(*columns, strict=True)]


@dataclass
class CheckedRecord:
    """A record whose shapes and dtypes are right, or ``problem`` says what is not.

    Args:
      views: values of each group of arrays: every output of every view.
      captions: texts.
      size: height and width of the source image in pixels.
    """

    key: str
    bucket: str = ""
    label: int = -1
    views: dict[str, list[np.ndarray]] = field(default_factory=dict)
    captions: list[str] = field(default_factory=list)
    size: tuple[int, int] = (0, 0)
    problem: RecordRejected | None = None


class BucketRows(NamedTuple):
    """Records of a bucket, and their rows in the same order in each group of arrays."""

    bucket: str
    records: list[CheckedRecord]
    groups: dict[str, GroupRows]


class RecordChecker:
    """Checks records against a declaration.

    Args:
      has_caption: whether the store has a caption.
    """

    def __init__(self, declaration: Declaration, has_caption: Callable[[str], bool]) -> None:
        self._spec = declaration.spec
        self._nulls = declaration.nulls
        self._has_caption = has_caption
        self._labels = {name: label for label, name in enumerate(self._spec.classes or ())}

    def check(self, record_input: RecordInput, new_captions: NewCaptions) -> CheckedRecord:
        """Check the shapes and dtypes of a record.

        Args:
          new_captions: captions that are new in this batch; those of the record are added.
        """
        record = CheckedRecord(record_input.key)
        try:
            record.bucket, record.views[LATENTS] = latent_views(self._spec, record_input.latent)
            record.label = self._label(record_input.label)
            record.size = _source_size(record_input.source_size, record.bucket)
            features = [feature.name for feature in self._spec.features]
            self._check_groups("features", features, record_input.features, record)
            companions = [companion.name for companion in self._spec.companions]
            self._check_groups("companions", companions, record_input.companions, record)
            record.captions = self._captions(record_input.caption, record_input.embeddings, new_captions)
        except RecordRejected as reject:
            record.problem = reject.without_traceback()
        return record

    def _check_groups(self, kind: str, names: Sequence[str], values: Mapping[str, Any], record: CheckedRecord) -> None:
        unknown = sorted(values.keys() - {*names})
        if unknown:
            raise rejected("wrong_shape", f"{kind}['{unknown[0]}'] was not declared")
        for name in names:
            record.views[name] = group_views(self._spec, name, record.bucket, values.get(name))

    def _label(self, label: Any) -> int:
        """The class index of a label; -1 without classes."""
        if self._spec.classes is None:
            if label is not None:
                raise rejected("bad_metadata", f"label {label!r}; the store was declared without classes")
            return -1
        if label is None:
            raise rejected("no_label", "it has no label; the store was declared with classes")
        if isinstance(label, str):
            if label not in self._labels:
                raise rejected("bad_metadata", f"label {label[:200]!r} is none of the {len(self._labels)} classes")
            return self._labels[label]
        try:
            number = int(label)
        except (TypeError, ValueError):
            raise rejected("bad_metadata", f"label {label!r:.200}; expected a number or a name") from None
        if number != label or not 0 <= number < len(self._labels):
            raise rejected("bad_metadata", f"label {label!r}; expected 0 to {len(self._labels) - 1}")
        return number

    def _captions(self, caption: Any, embeddings: Any, new_captions: NewCaptions) -> list[str]:
        """The captions of a record; the rows of those that are new are added to ``new_captions``."""
        encoders = [encoder.name for encoder in self._spec.text_encoders]
        if not encoders:
            if caption is not None or embeddings is not None:
                raise rejected("wrong_shape", "a caption; the store was declared without text")
            return []
        if caption is not None and not isinstance(caption, (str, list, tuple)):
            raise rejected(
                "bad_metadata", f"caption of type {type(caption).__name__}; expected a str, or a list of them"
            )
        texts: list[str] = [caption] if isinstance(caption, str) else list(caption or ())
        if not 1 <= len(texts) <= MAX_CAPTIONS:
            raise rejected("no_caption", f"{len(texts)} captions; expected 1 to {MAX_CAPTIONS}, or '' for none")
        for text in texts:
            _check_text("caption", text, MAX_CAPTION_BYTES)
        by_encoder = _embeddings_by_encoder(encoders, texts, embeddings, is_single=isinstance(caption, str))
        for number, text in enumerate(texts):
            if text not in new_captions and not self._has_caption(text):
                of_text = {name: values[number] for name, values in by_encoder.items()}
                new_captions[text] = self._caption_rows(text, of_text)
        return texts

    def _caption_rows(self, text: str, embeddings: Mapping[str, Any]) -> dict[str, CaptionRows]:
        """The rows of a new caption by text encoder."""
        rows = {}
        for encoder in self._spec.text_encoders:
            value = embeddings[encoder.name]
            if value is not None:
                rows[encoder.name] = narrow_caption(encoder.name, encoder.spec, value)
            elif text == "":
                rows[encoder.name] = self._null_rows(encoder.name)
            else:
                where = f"embeddings['{encoder.name}']" if encoder.name else "embeddings"
                raise rejected("no_caption", f"{where} of caption {text[:80]!r} are missing, and the store has none")
        return rows

    def _null_rows(self, name: str) -> CaptionRows:
        """The empty caption as a record has it: the first tokens of the null caption."""
        spec = self._spec.text_encoder_of(name).spec
        num_tokens = spec.null_length if spec.has_tokens else 1
        arrays = [rows if spec.pooled_width and len(rows) == 1 else rows[:num_tokens] for rows in self._nulls[name]]
        result = np.zeros((), ROW_RESULTS)
        result["min_cosine"] = result["max_error"] = np.nan
        result["state"] = STORED
        result["checksum"] = row_checksum(*arrays)
        return CaptionRows(num_tokens, arrays, result)

    def narrow(self, records: Sequence[CheckedRecord]) -> list[BucketRows]:
        """The rows of records without a problem; one whose numbers are not finite gets a problem, and keeps its row."""
        rows = []
        for bucket, of_bucket in by_bucket(records).items():
            groups = {}
            for group in (LATENTS, *self._spec.groups):
                narrowed = narrow_group(self._spec, group, bucket, [record.views[group] for record in of_bucket])
                groups[group] = narrowed
                for record, state in zip(of_bucket, narrowed.results["state"].tolist(), strict=True):
                    if state != STORED and record.problem is None:
                        where = f"'{group}'" if group else "latent"
                        record.problem = rejected("nonfinite", f"{where}: NaN or infinity, as given or as stored")
            rows.append(BucketRows(bucket, of_bucket, groups))
        return rows


def by_bucket(records: Sequence[CheckedRecord]) -> dict[str, list[CheckedRecord]]:
    """Records without a problem by bucket, in order."""
    buckets: dict[str, list[CheckedRecord]] = {}
    for record in records:
        if record.problem is None:
            buckets.setdefault(record.bucket, []).append(record)
    return buckets


def check_key(key: Any) -> None:
    """Raise InvalidRecord if a key is no text that a table can hold."""
    try:
        _check_text("key", key, MAX_KEY_BYTES)
    except RecordRejected as reject:
        raise InvalidRecord(repr(key), reject.reason, reject.detail) from None
    if not key:
        raise InvalidRecord(key, "bad_metadata", "the key is empty; expected a unique name")


def _check_text(name: str, text: Any, max_bytes: int) -> None:
    if not isinstance(text, str):
        raise rejected("bad_metadata", f"{name} of type {type(text).__name__}; expected a str")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise rejected("bad_metadata", f"{name} {text[:80]!r} is not valid Unicode") from None
    if num_bytes > max_bytes or "\0" in text:
        raise rejected("bad_metadata", f"{name} of {num_bytes} bytes; expected at most {max_bytes}, none of them zero")


def _source_size(size: Any, bucket: str) -> tuple[int, int]:
    """Height and width of the source image in pixels, by default those of the bucket."""
    if size is None:
        return bucket_size(bucket)
    try:
        height_px, width_px = (int(side) for side in size)
    except (TypeError, ValueError):
        raise rejected("bad_metadata", f"source_size {size!r:.200}; expected height and width in pixels") from None
    if not 1 <= min(height_px, width_px) <= max(height_px, width_px) <= MAX_SIDE_PX:
        raise rejected("bad_metadata", f"source_size {size!r}; expected height and width in pixels")
    return height_px, width_px


def _embeddings_by_encoder(
    encoders: Sequence[str], texts: Sequence[str], embeddings: Any, *, is_single: bool
) -> dict[str, Sequence[Any]]:
    """The embedding of each caption of a record, by text encoder; None where none was record_input.

    Args:
      is_single: the caption was given as a text, not as a list.
    """
    is_named = isinstance(embeddings, Mapping)
    if is_named and embeddings.keys() - {*encoders}:
        unknown = min(embeddings.keys() - {*encoders})
        declared = "an array, not a dict" if encoders == [""] else ", ".join(map(repr, encoders))
        raise rejected("wrong_shape", f"embeddings[{unknown!r}]; expected {declared}")
    if embeddings is not None and not is_named and len(encoders) > 1:
        raise rejected("wrong_shape", f"embeddings: expected a dict with {', '.join(map(repr, encoders))}")
    by_encoder = {}
    for name in encoders:
        value = embeddings.get(name) if is_named else embeddings
        if value is None:
            by_encoder[name] = [None] * len(texts)
        elif is_single:
            by_encoder[name] = [value]
        elif isinstance(value, (list, tuple)) and len(value) == len(texts):
            by_encoder[name] = value
        else:
            raise rejected("wrong_shape", f"embeddings: expected a list, one for each of {len(texts)} captions")
    return by_encoder
