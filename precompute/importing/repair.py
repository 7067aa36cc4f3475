"""Damaged shards of an imported store, read again from the features that it was imported from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...datasets.errors import SourceError
from ...datasets.format.layout import NULL_PART
from ...datasets.format.schema import StoreSpec
from ...datasets.recipe import parse_recipe
from ...datasets.revisions.commits import Task
from ...datasets.revisions.plan import FrozenPlan
from ..progress.rejects import RejectLimit
from ..repair import UNLIMITED, FallbacksOf
from ..shards.latent_shard import PackedShard
from .formats.kinds import open_reader
from .formats.recipe import ImportRecipe
from .formats.source import Reader
from .pipeline import ShardReader
from .plan import listing_hash


@dataclass(frozen=True)
class Importer:
    """What shards are made from again: the features, as they lie now.

    Args:
      listing: hash of what they list.
    """

    fingerprint: str
    reader: Reader
    listing: str

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[PackedShard]:
        """Read some shards of a plan again; the null caption is not among the features.

        Raises: SourceError: the features are not those that the plan lists.
        """
        if plan.listing != self.listing and not plan.copies:
            raise SourceError(f"source '{self.reader.root}': not what the store was imported from. Check --source.")
        limit = RejectLimit(self.reader.recipe.source.limits().model_copy(update=UNLIMITED), None)
        shards = ShardReader(plan, self.reader, None, limit, lambda _: None)
        yield from shards.make([task for task in tasks if task[0] != NULL_PART])


def load_importer(spec: StoreSpec, source: Path) -> Importer:
    """What it takes to repair an imported store.

    Raises: SourceError: the features cannot be read.
    """
    settings = dict(spec.recipe["import"])
    kind = str(settings.pop("kind"))
    recipe = parse_recipe("import", ImportRecipe, settings)
    reader = open_reader(kind, source, recipe)
    return Importer(spec.fingerprint, reader, listing_hash(list(reader.entries())))
