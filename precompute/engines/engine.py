"""What an engine is: where the shards of a revision are encoded. Stage 1's story is the same with each of them.

The engine of one device is the process itself (``local.py``); of several, a process for each (``processes.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.commits import Task
from ...datasets.revisions.writer import StoreWriter
from ..encoders.text import CaptionTokenizer, TokenCount
from ..progress.clock import StageClock
from ..progress.tally import Tally
from ..progress.verdict import Power
from ..sources.source import Source


class Engine(Protocol):
    """Encodes what the process that plans and seals asks for.

    Attributes:
      power: what it has to encode with.
    """

    power: Power

    @property
    def tokenizer(self) -> CaptionTokenizer | None:
        """Of the caption encoder, to plan with; None where the recipe wants no text."""
        ...

    @property
    def tokens(self) -> TokenCount:
        """What went through the caption encoders so far."""
        ...

    def describe(self, source: Source, known: StoreSpec | None = None) -> StoreSpec:
        """What a store that its encoders make says of itself; as ``describe_store``."""
        ...

    def encode(
        self, writer: StoreWriter, missing: Sequence[Task], source: Source, *, tally: Tally, clock: StageClock
    ) -> None:
        """Encode what is missing of a revision; ends when all of it is committed, by whomever.

        Args:
          writer: of the revision.
          source: of the pictures.
          tally: hears what is done.
          clock: gets the seconds of each stage, summed over all workers.
        Raises: LeanditError: of the class that says what to mend.
        """
        ...
