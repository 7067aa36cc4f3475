"""The options of ``leandit sample`` and ``leandit evaluate``. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from ...datasets.format.class_names import ClassNames
from ...errors import RecipeError

DEFAULT_COUNT = 16
LARGEST_GRID = 256  # images; a larger number becomes a set of files
INCEPTION = "inception"


@dataclass(frozen=True)
class SampleRequest:
    """What to draw, and how. A field with an ``Option`` is one of the command line.

    Args:
      store: with captions; None: the store that the run trained on.
    """

    labels: Annotated[list[str], Option("--label", help="Class name, folder (wnid) or index; repeatable.")] = field(
        default_factory=list
    )
    captions: Annotated[list[str], Option("--caption", help="Caption; repeatable.")] = field(default_factory=list)
    count: Annotated[
        int | None,
        Option(
            "--num", min=1, help="Images per label or caption (default 1), or in total without either (default 16)."
        ),
    ] = None
    batch: Annotated[int, Option(min=1, help="Images generated at once.")] = 64
    images: Annotated[
        list[Path],
        Option(
            "--image",
            help="Image to edit, for a model with model.reference; default: the companion images of the store.",
        ),
    ] = field(default_factory=list)
    bucket: Annotated[str | None, Option(help="HxW in pixels; default: the most common bucket.")] = None
    guidance: Annotated[
        float | None,
        Option(
            help="Classifier-free guidance scale; 1: none. Default: 4, or 1 for a model with guidance as an input "
            "(FLUX.1 dev, FLUX.2 dev)."
        ),
    ] = None
    guidance_times: Annotated[
        str, Option(metavar="LOW,HIGH", help="Guide only between these times: 0 is data, 1 is noise.")
    ] = "0,1"
    guided_channels: Annotated[
        int, Option("--guided-channels", min=0, help="Guide only this many channels, from the first; 0: all.")
    ] = 0
    sampler: Annotated[
        Literal["auto", "euler", "heun", "sde", "ddim", "dpm", "ddpm"],
        Option(help="flow: euler, heun, dpm, sde. ddpm: ddim, dpm, ddpm."),
    ] = "auto"
    shift: Annotated[
        float | None,
        Option(min=0.01, help="Shift of flow times towards noise; default: run.sample_shift."),
    ] = None
    diffusion: Annotated[
        Literal["sigma", "linear", "constant", "decreasing", "increasing-decreasing"],
        Option(help="Diffusion coefficient of --sampler sde."),
    ] = "sigma"
    last_step: Annotated[
        Literal["mean", "euler", "tweedie"], Option(help="Last step of --sampler sde, without noise.")
    ] = "mean"
    steps: Annotated[int, Option(min=1, max=1000, help="Steps of the solver.")] = 50
    seed: Annotated[int, Option(min=0, help="Noise seed.")] = 0
    precision: Annotated[
        Literal["fp32", "tf32", "bf16"], Option(help="Precision of the model; tf32 and bf16 need a GPU.")
    ] = "fp32"
    compiled: Annotated[
        bool | None,
        Option("--compile/--no-compile", help="torch.compile the blocks; default: on a GPU for many images."),
    ] = None
    recipe: Annotated[str, Option(help="Train recipe of a published checkpoint, given as RUN.")] = ""
    encoders: Annotated[str, Option(help="Precompute recipe of the checkpoint's VAE and text encoder.")] = ""
    vae: Annotated[str | None, Option(help="VAE to decode with (folder or hub id); default: the store's.")] = None
    text: Annotated[str | None, Option(help="Text encoder (folder or hub id) for captions not in the store.")] = None
    base: Annotated[str, Option(help="Current location of the weights the run's adapters were trained on.")] = ""
    weights: Annotated[
        Literal["averaged", "raw"], Option(help="Averaged weights, or the raw ones of the newest checkpoint.")
    ] = "averaged"
    store: Path | None = None

    def __post_init__(self) -> None:
        """Raise RecipeError for an invalid interval, or several images."""
        _ = self.interval
        if len(self.images) > 1:
            raise RecipeError(f"--image: expected one image, got {len(self.images)}. Run the command for each of them.")

    @property
    def interval(self) -> tuple[float, float]:
        """Times of guidance, from 0 (data) to 1 (noise).

        Raises: RecipeError: not two times in order.
        """
        try:
            low, high = map(float, self.guidance_times.split(","))
        except ValueError:
            low, high = 1.0, 0.0
        if not 0 <= low <= high <= 1:
            raise RecipeError(
                f"--guidance-times '{self.guidance_times}': expected two times, 0 (data) to 1 (noise), such as 0.1,0.8."
            )
        return low, high

    @property
    def image(self) -> Path | None:
        """The image to edit, if one is given."""
        return self.images[0] if self.images else None

    @property
    def num_subjects(self) -> int:
        """Number of requested labels or captions."""
        return len(self.labels) + len(self.captions)

    @property
    def total(self) -> int:
        """Number of images."""
        return self.num_subjects * (self.count or 1) if self.num_subjects else self.count or DEFAULT_COUNT

    @property
    def is_published(self) -> bool:
        """Whether a published checkpoint draws, not a run."""
        return bool(self.recipe or self.encoders)


@dataclass(frozen=True)
class EvaluateRequest:
    """What to measure, and how. A field with an ``Option`` is one of the command line.

    Args:
      target: a run, a folder of images, or a .npz file.
      against: the reference: a store, a folder or a .npz file; None: only ``clip``.
      keep: file for the statistics of the reference.
      captions: samples.json or metadata.jsonl; None: the one in the folder.
      draw: what a run draws; its ``vae`` decodes a store too.
      out: folder for it.
    """

    target: Path = Path()
    against: Path | None = None
    features: Annotated[
        str, Option(help='"inception", the file of its weights, or a vision model (folder or hub id).')
    ] = INCEPTION
    resize: Annotated[
        Literal["antialiased", "tensorflow"] | None,
        Option(help="Resize for Inception; tensorflow: as in the original FID and ADM's evaluator."),
    ] = None
    source: Annotated[list[str], Option(help="Source images of the store, instead of decoding it; repeatable.")] = (
        field(default_factory=list)
    )
    crop_px: Annotated[
        int,
        Option(
            "--crop",
            min=0,
            metavar="PX",
            help="Crop images of folders to squares of this side, like ADM; 0: do not crop.",
        ),
    ] = 0
    most: Annotated[int, Option("--against-num", min=0, help="Number of reference images, evenly spaced; 0: all.")] = 0
    clip: Annotated[
        str | None, Option("--clip", help="CLIP (folder or hub id) for the CLIP score of the captions.")
    ] = None
    keep: Path | None = None
    captions: Path | None = None
    draw: SampleRequest = field(default_factory=SampleRequest)
    out: Path | None = None


def find_labels(state: Mapping[str, Any], labels: Sequence[int | str], captions: Sequence[str]) -> list[int]:
    """The index of each class, given by name, folder or index.

    Args:
      state: of a snapshot.
    Raises: RecipeError: labels for a model of captions, or captions for a model of labels; no class has the name, or
      several have.
    """
    spec = state["spec"]
    if labels and spec["caption_width"]:
        raise RecipeError(f"--label: model '{spec['name']}' takes captions. Use --caption.")
    if captions and not spec["caption_width"]:
        raise RecipeError(f"--caption: model '{spec['name']}' takes class labels. Use --label.")
    classes = ClassNames(state["classes"], state.get("class_names"))
    try:
        return [classes.find(label, num_labels=spec["num_classes"]) for label in labels]
    except RecipeError as error:
        raise RecipeError(f"--label: {error}") from error
