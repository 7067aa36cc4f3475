"""Distribute a model over the ranks: compile it, wrap it in DDP, shard it by FSDP2, or hand it to DeepSpeed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch._functorch.config as gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..config import ParallelSection, TrainRecipe
from ..models.build import Denoiser
from ..optim.loss_scale import LossScale, autocast_dtype
from .engine import Engine
from .ranks import Ranks
from .strategy import choose_strategy, num_replicas

MOST_SHAPES = (
    2048  # compiled shapes: 40 buckets, caption lengths, last batches; after 8, torch's default, it runs eagerly
)


def compile_blocks(model: Denoiser) -> None:
    """Compile the forward of each block, once for each shape.

    Hooks of FSDP stay outside of the graph, and parameters keep their names. All blocks share the code of a shape.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MOST_SHAPES)
    config.optimize_ddp = False  # it would split blocks at the ends of gradient buckets
    # Gradients are computed outside of autocast; compiled with it, sums that the forward keeps in float32 lose 16 bits.
    gradients.backward_pass_autocast = "off"
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)


def build_engine(recipe: TrainRecipe, model: Denoiser, ranks: Ranks, device: torch.device, *, compiled: bool) -> Engine:
    """Distribute a model over the ranks by the recipe's strategy.

    Args:
      model: float32, on the CPU, the same on every rank.
      compiled: its blocks go through torch.compile.
    Raises: RecipeError: the strategy does not fit the number of ranks.
    """
    section, dtype = recipe.parallel, autocast_dtype(recipe.run.precision, device)
    strategy = choose_strategy(section, ranks)
    if strategy == "deepspeed":
        from .deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(recipe, model.to(device), ranks, device)
    if compiled:
        compile_blocks(model)
    forward: nn.Module = model
    if strategy in ("fsdp", "hsdp"):
        shard(model, section, ranks, device, dtype)
    elif device.type != "cpu":  # a module of fake tensors cannot be moved, even to its own device
        model.to(device)
    if strategy == "ddp":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # torch 2.10 has no replacement yet
            forward = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )
    scales_on = torch.device("cpu") if section.cpu_offload else device
    return Engine(recipe, model, forward, ranks, LossScale(scales_on) if dtype == torch.float16 else None)


def shard(
    model: Denoiser, section: ParallelSection, ranks: Ranks, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Shard each block, then the rest of the model, over the ranks (FSDP2), and move them to the device.

    Blocks are gathered in the dtype of the computation, and their gradients summed in float32. The rest is small and
    stays float32, which the time embedding needs.
    """
    # The warning is about in-place changes of the output, which nothing here makes.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    settings: dict[str, Any] = {
        "mesh": _mesh(section, ranks, device),
        "reshard_after_forward": section.shard == "full",
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if section.cpu_offload
        else OffloadPolicy(),
    }
    low = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if dtype else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=low, **settings)
    settings["reshard_after_forward"] = False  # the backward pass begins with what is outside of the blocks
    fully_shard(model, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **settings)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer.to(device))


def _mesh(section: ParallelSection, ranks: Ranks, device: torch.device) -> DeviceMesh:
    if section.strategy == "hsdp":
        replicas = num_replicas(section, ranks)
        shape = (replicas, ranks.world_size // replicas)
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("shard",))
