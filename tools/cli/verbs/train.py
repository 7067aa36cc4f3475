"""``leandit train`` makes a run; ``leandit average`` averages its weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ....errors import RecipeError
from ....train.parallel.stop import StopRequest
from ...terminal.outcome import command_without, computed_precision, print_next, sample_with
from ...terminal.text import Rows, print_rows, print_text
from ..options import (
    Device,
    DryRun,
    Overrides,
    Recipe,
    StoreOfRecipe,
    output,
    print_line,
    rank_device,
    rank_progress,
    read_path,
    torch_device,
)
from ..preflight import check_run, check_trainable

if TYPE_CHECKING:  # torch takes a second to import
    import torch

    from ....train.loop import Outcome
    from ....train.metrics.history import StepReport
    from ....train.parallel.ranks import Ranks


CONTINUE_HELP = "Go on from the newest checkpoint with another rate, schedule, clipping or seed; repeatable."
Continued = Annotated[list[str] | None, Option("--continue-with", metavar="KEY=VALUE", help=CONTINUE_HELP)]


def train(
    context: typer.Context,
    recipe: Recipe,
    store: StoreOfRecipe = None,
    run: Annotated[Path | None, output("Folder of the run; the same command resumes.")] = None,
    device: Device = "auto",
    overrides: Overrides = None,
    continue_with: Continued = None,
    dry_run: DryRun = False,
) -> None:
    """Train a diffusion transformer on one store or several; no encoder is loaded.

    Example: leandit train dit-s-2-256 --store imagenet-256 --run runs/dit-s --set run.steps=1000
    """
    from ....train.config import load, notes
    from ....train.run.settings import check_continued

    continued = [_key_of(setting) for setting in continue_with or []]
    loaded = load(recipe, [*(overrides or []), *(continue_with or [])])
    check_continued(continued)
    names_store = bool(store or loaded.data.mixture)
    if dry_run:
        from ...plan.dry_run import describe_train

        print_text(describe_train(loaded, store, torch_device(device)))
        if run and names_store:
            print_next(command_without("--dry-run"))
        return
    if run is None or not names_store:
        raise RecipeError("train: expected --store PATH and --run PATH (or --dry-run).")
    check_trainable(loaded, store)
    from ....train.loop import train as train_run
    from ....train.parallel.ranks import read_ranks
    from ...terminal.progress import train_note

    stop: StopRequest = context.obj
    stop.catch(signal.SIGINT)
    ranks = read_ranks()
    for note in notes(loaded) if ranks.is_first else ():
        print_line(note)
    place = rank_device(device, ranks)
    with rank_progress(ranks) as progress:

        def report(figures: StepReport) -> None:
            progress("train", figures.step, loaded.run.steps, train_note(figures))

        outcome = train_run(
            loaded,
            store_path=store,
            run=run,
            device=place,
            report=report,
            stop=stop,
            warn=print_line,
            say=print_line,
            recipe_name=recipe,
            continue_with=continued,
        )
    if ranks.is_first:
        print_rows([("run", str(run)), *_rows(outcome, loaded.run.steps, place, ranks)])
        if outcome.finished:
            print_next(sample_with(run), ["report", run, "--out", f"{run}.html"])
    if not outcome.finished:
        raise typer.Exit(stop.exit_code)


def _key_of(setting: str) -> str:
    """The recipe key of a ``--continue-with``.

    Raises: RecipeError: it is not KEY=VALUE.
    """
    key, equals, _ = setting.partition("=")
    key = key.strip()
    if not equals or "." not in key:
        raise RecipeError(
            f"--continue-with '{setting}': expected SECTION.KEY=VALUE, as in --continue-with optimizer.lr=5e-5."
        )
    return key


def _rows(outcome: Outcome, num_steps: int, device: torch.device, ranks: Ranks) -> Rows:
    """What a call has trained.

    Args:
      num_steps: that the recipe asks for.
    """
    from ....train.parallel.ranks import choose_strategy

    recipe, first = outcome.recipe, outcome.first_step
    precision = computed_precision(recipe.run.precision, device)
    beyond = "; the recipe asks for fewer" if outcome.step > num_steps else ""
    rows = [("steps", f"{outcome.step:,} of {num_steps:,}{beyond}"), ("computed in", precision)]
    if ranks.world_size > 1:
        rows.append(("ranks", f"{ranks.world_size}, {choose_strategy(recipe.parallel, ranks)}"))
    if first is None:
        rows.append(("this run", "nothing to do: the run is finished"))
    elif outcome.losses:
        is_short = outcome.num_images < (outcome.step - first + 1) * recipe.run.global_batch
        short = " (some batches were partial)" if is_short and not recipe.data.batch_tokens else ""
        rate = f"at best {outcome.images_per_second:,.1f} images/s"
        rows.append(("this run", f"from step {first:,}, {outcome.num_images:,} images{short}, {rate}"))
        rows.append(("loss", ", ".join(f"{loss:.4f} at step {step:,}" for step, loss in dict.fromkeys(outcome.losses))))
    if outcome.num_nonfinite:
        most = recipe.run.skip_nonfinite
        rows.append(
            (
                "skipped",
                f"{outcome.num_nonfinite} of at most {most} updates of the run, their loss or gradient not finite",
            )
        )
    if not outcome.finished:
        rows.append(("state", "interrupted and saved; run the same command again to resume"))
    return rows


AVERAGED_HELP = 'Run that was trained with ema.kind = "power".'


def average(
    run: Annotated[Path, Argument(parser=read_path, metavar="RUN", help=AVERAGED_HELP)],
    length: Annotated[
        float, Option(min=0.001, max=0.27, help="Standard deviation of the average, as a share of the run.")
    ],
    out: Annotated[Path, output("Folder for the snapshot; sample from it as from a run.")],
    step: Annotated[int, Option(min=0, help="Average up to this step; 0: the newest stored one.")] = 0,
) -> None:
    """Compute a weight average of any length from the averages that a run has stored.

    Example: leandit average runs/dit-s --length 0.075 --out runs/dit-s-0.075
    """
    check_run(run)
    from ....train.optim.posthoc_ema import combine

    combined = combine(run, length, out, step=step)
    rows = [
        ("snapshot", str(combined.path)),
        ("built from", f"{combined.used} stored average{'s' * (combined.used != 1)}"),
    ]
    print_rows([*rows, ("length", f"{length:g}, {combined.error:.2%} from its profile")])
    print_next(sample_with(out))
