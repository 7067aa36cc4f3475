"""The state of a model and its optimizer as tensors by name: the same names with every optimizer and strategy.

``model_state`` and ``optimizer_state`` return the tensors in use, sharded or not. That one dictionary has the names and
shapes of a checkpoint, is gathered from (``whole``) and loaded into (``load_whole``).

torch's ``set_*_state_dict`` and ``full_state_dict=True`` are not used: they hold all state in memory at once instead of
one tensor, gather 8-bit moments by blocks, which differ with the number of ranks, and shard the factors of CAME like
the parameter, of which they have another shape.

Sharded tensors (``DTensor``) are known by their ``placements``: their class takes half a second to import, in each
process of a run that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.diffusers.adapters import trained_parameters

CODES, SCALE = ".codes", ".scale"  # suffixes of the two tensors of a whole 8-bit moment


# Tensors by name, sharded or not; with DeepSpeed fragments of flat partitions, which have the few methods used here.
State = Mapping[str, Any]


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """What checkpoints hold of a model: all of its state, or of one with frozen weights what trains."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state: dict[str, Any] = dict(get_model_state_dict(model))
    trained = trained_parameters(model)
    is_whole = len(trained) == sum(1 for _ in model.parameters())
    return state if is_whole else {name: state[name] for name in trained}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as "<parameter>.<field>", all float32 but the codes of a whole 8-bit moment.

    An optimizer without state gets that of zero updates, and loses its gradients. A collective call if it is sharded.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    is_new = not optimizer.state
    if is_new:
        optimizer.zero_grad(set_to_none=True)  # else torch would take it for one that never has state
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)["state"]  # pyright: ignore[reportAssignmentType]
    tensors: dict[str, Tensor] = {}
    for name, fields in state.items():
        for field, tensor in fields.items():
            if is_quantized(tensor):
                tensors |= {f"{name}.{field}{CODES}": tensor.codes, f"{name}.{field}{SCALE}": tensor.scale}
            else:
                tensors[f"{name}.{field}"] = tensor
    if is_new:  # torch makes it by an update of zeros, which counts as a step and leaves traces of CAME's epsilon
        for tensor in tensors.values():
            part = local(tensor)
            part.copy_(torch.zeros(part.shape, dtype=part.dtype, device=part.device))
    return tensors


def whole(tensor: Any) -> Tensor:
    """The whole tensor, 8-bit moments of a sharded parameter as numbers; a collective call if it is sharded."""
    if is_sharded(tensor) and is_quantized(part := local(tensor)):
        from torch.distributed.tensor import DTensor

        mesh, placements = tensor.device_mesh, tensor.placements
        shape = {"shape": tensor.shape, "stride": tensor.stride()}
        tensor = DTensor.from_local(part.dequantize(), mesh, placements, run_check=False, **shape)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def load_whole(
    targets: State, tensors: Mapping[str, Tensor], *, world_size: int = 1, device: torch.device | None = None
) -> None:
    """Copy whole tensors of the first rank into the targets of every rank, one at a time; a collective call.

    Args:
      tensors: of the first rank, with the targets' names and shapes; those of other ranks are not used.
      device: of the collective.
    """
    for name, target in targets.items():
        if world_size == 1:
            tensor = tensors[name]
        else:
            empty = torch.empty(target.shape, dtype=target.dtype, device=device)
            tensor = tensors[name].to(empty).contiguous() if dist.get_rank() == 0 else empty
            dist.broadcast(tensor, 0)
        if is_sharded(target):
            local(target).copy_(local(sharded_like(tensor, target)))
        else:
            target.copy_(tensor)


@torch.no_grad()
def local(tensor: Tensor) -> Any:
    """This rank's part of a sharded tensor, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, like: Any) -> Any:
    """A tensor that every rank has whole, sharded as another of its shape; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def is_sharded(tensor: Any) -> TypeGuard[Any]:
    """Whether it is a ``DTensor``."""
    return hasattr(tensor, "placements")


def is_quantized(tensor: Any) -> bool:
    """Whether it is an 8-bit moment of torchao."""
    return hasattr(tensor, "codes")
