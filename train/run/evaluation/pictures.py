"""Grids of pictures while a run trains: the averaged weights draw latents, another process decodes them.

The trainer never loads a decoder and never waits for one, except at the end of the run. The grid of a step is
``samples/step-<step>.safetensors`` until it is decoded, then ``samples/step-<step>.png``. Nothing that trains changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from ....datasets.batches.latents import denormalise
from ....datasets.disk.files import write_atomic
from ....datasets.format.schema import LatentSpec
from ...data_recipe import RecordsSection, Turn
from ...metrics.flops import latent_size_of, tokens_per_image
from ...metrics.writer import MetricsWriter
from ...sampling.guided import SamplingModel, Solver, draw_latents
from ...step.attention_kernels import preferred
from ...weights.folders import SAMPLES
from ..data import buckets_at
from ..state import TrainState
from .decoding import Decoding
from .subjects import Subjects, choose_subjects

FORWARD_TOKENS = 16384  # image tokens of a forward


@dataclass(frozen=True)
class _Grid:
    """What a stage draws: its subjects, at the size of its most common bucket."""

    subjects: Subjects
    bucket: str
    latent: LatentSpec


class Pictures:
    """Draws a grid every ``run.sample_every`` steps; all ranks share the work.

    Args:
      state: of the run.
      run: its folder.
      warn: called if the grids cannot be decoded, and if they have fewer pictures than the recipe asks for.
    """

    def __init__(self, state: TrainState, run: Path, warn: Callable[[str], None]) -> None:
        self._state, self._section, self._warn = state, state.recipe.run, warn
        self._decoding = Decoding(run / SAMPLES, warn) if state.ranks.is_first else None
        self._solver = Solver(
            steps=self._section.sample_steps,
            guidance=self._section.sample_guidance,
            autocast=state.autocast_dtype,
            tf32=self._section.precision == "tf32",
        )
        self._grids: dict[int, _Grid] = {}  # by the first store of the stage

    def is_due(self, step: int) -> bool:
        """Whether a step ends with a grid."""
        return step % self._section.sample_every == 0 or step == self._section.steps

    def draw(self) -> None:
        """Draw the grid of this step and start its decoding; a collective call, after which nothing has changed."""
        grid, state = self._grid(), self._state
        latents = self._latents(grid)
        if self._decoding is None:
            return
        raw = denormalise(latents.cpu(), grid.latent)
        content = {
            "names": grid.subjects.names,
            "vae": state.extra["vae"],
            "latent": grid.latent.model_dump(),
        }
        data = safetensors.torch.save({"latents": raw.contiguous()}, metadata={"grid": json.dumps(content)})
        write_atomic(self._decoding.path_of(state.step), data)
        self._decoding.start()

    def show(self, writer: MetricsWriter) -> None:
        """Hand on the grids that have been decoded since the last call."""
        for step, path in self._decoding.decoded() if self._decoding else ():
            writer.write_picture(path, step, now=self._state.step)

    def finish(self, writer: MetricsWriter | None) -> None:
        """Wait until all grids are decoded, and hand them on; only the first rank has a writer."""
        if self._decoding and writer:
            self._decoding.finish()
            self.show(writer)

    def close(self) -> None:
        """Stop decoding; the next call of the run goes on with it."""
        if self._decoding:
            self._decoding.stop()

    def _grid(self) -> _Grid:
        state, data = self._state, self._state.recipe.data
        number, section = _first_store(data.turns, state.step)
        if number not in self._grids:
            reader = state.loader.dataset.reader
            takes_text, count = state.spec.takes_text, self._section.sample_count
            subjects = choose_subjects(reader, number, section or data, takes_text=takes_text, count=count)
            if len(subjects.names) < count and state.ranks.is_first:
                kept = "held-out records" if data.holdout else "records"
                self._warn(
                    f"run.sample_count {count}: the {kept} have {len(subjects.names)} different first captions, so "
                    "a grid has as many pictures"
                )
            buckets = buckets_at(data, state.stores, state.step)
            self._grids[number] = _Grid(subjects, max(buckets, key=lambda b: buckets[b]), reader.latent_specs[number])
        return self._grids[number]

    def _latents(self, grid: _Grid) -> Tensor:
        """(count, C, h, w) float32, as the model sees them, on every rank."""
        state, (rank, world_size) = self._state, (self._state.ranks.rank, self._state.ranks.world_size)
        count, size = len(grid.subjects.names), latent_size_of(grid.bucket, grid.latent)
        most = max(1, FORWARD_TOKENS // (2 * tokens_per_image(state.spec, size)))
        each = -(-count // world_size)
        conditioning = grid.subjects.conditioning(state.conditioner, state.device)
        drawn = torch.zeros(count, state.spec.channels, *size, device=state.device)
        live = SamplingModel(state.engine.forward, state.spec, state.recipe.objective, state.conditioner)
        state.engine.model.eval()
        kernels = preferred(state.attention_kernels)
        with state.engine.averaged(), torch.compiler.set_stance("force_eager"), kernels:
            for start in range(0, each, most):
                # A sharded model needs every rank in every forward: one without pictures draws another's again.
                places = [rank * each + place for place in range(start, min(each, start + most))]
                numbers = [place % count for place in places]
                part = conditioning.part(numbers)
                how = {"size": size, "seed": self._section.seed, "solver": self._solver}
                latents = draw_latents(live, part, **how, numbers=numbers)
                for place, latent in zip(places, latents, strict=True):
                    if place < count:
                        drawn[place] = latent
        if world_size > 1:
            dist.all_reduce(drawn)  # each latent and zeros
        return drawn


def _first_store(turns: list[Turn], step: int) -> tuple[int, RecordsSection | None]:
    """Index of the first store that trains at a step, and its section; the only one has that of ``[data]``."""
    return next(((number, turn.section) for number, turn in enumerate(turns) if turn.has(step)), (0, None))
