"""The patch embedding of diffusers, with positions that are computed once, and where the stream of tokens starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..numerics import at_least_float32


class CachedPatchEmbed(nn.Module):
    """diffusers' patch embedding, with a position table that is computed once for each size.

    Args:
      plain: the original, whose weights it shares under the same names.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.proj, self.base_size, self.scale = plain.proj, plain.base_size, plain.interpolation_scale
        self._tables: dict[tuple[int, int, torch.device], Tensor] = {}

    def forward(self, latent: Tensor) -> Tensor:
        """(B, C, H, W) to (B, T, E)."""
        tokens = self.proj(latent)
        grid = (tokens.shape[2], tokens.shape[3])
        tokens = tokens.flatten(2).transpose(1, 2)
        return tokens + self.table(*grid, tokens.device)

    def table(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Positions of a grid, (1, T, E) float32."""
        key = (rows, columns, device)
        if key not in self._tables:
            from diffusers.models.embeddings import get_2d_sincos_pos_embed

            with torch.inference_mode(False):  # a table made while sampling may be used in training later
                table: Any = get_2d_sincos_pos_embed(
                    embed_dim=self.proj.out_channels,
                    grid_size=(rows, columns),
                    base_size=self.base_size,
                    interpolation_scale=self.scale,
                    output_type="pt",
                )
                self._tables[key] = table.float().unsqueeze(0).to(device)
        return self._tables[key]


def start_stream(embed: nn.Module, inputs: Any, tokens: Tensor) -> Tensor:
    """Tokens (B, T, E), contiguous and at least float32, as the blocks return them.

    Otherwise the first block would be compiled separately, and each norm would transpose.
    """
    return at_least_float32(tokens).contiguous()
