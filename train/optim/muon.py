"""Muon for the hidden matrices and AdamW for the rest, as one optimizer.

Muon makes every step of a matrix orthogonal, so it is for matrices that map hidden activations to hidden activations
(Jordan et al. 2024): linear layers within the blocks. AdamW updates embeddings, the final layer, biases, convolutions
and modulations. Steps are scaled to the size of AdamW's, so that both share one learning rate (Liu et al. 2025, "Muon
is Scalable for LLM Training", section 2.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MODULATIONS = ("adaLN_modulation", "norm1.linear", "norm1_context.linear")  # of DiT, and of SD3's two streams
IS_MUON = "muon"  # key of a group


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's two optimizers over separate groups, with one state.

    Args:
      groups: each with ``muon``, true for a group of matrices that Muon updates.
      momentum: of Muon.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        fused: bool,
    ) -> None:
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        matrices = [group for group in groups if group[IS_MUON]]
        others = [group for group in groups if not group[IS_MUON]]
        if matrices:
            self._parts[True] = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            self._parts[False] = torch.optim.AdamW(
                others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused
            )
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        assert closure is None, "the loss is computed before"
        for is_muon, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group[IS_MUON] == is_muon]
            part.step()


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the weights of the linear layers within ``model.blocks`` that do not compute modulations."""
    return {
        id(module.weight)
        for block in getattr(model, "blocks", ())
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not is_modulation(name)
    }


def is_modulation(name: str) -> bool:
    """Whether a linear layer, by its name in a block, computes a modulation."""
    return any(modulation in name for modulation in MODULATIONS)
