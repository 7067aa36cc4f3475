"""Pages that are generated when the site is built: format, public names, commands with their options, recipe keys."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

import leandit
from leandit.tools.cli.recipe_keys import MODELS, recipe_keys

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("datasets", "precompute", "train", "tools")
LINK_TO_FORMAT = "../datasets/FORMAT.md"
SOURCES = Path(mkdtemp(prefix="leandit-site-"))


@event_priority(100)  # before mkdocstrings reads it
def on_config(config: Any) -> Any:
    """Show mkdocstrings a copy of the sources whose rooms are packages: it does not look into folders that are not."""
    package = SOURCES / "leandit"
    for room in ROOMS:
        shutil.copytree(ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__", "demo_encoders"))
        (package / room / "__init__.py").touch()
    for module in ROOT.glob("*.py"):
        shutil.copy(module, package)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(SOURCES)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "format.md", content=_format()))
    files.append(File.generated(config, "api.md", content=_reference()))
    files.append(File.generated(config, "options.md", content=_options()))
    files.append(File.generated(config, "keys.md", content=_keys()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Markdown whose links to the format lead to its page."""
    return markdown.replace(f"({LINK_TO_FORMAT}", "(format.md")


def on_post_build(**_: Any) -> None:
    """Remove the copy of the sources."""
    shutil.rmtree(SOURCES)


def _format() -> str:
    """The page of the format, whose links to the documentation lead to pages beside it."""
    return (ROOT / "datasets/FORMAT.md").read_text().replace("(../docs/", "(")


def _reference() -> str:
    """Each public name with its docstring, from the module that defines it."""
    homes = {name: f"{home}.{name}" for name, home in leandit._HOMES.items()} | leandit._MODULES
    entries = [f"::: leandit.{homes[name]}\n" for name in leandit.__all__]
    return "\n".join(["# Python\n", "What `import leandit` offers.\n", *entries])


def _options() -> str:
    """Every command with its arguments and options, as ``--help`` shows them."""
    command = [sys.executable, "-m", "typer", "leandit.tools.cli.commands", "utils", "docs", "--name", "leandit"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "# Options of the commands\n\n" + text[text.index("\n## ") :]


def _keys() -> str:
    """Every recipe key with its default and meaning, a table for each stage."""
    parts = ["# Recipe keys\n"]
    for stage in MODELS:
        parts += [f"## leandit {stage}\n", "| key | default | meaning |", "|---|---|---|"]
        parts += [
            f"| `{name}` | `{default}` | {meaning.replace('|', chr(92) + '|')} |"
            for name, default, meaning in recipe_keys(stage)
        ]
        parts.append("")
    return "\n".join(parts)
