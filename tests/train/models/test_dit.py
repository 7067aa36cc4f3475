"""Our DiT: the published parameters, the published function, and a start as identity."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from leandit.datasets.batches.captions import Captions
from leandit.train.models.activation_checkpointing import Mode, checkpoint_blocks
from leandit.train.models.cross_attention import Padded
from leandit.train.models.dit import PATCHES, PUBLISHED, SIZES, DiT
from leandit.train.models.layers import DiTOptions, Mlp, SwiGLU, position_table, rotate, rotation_table, time_features

Weights = dict[str, Tensor]
PARTS = ("weight", "bias")


def build(size: str, patch: int, *, base_size: int = 32, num_classes: int = 1000) -> DiT:
    depth, width, heads = SIZES[size]
    return DiT(
        depth=depth,
        width=width,
        heads=heads,
        patch=patch,
        channels=4,
        out_channels=8,
        num_classes=num_classes,
        base_size=base_size,
    )


def tiny_dit(*, base_size: int = 8, caption_width: int = 0, options: DiTOptions = PUBLISHED) -> DiT:
    return DiT(
        depth=3,
        width=24,
        heads=3,
        patch=2,
        channels=4,
        out_channels=8,
        num_classes=0 if caption_width else 5,
        base_size=base_size,
        caption_width=caption_width,
        options=options,
    ).double()


def randomize(model: DiT) -> DiT:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def expected_parameters(size: str, patch: int, *, num_classes: int = 1000) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint of the 256 px models (the keys of facebookresearch/DiT)."""
    depth, e, _ = SIZES[size]
    shapes = {
        "x_embedder.proj": ((e, 4, patch, patch), (e,)),
        "t_embedder.mlp.0": ((e, 256), (e,)),
        "t_embedder.mlp.2": ((e, e), (e,)),
        "final_layer.linear": ((patch * patch * 8, e), (patch * patch * 8,)),
        "final_layer.adaLN_modulation.1": ((2 * e, e), (2 * e,)),
    }
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.attn.qkv": ((3 * e, e), (3 * e,)),
            f"blocks.{i}.attn.proj": ((e, e), (e,)),
            f"blocks.{i}.mlp.fc1": ((4 * e, e), (4 * e,)),
            f"blocks.{i}.mlp.fc2": ((e, 4 * e), (e,)),
            f"blocks.{i}.adaLN_modulation.1": ((6 * e, e), (6 * e,)),
        }
    named = {f"{name}.{part}": shape for name, pair in shapes.items() for part, shape in zip(PARTS, pair, strict=True)}
    tokens = (32 // patch) ** 2
    return named | {"y_embedder.embedding_table.weight": (num_classes + 1, e), "pos_embed": (1, tokens, e)}


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_parameter_names_and_shapes_are_those_of_the_published_checkpoints(size: str, patch: int) -> None:
    with torch.device("meta"):
        state = build(size, patch).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected_parameters(size, patch)


@pytest.mark.parametrize(
    ("size", "trainable"), [("S", 32_865_056), ("B", 130_315_808), ("L", 457_840_672), ("XL", 674_834_720)]
)
def test_parameter_counts_are_the_published_ones(size: str, trainable: int) -> None:
    with torch.device("meta"):
        model = build(size, 2)
    assert sum(p.numel() for p in model.parameters()) == trainable
    assert sum(t.numel() for t in model.state_dict().values()) == trainable + 256 * SIZES[size][1]


def reference(
    weights: Weights,
    heads: int,
    base: int,
    x: Tensor,
    t: Tensor,
    y: Tensor | list[Tensor],
    options: DiTOptions = PUBLISHED,
) -> Tensor:
    """The papers' formulas in plain tensor arithmetic, one image at a time.

    Args:
      y: labels, or for each image its caption (L, D) without padding.
    """

    def linear(name: str, v: Tensor) -> Tensor:
        return v @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def silu(v: Tensor) -> Tensor:
        return v / (1 + torch.exp(-v))

    def rms(v: Tensor, name: str | None = None) -> Tensor:
        gain = 1 if name is None else weights[f"{name}.weight"]
        return v / ((v**2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def norm(v: Tensor) -> Tensor:
        if options.norm == "rms":
            return rms(v)
        centred = v - v.mean(-1, keepdim=True)
        return centred / ((centred**2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def gelu(v: Tensor) -> Tensor:
        return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    def turn(v: Tensor) -> Tensor:
        """Multiply pairs of numbers, as complex ones, by e^(i angle): half of a head by column, half by row."""
        pairs = v.shape[1] // 4
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
        v = torch.stack(tokens)
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
            v = v + gate_a * attend(f"{name}.attn", norm(v) * (1 + scale_a) + shift_a)
            if caption is not None:
                v = v + attend(f"{name}.cross_attn", norm(v), caption)
            modulated = norm(v) * (1 + scale_m) + shift_m
            if options.mlp == "swiglu":
                gate, value = linear(f"{name}.mlp.w12", modulated).chunk(2, dim=1)
                v = v + gate_m * linear(f"{name}.mlp.w3", silu(gate) * value)
            else:
                v = v + gate_m * linear(f"{name}.mlp.fc2", gelu(linear(f"{name}.mlp.fc1", modulated)))
        shift, scale = linear("final_layer.adaLN_modulation.1", condition).split(width)
        patches = linear("final_layer.linear", norm(v) * (1 + scale) + shift)  # (T, p * p * out)
        lines = []
        for r in range(rows):
            line = [patches[r * columns + c].view(p, p, -1).permute(2, 0, 1) for c in range(columns)]
            lines.append(torch.cat(line, dim=2))
        images.append(torch.cat(lines, dim=1))
    return torch.stack(images) * (-1 if options.time == "to_data" else 1)


def example(height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((3, 4, height, width), generator=generator, dtype=torch.float64)
    return x, torch.tensor([3.0, 500.0, 999.0], dtype=torch.float64), torch.tensor([0, 4, 5])


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time features in float64, so that the rest of the model can be compared to 1e-10."""

    def exact(t: Tensor) -> Tensor:
        frequencies = torch.tensor([10_000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
        angles = t.double()[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=1)

    monkeypatch.setattr("leandit.train.models.layers.time_features", exact)


OPTIONS = {
    "published": PUBLISHED,
    "qk_norm": DiTOptions(qk_norm=True),
    "rms": DiTOptions(norm="rms"),
    "swiglu": DiTOptions(mlp="swiglu"),
    "rope": DiTOptions(positions="rope"),
    "both": DiTOptions(positions="both"),
    "share": DiTOptions(time="share"),
    "to_data": DiTOptions(time="to_data"),
    "all": DiTOptions(qk_norm=True, norm="rms", mlp="swiglu", positions="rope"),
}


def caption_example() -> Captions:
    """Captions of 4, 1 and 6 tokens."""
    generator = torch.Generator().manual_seed(3)
    return Captions.packed(torch.randn((11, 10), generator=generator, dtype=torch.float64), (4, 1, 6))


@pytest.mark.usefixtures("exact_times")
@pytest.mark.parametrize("captioned", [False, True], ids=["label", "caption"])
@pytest.mark.parametrize(
    ("name", "size"),
    [*(("published", size) for size in ((8, 8), (12, 8), (16, 16))), *((name, (4, 12)) for name in OPTIONS)],
)
def test_the_output_and_all_gradients_are_those_of_the_formulas(
    name: str, size: tuple[int, int], captioned: bool
) -> None:
    options = OPTIONS[name]
    model = randomize(tiny_dit(caption_width=10 if captioned else 0, options=options))
    x, t, y = example(*size)
    captions = caption_example()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    given = list(captions.tokens.split(captions.lengths)) if captioned else y
    theirs = reference(weights, heads=3, base=4, x=x, t=t, y=given, options=options)
    ours = model(x, t, None, captions) if captioned else model(x, t, y)
    assert ours.shape == (3, 8, *size)
    assert theirs.abs().max() > 0.1  # else there is nothing to compare
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    pull = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (ours * pull).sum().backward()
    (theirs * pull).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-12, name
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_new_model_with_options_puts_out_exactly_zero_and_its_blocks_are_identity(name: str) -> None:
    model = tiny_dit(caption_width=10, options=OPTIONS[name])
    x, t, _ = example(4, 12)
    captions = caption_example()
    assert model(x, t, None, captions).abs().max() == 0
    tokens, condition = (torch.randn(3, *shape, dtype=torch.float64) for shape in ((12, 24), (24,)))
    rotation = model.rotation(2, 6) if model.options.positions != "sincos" else None
    layout, embedded = Padded(captions.mask[:, None, None]), torch.randn(3, 6, 24, dtype=torch.float64)
    assert all(torch.equal(block(tokens, condition, rotation, embedded, layout), tokens) for block in model.blocks)


def test_swiglu_has_about_as_many_parameters_as_gelu() -> None:
    for width in (384, 768, 1024, 1152):
        plain, gated = (sum(p.numel() for p in layer(width).parameters()) for layer in (Mlp, SwiGLU))
        assert SwiGLU(width).w3.in_features % 64 == 0
        assert 0.99 < gated / plain < 1.04


def test_rotary_positions_see_differences_alone_and_span_the_base_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn((2, 1, 1, 1, 16), generator=generator, dtype=torch.float64).expand(2, 1, 1, 16, 16)
    scores = (rotate(q, rotation_table(4, 4, 16, 4)) @ rotate(k, rotation_table(4, 4, 16, 4)).mT).view(4, 4, 4, 4)
    torch.testing.assert_close(scores[:3, :3, :3, :3], scores[1:, 1:, 1:, 1:])  # one row and one column on
    assert (scores[0, 0, 0, 1] - scores[0, 0, 1, 0]).abs() > 1e-3  # the axes are not one
    coarse, fine = rotation_table(2, 4, 16, 4), rotation_table(4, 8, 16, 4)
    for one, other in zip(
        coarse, fine, strict=True
    ):  # every second token of a finer grid stands where those of this do
        torch.testing.assert_close(one.view(2, 4, 2, 4), other.view(4, 8, 2, 4)[::2, ::2])


def test_a_bf16_residual_stream_triples_the_rounding_errors_at_depth_28() -> None:
    # As docs/models.md says it; 2.6 to 3.5 times with other seeds and widths.
    generator = torch.manual_seed(3)
    exact = DiT(depth=28, width=32, heads=2, patch=2, channels=4, out_channels=8, num_classes=9, base_size=4).double()
    with torch.no_grad():
        for parameter in exact.parameters():
            if not parameter.any():  # else each block would be identity
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x, target = (torch.randn(4, n, 4, 4, generator=generator, dtype=torch.float64) for n in (4, 8))
    t, y = torch.tensor([10.0, 300.0, 600.0, 990.0], dtype=torch.float64), torch.arange(4)

    def run(model: DiT, *, autocast: bool) -> tuple[Tensor, Tensor]:
        dtype = next(model.parameters()).dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x.to(dtype), t.to(dtype), y).double()
        (output - target).square().mean().backward()
        return output.detach(), torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    wanted, errors = run(exact, autocast=False), {}
    for residual in ("float32", "bf16"):
        model = copy.deepcopy(exact).float()
        model.zero_grad()
        model.residual = residual
        found = run(model, autocast=True)
        errors[residual] = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    for narrow, wide in zip(errors["bf16"], errors["float32"], strict=True):
        assert 0 < 2.2 * wide < narrow < 0.05, errors


def test_times_that_16_bits_confuse_stay_apart_under_autocast() -> None:
    embedder = tiny_dit().float().t_embedder
    seen: list[Tensor] = []
    model = tiny_dit().float()
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    times = torch.tensor([998.0, 999.0])
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 4, 8, 8), times, torch.zeros(2, dtype=torch.int64))
    assert seen[0].dtype == torch.float32
    assert not torch.equal(seen[0][0], seen[0][1])
    assert embedder(times).dtype == torch.float32


def test_time_features_are_cosines_then_sines_over_128_frequencies() -> None:
    t = torch.tensor([0.0, 0.5, 37.0, 999.0])
    wanted = torch.tensor(
        [[f(float(v) * 10_000 ** (-i / 128)) for f in (math.cos, math.sin) for i in range(128)] for v in t]
    )
    torch.testing.assert_close(time_features(t), wanted, rtol=0, atol=2e-4)  # float32 angles up to 999


def test_the_base_position_table_holds_the_integers_with_the_column_first() -> None:
    table = position_table(4, 4, 8, 4).view(4, 4, 8)  # width 8: sin, sin, cos, cos of the column, then of the row
    integers = torch.arange(4).float()
    for place in range(4):
        torch.testing.assert_close(table[place, :, 0], integers.sin())
        torch.testing.assert_close(table[:, place, 4], integers.sin())
        torch.testing.assert_close(table[place, :, 3], (integers / 100).cos())
        torch.testing.assert_close(table[:, place, 7], (integers / 100).cos())


@pytest.mark.parametrize(("rows", "columns"), [(2, 8), (8, 2), (3, 5), (8, 8)])
def test_other_grids_span_the_range_of_the_base_grid(rows: int, columns: int) -> None:
    table = position_table(rows, columns, 8, 4).view(rows, columns, 8)
    torch.testing.assert_close(table[0, :, 0], (torch.arange(columns) * 4 / columns).sin())
    torch.testing.assert_close(table[:, 0, 4], (torch.arange(rows) * 4 / rows).sin())


@pytest.mark.parametrize("captioned", [False, True])
def test_activation_checkpointing_changes_no_bit_and_keeps_less(captioned: bool) -> None:
    gradients, kept = [], []
    for mode in ("none", "blocks", "selective"):
        model = randomize(tiny_dit(caption_width=10 if captioned else 0, options=OPTIONS["all"]))
        checkpoint_blocks(model.blocks, "blocks")
        checkpoint_blocks(model.blocks, mode)  # the last one holds
        x, t, y = example(8, 8)
        sizes: list[int] = []

        def weigh(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
            output = model(x, t, None, caption_example()) if captioned else model(x, t, y)
        output.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        kept.append(sum(sizes))
    for none, blocks, selective in zip(*gradients, strict=True):
        assert torch.equal(none, blocks)
        assert torch.equal(none, selective)
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("mode", ["blocks", "selective"])
def test_inputs_of_blocks_that_wait_on_the_cpu_change_no_bit(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded: list[int] = []

    class Counting(save_on_cpu):
        """torch's, with each tensor that it takes noted."""

        def __init__(self, **settings: bool) -> None:
            super().__init__(**settings)
            take = self.pack_hook
            self.pack_hook = lambda tensor: (offloaded.append(tensor.dim()), take(tensor))[1]

    monkeypatch.setattr("leandit.train.models.activation_checkpointing.save_on_cpu", Counting)
    losses, gradients = [], []
    for to_cpu in (False, True):
        model = randomize(tiny_dit(options=OPTIONS["all"]))
        checkpoint_blocks(model.blocks, mode, to_cpu=to_cpu)
        losses.append(model(*example(8, 8)).square().sum())
        losses[-1].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert torch.equal(*losses)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert offloaded.count(3) == len(model.blocks), "the tokens that go into each block, and none from within"


def test_selective_checkpointing_computes_no_product_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counted = {}
    for mode in ("none", "blocks", "selective"):
        model = randomize(tiny_dit(options=OPTIONS["all"]))
        checkpoint_blocks(model.blocks, mode)
        with FlopCounterMode(display=False) as flops:
            model(*example(8, 8)).square().sum().backward()
        counted[mode] = flops.get_total_flops()
    assert counted["selective"] == counted["none"]
    assert counted["blocks"] > 1.2 * counted["none"]
