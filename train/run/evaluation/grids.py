"""Grids of images while a run trains: what they show, and the latents that the averaged weights draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ....datasets.batches.captions import Captions, captions_of
from ....datasets.batches.latents import mean_latents
from ....datasets.batches.row_checks import check_records
from ....datasets.format.schema import LatentSpec
from ....datasets.order.filters import label_indices
from ....datasets.order.slices import spread
from ....datasets.store import LatentStore
from ....errors import RecipeError
from ...metrics.flops import tokens_per_image
from ...models.conditioning import Conditioner, Conditioning, select
from ...sampling.guided import SamplingModel, Solver, draw_latents, guidance_scale
from ..state import Run

FORWARD_TOKENS = 16384  # image tokens of a forward
MOST_NAMED = 5  # captions in an error
MOST_SHOWN = 80  # characters of each


class Subjects(NamedTuple):
    """The labels or captions of a grid, one for each image.

    Args:
      names: for display.
      labels: class indexes, or None.
      captions: of each text encoder, by name, or None.
      reference: (count, C, H, W) latents of the images to edit, or None.
    """

    names: list[str]
    labels: list[int] | None = None
    captions: Mapping[str, Captions] | None = None
    reference: Tensor | None = None

    def conditioning(self, conditioner: Conditioner, device: torch.device) -> Conditioning:
        """The conditioning of all images, on a device."""
        if self.captions is None:
            return conditioner(torch.tensor(self.labels, device=device), {})
        given = conditioner(None, {name: text.to(device) for name, text in self.captions.items()})
        return given if self.reference is None else given._replace(reference=self.reference.to(device))


class EditRecords:
    """The records of a bucket, to edit their companion image.

    Args:
      name: of the companion.
      latent: how stored rows become the model's input.
      check: compare the rows with their checksums when they are read; those of a store at a URL already were.
    Raises: UnknownKey: the store has no such bucket or companion.
    """

    def __init__(self, store: LatentStore, name: str, bucket: str, latent: LatentSpec, *, check: bool = True) -> None:
        self.store = store
        self._latent = latent
        self._bucket = bucket
        self._name = name
        self._checks = check and store.remote is None
        self._index, self._images = store.index(bucket), store.companion(name, bucket)

    def __len__(self) -> int:
        return len(self._index)

    def caption_ids(self, positions: np.ndarray) -> list[int]:
        """Ids of the first captions of records, by their positions in the index of the bucket."""
        return self._index.caption_ids[self._index.caption_starts[:-1][positions]].tolist()

    def latents(self, positions: np.ndarray) -> Tensor:
        """Their images as the model sees them: (B, C, H, W) float32, the mean of the posterior, shifted and scaled.

        Raises: DamageError: a row does not match its checksum.
        """
        rows, records, _ = self._index.take(positions)
        images = self._images.take(rows)
        if self._checks:
            check_records(self.store, self._bucket, self._name, [images], rows=rows, records=records)
        return mean_latents(torch.from_numpy(images), self._latent)


def draw_grid(run: Run, subjects: Subjects, size: tuple[int, int]) -> Tensor:
    """Draw latents with the averaged weights; a collective call, which changes nothing that trains.

    Args:
      size: latent height and width.
    Returns: (count, C, H, W) float32, as the model sees them, on every rank.
    """
    section, ranks, count = run.recipe.run, run.ranks, len(subjects.names)
    solver = Solver(
        steps=section.sample_steps,
        guidance=guidance_scale(run.spec, section.sample_guidance),
        autocast=run.autocast_dtype,
        tf32=section.precision == "tf32",
    )
    images = 1 if subjects.reference is None else 2  # whose tokens the model sees
    most = max(1, FORWARD_TOKENS // (2 * images * tokens_per_image(run.spec, size)))
    each = -(-count // ranks.world_size)
    conditioning = subjects.conditioning(run.conditioner, run.device)
    drawn = torch.zeros(count, run.spec.channels, *size, device=run.device)
    model = SamplingModel(
        run.engine.forward, run.spec, run.recipe.objective, run.conditioner, sample_shift=section.sample_shift
    )
    run.engine.model.eval()
    with run.engine.averaged(), torch.compiler.set_stance("force_eager"):
        for start in range(0, each, most):
            # A sharded model needs every rank in every forward: one without images draws another's again.
            places = [ranks.rank * each + place for place in range(start, min(each, start + most))]
            numbers = [place % count for place in places]
            latents = draw_latents(
                model, select(conditioning, numbers), size=size, seed=section.seed, solver=solver, numbers=numbers
            )
            first = places[0]  # beyond the last image both sides are empty
            drawn[first : first + len(places)] = latents[: max(0, count - first)]
    if ranks.world_size > 1:
        dist.all_reduce(drawn)  # each latent and zeros
    return drawn


def choose_subjects(run: Run, count: int, own: Subjects | None = None) -> Subjects:
    """Subjects of a grid, spread evenly over the first store: captions or classes, or records of one bucket to edit.

    Captions and records are held-out ones where there are any, else any that train.

    Args:
      count: of images; fewer where there are fewer captions or records, while classes come again.
      own: captions instead; each edits the next record.
    """
    reader, mixture = run.loader.reader, run.recipe.data.mixture
    store, selection = reader.stores[0], reader.order.plans[0].selection
    if not run.spec.takes_text:
        names = (mixture[0] if mixture else run.recipe.data).labels
        labels = label_indices(names, store) if names else range(max(1, store.num_classes))
        chosen = [int(labels[place]) for place in np.resize(spread(len(labels), count), count)]
        return Subjects([f"{label}: {store.class_names.describe(label)}" for label in chosen], labels=chosen)
    held_out = selection.held_out if selection else {}
    held_out = {bucket: positions for bucket, positions in held_out.items() if len(positions)}
    if own and not run.spec.reference:
        return own
    if not run.spec.reference:
        known = _first_captions(store, held_out or dict.fromkeys(store.buckets, slice(None)))
        return _captioned(store, known[spread(len(known), count)].tolist(), texts=reader.gatherer.texts)
    trained = selection.counts if selection else store.buckets
    counts = {bucket: len(positions) for bucket, positions in held_out.items()} or trained
    bucket = max(counts, key=lambda name: counts[name])
    check = run.recipe.data.check != "never"
    records = EditRecords(store, run.spec.reference, bucket, reader.latent_specs[0], check=check)
    positions = held_out[bucket] if held_out else selection.positions[bucket] if selection else None
    positions = np.arange(len(records)) if positions is None else positions  # all
    count = len(own.names) if own else min(count, len(positions))
    chosen = np.resize(positions[spread(len(positions), count)], count)
    subjects = own or _captioned(store, records.caption_ids(chosen), texts=reader.gatherer.texts)
    return subjects._replace(reference=records.latents(chosen))


def _captioned(store: LatentStore, ids: list[int], *, texts: Sequence[str]) -> Subjects:
    """Stored captions as subjects.

    Args:
      texts: names of the text encoders that the model reads.
    """
    column = store.captions["text"]
    captions = {name: captions_of(store.text(name), ids) for name in texts}
    return Subjects([column[each].as_py() for each in ids], captions=captions)


def own_subjects(run: Run) -> Subjects | None:
    """The captions of ``run.sample_captions``, each from the first store of the run that has it; None without any.

    Raises: RecipeError: no store has one of them; the message tells what the stores have, and how to add it.
    """
    section, stores = run.recipe.run, run.loader.reader.stores
    if not (section.sample_every and section.sample_captions):
        return None
    texts, places = section.sample_captions, dict[str, tuple[LatentStore, int]]()
    for store in reversed(stores):
        ids = zip(texts, store.find_captions(texts), strict=True)
        places |= {text: (store, each) for text, each in ids if each is not None}
    if missing := [text for text in texts if text not in places]:
        known = [*dict.fromkeys(text for store in stores for text in store.spec.sample_captions)]
        has = ", ".join(f"'{shorten(text, MOST_SHOWN, placeholder='...')}'" for text in known[:MOST_NAMED]) or "none"
        more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        is_older = any(store.newest_revision > store.revision for store in stores)
        advice = "This run reads an older revision of the store; a new run reads the newest. " if is_older else ""
        advice += (
            "Add it to captions.sample in the recipe of the store and run the same precompute again: it encodes this "
            "caption alone."
        )
        raise RecipeError(
            f"run.sample_captions '{missing[0]}': store '{stores[0].path}' does not hold it. Expected "
            f"a caption of its records, or one of its sample captions: {has}{more}. {advice}"
        )
    captions = {
        name: Captions.joined([captions_of(store.text(name), [each]) for store, each in map(places.__getitem__, texts)])
        for name in run.loader.reader.gatherer.texts
    }
    return Subjects(list(texts), captions=captions)


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
