"""The models behind one call: conditioning, what fits which store, and seeds."""

from __future__ import annotations

import pytest
import torch
from making import shaken, train_recipe

from leandit.datasets.batches.captions import CaptionBatch
from leandit.datasets.errors import LeanditError, RecipeError, RunError
from leandit.datasets.format.schema import TextEncoder
from leandit.datasets.store import LatentStore
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioner, Conditioning
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


def captions(seed: int, *lengths: int, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    embeddings = torch.randn(len(lengths), max(lengths), width, generator=torch.Generator().manual_seed(seed))
    for row, length in zip(embeddings, lengths, strict=True):
        row[length:] = 0
    return embeddings, torch.tensor(lengths)


def test_missing_and_dropped_labels_become_the_null_class() -> None:
    conditioner = Conditioner(LABELS, None)
    given = conditioner(torch.tensor([0, 2, -1, 1]), {})
    assert given.labels is not None
    assert given.labels.tolist() == [0, 2, 3, 1]
    dropped = conditioner.drop(given, torch.tensor([True, False, False, True]))
    assert dropped.labels is not None
    assert dropped.labels.tolist() == [3, 2, 3, 3]


def test_a_dropped_caption_becomes_the_first_rows_of_null_and_keeps_its_mask() -> None:
    null = torch.randn(16, 6)
    embeddings, lengths = captions(0, 2, 5, 3)
    conditioner = Conditioner(TEXT, null)
    given = conditioner(None, {"": CaptionBatch(embeddings, lengths)})
    assert given.caption_mask is not None
    assert given.caption_mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    dropped = conditioner.drop(given, torch.tensor([True, False, True]))
    assert dropped.captions is not None
    assert dropped.caption_mask is not None
    assert torch.equal(dropped.captions[0], null[:5])
    assert torch.equal(dropped.captions[1], embeddings[1])
    assert torch.equal(dropped.captions[2], null[:5])
    assert torch.equal(dropped.caption_mask, given.caption_mask)


def text_inputs(padding: int) -> Conditioning:
    embeddings, lengths = captions(3, 4, 7)
    padded = torch.nn.functional.pad(embeddings, (0, 0, 0, padding), value=9.0)  # a value that would be noticed
    return Conditioner(TEXT, torch.zeros(32, 6))(None, {"": CaptionBatch(padded, lengths)})


@pytest.mark.parametrize("spec", SPECS[1:], ids=IDS[1:])
def test_padding_beyond_a_caption_does_not_change_the_output(spec: ModelSpec) -> None:
    model = shaken(spec).double()
    x, t = torch.randn(2, 4, 8, 8, dtype=torch.float64), torch.tensor([10.0, 700.0], dtype=torch.float64)
    outputs = []
    for padding in (0, 5):
        given = text_inputs(padding)
        assert given.captions is not None
        assert given.caption_mask is not None
        given = Conditioning(captions=given.captions.double(), caption_mask=given.caption_mask)
        outputs.append(model(x, t, given))
    assert outputs[0].abs().max() > 1e-2
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS[1:], ids=IDS[1:])
def test_captions_and_labels_change_the_output(spec: ModelSpec) -> None:
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([10.0, 700.0])
    text, given = shaken(spec), text_inputs(0)
    assert given.captions is not None
    assert (text(x, t, given) - text(x, t, given._replace(captions=-given.captions))).abs().max() > 1e-4
    labels = shaken(LABELS)
    one, other = (labels(x, t, Conditioning(labels=torch.tensor([c, 1]))) for c in (0, 2))
    assert (one[0] - other[0]).abs().max() > 1e-4
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("size", [(8, 8), (4, 10)])
def test_each_model_makes_outputs_of_any_size_and_all_but_sana_start_at_zero(
    spec: ModelSpec, size: tuple[int, int]
) -> None:
    given = Conditioning(labels=torch.tensor([0, 1])) if spec is LABELS else text_inputs(0)
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
