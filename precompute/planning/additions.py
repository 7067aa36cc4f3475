"""Text encoders, features and pictures that a recipe adds to a finished store: what the next revision encodes of them.

Their arrays lie in the folders of the revisions whose rows and captions they complete, as if they had always been
there.
"""

from __future__ import annotations

import numpy as np

from ...datasets.format.buckets import bucket_size
from ...datasets.format.layout import revision_prefix
from ...datasets.format.row_layout import bucket_part
from ...datasets.format.schema import Addition, StoreSpec
from ...datasets.store import LatentStore


def is_extension(before: StoreSpec, after: StoreSpec) -> bool:
    """Whether a spec equals an earlier one, but for text encoders, features and pictures that it adds at the end."""
    old, new = before.identity(), after.identity()
    if not before.text_encoders:  # then a first one, of [text], may come
        for role in ("text", "text_encoder"):
            old.pop(role)
            new.pop(role)
    names = [
        ([one.name for one in spec.text_encoders], [one.name for one in spec.features]) for spec in (before, after)
    ]
    is_first = all(later[: len(earlier)] == earlier for earlier, later in zip(*names, strict=True))
    earlier, later = old.pop("pictures", []), new.pop("pictures", [])
    is_first &= later[: len(earlier)] == earlier
    for kind in ("texts", "features"):
        known, now = old.pop(kind, {}), new.pop(kind, {})
        is_first &= all(now.get(name) == one for name, one in known.items())
    return is_first and old == new


def additions(store: LatentStore, after: StoreSpec) -> tuple[Addition, ...]:
    """What a spec adds to each revision that the newest one of a store reads."""
    before, manifest = store.spec, store.manifest
    assert manifest is not None, "only a complete store is extended"
    texts = [one.name for one in after.text_encoders[len(before.text_encoders) :]]
    features = [one.name for one in after.features[len(before.features) :]]
    pictures = [one.name for one in after.pictures[len(before.pictures) :]]
    with_captions = set(np.unique(store.captions["revision"].to_numpy()).tolist())
    added = []
    for revision in manifest.stack:
        has_null = revision == manifest.stack[0]
        of_revision = texts if has_null or revision in with_captions else []
        buckets = _bucket_rows(store, revision) if features or pictures else {}
        if of_revision or buckets:
            added.append(
                Addition(
                    revision=revision,
                    buckets=buckets,
                    texts=of_revision,
                    features=features if buckets else [],
                    has_null=has_null and bool(texts),
                    pictures=pictures if buckets else [],
                )
            )
    return tuple(added)


def _bucket_rows(store: LatentStore, revision: int) -> dict[str, int]:
    """Rows of each bucket in a revision's own arrays."""
    rows = {}
    for bucket in sorted(store.buckets, key=bucket_size):
        path = f"{bucket_part(bucket)}/{store.spec.latent.array}"
        own = revision_prefix(revision) + path
        if own_layout := next((one for one in store.layouts(path) if one.path == own), None):
            rows[bucket] = own_layout.shape[0]
    return rows
