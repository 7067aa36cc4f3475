"""Caption tokens in the dtype that is stored: rounding as FORMAT.md says, and back."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.batches.captions import Captions
from leandit.datasets.format.token_dtypes import ON_DISK, is_storable, narrow, quality, widen

FINITE = st.floats(-(2.0**127), 2.0**127, width=32)  # subnormal numbers too
TOKENS = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FINITE)
SMALL = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-99, 99, width=32))


@given(TOKENS)
def test_bfloat16_rounds_as_torch_does(tokens: np.ndarray) -> None:
    stored = narrow(tokens, "bfloat16")
    assert stored.rows.dtype == np.uint16
    ours = torch.from_numpy(stored.rows).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(tokens).bfloat16())
    np.testing.assert_array_equal(widen(stored, "bfloat16"), ours.float().numpy())


@given(TOKENS)
def test_int8_is_within_half_a_step_and_keeps_the_largest_value(tokens: np.ndarray) -> None:
    stored = narrow(tokens, "int8")
    assert stored.scales is not None
    assert (stored.rows.dtype, stored.scales.dtype) == (np.int8, np.float32)
    assert np.abs(stored.rows.astype(int)).max() <= 127
    largest = np.abs(tokens).max(axis=1)
    normal = largest > 1e-35  # below, the scale itself is a subnormal number
    assert (np.abs(stored.rows[normal].astype(int)).max(axis=1) == 127).all()
    error = np.abs(widen(stored, "int8").astype(np.float64) - tokens)
    assert (error[normal] <= 0.5001 * largest[normal, None].astype(np.float64) / 127).all()
    assert not widen(stored, "int8")[largest == 0].any()  # zero stays zero


@given(SMALL)
def test_a_batch_is_widened_like_a_caption(tokens: np.ndarray) -> None:
    stored = narrow(tokens, "int8")
    assert stored.scales is not None
    ours = Captions.packed(torch.from_numpy(stored.rows), [len(stored.rows)], torch.from_numpy(stored.scales))
    np.testing.assert_array_equal(ours.embeddings.numpy(), widen(stored, "int8"))


@pytest.mark.parametrize("dtype", ON_DISK)
def test_what_a_dtype_cannot_hold_is_seen(dtype: str) -> None:
    assert is_storable(narrow(np.array([[1e5, 0]], np.float32), dtype), dtype) == (dtype != "float16")
    assert is_storable(narrow(np.array([[1.0, 0]], np.float32), dtype), dtype)


def test_the_quality_is_the_worst_token() -> None:
    tokens = np.array([[3, 4], [1, 0], [0, 0]], np.float32)
    same = narrow(tokens, "float32")
    assert quality(tokens, same, "float32") == (1.0, 0.0)
    turned = same._replace(rows=np.array([[3, 4], [0.6, 0.8], [0, 0]], np.float32))
    cosine, error = quality(tokens, turned, "float32")
    assert (cosine, error) == (pytest.approx(0.6), pytest.approx(0.8))
    lost = same._replace(rows=np.array([[3, 4], [0, 0], [0, 0]], np.float32))
    assert quality(tokens, lost, "float32") == (0.0, 1.0)
