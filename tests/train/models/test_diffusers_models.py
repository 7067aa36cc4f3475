"""PixArt and Sana: diffusers' function without its dense bias, packed attention, what is kept, and the whole way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU, shake, shaken, train_recipe
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from leandit.datasets.batches.captions import Captions
from leandit.datasets.store import LatentStore
from leandit.train import step as step_module
from leandit.train.loop import StopRequest, train
from leandit.train.models import cross_attention
from leandit.train.models.build import Denoiser, build_model
from leandit.train.models.conditioning import Conditioner, Conditioning
from leandit.train.models.diffusers.adaln_single import CachedPatchEmbed
from leandit.train.models.diffusers.attention import LinearProcessor, products
from leandit.train.models.diffusers.families import FAMILIES, diffusers_config, transformer_class
from leandit.train.models.diffusers.model import DiffusersModel
from leandit.train.models.diffusers.pixart import PixArt
from leandit.train.models.diffusers.sana import Sana
from leandit.train.models.spec import ModelSpec, TextInput
from leandit.train.run.fit import model_spec
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.techniques.images import Microbatch

pytestmark = pytest.mark.usefixtures("tiny_models")
PIXART = ModelSpec(name="pixart-tiny", channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
SPECS = (PIXART, PIXART.model_copy(update={"name": "sana-tiny"}), PIXART.model_copy(update={"name": "DiT-S/2"}))
IDS = ("pixart", "sana", "text-dit")
SD3 = {"name": "sd3-tiny", "texts": (TextInput(name="", tokens=7, width=6, pooled_width=5),)}


def config_of(name: str, **sizes: int) -> dict[str, Any]:
    return diffusers_config(PIXART.model_copy(update={"name": name, **sizes}))


MASK = torch.arange(7)[None] < torch.tensor([4, 1, 7])[:, None]


def inputs(*, height: int = 8, width: int = 12, sizes: bool = False) -> tuple[Tensor, Tensor, Conditioning]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 4, height, width), generator=generator)
    captions = torch.randn((3, 7, 6), generator=generator)
    source_sizes = torch.tensor([[300.0, 500.0], [64.0, 80.0], [1000.0, 1000.0]]) if sizes else None
    given = Conditioning(captions=packed(captions), source_sizes=source_sizes)
    return x, torch.tensor([3.0, 500.0, 999.0]), given


def sd3_inputs() -> tuple[Tensor, Tensor, Conditioning]:
    x, t, given = inputs()
    assert isinstance(given.captions, Captions)
    return x, t, Conditioning(captions=given.captions.padded, pooled=torch.ones(3, 5))


def packed(captions: Tensor) -> Captions:
    return Captions.of([rows[real] for rows, real in zip(captions, MASK, strict=True)])


CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    ("pixart-tiny", "pixart", {}),
    ("pixart-tiny", "pixart", {"use_additional_conditions": True, "attention_head_dim": 24, "cross_attention_dim": 48}),
    ("sana-tiny", "sana", {}),
    ("sana-tiny", "sana", {"qk_norm": "rms_norm_across_heads", "interpolation_scale": 2}),
]


@pytest.mark.parametrize(("name", "family", "more"), CONFIGS)
@pytest.mark.parametrize("size", [(8, 8), (8, 12)])
def test_the_function_is_that_of_diffusers(name: str, family: str, more: dict[str, Any], size: tuple[int, int]) -> None:
    config = config_of(name, channels=4, out_channels=8, caption_width=6, base_size=8) | more
    model = shake(FAMILIES[family](config)).eval()
    plain = transformer_class(family)(**config).eval()
    plain.load_state_dict(model.net.state_dict())
    sizes = bool(more.get("use_additional_conditions"))
    x, t, given = inputs(height=size[0], width=size[1], sizes=sizes)
    options: dict[str, Any] = {}
    if family == "pixart":
        ratio = torch.full((3, 1), size[0] / size[1])
        conditions = {"resolution": given.source_sizes, "aspect_ratio": ratio if sizes else None}
        options = {"added_cond_kwargs": conditions}
    assert isinstance(given.captions, Captions)
    with torch.no_grad():
        wanted = plain(
            hidden_states=x,
            encoder_hidden_states=given.captions.padded,
            encoder_attention_mask=MASK.float(),
            timestep=t,
            return_dict=False,
            **options,
        )[0]
        found = model(x, t, given)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(x, t, given).float()
            for block in model.blocks:
                block.compile(backend="eager")  # where queries, keys and values are one product
            joined = model(x, t, given).float()
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (joined - rounded).norm() < 1e-3 * rounded.norm()


def test_what_a_picture_is_told_of_its_source_matters_and_defaults_to_its_own_size() -> None:
    more = {"use_additional_conditions": True, "attention_head_dim": 24, "cross_attention_dim": 48}
    config = config_of("pixart-tiny", channels=4, out_channels=8, caption_width=6, base_size=8) | more
    model = shake(PixArt(config)).eval()
    x, t, given = inputs(sizes=True)
    own = given._replace(source_sizes=torch.tensor([[64.0, 96.0]]).expand(3, 2))
    with torch.no_grad():
        outputs = [model(x, t, it) for it in (given, own, given._replace(source_sizes=None))]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
    assert torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize(
    ("size", "ratio"), [((112, 136), 0.82), ((136, 112), 1.21), ((88, 184), 0.48), ((128, 128), 1.0), ((8, 12), 2 / 3)]
)
def test_the_ratio_that_pixart_is_told_is_the_key_of_its_table(size: tuple[int, int], ratio: float) -> None:
    more = {"use_additional_conditions": True, "attention_head_dim": 24, "cross_attention_dim": 48}
    config = config_of("pixart-tiny", channels=4, out_channels=8, caption_width=6, base_size=8) | more
    told = PixArt(config).size_conditions(torch.zeros(2, 4, *size), inputs(sizes=False)[2])
    assert told["aspect_ratio"] is not None
    assert told["resolution"] is not None
    assert told["aspect_ratio"].flatten().tolist() == pytest.approx([ratio, ratio])
    assert told["resolution"].tolist() == [[8 * side for side in size]] * 2


def test_the_conditioner_looks_up_the_sizes_of_the_records() -> None:
    spec = PIXART.model_copy(update={"config": {"use_additional_conditions": True}})
    assert spec.takes_sizes
    conditioner = Conditioner(spec, torch.zeros(9, 6), [torch.arange(20.0).view(10, 2)])
    records = torch.tensor([7, 0, 3])
    given = conditioner(None, {"": packed(torch.zeros(3, 7, 6))}, records)
    assert given.source_sizes is not None
    assert given.source_sizes.tolist() == [[14, 15], [0, 1], [6, 7]]
    dropped = conditioner.drop(given, torch.tensor([True, False, True]))
    assert dropped.source_sizes is given.source_sizes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_captions_of_16_bits_stay_so_for_a_forward_under_autocast(dtype: torch.dtype) -> None:
    conditioner, texts = Conditioner(PIXART, torch.randn(9, 6)), {"": packed(torch.randn(3, 7, 6).to(dtype))}
    wide, narrow = conditioner(None, texts), conditioner(None, texts, widen=False)
    dropped = torch.tensor([True, False, True])
    wide, narrow = conditioner.drop(wide, dropped), conditioner.drop(narrow, dropped)
    assert isinstance(wide.captions, Captions)
    assert isinstance(narrow.captions, Captions)
    assert (wide.captions.tokens.dtype, narrow.captions.tokens.dtype) == (torch.float32, dtype)
    model = shake(PixArt(diffusers_config(PIXART)))
    x, t, _ = inputs()
    wide = narrow._replace(captions=narrow.captions.with_tokens(narrow.captions.tokens.float()))
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert torch.equal(model(x, t, narrow), model(x, t, wide))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
@pytest.mark.usefixtures("tiny_models")
def test_a_step_hands_on_captions_in_the_dtype_that_its_precision_wants(
    precision: str, dtype: torch.dtype, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, image_losses = list[torch.dtype](), step_module.image_losses

    def look(learner: Run, images: Microbatch, step: int) -> dict[str, Tensor]:
        assert isinstance(images.conditioning.captions, Captions)
        seen.append(images.conditioning.captions.tokens.dtype)
        return image_losses(learner, images, step)

    monkeypatch.setattr(step_module, "image_losses", look)
    state = Run.open(train_recipe("sana-tiny", f"run.precision={precision}"), [caption_store], CPU, print)
    step_module.train_step(state, next(iter(state.loader)))
    assert set(seen) == {dtype}


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_a_block_that_recomputes_is_one_graph_which_all_blocks_share(spec: ModelSpec) -> None:
    torch._dynamo.reset()
    model = shaken(spec).train()
    wanted = model(*inputs())
    wanted.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.checkpoint_activations("selective")
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    found = model(*inputs())
    found.square().sum().backward()
    assert graphs.frame_count == 1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize(
    ("dtype", "residual", "stream"),
    [
        (torch.bfloat16, "float32", torch.float32),
        (torch.bfloat16, "bf16", torch.bfloat16),
        (torch.float16, "bf16", torch.float32),
        (None, "bf16", torch.float32),
    ],
)
def test_the_residual_stream_is_bf16_only_where_asked_for_under_bf16(
    spec: ModelSpec, dtype: torch.dtype | None, residual: Any, stream: torch.dtype
) -> None:
    seen: list[torch.dtype] = []
    model: Any = shaken(spec)
    (model if isinstance(model, DiffusersModel) else model.net).residual = residual
    with torch.no_grad():
        wanted = model(*inputs())
        for block in model.blocks:
            block.register_forward_pre_hook(
                lambda module, given, named: seen.append((given[0] if given else named["hidden_states"]).dtype),
                with_kwargs=True,
            )
            block.register_forward_hook(lambda module, given, output: seen.append(output.dtype))
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            found = model(*inputs())
    assert set(seen) == {stream}
    assert (found.float() - wanted).norm() < 0.05 * wanted.norm()


def test_what_has_replaced_a_linear_layer_is_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layers, x = [torch.nn.Linear(4, 6), torch.nn.Linear(4, 2), Doubled(4, 6)], torch.randn(2, 3, 4)
    graphs = CompileCounterWithBackend("eager")
    for given in (layers, layers[:2]):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = [layer(x) for layer in given]
            found = torch.compile(lambda given=given: products(x, *given), backend=graphs)()
        torch.testing.assert_close(found, wanted)
    torch.compile(lambda: products(x, *layers[:2]), backend=graphs)()
    linear = [sum(node.target is F.linear for node in graph.graph.nodes) for graph in graphs.graphs]
    assert linear == [3, 1, 2]  # joined where autocast casts them


def test_positions_are_added_to_tokens_of_16_bits_without_rounding() -> None:
    embed: Any = build_model(PIXART, seed=0).net.pos_embed
    x = inputs()[0]
    with torch.autocast("cpu", torch.bfloat16):
        tokens = embed.proj(x).flatten(2).transpose(1, 2)
        assert tokens.dtype == torch.bfloat16
        assert torch.equal(embed(x), tokens.float() + embed.table(4, 6, CPU))


@pytest.mark.parametrize(("base_size", "scale"), [(16, None), (32, None), (64, 1.0), (128, 2.0)])
def test_sana_has_positions_from_2048_px_on(base_size: int, scale: float | None) -> None:
    config = config_of("sana-1600m", channels=32, out_channels=32, caption_width=6, base_size=base_size)
    assert config["interpolation_scale"] == scale


@pytest.mark.parametrize(("base_size", "scale"), [(32, 0.5), (64, 1), (128, 2), (256, 4)])
def test_positions_of_pixart_sigma_have_the_published_scale(base_size: int, scale: float) -> None:
    config = config_of("pixart-sigma", channels=4, out_channels=8, caption_width=6, base_size=base_size)
    assert config["interpolation_scale"] == scale


@pytest.mark.parametrize("scale", [0.5, 1, 2])
def test_cached_positions_are_those_of_diffusers_to_the_bit(scale: float) -> None:
    from diffusers.models.embeddings import PatchEmbed

    plain = PatchEmbed(height=16, width=16, patch_size=2, in_channels=4, embed_dim=48, interpolation_scale=scale)
    cached = CachedPatchEmbed(plain)
    assert cached.state_dict().keys() == plain.state_dict().keys()
    for height, width in ((16, 16), (8, 24), (24, 8), (6, 10), (64, 64), (8, 24)):
        x = torch.randn(2, 4, height, width)
        assert torch.equal(cached(x), plain(x))
    assert len(cached._tables) == 5
    with torch.inference_mode():
        cached(torch.randn(1, 4, 4, 4))
    cached(torch.randn(1, 4, 4, 4)).sum().backward()


def plain_varlen(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Any:
    """Variable-length attention by its definition."""
    assert (q_offsets.dtype, k_offsets.dtype, len(k)) == (torch.int32, torch.int32, int(k_offsets[-1]))
    assert max_q >= int(q_offsets.diff().max())
    assert max_k >= int(k_offsets.diff().max())
    out = []
    for i in range(len(q_offsets) - 1):
        rows, columns = (slice(int(ends[i]), int(ends[i + 1])) for ends in (q_offsets, k_offsets))
        scores = torch.einsum("thd,lhd->htl", q[rows], k[columns]) / q.shape[-1] ** 0.5
        out.append(torch.einsum("htl,lhd->thd", scores.softmax(-1), v[columns]))
    return torch.cat(out)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_the_packed_form_of_each_model_is_its_padded_form(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shaken(spec).double()
    x, t, given = inputs()
    assert isinstance(given.captions, Captions)
    given = given._replace(captions=given.captions.with_tokens(given.captions.tokens.double()))
    results = []
    for is_packed in (False, True):
        if is_packed:
            monkeypatch.setattr(cross_attention, "has_varlen", lambda captions, head_width: True)
            monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
        output = model(x.double(), t, given)
        results.append(
            [output, *torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)]
        )
    assert results[0][0].abs().max() > 0.1
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_cross_attention_makes_no_bias_for_each_head() -> None:
    model = shaken(SPECS[0])
    seen: list[tuple[torch.dtype, torch.Size]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watch(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is not None:
            seen.append((attn_mask.dtype, attn_mask.shape))
        return plain(q, k, v, attn_mask=attn_mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
        model(*inputs())
    assert seen == [(torch.bool, torch.Size([3, 1, 1, 7]))] * 2


def test_linear_attention_has_sums_in_float32_and_products_in_16_bits_under_autocast() -> None:
    model = shaken(SPECS[1])
    attention = model.blocks[0].attn1
    x = 4 * torch.randn(2, 4096, 32, generator=torch.Generator().manual_seed(0))
    wanted = attention(x)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(x)
        attention.set_processor(type(transformer_class("sana")(**SMALL).transformer_blocks[0].attn1.processor)())
        theirs = attention(x)
    attention.set_processor(LinearProcessor())
    errors = [((found.float() - wanted).norm() / wanted.norm()).item() for found in (ours, theirs)]
    assert errors[0] < 0.02
    assert errors[0] < errors[1]


SMALL = {
    "num_layers": 1,
    "num_attention_heads": 1,
    "attention_head_dim": 4,
    "num_cross_attention_heads": 1,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 4,
    "caption_channels": 4,
}


@pytest.mark.parametrize("spec", [*SPECS, PIXART.model_copy(update=SD3)], ids=[*IDS, "sd3"])
def test_gradients_are_equal_in_all_modes_of_recomputation(spec: ModelSpec) -> None:
    gradients = []
    for mode in ("none", "blocks", "selective"):
        model: Denoiser = shaken(spec).train()
        names = set(model.state_dict())
        model.checkpoint_activations(mode)
        assert set(model.state_dict()) == names
        model(*(inputs() if spec.name != "sd3-tiny" else sd3_inputs())).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            assert (gradient is None) == (other[name] is None)
            assert gradient is None or torch.equal(gradient, other[name]), name


@pytest.mark.parametrize("spec", SPECS[:2], ids=IDS[:2])
def test_queries_keys_and_values_begin_as_parts_of_one_matrix(spec: ModelSpec) -> None:
    for block in build_model(spec, seed=0).net.transformer_blocks:
        for matrices, linears in (
            (3, (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v)),
            (2, (block.attn2.to_k, block.attn2.to_v)),
            (1, (block.attn1.to_out[0], block.attn2.to_q)),
        ):
            bound = (6 / (32 + 32 * matrices)) ** 0.5  # xavier, uniform
            for linear in linears:
                assert bound * 0.95 < linear.weight.abs().max() <= bound


def xavier_std(rows: int, columns: int) -> float:
    return (2 / (rows + columns)) ** 0.5


@pytest.mark.parametrize("sizes", [False, True])
def test_pixart_begins_as_published(sizes: bool) -> None:
    config = config_of("pixart-tiny", channels=4, out_channels=8, caption_width=40, base_size=8)
    more = {"attention_head_dim": 96, "cross_attention_dim": 192, "use_additional_conditions": sizes}
    net: Any = PixArt(config | more).net
    deviations = {
        "adaln_single.linear": 0.02,
        "adaln_single.emb.timestep_embedder.linear_1": 0.02,
        "adaln_single.emb.timestep_embedder.linear_2": 0.02,
        "caption_projection.linear_1": 0.02,
        "caption_projection.linear_2": 0.02,
        "transformer_blocks.1.attn1.to_out.0": xavier_std(192, 192),
        "transformer_blocks.1.attn1.to_q": xavier_std(192, 3 * 192),
        "transformer_blocks.1.attn2.to_q": xavier_std(192, 192),
        "transformer_blocks.1.attn2.to_v": xavier_std(192, 2 * 192),
        "transformer_blocks.1.attn2.to_out.0": 0,
        "transformer_blocks.0.ff.net.0.proj": xavier_std(192, 4 * 192),
        "transformer_blocks.0.ff.net.2": xavier_std(192, 4 * 192),
        "pos_embed.proj": xavier_std(4 * 2 * 2, 192),
        "proj_out": 0,
    }
    if sizes:
        deviations |= {
            f"adaln_single.emb.{kind}_embedder.linear_{number}": 0.02
            for kind in ("resolution", "aspect_ratio")
            for number in (1, 2)
        }
    check_deviations(net, deviations)
    assert net.scale_shift_table.std().item() == pytest.approx(192**-0.5, rel=0.15)


def check_deviations(net: Any, deviations: dict[str, float]) -> None:
    for name, wanted in deviations.items():
        module = net.get_submodule(name)
        assert module.weight.std().item() == pytest.approx(wanted, rel=0.06), name
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            assert module.bias.abs().max() == 0, name


def test_sana_begins_as_published() -> None:
    config = config_of("sana-tiny", channels=32, out_channels=32, caption_width=40, base_size=8)
    more = {"num_attention_heads": 6, "attention_head_dim": 32, "cross_attention_head_dim": 96}
    net: Any = Sana(config | more | {"cross_attention_dim": 192}).net
    assert net.caption_norm.weight.unique().tolist() == [pytest.approx(0.01)]
    deviations = {
        "time_embed.linear": 0.02,
        "time_embed.emb.timestep_embedder.linear_1": 0.02,
        "time_embed.emb.timestep_embedder.linear_2": 0.02,
        "caption_projection.linear_1": 0.02,
        "caption_projection.linear_2": 0.02,
        "transformer_blocks.1.attn1.to_k": xavier_std(192, 3 * 192),
        "transformer_blocks.1.attn1.to_out.0": xavier_std(192, 192),
        "transformer_blocks.1.attn2.to_k": xavier_std(192, 2 * 192),
        "transformer_blocks.1.attn2.to_out.0": xavier_std(192, 192),
        "patch_embed.proj": xavier_std(32, 192),
        "proj_out": xavier_std(192, 32),
    }
    check_deviations(net, deviations)


def test_published_sizes_have_their_number_of_parameters() -> None:
    with torch.device("meta"):
        sizes = {}
        for name in ("sana-600m", "sana-1600m", "pixart-sigma"):
            width = 4096 if name == "pixart-sigma" else 2304
            channels, out = (4, 8) if name == "pixart-sigma" else (32, 32)
            spec = ModelSpec(
                name=name, channels=channels, out_channels=out, num_classes=0, caption_width=width, base_size=32
            )
            sizes[name] = sum(p.numel() for p in build_model(spec, seed=0).parameters())
    assert sizes["sana-1600m"] == pytest.approx(1604e6, rel=0.01)  # 1648.48 M with what only its trainer has
    assert sizes["sana-600m"] == pytest.approx(592e6, rel=0.01)
    assert sizes["pixart-sigma"] == pytest.approx(611e6, rel=0.01)


@pytest.mark.parametrize("name", ["sana-tiny", "dit-s-2-text"])
def test_a_model_of_captions_trains_resumes_to_the_bit_and_samples(
    name: str, caption_store: LatentStore, tmp_path: Path
) -> None:
    def go(run: str, steps: int, *overrides: str) -> list[float]:
        losses = []
        recipe = train_recipe(name, f"run.steps={steps}", "schedule.kind=constant", *overrides)
        train(
            recipe,
            store_path=caption_store.path,
            run=tmp_path / run,
            device=CPU,
            report=lambda figures: losses.append(figures.loss),
            stop=StopRequest(),
        )
        return losses

    whole = go("whole", 4)
    assert go("parts", 2) + go("parts", 4) == whole
    for kind in ("checkpoint", "snapshot"):
        for path in sorted((tmp_path / f"whole/{kind}-4").glob("*.safetensors")):
            other = load_file(tmp_path / f"parts/{kind}-4/{path.name}")
            assert all(torch.equal(tensor, other[key]) for key, tensor in load_file(path).items())
    spec = json.loads((tmp_path / "whole/run.json").read_text())["spec"]
    assert ModelSpec.model_validate(spec) == model_spec(train_recipe(name), caption_store.spec, "store")
    snapshot = load_snapshot(tmp_path / "whole", CPU)
    caption = torch.from_numpy(caption_store.caption_embedding(0))[None].float()
    given = snapshot.conditioner(None, {"": Captions.of(list(caption))})
    latents = draw_latents(snapshot, given, size=(8, 8), seed=0, solver=Solver(steps=2, guidance=2.0))
    assert latents.shape == (1, 4, 8, 8)
    assert latents.isfinite().all()


def test_a_recipe_knows_how_many_text_encoders_its_model_reads() -> None:
    for family in FAMILIES.values():
        for name in family.sizes:
            assert train_recipe("pixart-tiny", f"model.name={name}").num_texts == max(1, len(family.texts))
