"""The sub-commands. They are verbs; settings live in the recipe (``--set section.key=value``).

Results go to stdout, progress and warnings to stderr. A user's mistake prints one line, not a traceback. Each
sub-command imports its stage itself, so ``leandit inspect`` starts without torch.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import sys
import traceback as traceback_module
import warnings
from typing import Annotated, Any

import typer
from typer import Option

from ... import __version__
from ...datasets.disk.faults import fault_of, is_fault
from ...errors import LeanditError, RecipeError, StoreWarning
from ...train.parallel.stop import EXIT_CTRL_C, StopRequest, Terminated, message_of_rank, record_error
from ..terminal.text import QUIET, printable, show_decisions
from .options import print_error
from .verbs.export import export, publish
from .verbs.look import report, view
from .verbs.plan import bench, plan
from .verbs.precompute import import_, precompute
from .verbs.sample import evaluate, sample
from .verbs.start import demo, recipes
from .verbs.store import compact, inspect, verify
from .verbs.train import average, train

LOG = logging.getLogger(__name__)
NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_UNEXPECTED, EXIT_USAGE, EXIT_RESOURCES = 1, 2, 5
TRACEBACK = "--traceback"
# The smallest extra that installs a module, or what a command needs of those that several extras install.
EXTRAS = {
    **dict.fromkeys(("jinja2", "markupsafe", "matplotlib"), "report"),
    **dict.fromkeys(("fsspec", "s3fs"), "remote"),
    **dict.fromkeys(("braceexpand", "filelock", "sentencepiece", "transformers"), "precompute"),
    **dict.fromkeys(("tensorboard", "torchdata"), "train"),
    "peft": "lora",
}
EXTRAS_OF_COMMANDS = {
    **dict.fromkeys(("import", "inspect", "precompute", "verify"), "precompute"),
    **dict.fromkeys(("average", "export", "plan", "train"), "train"),
    "publish": "publish",
    "report": "report",
}
FORMAT_WARNING = warnings.formatwarning

# diffusers imports torchao if it is installed; both log warnings about parts that leandit does not use.
NOISY = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")

HELP = """Encode images and captions once into a latent store, then train diffusion transformers on the store alone.

First look: leandit demo

In order: leandit precompute RECIPE --source IMAGES --store STORE, then leandit train RECIPE --store STORE --run RUN,
then leandit sample RUN --out SAMPLES.

A recipe is a name or a TOML file; --set section.key=value changes a setting, and --dry-run shows what would be done.
To resume, run the same command again.
"""
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
app.add_typer(bench, name="bench")
app.add_typer(plan, name="plan")
IN_ORDER = (
    precompute,
    import_,
    train,
    inspect,
    verify,
    compact,
    report,
    view,
    sample,
    evaluate,
    average,
    export,
    publish,
)
for command in (*IN_ORDER, recipes, demo):
    app.command(command.__name__.rstrip("_"))(command)

# typer brings its own copy of click and exports only some of it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, Option(TRACEBACK, help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print results and errors only.", envvar=QUIET)] = False,
    verbose: Annotated[bool, Option("--verbose", help="Log decisions and their reasons to stderr.")] = False,
    version: Annotated[
        bool, Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    # DeepSpeed's launcher puts it before the sub-command, and LOCAL_RANK, which is what is read, into the environment.
    _local_rank: Annotated[int | None, Option("--local_rank", hidden=True)] = None,
) -> None:
    """Encode once, train lean: latent stores for training diffusion transformers."""
    if quiet and verbose:
        raise RecipeError(f"--verbose and --quiet (or {QUIET}) are mutually exclusive. Pass one of them.")
    os.environ[QUIET] = "1" if quiet else ""
    show_decisions(verbose)
    LOG.info("leandit %s, Python %s, %s", __version__, platform.python_version(), platform.platform())


def run_command(stop: StopRequest) -> int:
    """Run the command; the only place that turns an exception into one line and an exit code.

    Raises: Terminated; KeyboardInterrupt.
    """
    warnings.formatwarning = _warning_line
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        code = app(standalone_mode=False, obj=stop)
        if code == EXIT_CTRL_C:  # typer handles Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except UsageError as error:
        error.show()  # pyright: ignore[reportAttributeAccessIssue]
        return EXIT_USAGE
    except Exception as error:  # nothing above catches it
        is_ours = isinstance(error, LeanditError)
        if stop.is_terminated and not is_ours:  # an extension module turns an exception of its import into ImportError
            raise Terminated from error
        if TRACEBACK in sys.argv:
            traceback_module.print_exc()
        message, code = _explain(error)
        record_error(message)
        if said := message_of_rank(message):
            print_error(said)
        return code


def _warning_line(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """Warnings of stores as one line, those of libraries as Python shows them."""
    if issubclass(category, StoreWarning):
        return f"leandit: {printable(str(message))}\n"
    return FORMAT_WARNING(message, category, *place)


def _explain(error: Exception) -> tuple[str, int]:
    """The line and the exit code of an error."""
    if isinstance(error, LeanditError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "out of memory. Use a smaller batch (see --set)", EXIT_RESOURCES
    if isinstance(error, ModuleNotFoundError):
        problem = f"{error.name} is not installed" if error.name else str(error)  # some libraries raise it unnamed
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        extra = EXTRAS.get((error.name or "").split(".")[0]) or EXTRAS_OF_COMMANDS.get(command, "all")
        return f"{problem}. Install it with: pip install 'leandit[{extra}]'", EXIT_RESOURCES
    if isinstance(error, OSError) and error.errno in NOT_PERMITTED:
        problem = f"'{error.filename or 'a file'}': {error.strerror}"
        hint = "Grant this user permission, or use another path; the same command then resumes"
        return f"{problem}. {hint}", EXIT_RESOURCES
    if isinstance(error, OSError) and is_fault(error):
        fault = fault_of(error.filename or "of unknown name", error)
        return str(fault), fault.exit_code
    problem = f"{type(error).__name__}: {error}"
    hint = f"Run again with '{TRACEBACK}' before the command, and report it"
    return f"unexpected {problem}. {hint}", EXIT_UNEXPECTED
