"""Files of safetensors that are written in parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from leandit.train.weights import checkpoint, tensor_file
from leandit.train.weights.tensor_file import parts_of

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


def tensors() -> dict[str, Tensor]:
    """Each dtype, twice, in another order than that of a file; with odd names and shapes."""
    torch.manual_seed(0)
    made = {
        f"{k}.{dtype}": (torch.rand(2, 3) * 9).to(dtype) for k in "ba" for dtype in [*FLOATS, *INTEGERS, torch.bool]
    }
    return made | {
        'é"\n\\': torch.ones(()),
        "empty": torch.ones(0, 4),
        "turned": torch.rand(5, 7).T,
        "part": torch.rand(9, 9)[2:4],
        "large": torch.rand(400, 3),
    }


@pytest.mark.parametrize("block_bytes", [1, 500, 4800, 1 << 24])
def test_the_bytes_are_those_of_safetensors(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block_bytes)
    wanted = save({name: tensor.contiguous() for name, tensor in tensors().items()})
    assert b"".join(bytes(part) for part in parts_of(tensors())) == wanted
    assert b"".join(parts_of({})) == save({})


def test_large_tensors_are_not_copied_and_small_ones_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 4000)
    large = torch.zeros(1000)
    parts = list(parts_of({"large": large, **{f"small {n:02}": torch.zeros(250) for n in range(9)}}))
    assert [isinstance(part, memoryview) for part in parts] == [False, True, False, False, False]
    large.fill_(1)
    assert bytes(parts[1]) == bytes(large.numpy())
    assert [len(part) for part in parts[1:]] == [4000, 4000, 4000, 1000]


def test_the_check_of_what_was_written_reads_the_disk_not_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda path: order.append("read") or read(path))

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        assert (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        order.append(name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    checkpoint.save("checkpoint", tmp_path, 3, {name: tensors() for name in ("model", "ema")}, {})
    assert order == ["model.safetensors", "ema.safetensors", "read"]
