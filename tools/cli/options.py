"""Options, paths and devices that several sub-commands share."""

from __future__ import annotations

import logging
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from ...datasets.errors import RecipeError
from ..terminal.text import is_quiet, printable

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.")]
Devices = Annotated[
    str,
    typer.Option(
        "--device", help="cpu or cuda:N; several with commas, a process for each; cuda and auto take all GPUs."
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key; repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and stop.")]

LOG = logging.getLogger(__name__)
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def complete_recipe(context: typer.Context, incomplete: str) -> list[str]:
    """Shipped recipes that a shell offers: of the stage that the command is for; of both where it lists them."""
    from ...datasets.recipe import STAGES, shipped_recipes

    stages = {"precompute": STAGES[:1], "recipes": STAGES}.get(context.info_name or "", STAGES[1:])
    names = {name for stage in stages for name in shipped_recipes(f"leandit.{stage}")}
    return sorted(name for name in names if name.startswith(incomplete))


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="Name of a shipped recipe, or path of a TOML file.", autocompletion=complete_recipe
    ),
]


def is_url(path: str) -> bool:
    """Whether a path is a URL."""
    return bool(URL.match(path))


def path_or_url(value: str) -> str:
    """A path or URL; a file:// URL becomes its path.

    Raises: BadParameter: a file:// URL names another machine.
    """
    if not value.lower().startswith("file:/"):
        return value
    parts = urlsplit(value)
    if parts.netloc not in ("", "localhost"):
        raise typer.BadParameter(f"'{value}': expected file:///PATH, with three slashes before the first folder.")
    return unquote(parts.path)


def read_path(value: str | Path) -> Path:
    """A local path to read.

    Raises: BadParameter: it is a URL.
    """
    return _local_path(value, "reads", "Copy it first, as with 'aws s3 sync s3://BUCKET/NAME FOLDER'.")


def written_path(value: str | Path) -> Path:
    """A local path to write to.

    Raises: BadParameter: it is a URL.
    """
    hint = "Give a folder, then copy it there, as with 'aws s3 sync FOLDER s3://BUCKET/NAME'."
    return _local_path(value, "writes to", hint)


def _local_path(value: str | Path, does: str, hint: str) -> Path:
    path = path_or_url(str(value))  # typer parses defaults too, which are paths already
    if is_url(path):
        raise typer.BadParameter(f"'{path}' is a URL, and this command {does} local folders only. {hint}")
    return Path(path)


def output(help: str, *names: str) -> Any:
    """An option for a path that the command writes to."""
    return typer.Option(*names, help=help, parser=written_path, metavar="PATH")


def local_input(help: str, *names: str) -> Any:
    """An option for a local path that the command reads."""
    return typer.Option(*names, help=help, parser=read_path, metavar="PATH")


Run = Annotated[Path, typer.Argument(parser=read_path, metavar="RUN", help="Run, or what 'leandit average' has made.")]
LocalStore = Annotated[Path, typer.Argument(parser=written_path, metavar="STORE", help="Folder of the store.")]
AnyStore = Annotated[str, typer.Argument(parser=path_or_url, metavar="STORE", help="Store: a folder, or a URL.")]
StoreOfRecipe = Annotated[
    str | None,
    typer.Option(
        "--store",
        parser=path_or_url,
        metavar="PATH",
        help="Store to train on, unless the recipe names stores: a folder, s3://, gs://, hf://.",
    ),
]
Vae = Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's own VAE.")]
Base = Annotated[str, typer.Option(help="Where the weights lie now that the adapters of a run were trained on.")]


class WeightsName(StrEnum):
    """Values of ``--weights``."""

    averaged = "averaged"
    raw = "raw"


Weights = Annotated[WeightsName, typer.Option(help="Of a run: averaged, or raw as the newest checkpoint has them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def torch_device(name: str) -> Any:
    """The device that ``--device`` names.

    Raises: RecipeError: the device does not exist; ModuleNotFoundError: torch is not installed.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        LOG.info("--device auto is %s: torch %s sees %d GPUs", name, torch.__version__, torch.cuda.device_count())
    if not re.fullmatch(r"(cpu|cuda)(:\d\d?)?", name):
        raise RecipeError(f"--device '{name}': expected cpu, cuda, cuda:N or auto.")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise RecipeError(f"--device '{name}': torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here.")
    return device


def rank_device(name: str, local_rank: int | None) -> Any:
    """The device of a rank: the GPU with its local number, unless ``--device`` names another.

    Args:
      local_rank: number of the rank on its machine; None for a single rank.
    Raises: as ``torch_device``.
    """
    device = torch_device(name)
    if local_rank is None or device.type != "cuda" or device.index is not None:
        return device
    return torch_device(f"cuda:{local_rank}")


def torch_devices(names: str) -> list[Any]:
    """The devices that ``--device`` names, if it may name several.

    Raises: as ``torch_device``.
    """
    if names in ("auto", "cuda"):
        if (device := torch_device(names)).type == "cpu":
            return [device]
        import torch

        num_gpus = torch.cuda.device_count()
        names = ",".join(f"cuda:{number}" for number in range(num_gpus)) if num_gpus > 1 else "cuda"
    return [torch_device(name.strip()) for name in names.split(",")]


def print_line(message: str) -> None:
    """Print a note on stderr, unless the command is quiet."""
    if not is_quiet():
        print_error(message)


def print_error(message: str) -> None:
    """Print a message on stderr and flush; lines that begin with two spaces are items of a list."""
    if not message.isprintable():  # keys of records may contain control characters
        message = "\n  ".join(map(printable, message.split("\n  ")))
    print(f"leandit: {message}", file=sys.stderr, flush=True)
