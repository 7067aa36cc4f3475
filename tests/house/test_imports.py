"""The shape of the house: folders without import cycles, who may import whom, and what a process has loaded."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from repository import MODULES, ROOMS, ROOT, SHARED, name_of, parsed
from runs import make_run

import leandit
from leandit.datasets.store import LatentStore


@functools.cache
def imported(path: Path) -> list[tuple[int, str]]:
    """(level, dotted name) of every import of a module, inside functions too."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [(node.level, f"{module}.{alias.name}".strip(".")) for alias in node.names]
    return names


BELOW: dict[str, set[str]] = {
    "datasets": set(),
    "precompute": {"datasets"},
    "train": {"datasets"},
    "tools": {"datasets", "precompute", "train"},
}


Graph = dict[str, dict[str, str]]
"""For each place the places that it imports, each with one import that shows it."""


def folders_in(folder: Path) -> list[Path]:
    """Sub-folders with code; ``recipes`` and ``demo_encoders`` hold data."""
    return sorted(path.parent for path in folder.glob("*/__init__.py"))


FOLDERS = [ROOT / room for room in ROOMS]
for _folder in FOLDERS:
    FOLDERS += folders_in(_folder)


def nodes_at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a module, without what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from nodes_at_run_time(node)


def imports_of(module: Path) -> Iterator[Path]:
    """Our modules that a module imports, also inside functions."""
    for node in nodes_at_run_time(parsed(module)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        package = [module, *module.parents][node.level].joinpath(*(node.module or "").split("."))
        if package.with_suffix(".py").is_file():
            yield package.with_suffix(".py")
        else:
            yield from (path for alias in node.names if (path := package / f"{alias.name}.py").is_file())


def graph_of(folder: Path) -> Graph:
    """What the modules and sub-folders of a folder import of each other."""
    graph: Graph = {}
    for module in sorted(folder.rglob("*.py")):
        here = module.relative_to(folder).parts[0]
        for target in imports_of(module):
            if target.is_relative_to(folder) and (there := target.relative_to(folder).parts[0]) != here:
                graph.setdefault(here, {}).setdefault(there, f"{name_of(module)} imports {name_of(target)}")
    return graph


def test_no_folder_has_an_import_cycle() -> None:
    for folder in FOLDERS:
        TopologicalSorter(graph_of(folder)).prepare()  # a CycleError names the circle
    # A folder without ``__init__.py`` would be passed over by every check here.
    with_code = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert with_code <= set(FOLDERS)
    assert len(FOLDERS) > 30


@pytest.mark.parametrize("room", ROOMS)
def test_the_readme_lists_the_folders_of_a_room(room: str) -> None:
    tree = (ROOT / "README.md").read_text().split(f"\n{room}/ ")[1]
    listed = re.findall(r"^  ([a-z_]+)/ ", re.split(r"\n[a-z]", tree)[0], re.MULTILINE)
    assert sorted(listed) == [path.name for path in folders_in(ROOT / room)]


def test_each_room_imports_only_those_below_it() -> None:
    shared = {path.name for path in SHARED}
    for room, below in BELOW.items():
        rooms = {name_of(path): {name_of(it).split("/")[0] for it in imports_of(path)} for path in modules_of(room)}
        assert {name: found - below for name, found in rooms.items() if found - below - {room} - shared} == {}
        assert set().union(*rooms.values()) - {room} - shared == below  # so that an empty scan is no success
    for path in SHARED:
        assert {name_of(it) for it in imports_of(path)} <= shared


def modules_of(room: str) -> list[Path]:
    return [path for path in MODULES if name_of(path).startswith(f"{room}/")]


def test_torch_is_imported_in_datasets_by_the_torch_side_only() -> None:
    users = {
        path.relative_to(ROOT / "datasets").as_posix()
        for path in (ROOT / "datasets").rglob("*.py")
        if any(name.split(".")[0] in ("torch", "torchdata") for _, name in imported(path))
    }
    assert "loader.py" in users
    batches = ("adapters", "batch", "buffer_pool", "captions", "latents", "reader", "stream")
    assert users <= {"loader.py", *(f"batches/{name}.py" for name in batches)}


def test_no_room_has_an_init_and_nothing_in_it_hides_the_standard_library() -> None:
    for folder in (*ROOMS, "tests"):
        names = {name for path in (ROOT / folder).rglob("*.py") for name in (path.stem, path.parent.name)} - {folder}
        assert names
        assert not (ROOT / folder / "__init__.py").exists()
        assert names & set(sys.stdlib_module_names) == set()


def loaded_in_turn(code: str, *arguments: str, cwd: Path) -> list[set[str]]:
    """Names of all modules that a fresh interpreter said it had, a JSON line each time."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def loaded_after(code: str, *arguments: str, cwd: Path) -> set[str]:
    """Names of all modules in a fresh interpreter after some code."""
    tail = "\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    return loaded_in_turn(code + tail, *arguments, cwd=cwd)[-1]


TRAIN = """
import json, sys
from pathlib import Path
import torch
from leandit.train.config import load
from leandit.train.loop import StopRequest, train
from leandit.train.models.dit import SIZES
from leandit.train.models.diffusers import pixart
SIZES["S"], pixart.PixArt.sizes["pixart-tiny"] = (1, 32, 2), pixart.size(1, 2, 16)
torch.set_num_threads(1)
for name, store, run, *more in json.loads(sys.argv[1]):
    recipe = load(name, ["run.steps=1", "run.global_batch=2", "run.precision=fp32", "model.num_classes=0",
                         "run.compile=false", "schedule.warmup_steps=0", *more])
    outcome = train(recipe, store_path=Path(store), run=Path(run), device=torch.device("cpu"),
                    report=lambda figures: None, stop=StopRequest())
    assert outcome.finished
    print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.integration
def test_training_and_drawing_images_meanwhile_load_no_encoder(
    label_store: LatentStore, caption_store: LatentStore, tmp_path: Path
) -> None:
    """In one interpreter, which keeps what it has loaded; with the real process that decodes what is drawn."""
    drawn = ["run.sample_every=1", "run.sample_steps=2", "run.sample_count=2"]
    jobs = [
        ("dit-s-2-256", str(label_store.path), "plain"),
        ("dit-s-2-256", str(label_store.path), "drawing", *drawn),
        ("demo", str(caption_store.path), "captions"),
    ]
    plain, drawing, captions = loaded_in_turn(TRAIN, json.dumps(jobs), cwd=tmp_path)
    assert "leandit.train.loop" in plain
    assert [name for name in plain if name.split(".")[0] in ("transformers", "diffusers", "PIL")] == []
    assert (tmp_path / "drawing/samples/step-1.png").is_file()
    assert [name for name in drawing if name.startswith("leandit.tools")] == []
    assert "diffusers.models.transformers.pixart_transformer_2d" in captions
    encoders = [name for name in plain | drawing | captions if "autoencoder" in name or "leandit.precompute" in name]
    assert encoders == []


COMMAND = """
import sys
from leandit.tools.cli.main import main
sys.argv = ["leandit", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("command", ["inspect", pytest.param("report", marks=pytest.mark.integration)])
def test_inspecting_and_reporting_load_no_torch(command: str, label_store: LatentStore, tmp_path: Path) -> None:
    words = [str(label_store.path), "--json"]
    if command == "report":
        words = [str(make_run(tmp_path / "run")), "--out", "page.html"]
    modules = loaded_after(COMMAND, command, *words, cwd=tmp_path)
    assert command == "inspect" or (tmp_path / "page.html").is_file()
    assert [name for name in modules if name.split(".")[0] in ("torch", "diffusers", "transformers")] == []


def test_the_public_names_are_loaded_when_they_are_first_used(tmp_path: Path) -> None:
    modules = loaded_after("import leandit; dir(leandit)", cwd=tmp_path)
    assert {name for name in modules if name.split(".")[0] == "leandit"} == {"leandit"}
    assert [name for name in modules if name.split(".")[0] in ("torch", "pyarrow", "numpy")] == []
    code = """
import leandit
store = leandit.LatentStore
import sys
assert "torch" not in sys.modules and "pyarrow" in sys.modules
from leandit import Batch, BatchReader, LatentStore, load_snapshot, make_loader
assert LatentStore is store and store.__module__ == "leandit.datasets.store"
assert all(map(callable, (Batch, BatchReader, load_snapshot, make_loader)))
assert set(leandit.__all__) <= set(dir(leandit))
import leandit.precompute.pipeline
"""
    modules = loaded_after(code, cwd=tmp_path)
    assert "torch" in modules
    assert {"diffusers", "transformers", "torch._dynamo"} & modules == set()  # three seconds: not before encoders
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        leandit.nothing  # noqa: B018
