"""Caption tokens in the dtype that is stored: rounding as FORMAT.md says, and back."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.batches.captions import Captions
from leandit.datasets.format.token_dtypes import (
    INT8_RANGE,
    ON_DISK,
    StoredTokens,
    is_storable,
    measure_quality,
    narrow,
    ordinary_cosines,
    widen,
)

FINITE = st.floats(-(2.0**127), 2.0**127, width=32)  # subnormal numbers too
TOKENS = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FINITE)


@given(TOKENS)
def test_bfloat16_rounds_as_torch_does(tokens: np.ndarray) -> None:
    stored = narrow(tokens, "bfloat16")
    assert stored.rows.dtype == np.uint16
    ours = torch.from_numpy(stored.rows).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(tokens).bfloat16())
    np.testing.assert_array_equal(widen(stored, "bfloat16"), ours.float().numpy())


@pytest.mark.parametrize(("width", "num_layers"), [(5, 1), (64, 1), (100, 1), (256, 1), (150, 3), (384, 3)])
def test_int8_rounds_each_group_by_its_own_scale(width: int, num_layers: int) -> None:
    rng = np.random.default_rng(0)
    tokens = (rng.normal(size=(7, width)) * 10.0 ** rng.integers(-3, 4, (7, 1))).astype(np.float32)
    tokens[2] = 0
    stored = narrow(tokens, "int8", num_layers)
    assert stored.scales is not None
    layer_width = width // num_layers
    assert (stored.rows.dtype, stored.scales.dtype) == (np.int8, np.float16)
    assert stored.scales.shape == (7, num_layers, -(-layer_width // 64))
    numbers = widen(stored, "int8")
    assert (numbers.shape, numbers.dtype) == ((7, width), np.float32)
    for layer in range(num_layers):  # FORMAT.md's words, a group at a time
        for group in range(-(-layer_width // 64)):
            first = layer * layer_width + 64 * group
            columns = slice(first, min(first + 64, (layer + 1) * layer_width))
            scales = stored.scales[:, layer, group].astype(np.float64)
            exact = np.abs(tokens[:, columns]).max(axis=1).astype(np.float64) / 127
            assert (scales >= exact * (1 - 1e-6)).all()
            below = np.nextafter(stored.scales[:, layer, group], np.float16(0)).astype(np.float64)
            assert ((below < exact) | (exact == 0)).all()  # the next float16 below is too small
            assert (np.abs(numbers[:, columns] - tokens[:, columns]) <= 0.5001 * scales[:, None]).all()
    assert not numbers[2].any()  # zeros stay zeros


@given(TOKENS)
def test_int8_holds_what_its_scales_hold(tokens: np.ndarray) -> None:
    stored = narrow(tokens, "int8")
    assert stored.scales is not None
    largest = np.abs(tokens).max(axis=1).astype(np.float64)
    assert is_storable(stored, "int8") == bool(largest.max() <= INT8_RANGE)
    fits = largest <= INT8_RANGE
    assert np.abs(stored.rows[fits].astype(int)).max(initial=0) <= 127
    numbers = widen(StoredTokens(stored.rows[fits], stored.scales[fits]), "int8")
    error = np.abs(numbers.astype(np.float64) - tokens[fits])
    step = np.maximum(largest[fits, None] / 127 * (1 + 2**-10), largest[fits, None] / 127 + 2**-24)
    assert (error <= 0.5001 * step).all()


@pytest.mark.parametrize("num_layers", [1, 3])
@given(data=st.data())
def test_a_batch_is_widened_like_a_caption(num_layers: int, data: st.DataObject) -> None:
    layer_width = data.draw(st.sampled_from([1, 9, 64, 70, 128]))
    elements = st.floats(-99, 99, width=32)
    tokens = data.draw(hnp.arrays(np.float32, (3, layer_width * num_layers), elements=elements, fill=elements))
    stored = narrow(tokens, "int8", num_layers)
    assert stored.scales is not None
    ours = Captions.packed(torch.from_numpy(stored.rows), [len(stored.rows)], torch.from_numpy(stored.scales))
    np.testing.assert_array_equal(ours.embeddings.numpy(), widen(stored, "int8"))


@pytest.mark.parametrize("dtype", ON_DISK)
def test_what_a_dtype_cannot_hold_is_seen(dtype: str) -> None:
    assert is_storable(narrow(np.array([[1e5, 0]], np.float32), dtype), dtype) == (dtype != "float16")
    assert is_storable(narrow(np.array([[1e7, 0]], np.float32), dtype), dtype) == (dtype in ("float32", "bfloat16"))
    assert is_storable(narrow(np.array([[1.0, 0]], np.float32), dtype), dtype)


def test_the_quality_is_the_worst_token_without_its_largest_number() -> None:
    tokens = np.array([[3, 4, 9], [1, 0, 9], [0, 0, 9]], np.float32)
    same = narrow(tokens, "float32")
    assert measure_quality(tokens, same, "float32") == (1.0, 0.0)
    turned = same._replace(rows=np.array([[3, 4, 7], [0.6, 0.8, 9], [0, 0, 9]], np.float32))
    cosine, error = measure_quality(tokens, turned, "float32")
    assert (cosine, error) == (pytest.approx(0.6), pytest.approx(2))  # 9 or 7 counts for the error alone
    lost = same._replace(rows=np.array([[3, 4, 9], [0, 0, 9], [0, 0, 9]], np.float32))
    assert measure_quality(tokens, lost, "float32") == (0.0, 1.0)


def test_the_cosine_of_each_layer_is_of_its_own_numbers() -> None:
    before = np.array([[1, 2, 3, 50, 1, 2, 3, 4]], np.float32)
    after = np.array([[1, 2, 3, 0, 0, 0, 0, 4]], np.float32)
    np.testing.assert_array_equal(ordinary_cosines(before, after, num_layers=2), [[1, 0]])
    equal = np.full((1, 200), 5, np.float32)  # no number is larger than others, so none is left out
    half = np.where(np.arange(200) < 100, equal, 0).astype(np.float32)
    np.testing.assert_allclose(ordinary_cosines(equal, half), [[0.5**0.5]])


@pytest.mark.parametrize("num_massive", [1, 3])
def test_numbers_beside_massive_activations_survive_and_the_measure_sees_one_scale_a_token(num_massive: int) -> None:
    """One channel at 300 standard deviations, as in the hidden states of language models before their final norm."""
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(64, 2560)).astype(np.float32)
    massive = rng.choice(2560, num_massive, replace=False)
    tokens[:, massive] = 300
    others = np.delete(tokens, massive, axis=1)

    def cosine(rows: np.ndarray) -> float:
        rows = np.delete(rows, massive, axis=1)
        return float(((rows * others).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(others, axis=1)).min())

    stored = narrow(tokens, "int8")
    numbers = widen(stored, "int8")
    assert cosine(numbers) > 0.98
    measured = measure_quality(tokens, stored, "int8")
    assert measured.min_cosine == pytest.approx(cosine(numbers), abs=2e-3)
    scale = 300 / 127
    one_scale = np.rint(tokens / scale).astype(np.float32) * scale
    assert cosine(one_scale) < 0.83
    assert ordinary_cosines(tokens, one_scale).min() < 0.83
    assert (np.delete(one_scale, massive, axis=1) == 0).mean() > 0.75
    assert ordinary_cosines(tokens, one_scale).min() == pytest.approx(cosine(one_scale), abs=0.02)
