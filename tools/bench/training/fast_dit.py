"""The training loop of fast-DiT, on a checkout of its repository: its model and its diffusion, driven as it does.

Nothing of it is part of leandit: its licence forbids commercial use.
Source: github.com/chuanyangjin/fast-DiT, ``train.py``, as its README starts it (fp16, by accelerate).
"""

from __future__ import annotations

import importlib
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from ....datasets.errors import RecipeError
from ...synthetic.batches import synthetic_batch
from .steps import Step, StepRequest

PARTS = ("models", "diffusion")


def check_checkout(folder: Path) -> None:
    """Raise RecipeError if a folder is no checkout of fast-DiT."""
    absent = [name for name in PARTS if not ((folder / f"{name}.py").is_file() or (folder / name).is_dir())]
    if absent:
        raise RecipeError(
            f"--fast-dit '{folder}': it has no {' and no '.join(absent)}. Needed a checkout of "
            "github.com/chuanyangjin/fast-DiT."
        )


def fast_dit_step(request: StepRequest) -> Step:
    """One step of its loop, without its data: the whole batch at once, its blocks recomputed, fp16 on a GPU.

    Raises: RecipeError: it has no model of this name. ModuleNotFoundError: a package that it needs is not installed.
    """
    from accelerate import Accelerator

    work, device = request.work, request.device
    spec, batch_size = work.spec, work.recipe.run.global_batch
    assert request.fast_dit is not None
    model_class, create_diffusion = _imported(request.fast_dit, spec.name)
    batch = synthetic_batch(work.store, work.largest_bucket, batch_size, 0, device)
    is_gpu = device.type == "cuda"
    model = model_class(input_size=batch.latents.shape[-1], num_classes=spec.num_classes)
    model = model.to(device) if is_gpu else model  # a module of fake tensors cannot be moved, even to its own device
    average = deepcopy(model).requires_grad_(False).eval()
    diffusion = create_diffusion(timestep_respacing="")
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.recipe.optimizer.lr, weight_decay=0)
    precision = "fp16" if is_gpu else "bf16" if request.as_on_gpu else "no"  # a CPU may have no fp16; as many bytes
    accelerator = Accelerator(mixed_precision=precision, cpu=not is_gpu, device_placement=is_gpu)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    decay = work.recipe.run.ema_decay

    @torch.no_grad()
    def update_average() -> None:
        averages = dict(average.named_parameters())
        for name, parameter in model.named_parameters():
            averages[name].mul_(decay).add_(parameter, alpha=1 - decay)

    def step() -> None:
        t = torch.randint(0, diffusion.num_timesteps, (batch_size,), device=device)
        loss = diffusion.training_losses(model, batch.latents, t, {"y": batch.labels})["loss"].mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        update_average()
        loss.item()

    return _with_tf32(step)


def _imported(checkout: Path, name: str) -> tuple[Any, Any]:
    """The class of a model, as "DiT-XL/2", and what makes a diffusion."""
    sys.path.insert(0, str(checkout))
    try:
        models, diffusion = (importlib.import_module(part) for part in PARTS)
    finally:
        sys.path.remove(str(checkout))
    model_class = getattr(models, name.replace("-", "_").replace("/", "_"), None)
    if model_class is None:
        raise RecipeError(f"model.name '{name}': fast-DiT has none of this name. Use one of its sizes, as DiT-XL/2.")
    return model_class, diffusion.create_diffusion


def _with_tf32(step: Step) -> Step:
    """A step with TF32 for what stays float32, as its script sets it; afterwards as before, for our step."""

    def stepped() -> None:
        flags: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
        matmul, cudnn = flags
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = True
        try:
            step()
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    return stepped
