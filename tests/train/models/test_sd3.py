"""Stable Diffusion 3: diffusers' function, what it reads of three text encoders, graphs, sizes and first weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from making import ROOT, shaken, train_recipe
from three_texts import TEXTS, noise_store, text_spec
from torch import Tensor
from torch.nn.functional import pad

from leandit.datasets.batches.captions import Captions
from leandit.datasets.errors import LeanditError, RecipeError, RunError
from leandit.datasets.format.schema import TextSpec
from leandit.datasets.store import LatentStore
from leandit.train.config import OptimizerSection
from leandit.train.metrics.flops import forward_flops
from leandit.train.models.activation_checkpointing import checkpoint_blocks
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioner, Conditioning
from leandit.train.models.diffusers import sd3
from leandit.train.models.diffusers.families import FAMILIES, diffusers_config, transformer_class
from leandit.train.models.spec import ModelSpec, TextInput
from leandit.train.optim.build import build_optimizer
from leandit.train.run.fit import model_spec

pytestmark = pytest.mark.usefixtures("tiny_models")

INPUTS = (TextInput(name="a", tokens=7, width=8, pooled_width=6),)
INPUTS += (TextInput(name="b", tokens=7, width=12, pooled_width=10, beside=True),)
INPUTS += (TextInput(name="c", tokens=9, width=32),)
SPEC = ModelSpec(
    name="sd3-tiny", channels=4, out_channels=4, num_classes=0, caption_width=32, base_size=8, texts=INPUTS
)


def inputs(height: int = 8, width: int = 12) -> tuple[Tensor, Tensor, Conditioning]:
    generator = torch.Generator().manual_seed(0)
    x, captions = torch.randn((3, 4, height, width), generator=generator), torch.randn((3, 16, 32), generator=generator)
    given = Conditioning(captions=captions, pooled=torch.randn((3, 16), generator=generator))
    return x, torch.tensor([3.0, 500.0, 999.0]), given


@pytest.mark.parametrize("size", [(8, 8), (8, 12), (32, 6)])
@pytest.mark.parametrize("more", [{}, {"qk_norm": None, "dual_attention_layers": [], "pos_embed_max_size": 17}])
def test_the_function_is_that_of_diffusers(more: dict[str, Any], size: tuple[int, int]) -> None:
    config = diffusers_config(SPEC) | more
    plain, model = transformer_class("sd3")(**config).eval(), sd3.SD3(config).eval()
    with torch.no_grad():
        for parameter in plain.parameters():  # RMS norms too
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
        plain.pos_embed.pos_embed += 1  # a table of its own
    model.net.load_state_dict(plain.state_dict())
    x, t, given = inputs(*size)
    with torch.no_grad():
        wanted = plain(
            hidden_states=x, encoder_hidden_states=given.captions, pooled_projections=given.pooled, timestep=t
        ).sample
        found = model(x, t, given)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_muon_leaves_the_modulations_to_adamw() -> None:
    model = build_model(SPEC, seed=0)
    optimizer = build_optimizer(OptimizerSection(name="muon"), model)
    by_muon = {id(p) for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    names = {name.removeprefix("net.") for name, p in model.named_parameters() if id(p) in by_muon}
    assert not [name for name in names if "norm" in name]
    streams = {"attn.to_q", "attn.add_q_proj", "attn2.to_q", "ff.net.2", "ff_context.net.0.proj"}
    assert {f"transformer_blocks.0.{layer}.weight" for layer in streams} <= names


def test_clips_stand_beside_each_other_before_t5_and_all_are_dropped_together() -> None:
    texts = {
        one.name: Captions.packed(
            torch.randn(3 * one.tokens, one.width).half(),
            [one.tokens] * 3,
            pooled=torch.randn(3, one.pooled_width).half() if one.pooled_width else None,
        )
        for one in INPUTS
    }
    a, b, c = ((texts[name].padded, texts[name].pooled) for name in "abc")
    wanted = torch.cat([pad(torch.cat([a[0], b[0]], dim=-1), (0, 12)), c[0]], dim=-2)  # pyright: ignore
    pooled = torch.cat([a[1], b[1]], dim=-1)  # pyright: ignore
    conditioner = Conditioner(SPEC, torch.ones(16, 32), null_pooled=torch.full((16,), 2.0))
    narrow, given = conditioner(None, texts, widen=False), conditioner(None, texts)
    assert isinstance(narrow.captions, Tensor)
    assert isinstance(given.captions, Tensor)
    assert given.pooled is not None
    assert torch.equal(narrow.captions, wanted)
    assert torch.equal(given.captions, wanted.float())
    assert torch.equal(given.pooled, pooled.float())
    dropped = conditioner.drop(given, torch.tensor([False, True, False]))
    assert isinstance(dropped.captions, Tensor)
    assert dropped.pooled is not None
    assert torch.equal(dropped.captions[[0, 2]], given.captions[[0, 2]])
    assert torch.equal(dropped.pooled[[0, 2]], given.pooled[[0, 2]])
    assert (dropped.captions[1] == 1).all()
    assert (dropped.pooled[1] == 2).all()


def test_the_store_of_three_texts_fits_in_its_own_order_or_in_the_one_that_is_said(
    three_text_store: LatentStore, tmp_path: Path
) -> None:
    spec = model_spec(train_recipe("sd3-tiny"), three_text_store.spec, "store")
    assert [one.name for one in spec.texts] == ["clip_l", "clip_g", "t5"]
    assert (spec.caption_width, spec.joined_tokens, spec.pooled_width) == (32, 16, 16)
    other = noise_store(tmp_path / "store", texts={name: TEXTS[name] for name in ("t5", "clip_g", "clip_l")})
    said = 'conditioning.texts=["clip_l", "clip_g", "t5"]'
    assert model_spec(train_recipe("sd3-tiny", said), other.spec, "store") == spec
    with pytest.raises(RunError, match=r"CLIP-L from \[text.t5\].*no pooled vectors"):
        model_spec(train_recipe("sd3-tiny"), other.spec, "store")


RECIPES = [family.recipe for family in FAMILIES.values()]
CLIP, T5 = text_spec("clip", 7, 8, 6), text_spec("t5", 9, 32)
L_G_T5 = {"l": CLIP, "g": CLIP, "t5": T5}


@pytest.mark.parametrize(
    ("texts", "overrides", "words"),
    [
        (
            {"clip_l": CLIP, "t5": T5},
            [],
            r"reads 3 text encoders, CLIP-L, CLIP-G, T5, and there are \[text.clip_l\], \[text.t5\]\. 'leandit",
        ),
        ({"l": CLIP, "g": CLIP, "t5": text_spec("t5", 9, 32, full_length=False)}, [], r"\[text.t5\].*full_length"),
        (
            {"l": CLIP, "g": CLIP.model_copy(update={"output": "tokens", "pooled_width": 0}), "t5": T5},
            [],
            "CLIP-G.*both",
        ),
        (L_G_T5, ['conditioning.texts=["l", "g", "t6"]'], r'store .* has no \[text.t6\].*: "l", "g", "t5"'),
        (L_G_T5, ['conditioning.texts=["l", "l", "t5"]'], r'"l" is named twice.*CLIP-L, CLIP-G, T5, in this order'),
        (L_G_T5, ['conditioning.texts=["l", "g"]'], r"2 names. Expected 3: CLIP-L, CLIP-G, T5"),
        (L_G_T5 | {"more": T5}, [], r"\[text.more\]: name those to read, in this order, in conditioning.texts"),
    ],
)
def test_a_store_without_what_is_read_is_refused_with_what_to_do(
    texts: dict[str, TextSpec], overrides: list[str], words: str, tmp_path: Path
) -> None:
    store = noise_store(tmp_path / "store", texts=texts)
    with pytest.raises(LeanditError, match=words):
        model_spec(train_recipe("sd3-tiny", *overrides), store.spec, "store")


def test_other_models_refuse_stores_and_keys_of_several_texts(
    three_text_store: LatentStore, caption_store: LatentStore
) -> None:
    with pytest.raises(RunError, match=r"\[text\], and there are \[text.clip_l\]"):
        model_spec(train_recipe("pixart-tiny"), three_text_store.spec, "store")
    for model in ("pixart-tiny", "dit-s-4"):
        with pytest.raises(RecipeError, match="reads one text encoder at most"):
            model_spec(train_recipe(model, 'conditioning.texts=["a"]'), caption_store.spec, "store")
    with pytest.raises(RecipeError, match=r'has no \[text.a\]. Its text encoders: "" \(\[text\]\)\.'):
        model_spec(train_recipe("sd3-tiny", 'conditioning.texts=["a"]'), caption_store.spec, "store")


def test_all_that_a_store_lacks_is_said_at_once_with_the_recipe_of_one_that_fits(
    three_text_store: LatentStore, caption_store: LatentStore
) -> None:
    needed = train_recipe("sd3-tiny", "model.channels=16")
    with pytest.raises(
        RunError,
        match=r"and there are \[text\]; .*16 latent channels.*'leandit precompute sd3-512 --set images.resolution=64'",
    ) as e:
        model_spec(needed, caption_store.spec, "store")
    assert "conditioning.texts" not in str(e.value)  # one encoder cannot be three
    t5_first = list(reversed(three_text_store.spec.texts))
    store = three_text_store.spec.model_copy(update={"texts": t5_first})
    with pytest.raises(RunError, match=r"CLIP-L from \[text.t5\].*no pooled.*order in conditioning.texts; .*16 latent"):
        model_spec(needed, store, "store")
    assert all(
        (ROOT / f"precompute/recipes/{recipe}.toml").is_file() for recipe in (one.recipe for one in FAMILIES.values())
    )


def test_pictures_beyond_the_table_of_positions_are_refused(three_text_store: LatentStore) -> None:
    recipe = train_recipe("sd3-tiny")
    model_spec(recipe, three_text_store.spec, "store", ["256x256"])
    with pytest.raises(RunError, match=r"bucket '272x64'.*256 px"):
        model_spec(recipe, three_text_store.spec, "store", ["272x64"])
    with pytest.raises(RecipeError, match=r"34 x 4 tokens.*16 a side"):
        build_model(SPEC, seed=0)(*inputs(68, 8))


def test_a_folder_of_other_widths_is_refused(three_text_store: LatentStore, tmp_path: Path) -> None:
    config = diffusers_config(SPEC) | {"pooled_projection_dim": 24}
    transformer_class("sd3")(**config).save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match=r"pooled_projection_dim is 24, not 16"):
        model_spec(train_recipe("sd3-tiny", f"model.init_from={tmp_path / 'model'}"), three_text_store.spec, "store")


def test_both_streams_stay_float32_under_autocast() -> None:
    model, seen = shaken(SPEC), list[set[torch.dtype]]()
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append({kwargs[f"{name}hidden_states"].dtype for name in ("", "encoder_")}),
            with_kwargs=True,
        )
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs())
    assert seen == [{torch.float32}] * 3


def test_checkpointed_inputs_of_both_streams_go_to_the_host() -> None:
    from torch.autograd.graph import saved_tensors_hooks

    moved = list[torch.Size]()

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor.shape)
        return tensor

    model = shaken(SPEC).train()
    checkpoint_blocks(model.blocks, "blocks", to_cpu=lambda: saved_tensors_hooks(pack, lambda tensor: tensor))
    model(*inputs()).square().sum().backward()
    assert moved.count(torch.Size((3, 24, 32))) == moved.count(torch.Size((3, 16, 32))) == 3


def test_its_work_is_counted_with_joint_attention() -> None:
    tokens, captions, width = 24, 16, 32
    linear = 2 * tokens * width * width * 12 + 2 * captions * width * width * 12  # of a block with both streams
    attention = 4 * (tokens + captions) ** 2 * width
    found = forward_flops(SPEC, (8, 12), 16)
    assert found > 2 * (linear + attention)
    assert forward_flops(SPEC, (8, 12), 32) > found


def test_a_new_model_puts_out_zero_and_each_block_changes_nothing() -> None:
    model = build_model(SPEC, seed=0)
    x, t, given = inputs()
    assert not model(x, t, given).any()
    net: Any = model.net
    stream, captions, time = torch.randn(3, 24, 32), torch.randn(3, 16, 32), torch.randn(3, 32)
    for block in net.transformer_blocks[:-1]:
        encoder, hidden = block(stream, captions, time)
        assert torch.equal(hidden, stream)
        assert torch.equal(encoder, captions)
    assert net.time_text_embed.text_embedder.linear_2.weight.std().item() == pytest.approx(0.02, rel=0.1)
    bound = (6 / (4 * 32)) ** 0.5  # queries, keys and values as one matrix
    for name in ("to_q", "add_k_proj"):
        assert getattr(net.transformer_blocks[0].attn, name).weight.abs().max().item() == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("read", ["captions", "pooled", "none"])
def test_it_learns_from_tokens_and_from_pooled_vectors(read: str) -> None:
    """One of two latents, of which captions alone tell where all else is noise."""
    torch.manual_seed(0)
    model, latents = build_model(SPEC, seed=0), torch.stack([torch.ones(4, 8, 8), -torch.ones(4, 8, 8)])
    said = {"captions": torch.randn(2, 16, 32), "pooled": torch.randn(2, 16)}
    said |= {name: torch.zeros_like(value) for name, value in said.items() if name != read}
    given = Conditioning(**{name: value.repeat(8, *[1] * (value.ndim - 1)) for name, value in said.items()})
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), list[float]()
    for _ in range(60):
        x, t = latents.repeat(8, 1, 1, 1), 0.99 + 0.01 * torch.rand(16)
        noise, share = torch.randn(x.shape), t[:, None, None, None]
        loss = (model((1 - share) * x + share * noise, 1000 * t, given) - (noise - x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.8
    last = sum(losses[-5:]) / 5
    assert last > 0.9 if read == "none" else last < 0.6


@pytest.mark.parametrize(
    ("name", "millions"), [("sd3-medium", 2028.3), ("sd3.5-medium", 2243.2), ("sd3.5-large", 8056.6)]
)
def test_published_sizes_have_their_number_of_parameters(name: str, millions: float) -> None:
    texts = (TextInput(name="t", tokens=256, width=4096, pooled_width=2048),)
    spec = SPEC.model_copy(
        update={"name": name, "channels": 16, "out_channels": 16, "caption_width": 4096, "texts": texts}
    )
    with torch.device("meta"):
        model = build_model(spec, seed=0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
