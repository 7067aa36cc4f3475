"""Fixtures: small stores, made by the real pipeline with the small encoders that ship with leandit."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import making
import pytest
import torch
from faults import without_seal
from filelock import FileLock
from forked import start_server, stop_server
from hypothesis import HealthCheck, settings
from noise_store import make_store
from stores import Everything, copy_of, everything_in, make_everything, make_grown, noise_store, small_shards

from leandit.datasets.format import row_layout
from leandit.datasets.format.row_layout import MAX_SHARD_ROWS
from leandit.datasets.format.schema import FeatureSpec
from leandit.datasets.store import LatentStore
from leandit.precompute import pipeline
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.pipeline import Report
from leandit.tools.cli.main import main

# Who starts decoders by this name; tests of what a start or an end does make their own.
USERS = (
    "precompute.pipeline",
    "precompute.images.decoders",  # where it is imported late
    "tools.inspection.images",
    "tools.plan.dry_run",
    "tools.plan.precompute_cost",
    "tools.sample.evaluation.images",
)


def keep_decoders(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Until the iterator goes on, decoders that worked well are kept for the next who wants such."""
    kept: dict[Any, list[Decoders]] = {}
    owner = os.getpid()

    @contextmanager
    def borrowed(num_children: int, **limits: Any) -> Iterator[Decoders]:
        limits = Decoders.__init__.__kwdefaults__ | limits
        key = os.getcwd(), num_children, *limits.values()
        idle = kept.setdefault(key, []) if os.getpid() == owner else []
        decoders = idle.pop() if idle else Decoders(num_children, **limits)
        try:
            yield decoders
        except BaseException:
            decoders.close()
            raise
        if os.getpid() == owner:
            idle.append(decoders)
        else:
            decoders.close()

    for user in USERS:
        patch.setattr(importlib.import_module(f"leandit.{user}"), "Decoders", borrowed)
    yield
    for decoders in [one for idle in kept.values() for one in idle]:
        decoders.close()


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test touches a network
torch.set_num_threads(1)  # the tests run in two processes
gc.get_freeze_count = lambda: 1  # each run of a training would count a million objects, for a tenth of a second


def pytest_configure(config: pytest.Config) -> None:
    """Temporary folders lie in memory where 4 GiB are free there, so that what is made durable is not waited for."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


# Property tests look at few examples here; "make test-long" looks at many.
for name, count in {"default": 20, "long": 300}.items():
    settings.register_profile(
        name, max_examples=count, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") == "no":  # this process runs tests, not only others that do
        start_server()


def pytest_sessionfinish() -> None:
    stop_server()


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """The command changes how signals are handled, and what is ignored stays so in processes that are started later."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """DeepSpeed sets variables of its rank, by which a later test would take itself for one of several."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_is_no_garbage() -> None:
    """A precompute that drops an encoder collects garbage, and would look at every object of torch, for a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _kept_decoders() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        yield from keep_decoders(patch)


@pytest.fixture(scope="module")
def tiny_models() -> Iterator[None]:
    """DiT-S and the "-tiny" models shrunk to milliseconds a step."""
    with pytest.MonkeyPatch.context() as patch:
        making.shrink_models(patch)
        yield


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Shards of two rows, encoders that are loaded once."""
    with small_shards():
        yield


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders, which a precompute takes a second to load, are loaded once."""
    monkeypatch.setattr(
        pipeline, "load_encoders", lambda recipe, device: making.loaded_encoders(recipe.vae, recipe.text)
    )


@pytest.fixture
def leandit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> making.Leandit:
    """Run a command in this process, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("LEANDIT_QUIET", "")  # a command sets it for its own processes; put back after the test

    def run(*arguments: object) -> making.Ended:
        monkeypatch.setattr(sys, "argv", ["leandit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return making.Ended(int(end.value.code or 0), *capsys.readouterr())

    return run


Encode = Callable[..., Report]


@pytest.fixture
def encode() -> Encode:
    """Precompute with a recipe, a source and a store path."""
    return making.encode


Golden = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Makes a folder of a name once a session, in whichever process of it comes first; do not change what is in it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = root / f"golden-{name}", root / f"golden-{name}.done"
        with FileLock(root / f"golden-{name}.lock"):
            if not done.exists():
                with pytest.MonkeyPatch.context() as patch:  # a fixture of the first test may have made shards small
                    patch.setattr(row_layout, "MAX_SHARD_ROWS", MAX_SHARD_ROWS)
                    make(folder)
                done.touch()
        return folder

    return made


def golden_store(golden: Golden, name: str, recipe: PrecomputeRecipe, source: Path) -> LatentStore:
    """A store of a source with the shipped encoders."""
    return LatentStore(golden(name, lambda path: making.encode(recipe, source, path)))


@pytest.fixture(scope="session")
def class_folder(golden: Golden) -> Path:
    """3 classes of 5 images."""
    return golden("classes", lambda folder: making.make_class_folder(folder / "train")) / "train"


@pytest.fixture(scope="session")
def caption_folder(golden: Golden) -> Path:
    """14 captioned images in three aspect ratios."""
    return golden("captions", lambda folder: making.make_caption_folder(folder / "images")) / "images"


@pytest.fixture(scope="session")
def label_store(class_folder: Path, golden: Golden) -> LatentStore:
    """A store of 15 labelled records, one bucket 32x32."""
    return golden_store(golden, "label-store", making.label_recipe(), class_folder)


@pytest.fixture(scope="session")
def caption_store(caption_folder: Path, golden: Golden) -> LatentStore:
    """A store of 14 captioned records in three buckets."""
    return golden_store(golden, "caption-store", making.caption_recipe(), caption_folder)


@pytest.fixture(scope="session")
def unsealed_store(caption_folder: Path, golden: Golden) -> Path:
    """The caption store with all its shards, before its seal."""
    return golden(
        "unsealed", lambda path: without_seal(lambda: making.encode(making.caption_recipe(), caption_folder, path))
    )


@pytest.fixture
def copied(caption_store: LatentStore, tmp_path: Path) -> Path:
    """A copy of the caption store that a test may damage."""
    return copy_of(caption_store.path, tmp_path / "copied")


@pytest.fixture
def unfinished(unsealed_store: Path, tmp_path: Path) -> Path:
    """A copy of the caption store before its seal that a test may damage."""
    return copy_of(unsealed_store, tmp_path / "unfinished")


@pytest.fixture(scope="session")
def grown_store(golden: Golden) -> Path:
    """A store of three revisions in small shards: images new, changed and dropped, other captions."""

    def make(folder: Path) -> None:
        with small_shards():
            make_grown(folder)

    return golden("grown", make) / "store"


@pytest.fixture(scope="session")
def three_text_store(golden: Golden) -> LatentStore:
    """A store of noise, 15 records in two buckets, with the captions that SD3 reads."""
    return LatentStore(golden("three-texts", noise_store))


@pytest.fixture(scope="session")
def store_of(
    label_store: LatentStore, caption_store: LatentStore, three_text_store: LatentStore
) -> dict[str, LatentStore]:
    """What each small model trains on."""
    captioned = dict.fromkeys(("pixart-tiny", "sana-tiny"), caption_store)
    return {"dit-s-4": label_store, "sd3-tiny": three_text_store, **captioned}


@pytest.fixture(scope="session")
def feature_store(golden: Golden) -> LatentStore:
    """24 records of 32 px with 2 x 2 tokens of an image feature, and their class tokens, in int8."""
    sizes: dict[str, Any] = {"width": 6, "patch_px": 14, "resolution_px": 28, "images_px": 32}
    dino = FeatureSpec(output="both", layer=-1, dtype="int8", **sizes)
    noise = {"num_classes": 3, "seed": 1, "features": {"dino": dino}}
    return LatentStore(golden("features", lambda path: make_store(path, {"32x32": 24}, **noise)))


@pytest.fixture(scope="session")
def everything(golden: Golden) -> Everything:
    """Stores of several text encoders and features, before and after an addition."""
    return everything_in(golden("everything", make_everything))
