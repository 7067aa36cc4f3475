"""The ``leandit`` command. Sub-commands are verbs; knobs live in the recipe (``--set section.key=value``).

Results go to stdout, progress and warnings to stderr. A user's mistake is one line, not a traceback. Stages are
imported inside their sub-command, so that ``leandit inspect`` starts without torch.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
import traceback as traceback_module
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..datasets.errors import DamageError, LeanditError, RecipeError, StoreIncomplete
from ..train.stop import EXIT_RESUMABLE, StopRequest, Terminated
from .cli_bench import bench
from .cli_options import (
    AsJson,
    Device,
    DryRun,
    LocalStore,
    Overrides,
    print_rows,
    torch_device,
)
from .cli_precompute import import_, precompute

MAY_NOT = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_UNEXPECTED, EXIT_USAGE, EXIT_RESOURCES, EXIT_CTRL_C = 1, 2, 5, 130
TRACEBACK = "--traceback"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(bench, name="bench")

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


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or path of a TOML file.")],
    store: Annotated[str | None, typer.Option(help="Store to train on: a folder, or s3://, gs://, hf://.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run; the same command again resumes.")] = None,
    device: Device = "auto",
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Train a diffusion transformer on a store; no encoder is loaded.

    Example: leandit train dit-s-2-256 --store imagenet-256 --run runs/dit-s --set run.steps=1000
    """
    from ..train.config import load

    loaded = load(recipe, overrides or [])
    if dry_run:
        from .dry_run import describe_train

        print(describe_train(loaded, store, torch_device(device)))
        return
    if store is None or run is None:
        raise RecipeError("train: needed --store PATH and --run PATH (or --dry-run).")
    from ..train.loop import train as train_run
    from ..train.meters import StepReport
    from ..train.state import autocast_dtype
    from .progress import ProgressLine

    stop: StopRequest = context.obj
    stop.catch(signal.SIGINT)
    where = torch_device(device)
    precision = loaded.run.precision
    if precision == "bf16" and autocast_dtype("bf16", where) is None:
        precision = f"fp32 (bf16 was asked for, {where} has no fast bf16)"
    with ProgressLine() as progress:

        def show(figures: StepReport) -> None:
            note = (
                f"loss {figures.loss:.4f}  {figures.images_per_second:.1f} images/s  "
                f"data wait {figures.data_wait_share:.1%}"
            )
            progress("train", figures.step, loaded.run.steps, note)

        outcome = train_run(loaded, store_path=store, run=run, device=where, report=show, stop=stop)
    rows = [("run", str(run)), ("steps", f"{outcome.step} of {loaded.run.steps}"), ("computed in", precision)]
    if outcome.first_step is None:
        rows.append(("this run", "nothing to do, the run was finished"))
    elif outcome.losses:
        rows.append(("this run", f"from step {outcome.first_step}, at best {outcome.images_per_second:.1f} images/s"))
        rows.append(("loss", f"{outcome.losses[0]:.4f} at first, {outcome.losses[1]:.4f} at last"))
    if not outcome.finished:
        rows.append(("state", "interrupted; what was done is saved, run the same command again to go on"))
    print_rows(rows)
    if not outcome.finished:
        raise typer.Exit(EXIT_RESUMABLE if stop.is_terminated else EXIT_CTRL_C)


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


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="Run to sample from: its newest snapshot.")],
    out: Annotated[Path, typer.Option(help="Folder for grid.png and samples.json.")],
    label: Annotated[list[int] | None, typer.Option(help="Class index; repeatable.")] = None,
    caption: Annotated[list[str] | None, typer.Option(help="Caption; repeatable.")] = None,
    num: Annotated[int, typer.Option(min=1, help="Pictures, where no label or caption is given.")] = 16,
    bucket: Annotated[str | None, typer.Option(help="HxW in pixels, else the most common bucket.")] = None,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance; 1 is none.")] = 4.0,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of the solver.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    store: Annotated[Path | None, typer.Option(help="Store of the captions, else the run's own.")] = None,
    vae: Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's VAE.")] = None,
    text: Annotated[str | None, typer.Option(help="Folder or hub id for captions not in the store.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw pictures with a trained model: a PNG grid.

    Example: leandit sample runs/dit-s --out samples --label 207 --label 360
    """
    from .sampler import Request
    from .sampler import sample as draw

    request = Request(label or (), caption or (), num, bucket, steps, guidance, seed)
    result = draw(run, request, out=out, device=torch_device(device), store=store, vae=vae, text=text)
    if result["warning"]:
        print(f"leandit: {result['warning']}", file=sys.stderr)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        shown = ("snapshot", "bucket", "guidance", "grid")
        print_rows([("samples", str(len(result["samples"]))), *((name, str(result[name])) for name in shown)])


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
    try:
        stop.catch(signal.SIGTERM)
        code = _run_command(stop)
        stop.ignore(signal.SIGTERM)
    except Terminated:
        code = _fail("terminated; run the same command again to go on", EXIT_RESUMABLE)
        stop.ignore(signal.SIGTERM)
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
