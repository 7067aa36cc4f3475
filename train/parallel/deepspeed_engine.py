"""DeepSpeed as an ``Engine``: ZeRO 1, 2 and 3, with the other settings of the user's ds_config.json.

Averages follow the float32 partitions of each rank, so they are sharded like the optimizer. Checkpoints are ours, not
DeepSpeed's: whole tensors by name, which every other strategy reads. The fragments of a parameter in the partitions are
addressed directly, because DeepSpeed's functions know the weights and its optimizer's state alone, not the averages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ...datasets.errors import RecipeError, RunError
from ..config import TrainRecipe
from ..models.build import Denoiser
from ..optim.build import build_optimizer, parameter_groups
from ..optim.ema import Ema, build_rules
from ..optim.loss_scale import LossScale, autocast_dtype
from ..optim.state import State, load_whole, model_state, whole
from ..weights.checkpoint import EMA, MODEL, OPTIMIZER
from .deepspeed_config import AUTO, config_for_deepspeed, drop_unknown, merge, read_config
from .engine import Engine
from .ranks import Ranks
from .strategy import choose_strategy

MOMENTS = ("exp_avg", "exp_avg_sq")


def apply_ds_config(
    recipe: TrainRecipe, ranks: Ranks, device: torch.device, warn: Callable[[str], None]
) -> TrainRecipe:
    """The recipe with the values of its ds_config.json, if it has one; the first rank warns of the differences.

    Raises: RecipeError: it cannot be read or merged; DeepSpeed is not installed, or lacks the precision.
    """
    if choose_strategy(recipe.parallel, ranks) != "deepspeed":
        return recipe
    _import_deepspeed(ranks, device)
    config = read_config(recipe.parallel.deepspeed_config)
    ignored = list(drop_unknown(config))
    recipe, notes = merge(config, recipe, ranks.world_size)
    for line in [*notes, *ignored] if ranks.is_first else ():
        warn(line)
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    if recipe.run.precision == "fp16" and not accelerator.is_fp16_supported():
        raise RecipeError(
            f"fp16 with DeepSpeed: device '{device}' has no float16. Use a GPU that has it; or set fp16.enabled "
            f"to false in '{recipe.parallel.deepspeed_config}' and run.precision to fp32."
        )
    return recipe


def _import_deepspeed(ranks: Ranks, device: torch.device) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
    # DeepSpeed takes this as the number of its GPU; neither srun nor a single process sets it.
    os.environ["LOCAL_RANK"] = str(ranks.local_rank if device.type == "cpu" else device.index or 0)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls renamed functions
    try:
        from deepspeed.utils import logger
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"parallel.deepspeed_config: it needs the package '{error.name}', which is not installed. Install "
            "leandit with its extra 'deepspeed', or use parallel.strategy 'fsdp'."
        ) from error
    logger.setLevel(logging.WARNING)


class DeepSpeedEngine(Engine):
    """A model run by DeepSpeed.

    Args:
      recipe: with the values of its ds_config.json (``apply_ds_config``).
      model: float32, on its device, the same on every rank.
    Raises: RecipeError: DeepSpeed rejects the config, or keeps no float32 weights with it.
    """

    def __init__(self, recipe: TrainRecipe, model: Denoiser, ranks: Ranks, device: torch.device) -> None:
        _import_deepspeed(ranks, device)
        if not dist.is_initialized():  # DeepSpeed needs a process group even for one rank
            dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1)
        file = read_config(recipe.parallel.deepspeed_config)
        list(drop_unknown(file))
        self._ranks, self._stage = ranks, file["zero_optimization"]["stage"]
        config = config_for_deepspeed(file, recipe, autocast_dtype(recipe.run.precision, device))
        scale = _LossScale(file.get("fp16", {})) if recipe.run.precision == "fp16" else None
        self._deepspeed = _initialize(recipe, model, config)
        super().__init__(recipe, model, self._deepspeed, ranks, device, scale)
        self.allows_trial = False

    def _build_updates(self, recipe: TrainRecipe) -> None:
        zero = self._zero = self._deepspeed.optimizer
        partitions = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        if not hasattr(zero, partitions):
            raise RecipeError(
                f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed uses a "
                f"{type(zero).__name__}, whose float32 weights cannot be saved. Use ZeRO stage 2 or 3."
            )
        self.optimizer, self._masters = zero.optimizer, list(getattr(zero, partitions))
        self._places = self._find_places()
        self.ema = Ema({str(number): flat for number, flat in enumerate(self._masters)}, build_rules(recipe))
        zero.check_grad_overflow = True  # in every precision: skip an update with NaN
        # Under autocast DeepSpeed would use torch's scaler, and clip gradients that are still scaled.
        zero.torch_autocast_gradscaler = None
        if isinstance(self.loss_scale, _LossScale):
            zero.loss_scaler, zero.dynamic_loss_scale = self.loss_scale.scaler, self.loss_scale.scaler.dynamic

    def _find_places(self) -> dict[str, _Place]:
        """Where this rank has its part of each parameter."""
        group_of = (
            {id(p): number for number, group in enumerate(self._zero.bit16_groups) for p in group}
            if (self._stage < 3)
            else {}
        )
        places = {}
        for name, parameter in self._trained.items():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if self._stage == 3:
                group, offset, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
                start = size * self._ranks.rank  # the last parts are padded
                places[name] = _Place(group, offset, start, max(0, min(size, shape.numel() - start)), shape)
            elif part := parameter._hp_mapping:  # pyright: ignore[reportAttributeAccessIssue]
                held, start = part.hp_fragment_address, part.lp_fragment_address.start
                places[name] = _Place(group_of[id(parameter)], held.start, start, held.numel, shape)
            else:
                places[name] = _Place(group_of[id(parameter)], 0, 0, 0, shape)
        return places

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward; gradients are reduced after the last microbatch where possible."""
        self._deepspeed.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss that is divided by the images of the global batch."""
        self._deepspeed.backward(loss * self._world_size)

    def update(self, step: int, *, learning_rate: float, grad_clip: float) -> tuple[Tensor, Tensor]:
        """As ``Engine.update``; DeepSpeed clips, by the config, which has the value of the recipe.

        Raises: RunError: the loss scale is at its minimum, and gradients still overflow.
        """
        if (scheduler := self._deepspeed.lr_scheduler) is None:
            for group in self._zero.param_groups:
                group["lr"] = learning_rate
        else:
            if step > 1:  # DeepSpeed counts from 0, and starts after the first update
                scheduler.step(step - 2)
            self.scheduled_rate = float(self._zero.param_groups[0]["lr"])
        try:
            self._deepspeed.step()
        except Exception as error:  # DeepSpeed raises a plain Exception
            if "loss scale already at minimum" not in str(error):
                raise
            raise RunError(
                f"step {step}: DeepSpeed's loss scale has shrunk to fp16.min_loss_scale, and gradients still overflow. "
                "Train with bf16, or a lower learning rate."
            ) from error
        norm, applied = self._deepspeed.get_global_grad_norm(), self._deepspeed.was_step_applied()
        if applied:
            self.ema.update(step)
        norm = torch.as_tensor(float("nan") if norm is None else norm, dtype=torch.float32, device=self._device)
        return norm.reshape(()), torch.tensor(float(not applied), device=self._device)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the model has its first average as weights; a collective call.

        The model's own weights come back from their float32 partitions.
        """
        self._show(self._fragments(list(self.ema.weights.values())))
        try:
            yield
        finally:
            self._show(self._fragments(self._masters))

    def state(self, group: str) -> State:
        """The tensors in use of MODEL, EMA or OPTIMIZER by name, as fragments; the number of updates as a copy."""
        if group == MODEL:
            return {**model_state(self.model), **self._fragments(self._masters)}
        if group == EMA:
            averages = zip(self.ema.rules, self.ema.averages, strict=True)
            fragments = [(rule.prefix, self._fragments(list(flat.values()))) for rule, flat in averages]
            return {prefix + name: tensor for prefix, average in fragments for name, tensor in average.items()}
        self._make_moments()
        moments = {
            field: self._fragments([self.optimizer.state[flat][field] for flat in self._masters]) for field in MOMENTS
        }
        state: dict[str, Any] = {}
        for name in self._trained:
            state |= {f"{name}.{field}": moments[field][name] for field in MOMENTS}
            state[f"{name}.step"] = torch.tensor(self._num_updates())
        return state

    def load(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of the first rank, with the names and shapes of ``state``; a collective call."""
        state = self.state(group)
        load_whole(state, tensors, world_size=self._world_size, device=self._device)
        if group == MODEL:
            self._show(self._fragments(self._masters))
        elif group == OPTIMIZER:
            self._set_num_updates(next(tensor.item() for name, tensor in state.items() if name.endswith(".step")))

    def _fragments(self, partitions: list[Tensor]) -> dict[str, Fragment]:
        """The parameters, or what belongs to them, in partitions of the same layout."""
        flat = [partition.detach() for partition in partitions]
        return {name: Fragment(flat[at.group], at, self._device) for name, at in self._places.items()}

    @torch.no_grad()
    def _show(self, weights: Mapping[str, Any]) -> None:
        """Copy whole weights into the model that computes, not into its float32 partitions."""
        import deepspeed

        for name, parameter in self._trained.items():
            gathered, weight = [parameter] if self._stage == 3 else [], whole(weights[name])
            with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0 if gathered else None):
                parameter.data.copy_(weight)

    def _make_moments(self) -> None:
        """Create the optimizer state that its first step would create; all updates so far may have been skipped."""
        for flat in self._masters:
            if not self.optimizer.state[flat]:
                zeros = {field: torch.zeros_like(flat) for field in MOMENTS}
                fused = any(group.get("fused") for group in self.optimizer.param_groups)  # reads the step on the device
                is_torchs = type(self.optimizer).__module__.startswith("torch.")  # DeepSpeed's own count in Python
                step = torch.zeros((), device=flat.device if fused else "cpu") if is_torchs else 0
                self.optimizer.state[flat].update(step=step, **zeros)

    def _num_updates(self) -> float:
        """Updates of the optimizer so far; one of DeepSpeed's own counts them for each group."""
        steps = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        return float(steps[0] if steps else self.optimizer.param_groups[0].get("step", 0))

    def _set_num_updates(self, value: float) -> None:
        for counted in [*self.optimizer.state.values(), *self.optimizer.param_groups]:
            if isinstance(counted.get("step"), Tensor):
                counted["step"].fill_(value)
            elif "step" in counted:
                counted["step"] = int(value)


def _initialize(recipe: TrainRecipe, model: Denoiser, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine."""
    import deepspeed

    optimizer = None if "optimizer" in config else build_optimizer(recipe.optimizer, model)
    groups: Any = None if optimizer else parameter_groups(recipe.optimizer, model)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=groups, config=config, dist_init_required=False
        )
    except (AssertionError, TypeError, ValueError) as error:  # what DeepSpeed raises for an invalid config
        raise RecipeError(
            f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed rejects it: {error}"
        ) from error
    return engine


class _Place(NamedTuple):
    """This rank's part of a parameter: ``size`` numbers from ``start`` on, at ``offset`` in a group's partition."""

    group: int
    offset: int
    start: int
    size: int
    shape: torch.Size


class Fragment:
    """A parameter, or its moment or average, that flat partitions of the ranks hold together.

    Args:
      flat: float32 partition of this rank.
      device: of collective calls.
    """

    dtype = torch.float32

    def __init__(self, flat: Tensor, place: _Place, device: torch.device) -> None:
        self.shape, self._start, self._device = place.shape, place.start, device
        self._part = flat[place.offset : place.offset + place.size]

    def full_tensor(self) -> Tensor:
        """The whole tensor; a collective call."""
        tensor = torch.zeros(self.shape.numel(), device=self._device)
        tensor[self._start : self._start + len(self._part)] = self._part.to(self._device)
        dist.all_reduce(tensor)
        return tensor.view(self.shape)

    def copy_(self, tensor: Tensor) -> None:
        """Set this rank's part from the whole tensor."""
        self._part.copy_(tensor.flatten()[self._start : self._start + len(self._part)])


class _LossScale(LossScale):
    """DeepSpeed's loss scaler.

    Args:
      section: fp16 of the user's config.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
        from deepspeed.runtime.precision_config import DeepSpeedFP16Config

        fp16 = DeepSpeedFP16Config(**{key: value for key, value in section.items() if value not in AUTO})
        self.scaler: Any = CreateLossScaler(
            torch.float16, fp16.loss_scale, fp16.loss_scale == 0, fp16.dynamic_loss_scale_args()
        )

    def value(self) -> float:
        """The scale."""
        return float(self.scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        state: dict[str, Any] = {"scale": self.value(), "good_steps": 0}
        if self.scaler.dynamic:
            state["good_steps"] = self.scaler.cur_iter - self.scaler.last_overflow_iter - 1
            state["hysteresis"] = self.scaler.cur_hysteresis
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo ``state_dict``; a fixed scale stays."""
        if self.scaler.dynamic:
            self.scaler.cur_scale = state["scale"]
            self.scaler.cur_iter, self.scaler.last_overflow_iter = state["good_steps"], -1
            self.scaler.cur_hysteresis = state.get("hysteresis", self.scaler.delayed_shift)
