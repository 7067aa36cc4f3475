"""Our training step beside the loops that others have, on the same noise, with the same objective and batch.

    python benchmarks/training.py dit-b-2-256 --set run.global_batch=8
    python benchmarks/training.py dit-xl-2-256 --fast-dit ../fast-DiT
    python benchmarks/training.py sit-xl-2-256-repa --without align

Others are the loop that a user of diffusers has around its class of the same model, the loop of fast-DiT on a checkout
of its repository, or our own step without sections of the recipe. All of them live in one process and take turns.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import alternate, machine, print_rates, tf32, timed
from noise_store import make_store
from torch import Tensor, nn

from leandit.datasets.batches.captions import Captions
from leandit.errors import RecipeError
from leandit.tools.plan.synthetic import synthetic_batch, synthetic_run
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.train.config import TrainRecipe, load
from leandit.train.models.build import diffusers_config, family_of, transformer_class
from leandit.train.models.conditioning import Conditioner, Conditioning, select
from leandit.train.models.dit import size_of
from leandit.train.models.spec import ModelSpec
from leandit.train.objectives.losses import PLAIN, draw_times, noised, objective_losses
from leandit.train.optim.precision import autocast_dtype
from leandit.train.optim.process import set_allocator
from leandit.train.run.fit import model_spec
from leandit.train.step import train_step

OURS, DIFFUSERS, FAST_DIT = "leandit", "diffusers", "fast-DiT"
WARM_STEPS = 3  # not counted: compile, fill caches, allocate
LOSS_EVERY = 10  # steps after which our loop reads its loss: run.log_every
Step = Callable[[], None]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What a step computes, and where."""

    work: TrainingWorkload
    device: torch.device

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of matrix products; None: float32."""
        return autocast_dtype(self.work.recipe.run.precision, self.device)

    def batch(self) -> Any:
        """A global batch of noise in the largest bucket, on the device."""
        work = self.work
        size = work.recipe.run.global_batch
        return synthetic_batch(work.store, work.largest_bucket, size, work.tokens, self.device)

    def without(self, section: str) -> Setting:
        """The same without a section of the recipe.

        Raises: RecipeError: the recipe does not set it.
        """
        recipe, default = self.work.recipe, getattr(TrainRecipe(), section, None)
        if getattr(recipe, section, None) == default:
            raise RecipeError(f"--without '{section}': the recipe has no section [{section}] of its own.")
        recipe = recipe.model_copy(update={section: default})
        spec = model_spec(recipe, self.work.store, "the same store")
        return replace(self, work=replace(self.work, recipe=recipe, spec=spec))


def setting_of(recipe: str, settings: list[str], side_px: int, device: str) -> Setting:
    """A recipe on square images of noise."""
    set_allocator(torch.device(device))  # as "leandit train" does
    return Setting(workload_at_resolution(load(recipe, settings), side_px), torch.device(device))


# ------------------------------------------------------------------------------------------------------------ the steps


def our_step(setting: Setting) -> Step:
    """One step of ``leandit train`` on noise; the loss is read every ``LOSS_EVERY`` steps, as in its loop."""
    work = setting.work
    how: dict[str, Any] = {"compiled": work.recipe.run.compile and setting.device.type == "cuda"}
    learner = synthetic_run(work.recipe, work.spec, work.tokens, setting.device, store=work.store, **how)
    learner.autocast_dtype = setting.autocast
    batch, losses = setting.batch(), list[Tensor]()

    def step() -> None:
        losses.append(train_step(learner, batch).loss)
        if len(losses) == LOSS_EVERY:
            torch.stack(losses).mean().item()
            losses.clear()

    return step


def is_in_diffusers(spec: ModelSpec) -> bool:
    """Whether diffusers has a class of this model; it has none of our DiT with captions."""
    return not spec.takes_text or family_of(spec.name) is not None


def diffusers_model(spec: ModelSpec) -> tuple[Any, Callable[[Tensor, Tensor, Conditioning], Tensor]]:
    """diffusers' class of a model as it comes, and its call with the arguments of ours."""
    family = family_of(spec.name)
    if family is not None:
        net = transformer_class(family)(**diffusers_config(spec))

        def predict(x: Tensor, t: Tensor, given: Conditioning) -> Tensor:
            captions, more = given.captions, {"pooled_projections": given.pooled}
            if isinstance(captions, Captions):
                captions, more = captions.padded, {"encoder_attention_mask": captions.mask}
            return net(x, encoder_hidden_states=captions, timestep=t, return_dict=False, **more)[0]

        return net, predict
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    depth, width, heads, patch = size_of(spec.name)
    dit = DiTTransformer2DModel(
        num_layers=depth,
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        in_channels=spec.channels,
        out_channels=spec.out_channels,
        sample_size=spec.base_size,
        patch_size=patch,
        num_embeds_ada_norm=spec.num_classes,
    )
    for module in dit.modules():
        if hasattr(module, "dropout_prob"):  # labels are dropped before the call, as ours are
            setattr(module, "dropout_prob", 0.0)  # noqa: B010 (for a type checker it is a tensor)
    return dit, lambda x, t, given: dit(x, timestep=t, class_labels=given.labels, return_dict=False)[0]


def diffusers_step(setting: Setting) -> Step:
    """One step of the usual loop around diffusers' model, with our objective, on the same kind of batch.

    Modules are eager, AdamW is as torch constructs it, and the loss of each microbatch is read. Averages are computed
    parameter by parameter: by a loop in Python for DiT, by diffusers' ``EMAModel`` for models with text. Blocks are
    recomputed where the recipe says so. Captions are on the device, padded to the longest.
    """
    work, device, recipe, spec = setting.work, setting.device, setting.work.recipe, setting.work.spec
    model, call = diffusers_model(spec)
    model.to(device).train()
    if recipe.run.activation_checkpointing != "none":
        model.enable_gradient_checkpointing()
    update_averages = averages_of(model, recipe.run.ema_decay, by_diffusers=spec.takes_text)
    section, size, dtype = recipe.optimizer, recipe.run.global_batch, setting.autocast
    optimizer = torch.optim.AdamW(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    batch = setting.batch()
    null = torch.zeros(work.tokens, spec.caption_width, device=device) if spec.takes_text else None
    null_pooled = torch.zeros(spec.pooled_width, device=device) if spec.pooled_width else None
    conditioner = Conditioner(spec, null, null_pooled=null_pooled)
    conditioning = conditioner(batch.labels, batch.texts, widen=dtype is None)
    microbatch, generator = recipe.run.microbatch or size, torch.Generator(device).manual_seed(0)

    def step() -> None:
        for start in range(0, size, microbatch):
            rows = slice(start, start + microbatch)
            x = batch.latents[rows]
            t = draw_times(recipe.objective, len(x), generator)
            dropped = torch.rand(len(x), device=device) < recipe.conditioning.drop
            given = conditioner.drop(select(conditioning, rows), dropped)
            noise = torch.randn_like(x)
            noisy, time = noised(recipe.objective, x, noise, t)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                output = call(noisy, time, given)
            loss = objective_losses(recipe.objective, output.float(), x, noise, t)[PLAIN].sum() / size
            loss.backward()
            loss.item()
        if recipe.run.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.run.grad_clip)
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that no gradients wait while our step has its turn
        update_averages()

    return step


def fast_dit_step(setting: Setting, checkout: Path) -> Step:
    """One step of fast-DiT's loop on a checkout of its repository: its model and its diffusion, driven as it does.

    The whole batch at once, blocks recomputed, fp16 on a GPU, TF32. Nothing of it is part of leandit: its license
    forbids commercial use. Source: github.com/chuanyangjin/fast-DiT, ``train.py``, as its README starts it.

    Raises: ModuleNotFoundError: the folder is no checkout of it, or it needs a package that is not installed.
    """
    from accelerate import Accelerator

    work, device, spec = setting.work, setting.device, setting.work.spec
    sys.path.insert(0, str(checkout))
    models, diffusions = importlib.import_module("models"), importlib.import_module("diffusion")
    batch, is_gpu = setting.batch(), device.type == "cuda"
    model_class = getattr(models, spec.name.replace("-", "_").replace("/", "_"))  # such as DiT_XL_2
    model = model_class(input_size=batch.latents.shape[-1], num_classes=spec.num_classes)
    model = model.to(device)
    diffusion = diffusions.create_diffusion(timestep_respacing="")
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.recipe.optimizer.lr, weight_decay=0)
    accelerator = Accelerator(mixed_precision="fp16" if is_gpu else "no", cpu=not is_gpu, device_placement=is_gpu)
    update_averages = averages_of(model, work.recipe.run.ema_decay)
    model, optimizer = accelerator.prepare(model.train(), optimizer)

    def step() -> None:
        with tf32():
            t = torch.randint(0, diffusion.num_timesteps, (len(batch),), device=device)
            loss = diffusion.training_losses(model, batch.latents, t, {"y": batch.labels})["loss"].mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            update_averages()
            loss.item()

    return step


def averages_of(model: nn.Module, decay: float, *, by_diffusers: bool = False) -> Step:
    """What updates averages of the weights, parameter by parameter."""
    if by_diffusers:
        from diffusers.training_utils import EMAModel

        theirs = EMAModel(model.parameters(), decay=decay)
        return lambda: theirs.step(model.parameters())
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update() -> None:
        for name, parameter in model.named_parameters():
            averages[name].mul_(decay).add_(parameter, alpha=1 - decay)

    return update


# ----------------------------------------------------------------------------------------- measurements, as JSON values


def measure_beside(
    device: str,
    recipe: str,
    side_px: int,
    settings: list[str],
    rounds: int,
    steps: int,
    fast_dit: str | None = None,
    without: list[str] = [],  # noqa: B006
) -> Figures:
    """Images/s of each step in each round, by its name.

    Args:
      fast_dit: checkout of fast-DiT, whose loop is then measured instead of that around diffusers' model.
      without: sections of the recipe; our step without each is measured instead of others.
    """
    setting = setting_of(recipe, settings, side_px, device)
    making: dict[str, Step] = {OURS: our_step(setting)}
    for section in without:
        making[f"without {section}"] = our_step(setting.without(section))
    if fast_dit:
        making[FAST_DIT] = fast_dit_step(setting, Path(fast_dit))
    elif not without and is_in_diffusers(setting.work.spec):
        making[DIFFUSERS] = diffusers_step(setting)
    return alternate({name: rate_of(step, steps, setting) for name, step in making.items()}, rounds)


def rate_of(step: Step, steps: int, setting: Setting) -> Callable[[], float]:
    """What measures a step, after warming it up: images/s."""
    timed(step, WARM_STEPS, setting.device)
    return lambda: steps * setting.work.recipe.run.global_batch / timed(step, steps, setting.device)


def measure_store(device: str, recipe: str, side_px: int, settings: list[str], rounds: int, steps: int) -> Figures:
    """What ``leandit bench train`` prints of a store of noise; and images/s of our step on one batch in memory."""
    setting = setting_of(recipe, settings, side_px, device)
    with tempfile.TemporaryDirectory(prefix="leandit-benchmark-") as folder:
        store = noise_store(setting.work, Path(folder) / "store")
        command = [sys.executable, "-m", "leandit.tools.cli.main", "bench", "train", recipe, "--store", str(store)]
        command += ["--rounds", str(rounds), "--steps", str(steps), "--device", device, "--json"]
        command += [word for each in settings for word in ("--set", each)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    measure = rate_of(our_step(setting), steps, setting)
    figures = json.loads(printed)
    size = f"{figures['batch']}, {figures['precision']}"
    return figures | {"size": [size], "synthetic": [measure() for _ in range(rounds)]}


def noise_store(work: TrainingWorkload, path: Path) -> Path:
    """Write a store of noise that a workload can train on: four batches of its largest bucket."""
    make_store(
        path,
        {work.largest_bucket: 4 * work.recipe.run.global_batch},
        channels=work.spec.channels,
        num_classes=work.spec.num_classes,
        token_counts=[work.tokens] * 8 if work.tokens else (),
        text_width=0 if work.spec.texts else work.spec.caption_width or 1,
        texts={one.name: one.spec for one in work.store.texts},
        features={one.name: one.spec for one in work.store.features},
        downscale=work.store.latent.downscale,
        resolution_px=work.store.images.resolution_px,
    )
    return path


# ---------------------------------------------------------------------------------------------------------- the command


def main(
    recipe: Annotated[str, typer.Argument(help="Name of a train recipe, or a TOML file.")],
    resolution: Annotated[int, typer.Option(help="Side of the images, in pixels.")] = 256,
    rounds: Annotated[int, typer.Option(help="Times that everything is measured.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of each, in each round.")] = 10,
    without: Annotated[list[str], typer.Option(help="Section of the recipe to leave out; repeatable.")] = [],  # noqa: B006
    fast_dit: Annotated[Path | None, typer.Option(help="Checkout of github.com/chuanyangjin/fast-DiT.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    overrides: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key.")] = [],  # noqa: B006
) -> None:
    """Our step beside diffusers' (default), fast-DiT's, or our own without sections of the recipe."""
    checkout = str(fast_dit.resolve()) if fast_dit else None
    rates = measure_beside(device, recipe, resolution, overrides, rounds, steps, checkout, without)
    print(f"{recipe}, {resolution} px; {machine()}\n")
    print_rates("images/s", rates, OURS)


if __name__ == "__main__":
    typer.run(main)
