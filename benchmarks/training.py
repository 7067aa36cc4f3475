"""Our training step beside the loops that others have, on the same noise, with the same objective and batch.

    python benchmarks/training.py dit-b-2-256 --set run.global_batch=8
    python benchmarks/training.py dit-xl-2-256 --fast-dit ../fast-DiT
    python benchmarks/training.py sit-xl-2-256-repa --without align

Others are the loop that a user of diffusers has around its class of the same model, the loop of fast-DiT on a checkout
of its repository, or our own step without sections of the recipe. All of them live in one process and take turns.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from measuring import alternating_rounds, hardware, log, median_and_range, print_table, ratios, timed
from torch import Tensor, nn

from leandit.datasets.errors import RecipeError
from leandit.tools.bench.train import measure
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution, workload_of_stores
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.tools.synthetic.store import make_store
from leandit.tools.terminal.progress import ProgressLine
from leandit.train.config import TrainRecipe, load
from leandit.train.metrics.device import peak_flops
from leandit.train.metrics.flops import latent_size_of, train_flops
from leandit.train.models.build import diffusers_config
from leandit.train.models.conditioning import Conditioner, Conditioning
from leandit.train.models.diffusers_models.families import family_of, transformer_class
from leandit.train.models.dit import size_of
from leandit.train.models.spec import ModelSpec
from leandit.train.objectives.losses import draw_times, loss_per_image
from leandit.train.optim.loss_scale import autocast_dtype
from leandit.train.run.model_for_store import model_spec
from leandit.train.step.cpu import keep_freed_memory
from leandit.train.step.train_step import train_step

OURS, DIFFUSERS, FAST_DIT = "leandit", "diffusers", "fast-DiT"
WARM_STEPS = 3  # not counted: compile, fill caches, allocate
LOSS_EVERY = 10  # steps after which our loop reads its loss: run.log_every
Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """What a step computes.

    Args:
      as_on_gpu: with the precision and the compiled blocks of a GPU on any device, to count its work.
    """

    work: TrainingWorkload
    device: torch.device
    as_on_gpu: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of matrix products; None: float32."""
        precision = self.work.recipe.run.precision
        if self.as_on_gpu:
            return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        return autocast_dtype(precision, self.device)

    def batch(self) -> Any:
        """A global batch of noise in the largest bucket, on the device."""
        work = self.work
        size = work.recipe.run.global_batch
        return synthetic_batch(work.store, work.largest_bucket, size, work.tokens, self.device)

    def without(self, section: str) -> Setting:
        """The same without a section of the recipe.

        Raises: RecipeError: the recipe does not set it.
        """
        work, default = self.work, TrainRecipe()
        if getattr(work.recipe, section, None) == getattr(default, section, None):
            raise RecipeError(f"--without '{section}': the recipe has no section [{section}] of its own.")
        recipe = work.recipe.model_copy(update={section: getattr(default, section)})
        spec = model_spec(recipe, work.store, "the same store")
        return replace(self, work=replace(work, recipe=recipe, spec=spec))


# ------------------------------------------------------------------------------------------------------------ the steps


def our_step(setting: Setting) -> Step:
    """One step of ``leandit train`` on noise; the loss is read every ``LOSS_EVERY`` steps, as in its loop."""
    work, compiles = setting.work, setting.as_on_gpu or setting.device.type == "cuda"
    how: dict[str, Any] = {"compiled": work.recipe.run.compile and compiles, "onednn": not setting.as_on_gpu}
    learner = synthetic_learner(work.recipe, work.spec, work.tokens, setting.device, store=work.store, **how)
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


def diffusers_step(setting: Setting) -> Step:
    """One step of the usual loop around diffusers' model, with our objective, on the same kind of batch.

    Modules are eager, AdamW is as torch constructs it, and the loss of each microbatch is read. Averages are computed
    parameter by parameter: by a loop in Python for DiT, by diffusers' ``EMAModel`` for models with text. Blocks are
    recomputed where the recipe says so. Captions are on the device, padded to the longest.
    """
    work, device, recipe, spec = setting.work, setting.device, setting.work.recipe, setting.work.spec
    model = (DiffusersText(spec) if spec.takes_text else DiffusersDiT(spec)).to(device).train()
    if recipe.run.activation_checkpointing != "none":
        model.net.enable_gradient_checkpointing()
    update_averages = (_diffusers_averages if spec.takes_text else _plain_averages)(model, recipe.run.ema_decay)
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
            given = conditioner.drop(conditioning.part(rows), dropped)

            def predict(noisy: Tensor, time: Tensor, given: Conditioning = given) -> Tensor:
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    return model(noisy, time, given)

            loss = loss_per_image(recipe.objective, predict, x, torch.randn_like(x), t).sum() / size
            loss.backward()
            loss.item()
        if recipe.run.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.run.grad_clip)
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that no gradients wait while our step has its turn
        update_averages()

    return step


def _plain_averages(model: nn.Module, decay: float) -> Step:
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update() -> None:
        for name, parameter in model.named_parameters():
            averages[name].mul_(decay).add_(parameter, alpha=1 - decay)

    return update


def _diffusers_averages(model: nn.Module, decay: float) -> Step:
    from diffusers.training_utils import EMAModel

    averages = EMAModel(model.parameters(), decay=decay)
    return lambda: averages.step(model.parameters())


class DiffusersDiT(nn.Module):
    """diffusers' class with the call of ours; its own label dropout is turned off."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

        depth, width, heads, patch = size_of(spec.name)
        self.net = DiTTransformer2DModel(
            num_layers=depth,
            num_attention_heads=heads,
            attention_head_dim=width // heads,
            in_channels=spec.channels,
            out_channels=spec.out_channels,
            sample_size=spec.base_size,
            patch_size=patch,
            num_embeds_ada_norm=spec.num_classes,
        )
        for module in self.net.modules():
            if hasattr(module, "dropout_prob"):
                setattr(module, "dropout_prob", 0.0)  # noqa: B010 (for a type checker it is a tensor)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        return self.net(x, timestep=t, class_labels=conditioning.labels, return_dict=False)[0]


class DiffusersText(nn.Module):
    """diffusers' PixArt, Sana or SD3 as it comes, with the call of ours."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        family = family_of(spec.name)
        assert family is not None
        self.net = transformer_class(family)(**diffusers_config(spec))
        self._is_joint = family == "sd3"

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        captions, mask = conditioning.captions, conditioning.caption_mask
        more = {"pooled_projections": conditioning.pooled} if self._is_joint else {"encoder_attention_mask": mask}
        return self.net(x, encoder_hidden_states=captions, timestep=t, return_dict=False, **more)[0]


def fast_dit_step(setting: Setting, checkout: Path) -> Step:
    """One step of fast-DiT's loop on a checkout of its repository: its model and its diffusion, driven as it does.

    The whole batch at once, blocks recomputed, fp16 on a GPU, TF32. Nothing of it is part of leandit: its license
    forbids commercial use. Source: github.com/chuanyangjin/fast-DiT, ``train.py``, as its README starts it.

    Raises: RecipeError: the folder is no checkout of it, or it has no model of this name. ModuleNotFoundError: a
      package that it needs is not installed.
    """
    from accelerate import Accelerator

    work, device, spec = setting.work, setting.device, setting.work.spec
    model_class, create_diffusion = _import_fast_dit(checkout, spec.name)
    batch, is_gpu = setting.batch(), device.type == "cuda"
    model = model_class(input_size=batch.latents.shape[-1], num_classes=spec.num_classes)
    model = model.to(device) if is_gpu else model  # a module of fake tensors cannot be moved, even to its own device
    average = deepcopy(model).requires_grad_(False).eval()
    diffusion = create_diffusion(timestep_respacing="")
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.recipe.optimizer.lr, weight_decay=0)
    precision = "fp16" if is_gpu else "bf16" if setting.as_on_gpu else "no"  # a CPU may have no fp16; as many bytes
    accelerator = Accelerator(mixed_precision=precision, cpu=not is_gpu, device_placement=is_gpu)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    decay = work.recipe.run.ema_decay

    def step() -> None:
        t = torch.randint(0, diffusion.num_timesteps, (len(batch),), device=device)
        loss = diffusion.training_losses(model, batch.latents, t, {"y": batch.labels})["loss"].mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            averages = dict(average.named_parameters())
            for name, parameter in model.named_parameters():
                averages[name].mul_(decay).add_(parameter, alpha=1 - decay)
        loss.item()

    return _with_tf32(step)


def _import_fast_dit(checkout: Path, name: str) -> tuple[Any, Any]:
    """The class of a model, such as "DiT-XL/2", and the function that makes a diffusion."""
    parts = ("models", "diffusion")
    missing = [part for part in parts if not ((checkout / f"{part}.py").is_file() or (checkout / part).is_dir())]
    if missing:
        raise RecipeError(
            f"--fast-dit '{checkout}': it has no {' and no '.join(missing)}. Expected a checkout of "
            "github.com/chuanyangjin/fast-DiT."
        )
    sys.path.insert(0, str(checkout))
    try:
        models, diffusion = (importlib.import_module(part) for part in parts)
    finally:
        sys.path.remove(str(checkout))
    model_class = getattr(models, name.replace("-", "_").replace("/", "_"), None)
    if model_class is None:
        raise RecipeError(f"model.name '{name}': fast-DiT has no such model. Use one of its sizes, such as DiT-XL/2.")
    return model_class, diffusion.create_diffusion


def _with_tf32(step: Step) -> Step:
    """A step with TF32 for what stays float32, as fast-DiT's script sets it; afterwards as before, for our step."""

    def stepped() -> None:
        flags: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
        before = [flag.allow_tf32 for flag in flags]
        for flag in flags:
            flag.allow_tf32 = True
        try:
            step()
        finally:
            for flag, value in zip(flags, before, strict=True):
                flag.allow_tf32 = value

    return stepped


# ----------------------------------------------------------------------------------------- measurements, as JSON values


def measure_beside(
    device: str,
    recipe: str,
    side_px: int,
    settings: list[str],
    rounds: int,
    steps: int,
    fast_dit: str | None = None,
    without: list[str] | None = None,
) -> dict[str, Any]:
    """Images a second of each step in each round.

    Args:
      fast_dit: checkout of fast-DiT, whose loop is then measured instead of that around diffusers' model.
      without: sections of the recipe; our step without each is measured instead of others.
    """
    setting = Setting(workload_at_resolution(load(recipe, settings), side_px), torch.device(device))
    if setting.device.type == "cpu":
        keep_freed_memory()  # as "leandit train" does
    cells = {OURS: our_step(setting)}
    for section in without or []:
        cells[f"without {section}"] = our_step(setting.without(section))
    if fast_dit:
        cells[FAST_DIT] = fast_dit_step(setting, Path(fast_dit))
    elif not without and is_in_diffusers(setting.work.spec):
        cells[DIFFUSERS] = diffusers_step(setting)
    for step in cells.values():
        timed(step, WARM_STEPS, setting.device)
    run, rates = setting.work.recipe.run, {name: list[float]() for name in cells}
    for number, name in alternating_rounds(list(cells), rounds):
        rates[name].append(steps * run.global_batch / timed(cells[name], steps, setting.device))
        log(f"round {number + 1} of {rounds}, {name}: {rates[name][-1]:.2f} images/s")
    return {"images_per_second": rates, "mfu": _mfu(setting, rates), "batch": run.global_batch}


def _mfu(setting: Setting, rates: dict[str, list[float]]) -> dict[str, float]:
    """Model FLOPs utilization of each step; empty where the peak of the device is unknown."""
    work = setting.work
    peak = peak_flops(setting.device, work.recipe.run.precision)
    flops = train_flops(work.spec, latent_size_of(work.largest_bucket, work.store.latent), work.tokens)
    return {name: median(values) * flops / peak for name, values in rates.items()} if peak else {}


def measure_store(
    device: str, recipe: str, side_px: int, settings: list[str], rounds: int, steps: int
) -> dict[str, Any]:
    """The real loop on a store of noise (``leandit bench train``), then our step on one batch in memory."""
    setting = Setting(workload_at_resolution(load(recipe, settings), side_px), torch.device(device))
    with tempfile.TemporaryDirectory(prefix="leandit-benchmark-") as folder, ProgressLine() as progress:
        store = noise_store(setting.work, Path(folder) / "store")
        work = workload_of_stores(setting.work.recipe, store)
        result = measure(work, store, setting.device, rounds=rounds, steps=steps, progress=progress)
    step, batch = our_step(setting), setting.work.recipe.run.global_batch
    timed(step, WARM_STEPS, setting.device)
    synthetic = [steps * batch / timed(step, steps, setting.device) for _ in range(rounds)]
    return result | {"images_per_second": {"store": result["images_per_second"], "synthetic": synthetic}}


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
    result = measure_beside(device, recipe, resolution, overrides, rounds, steps, checkout, without)
    rates, rows = result["images_per_second"], [["step", "images/s", "MFU", "of leandit"]]
    for name, values in rates.items():
        mfu = f"{result['mfu'][name]:.1%}" if result["mfu"] else "unknown"
        rows.append([name, median_and_range(values), mfu, median_and_range(ratios(values, rates[OURS]), "{:.3f}x")])
    print(f"{recipe}, {resolution} px, batch {result['batch']}; {hardware()['cpu']}, torch {torch.__version__}")
    print_table(rows)


if __name__ == "__main__":
    typer.run(main)
