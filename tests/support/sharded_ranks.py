"""One of two processes with halves of a model, beside the whole one: sharded_ranks.py RANK FILE-TO-MEET NAME..."""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from leandit.train.config import OptimizerSection
from leandit.train.models.roles import RolePatterns
from leandit.train.optim.build import build_optimizer
from leandit.train.optim.ema import Ema, Power
from leandit.train.optim.state import load_whole, optimizer_state, whole

# Muon's iteration is in bf16, and what has 8 bits has other blocks; both beside a rate of 0.01 and five steps.
TOLERANCE = {"adamw": 1e-6, "came": 1e-5, "muon": 2e-3, "adamw8bit": 5e-3}


class Small(nn.Module):
    """A matrix that Muon takes, an odd number of rows, a 1x1 and another convolution."""

    roles: ClassVar[RolePatterns] = {"hidden": ("blocks.*", "point", "deep")}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(16, 512), nn.Linear(8, 5)])
        self.point, self.deep = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3, groups=6)

    def forward(self) -> None:
        """Never run: gradients are made up."""


def compare(name: str) -> None:
    section = OptimizerSection.model_validate({"name": name, "lr": 1e-2, "weight_decay": 0.1})
    plain, sharded = Small(), Small()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    optimizers = [build_optimizer(section, model) for model in (plain, sharded)]
    averages = [Ema(dict(model.named_parameters()), [Power(0.05), Power(0.1)]) for model in (plain, sharded)]
    for step in range(1, 6):
        for model, optimizer, ema in zip((plain, sharded), optimizers, averages, strict=True):
            for p in model.parameters():
                gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                if isinstance(p, DTensor):
                    gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
                p.grad = gradient
            optimizer.step()
            ema.update(step)
        tensors = {key: whole(t) for key, t in optimizer_state(sharded, optimizers[1]).items()}
        if step == 3:  # go on with a fresh optimizer, from the state that was gathered
            optimizers[1] = build_optimizer(section, sharded)
            load_whole(optimizer_state(sharded, optimizers[1]), tensors, world_size=2)
    for key, value in plain.named_parameters():
        torch.testing.assert_close(whole(sharded.get_parameter(key)), value, rtol=0, atol=TOLERANCE[name])
    for one, other in zip(averages[1].state_dict().values(), averages[0].state_dict().values(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(whole(one), other, rtol=0, atol=TOLERANCE[name])
    expected = optimizer_state(plain, optimizers[0])
    if name != "adamw8bit":
        assert {key: t.shape for key, t in tensors.items()} == {key: t.shape for key, t in expected.items()}


def main() -> None:
    rank, meeting, *names = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
    for name in names:
        compare(name)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
