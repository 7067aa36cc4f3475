"""What a technique is.

A file of this folder has all of a technique: its keys in the recipe, what it draws for each image, what it asks of the
model, its loss and its paper. ``registry.py`` lists them, and nothing else names one: to add a technique, write its
file and its lines there; to remove it, delete both. Recipes are checked before torch is loaded, so these files import
it where they need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...datasets.format.schema import FeatureSpec, StoreSpec
from ...effects import Condition
from ...errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from ...datasets.batches.batch import Batch
    from ..models.conditioning import Extras, Microbatch, ModelOutput
    from ..models.spec import ModelSpec, ProjectorSpec
    from ..run.state import Run

Weight = Annotated[float, Field(ge=0)]
Draw = tuple[Literal["normal", "uniform"], tuple[int, ...]]
"""What is drawn for each image, and its shape."""


class Technique:
    """Base of all techniques; each overrides what it needs.

    Args:
      recipe: the ``TrainRecipe``, which is composed of the keys of all techniques.

    Attributes:
      key: of the recipe, for messages.
      compares_images: its loss compares the images of a global batch.
      conditions: when its keys are read, if not always.
      reads_blocks: it looks into the blocks of a DiT, which other models have not.
      is_on: the recipe uses it.
      features: image features of the store that it reads.
      fuses: the model fuses routed and other tokens (SPRINT).
      drops_path: it learns to do without the routed blocks.
    """

    key: ClassVar[str]
    compares_images: ClassVar[bool] = False
    reads_blocks: ClassVar[bool] = True
    conditions: ClassVar[Sequence[Condition]] = ()
    is_on: bool
    features: Sequence[str] = ()
    fuses: bool = False
    drops_path: bool = False

    def __init__(self, recipe: Any) -> None:
        raise NotImplementedError

    def contradictions(self, recipe: Any) -> Iterable[str]:
        """Other keys of the recipe that contradict it, a sentence each."""
        return ()

    def blocks(self, depth: int) -> dict[str, int]:
        """The blocks that it looks into, from 1, by key."""
        return {}

    def routed(self, depth: int) -> tuple[int, int]:
        """The first and the last block that some tokens skip, from 1; (0, 0): none. Raises: RecipeError."""
        return 0, 0

    def check_model(self, name: str, depth: int, others: Sequence[Technique]) -> None:
        """Raise RecipeError if a model has not the blocks that the recipe names."""
        for key, block in self.blocks(depth).items():
            if block > depth:
                raise RecipeError(f"{key} {block}: model '{name}' has {depth} blocks.")

    def lacks(self, store: StoreSpec) -> Iterable[str]:
        """What a store lacks for it, each a phrase with what to do."""
        return ()

    def projectors(self, store: StoreSpec, width: int) -> dict[str, ProjectorSpec]:
        """Projectors that the model gets, by name.

        Args:
          store: that lacks nothing.
          width: of the model.
        """
        return {}

    def draws(self, spec: ModelSpec, num_tokens: int, step: int) -> dict[str, Draw]:
        """What is random for each image, by name.

        Args:
          num_tokens: image tokens of an image.
        """
        return {}

    def read(
        self, batch: Batch, grid: tuple[int, int], features: Mapping[str, FeatureSpec], *, trains: bool
    ) -> dict[str, Tensor]:
        """Targets that come with a batch, by name.

        Args:
          grid: rows and columns of the model's tokens.
          trains: False: only what the model reads in every forward.
        """
        return {}

    def teach(
        self, run: Run, images: Microbatch, parts: Sequence[slice], step: int, *, global_size: int
    ) -> dict[str, Tensor]:
        """Targets that take a forward of their own, or images of other microbatches and ranks, by name.

        A loss depends on other images through these targets alone, so it is the same whatever fits in memory.

        Args:
          images: of this rank.
          parts: the images of each microbatch.
          global_size: images of the global batch.
        """
        return {}

    def inputs(self, extras: Extras, images: Microbatch) -> Extras:
        """Add what the model reads in every forward, in evaluations too."""
        return extras

    def asks(self, extras: Extras, images: Microbatch, step: int) -> Extras:
        """Add what a training step asks of the model."""
        return extras

    def terms(self, images: Microbatch, extras: Extras, output: ModelOutput, step: int) -> dict[str, Tensor]:
        """Weighted losses of each image, (B,) each, by the names that reports give them."""
        return {}


def is_active(stop_step: int, step: int) -> bool:
    """Whether something that stops after a step, or never (0), is done at a step."""
    return not stop_step or step <= stop_step
