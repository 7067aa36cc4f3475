"""Text encoders, features and pictures that a recipe adds to a finished store."""

from __future__ import annotations

from ...datasets.format.schema import StoreSpec


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
