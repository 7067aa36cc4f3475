"""The shape of the house: small folders, layers without a circle, and a README that lists them from the bottom up."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from repository import ROOMS, ROOT, name_of, parsed

MOST_MODULES, MOST_FOLDERS, MOST_AT_THE_DOOR = 10, 9, 5
Graph = dict[str, dict[str, str]]
"""For each place the places that it imports, each with one import that shows it."""


def modules_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def folders_in(folder: Path) -> list[Path]:
    """Sub-folders with code; ``recipes`` and ``demo_encoders`` hold data."""
    return sorted(path.parent for path in folder.glob("*/__init__.py"))


FOLDERS = [ROOT / room for room in ROOMS]
for _folder in FOLDERS:
    FOLDERS += folders_in(_folder)


def imports_of(module: Path) -> Iterator[Path]:
    """Our modules that a module imports, also in functions and for type checkers."""
    for node in ast.walk(parsed(module)):
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


def circle_in(graph: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The arrows of a circle, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        return [graph[b][a] for a, b in itertools.pairwise(circle)]
    return []


def test_every_folder_is_small_and_has_no_circle() -> None:
    for folder in FOLDERS:
        modules = [path.name for path in modules_in(folder)]
        assert len(modules) <= (MOST_AT_THE_DOOR if folder.parent == ROOT else MOST_MODULES), (folder, modules)
        assert len(folders_in(folder)) <= MOST_FOLDERS, (folder, folders_in(folder))
        assert circle_in(graph_of(folder)) == [], folder


def test_every_folder_with_code_is_one_of_the_house() -> None:
    """A folder without ``__init__.py`` would be passed over by every check here."""
    with_code = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert with_code <= set(FOLDERS)
    assert len(FOLDERS) > 30


@pytest.mark.parametrize("room", ROOMS)
def test_the_readme_lists_the_folders_of_a_room_from_the_bottom_up(room: str) -> None:
    tree = (ROOT / "README.md").read_text().split(f"\n{room}/ ")[1]
    listed = re.findall(r"^  ([a-z_]+)/ ", re.split(r"\n[a-z]", tree)[0], re.MULTILINE)
    assert sorted(listed) == [path.name for path in folders_in(ROOT / room)]
    for here, targets in graph_of(ROOT / room).items():
        for there, arrow in targets.items():
            if here in listed and there in listed:
                assert listed.index(there) < listed.index(here), arrow
