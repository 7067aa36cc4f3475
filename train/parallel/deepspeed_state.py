"""The state that DeepSpeed's ZeRO partitions over the ranks, read and written as whole tensors by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..models.diffusers.adapters import trained_parameters
from .ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
SHARED_MODEL, SHARDED_MODEL = "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"  # stages 1, 2; 3


class ZeroState:
    """Float32 weights and optimizer state of a model behind DeepSpeed.

    It has the ``parameters`` of a model for ``Ema``: the flat float32 partitions of this rank.

    Args:
      zero: DeepSpeed's optimizer.
      stage: 1, 2 or 3.
    Raises: AttributeError: the optimizer has no float32 partitions.
    """

    def __init__(self, zero: Any, stage: int, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self._zero, self._stage, self._ranks, self._device = zero, stage, ranks, device
        self._trained = trained_parameters(model)
        self._masters = list(getattr(zero, SHARDED_MODEL if stage == 3 else SHARED_MODEL))
        self._partitions = [partition.detach() for partition in self._masters]

    def parameters(self) -> Iterator[Tensor]:
        """The partitions of this rank."""
        yield from self._partitions

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The partitions of this rank, by number."""
        yield from ((str(number), partition) for number, partition in enumerate(self._partitions))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole float32 weights by name."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self._trained.items():
            yield name, _needed(safe_get_full_fp32_param(parameter), name).view(whole_shape(parameter))

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole optimizer state as "<parameter>/<field>"."""
        from deepspeed.utils import safe_get_full_optimizer_state

        # All updates so far may have been skipped; and DeepSpeed links the state of parameters to it after the step of
        # the first group, when that of others is not there yet.
        self.initialize_optimizer()
        for name, parameter in self._trained.items():
            for field in MOMENTS:
                tensor = _needed(safe_get_full_optimizer_state(parameter, field), name)
                yield f"{name}/{field}", tensor.view(whole_shape(parameter))
            yield f"{name}/step", torch.tensor(float(self._step))

    def set_weight(self, parameter: Tensor, tensor: Tensor) -> None:
        """Set a whole weight, in float32 and in the model."""
        self.set_master(parameter, tensor)
        self._show(parameter, tensor)

    def show_weights(self) -> None:
        """Copy the float32 partitions into the model."""
        for (_, tensor), parameter in zip(self.weights(), self._trained.values(), strict=True):
            self._show(parameter, tensor)

    def _show(self, parameter: Tensor, tensor: Tensor) -> None:
        """Set a whole weight in the model alone."""
        import deepspeed

        gathered = [parameter] if self._stage == 3 else []
        with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0 if gathered else None):
            parameter.data.copy_(tensor)

    def set_master(self, parameter: Tensor, tensor: Tensor) -> None:
        """Set a whole weight in float32 alone."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

        if self._stage < 3:
            safe_set_full_fp32_param(parameter, tensor.to(self._device))
        else:
            part = self._part(tensor, _needed(safe_get_local_fp32_param(parameter), "a parameter"))
            safe_set_local_fp32_param(parameter, part)

    def set_optimizer_tensor(self, parameter: Tensor, field: str, tensor: Tensor) -> None:
        """Set one field of the optimizer state."""
        from deepspeed.utils import (
            safe_get_local_optimizer_state,
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        if field == "step":
            self._step = tensor.item()
        elif self._stage < 3:
            safe_set_full_optimizer_state(parameter, tensor.to(self._device), field)
        else:
            part = self._part(tensor, _needed(safe_get_local_optimizer_state(parameter, field), field))
            safe_set_local_optimizer_state(parameter, part, field)

    def initialize_optimizer(self) -> None:
        """Create the optimizer state that its first step would create."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        inner = self._zero.optimizer
        for partition in self._masters:
            if not inner.state[partition]:
                zeros = {field: torch.zeros_like(partition) for field in MOMENTS}
                fused = any(group.get("fused") for group in inner.param_groups)  # reads the step on the device
                is_torchs = type(inner).__module__.startswith("torch.")  # DeepSpeed's own count in Python
                step = torch.zeros((), device=partition.device if fused else "cpu") if is_torchs else 0
                inner.state[partition].update(step=step, **zeros)
        if self._stage < 3:
            for group, partition in zip(self._zero.bit16_groups, self._masters, strict=True):
                lazy_init_hp_params_optimizer_state(group, partition, inner.state)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the float32 partitions after the block."""
        copies = [partition.clone() for partition in self._partitions]
        try:
            yield
        finally:
            for partition, copy in zip(self._partitions, copies, strict=True):
                partition.copy_(copy)

    def _part(self, tensor: Tensor, local: Tensor) -> Tensor:
        """This rank's part of a whole tensor with ZeRO-3; DeepSpeed's own split fails if the ranks do not divide it."""
        flat = tensor.flatten().to(local.device)
        padded = torch.nn.functional.pad(flat, (0, local.numel() * self._ranks.world_size - flat.numel()))
        return padded.narrow(0, local.numel() * self._ranks.rank, local.numel()).view_as(local)

    @property
    def _step(self) -> float:
        """Updates of the optimizer so far."""
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


def whole_shape(parameter: Tensor) -> torch.Size:
    """Shape of a parameter, partitioned or not."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _needed(tensor: Tensor | None, name: str) -> Tensor:
    assert tensor is not None, f"DeepSpeed gives no state of '{name}'"
    return tensor
