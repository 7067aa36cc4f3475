"""Distribute a model over the ranks: compile it, wrap it in DDP, shard it by FSDP2, or hand it to DeepSpeed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..config import ParallelSection, TrainRecipe
from ..models.blocks import compile_blocks
from ..models.build import Denoiser
from ..models.diffusers.adapters import trained_parameters
from ..optim.precision import LossScale, autocast_dtype
from ..optim.state import load_whole
from .engine import Engine
from .ranks import Ranks, choose_strategy, num_replicas

SHARDED = ("fsdp", "hsdp")


def first_device(strategy: str, ranks: Ranks) -> torch.device:
    """Where a rank builds its model: on the CPU, or, if the first rank sends it its part, on the meta device."""
    return torch.device("meta" if strategy in SHARDED and not ranks.is_first else "cpu")


def build_engine(recipe: TrainRecipe, model: Denoiser, ranks: Ranks, device: torch.device, *, compiled: bool) -> Engine:
    """Distribute a model over the ranks by the recipe's strategy.

    Args:
      model: float32, on its ``first_device``, the same on every rank.
      compiled: its blocks go through torch.compile.
    Raises: RecipeError: the strategy does not fit the number of ranks.
    """
    section, dtype = recipe.parallel, autocast_dtype(recipe.run.precision, device)
    strategy = choose_strategy(section, ranks)
    if compiled:
        compile_blocks(model.blocks)
    forward: nn.Module = model
    if strategy == "deepspeed":
        from .deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(recipe, model.to(device), ranks, device)
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
