"""Stage 2 as a story: open the store, build the model, resume or begin, then step after step.

No encoder is imported here, nor by anything that this imports. All that is random is keyed by (seed, step) or by
(seed, epoch, record), so a run that was stopped goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from ..datasets.batches import keyed_hash
from ..datasets.errors import RecipeError, RunError
from ..datasets.files import canonical_json, read_json, sweep_strays, write_atomic
from ..datasets.loader import Batch, make_loader
from ..datasets.recipe import to_toml
from ..datasets.store import LatentStore
from . import checkpoint
from .config import TrainRecipe
from .ema import Ema
from .meters import Meters, StepReport
from .models import Conditioner, Denoiser, ModelSpec, build_model, check_sizes, model_spec
from .objectives import draw_times, loss_per_image
from .optimizers import build_optimizer, learning_rate, load_optimizer_tensors, optimizer_tensors

RUN = "run.json"
RECIPE = "recipe.toml"
# Keys of the recipe that may differ when a run goes on: they change how far and how often, not what a step computes.
FREE_ON_RESUME = {
    "run.steps",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.log_every",
    "run.allow_incomplete",
    "run.compile",
    "run.activation_checkpointing",
}


class StopRequest:
    """Set by a signal handler; the loop looks at it after each step."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask the loop to save and stop."""
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()


@dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Args:
      step: that the run has reached.
      first_step: that this call made, or None where the run was finished already.
      finished: all steps of the recipe are done.
      losses: of the reports of this call, first and last, or None.
    """

    step: int
    first_step: int | None
    finished: bool
    losses: tuple[float, float] | None
    images_per_second: float


@dataclass
class TrainState:
    """Everything that a step reads or changes."""

    recipe: TrainRecipe
    spec: ModelSpec
    model: Denoiser
    ema: Ema
    optimizer: torch.optim.AdamW
    loader: StatefulDataLoader
    conditioner: Conditioner
    device: torch.device
    autocast_dtype: torch.dtype | None
    step: int = 0
    num_images: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # of the snapshots: what is needed to sample


def train(
    recipe: TrainRecipe,
    *,
    store_path: Path,
    run: Path,
    device: torch.device,
    report: Callable[[StepReport], None],
    stop: StopRequest,
) -> Outcome:
    """Train a model on a store; the same call again goes on from the newest checkpoint.

    Args:
      report: called with the figures of every ``run.log_every`` steps.
      stop: set it to save a checkpoint after the current step and return.
    Raises: LeanditError: before the first step, where recipe, store and run do not fit each other.
    """
    # Open the store, build what trains.
    state = prepare(recipe, store_path, device)
    begin_or_resume(state, run, store_path)
    first_step, losses, fastest = state.step + 1, [], 0.0
    if state.step >= recipe.run.steps:
        return Outcome(state.step, None, True, None, 0.0)

    meters = Meters(run, step=state.step)
    window = Window(device)
    batches = endless(state.loader)
    try:
        while state.step < recipe.run.steps and not stop:
            # One batch of one bucket.
            with window.waiting():
                batch = next(batches).to(device)

            # Forward, backward, update, average.
            loss, grad_norm = train_step(state, batch)
            window.add(loss, grad_norm, len(batch))

            # Tell; before a checkpoint always, since a loss that is not finite must not be saved.
            saving = bool(stop) or state.step % recipe.run.checkpoint_every == 0 or state.step == recipe.run.steps
            if saving or state.step % recipe.run.log_every == 0:
                figures = window.report(state, batch.epoch)
                meters.write(figures)
                report(figures)
                losses.append(figures.loss)
                fastest = max(fastest, figures.images_per_second)

            # Save.
            if saving:
                save(state, run)
    finally:
        meters.close()
    ends = (losses[0], losses[-1]) if losses else None
    return Outcome(state.step, first_step, state.step >= recipe.run.steps, ends, fastest)


def prepare(recipe: TrainRecipe, store_path: Path, device: torch.device) -> TrainState:
    """Open the store and build model, averages, optimizer and loader.

    Raises: RecipeError, StoreError, RunError: something does not fit; nothing was written.
    """
    check_recipe(recipe)
    store = LatentStore(store_path, allow_incomplete=recipe.run.allow_incomplete)
    spec = model_spec(recipe, store.spec, str(store_path))
    check_sizes(spec, store.spec.latent, list(store.buckets))
    loader = make_loader(store, global_batch=recipe.run.global_batch, seed=recipe.run.seed, pin=device.type == "cuda")
    model = build_model(spec, seed=recipe.run.seed).to(device)
    optimizer = build_optimizer(recipe.optimizer, model)
    ema = Ema(model, recipe.run.ema_decay)
    if recipe.run.activation_checkpointing:
        model.checkpoint_activations()
    if recipe.run.compile and device.type == "cuda":
        for block in model.blocks:
            block.compile()
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = recipe.run.precision != "fp32"
    null_caption = torch.from_numpy(store.null_caption).to(device).float() if spec.takes_text else None
    vae = store.spec.vae
    return TrainState(
        recipe=recipe,
        spec=spec,
        model=model,
        ema=ema,
        optimizer=optimizer,
        loader=loader,
        conditioner=Conditioner(spec, null_caption),
        device=device,
        autocast_dtype=autocast_dtype(recipe.run.precision, device),
        extra={
            "spec": spec.model_dump(),
            "objective": recipe.objective.model_dump(),
            "latent": store.spec.latent.model_dump(),
            "text": store.spec.text and store.spec.text.model_dump(),
            "vae": {"model": store.spec.recipe["vae"], "weights_sha256": vae.weights_sha256},
            "text_encoder": store.spec.text_encoder
            and {
                "model": store.spec.recipe["text"],
                "weights_sha256": store.spec.text_encoder.weights_sha256,
            },
            "classes": store.spec.classes,
            "buckets": store.buckets,
            "root_hash": store.root_hash,
        },
    )


def check_recipe(recipe: TrainRecipe) -> None:
    """Refuse what this release does not have.

    Raises: RecipeError.
    """
    refused = {
        "model.init_from": recipe.model.init_from,
        "parallel.deepspeed_config": recipe.parallel.deepspeed_config,
        "run.precision": "fp16" if recipe.run.precision == "fp16" else "",
        "parallel.strategy": recipe.parallel.strategy if recipe.parallel.strategy not in ("auto", "single") else "",
    }
    for key, value in refused.items():
        if value:
            raise RecipeError(f"{key} '{value}': not in this release. It trains from scratch, in one process.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: this release trains in one process.")


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Dtype of autocast, or None: bf16 where asked for and the GPU has it. A CPU computes bf16 ten times slower."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if precision == "bf16" and has_bf16 else None


def endless(loader: StatefulDataLoader) -> Iterator[Batch]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def train_step(state: TrainState, batch: Batch) -> tuple[Tensor, Tensor]:
    """One update: accumulate the gradients of the microbatches, clip, step, average.

    Returns: mean loss and gradient norm, scalars on the device (read later, so that the step does not wait for them).
    """
    recipe = state.recipe
    step, size = state.step + 1, len(batch)
    generator = torch.Generator(state.device).manual_seed(keyed_hash(recipe.run.seed, step) % 2**63)
    noise = torch.randn(batch.latents.shape, generator=generator, device=state.device)
    times = draw_times(recipe.objective, size, generator)
    dropped = torch.rand(size, generator=generator, device=state.device) < recipe.conditioning.drop
    conditioning = state.conditioner(batch.labels, batch.captions, batch.caption_lengths)
    conditioning = state.conditioner.drop(conditioning, dropped)

    state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=state.device)
    microbatch = recipe.run.microbatch or size
    for start in range(0, size, microbatch):
        part = slice(start, start + microbatch)
        inputs = type(conditioning)(*(None if tensor is None else tensor[part] for tensor in conditioning))
        loss = _microbatch_loss(state, batch.latents[part], noise[part], times[part], inputs) / size
        loss.backward()
        total += loss.detach()

    limit = recipe.run.grad_clip or float("inf")
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit, foreach=True)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(recipe.optimizer.lr, recipe.schedule, step, recipe.run.steps)
    state.optimizer.step()
    state.ema.update(state.model)
    state.step, state.num_images = step, state.num_images + size
    return total, grad_norm


def _microbatch_loss(state: TrainState, x: Tensor, noise: Tensor, times: Tensor, conditioning: Any) -> Tensor:
    """Summed loss of a microbatch."""

    def predict(noisy: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(state.device.type, state.autocast_dtype, enabled=state.autocast_dtype is not None):
            return state.model(noisy, t, conditioning)

    return loss_per_image(state.recipe.objective, predict, x, noise, times).sum()


class Window:
    """Figures since the last report; the device is waited for only when they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._start, self._wait, self._images = time.perf_counter(), 0.0, 0
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        start = time.perf_counter()
        yield
        self._wait += time.perf_counter() - start

    def add(self, loss: Tensor, grad_norm: Tensor, num_images: int) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._norms.append(grad_norm)
        self._images += num_images

    def report(self, state: TrainState, epoch: int) -> StepReport:
        """Read the figures and begin anew.

        Raises: RunError: the loss is not finite.
        """
        loss, norm = torch.stack(self._losses).mean().item(), torch.stack(self._norms).mean().item()
        seconds = time.perf_counter() - self._start
        figures = StepReport(
            step=state.step,
            num_images=state.num_images,
            epoch=epoch,
            loss=loss,
            grad_norm=norm,
            learning_rate=state.optimizer.param_groups[0]["lr"],
            seconds_per_step=seconds / len(self._losses),
            images_per_second=self._images / seconds,
            data_wait_share=self._wait / seconds,
        )
        self._reset()
        if loss != loss or loss in (float("inf"), float("-inf")):
            raise RunError(
                f"step {state.step}: the loss is {loss}. Nothing of the last steps was saved; "
                "lower optimizer.lr or set run.grad_clip, then run the same command again."
            )
        return figures


def begin_or_resume(state: TrainState, run: Path, store_path: Path) -> None:
    """Load the newest checkpoint of the run, or write the head of a new one.

    Raises: RunError: the run was begun with another model, store or recipe, or the folder holds something else.
    """
    head = {
        "store": os.path.relpath(store_path, run),
        "root_hash": state.extra["root_hash"],
        "spec": state.extra["spec"],
        "recipe": state.recipe.model_dump(),
    }
    if (run / RUN).is_file():
        check_head(run, read_json(run / RUN), head)
    elif run.exists() and any(run.iterdir()):
        raise RunError(f"run '{run}': the folder is not empty and no run of leandit. Give another --run.")
    run.mkdir(parents=True, exist_ok=True)
    sweep_strays(run)
    write_atomic(run / RUN, canonical_json(head))
    write_atomic(run / RECIPE, to_toml(state.recipe).encode())
    if found := checkpoint.find(checkpoint.CHECKPOINT, run):
        restore(state, checkpoint.read(found[-1]))


def check_head(run: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on with a run that computes something else, naming the fields.

    Raises: RunError.
    """
    there, here = _flat(found), _flat(wanted)
    differing = [
        key
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key) and key != "store" and key.removeprefix("recipe.") not in FREE_ON_RESUME
    ]
    if found["recipe"]["schedule"]["kind"] == "cosine" and there["recipe.run.steps"] != here["recipe.run.steps"]:
        differing.append("recipe.run.steps")  # the cosine ends at the last step
    if differing:
        fields = "; ".join(f"{key} was {there.get(key)!r}, is {here.get(key)!r}" for key in differing[:4])
        raise RunError(
            f"run '{run}': begun with other settings: {fields}. "
            "Give another --run, or go on with the settings in its recipe.toml."
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: _plain(value)}
    return flat


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def save(state: TrainState, run: Path) -> None:
    """Write a checkpoint and a snapshot of the current step."""
    common = {"spec": state.extra["spec"]}
    averaged = {"model": {**_buffers(state), **state.ema.state_dict()}}
    if state.conditioner.null_caption is not None:
        averaged["null_caption"] = {"embedding": state.conditioner.null_caption}
    checkpoint.save(checkpoint.SNAPSHOT, run, state.step, averaged, state.extra)
    groups = {
        "model": state.model.state_dict(),
        "ema": state.ema.state_dict(),
        "optimizer": optimizer_tensors(state.optimizer, state.model),
    }
    progress = {"num_images": state.num_images, "loader": state.loader.state_dict()}
    checkpoint.save(checkpoint.CHECKPOINT, run, state.step, groups, common | progress)
    checkpoint.prune(run, state.recipe.run.keep_checkpoints)


def _buffers(state: TrainState) -> dict[str, Tensor]:
    saved = state.model.state_dict()
    return {name: saved[name] for name, _ in state.model.named_buffers() if name in saved}


def restore(state: TrainState, saved: checkpoint.Saved) -> None:
    """Take all state from a checkpoint.

    Raises: RunError: it is of another model.
    """
    if saved.state.get("spec") != state.extra["spec"]:
        raise RunError(
            f"checkpoint '{saved.path}': of model {saved.state.get('spec')}, this run has {state.extra['spec']}. "
            "Give another --run."
        )
    state.model.load_state_dict(saved.tensors("model"))
    state.ema.load_state_dict(saved.tensors("ema"))
    load_optimizer_tensors(state.optimizer, state.model, saved.tensors("optimizer"))
    state.loader.load_state_dict(saved.state["loader"])
    state.step, state.num_images = saved.state["step"], saved.state["num_images"]
