"""The engine of DeepSpeed behind our ``Engine``: ZeRO 1, 2 and 3, with what else the user's ds_config.json asks for.

The config is DeepSpeed's own: what it says holds, what it leaves open comes from the recipe (``deepspeed_config.py``).
Averages follow the float32 partitions that ZeRO gives each rank, so they are sharded as the optimizer is. Checkpoints
are ours, not DeepSpeed's: whole tensors by name, which every other strategy reads.
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
from ..optim.build import build_optimizer, parameter_groups
from ..optim.ema import Ema, build_rules
from ..optim.loss_scale import autocast_dtype
from ..weights.checkpoint import EMA, MODEL
from .deepspeed_config import ResolvedConfig, read_config, resolve
from .deepspeed_keys import drop_unknown
from .ranks import Ranks
from .strategy import choose_strategy

MOMENTS = ("exp_avg", "exp_avg_sq")


def apply_ds_config(
    recipe: TrainRecipe, ranks: Ranks, device: torch.device, warn: Callable[[str], None]
) -> TrainRecipe:
    """The recipe with the values of its ds_config.json, where it has one; the first rank says what differs.

    Raises: RecipeError: as ``DeepSpeedEngine``.
    """
    if choose_strategy(recipe.parallel, ranks) != "deepspeed":
        return recipe
    resolved = _read(recipe, ranks, device)
    for line in resolved.notes if ranks.is_first else ():
        warn(line)
    return resolved.recipe


def _read(recipe: TrainRecipe, ranks: Ranks, device: torch.device) -> ResolvedConfig:
    """Read the user's config and put it together with the recipe.

    Raises: RecipeError: it cannot be read or resolved, or DeepSpeed is not installed, or has no such precision here.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
    # It takes this for the number of its GPU; neither srun nor a single process sets it.
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
            f"fp16 with DeepSpeed: it has no float16 on device '{device}'. Use a GPU that has it; or set fp16.enabled "
            f"to false in '{recipe.parallel.deepspeed_config}' and run.precision to fp32."
        )
    resolved.notes.extend(dropped)
    dtype = autocast_dtype(resolved.recipe.run.precision, device)
    autocast = resolved.config.get("torch_autocast", {}) | {"enabled": dtype is not None}
    if dtype is not None:
        # Else gradients of linear layers are summed over the ranks in 16 bits, which no other strategy does.
        autocast = {"lower_precision_safe_modules": []} | autocast | {"dtype": str(dtype).removeprefix("torch.")}
    resolved.config["torch_autocast"] = autocast
    return resolved


class _LossScale:
    """DeepSpeed's loss scaler, as the section fp16 of the config sets it."""

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
        if self.scaler.dynamic:  # a scale that the user has fixed stays
            self.scaler.cur_scale = state["scale"]
            self.scaler.cur_iter, self.scaler.last_overflow_iter = state["good_steps"], -1
            self.scaler.cur_hysteresis = state.get("hysteresis", self.scaler.delayed_shift)


class _Partitions:
    """What ``Ema`` takes for a model: the float32 partitions of this rank."""

    def __init__(self, partitions: list[Tensor]) -> None:
        self.partitions = partitions

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((str(number), partition) for number, partition in enumerate(self.partitions))

    def parameters(self) -> Iterator[Tensor]:
        yield from self.partitions


class DeepSpeedEngine:
    """A model in DeepSpeed's hands.

    Args:
      model: float32, on its device, the same on every rank.
    Raises: RecipeError: the config cannot be read, contradicts the recipe, or asks for what we cannot save.
    """

    def __init__(self, recipe: TrainRecipe, model: Denoiser, ranks: Ranks, device: torch.device) -> None:
        resolved = _read(recipe, ranks, device)
        config, recipe = resolved.config, resolved.recipe
        import deepspeed

        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls what torch has renamed
        checkpoint_blocks(model.blocks, recipe.run.activation_checkpointing, to_cpu=resolved.cpu_checkpointing)
        if not dist.is_initialized():  # one rank: DeepSpeed wants to be connected all the same
            dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1)
        own = None if "optimizer" in config else build_optimizer(recipe.optimizer, model)
        groups: Any = None if own else parameter_groups(recipe.optimizer, model)
        try:
            scale = _LossScale(resolved.loss_scaler) if recipe.run.precision == "fp16" else None
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=own, model_parameters=groups, config=config, dist_init_required=False
            )
        except (AssertionError, TypeError, ValueError) as error:  # its words for a config that it does not like
            raise RecipeError(
                f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed refuses it: {error}"
            ) from error
        self._engine: Any = engine
        self.model, self.forward = model, self._engine
        self._rank, self._world_size, self._device = ranks.rank, ranks.world_size, device
        self._stage = config["zero_optimization"]["stage"]
        self._zero: Any = self._engine.optimizer
        name = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        if not hasattr(self._zero, name):
            raise RecipeError(
                f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed makes a "
                f"{type(self._zero).__name__} of it, whose float32 weights cannot be saved. Use ZeRO stage 2 or 3."
            )
        self._zero.check_grad_overflow = True  # in every precision: an update with NaN is left out
        # Its scaler is for float16 weights; under autocast it has torch's, and clips gradients that are still scaled.
        self._zero.torch_autocast_gradscaler = None
        self.loss_scale = scale
        if scale:
            self._zero.loss_scaler, self._zero.dynamic_loss_scale = scale.scaler, scale.scaler.dynamic
        self.scheduled_rate: float | None = None
        self._masters = list(getattr(self._zero, name))  # float32, flat: this rank's part of all parameters
        self._partitions = _Partitions([partition.detach() for partition in self._masters])
        self.ema = Ema(self._partitions, build_rules(recipe))

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """See ``Engine``."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """See ``Engine``."""
        self._engine.backward(loss * self._world_size)

    def update(self, step: int, *, learning_rate: float, grad_clip: float) -> tuple[Tensor, Tensor]:
        """See ``Engine``; clips as the config says, which ``resolve`` has made what the recipe says.

        Raises: RunError: the loss scale is at its least, and gradients still overflow.
        """
        if (scheduler := self._engine.lr_scheduler) is None:
            for group in self._zero.param_groups:
                group["lr"] = learning_rate
        else:
            if step > 1:  # it counts from 0, and begins after the first update: a function of the step alone
                scheduler.step(step - 2)
            self.scheduled_rate = float(self._zero.param_groups[0]["lr"])
        try:
            self._engine.step()
        except Exception as error:  # DeepSpeed has no narrower one for this
            if "loss scale already at minimum" not in str(error):
                raise
            raise RunError(
                f"step {step}: DeepSpeed's loss scale has shrunk to fp16.min_loss_scale, and gradients still overflow. "
                "Train with bf16, or a lower learning rate."
            ) from error
        norm = self._engine.get_global_grad_norm()
        applied = self._engine.was_step_applied()
        if applied:
            self.ema.update(self._partitions, step)
        norm = torch.as_tensor(float("nan") if norm is None else norm, dtype=torch.float32, device=self._device)
        return norm.reshape(()), torch.tensor(float(not applied), device=self._device)

    def tensors(self, group: str) -> Iterator[tuple[str, Tensor]]:
        """See ``Engine``."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameters = dict(self.model.named_parameters())
        if group == MODEL:
            yield from ((name, buffer) for name, buffer in self.model.state_dict().items() if name not in parameters)
        if group in (MODEL, EMA):
            for number in range(len(self.ema.rules) if group == EMA else 1):
                prefix = self.ema.rules[number].prefix if group == EMA else ""
                with self._average_in_place(number) if group == EMA else contextlib.nullcontext():
                    for name, parameter in parameters.items():
                        weight = _needed(safe_get_full_fp32_param(parameter), name)
                        yield f"{prefix}{name}", weight.view(_shape(parameter))
            return
        if not self._zero.optimizer.state:  # all updates up to now were skipped
            self._begin_optimizer()
        for name, parameter in parameters.items():
            for field in MOMENTS:
                tensor = _needed(safe_get_full_optimizer_state(parameter, field), name)
                yield f"{name}/{field}", tensor.view(_shape(parameter))
            yield f"{name}/step", torch.tensor(float(self._step))

    def expected(self, group: str, *, in_codes: bool = False) -> dict[str, Tensor]:
        """See ``Engine``; moments are numbers."""
        shapes = {name: _shape(parameter) for name, parameter in self.model.named_parameters()}
        weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        if group == MODEL:
            buffers = self.model.state_dict().items()
            return weights | {n: torch.empty_like(t, device="meta") for n, t in buffers if n not in shapes}
        if group == EMA:
            return {f"{rule.prefix}{name}": weight for rule in self.ema.rules for name, weight in weights.items()}
        moments = {f"{name}/{field}": weight for name, weight in weights.items() for field in MOMENTS}
        return moments | {f"{name}/step": torch.empty((), device="meta") for name in weights}

    def load(self, group: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Engine``."""
        parameters = dict(self.model.named_parameters())
        if group == EMA:
            averages = {rule.prefix: average for rule, average in zip(self.ema.rules, self.ema.averages, strict=True)}
            for prefix, of_rule in groupby(tensors, key=lambda item: _cut(item[0])[0]):
                with self._kept():
                    for name, tensor in of_rule:
                        self._set_master(parameters[_cut(name)[1]], tensor)
                    for weight, partition in zip(averages[prefix].values(), self._partitions.parameters(), strict=True):
                        weight.copy_(partition)
            return
        for name, tensor in tensors:
            if group == MODEL:
                self._set_weight(name, tensor, parameters)
                continue
            self._begin_optimizer()
            name, field = name.rsplit("/", 1)
            if field == "step":
                self._step = tensor.item()
            else:
                self._set_state(parameters[name], tensor, field)

    def _set_weight(self, name: str, tensor: Tensor, parameters: Mapping[str, Tensor]) -> None:
        import deepspeed

        with torch.no_grad():
            if name not in parameters:
                self.model.state_dict()[name].copy_(tensor)
                return
            self._set_master(parameters[name], tensor)
            gathered = [parameters[name]] if self._stage == 3 else []
            with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0 if gathered else None):
                parameters[name].data.copy_(tensor)

    def _set_master(self, parameter: Tensor, tensor: Tensor) -> None:
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

        if self._stage < 3:
            safe_set_full_fp32_param(parameter, tensor.to(self._device))
        else:
            part = self._part(tensor, _needed(safe_get_local_fp32_param(parameter), "a parameter"))
            safe_set_local_fp32_param(parameter, part)

    def _set_state(self, parameter: Tensor, tensor: Tensor, field: str) -> None:
        from deepspeed.utils import (
            safe_get_local_optimizer_state,
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, tensor.to(self._device), field)
        else:
            part = self._part(tensor, _needed(safe_get_local_optimizer_state(parameter, field), field))
            safe_set_local_optimizer_state(parameter, part, field)

    def _part(self, tensor: Tensor, local: Tensor) -> Tensor:
        """What of a whole tensor this rank has with ZeRO-3; DeepSpeed's own cut fails where ranks do not divide it."""
        flat = tensor.flatten().to(local.device)
        padded = torch.nn.functional.pad(flat, (0, local.numel() * self._world_size - flat.numel()))
        return padded.narrow(0, local.numel() * self._rank, local.numel()).view_as(local)

    def _begin_optimizer(self) -> None:
        """Make the optimizer's state as its first step would, so that there is something to fill."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        inner = self._zero.optimizer
        for partition in self._masters:
            if not inner.state[partition]:
                zeros = {field: torch.zeros_like(partition) for field in MOMENTS}
                fused = any(group.get("fused") for group in inner.param_groups)  # it reads the step on the device
                is_torchs = type(inner).__module__.startswith("torch.")  # DeepSpeed's own count in Python
                step = torch.zeros((), device=partition.device if fused else "cpu") if is_torchs else 0
                inner.state[partition].update(step=step, **zeros)
        if self._stage < 3:
            for group, partition in zip(self._zero.bit16_groups, self._masters, strict=True):
                lazy_init_hp_params_optimizer_state(group, partition, inner.state)

    @contextlib.contextmanager
    def _average_in_place(self, number: int) -> Iterator[None]:
        """The float32 partitions hold an average meanwhile."""
        with self._kept():
            pairs = zip(self._partitions.parameters(), self.ema.averages[number].values(), strict=True)
            for partition, average in pairs:
                partition.copy_(average)
            yield

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """The float32 partitions are afterwards as they were."""
        partitions = list(self._partitions.parameters())
        kept = [partition.clone() for partition in partitions]
        try:
            yield
        finally:
            for partition, was in zip(partitions, kept, strict=True):
                partition.copy_(was)

    @property
    def _step(self) -> float:
        """Updates that the optimizer has made."""
        inner = self._zero.optimizer
        for state in inner.state.values():
            if "step" in state:
                return float(state["step"])
        return float(inner.param_groups[0].get("step", 0))

    @_step.setter
    def _step(self, value: float) -> None:
        inner = self._zero.optimizer
        for state in inner.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(value)
            elif "step" in state:
                state["step"] = int(value)
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = int(value)


def _cut(name: str) -> tuple[str, str]:
    """Prefix of an average, and name of the parameter."""
    prefix, slash, name = name.rpartition("/")
    return prefix + slash, name


def _shape(parameter: Tensor) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _needed(tensor: Tensor | None, name: str) -> Tensor:
    assert tensor is not None, f"DeepSpeed gives no state of '{name}'"
    return tensor
