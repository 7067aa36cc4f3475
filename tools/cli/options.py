"""Options, paths and devices that several sub-commands share."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import typer
from typer import Argument, Option

from ...errors import RecipeError
from ..terminal.text import is_quiet, printable

if TYPE_CHECKING:
    from ...train.parallel.ranks import Ranks
    from ..terminal.progress import ProgressLine

LOG = logging.getLogger(__name__)
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

# Paths: each option says what becomes of a URL


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


def _local_path(does: str, hint: str, value: str | Path) -> Path:
    """A local path. Raises: BadParameter: it is a URL."""
    path = path_or_url(str(value))  # typer parses defaults too, which are paths already
    if is_url(path):
        raise typer.BadParameter(f"'{path}' is a URL, and this command {does} local folders only. {hint}")
    return Path(path)


def read_path(value: str | Path) -> Path:
    """A local path to read. Raises: BadParameter: it is a URL."""
    return _local_path("reads", "Copy it first, as with 'aws s3 sync s3://BUCKET/NAME FOLDER'.", value)


def written_path(value: str | Path) -> Path:
    """A local path to write to. Raises: BadParameter: it is a URL."""
    hint = "Pass a folder, then copy it there, as with 'aws s3 sync FOLDER s3://BUCKET/NAME'."
    return _local_path("writes to", hint, value)


def output(help: str, *names: str) -> Any:
    """An option for a path that the command writes to."""
    return Option(*names, help=help, parser=written_path, metavar="PATH")


def local_input(help: str, *names: str) -> Any:
    """An option for a local path that the command reads."""
    return Option(*names, help=help, parser=read_path, metavar="PATH")


# Options and arguments, each declared once


def complete_recipe(context: typer.Context, incomplete: str) -> list[str]:
    """Shipped recipes that a shell offers: of the stage that the command is for; of both where it lists them."""
    from ...recipe import STAGES, shipped_recipes

    stages = {"precompute": STAGES[:1], "recipes": STAGES}.get(context.info_name or "", STAGES[1:])
    names = {name for stage in stages for name in shipped_recipes(f"leandit.{stage}")}
    return sorted(name for name in names if name.startswith(incomplete))


RECIPE_HELP = "Name of a shipped recipe, or path of a TOML file."
STORE_HELP = "Store to train on (a folder, s3://, gs:// or hf://), unless the recipe names stores."
Recipe = Annotated[str, Argument(metavar="RECIPE", help=RECIPE_HELP, autocompletion=complete_recipe)]
Run = Annotated[Path, Argument(parser=read_path, metavar="RUN", help="Run, or output of 'leandit average'.")]
LocalStore = Annotated[Path, Argument(parser=written_path, metavar="STORE", help="Folder of the store.")]
AnyStore = Annotated[str, Argument(parser=path_or_url, metavar="STORE", help="Store: a folder or a URL.")]
StoreOfRecipe = Annotated[str | None, Option("--store", parser=path_or_url, metavar="PATH", help=STORE_HELP)]
Device = Annotated[str, Option(help="cpu, cuda or cuda:N; auto: a GPU if available.")]
Overrides = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override one recipe key; repeatable.")
]
DryRun = Annotated[bool, Option("--dry-run", help="Print what would be done, then exit.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
Revision = Annotated[int, Option(min=0, help="Revision of the store; 0: the newest.")]
Vae = Annotated[str | None, Option(help="VAE to decode with (folder or hub id); default: the store's.")]
Base = Annotated[str, Option(help="Current location of the weights the run's adapters were trained on.")]
Weights = Annotated[
    Literal["averaged", "raw"], Option(help="Averaged weights, or the raw ones of the newest checkpoint.")
]


# Devices


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


def rank_device(name: str, ranks: Ranks) -> Any:
    """The device of a rank: the GPU with its number on its machine, unless ``--device`` names another.

    Raises: as ``torch_device``.
    """
    device = torch_device(name)
    if ranks.world_size == 1 or device.type != "cuda" or device.index is not None:
        return device
    return torch_device(f"cuda:{ranks.local_rank}")


def torch_devices(names: str) -> list[Any]:
    """The devices that ``--device`` names, if it may name several; cuda and auto take all GPUs.

    Raises: as ``torch_device``.
    """
    devices = [torch_device(name.strip()) for name in names.split(",")]
    if names in ("auto", "cuda") and devices[0].type == "cuda":
        import torch

        if (num_gpus := torch.cuda.device_count()) > 1:
            return [torch_device(f"cuda:{number}") for number in range(num_gpus)]
    return devices


# Lines on stderr


def rank_progress(ranks: Ranks) -> AbstractContextManager[ProgressLine | Callable[..., None]]:
    """Progress on stderr, of the first rank alone."""
    from ..terminal.progress import ProgressLine

    return ProgressLine() if ranks.is_first else contextlib.nullcontext(lambda *_: None)


def print_line(message: str) -> None:
    """Print a note on stderr, unless the command is quiet."""
    if not is_quiet():
        print_error(message)


def print_error(message: str) -> None:
    """Print a message on stderr and flush; lines that begin with two spaces are items of a list."""
    if not message.isprintable():  # keys of records may contain control characters
        message = "\n  ".join(map(printable, message.split("\n  ")))
    print(f"leandit: {message}", file=sys.stderr, flush=True)
