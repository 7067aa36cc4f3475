"""The patch embeddings of diffusers, without rounded positions, and where a stream of tokens starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....datasets.errors import RecipeError
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


class CroppedPatchEmbed(nn.Module):
    """diffusers' patch embedding with the centre of a table of positions, of which all sizes take their part (SD3).

    diffusers rounds the sum to the dtype of the convolution.

    Args:
      plain: the original, whose weights and table it shares under the same names.
    """

    pos_embed: Tensor

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.proj, self.side = plain.proj, plain.pos_embed_max_size
        self.register_buffer("pos_embed", plain.pos_embed)

    def forward(self, latent: Tensor) -> Tensor:
        """(B, C, H, W) to (B, T, E)."""
        tokens = self.proj(latent)
        rows, columns = tokens.shape[2:]
        return tokens.flatten(2).transpose(1, 2) + self.table(rows, columns)

    def table(self, rows: int, columns: int) -> Tensor:
        """Positions of a grid, (1, T, E) float32.

        Raises: RecipeError: the grid is larger than the table.
        """
        if max(rows, columns) > self.side:
            raise RecipeError(f"{rows} x {columns} tokens: the model's table has positions for {self.side} a side.")
        top, left = (self.side - rows) // 2, (self.side - columns) // 2
        whole = self.pos_embed.view(1, self.side, self.side, -1)
        return whole[:, top : top + rows, left : left + columns].flatten(1, 2)


def start_stream(embed: nn.Module, inputs: Any, tokens: Tensor) -> Tensor:
    """Tokens (B, T, E), contiguous and at least float32, as the blocks return them.

    Otherwise the first block would be compiled separately, and each norm would transpose.
    """
    return at_least_float32(tokens).contiguous()
