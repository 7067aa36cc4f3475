"""A store against a dictionary of images: whatever is done in whatever order, every record reads as its image alone."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import start
from harness import IMAGE_SIZES, InProcessDecoders, compact_command, make_small, precompute_command, recipe, tree
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from making import encode, loaded_encoders, smooth_image, tree_digest, write_metadata
from stores import checked

from leandit.datasets.disk.files import EXIT_DIED, TEMPORARY_PREFIX, Failpoint
from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.maintenance.findings import HARMLESS
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.catalog import planned_revisions, sealed_revisions
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.store import LatentStore
from leandit.precompute import pipeline
from leandit.precompute.encoders import loading
from leandit.precompute.images import decoders
from leandit.precompute.images.pixels import crop_image
from leandit.precompute.planning.compare import Options

ALONE = ("vae.batch_size=1", "text.batch_size=1", "vae.keep=mean", "vae.flip=false")
NUMBERS = st.integers(1, 9)  # image 0 stays as it is: a first plan of which nothing is left to encode is refused
FAILPOINTS = st.integers(0, 320)  # about as many operations as a run of a few images does
FRACTION = st.floats(0, 1, exclude_max=True)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(loading, "load_encoders", lambda recipe, device: loaded_encoders(recipe.vae, recipe.text))
        patch.setattr(decoders, "Decoders", InProcessDecoders)
        patch.setattr(pipeline, "Decoders", InProcessDecoders)
        yield


@functools.cache
def latent_of(number: int, seed: int, bucket: str) -> bytes:
    """What the encoder gives for an image alone."""
    image = smooth_image(seed, *IMAGE_SIZES[number % 3])
    pixels = crop_image(image, bucket_size(bucket), "bucket")[None]
    moments = loaded_encoders(recipe().vae, recipe().text).image.encode(pixels)
    return moments[0, : moments.shape[1] // 2].astype(np.float16).tobytes()


@functools.cache
def embedding_of(text: str) -> bytes:
    """What the encoder gives for a caption alone."""
    encoder = loaded_encoders(recipe().vae, recipe().text).captions[""]
    return encoder.encode([text]).tokens[0].astype(np.float16).tobytes()


class StoreMachine(RuleBasedStateMachine):
    """A source, a store, and what the store must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.source, self.store = self.folder / "source", self.folder / "place/store"
        self.store.parent.mkdir()
        self.listed: dict[int, int] = {}  # number of each image -> seed of its content
        self.history: dict[int, set[int]] = {}  # every content that an image ever had
        self.captions: dict[int, str] = {}
        self.sealed: dict[int, dict[int, int | None]] = {}  # of each revision, the seeds stored; None: rejected
        self.whole = False  # the last precompute ran to its end
        self.clock = count(1_700_000_000)
        self.seeds = count(1000)

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- The source ---

    @initialize()
    def begin(self) -> None:
        (self.source / "images").mkdir(parents=True)
        for number in range(4):
            self._save(number)

    def _save(self, number: int) -> None:
        seed = next(self.seeds)
        self.listed[number] = seed
        self.history.setdefault(number, set()).add(seed)
        self.captions.setdefault(number, f"an image of number {number % 4}")
        smooth_image(seed, *IMAGE_SIZES[number % 3]).save(self.source / f"images/{number}.png")
        # A file that is written anew within the clock's resolution, with the same size, cannot be told by "stat".
        os.utime(self.source / f"images/{number}.png", (next(self.clock),) * 2)
        self._list()

    def _list(self) -> None:
        names = {number: f"images/{number}.png" for number in sorted(self.listed)}
        rows = ({"file_name": name, "captions": [self.captions[number], "an image"]} for number, name in names.items())
        write_metadata(self.source, rows)

    @rule(number=NUMBERS)
    def add_or_change_an_image(self, number: int) -> None:
        self._save(number)

    @rule(number=st.integers(0, 9))
    def describe_an_image_anew(self, number: int) -> None:
        if number in self.listed:
            self.captions[number] = f"an image described by {next(self.seeds) % 5}"
            self._list()

    @precondition(lambda self: len(self.listed) > 2)
    @rule(which=FRACTION)
    def remove_an_image(self, which: float) -> None:
        number = sorted(self.listed)[1 + int(which * (len(self.listed) - 1))]
        del self.listed[number]
        (self.source / f"images/{number}.png").unlink()
        self._list()

    # --- Precompute ---

    @rule(drop=st.booleans())
    def precompute(self, drop: bool) -> None:
        known = self._planned()
        report = encode(recipe(*ALONE), self.source, self.store, drop_gone=drop)
        self._is_complete(known, drop)
        assert report.manifest.revision == max(self.sealed)

    @rule(at=FAILPOINTS, drop=st.booleans())
    def precompute_that_dies(self, at: int, drop: bool) -> None:
        known = self._planned()
        command = precompute_command(self.source, *ALONE, options=Options(drop_gone=drop))
        outcome = start(lambda: command(self.store), failpoint=Failpoint("die", at)).wait()
        if outcome.code == 0:
            self._is_complete(known, drop)
            return
        assert outcome.code == EXIT_DIED, outcome.message
        self.whole = False
        if planned_revisions(self.store) or (self.store.is_dir() and sealed_revisions(self.store)):
            # A crash never looks like damage.
            wrong = [finding for finding in verify_store(self.store).findings if finding.cause not in HARMLESS]
            assert not wrong

    def _planned(self) -> set[int]:
        """Images that the newest plan knows, carried over or new."""
        planned = [*sealed_revisions(self.store), *planned_revisions(self.store)]
        if not planned:
            return set()
        keys = read_plan(self.store, max(planned)).records["key"].to_pylist()
        return {number_of(key) for key in keys}

    def _is_complete(self, known: set[int], drop: bool) -> None:
        """After a precompute that ran to its end: what is listed is stored, what is gone is kept unless dropped."""
        self.whole = True
        self._read_all()
        newest = self.sealed[max(self.sealed)]
        assert {number: newest.get(number) for number in self.listed} == self.listed
        assert set(newest) == (set(self.listed) if drop else known | set(self.listed))
        found = verify_store(self.store)
        assert found.findings == []
        assert not [name for name in tree(self.store) if TEMPORARY_PREFIX in name or "leases" in name]

    # --- Reading ---

    @rule()
    def read_every_revision(self) -> None:
        self._read_all()

    def _read_all(self) -> None:
        """Every complete revision reads as it did before; in a new one, every latent is that of a content."""
        for revision in sealed_revisions(self.store) if self.store.exists() else []:
            store = LatentStore(self.store, revision=revision)
            found = {number_of(row["key"]): seed_of(self, store, row) for row in store.records.to_pylist()}
            assert len(found) == store.records.num_rows, "a record is there twice"
            assert self.sealed.setdefault(revision, found) == found

    # --- Damage and repair ---

    @precondition(lambda self: self.whole)
    @rule(which=FRACTION, where=FRACTION, how=st.sampled_from(["flip", "cut", "empty", "gone"]))
    def damage_a_file_and_repair(self, which: float, where: float, how: str) -> None:
        before = tree(self.store)
        names = sorted(path.relative_to(self.store).as_posix() for path in self.store.rglob("*") if path.is_file())
        name = names[int(which * len(names))]
        damage(self.store / name, how, where)
        found = verify_store(self.store)
        assert found.damaged, f"'{name}' {how}: not found"
        assert name in {finding.path for finding in found.findings}, f"'{name}' {how}: {found.findings}"
        left, _ = checked(self.store, self.source, repair=True)
        if left.damaged:  # allowed only where the source no longer holds what was encoded
            stored = [(number, seed) for rows in self.sealed.values() for number, seed in rows.items()]
            lost = any(seed is not None and self.listed.get(number) != seed for number, seed in stored)
            assert lost, f"'{name}' {how}: {left.findings}"
            assert "buckets" in name.split("/"), f"'{name}' {how}: {left.findings}"
            write_tree(self.store, before)
        else:
            assert tree(self.store) == before, f"'{name}' {how}: repaired to other bytes"
        self._read_all()

    # --- Compaction ---

    @precondition(lambda self: self.whole)
    @rule(at=st.none() | FAILPOINTS)
    def compact(self, at: int | None) -> None:
        rows, before = self.sealed[max(self.sealed)], tree_digest(self.store)
        if at is not None:
            outcome = start(lambda: compact_command(self.store), failpoint=Failpoint("die", at)).wait()
            assert outcome.code in (0, EXIT_DIED), outcome.message
        outcome = start(lambda: compact_command(self.store)).wait()
        assert outcome.code == 0, outcome.message
        assert tree_digest(self.store) == before
        shutil.rmtree(self.store)
        self.store.with_name("compacted").rename(self.store)
        (left,) = sealed_revisions(self.store)
        self.sealed = {left: rows}
        self._read_all()
        assert verify_store(self.store).findings == []

    @invariant()
    def nothing_lies_beside_the_store(self) -> None:
        beside = [path.name for path in self.store.parent.iterdir() if path.name != "store"]
        assert all(name.startswith(TEMPORARY_PREFIX) for name in beside)


def number_of(key: str) -> int:
    return int(Path(key).stem)


def seed_of(machine: StoreMachine, store: LatentStore, row: dict[str, Any]) -> int | None:
    """Which content of an image a record holds, by its latent; None where it is rejected."""
    number = number_of(row["key"])
    if row["status"] == "rejected":
        assert row["reason"]
        return None
    record = store.record(row["key"])
    assert record.bucket
    latent = np.array(store.latents(record.bucket).read(record.row, record.row + 1)[0]).tobytes()
    seeds = [seed for seed in machine.history[number] if latent_of(number, seed, record.bucket) == latent]
    assert len(seeds) == 1, f"revision {store.revision}, '{row['key']}': its latent is that of no content it ever had"
    for which, caption in enumerate(record.caption_ids):
        text = store.captions["text"][caption].as_py()
        assert np.array(store.caption(record, which)).tobytes() == embedding_of(text), text
    return seeds[0]


def damage(path: Path, how: str, where: float) -> None:
    """Flip a bit of a file, cut it, empty it, or remove it."""
    content = bytearray(path.read_bytes())
    at = int(where * len(content))
    if how == "gone":
        path.unlink()
        return
    if how == "flip":
        content[at] ^= 1 << int(where * 1000) % 8
    path.write_bytes(content if how == "flip" else content[:at] if how == "cut" else b"")


def write_tree(store: Path, files: dict[str, bytes]) -> None:
    """Bring a store back as it was."""
    shutil.rmtree(store)
    for name, content in files.items():
        path = store.parent / name
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_bytes(content)


@pytest.mark.parametrize(
    ("examples", "steps"), [pytest.param(6, 12, id="sample"), pytest.param(150, 30, id="long", marks=pytest.mark.slow)]
)
def test_a_store_agrees_with_its_model_whatever_happens(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
