"""The models behind one call: conditioning and its null, seeds, and which model fits which store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from making import train_recipe
from stores import TEXTS, noise_store, text_spec
from torch.nn.functional import pad

from leandit.datasets.batches.captions import Captions
from leandit.datasets.store import LatentStore
from leandit.errors import LeanditError, RecipeError, RunError
from leandit.train.models.build import FAMILIES, build_model
from leandit.train.models.conditioning import Conditioner, Conditioning
from leandit.train.models.spec import DiTOptions, ModelSpec, TextInput
from leandit.train.run.fit import model_spec

LABELS = ModelSpec(name="DiT-S/2", channels=4, out_channels=8, num_classes=3, caption_width=0, base_size=8)
TEXT = ModelSpec(name="pixart-tiny", channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
SANA = TEXT.model_copy(update={"name": "sana-tiny"})
TEXT_DIT = TEXT.model_copy(update={"name": "DiT-S/2", "options": DiTOptions(qk_norm=True, positions="rope")})
THREE = (
    TextInput(name="a", tokens=7, width=8, pooled_width=6),
    TextInput(name="b", tokens=7, width=12, pooled_width=10, beside=True),
    TextInput(name="c", tokens=9, width=32),
)
SD3 = TEXT.model_copy(update={"name": "sd3-tiny", "caption_width": 32, "texts": THREE})
SPECS, IDS = (LABELS, TEXT, SANA, TEXT_DIT), ("labels", "pixart", "sana", "text-dit")

pytestmark = pytest.mark.usefixtures("tiny_models")


def captions(seed: int, *lengths: int, width: int = 6) -> Captions:
    generator = torch.Generator().manual_seed(seed)
    return Captions.of([torch.randn(length, width, generator=generator) for length in lengths])


def given_of(spec: ModelSpec) -> Conditioning:
    return Conditioning(captions=captions(3, 4, 7)) if spec.takes_text else Conditioning(labels=torch.tensor([0, 1]))


def test_missing_and_dropped_labels_become_the_null_class() -> None:
    conditioner = Conditioner(LABELS, None)
    given: Any = conditioner(torch.tensor([0, 2, -1, 1]), {})
    dropped: Any = conditioner.drop(given, torch.tensor([True, False, False, True]))
    assert (given.labels.tolist(), dropped.labels.tolist()) == ([0, 2, 3, 1], [3, 2, 3, 3])


def test_a_dropped_caption_becomes_the_first_rows_of_null_and_keeps_its_length() -> None:
    null, text = torch.randn(16, 6), captions(0, 2, 5, 3)
    conditioner = Conditioner(TEXT, null)
    given = conditioner(None, {"": text})
    dropped = conditioner.drop(given, torch.tensor([True, False, True])).valid_captions
    assert given.valid_captions.lengths == dropped.lengths == (2, 5, 3)
    assert torch.equal(dropped.tokens, torch.cat([null[:2], text.tokens[2:7], null[:3]]))


def test_a_dropped_caption_of_a_model_of_valid_tokens_becomes_the_tokens_of_null_alone() -> None:
    null, text = torch.randn(4, 6), captions(0, 2, 5, 3)
    conditioner = Conditioner(TEXT.model_copy(update={"pads_null": False}), null)
    given = conditioner(None, {"": text})
    dropped = conditioner.drop(given, torch.tensor([True, False, True])).valid_captions
    assert dropped.lengths == (4, 5, 4)
    assert dropped.offsets.tolist() == [0, 4, 9, 13]
    assert torch.equal(dropped.tokens, torch.cat([null, text.tokens[2:7], null]))
    kept = conditioner.drop(given, torch.tensor([False] * 3)).valid_captions
    assert torch.equal(kept.tokens, given.valid_captions.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_whether_its_null_is_padded(family: str) -> None:
    assert FAMILIES[family].pads_null == (family not in ("qwen-image", "z-image"))


def test_clips_stand_beside_each_other_before_t5_and_all_are_dropped_together() -> None:
    texts: Any = {
        one.name: Captions.packed(
            torch.randn(3 * one.tokens, one.width).half(),
            [one.tokens] * 3,
            pooled=torch.randn(3, one.pooled_width).half() if one.pooled_width else None,
        )
        for one in THREE
    }
    a, b, c = (texts[name] for name in "abc")
    wanted = torch.cat([pad(torch.cat([a.padded, b.padded], dim=-1), (0, 12)), c.padded], dim=-2)
    conditioner = Conditioner(SD3, torch.ones(16, 32), null_pooled=torch.full((16,), 2.0))
    narrow: Any = conditioner(None, texts, widen=False)
    given: Any = conditioner(None, texts)
    dropped: Any = conditioner.drop(given, torch.tensor([False, True, False]))
    assert torch.equal(narrow.captions, wanted)
    assert torch.equal(given.captions, wanted.float())
    assert torch.equal(given.pooled, torch.cat([a.pooled, b.pooled], dim=-1).float())
    assert torch.equal(dropped.captions[[0, 2]], given.captions[[0, 2]])
    assert torch.equal(dropped.pooled[[0, 2]], given.pooled[[0, 2]])
    assert (dropped.captions[1] == 1).all()
    assert (dropped.pooled[1] == 2).all()


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_models_take_any_size_start_at_zero_but_for_sana_and_depend_on_the_seed_alone(spec: ModelSpec) -> None:
    before = torch.get_rng_state()
    first = build_model(spec, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for size in ((8, 8), (4, 10)):
        output = first(torch.randn(2, 4, *size), torch.tensor([1.0, 2.0]), given_of(spec))
        assert output.shape == (2, spec.out_channels, *size)
        assert (output.abs().max() == 0) == (spec.name != "sana-tiny")
    again, other = build_model(spec, seed=1).state_dict(), build_model(spec, seed=2).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.state_dict().items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.state_dict().items())


# ------------------------------------------------------------------------------------------------------ model and store


@pytest.mark.parametrize(
    ("name", "kind", "overrides", "error", "words"),
    [
        ("dit-s-4", "label", ["model.channels=16"], RunError, ("16", "4", "channels")),
        ("dit-s-4", "label", ["model.num_classes=2"], RunError, ("2", "3", "classes")),
        ("dit-s-4", "caption", [], RunError, ("labels", "none")),
        ("dit-s-4", "label", ["model.name=DiT-S/3"], RecipeError, ("DiT-S/3", "DiT-S/4", "pixart-sigma", "sana-600m")),
        ("sana-tiny", "label", [], RunError, ("captions", "none")),
        ("pixart-tiny", "caption", ["conditioning.kind=label"], RecipeError, ("conditioning.kind", "captions")),
        ("sana-tiny", "caption", ["model.qk_norm=true"], RecipeError, ("model.qk_norm", "only of DiT")),
    ],
)
def test_a_model_that_does_not_fit_the_store_is_refused(
    name: str, kind: str, overrides: list[str], error: Any, words: tuple[str, ...], store_of: dict[str, LatentStore]
) -> None:
    store = store_of["dit-s-4" if kind == "label" else "pixart-tiny"]
    with pytest.raises(error) as caught:
        model_spec(train_recipe(name, *overrides), store.spec, str(store.path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_store_of_pooled_vectors_alone_is_refused_as_what_it_is(caption_store: LatentStore) -> None:
    spec = caption_store.spec
    pooled = spec.text.model_copy(update={"output": "pooled", "pooled_width": 8})
    with pytest.raises(RunError, match=r"takes the tokens of captions, .* has only pooled vectors"):
        model_spec(train_recipe("pixart-tiny"), spec.model_copy(update={"text": pooled}), "store")


def test_a_bucket_of_no_whole_number_of_patches_is_refused(label_store: LatentStore) -> None:
    latent = label_store.spec.latent
    fits, does_not = f"{4 * latent.downscale}x{8 * latent.downscale}", f"{4 * latent.downscale}x{5 * latent.downscale}"
    model_spec(train_recipe(), label_store.spec, "store", [fits])
    with pytest.raises(RunError, match=f"{does_not}.*is not divisible by the patch size"):
        model_spec(train_recipe(), label_store.spec, "store", [fits, does_not])


def test_the_model_is_derived_from_the_store(label_store: LatentStore, caption_store: LatentStore) -> None:
    labels = model_spec(train_recipe(), label_store.spec, "store")
    assert (labels.channels, labels.out_channels, labels.num_classes) == (4, 8, 3)
    assert labels.base_size == 32 // label_store.spec.latent.downscale
    assert model_spec(train_recipe("dit-s-4", "model.num_classes=10"), label_store.spec, "store").num_classes == 10
    text = model_spec(train_recipe("pixart-tiny"), caption_store.spec, "store")
    assert (text.channels, text.out_channels, text.caption_width) == (4, 4, caption_store.spec.text.width)


def test_three_texts_are_read_in_their_order_or_that_of_the_recipe(
    three_text_store: LatentStore, tmp_path: Path
) -> None:
    spec = model_spec(train_recipe("sd3-tiny"), three_text_store.spec, "store")
    assert [one.name for one in spec.texts] == ["clip_l", "clip_g", "t5"]
    assert (spec.caption_width, spec.joined_tokens, spec.pooled_width) == (32, 16, 16)
    other = noise_store(tmp_path / "store", texts={name: TEXTS[name] for name in ("t5", "clip_g", "clip_l")})
    said = 'conditioning.texts=["clip_l", "clip_g", "t5"]'
    assert model_spec(train_recipe("sd3-tiny", said), other.spec, "store") == spec


CLIP, T5 = text_spec("clip", 7, 8, 6), text_spec("t5", 9, 32)
L_G_T5 = {"l": CLIP, "g": CLIP, "t5": T5}


UNREADABLE = (
    ({"clip_l": CLIP, "t5": T5}, r"reads 3 .*, CLIP-L, CLIP-G, T5, but the store has \[text.clip_l\], \[text.t5\]\. '"),
    (L_G_T5 | {"t5": text_spec("t5", 9, 32, full_length=False)}, r"\[text.t5\].*full_length"),
    (L_G_T5 | {"g": CLIP.model_copy(update={"output": "tokens", "pooled_width": 0})}, "CLIP-G.*both"),
    (L_G_T5 | {"more": T5}, r"\[text.more\]: name those to read, in this order, in conditioning.texts"),
)
MISNAMED = (
    ('["l", "g", "t6"]', r"which has \[text.l\], \[text.g\], \[text.t5\]"),
    ('["l", "l", "t5"]', "expected CLIP-L, CLIP-G, T5, in this order"),
)


def test_a_store_without_what_is_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    cases: list[Any] = [(texts, (), words) for texts, words in UNREADABLE]
    cases += [(L_G_T5, (f"conditioning.texts={names}",), words) for names, words in MISNAMED]
    for number, (texts, overrides, words) in enumerate(cases):
        store = noise_store(tmp_path / f"{number}", texts=texts)
        with pytest.raises(LeanditError, match=words):
            model_spec(train_recipe("sd3-tiny", *overrides), store.spec, "store")


def test_other_models_refuse_several_texts(three_text_store: LatentStore, caption_store: LatentStore) -> None:
    with pytest.raises(RunError, match=r"\[text\], but the store has only \[text.clip_l\]"):
        model_spec(train_recipe("pixart-tiny"), three_text_store.spec, "store")
    for model, words in (("dit-s-4", "reads one text encoder at most"), ("sd3-tiny", r"which has \[text\]\.")):
        with pytest.raises(RecipeError, match=words):
            model_spec(train_recipe(model, 'conditioning.texts=["a"]'), caption_store.spec, "store")


def test_all_that_a_store_lacks_is_said_at_once(three_text_store: LatentStore, caption_store: LatentStore) -> None:
    t5_first = three_text_store.spec.model_copy(update={"texts": list(reversed(three_text_store.spec.texts))})
    for spec, words in (
        (caption_store.spec, r"but the store has \[text\]; .*16 latent channels.*'leandit precompute sd3-512'"),
        (t5_first, r"CLIP-L from \[text.t5\].*no pooled.*order in conditioning.texts; .*16 latent"),
    ):
        with pytest.raises(RunError, match=words):
            model_spec(train_recipe("sd3-tiny", "model.channels=16"), spec, "store")


def test_images_beyond_the_table_of_positions_are_refused(three_text_store: LatentStore) -> None:
    recipe = train_recipe("sd3-tiny")
    model_spec(recipe, three_text_store.spec, "store", ["256x256"])
    with pytest.raises(RunError, match=r"bucket '272x64'.*256 px"):
        model_spec(recipe, three_text_store.spec, "store", ["272x64"])
