"""The engine of DeepSpeed behind our ``Engine``: ZeRO 1, 2 and 3, with what else the user's ds_config.json asks for.

The config is DeepSpeed's own; what the recipe says as well may stand there as "auto", and must else be the same.
Averages follow the float32 partitions that ZeRO gives each rank, so they are sharded as the optimizer is. Checkpoints
are ours, not DeepSpeed's: whole tensors by name, which every other strategy reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..datasets.errors import RecipeError
from .checkpoint import EMA, MODEL
from .config import TrainRecipe
from .ema import Ema, build_rules
from .models import Denoiser
from .optimizers import build_optimizer
from .precision import autocast_dtype
from .ranks import Ranks
from .recompute import checkpoint_blocks

ADAM_NAMES = ("adam", "adamw")  # of DeepSpeed: their state has our names
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class _Partitions:
    """What ``Ema`` takes for a model: the float32 partitions of this rank."""

    def __init__(self, partitions: list[Tensor]) -> None:
        self.partitions = partitions

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((str(number), partition) for number, partition in enumerate(self.partitions))

    def parameters(self) -> Iterator[Tensor]:
        yield from self.partitions


class DeepSpeedScale:
    """DeepSpeed's own loss scale, as the loop and the checkpoint see it."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def value(self) -> float:
        """The scale."""
        return float(self._scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        """JSON values; a scale that does not move has fewer."""
        return {name: getattr(self._scaler, name) for name in SCALER_FIELDS if hasattr(self._scaler, name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo ``state_dict``; of what another strategy wrote, the scale alone is taken."""
        state = {"cur_scale": state["scale"]} if "scale" in state else state
        for name, value in state.items():
            setattr(self._scaler, name, value)


class DeepSpeedEngine:
    """A model in DeepSpeed's hands.

    Args:
      model: float32, on its device, the same on every rank.
    Raises: RecipeError: the config cannot be read, contradicts the recipe, or asks for what we cannot save.
    """

    def __init__(self, recipe: TrainRecipe, model: Denoiser, ranks: Ranks, device: torch.device) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
        dtype = autocast_dtype(recipe.run.precision, device)
        config = resolve_config(read_config(recipe.parallel.deepspeed_config), recipe, dtype)
        try:
            import deepspeed
            from deepspeed.utils import logger
        except ModuleNotFoundError as error:
            raise RecipeError(
                f"parallel.deepspeed_config: it needs the package '{error.name}', which is not installed. Install "
                "leandit with its extra 'deepspeed', or use parallel.strategy 'fsdp'."
            ) from error
        logger.setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls what torch has renamed
        if "activation_checkpointing" in config:
            checkpoint_blocks(model.blocks, "deepspeed")
        own = None if "optimizer" in config else build_optimizer(recipe.optimizer, model)
        try:
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=own,
                model_parameters=None if own else model.parameters(),  # pyright: ignore[reportArgumentType]
                config=config,
                dist_init_required=False,
            )
        except (AssertionError, TypeError, ValueError) as error:  # its words for a config that it does not like
            raise RecipeError(
                f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed refuses it: {error}"
            ) from error
        if "activation_checkpointing" in config:
            deepspeed.checkpointing.configure(None, deepspeed_config=config)
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
        self.loss_scale = DeepSpeedScale(self._zero.loss_scaler) if dtype == torch.float16 else None
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
        """See ``Engine``; clips as the config says, which ``resolve_config`` has made what the recipe says."""
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        self.ema.update(self._partitions, step)
        norm = self._engine.get_global_grad_norm()
        applied = self._engine.was_step_applied()
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
                inner.state[partition].update(step=torch.tensor(0.0), **zeros)
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


def read_config(path: str) -> dict[str, Any]:
    """Read a ds_config.json.

    Raises: RecipeError: there is none, or it is no JSON object.
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"parallel.deepspeed_config '{path}': cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise RecipeError(f"parallel.deepspeed_config '{path}': needed a JSON object, got {type(config).__name__}.")
    return config


def resolve_config(config: dict[str, Any], recipe: TrainRecipe, dtype: torch.dtype | None) -> dict[str, Any]:
    """The config as DeepSpeed gets it: what is "auto" or missing comes from the recipe, what contradicts it is refused.

    Batches are cut and gradients summed by our loop, so DeepSpeed is told of single microbatches.

    Args:
      dtype: of the autocast, None for float32.
    Raises: RecipeError: naming the key.
    """
    config = json.loads(json.dumps(config))
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage") not in (1, 2, 3):
        raise RecipeError(
            f"ds_config.json: zero_optimization.stage is {zero.get('stage')!r}, needed 1, 2 or 3. Without sharding use "
            "parallel.strategy 'ddp'."
        )
    for part in ("offload_param", "offload_optimizer"):
        if zero.get(part, {}).get("device") == "nvme":
            raise RecipeError(f"ds_config.json: zero_optimization.{part}.device 'nvme': only 'cpu' can be saved.")
    if any(zero.get(part, {}).get("device", "none") != "none" for part in ("offload_param", "offload_optimizer")):
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    name = str(config.get("optimizer", {}).get("type", recipe.optimizer.name)).lower()
    if name not in ADAM_NAMES:
        raise RecipeError(f"optimizer '{name}' with DeepSpeed: needed 'adamw'; others with parallel.strategy 'fsdp'.")
    if "activation_checkpointing" in config and recipe.run.activation_checkpointing != "blocks":
        raise RecipeError(
            "ds_config.json: it has a section activation_checkpointing, run.activation_checkpointing is "
            f"'{recipe.run.activation_checkpointing}'. Use --set run.activation_checkpointing=blocks, or leave it out."
        )
    wanted: dict[str, Any] = {
        "gradient_clipping": recipe.run.grad_clip,
        "fp16.enabled": dtype == torch.float16,
        "train_micro_batch_size_per_gpu": recipe.run.microbatch or recipe.run.global_batch,
        "train_batch_size": recipe.run.global_batch,
        "optimizer.params.lr": recipe.optimizer.lr,
        "optimizer.params.betas": recipe.optimizer.betas[:2],
        "optimizer.params.weight_decay": recipe.optimizer.weight_decay,
    }
    for key, value in wanted.items():
        _settle(config, key, value)
    bf16 = config.get("bf16", {}).get("enabled", False)
    if bf16 == "auto":
        config["bf16"]["enabled"] = dtype == torch.bfloat16
    elif bf16 and dtype != torch.bfloat16:
        raise RecipeError(
            f"ds_config.json: bf16.enabled is true, run.precision is '{recipe.run.precision}'. Use 'auto'."
        )
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        config.pop(key, None)
    return config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def _settle(config: dict[str, Any], key: str, value: Any) -> None:
    """Put a value of the recipe where the config says "auto"; in the section fp16 and for clipping also where it says
    nothing."""
    *sections, leaf = key.split(".")
    for section in sections:
        if section not in config and section != "fp16":
            return
        config = config.setdefault(section, {})
    if config.get(leaf, "auto") == "auto":
        if leaf in config or leaf in ("enabled", "gradient_clipping"):
            config[leaf] = value
    elif config[leaf] != value:
        raise RecipeError(
            f'ds_config.json: {key} is {config[leaf]!r}, by the recipe it is {value!r}. Write "auto" there, or make '
            "them equal."
        )


def _cut(name: str) -> tuple[str, str]:
    """Prefix of an average, and name of the parameter."""
    prefix, slash, name = name.rpartition("/")
    return prefix + slash, name


def _shape(parameter: Tensor) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _needed(tensor: Tensor | None, name: str) -> Tensor:
    assert tensor is not None, f"DeepSpeed gives no state of '{name}'"
    return tensor
