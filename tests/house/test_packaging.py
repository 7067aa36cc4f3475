"""What goes into the wheel, what is pinned, and habits that no linter sees."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from repository import MODULES, ROOMS, ROOT, name_of, parsed

from leandit.tools.cli.commands import EXTRAS, EXTRAS_OF_COMMANDS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [ROOT / "__init__.py", *MODULES]


def test_the_packages_are_the_folders() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    modules = [path.relative_to(ROOT) for folder in ROOMS for path in (ROOT / folder).rglob("*.py")]
    packages = {".".join(["leandit", *folder.parts]) for path in modules for folder in path.parents}
    assert set(setuptools["packages"]) == packages
    assert len(packages) > 30
    assert setuptools["package-dir"] == {"leandit": "."}


def test_all_data_files_are_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    packaged = set()
    for package, globs in patterns.items():
        for pattern in globs:
            found = set(ROOT.joinpath(*package.split(".")[1:]).glob(pattern))
            assert found, f"{package}: '{pattern}' matches nothing"
            packaged |= found
    data = {
        path
        for folder in ROOMS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {name_of(path) for path in data} == {name_of(path) for path in packaged} - {"py.typed"}
    assert {"demo.toml", "FORMAT.md", "tokenizer.json"} <= {path.name for path in packaged}


def requirement(line: str) -> str:
    """Name of a requirement, normalised."""
    return re.split(r"[\s\[<>=!~;]", line.strip())[0].lower().replace("_", "-")


def test_every_direct_dependency_is_pinned() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    lines = [line for line in lines if line]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s=]+", line) for line in lines), lines
    assert "torch==2.13.0" in lines
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    direct = {requirement(line) for group in groups for line in group} - {"leandit"}
    assert len(direct) > 15
    assert direct - {requirement(line) for line in lines} == set()


def installed_by(extra: str) -> set[str]:
    """Names of what an extra installs, through other extras of ours too."""
    found = set()
    for line in PROJECT["project"]["optional-dependencies"][extra]:
        inner = re.fullmatch(r"leandit\[(.*)\]", line)
        found |= set().union(*map(installed_by, inner[1].split(","))) if inner else {requirement(line)}
    return found


def test_an_extra_that_a_message_names_exists_and_has_what_is_missing() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    texts = [re.sub(r'"\s*f?"', "", path.read_text()) for path in SOURCES]  # literals that go on in the next line
    named = {name for text in texts for name in re.findall(r"leandit\[([\w,]+)\]|extra '(\w+)'", text)}
    assert {extra for names in named for extra in ",".join(names).strip(",").split(",")} - extras.keys() == set()
    assert len(named) > 5
    assert {*EXTRAS.values(), *EXTRAS_OF_COMMANDS.values()} <= extras.keys()
    of_jinja2 = {"markupsafe"}
    heavy = {"torch", "torchdata", "diffusers", "transformers", "pillow"}  # of no base
    assert {requirement(line) for line in PROJECT["project"]["dependencies"]} & heavy == set()
    assert [name for name, extra in EXTRAS.items() if name not in installed_by(extra) | of_jinja2] == []


def test_all_is_what_every_command_needs_but_the_benchmarks_of_peers() -> None:
    wanted = ("precompute", "train", "remote", "lora", "publish", "report", "view")
    assert installed_by("all") == set().union(*map(installed_by, wanted))


def test_help_and_messages_name_no_file_that_the_wheel_lacks() -> None:
    found = []
    for path in SOURCES:
        tree = parsed(path)
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        texts.remove(ast.get_docstring(tree, clean=False))  # a module's is for those who read the code
        found += [(name_of(path), text) for text in texts if "docs/" in text]
    recipes = [path for folder in ROOMS for path in (ROOT / folder).rglob("*.toml")]
    assert recipes
    assert found + [name_of(path) for path in recipes if "docs/" in path.read_text()] == []


def test_an_older_python_is_told_in_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.version_info = (3, 10, 1); sys.argv = ['leandit', '--help']; import leandit.tools.cli.main"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert ended.stderr.startswith("leandit needs Python 3.11 or newer")
