"""Row checks: a damaged row never trains in silence, whatever the codec, dtype and kind of damage."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from faults import flip
from noise_store import make_store
from stores import Everything, bytes_in, copy_of, files_of, make_plain, small_shards

from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.findings import shard_place
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RecipeError


class Damaged(NamedTuple):
    """A store to be damaged, its intact copy and what one epoch reads of it."""

    intact: Path
    root: Path
    batches: list[list[bytes]]
    shards: list[str]


def epoch_of(root: Path, check: str = "first") -> list[list[bytes]]:
    """What one epoch reads."""
    loader = make_loader(LatentStore(root), global_batch=4, seed=1, prefetch=0, check=check)  # pyright: ignore
    return [list(bytes_in(batch)) for batch in loader]


def damaged(source: Path, work: Path) -> Damaged:
    """A copy of a store, to be damaged."""
    root = copy_of(source, work / "copy")
    shards = [path for path in files_of(root) if shard_place(path)]
    return Damaged(source, root, epoch_of(root), shards)


BLOSC = "store.codec=blosc"
STORES = {
    "float16": ("vae.flip=true",),
    "float32 means, int8 captions, blosc": ("store.dtype=float32", "vae.keep=mean", "store.text_dtype=int8", BLOSC),
    "bfloat16 captions, blosc": ("vae.flip=true", "store.text_dtype=bfloat16", BLOSC),
}


@pytest.fixture(scope="module", params=[*STORES, "everything"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    work = tmp_path_factory.mktemp("rows")
    if request.param == "everything":
        return damaged(request.getfixturevalue("everything").grown, work)
    with small_shards():
        return damaged(make_plain(work / "made", *STORES[request.param])[1], work)


def replace(path: Path, content: bytes | bytearray) -> None:
    """Give a file another content; threads that still read the one before keep it."""
    new = path.with_name("new")
    new.write_bytes(content)
    new.replace(path)


def damage_shard(store: Damaged, kind: str, path: str, rng: random.Random) -> None:
    """Flip a bit, overwrite some bytes, exchange rows of one size, or take another shard of the same size."""
    content = bytearray((store.root / path).read_bytes())
    if kind == "another shard":
        same = [one for one in store.shards if (store.intact / one).stat().st_size == len(content)]
        content = (store.intact / rng.choice(same)).read_bytes()
    elif kind == "swapped rows":
        half = rng.choice([one for one in (16, 64, 256, 1024, 2048, 4096) if 2 * one <= len(content)] or [1])
        content[: 2 * half] = content[half : 2 * half] + content[:half]
    else:
        at = rng.randrange(len(content))
        page = slice(at // 256 * 256, min(at // 256 * 256 + 256, len(content)))
        place, new = {
            "bit": (slice(at, at + 1), bytes([content[at] ^ 1 << rng.randrange(8)])),
            "byte": (slice(at, at + 1), bytes([rng.randrange(256)])),
            "random page": (page, rng.randbytes(page.stop - page.start)),
            "zeroed page": (page, bytes(page.stop - page.start)),
        }[kind]
        content[place] = new
    replace(store.root / path, content)


def test_an_error_names_the_damaged_shard_also_where_it_is_of_another_view_of_the_image(tmp_path: Path) -> None:
    with small_shards():
        _, root = make_plain(tmp_path, "vae.flip=true")
    path = "buckets/64x64/moments_flip/c/1/0/0/0"
    flip(root / path, 5)  # in the first row, which is checked when a shard is opened
    with pytest.raises(DamageError, match=f"'{path}'"):
        epoch_of(root)


KINDS = ("another shard", "bit", "byte", "random page", "swapped rows", "zeroed page")


@pytest.mark.parametrize(("seed", "count"), [(1, 12), pytest.param(2, 250, marks=pytest.mark.slow)])
def test_no_damage_of_a_shard_trains_in_silence(seed: int, count: int, store: Damaged) -> None:
    """After it an epoch reads the same values, or ends with an error."""
    silent, found, rng = list[str](), 0, random.Random(seed)
    for _ in range(count):
        kind, path = rng.choice(KINDS), rng.choice(store.shards)
        damage_shard(store, kind, path, rng)
        try:
            if epoch_of(store.root) != store.batches:
                silent.append(f"{kind} {path}")
        except DamageError:
            found += 1
        replace(store.root / path, (store.intact / path).read_bytes())
    assert silent == []
    assert found >= count // 4


def damage_row(store: LatentStore, record: int) -> str:
    """Change a byte within the row of a record; returns its shard."""
    path, first, _ = store.array(f"buckets/256x256/{store.spec.latent.array}").place(store.record_at(record).row)
    flip(store.path / path, 8 * (first + 5))
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    make_store(tmp_path / "s", {"256x256": 40}, token_counts=tuple(range(3, 13)), text_width=16, num_classes=4)
    return tmp_path / "s"


def test_the_error_names_record_bucket_row_shard_and_remedy(plain: Path) -> None:
    intact = epoch_of(plain)
    path = damage_row(LatentStore(plain), 7)
    record = LatentStore(plain).record_at(7)
    with pytest.raises(DamageError) as caught:
        epoch_of(plain)
    named = (f"record '{record.key}'", "bucket '256x256'", f"row {record.row}", path, "leandit verify STORE --repair")
    assert [part for part in named if part not in str(caught.value)] == []
    assert caught.value.exit_code == 4
    assert epoch_of(plain, "never") != intact  # without the check it is silent


def test_the_error_of_a_caption_names_it_and_its_shard_where_captions_are_read(plain: Path) -> None:
    store = LatentStore(plain)
    path, first, _ = store.text().arrays[0].place(int(store.text().starts[9]))
    flip(plain / path, 8 * (first + 3))
    with pytest.raises(DamageError, match=rf"caption 9 \('.*'\) of text encoder '' in shard '{path}'"):
        epoch_of(plain)
    assert len(list(make_loader(LatentStore(plain), global_batch=8, text="none"))) == 5


def test_every_array_of_a_batch_is_compared(everything: Everything, tmp_path: Path) -> None:
    store = LatentStore(copy_of(everything.grown, tmp_path / "copy"))
    arrays: dict[str, dict[str, np.ndarray]] = {}  # first rows of records or captions, by path, by kind of array
    for bucket in store.buckets:
        for path in [path for path in store.layouts if path.startswith(f"buckets/{bucket}/")]:
            arrays.setdefault(path.split("/", 2)[2], {})[path] = store.index(bucket).rows
    for text in map(store.text, store.texts):
        arrays |= {one.path: {one.path: text.starts} for one in (text.arrays if text.spec.has_tokens else ())}
        arrays |= {text.pooled.path: {text.pooled.path: text.pooled_rows}} if text.spec.pooled_width else {}
    assert len(arrays) > 12
    for paths in arrays.values():
        places = [store.array(path).place(row)[:2] for path, rows in paths.items() for row in sorted(rows.tolist())]
        opened = dict(reversed(places))  # opening a shard compares its first
        later = [(shard, first) for shard, first in places if first != opened[shard]]
        for shard, first in later:
            flip(store.path / shard, 8 * first)
        with pytest.raises(DamageError, match="not match its checksum"):
            epoch_of(store.path)
        for shard, first in later:
            flip(store.path / shard, 8 * first)
    assert epoch_of(store.path)


def test_a_batch_with_a_damaged_row_is_never_handed_out(plain: Path) -> None:
    damage_row(LatentStore(plain), 7)
    loader = make_loader(LatentStore(plain), global_batch=8, prefetch=0)
    read, batches = list[int](), iter(loader)
    for _ in range(7):  # the first error, and it stays so
        state = loader.state_dict()
        try:
            read += next(batches).records.tolist()
        except DamageError:
            break
    assert 7 not in read
    for _ in range(2):
        loader.load_state_dict(state)
        with pytest.raises(DamageError, match="does not match its checksum"):
            next(iter(loader))


def test_damage_after_the_first_read_of_a_row_is_found_by_always_alone(plain: Path) -> None:
    for check in ("first", "always"):
        loader = make_loader(LatentStore(plain), global_batch=8, prefetch=0, check=check)
        assert len(list(loader)) == 5
        damage_row(LatentStore(plain), 7)
        with pytest.raises(DamageError) if check == "always" else contextlib.nullcontext():
            assert len(list(loader)) == 5
        damage_row(LatentStore(plain), 7)  # undone
    with pytest.raises(RecipeError, match="check 'sometimes': expected one of first, always, never"):
        make_loader(LatentStore(plain), global_batch=8, check="sometimes")  # type: ignore[arg-type]
