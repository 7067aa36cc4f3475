"""The models behind one call: conditioning, what fits which store, and seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from making import shaken, train_recipe

from leandit.datasets.batches.captions import Captions
from leandit.datasets.errors import LeanditError, RecipeError, RunError
from leandit.datasets.format.schema import TextEncoder
from leandit.datasets.store import LatentStore
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioner, Conditioning, select
from leandit.train.models.layers import DiTOptions
from leandit.train.models.spec import ModelSpec
from leandit.train.run.fit import model_spec

LABELS = ModelSpec(name="DiT-S/2", channels=4, out_channels=8, num_classes=3, caption_width=0, base_size=8)
TEXT = ModelSpec(name="pixart-tiny", channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
SANA = TEXT.model_copy(update={"name": "sana-tiny"})
TEXT_DIT = TEXT.model_copy(update={"name": "DiT-S/2", "options": DiTOptions(qk_norm=True, positions="rope")})
SPECS = (LABELS, TEXT, SANA, TEXT_DIT)
IDS = ("labels", "pixart", "sana", "text-dit")


pytestmark = pytest.mark.usefixtures("tiny_models")


def captions(seed: int, *lengths: int, width: int = 6) -> Captions:
    generator = torch.Generator().manual_seed(seed)
    return Captions.of([torch.randn(length, width, generator=generator) for length in lengths])


def test_missing_and_dropped_labels_become_the_null_class() -> None:
    conditioner = Conditioner(LABELS, None)
    given = conditioner(torch.tensor([0, 2, -1, 1]), {})
    assert given.labels is not None
    assert given.labels.tolist() == [0, 2, 3, 1]
    dropped = conditioner.drop(given, torch.tensor([True, False, False, True]))
    assert dropped.labels is not None
    assert dropped.labels.tolist() == [3, 2, 3, 3]


def test_a_dropped_caption_becomes_the_first_rows_of_null_and_keeps_its_length() -> None:
    null, text = torch.randn(16, 6), captions(0, 2, 5, 3)
    conditioner = Conditioner(TEXT, null)
    given = conditioner(None, {"": text})
    dropped = conditioner.drop(given, torch.tensor([True, False, True])).captions
    assert isinstance(given.captions, Captions)
    assert isinstance(dropped, Captions)
    assert given.captions.lengths == dropped.lengths == (2, 5, 3)
    assert given.captions.mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert torch.equal(dropped.tokens, torch.cat([null[:2], text.tokens[2:7], null[:3]]))


def test_captions_are_taken_joined_and_padded_like_a_list() -> None:
    text = captions(1, 2, 5, 3, 1)
    rows = list(text.tokens.split(text.lengths))
    for images in (slice(1, 3), slice(2, 9), slice(4, 6), [3, 0, 0]):
        wanted = rows[images] if isinstance(images, slice) else [rows[image] for image in images]
        found = text[images]
        assert found.lengths == tuple(map(len, wanted))
        assert found.offsets.tolist() == np.cumsum([0, *found.lengths]).tolist()
        assert found.offsets.dtype == torch.int32
        assert torch.equal(found.tokens, torch.cat([*wanted, torch.zeros(0, 6)]))
    both = text[:2].followed_by(text[2:])
    assert torch.equal(both.tokens, text.tokens)
    assert torch.equal(both.offsets, text.offsets)
    assert torch.equal(text.padded, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))


def text_inputs() -> Conditioning:
    return Conditioner(TEXT, torch.zeros(32, 6))(None, {"": captions(3, 4, 7)})


@pytest.mark.parametrize("spec", SPECS[1:], ids=IDS[1:])
def test_the_output_of_an_image_depends_on_its_own_caption_alone(spec: ModelSpec) -> None:
    model, given = shaken(spec).double(), text_inputs()
    assert isinstance(given.captions, Captions)
    given = given._replace(captions=given.captions.with_tokens(given.captions.tokens.double()))
    x, t = torch.randn(2, 4, 8, 8, dtype=torch.float64), torch.tensor([10.0, 700.0], dtype=torch.float64)
    both, alone = model(x, t, given), model(x[:1], t[:1], select(given, slice(0, 1)))  # padded, and without padding
    assert both.abs().max() > 1e-2
    torch.testing.assert_close(both[:1], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS[1:], ids=IDS[1:])
def test_captions_and_labels_change_the_output(spec: ModelSpec) -> None:
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([10.0, 700.0])
    text, given = shaken(spec), text_inputs()
    assert isinstance(given.captions, Captions)
    other = given._replace(captions=given.captions.with_tokens(-given.captions.tokens))
    assert (text(x, t, given) - text(x, t, other)).abs().max() > 1e-4
    labels = shaken(LABELS)
    one, other = (labels(x, t, Conditioning(labels=torch.tensor([c, 1]))) for c in (0, 2))
    assert (one[0] - other[0]).abs().max() > 1e-4
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("size", [(8, 8), (4, 10)])
def test_each_model_makes_outputs_of_any_size_and_all_but_sana_start_at_zero(
    spec: ModelSpec, size: tuple[int, int]
) -> None:
    given = Conditioning(labels=torch.tensor([0, 1])) if spec is LABELS else text_inputs()
    output = build_model(spec, seed=0)(torch.randn(2, 4, *size), torch.tensor([1.0, 2.0]), given)
    assert output.shape == (2, spec.out_channels, *size)
    assert (output.abs().max() == 0) == (spec.name != "sana-tiny")


@pytest.mark.parametrize(
    ("name", "kind", "overrides", "error", "words"),
    [
        ("dit-s-4", "label", ["model.channels=16"], RunError, ("16", "4", "channels")),
        ("dit-s-4", "label", ["model.num_classes=2"], RunError, ("2", "3", "classes")),
        ("dit-s-4", "caption", [], RunError, ("labels", "none")),
        ("pixart-tiny", "label", [], RunError, ("captions", "none")),
        ("dit-s-4", "label", ["model.name=DiT-S/3"], RecipeError, ("DiT-S/3", "DiT-S/4", "pixart-sigma", "sana-600m")),
        ("sana-tiny", "label", [], RunError, ("captions", "none")),
        ("dit-s-4", "label", ["conditioning.kind=caption"], RunError, ("captions", "none")),
        ("pixart-tiny", "caption", ["conditioning.kind=label"], RecipeError, ("conditioning.kind", "captions")),
        ("sana-tiny", "caption", ["model.qk_norm=true"], RecipeError, ("model.qk_norm", "DiT alone")),
        ("sd3-tiny", "caption", ["run.residual=bf16"], RecipeError, ("run.residual", "sd3-tiny", "float32")),
    ],
)
def test_a_model_that_does_not_fit_the_store_is_refused(
    name: str,
    kind: str,
    overrides: list[str],
    error: type[LeanditError],
    words: tuple[str, ...],
    label_store: LatentStore,
    caption_store: LatentStore,
) -> None:
    store = label_store if kind == "label" else caption_store
    with pytest.raises(error) as caught:
        model_spec(train_recipe(name, *overrides), store.spec, str(store.path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_store_without_tokens_of_its_text_encoder_is_refused_as_what_it_is(caption_store: LatentStore) -> None:
    spec, recipe = caption_store.spec, train_recipe("pixart-tiny")
    assert spec.text
    assert spec.text_encoder
    pooled = spec.text.model_copy(update={"output": "pooled", "pooled_width": 8})
    with pytest.raises(RunError, match=r"takes the tokens of captions, .* has pooled vectors alone"):
        model_spec(recipe, spec.model_copy(update={"text": pooled}), "store")
    named = [TextEncoder(name="t5", spec=spec.text, encoder=spec.text_encoder)]
    other = spec.model_copy(update={"text": None, "text_encoder": None, "texts": named})
    with pytest.raises(RunError, match=r"the captions of \[text\], and there are \[text\.t5\] alone"):
        model_spec(recipe, other, "store")


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
    text = model_spec(train_recipe("pixart-tiny"), caption_store.spec, "store")
    assert text.takes_text
    assert (text.channels, text.out_channels) == (4, 4)
    assert caption_store.spec.text is not None
    assert text.caption_width == caption_store.spec.text.width
    larger = model_spec(train_recipe("dit-s-4", "model.num_classes=10"), label_store.spec, "store")
    assert larger.num_classes == 10


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator_alone(spec: ModelSpec) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build_model(spec, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    again, other = build_model(spec, seed=1).state_dict(), build_model(spec, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
