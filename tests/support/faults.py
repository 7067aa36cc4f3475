"""Stores to be damaged, ways to damage them, and a reader in a child process: what a user of a damaged store meets."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import CPU, SIZES, caption_recipe, encode, loaded_encoders, no_progress, smooth_image, write_metadata

from leandit.datasets.disk import files
from leandit.datasets.disk.files import EXIT_DIED, Failpoint
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.errors import LeanditError
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import Verification
from leandit.datasets.revisions.local import read_local_file
from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.loading import load_encoders
from leandit.precompute.remake import DeepReport, deep_check
from leandit.precompute.sources.several import SourcePaths
from leandit.tools.inspection.verify import check, loaded_runner

SHARD_ROWS = 2  # so that a store of a dozen images has a dozen shards
EXIT_REFUSED, EXIT_OTHER, EXIT_WRONG = 40, 41, 42  # of a child: an error of ours, any other, wrong numbers
REVISION_FILES = ("manifest.json", "records.parquet", "captions.parquet", "sources.parquet", "local.json")


@contextmanager
def small_shards() -> Iterator[None]:
    """Shards of two rows, encoders that are loaded once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", SHARD_ROWS)
        for module in ("pipeline", "encoders.loading"):
            patch.setattr(f"leandit.precompute.{module}.load_encoders", _cached_encoders)
        yield


def _cached_encoders(recipe: PrecomputeRecipe, _device: object) -> Any:
    if not (any(recipe.text) or recipe.features or recipe.companions):
        return loaded_encoders(recipe.vae, recipe.text)
    key = json.dumps(recipe.model_dump())
    if key not in _LOADED:
        _LOADED[key] = load_encoders(recipe, CPU)
    return _LOADED[key]


_LOADED: dict[str, Any] = {}


def checked(
    root: Path, source: SourcePaths | None = None, *overrides: str, deep: bool = False, repair: bool = False
) -> tuple[Verification, dict[str, Any]]:
    """``leandit verify``, with --deep or --repair, on a CPU."""
    how: dict[str, Any] = {"quick": False, "device": lambda: CPU, "overrides": list(overrides), "progress": no_progress}
    return check(root, deep=deep, repair=repair, source=source, **how)


def deep(root: Path, source: SourcePaths, **options: int) -> DeepReport:
    """What a deep check finds; of a small store, every record."""
    with loaded_runner(root, source, CPU, []) as runner:
        return deep_check(root, runner, **{"num_records": 64, "seed": 0} | options)


class ImageSource:
    """A source of captioned images that can be changed; two of its records are rejected, at scan and at decode."""

    def __init__(self, root: Path, count: int = 10) -> None:
        self.root, self._lines = root, {}
        (root / "images").mkdir(parents=True)
        for i in range(count):
            self.put(i)
        self.put(count)
        self.put(count + 1)
        (root / f"images/{count}.png").write_bytes(b"no image")
        whole = (root / f"images/{count + 1}.png").read_bytes()
        (root / f"images/{count + 1}.png").write_bytes(whole[: len(whole) // 2])
        self.write()

    def put(self, i: int, *, seed: int | None = None, words: str = "") -> None:
        """Add an image, or change it or its captions."""
        smooth_image(i if seed is None else seed, *SIZES[i % 3]).save(self.root / f"images/{i}.png")
        self._lines[i] = [f"a red {('circle', 'square')[i % 2]}", f"a big blue circle above a tiny green square{words}"]

    def drop(self, i: int) -> None:
        """Remove an image."""
        (self.root / f"images/{i}.png").unlink()
        del self._lines[i]

    def write(self) -> None:
        """Write the metadata."""
        rows = ({"file_name": f"images/{i}.png", "captions": texts} for i, texts in self._lines.items())
        write_metadata(self.root, rows)


def grow(images: ImageSource, recipe: PrecomputeRecipe, store: Path) -> None:
    """Make three revisions: new, changed and dropped images, other captions."""
    encode(recipe, images.root, store)
    images.drop(0)
    images.put(1, seed=101)
    for i in (20, 21, 22):
        images.put(i, words=" and a yellow star")
    images.write()
    encode(recipe, images.root, store, drop_gone=True)
    images.put(3, words=" and a white triangle")
    images.put(23)
    images.drop(4)
    images.write()
    encode(recipe, images.root, store, drop_gone=True)


def make_plain(root: Path, *overrides: str) -> tuple[ImageSource, Path]:
    """A source and its store of one revision."""
    images = ImageSource(root / "source")
    encode(caption_recipe(*overrides), images.root, root / "store")
    return images, root / "store"


def make_grown(root: Path, *overrides: str) -> tuple[ImageSource, Path]:
    """A source and its store of three revisions."""
    images = ImageSource(root / "source")
    grow(images, caption_recipe(*overrides), root / "store")
    return images, root / "store"


def make_added(root: Path, *overrides: str) -> tuple[ImageSource, Path]:
    """A source and its store of three revisions, of which every image is still there."""
    images, store = make_plain(root, *overrides)
    for first in (20, 30):
        for i in range(first, first + 3):
            images.put(i, words=f" and {first} yellow stars")
        images.write()
        encode(caption_recipe(*overrides), images.root, store)
    return images, store


def files_of(root: Path) -> list[str]:
    """Relative paths of all files, sorted."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; twice undoes it."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def _cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    path.rename(path.with_name(f"elsewhere-{path.name}"))
    path.symlink_to(path.with_name(f"elsewhere-{path.name}"))


# What may happen to a file, and the cause that a verification names.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (lambda path: flip(path, 4 * path.stat().st_size + 1), "content"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "content"),
    "half": (lambda path: _cut(path, path.stat().st_size // 2), "size"),
    "a byte less": (lambda path: _cut(path, path.stat().st_size - 1), "size"),
    "empty": (lambda path: _cut(path, 0), "size"),
    "gone": (Path.unlink, "missing"),
    "a folder": (_replace_by_folder, "missing"),
    "a link": (_replace_by_link, "link"),
}


def undo_damage(path: Path, content: bytes) -> None:
    """Bring a file back, whatever of DAMAGES has happened to it."""
    path.with_name(f"elsewhere-{path.name}").unlink(missing_ok=True)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def content(store: LatentStore) -> dict[str, Any]:
    """Everything that a store says of its records, by key; what does not depend on the revision that holds it."""
    found = {}
    texts = store.captions["text"].to_pylist()
    for i, row in enumerate(store.records.to_pylist()):
        record = store.record_at(i)
        said = {k: v for k, v in row.items() if k not in ("revision", "row", "caption_ids")}
        arrays = []
        if record.status == "stored":
            assert record.bucket is not None
            arrays = [np.array(store.latents(record.bucket)[record.row])]
            if store.spec.latent.flip:
                arrays.append(np.array(store.flipped_latents(record.bucket)[record.row]))
        captions = {texts[j]: store.caption_embedding(j).tobytes() for j in record.caption_ids}
        found[record.key] = (said, [array.tobytes() for array in arrays], captions)
    return found


def read_all(root: Path) -> dict[str, Any]:
    """Read a store as training does, and as tools do: all records, the null caption, a loader over an epoch."""
    store = LatentStore(root)
    loader = make_loader(store, global_batch=4, seed=1)
    with closing(loader.dataset):  # no thread reads on in what is cut next
        read = [(batch.latents, batch.labels, batch.captions, batch.caption_lengths) for batch in loader]
    batches = [tuple(part.numpy().tobytes() for part in parts) for parts in read]
    null = store.null_caption.tobytes() if store.spec.text else b""
    return {"content": content(store), "null": null, "batches": batches, "buckets": store.buckets}


def in_child(work: Callable[[], int | None]) -> int:
    """Run something in a forked child; its exit code, negative where a signal ended it."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        code = EXIT_OTHER
        try:
            code = work() or 0
        except LeanditError:
            code = EXIT_REFUSED
        except BaseException:  # noqa: BLE001 - a child of a test must not come back into pytest
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_after(faults: Iterable[tuple[str, Callable[[], None], Callable[[], None]]], root: Path, wanted: Any) -> int:
    """Read a store after each fault, in a child: exactly the right numbers or an error of ours, and never a signal.

    Args:
      faults: name of each, what brings it about, what undoes it.
    Returns: how many of them do not hinder a reader.
    """
    told = root.parent / "told"

    def work() -> int:
        rightly = 0
        for name, make, undo in faults:
            told.write_text(name)
            make()
            try:
                if read_all(root) != wanted:
                    return EXIT_WRONG
                rightly += 1
            except LeanditError:
                pass
            undo()
        told.write_text(str(rightly))
        return 0

    code = in_child(work)
    assert code == 0, f"after '{told.read_text()}' the reader ended with {code}"
    return int(told.read_text())


def dies_at(at: int, work: Callable[[], Any]) -> bool:
    """Run something in a child that dies at an I/O operation; False where it came to its end before."""

    def run() -> int:
        files.failpoint = Failpoint("die", at)
        work()
        return 0

    code = in_child(run)
    assert code in (0, EXIT_DIED), f"it ended with {code}"
    return code == EXIT_DIED


@dataclass
class DiesBefore(Failpoint):
    """Ends the process before the first operation of a name, such as "rename manifest.json"."""

    name: str = ""

    def step(self, operation: str, path: Path) -> bool:
        """As ``Failpoint.step``."""
        if f"{operation} {path.name}" == self.name:
            os._exit(EXIT_DIED)
        return super().step(operation, path)


def dies_before(name: str, work: Callable[[], Any]) -> None:
    """Run something in a child that dies before an I/O operation: all but the seal, before "rename manifest.json"."""

    def run() -> int:
        files.failpoint = DiesBefore(name=name)
        work()
        return 0

    code = in_child(run)
    assert code == EXIT_DIED, f"it ended with {code}"


def rewrite_recipe(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the recipe that a store of one revision names, in ``local.json`` and its second copy."""
    folder = store / "revisions/000001"
    local = read_local_file(store, 1)
    change(local.recipe)
    for path in (folder / "local.json", folder / "twin/local.json"):
        path.write_bytes(canonical_json(local.with_hash().model_dump()))


class CutOff(Exception):
    """Stands for the end of a process."""


def without_seal(work: Callable[[], Any]) -> None:
    """Run a precompute up to its seal, in this process: all is committed, and nothing of the seal is written."""

    def cut_off(*_: object) -> None:
        raise CutOff

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leandit.datasets.revisions.writer.seal_files", cut_off)
        with pytest.raises(CutOff):
            work()


def num_operations(work: Callable[[], Any]) -> int:
    """How many I/O operations something does, in this process."""
    files.failpoint = Failpoint()
    try:
        work()
        return len(files.failpoint.seen)
    finally:
        files.failpoint = None


def copy_of(store: Path, to: Path) -> Path:
    """A copy of a store, in place of what is there."""
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(store, to)
