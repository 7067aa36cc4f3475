"""The ``leandit`` command. Sub-commands are verbs; knobs live in the recipe (``--set section.key=value``).

Results go to stdout, progress and warnings to stderr. A user's mistake is one line, not a traceback. Stages are
imported inside their sub-command, so that ``leandit inspect`` starts without torch.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import traceback as traceback_module
from pathlib import Path
from typing import Annotated

import typer

from ... import __version__
from ...datasets.errors import DamageError, LeanditError, RecipeError, StoreIncomplete
from ...train.parallel.stop import EXIT_CTRL_C, EXIT_RESUMABLE, StopRequest, Terminated
from ..terminal.text import print_rows
from .bench import bench
from .export import export
from .options import AnyStore, AsJson, Device, LocalStore, Overrides, is_url, output, print_line, torch_device
from .plan import plan
from .precompute import import_, precompute
from .sample import sample
from .train import average, train

MAY_NOT = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_UNEXPECTED, EXIT_USAGE, EXIT_RESOURCES = 1, 2, 5
TRACEBACK = "--traceback"
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun and accelerate

# diffusers imports torchao where it is installed, and both tell of parts that nobody here uses.
NOISY = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")

HELP = """Encode pictures and captions once into a latent store, then train diffusion transformers on the store alone.

First look: leandit demo

The way: leandit precompute RECIPE --source PICTURES --store STORE, then leandit train RECIPE --store STORE --run RUN,
then leandit sample RUN --out SAMPLES.

A recipe is a name or a TOML file; --set section.key=value changes a setting, and --dry-run shows what would be done.
The same command again resumes.
"""
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
app.add_typer(bench, name="bench")
app.add_typer(plan, name="plan")

# typer brings its own copy of click and exports only some of it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Encode once, train lean: latent stores for training diffusion transformers."""


app.command()(precompute)
app.command("import")(import_)
app.command()(train)


@app.command()
def inspect(
    store: AnyStore,
    key: Annotated[str | None, typer.Argument(help="Key of one record.")] = None,
    as_json: AsJson = False,
    revision: Annotated[int, typer.Option(min=0, help="Revision of the store; 0: the newest.")] = 0,
    rejects: Annotated[bool, typer.Option("--rejects", help="List every rejected record.")] = False,
    sheet: Annotated[Path | None, output("Write a contact sheet of decoded records here (PNG).")] = None,
    count: Annotated[int, typer.Option(min=1, max=600, help="Pictures of a contact sheet.")] = 24,
    bucket: Annotated[str | None, typer.Option(help="A sheet of this bucket alone, HxW in pixels.")] = None,
    class_: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="A sheet of this class alone: name, wnid or index.")
    ] = None,
    originals: Annotated[
        bool, typer.Option("--originals", help="A sheet with the source pictures beside; needs --source.")
    ] = False,
    source: Annotated[
        list[str] | None, typer.Option(help="Pictures that the store was made from, for a sheet; repeatable.")
    ] = None,
    vae: Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's own VAE.")] = None,
) -> None:
    """Show what a store holds, and whether its numbers are as they should be.

    Example: leandit inspect imagenet-256 --sheet sheet.png
    """
    from ...datasets.store import LatentStore
    from ..inspection.summary import describe_record, ledger, render, render_ledger, render_record, summarise

    if originals and key and not source:
        raise RecipeError(
            f"inspect --originals: it takes no value, so '{key}' is the key of a record. Give the pictures that the "
            "store was made from with --source PATH."
        )
    if not sheet and (bucket or class_ or originals or source):
        raise RecipeError("inspect: --bucket, --class, --originals and --source are of a contact sheet. Give --sheet.")
    if originals and not source:
        raise RecipeError("inspect --originals: the store does not hold the source pictures. Give --source PATH.")
    if rejects and (key or bucket or class_):
        raise RecipeError("inspect --rejects: it has all rejects. Leave out KEY, --bucket and --class.")
    if key and (bucket or class_):
        raise RecipeError("inspect KEY: it is one record. Leave out --bucket and --class.")
    opened = LatentStore(store, revision=revision, allow_incomplete=True)
    if sheet:
        from ..inspection.contact_sheet import write_sheet

        drawn = write_sheet(
            opened,
            sheet,
            key=key,
            rejects=rejects,
            count=count,
            bucket=bucket,
            class_name=class_,
            source=source,
            with_originals=originals,
            vae=vae,
        )
        print(f"leandit: contact sheet of {drawn} written to {sheet}", file=sys.stderr)
    if rejects:
        print(json.dumps(ledger(opened), indent=1) if as_json else render_ledger(ledger(opened)))
        return
    values = describe_record(opened, opened.record(key)) if key else summarise(opened)
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        print(render_record(values) if key else render(values))


@app.command()
def verify(
    store: AnyStore,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes and records only, not every byte.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also encode a sample again, and compare.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Make damaged parts again.")] = False,
    source: Annotated[
        list[str] | None, typer.Option(help="Pictures to encode again, for --deep and --repair; repeatable.")
    ] = None,
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a store holds the bytes that were written; name and repair what does not.

    Example: leandit verify imagenet-256 --repair --source imagenet/train
    """
    from ..inspection.verify import check, check_url, render
    from ..terminal.progress import ProgressLine

    if is_url(store):
        found, done = check_url(store, quick=quick, deep=deep, repair=repair)
    else:
        with ProgressLine() as progress:
            found, done = check(
                Path(store),
                quick=quick,
                deep=deep,
                repair=repair,
                source=source,
                device=lambda: torch_device(device),
                overrides=overrides or [],
                progress=progress,
            )
    print(json.dumps(found.to_json() | done, indent=1) if as_json else render(found, done))
    if found.damaged:
        raise typer.Exit(DamageError.exit_code)
    if not found.complete:
        raise typer.Exit(StoreIncomplete.exit_code)


@app.command()
def compact(store: LocalStore, out: Annotated[Path, output("Folder of the new store.")]) -> None:
    """Copy what a store still uses into a new store of one revision; the old one is only read. Nothing is encoded.

    Example: leandit compact imagenet-256 --out imagenet-256-compact
    """
    from ...datasets.maintenance.compact import compact as run
    from ..terminal.progress import ProgressLine

    with ProgressLine() as progress:
        manifest = run(store, out, progress=progress)
    rows = [("store", f"{out}: revision {manifest.revision}, {manifest.num_stored} records")]
    rows.append(("old store", f"{store}: as it was; remove it once no run reads it"))
    rows.append(("root hash", manifest.root_hash))
    print_rows(rows)


app.command()(sample)
app.command()(average)
app.command()(export)


@app.command()
def demo(
    out: Annotated[Path, output("Folder for everything the demo makes.")] = Path("leandit-demo"),
    num_pictures: Annotated[int, typer.Option("--pictures", min=24, help="Pictures to draw.")] = 3000,
    overrides: Overrides = None,
) -> None:
    """Everything, on made-up pictures, on a CPU, in minutes; measures whether samples show what captions say.

    Example: leandit demo --out leandit-demo
    """
    from ..demo.demo import run_demo

    out.mkdir(parents=True, exist_ok=True)
    run_demo(out, num_pictures=num_pictures, overrides=overrides or [], stop=StopRequest(), say=print)


def main() -> None:
    """Run the command; the one place where an exception becomes a line and an exit code."""
    stop = StopRequest()
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        stop.catch(signal.SIGTERM)
        code = _run_command(stop)
        stop.ignore(signal.SIGTERM)
    except Terminated:
        stop.ignore(signal.SIGTERM)
        code = _fail("terminated; run the same command again to go on", EXIT_RESUMABLE)
    sys.exit(code)


def _run_command(stop: StopRequest) -> int:
    try:
        code = app(standalone_mode=False, obj=stop)
        if code == EXIT_CTRL_C:  # typer has caught a Ctrl-C itself
            _fail("interrupted; run the same command again to go on", code)
    except UsageError as error:
        error.show()  # pyright: ignore[reportAttributeAccessIssue]
        code = EXIT_USAGE
    except LeanditError as error:
        code = _fail_once(error)
    except MemoryError:
        code = _fail("out of memory. Use a smaller batch (see --set)", EXIT_RESOURCES)
    except Exception as error:  # the edge: nobody is above to catch it
        if stop.is_terminated:  # an extension that is being imported makes an ImportError of whatever is raised
            raise Terminated from error
        code = _unexpected(error)
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception) -> int:
    if isinstance(error, ModuleNotFoundError):
        what = (
            f"{error.name} is not installed" if error.name else str(error)
        )  # nameless where a library checks by itself
        return _fail(f"{what}. Install leandit with its extra 'all'", EXIT_RESOURCES)
    if isinstance(error, OSError) and error.errno in MAY_NOT:
        what = f"'{error.filename or 'a file'}': {error.strerror}. Give this user the permission, or name another place"
        return _fail(f"{what}; the same command then goes on", EXIT_RESOURCES)
    what = f"{type(error).__name__}: {error}"
    return _fail(f"unexpected {what}. Run again with '{TRACEBACK}' before the command, and report it", EXIT_UNEXPECTED)


def _fail_once(error: LeanditError) -> int:
    """Of several ranks that fail alike, one prints the error."""
    if not (error.is_said or TORCHRUN in os.environ):
        return _fail(str(error), error.exit_code)
    from ...train.parallel.watchdog import print_for_all

    if TRACEBACK in sys.argv:
        traceback_module.print_exc()
    print_for_all(error, print_line)
    return error.exit_code


def _fail(message: str, code: int) -> int:
    if TRACEBACK in sys.argv:
        traceback_module.print_exc()
    print_line(message)
    return code


if __name__ == "__main__":
    main()
