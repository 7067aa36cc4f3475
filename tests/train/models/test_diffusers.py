"""PixArt, Sana and Stable Diffusion 3: the function of diffusers, what is read of captions, first weights, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from making import shake, shaken
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from leandit.datasets.batches.captions import Captions
from leandit.errors import RecipeError
from leandit.train.models import cross_attention
from leandit.train.models.blocks import checkpoint_blocks
from leandit.train.models.build import FAMILIES, build_model, diffusers_config, family_of, transformer_class
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.diffusers.adaln_single import LinearProcessor
from leandit.train.models.diffusers.adapters import narrow_frozen, trained_parameters
from leandit.train.models.spec import AdapterSpec, ModelSpec, TextInput

pytestmark = pytest.mark.usefixtures("tiny_models")
PIXART = ModelSpec(name="pixart-tiny", channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
SANA, DIT = (PIXART.model_copy(update={"name": name}) for name in ("sana-tiny", "DiT-S/2"))
TEXT = (TextInput(name="", tokens=7, width=6, pooled_width=5),)
SD3 = PIXART.model_copy(update={"name": "sd3-tiny", "texts": TEXT})
RAGGED = pytest.mark.parametrize("spec", [PIXART, SANA, DIT], ids=["pixart", "sana", "text-dit"])
MASK = torch.arange(7)[None] < torch.tensor([4, 1, 7])[:, None]
TIMES = torch.tensor([3.0, 500.0, 999.0])
CAPTIONS = torch.randn((3, 7, 6), generator=torch.Generator().manual_seed(1))


def packed(dtype: torch.dtype = torch.float32) -> Captions:
    return Captions.of([rows[real].to(dtype) for rows, real in zip(CAPTIONS, MASK, strict=True)])


def inputs(spec: ModelSpec = PIXART, height: int = 8, width: int = 12) -> tuple[Tensor, Tensor, Conditioning]:
    x = torch.randn((3, 4, height, width), generator=torch.Generator().manual_seed(0))
    if spec.texts:
        return x, TIMES, Conditioning(captions=CAPTIONS, pooled=CAPTIONS[:, 0, :5])
    return x, TIMES, Conditioning(captions=packed())


CONFIGS: list[tuple[ModelSpec, dict[str, Any]]] = [
    (PIXART, {}),
    (SANA, {}),
    (SANA, {"qk_norm": "rms_norm_across_heads", "interpolation_scale": 2}),
    (SD3, {}),
    (SD3, {"qk_norm": None, "dual_attention_layers": [], "pos_embed_max_size": 17}),
]


@pytest.mark.parametrize(("spec", "more"), CONFIGS)
@pytest.mark.parametrize("size", [(8, 8), (8, 12), (32, 6)])
def test_the_function_is_that_of_diffusers(spec: ModelSpec, more: dict[str, Any], size: tuple[int, int]) -> None:
    family, config = family_of(spec.name) or "", diffusers_config(spec) | more
    model = shake(FAMILIES[family](config)).eval()
    plain = transformer_class(family)(**config).eval()
    plain.load_state_dict(model.net.state_dict())
    x, t, given = inputs(spec, *size)
    options: dict[str, Any] = {"encoder_hidden_states": CAPTIONS, "pooled_projections": given.pooled}
    if family != "sd3":
        options = {"encoder_hidden_states": packed().padded, "encoder_attention_mask": MASK.float()}
    if family == "pixart":
        options["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    with torch.no_grad():
        wanted = plain(hidden_states=x, timestep=t, return_dict=False, **options)[0]
        found = model(x, t, given)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(x, t, given)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (rounded - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("spec", [PIXART, SANA, DIT, SD3], ids=["pixart", "sana", "text-dit", "sd3"])
def test_recomputation_changes_no_bit_keeps_less_and_selects_products(spec: ModelSpec) -> None:
    gradients, kept, flops = [], list[int](), list[int]()
    for mode in ("none", "blocks", "selective"):
        model, sizes = shaken(spec).train(), list[int]()
        checkpoint_blocks(model.blocks, mode)
        with FlopCounterMode(display=False) as counter:
            with saved_tensors_hooks(lambda one, sizes=sizes: (sizes.append(one.numel()), one)[1], lambda one: one):
                output = model(*inputs(spec))
            output.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        kept.append(sum(sizes))
        flops.append(counter.get_total_flops())
    assert kept[1] < kept[0] / 2
    assert flops[2] == flops[0] < flops[1]
    for other in gradients[1:]:
        assert gradients[0].keys() == other.keys()
        assert all(torch.equal(gradient, other[name]) for name, gradient in gradients[0].items())


@pytest.mark.parametrize("spec", [PIXART, SANA, DIT, SD3], ids=["pixart", "sana", "text-dit", "sd3"])
def test_the_residual_stream_is_bf16_only_where_asked_for_under_bf16(spec: ModelSpec) -> None:
    cases = ((torch.bfloat16, "float32"), (torch.bfloat16, "bf16"), (torch.float16, "bf16"), (None, "bf16"))
    for dtype, residual in cases:
        seen, model = set[torch.dtype](), shaken(spec)
        model.residual = residual

        def look(_: Any, given: tuple[Tensor, ...], named: dict[str, Any], seen: set[torch.dtype] = seen) -> None:
            seen.update(one.dtype for one in given[:1] or (named["hidden_states"], named["encoder_hidden_states"]))

        for block in list(model.blocks)[1:]:
            block.register_forward_pre_hook(look, with_kwargs=True)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            model(*inputs(spec))
        assert seen == {torch.bfloat16 if (dtype, residual) == (torch.bfloat16, "bf16") else torch.float32}


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


@RAGGED
def test_packed_captions_give_what_padded_ones_do(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model, results, masks = shaken(spec).double(), [], list[tuple[torch.dtype, torch.Size]]()
    attention = torch.nn.functional.scaled_dot_product_attention

    def watch(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        masks.extend([] if attn_mask is None else [(attn_mask.dtype, attn_mask.shape)])
        return attention(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    for is_packed in (False, True):
        if is_packed:
            monkeypatch.setattr(cross_attention, "has_varlen", lambda captions, head_width: True)
            monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
        output = model(inputs()[0].double(), TIMES, Conditioning(captions=packed(torch.float64)))
        gradients = torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)
        results.append([output, *gradients])
    assert results[0][0].abs().max() > 0.1
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert masks == [(torch.bool, torch.Size([3, 1, 1, 7]))] * 2


def test_linear_attention_has_sums_in_float32_and_products_in_16_bits_under_autocast() -> None:
    small = dict.fromkeys(("num_layers", "num_attention_heads", "num_cross_attention_heads"), 1)
    small |= dict.fromkeys(("attention_head_dim", "cross_attention_head_dim", "cross_attention_dim"), 4)
    attention = shaken(SANA).blocks[0].attn1
    x = 4 * torch.randn(2, 4096, 32, generator=torch.Generator().manual_seed(0))
    wanted = attention(x)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(x)
        attention.set_processor(type(transformer_class("sana")(**small).transformer_blocks[0].attn1.processor)())
        theirs = attention(x)
    attention.set_processor(LinearProcessor())
    errors = [((found.float() - wanted).norm() / wanted.norm()).item() for found in (ours, theirs)]
    assert errors[0] < min(0.02, errors[1])


def test_positions_have_the_published_scale() -> None:
    published = {"sana-1600m": {32: None, 64: 1.0, 128: 2.0}, "pixart-sigma": {32: 0.5, 64: 1, 256: 4}}
    for name, scales in published.items():
        for base, scale in scales.items():
            spec = PIXART.model_copy(update={"name": name, "base_size": base})
            assert diffusers_config(spec)["interpolation_scale"] == scale


def test_images_beyond_the_table_of_positions_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"34 x 4 tokens.*16 a side"):
        build_model(SD3, seed=0)(*inputs(SD3, 68, 8))


def xavier(rows: int, columns: int) -> float:
    return (2 / (rows + columns)) ** 0.5


WIDE = {"attention_head_dim": 96, "num_attention_heads": 2}
PACKED, PLAIN = xavier(192, 3 * 192), xavier(192, 192)  # queries, keys and values are initialised as one matrix
OF_PIXART = {"attn1.to_q": PACKED, "attn1.to_out.0": PLAIN, "attn2.to_q": PLAIN, "attn2.to_v": xavier(192, 2 * 192)}
OF_PIXART |= {"attn2.to_out.0": 0, "ff.net.0.proj": xavier(192, 4 * 192)}
OF_SANA = {"attn1.to_k": PACKED, "attn2.to_k": xavier(192, 2 * 192), "attn2.to_out.0": PLAIN}
OF_SD3 = {"attn.to_q": PACKED, "attn.add_k_proj": PACKED, "norm1.linear": 0, "norm1_context.linear": 0}
CROSSED = WIDE | {"cross_attention_dim": 192, "caption_channels": 40}
STARTS: dict[str, tuple[ModelSpec, dict[str, Any], dict[str, float], dict[str, float]]] = {  # in a block, and outside
    "adaln_single": (PIXART, CROSSED, OF_PIXART, {"pos_embed.proj": xavier(4 * 2 * 2, 192), "proj_out": 0}),
    "time_embed": (
        SANA,
        CROSSED | {"cross_attention_head_dim": 96, "in_channels": 32},
        OF_SANA,
        {"patch_embed.proj": xavier(32, 192), "proj_out": xavier(4, 192)},
    ),
    "time_text_embed": (SD3, WIDE | {"caption_projection_dim": 192}, OF_SD3, {"norm_out.linear": 0, "proj_out": 0}),
}


@pytest.mark.parametrize("embedder", STARTS)
def test_models_begin_as_published(embedder: str) -> None:
    torch.manual_seed(0)
    spec, more, in_block, outside = STARTS[embedder]
    net: Any = FAMILIES[family_of(spec.name) or ""](diffusers_config(spec) | more).net
    deviations = outside | {f"transformer_blocks.0.{name}": wanted for name, wanted in in_block.items()}
    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            assert not module.bias.any(), name
        if isinstance(module, torch.nn.Linear) and name.startswith((f"{embedder}.", "caption_projection.")):
            deviations[name] = 0.02
    for name, wanted in deviations.items():
        assert net.get_submodule(name).weight.std().item() == pytest.approx(wanted, rel=0.1), name
    if spec is SANA:
        assert net.caption_norm.weight.unique().tolist() == [pytest.approx(0.01)]
    if spec is PIXART:
        assert net.scale_shift_table.std().item() == pytest.approx(192**-0.5, rel=0.15)


PUBLISHED = {  # latent channels, widths of captions and pooled vectors, millions of parameters
    "sana-600m": (32, 2304, 0, 591.6),
    "sana-1600m": (32, 2304, 0, 1604.5),  # 1648.48 M with what only its trainer has
    "pixart-sigma": (4, 4096, 0, 610.9),
    "sd3-medium": (16, 4096, 2048, 2028.3),
    "sd3.5-medium": (16, 4096, 2048, 2243.2),
    "sd3.5-large": (16, 4096, 2048, 8056.6),
    "flux1-dev": (16, 4096, 768, 11901.4),
    "flux1-schnell": (16, 4096, 768, 11891.2),
    "flux2-klein-4b": (128, 7680, 0, 3875.5),
    "flux2-klein-9b": (128, 12288, 0, 9078.6),
    "flux2-dev": (128, 15360, 0, 32223.3),
    "qwen-image": (16, 3584, 0, 20430.4),
    "z-image": (16, 2560, 0, 6154.9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_their_number_of_parameters(name: str) -> None:
    channels, width, pooled_width, millions = PUBLISHED[name]
    texts = (TextInput(name="t", tokens=256, width=width, pooled_width=pooled_width),)
    sizes = {"channels": channels, "out_channels": 8 if name == "pixart-sigma" else channels, "caption_width": width}
    reads = {"texts": texts} if name.startswith(("sd3", "flux")) else {}
    with torch.device("meta"):
        model = build_model(PIXART.model_copy(update={"name": name, "base_size": 32, **sizes, **reads}), seed=0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=3e-4)


def adapted(spec: ModelSpec) -> Any:
    """A model with adapters and moved weights."""
    targets = FAMILIES[family_of(spec.name) or ""].adapted
    return shaken(spec.model_copy(update={"adapter": AdapterSpec(rank=2, alpha=2, targets=targets)}))


@pytest.mark.parametrize("spec", [PIXART, SANA, SD3], ids=["pixart", "sana", "sd3"])
def test_frozen_layers_of_16_bits_give_the_same_numbers_and_those_of_8_bits_nearly(spec: ModelSpec) -> None:
    outputs, gradients, frozen_bytes = {}, {}, {}
    for kind in ("float32", "bf16", "int8"):
        model = adapted(spec)
        narrow_frozen(model.blocks, kind, torch.bfloat16, sharded=False)
        with torch.autocast("cpu", torch.bfloat16):
            outputs[kind] = model(*inputs(spec))
        outputs[kind].float().square().mean().backward()
        found = [p.grad.flatten() for p in trained_parameters(model).values() if p.grad is not None]
        gradients[kind] = torch.cat(found)
        layers = [module for block in model.blocks for module in block.modules() if isinstance(module, torch.nn.Linear)]
        weights: list[Any] = [layer.weight for layer in layers if not layer.weight.requires_grad]
        frozen_bytes[kind] = sum(weight.qdata.nbytes if kind == "int8" else weight.nbytes for weight in weights)
    assert torch.equal(outputs["bf16"], outputs["float32"])
    assert torch.equal(gradients["bf16"], gradients["float32"])
    for one in (outputs, gradients):
        assert 0 < (one["int8"] - one["float32"]).norm() < 0.05 * one["float32"].norm()
    assert frozen_bytes["float32"] == 2 * frozen_bytes["bf16"] == 4 * frozen_bytes["int8"]


def test_narrow_weights_that_do_not_fit_are_refused_and_float32_products_keep_float32_weights() -> None:
    model = adapted(SANA)
    with pytest.raises(RecipeError, match=r"it is for run\.precision 'bf16', not 'fp16'"):
        narrow_frozen(model.blocks, "bf16", torch.float16, sharded=False)
    with pytest.raises(RecipeError, match="FSDP and DeepSpeed cannot shard 8-bit"):
        narrow_frozen(model.blocks, "int8", torch.bfloat16, sharded=True)
    narrow_frozen(model.blocks, "bf16", None, sharded=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
