"""DeepSpeed behind our ``Engine``: ZeRO 1, 2 and 3, with the other settings of the user's ds_config.json.

Values of ds_config.json win, the recipe fills in the rest (``deepspeed_config.py``). Averages follow the float32
partitions of each rank, so they are sharded like the optimizer. Checkpoints are ours, not DeepSpeed's: whole tensors by
name, which every other strategy reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ...datasets.errors import RecipeError, RunError
from ..config import TrainRecipe
from ..models.activation_checkpointing import checkpoint_blocks
from ..models.build import Denoiser
from ..models.diffusers.adapters import saved_tensors, trained_parameters
from ..optim.build import build_optimizer, parameter_groups
from ..optim.ema import Ema, build_rules
from ..optim.loss_scale import LossScale, autocast_dtype
from ..weights.checkpoint import EMA, MODEL
from .deepspeed_config import ResolvedConfig, read_config, resolve
from .deepspeed_keys import drop_unknown
from .deepspeed_state import MOMENTS, ZeroState, whole_shape
from .engine import Engine
from .ranks import Ranks
from .strategy import choose_strategy


def apply_ds_config(
    recipe: TrainRecipe, ranks: Ranks, device: torch.device, warn: Callable[[str], None]
) -> TrainRecipe:
    """The recipe with the values of its ds_config.json, if it has one; the first rank warns of the differences.

    Raises: RecipeError: as ``DeepSpeedEngine``.
    """
    if choose_strategy(recipe.parallel, ranks) != "deepspeed":
        return recipe
    resolved = _read(recipe, ranks, device)
    for line in resolved.notes if ranks.is_first else ():
        warn(line)
    return resolved.recipe


def _read(recipe: TrainRecipe, ranks: Ranks, device: torch.device) -> ResolvedConfig:
    """Read the user's config and merge it with the recipe.

    Raises: RecipeError: it cannot be read or resolved; DeepSpeed is not installed, or lacks the precision.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
    # DeepSpeed takes this as the number of its GPU; neither srun nor a single process sets it.
    os.environ["LOCAL_RANK"] = str(ranks.local_rank if device.type == "cpu" else device.index or 0)
    config = read_config(recipe.parallel.deepspeed_config)
    try:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import logger
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"parallel.deepspeed_config: it needs the package '{error.name}', which is not installed. Install "
            "leandit with its extra 'deepspeed', or use parallel.strategy 'fsdp'."
        ) from error
    logger.setLevel(logging.WARNING)
    dropped = list(drop_unknown(config))
    resolved = resolve(config, recipe, ranks.world_size)
    accelerator: Any = get_accelerator()
    if resolved.recipe.run.precision == "fp16" and not accelerator.is_fp16_supported():
        raise RecipeError(
            f"fp16 with DeepSpeed: device '{device}' has no float16. Use a GPU that has it; or set fp16.enabled "
            f"to false in '{recipe.parallel.deepspeed_config}' and run.precision to fp32."
        )
    resolved.notes.extend(dropped)
    dtype = autocast_dtype(resolved.recipe.run.precision, device)
    autocast = resolved.config.get("torch_autocast", {}) | {"enabled": dtype is not None}
    if dtype is not None:
        # By default gradients of linear layers are summed over the ranks in 16 bits, unlike in every other strategy.
        autocast = {"lower_precision_safe_modules": []} | autocast | {"dtype": str(dtype).removeprefix("torch.")}
    resolved.config["torch_autocast"] = autocast
    return resolved


class _LossScale(LossScale):
    """DeepSpeed's loss scaler, set by section fp16 of the config."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
        from deepspeed.runtime.precision_config import DeepSpeedFP16Config

        fp16 = DeepSpeedFP16Config(**section)
        self.scaler: Any = CreateLossScaler(
            torch.float16, fp16.loss_scale, fp16.loss_scale == 0, fp16.dynamic_loss_scale_args()
        )

    def value(self) -> float:
        return float(self.scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"scale": self.value(), "good_steps": 0}
        if self.scaler.dynamic:
            state["good_steps"] = self.scaler.cur_iter - self.scaler.last_overflow_iter - 1
            state["hysteresis"] = self.scaler.cur_hysteresis
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler.dynamic:  # a fixed scale stays
            self.scaler.cur_scale = state["scale"]
            self.scaler.cur_iter, self.scaler.last_overflow_iter = state["good_steps"], -1
            self.scaler.cur_hysteresis = state.get("hysteresis", self.scaler.delayed_shift)


class DeepSpeedEngine(Engine):
    """A model run by DeepSpeed.

    Args:
      model: float32, on its device, the same on every rank.
    Raises: RecipeError: the config cannot be read, contradicts the recipe, or asks for state that cannot be saved.
    """

    def __init__(self, recipe: TrainRecipe, model: Denoiser, ranks: Ranks, device: torch.device) -> None:
        resolved = _read(recipe, ranks, device)
        config, recipe = resolved.config, resolved.recipe
        import deepspeed

        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls renamed functions
        checkpoint_blocks(model.blocks, recipe.run.activation_checkpointing, to_cpu=resolved.cpu_checkpointing)
        if not dist.is_initialized():  # DeepSpeed needs a process group even for one rank
            dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1)
        optimizer = None if "optimizer" in config else build_optimizer(recipe.optimizer, model)
        groups: Any = None if optimizer else parameter_groups(recipe.optimizer, model)
        try:
            scale = _LossScale(resolved.loss_scaler) if recipe.run.precision == "fp16" else None
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, model_parameters=groups, config=config, dist_init_required=False
            )
        except (AssertionError, TypeError, ValueError) as error:  # what DeepSpeed raises for an invalid config
            raise RecipeError(
                f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed rejects it: {error}"
            ) from error
        self._engine: Any = engine
        self.allows_trial, self.is_trial = False, False
        self.model, self.forward = model, self._engine
        self._world_size, self._device = ranks.world_size, device
        self._zero: Any = self._engine.optimizer
        try:
            self._state = ZeroState(self._zero, config["zero_optimization"]["stage"], model, ranks, device)
        except AttributeError as error:
            raise RecipeError(
                f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed uses a "
                f"{type(self._zero).__name__}, whose float32 weights cannot be saved. Use ZeRO stage 2 or 3."
            ) from error
        self._zero.check_grad_overflow = True  # in every precision: skip an update with NaN
        # Under autocast DeepSpeed would use torch's scaler, and clip gradients that are still scaled.
        self._zero.torch_autocast_gradscaler = None
        self.loss_scale = scale
        if scale:
            self._zero.loss_scaler, self._zero.dynamic_loss_scale = scale.scaler, scale.scaler.dynamic
        self.scheduled_rate: float | None = None
        self.ema = Ema(self._state, build_rules(recipe))

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._world_size)

    def update(self, step: int, *, learning_rate: float, grad_clip: float) -> tuple[Tensor, Tensor]:
        """Clip by the config, whose value ``resolve`` made that of the recipe.

        Raises: RunError: the loss scale is at its minimum, and gradients still overflow.
        """
        if (scheduler := self._engine.lr_scheduler) is None:
            for group in self._zero.param_groups:
                group["lr"] = learning_rate
        else:
            if step > 1:  # DeepSpeed counts from 0, and starts after the first update
                scheduler.step(step - 2)
            self.scheduled_rate = float(self._zero.param_groups[0]["lr"])
        try:
            self._engine.step()
        except Exception as error:  # DeepSpeed raises a plain Exception
            if "loss scale already at minimum" not in str(error):
                raise
            raise RunError(
                f"step {step}: DeepSpeed's loss scale has shrunk to fp16.min_loss_scale, and gradients still overflow. "
                "Train with bf16, or a lower learning rate."
            ) from error
        norm = self._engine.get_global_grad_norm()
        applied = self._engine.was_step_applied()
        if applied:
            self.ema.update(self._state, step)
        norm = torch.as_tensor(float("nan") if norm is None else norm, dtype=torch.float32, device=self._device)
        return norm.reshape(()), torch.tensor(float(not applied), device=self._device)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model's own weights come back from their float32 partitions."""
        with self._state.preserved():
            for partition, weight in zip(self._state.parameters(), self.ema.weights.values(), strict=True):
                partition.copy_(weight)
            self._state.show_weights()
        try:
            yield
        finally:
            self._state.show_weights()

    def tensors(self, group: str) -> Iterator[tuple[str, Tensor]]:
        if group == MODEL:
            names = {name for name, _ in self.model.named_parameters()}
            yield from ((name, buffer) for name, buffer in saved_tensors(self.model).items() if name not in names)
            yield from self._state.weights()
        elif group == EMA:
            for rule, average in zip(self.ema.rules, self.ema.averages, strict=True):
                with self._state.preserved():
                    for partition, weight in zip(self._state.parameters(), average.values(), strict=True):
                        partition.copy_(weight)
                    yield from ((f"{rule.prefix}{name}", weight) for name, weight in self._state.weights())
        else:
            yield from self._state.optimizer_tensors()

    def expected(self, group: str, *, in_codes: bool = False) -> dict[str, Tensor]:
        """Moments are never 8-bit codes."""
        shapes = {name: whole_shape(parameter) for name, parameter in trained_parameters(self.model).items()}
        weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        if group == MODEL:
            buffers = saved_tensors(self.model).items()
            return weights | {n: torch.empty_like(t, device="meta") for n, t in buffers if n not in shapes}
        if group == EMA:
            return {f"{rule.prefix}{name}": weight for rule in self.ema.rules for name, weight in weights.items()}
        moments = {f"{name}/{field}": weight for name, weight in weights.items() for field in MOMENTS}
        return moments | {f"{name}/step": torch.empty((), device="meta") for name in weights}

    def load(self, group: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        parameters = trained_parameters(self.model)
        if group == EMA:
            self._load_averages(tensors, parameters)
        elif group == MODEL:
            for name, tensor in tensors:
                with torch.no_grad():
                    if name in parameters:
                        self._state.set_weight(parameters[name], tensor)
                    else:
                        self.model.state_dict()[name].copy_(tensor)
        else:
            self._state.initialize_optimizer()
            for name, tensor in tensors:
                name, field = name.rsplit("/", 1)
                self._state.set_optimizer_tensor(parameters[name], field, tensor)

    def _load_averages(self, tensors: Iterable[tuple[str, Tensor]], parameters: Mapping[str, Tensor]) -> None:
        averages = {rule.prefix: average for rule, average in zip(self.ema.rules, self.ema.averages, strict=True)}
        for prefix, of_rule in groupby(tensors, key=lambda item: _split_prefix(item[0])[0]):
            with self._state.preserved():
                for name, tensor in of_rule:
                    self._state.set_master(parameters[_split_prefix(name)[1]], tensor)
                for weight, partition in zip(averages[prefix].values(), self._state.parameters(), strict=True):
                    weight.copy_(partition)


def _split_prefix(name: str) -> tuple[str, str]:
    """Prefix of an average, and name of the parameter."""
    prefix, slash, name = name.rpartition("/")
    return prefix + slash, name
