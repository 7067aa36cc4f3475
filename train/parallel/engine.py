"""How ranks share the work of a step: one process, DDP, FSDP2, HSDP, in plain torch; ``DeepSpeedEngine`` is a subclass.

``build_engine`` distributes a model: it wraps it in DDP, or shards it by FSDP2.

Every strategy averages gradients over the ranks. A loss is the sum over a rank's images divided by the size of the
global batch, so it is multiplied by the number of ranks: the update is that of one process with the whole batch,
however the images are distributed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..config import ParallelSection, TrainRecipe
from ..models.build import Denoiser
from ..models.diffusers.adapters import trained_parameters
from ..optim.build import build_optimizer, set_learning_rate
from ..optim.ema import Ema, build_rules
from ..optim.precision import LossScale, autocast_dtype
from ..optim.state import State, load_whole, local, model_state, optimizer_state, whole
from ..weights.checkpoint import EMA, MODEL
from .ranks import Ranks, choose_strategy, num_replicas

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

SHARDED = ("fsdp", "hsdp")
EXCHANGED = 1 << 26  # weights that change places at once


class Engine:
    """A model with its optimizer and averages, distributed over the ranks.

    Args:
      model: on its device, compiled and sharded or not.
      forward: the model, or what wraps it.
      ranks: of the run.
      device: of the computation.
      loss_scale: with float16, else None.
    """

    optimizer: torch.optim.Optimizer
    ema: Ema

    def __init__(
        self,
        recipe: TrainRecipe,
        model: Denoiser,
        forward: Callable[..., Tensor],
        ranks: Ranks,
        device: torch.device,
        loss_scale: LossScale | None,
    ) -> None:
        self.model, self.forward, self.loss_scale = model, forward, loss_scale
        self._may_skip = loss_scale is not None or recipe.run.skip_nonfinite > 0
        self._world_size, self._device = ranks.world_size, device
        # A model has hundreds of modules: no step walks over them.
        self._trained, self._sharded = trained_parameters(model), _sharded_modules(model)
        # A trial is a step that sends and updates nothing; a rank of a sharded model cannot make one alone.
        self.allows_trial, self.is_trial = not self._sharded, False
        self._build_updates(recipe)

    def _build_updates(self, recipe: TrainRecipe) -> None:
        """Build the optimizer and the averages."""
        self.optimizer = build_optimizer(recipe.optimizer, self.model)
        self.ema = Ema(self._trained, build_rules(recipe))

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """The context of a forward and backward; gradients are reduced in that of the last one, where possible."""
        if isinstance(self.forward, DistributedDataParallel) and (self.is_trial or not last):
            with self.forward.no_sync():
                yield
            return
        for module in self._sharded:  # only the all-reduce of hsdp can wait
            module.set_requires_all_reduce(last, recurse=False)
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss that is divided by the images of the global batch."""
        loss = loss * self._world_size
        (loss * self.loss_scale.scale if self.loss_scale else loss).backward()

    @torch.no_grad()
    def update(
        self, step: int, *, learning_rate: float, grad_clip: float, bad_loss: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Clip, take one optimizer step and update the averages, unless a gradient is not finite.

        Args:
          step: number of this step; the first is 1.
          grad_clip: largest total norm of the gradients; 0: no clipping.
          bad_loss: () float32 on the device, 1 if a loss of any rank is not finite, which skips the update too; the
            same on all ranks. None: gradients alone decide.
        Returns: norm of the gradients before clipping, and 1 if the update was skipped, else 0; on the device.
        """
        if self.is_trial:
            return torch.zeros(()), torch.zeros(())
        trained = [parameter for parameter in self._trained.values() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if self.loss_scale:
            torch._foreach_mul_([local(g) for g in gradients], 1 / self.loss_scale.scale)  # pyright: ignore
        norm = whole(get_total_norm(gradients, foreach=True))
        skipped = (~norm.isfinite()).float()
        if bad_loss is not None:
            skipped = torch.maximum(skipped, bad_loss)
        if grad_clip:
            clip_grads_with_norm_(trained, grad_clip, norm, foreach=True)
        set_learning_rate(self.optimizer, learning_rate)
        self._step_unless(skipped, gradients)
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update(step, skipped if self._may_skip else None)  # a number is faster than a tensor
        return norm, skipped

    def _step_unless(self, skipped: Tensor, gradients: Sequence[Tensor]) -> None:
        """Take the optimizer's step where the flag on the device is 0.

        Where a gradient that is not finite ends the run, optimizers that cannot read the flag on the device get zeros.
        """
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):  # torch's fused kernels
            self.optimizer.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif not self._may_skip:
            for gradient in gradients:
                local(gradient).nan_to_num_(0, 0, 0)
            self.optimizer.step()
        elif not skipped.item():  # waits for the device
            self.optimizer.step()
        if self.loss_scale:
            self.loss_scale.update(skipped)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the model has its first average as weights; a collective call. Nothing is trained in it,
        and afterwards all is as before, bit for bit: they change places, some tensors at a time."""
        pairs = [
            (local(parameter.detach()), local(average))
            for parameter, average in zip(self._trained.values(), self.ema.weights.values(), strict=True)
        ]
        # Room for some, taken before anything changes places: running out of memory then changes nothing.
        sizes = [weight.numel() for weight, _ in pairs]
        spare = pairs[0][0].new_empty(max(max(sizes), min(EXCHANGED, sum(sizes))))
        self._exchange(pairs, spare)
        try:
            yield
        finally:
            self._exchange(pairs, spare)

    @torch.no_grad()
    def _exchange(self, pairs: Sequence[tuple[Tensor, Tensor]], spare: Tensor) -> None:
        for module in self._sharded:  # drops gathered weights, which a forward without a backward may leave
            module.reshard()
        while pairs:
            count = max(1, sum(end <= spare.numel() for end in accumulate(weight.numel() for weight, _ in pairs)))
            weights, means = map(list, zip(*pairs[:count], strict=True))
            parts = spare[: sum(map(Tensor.numel, weights))].split([weight.numel() for weight in weights])
            kept = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
            for target, source in ((kept, weights), (weights, means), (means, kept)):
                torch._foreach_copy_(target, source)  # pyright: ignore[reportPrivateImportUsage]
            pairs = pairs[count:]

    def state(self, group: str) -> State:
        """The tensors in use of MODEL, EMA or OPTIMIZER by name, sharded or not; a collective call."""
        if group == MODEL:
            return model_state(self.model)
        return self.ema.state_dict() if group == EMA else optimizer_state(self.model, self.optimizer)

    def tensors(self, group: str) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors of a group by name, one at a time, on every rank."""
        for name, tensor in self.state(group).items():
            yield name, whole(tensor)

    def load(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors of the first rank, with the names and shapes of ``state``; a collective call."""
        load_whole(self.state(group), tensors, world_size=self._world_size, device=self._device)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    if not hasattr(model, "set_requires_all_reduce"):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# -------------------------------------------------------------------------------------------------------- distribution


def first_device(strategy: str, ranks: Ranks) -> torch.device:
    """Where a rank builds its model: on the CPU, or, if the first rank sends it its part, on the meta device."""
    return torch.device("meta" if strategy in SHARDED and not ranks.is_first else "cpu")


def build_engine(recipe: TrainRecipe, model: Denoiser, ranks: Ranks, device: torch.device) -> Engine:
    """Distribute a model over the ranks by a strategy of torch.

    Args:
      model: float32, on its ``first_device``, the same on every rank.
    Raises: RecipeError: the strategy does not fit the number of ranks.
    """
    section, dtype = recipe.parallel, autocast_dtype(recipe.run.precision, device)
    strategy = choose_strategy(section, ranks)
    forward: nn.Module = model
    if strategy in SHARDED:
        weights = _weights(model)
        shard(model, section, ranks, device, dtype)
        load_whole(_weights(model), weights, world_size=ranks.world_size, device=device)
    elif device.type != "cpu":  # a module of fake tensors cannot be moved, even to its own device
        model.to(device)
    if strategy == "ddp":
        is_8bit = recipe.lora.frozen == "int8"  # DDP cannot send such weights, so only what trains is sent
        if is_8bit:
            trained = trained_parameters(model)
            load_whole(trained, dict(trained), world_size=ranks.world_size, device=device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.10 has no replacement yet
            forward = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=not is_8bit,
            )
    scales_on = torch.device("cpu") if section.cpu_offload else device
    scale = LossScale(scales_on) if dtype == torch.float16 else None
    return Engine(recipe, model, forward, ranks, device, scale)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, those that no checkpoint holds among them."""
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def shard(
    model: Denoiser, section: ParallelSection, ranks: Ranks, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Shard each block, then the rest of the model, over the ranks (FSDP2), and move them to the device.

    Blocks are gathered in the dtype of the computation, and their gradients summed in float32. The rest is small and
    stays float32, which the time embedding needs. A model on the meta device gets memory for its part, not filled.
    """
    # The warning is about in-place changes of the output, which nothing here makes.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if section.cpu_offload else OffloadPolicy()
    settings: dict[str, Any] = {
        "mesh": _mesh(section, ranks, device),
        "reshard_after_forward": section.shard == "full",
        "offload_policy": offload,
    }
    low = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if dtype else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=low, **settings)
    settings["reshard_after_forward"] = False  # the backward pass begins with what is outside of the blocks
    fully_shard(model, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **settings)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if section.cpu_offload else device)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(device))


def _mesh(section: ParallelSection, ranks: Ranks, device: torch.device) -> DeviceMesh:
    if section.strategy == "hsdp":
        replicas = num_replicas(section, ranks)
        shape = (replicas, ranks.world_size // replicas)
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("shard",))
