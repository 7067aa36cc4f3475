"""The ``leandit`` command. Sub-commands are verbs; knobs live in the recipe (``--set section.key=value``).

Results go to stdout, progress and warnings to stderr. A user's mistake is one line, not a traceback. Stages are
imported inside their sub-command, so that ``leandit inspect`` starts without torch.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback as traceback_module
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..datasets.errors import LeanditError, RecipeError, ResourceError

EXIT_UNEXPECTED, EXIT_USAGE, EXIT_RESOURCES, EXIT_INTERRUPTED, EXIT_CTRL_C = 1, 2, 5, 75, 130
TRACEBACK = "--traceback"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes a GPU if there is one.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key; repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


# typer brings its own copy of click and exports only some of it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class Terminated(Exception):
    """SIGTERM: stop now, resume later."""


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


@app.command()
def precompute(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or path of a TOML file.")],
    source: Annotated[Path | None, typer.Option(help="Pictures: a folder, or a .tar.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the store; the same command again resumes.")] = None,
    device: Device = "auto",
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Run every picture and caption through the encoders, exactly once.

    Example: leandit precompute imagenet-256 --source imagenet/train --store imagenet-256
    """
    from ..precompute.config import load

    loaded = load(recipe, overrides or [])
    if dry_run:
        from .dry_run import describe_precompute

        print(describe_precompute(loaded, source, torch_device(device)))
        return
    if source is None or store is None:
        raise RecipeError("precompute: needed --source PATH and --store PATH (or --dry-run).")
    signal.signal(signal.SIGTERM, _raise_terminated)
    from ..precompute.pipeline import precompute as run
    from .progress import ProgressLine

    with ProgressLine() as progress:
        report = run(loaded, source_path=source, store_path=store, device=torch_device(device), progress=progress)
    manifest, rows = report.manifest, []
    rows.append(("store", f"{store}: complete"))
    rejected = f"{manifest.num_stored} stored + {manifest.num_rejected} rejected"
    rows.append(("records", f"{manifest.num_planned} planned = {rejected}"))
    if manifest.num_rejected:
        rows.append(("", "why: 'leandit inspect' counts the reasons, records.parquet names each"))
    if report.num_ignored:
        rows.append(("ignored", f"{report.num_ignored} files that are no pictures by their name"))
    rows.append(("buckets", ", ".join(f"{name}: {count}" for name, count in manifest.buckets.items())))
    if manifest.num_captions:
        rows.append(("captions", f"{manifest.num_captions} distinct, {manifest.num_caption_tokens} tokens"))
    rows.append(("root hash", manifest.root_hash))
    if report.num_encoded:
        rate = report.num_encoded / report.total_seconds
        rows.append(("this run", f"{report.num_encoded} pictures in {report.total_seconds:.1f} s, {rate:.1f} images/s"))
        times = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in sorted(report.seconds.items()))
        rows.append(("stages", f"{times}; bound by {report.bound_by}"))
    else:
        rows.append(("this run", "nothing to do, the store was complete"))
    _print_rows(rows)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or path of a TOML file.")],
    store: Annotated[Path | None, typer.Option(help="Store to train on.")] = None,
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
    from ..train.loop import StopRequest
    from ..train.loop import train as train_run
    from ..train.meters import StepReport
    from ..train.state import autocast_dtype
    from .progress import ProgressLine

    stop, caught = StopRequest(), []

    def request_stop(number: int, _frame: object) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the step
        caught.append(number)
        stop.set()

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
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
        rows.append(("state", "interrupted; a checkpoint is saved, run the same command again to go on"))
    _print_rows(rows)
    if not outcome.finished:
        raise typer.Exit(EXIT_CTRL_C if caught and caught[0] == signal.SIGINT else EXIT_INTERRUPTED)


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="Store to look at.")],
    key: Annotated[str | None, typer.Argument(help="Key of one record.")] = None,
    as_json: AsJson = False,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet of decoded records here (PNG).")] = None,
    vae: Annotated[str | None, typer.Option(help="Folder or hub id to decode with, else the store's own VAE.")] = None,
) -> None:
    """Say what a store holds, and whether its numbers are what they should be.

    Example: leandit inspect imagenet-256 --sheet sheet.png
    """
    from ..datasets.store import LatentStore
    from .inspector import describe_record, render, render_record, summarise

    opened = LatentStore(store, allow_incomplete=True)
    if sheet:
        from .sheet import load_decoder, store_sheet

        decoder = load_decoder(opened.spec.recipe["vae"], vae, torch_device("cpu"))
        sheet.parent.mkdir(parents=True, exist_ok=True)
        store_sheet(opened, decoder, count=24).save(sheet, format="PNG")
        print(f"leandit: contact sheet written to {sheet}", file=sys.stderr)
    values = describe_record(opened, opened.record(key)) if key else summarise(opened)
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        print(render_record(values) if key else render(values))


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
        _print_rows([("samples", str(len(result["samples"]))), *((name, str(result[name])) for name in shown)])


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("leandit-demo"),
    num_pictures: Annotated[int, typer.Option("--pictures", min=24, help="Pictures to draw.")] = 3000,
    overrides: Overrides = None,
) -> None:
    """Everything, on made-up pictures, on a CPU, in minutes; measures whether samples show what captions say.

    Example: leandit demo --out leandit-demo
    """
    from ..train.loop import StopRequest
    from .demo import run_demo

    signal.signal(signal.SIGTERM, _raise_terminated)
    out.mkdir(parents=True, exist_ok=True)
    run_demo(out, num_pictures=num_pictures, overrides=overrides or [], stop=StopRequest(), say=print)


def torch_device(name: str) -> Any:
    """The device that ``--device`` names.

    Raises: RecipeError: there is no such device; ResourceError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ResourceError("this command needs torch, which is not installed. pip install 'leandit[all]'") from error

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"--device '{name}': needed cpu, cuda, cuda:N or auto.") from error
    if device.type not in ("cpu", "cuda"):
        raise RecipeError(f"--device '{name}': needed cpu, cuda, cuda:N or auto.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise RecipeError(f"--device '{name}': torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here.")
    return device


def _print_rows(rows: list[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"{name:<12}{value}")


def _raise_terminated(_number: int, _frame: object) -> None:
    raise Terminated


def main() -> None:
    """Run the command; the one place where an exception becomes a line and an exit code."""
    try:
        code = app(standalone_mode=False)
        if code == EXIT_CTRL_C:  # typer has caught a Ctrl-C itself
            _fail("interrupted; run the same command again to go on", code)
    except UsageError as error:
        error.show()  # pyright: ignore[reportAttributeAccessIssue]
        code = EXIT_USAGE
    except Terminated:
        code = _fail("terminated; run the same command again to go on", EXIT_INTERRUPTED)
    except LeanditError as error:
        code = _fail(str(error), error.exit_code)
    except MemoryError:
        code = _fail("out of memory. Use a smaller batch (see --set)", EXIT_RESOURCES)
    except ModuleNotFoundError as error:
        code = _fail(f"{error.name} is not installed. pip install 'leandit[all]'", EXIT_RESOURCES)
    except Exception as error:  # noqa: BLE001 - the edge: nobody is above to catch it
        what = f"{type(error).__name__}: {error}"
        code = _fail(
            f"unexpected {what}. Run again with '{TRACEBACK}' before the command, and report it", EXIT_UNEXPECTED
        )
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    if TRACEBACK in sys.argv:
        traceback_module.print_exc()
    print(f"leandit: {message}", file=sys.stderr)
    return code
