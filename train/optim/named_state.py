"""An optimizer's state as named tensors, and back: the same for every optimizer, whole or sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from ..config import OptimizerSection
from .build import BUILDERS, parameter_groups
from .came import factor_placements


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as tensors named "<parameter>/<field>", all float32 except codes.

    An 8-bit moment is two tensors, "<parameter>/<field>/codes" (uint8) and ".../scale"; a sharded one is its numbers.
    Sharded state stays sharded.
    """
    return _tensors(optimizer, dict(model.named_parameters()))


def expected_tensors(section: OptimizerSection, model: nn.Module) -> dict[str, Tensor]:
    """Meta tensors with the names, shapes and dtypes of ``optimizer_tensors`` once the optimizer has made a step.

    They come from a step of a copy on the meta device, which needs neither time nor memory.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    twins: dict[str, nn.Parameter] = {}
    groups = parameter_groups(section, model)
    for group in groups:
        originals = cast("list[nn.Parameter]", group["params"])
        group["params"] = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in originals]
        twins |= {names[id(p)]: twin for p, twin in zip(originals, group["params"], strict=True)}
    for twin in twins.values():
        twin.grad = torch.empty_like(twin)
    optimizer = BUILDERS[section.name](section, groups)
    optimizer.step()
    return {name: tensor.to("meta") for name, tensor in _tensors(optimizer, twins).items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Undo ``optimizer_tensors``, on the device and with the placement that the optimizer uses.

    Args:
      tensors: whole, and the same on all processes. 8-bit moments as codes and scales, or as numbers to round.
    """
    parameters = dict(model.named_parameters())
    on_device = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    moments: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, field, *part = key.split("/")
        parameter = parameters[name]
        if field == "step":  # on the CPU, unless a kernel reads it
            device = parameter.device if id(parameter) in on_device else "cpu"
            optimizer.state[parameter][field] = value.to(device, copy=True)
        else:
            tensor = value.to(parameter.device, copy=True)
            if isinstance(parameter, DTensor):
                tensor = placed(value, parameter, factor_placements(parameter, field))
            moments.setdefault((name, field), {})["".join(f"/{it}" for it in part)] = tensor
    join = getattr(optimizer, "join", lambda _parameter, _field, parts: parts[""])
    for (name, field), parts in moments.items():
        optimizer.state[parameters[name]][field] = join(parameters[name], field, parts)


def placed(tensor: Tensor, target: DTensor, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a whole tensor, on the device of the target's part: with offload not that of the mesh."""
    part = distribute_tensor(tensor, target.device_mesh, placements, src_data_rank=None)
    return part.to(target.to_local().device)  # DTensor.from_local would bring it back to the mesh's device


def _tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    split = getattr(optimizer, "parts", lambda value: {"": torch.as_tensor(value)})
    return {
        f"{name}/{field}{part}": tensor
        for name, parameter in parameters.items()
        for field, value in optimizer.state.get(parameter, {}).items()
        for part, tensor in split(value).items()
    }
