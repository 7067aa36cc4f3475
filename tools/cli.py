"""The ``leandit`` command. Sub-commands are verbs; knobs live in the recipe (``--set section.key=value``).

Results go to stdout, progress and warnings to stderr. A user's mistake is one line, not a traceback. Stages are
imported inside their sub-command, so that ``leandit inspect`` starts without torch.
"""

from __future__ import annotations

import errno
import json
import logging
import signal
import sys
import traceback as traceback_module
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..datasets.errors import DamageError, LeanditError, StoreIncomplete
from ..train.stop import EXIT_CTRL_C, EXIT_RESUMABLE, StopRequest, Terminated
from .cli_bench import bench
from .cli_export import export
from .cli_options import (
    AsJson,
    Device,
    LocalStore,
    Overrides,
    print_rows,
    torch_device,
)
from .cli_plan import plan
from .cli_precompute import import_, precompute
from .cli_sample import sample
from .cli_train import average, train

MAY_NOT = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_UNEXPECTED, EXIT_USAGE, EXIT_RESOURCES = 1, 2, 5
TRACEBACK = "--traceback"

# diffusers imports torchao where it is installed, and both tell of parts that nobody here uses.
NOISY = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
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
    store: LocalStore,
    key: Annotated[str | None, typer.Argument(help="Key of one record.")] = None,
    as_json: AsJson = False,
    revision: Annotated[int, typer.Option(min=0, help="Revision of the store; 0: the newest.")] = 0,
    rejects: Annotated[bool, typer.Option("--rejects", help="List every rejected record.")] = False,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet of decoded records here (PNG).")] = None,
    vae: Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's own VAE.")] = None,
) -> None:
    """Say what a store holds, and whether its numbers are what they should be.

    Example: leandit inspect imagenet-256 --sheet sheet.png
    """
    from ..datasets.store import LatentStore
    from .inspector import describe_record, ledger, render, render_ledger, render_record, summarise

    opened = LatentStore(store, revision=revision, allow_incomplete=True)
    if rejects:
        print(json.dumps(ledger(opened), indent=1) if as_json else render_ledger(ledger(opened)))
        return
    if sheet:
        from .sheet import load_decoder, store_sheet

        decoder = load_decoder(opened.spec.recipe.get("vae"), vae, torch_device("cpu"))
        sheet.parent.mkdir(parents=True, exist_ok=True)
        store_sheet(opened, decoder, count=24).save(sheet, format="PNG")
        print(f"leandit: contact sheet written to {sheet}", file=sys.stderr)
    values = describe_record(opened, opened.record(key)) if key else summarise(opened)
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        print(render_record(values) if key else render(values))


@app.command()
def verify(
    store: LocalStore,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes and records only, not every byte.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also encode a sample again, and compare.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Make what is damaged anew.")] = False,
    source: Annotated[str | None, typer.Option(help="Pictures, to encode again from.")] = None,
    device: Device = "auto",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a store holds the bytes that were written; name and repair what does not.

    Example: leandit verify imagenet-256 --repair --source imagenet/train
    """
    from .checker import check, render
    from .progress import ProgressLine

    with ProgressLine() as progress:
        found, done = check(
            store,
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
def compact(store: LocalStore) -> None:
    """Copy what a store still uses into one revision and remove the earlier ones. Nothing is encoded.

    Example: leandit compact imagenet-256
    """
    from ..datasets.compact import compact as run
    from .progress import ProgressLine

    with ProgressLine() as progress:
        result = run(store, progress=progress)
    rows = [("store", f"{store}: revision {result.manifest.revision}, {result.manifest.num_stored} records")]
    gone = ", ".join(map(str, result.removed))
    rows.append(("removed", f"revisions {gone}; {result.freed_bytes / 2**20:.1f} MiB freed" if gone else "nothing"))
    rows.append(("root hash", result.manifest.root_hash))
    print_rows(rows)


app.command()(sample)
app.command()(average)
app.command()(export)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("leandit-demo"),
    num_pictures: Annotated[int, typer.Option("--pictures", min=24, help="Pictures to draw.")] = 3000,
    overrides: Overrides = None,
) -> None:
    """Everything, on made-up pictures, on a CPU, in minutes; measures whether samples show what captions say.

    Example: leandit demo --out leandit-demo
    """
    from .demo import run_demo

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
        code = _fail(str(error), error.exit_code)
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


def _fail(message: str, code: int) -> int:
    if TRACEBACK in sys.argv:
        traceback_module.print_exc()
    if not message.isprintable():  # a key of others could bring control characters onto the terminal
        from .inspector import printable

        message = printable(message)
    print(f"leandit: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
