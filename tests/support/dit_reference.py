"""DiT and its relatives by the formulas of their papers, apart from our own code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leandit.train.models.spec import DiTOptions

Weights = dict[str, Tensor]
PUBLISHED = DiTOptions()


def reference(
    weights: Weights,
    heads: int,
    base: int,
    x: Tensor,
    t: Tensor,
    y: Tensor | list[Tensor],
    options: DiTOptions = PUBLISHED,
    *,
    by_neighbors: bool = False,
) -> Tensor:
    """The papers' formulas in plain arithmetic, one image at a time; ``by_neighbors``: LightningDiT's layout of heads.

    ``y``: labels, or for each image its caption (L, D) without padding.
    """

    def linear(name: str, v: Tensor) -> Tensor:
        return v @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def silu(v: Tensor) -> Tensor:
        return v / (1 + torch.exp(-v))

    def rms(v: Tensor, name: str | None = None) -> Tensor:
        gain = 1 if name is None else weights[f"{name}.weight"]
        return v / ((v**2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def norm(v: Tensor, name: str = "") -> Tensor:
        if options.norm == "rms":
            return rms(v, name if f"{name}.weight" in weights else None)
        centred = v - v.mean(-1, keepdim=True)
        return centred / ((centred**2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def gelu(v: Tensor) -> Tensor:
        return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    def turn(v: Tensor) -> Tensor:
        """Multiply pairs of numbers, as complex ones, by e^(i angle): half of a head by column, half by row."""
        pairs = v.shape[1] // 4
        if by_neighbors:
            at = torch.tensor(places, dtype=torch.float64).flip(1)  # rows, columns
            frequencies = 10_000 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
            angles = (at[:, :, None] * frequencies).flatten(1)
            numbers = torch.view_as_complex(v.unflatten(1, (-1, 2)).contiguous()) * torch.exp(1j * angles)
            return torch.view_as_real(numbers).flatten(1)
        turned = []
        for token, (column, row) in zip(v, places, strict=True):
            for axis, coordinate in enumerate((column, row)):
                for i in range(pairs):
                    number = torch.complex(token[2 * pairs * axis + i], token[2 * pairs * axis + pairs + i])
                    angle = torch.tensor(coordinate * 10_000 ** (-i / pairs), dtype=torch.float64)
                    turned.append(number * torch.exp(1j * angle))
        numbers = torch.stack(turned).view(len(v), 2, pairs)
        return torch.stack([numbers.real, numbers.imag], dim=2).reshape(len(v), -1)

    def attend(name: str, v: Tensor, other: Tensor | None = None) -> Tensor:
        """To itself, or to another sequence."""
        if other is None:
            q, k, value = linear(f"{name}.qkv", v).split(v.shape[1], dim=1)
            if options.value_residual and firsts:
                share = weights[f"{name}.value_share"]
                value = share * firsts[0] + (1 - share) * value
            firsts.append(value)
        else:
            q = linear(f"{name}.q_linear", v)
            k, value = linear(f"{name}.kv_linear", other).split(v.shape[1], dim=1)
        size = v.shape[1] // heads
        out = []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            one, two = q[:, part], k[:, part]
            if options.qk_norm:
                one, two = rms(one, f"{name}.q_norm"), rms(two, f"{name}.k_norm")
            if options.positions != "sincos" and other is None:
                one, two = turn(one), turn(two)
            scores = one @ two.T / math.sqrt(size)
            shares = torch.exp(scores - scores.max(1, keepdim=True).values.detach())
            shares = shares / shares.sum(1, keepdim=True)
            out.append(shares @ value[:, part])
        return linear(f"{name}.proj", torch.cat(out, 1))

    kernel = weights["x_embedder.proj.weight"]
    width, _, p, _ = kernel.shape
    rows, columns = x.shape[2] // p, x.shape[3] // p
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    images = []
    for image, time, given in zip(x, t, y, strict=True):
        tokens, places = [], []
        for r in range(rows):
            for c in range(columns):
                patch = image[:, r * p : (r + 1) * p, c * p : (c + 1) * p]
                # The column comes first, and both coordinates run from 0 to the base grid's size.
                places.append((c * base / columns, r * base / rows))
                waves = []
                for coordinate in places[-1]:
                    angles = [coordinate / 10_000 ** (i / (width // 4)) for i in range(width // 4)]
                    waves += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
                place = torch.tensor(waves, dtype=torch.float32).double()  # the table is stored in float32
                embedded = kernel.reshape(width, -1) @ patch.reshape(-1) + weights["x_embedder.proj.bias"]
                tokens.append(embedded if options.positions == "rope" else embedded + place)
        v, firsts = torch.stack(tokens), list[Tensor]()
        if options.time != "steps":
            time = 1 - time / 1000 if options.time == "to_data" else time / 1000
        angles = time * torch.tensor([10_000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
        features = torch.cat([angles.cos(), angles.sin()])
        condition = linear("t_embedder.mlp.2", silu(linear("t_embedder.mlp.0", features)))
        caption = None
        if given.ndim:
            hidden = gelu(linear("y_embedder.fc1", rms(given, "y_embedder.norm")))
            caption = linear("y_embedder.fc2", hidden)
        else:
            condition = condition + weights["y_embedder.embedding_table.weight"][given]
        condition = silu(condition)
        for i in range(depth):
            name = f"blocks.{i}"
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = linear(f"{name}.adaLN_modulation.1", condition).split(
                width
            )
            v = v + gate_a * attend(f"{name}.attn", norm(v, f"{name}.norm1") * (1 + scale_a) + shift_a)
            if caption is not None:
                v = v + attend(f"{name}.cross_attn", norm(v), caption)
            modulated = norm(v, f"{name}.norm2") * (1 + scale_m) + shift_m
            if options.mlp == "swiglu":
                gate, value = linear(f"{name}.mlp.w12", modulated).chunk(2, dim=1)
                v = v + gate_m * linear(f"{name}.mlp.w3", silu(gate) * value)
            else:
                v = v + gate_m * linear(f"{name}.mlp.fc2", gelu(linear(f"{name}.mlp.fc1", modulated)))
        shift, scale = linear("final_layer.adaLN_modulation.1", condition).split(width)
        patches = linear(
            "final_layer.linear", norm(v, "final_layer.norm_final") * (1 + scale) + shift
        )  # (T, p * p * out)
        lines = []
        for r in range(rows):
            line = [patches[r * columns + c].view(p, p, -1).permute(2, 0, 1) for c in range(columns)]
            lines.append(torch.cat(line, dim=2))
        images.append(torch.cat(lines, dim=1))
    return torch.stack(images) * (-1 if options.time == "to_data" else 1)
