"""What ``inspect`` prints of a store, of a record and of rejects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..terminal.text import printable
from .store_facts import StoreFacts
from .templating import Rows, rows_of

BLOCKS = (("identity", "records"), "buckets", "bytes", "captions", "tokens", "features", "latents", "channels")


def render(facts: StoreFacts) -> str:
    """A store as aligned text."""
    sections = rows_of("store.txt", facts=facts)
    blocks = [[sections.get(name, {}) for name in ([block] if isinstance(block, str) else block)] for block in BLOCKS]
    return "\n\n".join("\n".join(_lines(block)) for block in blocks if any(block))


def render_ledger(rejects: Sequence[dict[str, Any]]) -> str:
    """Rejected records (``StoreFacts.rejected``), one a line."""
    lines = [
        f"{reject['reason']:<18}{reject['stage']:<8}{reject['key']}: {reject['detail']}"
        + (f" (tried {reject['attempts']} times)" if reject["attempts"] > 1 else "")
        for reject in rejects
    ]
    return "\n".join(map(printable, [*lines, f"{len(rejects):,} rejected"]))


def render_record(values: dict[str, Any]) -> str:
    """A record (``store_facts.describe_record``) as aligned text."""
    rows = list[tuple[str, Any]]()
    for name, value in values.items():
        if name == "captions":
            texts = ((one["text"] or "none: the null caption", one["num_tokens"]) for one in value)
            rows += [("caption", f"{text}  ({num_tokens} tokens)") for text, num_tokens in texts]
        elif value is not None:
            rows.append((name, value))
    return "\n".join(printable(f"{name:<19} {value}") for name, value in rows)


def _lines(blocks: Iterable[Rows]) -> list[str]:
    rows = [(name, lines) for block in blocks for name, lines in block.items()]
    return [f"{'' if i else name:<19} {line}" for name, lines in rows for i, line in enumerate(lines)]
