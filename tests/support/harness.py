"""Crashes made to order: a small real precompute in a forked child that dies or fails at any operation, in 0.1 s."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from faults import Child, Outcome, start
from making import CPU, caption_recipe, encode, loaded_encoders, no_progress
from stores import ImageSource

from leandit.datasets.disk import files
from leandit.datasets.disk.files import EXIT_DIED, TEMPORARY_PREFIX, Failpoint
from leandit.datasets.disk.hashing import canonical_json, sha256_of, xxh3_file
from leandit.datasets.format import row_layout
from leandit.datasets.format.layout import CaptionLayout
from leandit.precompute import pipeline
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.images.decoder_child import answer
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning.compare import Options
from leandit.precompute.sharing import leases
from leandit.tools.export import compact

SHARD_ROWS = 2
IMAGE_SIZES = ((32, 32), (32, 32), (32, 48))  # height and width in px, in turn
RECIPE = (
    'images.buckets=["32x32", "32x48"]',
    "images.resolution=32",
    "vae.batch_size=2",
    "vae.keep=sample",  # its noise must not depend on who encodes
    "vae.flip=true",  # so a shard is two files
    "text.batch_size=4",
)


# --- A small precompute -----------------------------------------------------------------------------------------------


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Several shards from few images, and encoders that are loaded already; children inherit it."""
    patch.setattr(row_layout, "MAX_SHARD_ROWS", SHARD_ROWS)
    patch.setattr(CaptionLayout, "_shard_rows", lambda self: (16, 4))  # rows of a shard: at least max_tokens
    patch.setattr(leases, "EMPTY_SECONDS", 0.2)
    patch.setattr(pipeline, "load_encoders", lambda recipe, device: loaded_encoders(recipe.vae, recipe.text))
    _warm_up()


@functools.cache
def _warm_up() -> None:
    """One run in the parent: what is imported late is then there for all children."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "Decoders", InProcessDecoders)
        source, store = ImageSource(Path(folder) / "source", 2, IMAGE_SIZES), Path(folder) / "store"
        encode(recipe(), source.root, store)
        source.put(0, seed=77)
        encode(recipe(), source.root, store)
        compact_command(store)
    gc.collect()
    gc.freeze()  # a child that collects garbage would copy every page


def recipe(*overrides: str) -> PrecomputeRecipe:
    """Captions, two buckets, flipped latents, a drawn sample: what can depend on order or process is in it."""
    return caption_recipe(*RECIPE, *overrides)


class InProcessDecoders(Decoders):
    """The same function on the same bytes, without a child, which costs time."""

    def __init__(self, num_children: int, **limits: Any) -> None:
        super().__init__(2, **limits)

    def _try(self, job: dict[str, Any], data: bytes | None, *_: object) -> tuple[dict[str, Any], Any]:
        assert data is None
        return answer(job)


# --- Scenarios --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """One command on one store: what was there before, what it does, and the tree that must come out.

    ``whole``: tree of the undisturbed run, as ``comparable`` gives it; ``partial``: those of unfinished stores.
    """

    place: Path
    command: Callable[[Path], Any]
    before: Path | None = None
    change: Callable[[], None] | None = None
    whole: dict[str, bytes] = field(default_factory=dict, repr=False)
    partial: tuple[dict[str, bytes], ...] = field(default=(), repr=False)
    operations: tuple[str, ...] = field(default=(), repr=False)
    fsyncs: int = 0

    def start(
        self, store: Path, failpoint: Failpoint | None = None, *, own_session: bool = False, begin: float = 0.0
    ) -> Child:
        """Start the command on a store in a child, at a time of the monotonic clock, so that two can at once."""

        def work() -> Any:
            if self.change:
                self.change()
            while time.monotonic() < begin:
                time.sleep(0.0005)
            return self.command(store)

        return start(work, failpoint=failpoint, own_session=own_session)

    def run(self, store: Path, failpoint: Failpoint | None = None) -> Outcome:
        """Run the command on a store in a child, to its end."""
        return self.start(store, failpoint).wait()

    def undisturbed(self) -> Scenario:
        """The same scenario, with the tree and the operations of a run that nothing disturbs."""
        with self.store() as store:
            outcome = self.run(store)
            assert outcome.code == 0, outcome.message
            whole = comparable(tree(store))
        with self.store() as store:
            partial = [comparable(tree(store))]
            assert self.run(store, Failpoint("die", outcome.operations.index("rename manifest.json"))).died
            partial.append(comparable(tree(store)))
        done = replace(self, operations=outcome.operations, fsyncs=outcome.fsyncs)
        return replace(done, whole=whole, partial=tuple(partial))

    @contextmanager
    def store(self) -> Iterator[Path]:
        """A store as it was before, in a folder of its own: what strays beside the store is seen too."""
        folder = self.place / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self.before:
            shutil.copytree(self.before, folder / "store")
        yield folder / "store"
        shutil.rmtree(folder)


def precompute_command(
    source: Path,
    *overrides: str,
    other: PrecomputeRecipe | None = None,
    real_decoders: bool = False,
    options: Options | None = None,
) -> Callable[[Path], Any]:
    """A precompute of a source; returns the tasks that it committed and the root hash."""

    def command(store: Path) -> dict[str, Any]:
        committed = []
        commit = pipeline.StoreWriter.commit

        def counting(self: Any, part: str, shard: int, *args: Any, **kwargs: Any) -> int:
            committed.append([part, shard])
            return commit(self, part, shard, *args, **kwargs)

        pipeline.StoreWriter.commit = counting
        if not real_decoders:
            pipeline.Decoders = InProcessDecoders
        where = {"source_path": source, "store_path": store, "device": CPU}
        report = pipeline.precompute(other or recipe(*overrides), **where, progress=no_progress, options=options)
        return {"committed": committed, "root_hash": report.manifest.root_hash, "num_encoded": report.num_encoded}

    return command


def compact_command(store: Path) -> Any:
    """A compaction, into a store beside it."""
    return compact.compact(store, store.with_name("compacted"), progress=no_progress).root_hash


def tree(store: Path) -> dict[str, bytes]:
    """Everything in the folder that holds a store: every file with its bytes, every folder; nothing is left out."""
    root = store.parent
    return {
        path.relative_to(root).as_posix() + ("/" if path.is_dir() else ""): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def comparable(files: dict[str, bytes]) -> dict[str, bytes]:
    """A tree without what may differ between two runs: when each revision was planned."""

    def told(name: str, content: bytes) -> bytes:
        if not name.endswith("/local.json"):
            return content
        try:
            said = json.loads(content)
            if said.pop("sha256") != sha256_of(said):
                return content
        except (ValueError, AttributeError, KeyError):
            return content
        return canonical_json(said | {"planned_at": 0})

    return {name: told(name, content) for name, content in files.items()}


# --- Checks: each raises AssertionError, for the tests of the code and of its mutants ---------------------------------


def assert_whole(store: Path, scenario: Scenario, said: str) -> None:
    """The tree is that of an undisturbed run, to the byte, and nothing else is there."""
    found = comparable(tree(store))
    differing = sorted(
        name for name in found.keys() | scenario.whole.keys() if found.get(name) != scenario.whole.get(name)
    )
    what = [
        f"{name}: {'missing' if name not in found else 'stray' if name not in scenario.whole else 'other bytes'}"
        for name in differing
    ]
    assert not differing, f"{said}: {'; '.join(what[:5])} ({len(differing)} in all)"


def assert_true_so_far(store: Path, scenario: Scenario, said: str) -> None:
    """What an interrupted run left under a final name is final, and no record names what is not there.

    A file is whole; a commit record's files are there with its hashes; a manifest's are.
    """
    for name, content in comparable(tree(store)).items():
        _, _, path = name.partition("/")
        if TEMPORARY_PREFIX in name or path.startswith("leases/") or name.endswith("/"):
            continue
        known = [files[name] for files in (scenario.whole, *scenario.partial) if name in files]
        assert known, f"{said}: '{path}' is no file of the store"
        assert content in known, f"{said}: '{path}' is there with other bytes"
        if re.search(r"(^|/)commits/.*\.json$|(^|/)manifest\.json$", path):
            for entry in json.loads(content)["files"]:
                file = store.parent / name.partition("/")[0] / entry["path"]
                there = file.is_file() and xxh3_file(file) == entry["xxh3_128"]
                assert there, f"{said}: '{path}' names '{entry['path']}', which is not there as it says"


def check_dies(scenario: Scenario, points: Iterable[int], *, again_at: Callable[[int], int] | None = None) -> int:
    """Dying at some operations, then the same command again, gives the undisturbed tree; how many died.

    ``again_at``: the operation at which the second run dies too, from that of the first.
    """
    died = 0
    for at in points:
        with scenario.store() as store:
            said = f"died at operation {at} ({scenario.operations[at]})"
            outcome = scenario.run(store, Failpoint("die", at))
            assert outcome.died, f"{said}: ended with {outcome.code}: {outcome.message}"
            died += 1
            assert_true_so_far(store, scenario, said)
            if again_at:
                second = scenario.run(store, Failpoint("die", again_at(at)))
                assert second.code in (0, EXIT_DIED), f"{said}: the second run failed: {second.message}"
                assert_true_so_far(store, scenario, f"{said}, then at {again_at(at)}")
            outcome = scenario.run(store)
            assert outcome.code == 0, f"{said}: the same command again failed: {outcome.message}"
            assert_whole(store, scenario, said)
    return died


def check_fails(scenario: Scenario, kind: Any, points: Iterable[int]) -> int:
    """An I/O error at some operations ends the command cleanly, and the same command again gives the undisturbed tree.

    Returns: number of points at which the command failed.
    """
    failed = 0
    for at in points:
        with scenario.store() as store:
            said = f"{kind} at operation {at} ({scenario.operations[at]})"
            outcome = scenario.run(store, Failpoint(kind, at))
            if outcome.code == 0:  # nothing was needed after it that a full disk cannot give
                later = {operation.split()[0] for operation in scenario.operations[at:]}
                harmless = kind == "enospc" and not later & files.NEEDS_SPACE
                assert harmless, f"{said}: it was not noticed"
            else:
                failed += 1
                assert outcome.code == 1, f"{said}: ended with {outcome.code}"
                wanted = {"enospc": "ResourceError", "eio": "ResourceError"}[kind]
                assert wanted in outcome.error, f"{said}: {outcome.message}"
                assert kind != "enospc" or re.search(r"iB free", outcome.message), f"{said}: {outcome.message}"
                assert_true_so_far(store, scenario, said)
                left = [name for name in tree(store) if TEMPORARY_PREFIX in name or "leases" in name]
                assert not left, f"{said}: left behind {left}"
            outcome = scenario.run(store)
            assert outcome.code == 0, f"{said}: the same command again failed: {outcome.message}"
            assert_whole(store, scenario, said)
    return failed


def check_short_writes(scenario: Scenario) -> int:
    """A system that takes half of what it is given, at every write, changes nothing; returns the number of writes."""
    with scenario.store() as store:
        outcome = scenario.run(store, Failpoint("short"))
        assert outcome.code == 0, outcome.message
        assert_whole(store, scenario, "short writes")
    return sum(operation.startswith("write ") for operation in outcome.operations)


def check_lost_files(scenario: Scenario, *, step: int = 1, start: int = 0, only: str = "") -> int:
    """Where an unfinished store lost the content of a file, also of the plan, the next run writes the same again.

    Returns: number of files that were lost.
    """
    lost = 0
    last = scenario.operations.index("rename manifest.json")
    with scenario.store() as store:
        assert scenario.run(store, Failpoint("die", last)).died
        unfinished = store.parent.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(store, unfinished)
    cut_off = replace(scenario, before=unfinished)
    names = sorted(path.relative_to(unfinished).as_posix() for path in unfinished.rglob("*") if path.is_file())
    names = [name for name in names if TEMPORARY_PREFIX not in name and re.search(only, name)]
    cases = [(name, loss) for name in names for loss in ("empty", "zeros", "gone")]
    for name, loss in cases[start % step :: step]:
        with cut_off.store() as store:
            file, said = store / name, f"'{name}' {loss}"
            if loss == "gone":
                file.unlink()
            else:
                file.write_bytes(bytes(file.stat().st_size) if loss == "zeros" else b"")
            outcome = cut_off.run(store)
            lost += 1
            assert outcome.code == 0, f"{said}: {outcome.message}"
            assert_whole(store, scenario, said)
    return lost


def check_order(scenario: Scenario) -> int:
    """No name before its bytes, no record before its data, as a power cut needs it; returns the number of files."""
    names: list[str] = []  # of files that have their final name, durably
    state, in_folder = "idle", False
    for operation in scenario.operations:
        verb, _, name = operation.partition(" ")
        if (verb, state) == ("rename", "idle") and name.startswith(TEMPORARY_PREFIX):  # of a folder that is removed
            assert names[-1] == "manifest.json", f"'{operation}' before the manifest"
            continue
        follows = {
            "idle": {"create", "folder", "sync", "remove"} | ({"rename"} if in_folder else set()),
            "open": {"write", "sync"},
            "synced": {"rename"},
            "renamed": {"sync"},
        }[state]
        assert verb in follows, f"'{operation}' while the file before is {state}"
        if verb == "create":
            assert in_folder or name.startswith(TEMPORARY_PREFIX), f"'{operation}': under its final name"
            state = "open"
        elif verb == "folder":
            in_folder = name.startswith(TEMPORARY_PREFIX)
        elif verb == "rename":
            names.append(name)
            state, in_folder = "renamed", False
        elif verb == "sync":
            state = {"open": "idle" if in_folder else "synced", "renamed": "idle"}.get(state, state)
    assert state == "idle", f"the last file is {state}"
    asked = sum(operation.startswith("sync ") for operation in scenario.operations)
    assert scenario.fsyncs == asked, f"{asked} syncs were counted, {scenario.fsyncs} were asked for"
    tables = [i for i, name in enumerate(names) if name.endswith(".parquet")]
    records = [i for i, name in enumerate(names) if re.fullmatch(r"\d{6}\.json", name)]
    assert names[-1] == "manifest.json", f"the last file is '{names[-1]}'"
    assert max(records) < min(tables), "a table was written before the last commit record"
    assert names.index("manifest.json") == len(names) - 2, "files follow the manifest that are not its second copy"
    for first, record in pairwise([names.index("plan"), *records]):
        assert "0" in names[first:record], "a commit record without its shard before it"
        assert names[record - 1] == names[record].replace(".json", ".rows"), "a commit record without its results"
    return len(names)


# --- Changing the code ------------------------------------------------------------------------------------------------


def rewrite(owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Replace pieces of a function's source by others, in this process, wherever the function is known by its name.

    Raises: AssertionError: a piece is not there, so the mutant would be none.
    """
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in source, f"'{old}' is not in {name}: the code has changed, so must the mutant"
        source = source.replace(old, new, 1)
    names: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{source}", str(inspect.getsourcefile(function)), "exec")
    exec(code, function.__globals__, names)
    replace_function(owner, name, names[name])


def replace_function(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Put another function in the place of one, wherever it is known by its name, in this process."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    for module in list(sys.modules.values()):  # who imported it by name holds the old one
        if getattr(module, "__name__", "").startswith("leandit.") and vars(module).get(name) is old:
            setattr(module, name, new)
