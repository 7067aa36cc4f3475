"""The demo without an option, and the commands of the README as they stand."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from click.testing import CliRunner
from forked import run_forked
from making import ROOT

from leandit.datasets.store import LatentStore
from leandit.tools.cli.commands import app

SCRIPT = Path(sys.executable).with_name("leandit")  # as pip installs it
README = (ROOT / "README.md").read_text()


def test_the_commands_and_imports_of_the_readme_work(
    label_store: LatentStore, class_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet/train").symlink_to(class_folder)
    (tmp_path / "imagenet-256").symlink_to(label_store.path)
    ended = {}
    for line in re.findall(r"^leandit .*$", README, re.MULTILINE):
        words = shlex.split(line, comments=True)[1:]
        only_looks = ["--dry-run"] if words[0] in ("precompute", "train") else []
        only_looks += ["--help"] if words[0] == "view" else []  # it would serve pages until Ctrl-C
        ended[words[0]] = run_forked([SCRIPT, *words, *only_looks], cwd=tmp_path)
    codes = {name: one.returncode for name, one in ended.items()}
    # There is no run to sample from yet.
    assert codes == {"precompute": 0, "view": 0, "train": 0, "sample": 3, "verify": 0}, ended
    assert "run 'runs/xl'" in ended["sample"].stderr
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    imports = [node for node in ast.parse(snippet).body if isinstance(node, ast.ImportFrom)]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    assert names
    assert [name for module, name in names if not hasattr(importlib.import_module(module or ""), name)] == []


def help_pages(command: Any, *names: str) -> Iterator[tuple[str, str]]:
    """Help of a command and of those below it, at 80 columns."""
    page = CliRunner().invoke(command, ["--help"], prog_name="leandit", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    yield " ".join(names), page.output
    for name, child in getattr(command, "commands", {}).items():
        yield from help_pages(child, *names, name)


def test_help_at_80_columns_cuts_nothing() -> None:
    pages = dict(help_pages(typer.main.get_command(app)))
    assert {"", "train", "plan train", "bench loader"} <= pages.keys()
    assert [name for name, page in pages.items() if "…" in page] == []
    assert max(len(line) for page in pages.values() for line in page.splitlines()) <= 80
