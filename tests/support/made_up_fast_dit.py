"""A made-up checkout of fast-DiT: its names, and nothing of what it computes."""

from __future__ import annotations

from pathlib import Path

MODELS = """
from torch import nn
MADE = []
class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, 8)
    def forward(self, x, t, y):
        return x.repeat(1, 2, 1, 1) * (self.table(y) + t[:, None])[:, :, None, None]
def DiT_S_8(input_size, num_classes):
    assert input_size == 8
    MADE.append(Model(num_classes))
    return MADE[-1]
"""
DIFFUSION = """
STEPS = []
class Diffusion:
    num_timesteps = 10
    def training_losses(self, model, x, t, model_kwargs):
        assert model.training and t.max() < self.num_timesteps
        STEPS.append(tuple(x.shape))
        return {"loss": model(x, t, **model_kwargs).square().mean((1, 2, 3))}
def create_diffusion(timestep_respacing):
    return Diffusion()
"""


def made_up_fast_dit(folder: Path) -> Path:
    """A checkout with what is called of fast-DiT's: ``models`` and ``diffusion``, tiny."""
    checkout = folder / "fast-DiT"
    (checkout / "diffusion").mkdir(parents=True)
    (checkout / "models.py").write_text(MODELS)
    (checkout / "diffusion/__init__.py").write_text(DIFFUSION)
    return checkout
