"""DeepSpeed as an ``Engine``: ZeRO 1, 2 and 3, with the other settings of the user's ds_config.json.

Averages are further state of DeepSpeed's optimizer, so they are sharded as its moments are, and DeepSpeed's functions
gather them. Checkpoints are ours, not DeepSpeed's: whole tensors by name, which every other strategy reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ...errors import RecipeError, needs_extra
from ..config import TrainRecipe
from ..models.build import Denoiser
from ..optim.build import build_optimizer
from ..optim.ema import Ema, build_rules
from ..optim.precision import LossScale, autocast_dtype
from ..optim.state import State, load_whole, model_state
from ..weights.checkpoint import EMA, MODEL, OPTIMIZER
from .deepspeed_config import config_for_deepspeed, drop_unknown, merge, read_config
from .engine import Engine
from .ranks import Ranks, choose_strategy

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = ""  # the key of a parameter itself


def apply_ds_config(
    recipe: TrainRecipe, ranks: Ranks, device: torch.device, warn: Callable[[str], None]
) -> TrainRecipe:
    """The recipe with the values of its ds_config.json, if it has one; the first rank warns of the differences.

    Raises: RecipeError: it cannot be read or merged, or DeepSpeed is not installed.
    """
    if choose_strategy(recipe.parallel, ranks) != "deepspeed":
        return recipe
    _import_deepspeed(ranks, device)
    config = read_config(recipe.parallel.deepspeed_config)
    ignored = list(drop_unknown(config))
    recipe, notes = merge(config, recipe, ranks.world_size)
    for line in [*notes, *ignored] if ranks.is_first else ():
        warn(line)
    return recipe


def _import_deepspeed(ranks: Ranks, device: torch.device) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else "cuda")
    # DeepSpeed takes this as the number of its GPU; neither srun nor a single process sets it.
    os.environ["LOCAL_RANK"] = str(ranks.local_rank if device.type == "cpu" else device.index or 0)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls renamed functions
    with needs_extra("deepspeed", "parallel.deepspeed_config", "use parallel.strategy 'fsdp'"):
        from deepspeed.utils import logger
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
        self._stage = file["zero_optimization"]["stage"]
        config = config_for_deepspeed(file, recipe, autocast_dtype(recipe.run.precision, device))
        scale = LossScale(torch.device("cpu")) if recipe.run.precision == "fp16" else None
        self._deepspeed = _initialize(recipe, model, config)
        super().__init__(recipe, model, self._deepspeed, ranks, device, scale)
        self.allows_trial = False

    def _build_updates(self, recipe: TrainRecipe) -> None:
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero = self._zero = self._deepspeed.optimizer
        partitions = "fp32_partitioned_groups_flat" if self._stage == 3 else "single_partition_of_fp32_groups"
        if not hasattr(zero, partitions):
            raise RecipeError(
                f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed uses a "
                f"{type(zero).__name__}, whose float32 weights cannot be saved. Use ZeRO stage 2 or 3."
            )
        self.optimizer, partitions = zero.optimizer, list(getattr(zero, partitions))
        self.ema = Ema({str(number): flat for number, flat in enumerate(partitions)}, build_rules(recipe))
        for number, flat in enumerate(partitions):
            self._create_state(flat, [average[str(number)] for average in self.ema.averages])
        for group, flat in zip(zero.bit16_groups, partitions, strict=True) if self._stage < 3 else ():
            lazy_init_hp_params_optimizer_state(group, flat, self.optimizer.state)
        zero.check_grad_overflow = True  # in every precision: skip an update with NaN
        # Under autocast DeepSpeed would use torch's scaler, and clip gradients that are still scaled.
        zero.torch_autocast_gradscaler = None

    def _create_state(self, flat: Tensor, averages: Sequence[Tensor]) -> None:
        """Create the optimizer's state of a partition as its first step would, and add the averages."""
        fused = any(group.get("fused") for group in self.optimizer.param_groups)  # reads the step on the device
        step = torch.zeros((), device=flat.device if fused else "cpu")
        moments = {field: torch.zeros_like(flat) for field in MOMENTS}
        names = {f"average.{number}": average for number, average in enumerate(averages)}
        self.optimizer.state[flat].update(step=step, **moments, **names)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """The context of a forward and backward; gradients are reduced in that of the last one, where possible."""
        self._deepspeed.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss that is divided by the images of the global batch."""
        if self.loss_scale:
            self._zero.override_loss_scale(self.loss_scale.value())
        self._deepspeed.backward(loss * self._world_size)

    def update(
        self, step: int, *, learning_rate: float, grad_clip: float, bad_loss: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Engine.update``. DeepSpeed clips the gradients, to the value in its config, which is the recipe's.

        It looks at gradients alone, so a loss that is not finite while they are ends the run.
        """
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self._deepspeed.step()
        norm, applied = self._deepspeed.get_global_grad_norm(), self._deepspeed.was_step_applied()
        if applied:
            self.ema.update(step)
        if self.loss_scale:
            self.loss_scale.update(torch.tensor(float(not applied)))
        norm = torch.as_tensor(float("nan") if norm is None else norm, dtype=torch.float32, device=self._device)
        return norm.reshape(()), torch.tensor(float(not applied), device=self._device)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the model has its first average as weights; a collective call.

        The model's own weights come back from their float32 partitions.
        """
        self._show("average.0")
        try:
            yield
        finally:
            self._show(WEIGHTS)

    def state(self, group: str) -> State:
        """MODEL, EMA or OPTIMIZER by name, with the methods of a sharded tensor; the number of updates as a copy."""
        if group == MODEL:
            return {**model_state(self.model), **self._partitioned(WEIGHTS)}
        if group == EMA:
            averages = [(rule.prefix, f"average.{number}") for number, rule in enumerate(self.ema.rules)]
            return {prefix + name: one for prefix, key in averages for name, one in self._partitioned(key).items()}
        moments = {field: self._partitioned(field) for field in MOMENTS}
        state: dict[str, Any] = {}
        for name in self._trained:
            state |= {f"{name}.{field}": moments[field][name] for field in MOMENTS}
            state[f"{name}.step"] = next(iter(self.optimizer.state.values()))["step"].cpu().clone()
        return state

    def load(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of the first rank, with the names and shapes of ``state``; a collective call."""
        state = self.state(group)
        load_whole(state, tensors, world_size=self._world_size, device=self._device)
        if group == MODEL:
            self._show(WEIGHTS)
        elif group == OPTIMIZER:
            steps = next(tensor.item() for name, tensor in state.items() if name.endswith(".step"))
            for fields in self.optimizer.state.values():
                fields["step"].fill_(steps)

    def _partitioned(self, key: str) -> dict[str, Partitioned]:
        return {name: Partitioned(parameter, key) for name, parameter in self._trained.items()}

    @torch.no_grad()
    def _show(self, key: str) -> None:
        """Copy whole weights into the model that computes, not into its float32 partitions."""
        import deepspeed

        for weight in self._partitioned(key).values():
            gathered, values = [weight.parameter] if self._stage == 3 else [], weight.full_tensor()
            with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0 if gathered else None):
                weight.parameter.data.copy_(values)


def _initialize(recipe: TrainRecipe, model: Denoiser, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine."""
    import deepspeed

    optimizer = build_optimizer(recipe.optimizer, model)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    except (AssertionError, TypeError, ValueError) as error:  # what DeepSpeed raises for an invalid config
        raise RecipeError(
            f"parallel.deepspeed_config '{recipe.parallel.deepspeed_config}': DeepSpeed rejects it: {error}"
        ) from error
    return engine


class Partitioned:
    """A parameter, or a field of its optimizer state, that the ranks hold in parts: float32, of the whole shape."""

    dtype = torch.float32

    def __init__(self, parameter: Any, key: str) -> None:
        self.parameter, self._key = parameter, key or None
        self.shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)

    def full_tensor(self) -> Tensor:
        """The whole tensor; a collective call."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        tensor = (
            safe_get_full_optimizer_state(self.parameter, self._key)
            if self._key
            else safe_get_full_fp32_param(self.parameter)
        )
        assert tensor is not None, "a trained parameter"
        return tensor

    def copy_(self, tensor: Tensor) -> None:
        """Set this rank's part from the whole tensor."""
        if not hasattr(self.parameter, "ds_tensor"):
            self.parameter.set_full_hp_param(tensor, self._key)
            return
        size = self.parameter.ds_tensor.ds_numel  # ZeRO-3 pads the last part, and has no function that sets it
        part = tensor.flatten()[size * dist.get_rank() :][:size]
        part = torch.nn.functional.pad(part, (0, size - len(part)))
        self.parameter._z3_optimizer.set_local_hp_param(part, self.parameter, self._key)
