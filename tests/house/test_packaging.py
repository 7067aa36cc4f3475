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


def test_there_are_no_stray_modules() -> None:
    assert {path.parts[len(ROOT.parts)] for path in ROOT.glob("*/**/*.py")} - {".venv", "build", "docs"} == {
        *ROOMS,
        "benchmarks",
        "tests",
    }
    assert [path.name for path in ROOT.glob("docs/**/*.py")] == ["site_pages.py"]  # a hook of mkdocs
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


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
    (python := tmp_path / "python3.10").write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10, 1); $*"\n'
    )
    python.chmod(0o755)
    made = subprocess.run(
        ["make", f"PYTHON={python}", f"VENV={tmp_path}/venv", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 2
    assert "leandit needs Python 3.11 or newer" in made.stderr
    assert not (tmp_path / "venv").exists()


def test_the_base_needs_no_torch() -> None:
    heavy = {"torch", "torchdata", "diffusers", "transformers", "pillow"}
    assert {requirement(line) for line in PROJECT["project"]["dependencies"]} & heavy == set()


def test_the_licence_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_module_says_what_it_is_and_asserts_no_comparison_as_a_message() -> None:
    for path in (*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))):
        assert ast.get_docstring(parsed(path)), path
        # "assert x, y == z" checks x alone; no linter sees it.
        asserts = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)]
        assert [node.lineno for node in asserts if isinstance(node.msg, (ast.Compare, ast.BoolOp))] == [], path


def catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id == "Exception") for kind in kinds)


def test_every_exception_is_caught_at_the_edge_and_where_an_image_is_rejected_only() -> None:
    places = {
        name_of(path)
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler) and catches_everything(node)
    }
    # encoders/text/tokenizer.py: the library of the tokenizers raises this very class; any other goes on
    # images.py: the edges of two threads, for whose images a page waits
    edges = {"tools/cli/commands.py", "tools/inspection/view/images.py"}
    libraries = {"precompute/encoders/text/tokenizer.py"}
    # whatever a library makes of a config or weights that are not valid
    libraries |= {"precompute/encoders/pretrained.py", "precompute/encoders/text/families.py"}
    assert places == edges | libraries | {"precompute/images/pixels.py"}
