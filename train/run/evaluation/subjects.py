"""What a run draws while it trains: classes or captions, the same ones each time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ....datasets.batches.captions import CaptionBatch, captions_of
from ....datasets.batches.reader import BatchReader
from ....datasets.order.filters import label_indices
from ....datasets.store import LatentStore
from ...data_recipe import RecordsSection
from ...models.conditioning import Conditioner, Conditioning


@dataclass(frozen=True)
class Subjects:
    """The labels or captions of a grid, one for each picture.

    Args:
      names: for people.
      labels: class indexes, or None.
      captions: of each text encoder, by name, or None.
    """

    names: list[str]
    labels: list[int] | None = None
    captions: Mapping[str, CaptionBatch] | None = None

    def conditioning(self, conditioner: Conditioner, device: torch.device) -> Conditioning:
        """Of all pictures, on a device."""
        if self.captions is None:
            return conditioner(torch.tensor(self.labels, device=device), {})
        return conditioner(None, {name: text.to(device) for name, text in self.captions.items()})


def choose_subjects(
    reader: BatchReader, number: int, section: RecordsSection, *, takes_text: bool, count: int
) -> Subjects:
    """Spread the subjects evenly over a store.

    Args:
      number: of the store.
      section: which of its records train.
      takes_text: captions, of the held-out records where there are any, else of all; otherwise classes that train.
      count: of pictures; classes come again if they are fewer, captions do not.
    """
    store = reader.stores[number]
    if not takes_text:
        labels = label_indices(section.labels, store) if section.labels else range(max(1, store.num_classes))
        chosen = [int(labels[place]) for place in _spread(len(labels), count)]
        return Subjects([f"{label}: {store.class_names.describe(label)}" for label in chosen], labels=chosen)
    selection = reader.order.plans[number].selection
    held_out = selection.held_out if selection else {}
    places = {bucket: positions for bucket, positions in held_out.items() if len(positions)}
    known = _first_captions(store, places or dict.fromkeys(store.buckets, slice(None)))
    ids = [int(known[place]) for place in _spread(len(known), min(count, len(known)))]
    texts = store.captions["text"]
    captions = {name: captions_of(store.text(name), ids) for name in store.texts}
    return Subjects([texts[each].as_py() for each in ids], captions=captions)


def _first_captions(store: LatentStore, places: Mapping[str, np.ndarray | slice]) -> np.ndarray:
    """Ids of the first captions of records, each once, in the order of the records.

    Args:
      places: positions in each bucket.
    """
    indexes = [(store.index(bucket), positions) for bucket, positions in places.items()]
    records = np.concatenate([index.records[positions] for index, positions in indexes])
    ids = np.concatenate([index.caption_ids[index.caption_starts[:-1][positions]] for index, positions in indexes])
    ids = ids[np.argsort(records)]
    return ids[np.sort(np.unique(ids, return_index=True)[1])]


def _spread(total: int, count: int) -> list[int]:
    """So many of the first whole numbers, evenly from the first to the last; all of them again and again if too few."""
    if total < count:
        return [place % total for place in range(count)]
    return np.linspace(0, total - 1, count).round().astype(int).tolist()
