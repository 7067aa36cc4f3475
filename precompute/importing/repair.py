"""Repair of imported stores: damaged shards are read again from the features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...datasets.errors import SourceError
from ...datasets.format.layout import Task
from ...datasets.format.schema import StoreSpec
from ...datasets.recipe import parse_recipe
from ...datasets.revisions.plan import FrozenPlan
from ..run.shards import Shard
from ..run.tasks import FallbacksOf
from .formats.kinds import open_reader
from .formats.recipe import ImportRecipe
from .formats.source import Reader
from .pipeline import ShardReader
from .plan import listing_hash


@dataclass(frozen=True)
class Importer:
    """The features from which shards are made again.

    Args:
      listing: hash of their listing.
    """

    fingerprint: str
    reader: Reader
    listing: str

    def make(self, plan: FrozenPlan, tasks: Sequence[Task], fallbacks_of: FallbacksOf) -> Iterator[Shard]:
        """Read shards of a plan again, except the null caption, which is not among the features.

        Raises: SourceError: the plan is of other features.
        """
        if plan.listing != self.listing and not plan.copies:
            raise SourceError(f"source '{self.reader.root}': not what the store was imported from. Check --source.")
        shards = ShardReader(plan, self.reader, None, None, lambda _: None)
        yield from shards.make([task for task in tasks if not plan.layout.parts[task[0]].is_null])


def load_importer(spec: StoreSpec, source: Path) -> Importer:
    """An importer for an imported store.

    Raises: SourceError: the features cannot be read.
    """
    settings = dict(spec.recipe["import"])
    kind = str(settings.pop("kind"))
    recipe = parse_recipe("import", ImportRecipe, settings)
    reader = open_reader(kind, source, recipe)
    return Importer(spec.fingerprint, reader, listing_hash(list(reader.entries())))
