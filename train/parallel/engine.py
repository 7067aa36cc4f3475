"""How ranks share the work of a step, in plain torch: one process, DDP, FSDP2, HSDP.

Every strategy averages gradients over the ranks. A loss is the sum over a rank's
images divided by the size of the global batch, so it is multiplied by the number of ranks: the update is that
of one process with the whole batch, however the images are distributed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..config import TrainRecipe
from ..models.build import Denoiser
from ..models.diffusers.adapters import saved_tensors, trained_parameters
from ..optim.build import build_optimizer
from ..optim.ema import Ema, build_rules, local
from ..optim.loss_scale import LossScale
from ..optim.named_state import expected_tensors, load_optimizer_tensors, optimizer_tensors, placed
from ..weights.checkpoint import EMA, MODEL, OPTIMIZER
from .ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

NORM_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


class Engine:
    """A model with its optimizer and averages, distributed over the ranks; ``DeepSpeedEngine`` has the same methods.

    Args:
      model: on its device, compiled and sharded or not.
      forward: the model, or what wraps it.
      ranks: of the run.
      loss_scale: with float16, else None.
    """

    scheduled_rate: float | None = None  # learning rate of the last update, where an engine has its own schedule
    loss_scale: LossScale | None

    def __init__(
        self,
        recipe: TrainRecipe,
        model: Denoiser,
        forward: Callable[..., Tensor],
        ranks: Ranks,
        loss_scale: LossScale | None,
    ) -> None:
        self.model, self.forward, self.loss_scale = model, forward, loss_scale
        self._world_size, self._section = ranks.world_size, recipe.optimizer
        # A model has hundreds of modules: no step walks over them.
        self._trained, self._sharded = Trained(model), _sharded_modules(model)
        # A trial is a step that sends and updates nothing; a rank of a sharded model cannot make one alone.
        self.allows_trial, self.is_trial = not self._sharded, False
        self.optimizer = build_optimizer(recipe.optimizer, model)
        self.ema = Ema(self._trained, build_rules(recipe))
        # torch's fused optimizers read the scale and the skip flag on the device.
        self._skips_on_device = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward; gradients are reduced after the last microbatch where possible."""
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
    def update(self, step: int, *, learning_rate: float, grad_clip: float) -> tuple[Tensor, Tensor]:
        """Clip, take one optimizer step and update the averages, unless a gradient is not finite.

        Without a loss scale such a gradient ends the run, so optimizers that cannot skip on the device get zeros.

        Args:
          step: number of this step; the first is 1.
          grad_clip: largest total norm of the gradients; 0: no clipping.
        Returns: norm of the gradients before clipping, and 1 if the update was skipped, else 0; on the device.
        """
        if self.is_trial:
            return torch.zeros(()), torch.zeros(())
        gradients = [p.grad for p in self._trained.parameters() if p.grad is not None]
        scale = self.loss_scale.scale if self.loss_scale else None
        norm = whole(torch.nn.utils.get_total_norm(gradients, foreach=True))
        norm = norm if scale is None else norm / scale
        skipped = (~norm.isfinite()).float()
        shrink = (grad_clip / (norm + NORM_EPS)).clamp(max=1) if grad_clip else torch.ones_like(norm)
        factor = shrink if scale is None else shrink / scale
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._skips_on_device:
            self.optimizer.grad_scale, self.optimizer.found_inf = 1 / factor, skipped  # pyright: ignore
            self.optimizer.step()
        else:
            parts = [local(gradient) for gradient in gradients]
            torch._foreach_mul_(parts, factor)  # pyright: ignore[reportPrivateImportUsage]
            if self.loss_scale is None:
                for part in parts:
                    part.nan_to_num_(0, 0, 0)
                self.optimizer.step()
            elif not skipped.item():  # waits for the device
                self.optimizer.step()
        if self.loss_scale:
            self.loss_scale.update(skipped)
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update(self._trained, step, skipped if self.loss_scale else None)  # a number is faster than a tensor
        return norm, skipped

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the model has its first average as weights; a collective call. Nothing is trained in it,
        and afterwards all is as before, bit for bit: they change places, one tensor at a time."""
        pairs = [
            (local(parameter.detach()), local(average))
            for parameter, average in zip(self._trained.parameters(), self.ema.weights.values(), strict=True)
        ]
        # Room for the largest, taken before anything changes places: running out of memory then changes nothing.
        spare = torch.empty_like(max((weight for weight, _ in pairs), key=Tensor.numel)).flatten()
        self._exchange(pairs, spare)
        try:
            yield
        finally:
            self._exchange(pairs, spare)

    @torch.no_grad()
    def _exchange(self, pairs: Sequence[tuple[Tensor, Tensor]], spare: Tensor) -> None:
        for module in self._sharded:  # drops gathered weights, which a forward without a backward may leave
            module.reshard()
        for weight, mean in pairs:
            kept = spare[: weight.numel()].view_as(weight).copy_(weight)
            weight.copy_(mean)
            mean.copy_(kept)

    def tensors(self, group: str) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of MODEL, EMA or OPTIMIZER by name, one at a time, on every rank."""
        for name, tensor in self._tensors(group).items():
            yield name, whole(tensor)

    def expected(self, group: str, *, in_codes: bool = False) -> dict[str, Tensor]:
        """Meta tensors with the names, shapes and dtypes of ``tensors``.

        Args:
          in_codes: 8-bit moments as codes and scales, which one process writes; otherwise as numbers.
        """
        section = self._section
        if section.name == "adamw8bit" and not in_codes:
            section = section.model_copy(update={"name": "adamw"})
        tensors = expected_tensors(section, self.model) if group == OPTIMIZER else self._tensors(group)
        return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}

    def load(self, group: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors, which every rank has; a sharded model holds one at a time."""
        if group == OPTIMIZER:
            for _, of_parameter in groupby(tensors, key=lambda item: item[0].split("/")[0]):
                load_optimizer_tensors(self.optimizer, self.model, dict(of_parameter))
            return
        targets = self._tensors(group)
        with torch.no_grad():
            for name, tensor in tensors:
                targets[name].copy_(like(tensor, targets[name]))

    def _tensors(self, group: str) -> dict[str, Tensor]:
        if group == MODEL:
            return saved_tensors(self.model)
        return self.ema.state_dict() if group == EMA else optimizer_tensors(self.optimizer, self.model)


class Trained:
    """The parameters of a model that train; others are frozen, and have no gradient, average or place in a checkpoint.

    Args:
      model: on its device, sharded or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = trained_parameters(model)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them, in the order of the model."""
        yield from self._parameters.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same, with their names in the model."""
        yield from self._parameters.items()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective call if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, moved and sharded like another of its shape."""
    if isinstance(target, DTensor) and tensor.shape == target.shape:
        return placed(tensor, target, target.placements)
    return tensor.to(target.device) if tensor.shape == target.shape else tensor


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    if not hasattr(model, "set_requires_all_reduce"):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
