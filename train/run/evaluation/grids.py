"""Grids of images while a run trains: the averaged weights draw latents, another process decodes them.

The trainer never loads a decoder and never waits for one, except at the end of the run. Nothing that trains changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from ....datasets.batches.captions import CaptionBatch, captions_of
from ....datasets.batches.latents import denormalise
from ....datasets.batches.reader import BatchReader
from ....datasets.disk.files import write_atomic
from ....datasets.order.filters import label_indices
from ....datasets.store import LatentStore
from ...data_recipe import RecordsSection
from ...metrics.flops import latent_size_of, tokens_per_image
from ...metrics.writer import MetricsWriter
from ...models.conditioning import Conditioner, Conditioning
from ...sampling.guided import SamplingModel, Solver, draw_latents
from ...weights.folders import SAMPLES
from ..data import buckets_at
from ..state import Run
from .decoding import Decoding

FORWARD_TOKENS = 16384  # image tokens of a forward


@dataclass(frozen=True)
class Subjects:
    """The labels or captions of a grid, one for each image.

    Args:
      names: for display.
      labels: class indexes, or None.
      captions: of each text encoder, by name, or None.
    """

    names: list[str]
    labels: list[int] | None = None
    captions: Mapping[str, CaptionBatch] | None = None

    def conditioning(self, conditioner: Conditioner, device: torch.device) -> Conditioning:
        """Of all images, on a device."""
        if self.captions is None:
            return conditioner(torch.tensor(self.labels, device=device), {})
        return conditioner(None, {name: text.to(device) for name, text in self.captions.items()})


class Grids:
    """Draws a grid every ``run.sample_every`` steps; all ranks share the work.

    Args:
      state: of the run.
      run: its folder.
      warn: called if the grids cannot be decoded, and if they have fewer images than the recipe asks for.
    """

    def __init__(self, state: Run, run: Path, warn: Callable[[str], None]) -> None:
        self._state, self._section, self._warn = state, state.recipe.run, warn
        self._decoding = Decoding(run / SAMPLES, warn) if state.ranks.is_first else None
        self._solver = Solver(
            steps=self._section.sample_steps,
            guidance=self._section.sample_guidance,
            autocast=state.autocast_dtype,
            tf32=self._section.precision == "tf32",
        )
        self._subjects: dict[int, Subjects] = {}  # by the first store of the stage

    def is_due(self, step: int) -> bool:
        """Whether a step ends with a grid."""
        return step % self._section.sample_every == 0 or step == self._section.steps

    def draw(self) -> None:
        """Draw the grid of this step and start its decoding; a collective call, after which nothing has changed."""
        state, data = self._state, self._state.recipe.data
        first = ((number, turn.section) for number, turn in enumerate(data.turns) if turn.has(state.step))
        number, section = next(first, (0, data))
        subjects = self._subjects.get(number) or self._choose_subjects(number, section)
        self._subjects[number] = subjects
        latent = state.loader.dataset.reader.latent_specs[number]
        buckets = buckets_at(data, state.stores, state.step)
        bucket = max(buckets, key=lambda name: buckets[name])  # the most common one
        latents = self._latents(subjects, latent_size_of(bucket, latent))
        if self._decoding is None:
            return
        content = {"names": subjects.names, "vae": state.extra["vae"], "latent": latent.model_dump()}
        raw = {"latents": denormalise(latents.cpu(), latent).contiguous()}
        write_atomic(
            self._decoding.path_of(state.step), safetensors.torch.save(raw, metadata={"grid": json.dumps(content)})
        )
        self._decoding.start()

    def show(self, writer: MetricsWriter, *, wait: bool = False) -> None:
        """Hand on the grids that have been decoded since the last call, or ``wait`` for all."""
        for step, path in self._decoding.decoded(wait=wait) if self._decoding else ():
            writer.write_picture(path, step, now=self._state.step)

    def finish(self, writer: MetricsWriter | None) -> None:
        """Wait until all grids are decoded, and hand them on; only the first rank has a writer."""
        if writer:
            self.show(writer, wait=True)

    def close(self) -> None:
        """Stop decoding; the next call of the run goes on with it."""
        if self._decoding:
            self._decoding.stop()

    def _choose_subjects(self, number: int, section: RecordsSection) -> Subjects:
        count, state = self._section.sample_count, self._state
        reader, takes_text = state.loader.dataset.reader, state.spec.takes_text
        subjects = choose_subjects(reader, number, section, takes_text=takes_text, count=count)
        if len(subjects.names) < count and state.ranks.is_first:
            kept = "held-out records" if state.recipe.data.holdout else "records"
            self._warn(
                f"run.sample_count {count}: the {kept} have {len(subjects.names)} different first captions, so a grid "
                "has as many images"
            )
        return subjects

    def _latents(self, subjects: Subjects, size: tuple[int, int]) -> Tensor:
        """(count, C, h, w) float32, as the model sees them, on every rank."""
        state, ranks, count = self._state, self._state.ranks, len(subjects.names)
        most = max(1, FORWARD_TOKENS // (2 * tokens_per_image(state.spec, size)))
        each = -(-count // ranks.world_size)
        conditioning = subjects.conditioning(state.conditioner, state.device)
        drawn = torch.zeros(count, state.spec.channels, *size, device=state.device)
        model = SamplingModel(state.engine.forward, state.spec, state.recipe.objective, state.conditioner)
        state.engine.model.eval()
        with state.engine.averaged(), torch.compiler.set_stance("force_eager"):
            for start in range(0, each, most):
                # A sharded model needs every rank in every forward: one without images draws another's again.
                places = [ranks.rank * each + place for place in range(start, min(each, start + most))]
                numbers = [place % count for place in places]
                how = {"size": size, "seed": self._section.seed, "solver": self._solver, "numbers": numbers}
                latents = draw_latents(model, conditioning.part(numbers), **how)
                for place, one in zip(places, latents, strict=True):
                    if place < count:
                        drawn[place] = one
        if ranks.world_size > 1:
            dist.all_reduce(drawn)  # each latent and zeros
        return drawn


def choose_subjects(
    reader: BatchReader, number: int, section: RecordsSection, *, takes_text: bool, count: int
) -> Subjects:
    """Spread the subjects evenly over a store.

    Args:
      number: of the store.
      section: which of its records train.
      takes_text: captions, of the held-out records where there are any, else of all; otherwise classes that train.
      count: of images; classes come again if they are fewer, captions do not.
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
