"""``leandit demo``: both stages on generated images, on a CPU, in minutes, with a measurement at the end.

Draws captioned images, encodes them once, inspects the store, trains a small text-conditioned transformer, samples, and
counts the samples whose main object has the color and the shape of the caption; shuffled captions are the baseline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...datasets.disk.hashing import canonical_json
from ...datasets.disk.strays import write_output
from ...datasets.order.slices import spread
from ...datasets.store import LatentStore
from ...precompute import config as precompute_config
from ...precompute.pipeline import precompute
from ...train import config as train_config
from ...train.loop import StopRequest, train
from ...train.metrics.history import StepReport
from ...train.sampling.snapshot import load_snapshot
from ...train.weights import folders
from ...units import readable_size, readable_time
from ..inspection.images import Cell, LatentDecoder, choose_records, draw_sheet, png_bytes, store_sheet
from ..inspection.store_facts import StoreFacts
from ..inspection.store_text import render
from ..sample.request import SampleRequest
from ..sample.sampler import ImageSampler
from ..terminal.progress import ProgressLine
from .judge import match_rates
from .scenes import write_image_folder

RECIPE = "demo"
SAMPLES_PER_BUCKET = 64
SHOWN_SAMPLES = 24
SAMPLE_STEPS = 16
GUIDANCE = 2.0  # more of it rounds the corners of squares
PROGRESS_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the run: the columns of progress.png
PROGRESS_PER_BUCKET = 2  # captions, its rows
OUTPUTS = {  # what each image of the output folder shows
    "contact sheet": "contact-sheet.png",
    "progress": "progress.png",
    "samples": "samples.png",
}
CPU = torch.device("cpu")


class Stage(NamedTuple):
    """One row of the demo's table: how long a stage took, and the number of images and the bytes that it wrote."""

    name: str
    seconds: float
    images: int
    bytes: int


def run_demo(
    out: Path, *, num_images: int, overrides: list[str], stop: StopRequest, say: Callable[[str], None]
) -> dict:
    """Run all stages; the same call again resumes.

    Args:
      out: folder for images, store, run and results.
      overrides: of the train recipe.
      say: prints results.
    Returns: what demo.json holds: stages, match rates and paths.
    Raises: KeyboardInterrupt: the training was stopped.
    """
    stages: list[Stage] = []
    rates: dict[str, dict[str, float]] = {}
    for name, run_stage in (
        ("draw images", lambda: _draw(out, num_images)),
        ("precompute", lambda: _precompute(out)),
        ("inspect", lambda: _inspect(out, say)),
        ("train", lambda: _train(out, overrides, stop)),
        ("sample progress", lambda: _sample_progress(out)),
        ("sample, measure", lambda: _sample_and_measure(out, rates)),
    ):
        start = time.perf_counter()
        images, size = run_stage()
        stages.append(Stage(name, time.perf_counter() - start, images, size))
    result = {
        "stages": [stage._asdict() for stage in stages],
        "num_samples": stages[-1].images,
        **rates,
        **{name.replace(" ", "_"): str(out / file) for name, file in OUTPUTS.items()},
    }
    write_output(out / "demo.json", canonical_json(result))
    say(render_result(stages, rates, out))
    return result


def _draw(out: Path, num_images: int) -> tuple[int, int]:
    with ProgressLine() as progress:
        return num_images, write_image_folder(out / "source", num_images, progress)


def _precompute(out: Path) -> tuple[int, int]:
    recipe, source, store = precompute_config.load(RECIPE, []), out / "source", out / "store"
    with ProgressLine() as progress:
        report = precompute(recipe, source_path=source, store_path=store, device=CPU, progress=progress)
    assert report.manifest is not None, "without parts, a precompute ends with the seal"
    return report.num_encoded, sum(entry.bytes for entry in report.manifest.files)


def _inspect(out: Path, say: Callable[[str], None]) -> tuple[int, int]:
    store = LatentStore(out / "store")
    say(render(StoreFacts(store)) + "\n")
    decoder = LatentDecoder.of_store(store, None, CPU)
    sheet = store_sheet(store, decoder, choose_records(store, count=24))
    write_output(out / OUTPUTS["contact sheet"], png_bytes(sheet))
    return store.records.num_rows, 0


def _train(out: Path, overrides: list[str], stop: StopRequest) -> tuple[int, int]:
    recipe, run = train_config.load(RECIPE, overrides), out / "run"
    with ProgressLine() as progress:

        def show(report: StepReport) -> None:
            loss = "" if report.loss is None else f"loss {report.loss:.3f}  "
            note = f"{loss}{report.images_per_second:.0f} images/s"
            progress("train", report.step, recipe.run.steps, note)

        outcome = train(recipe, store_path=out / "store", run=run, device=CPU, report=show, stop=stop)
    if not outcome.finished:
        raise KeyboardInterrupt
    return outcome.num_images, sum(path.stat().st_size for path in run.glob("snapshot-*/*"))


def _sample_progress(out: Path) -> tuple[int, int]:
    """Sample the same captions with the same noise at some steps: a row for each caption, a column for each step."""
    run, store, steps, columns = out / "run", LatentStore(out / "store"), progress_steps(out / "run"), []
    for step in steps:
        images, captions = sample_captions(run, store, CPU, step=step, per_bucket=PROGRESS_PER_BUCKET)
        key = f"step {step} of {steps[-1]}"
        columns.append([Cell(*pair, key) for pair in zip(images, captions, strict=True)])
    cells = [cell for row in zip(*columns, strict=True) for cell in row]
    path = out / OUTPUTS["progress"]
    write_output(path, png_bytes(draw_sheet(cells, columns=len(steps))))
    return len(cells), path.stat().st_size


def _sample_and_measure(out: Path, rates: dict[str, dict[str, float]]) -> tuple[int, int]:
    """Sample, and add the match rates for the right and for shuffled captions to ``rates``."""
    images, captions = sample_captions(out / "run", LatentStore(out / "store"), CPU)
    shuffled = [captions[i] for i in np.random.default_rng(0).permutation(len(captions))]
    rates |= {"score": match_rates(images, captions), "score_shuffled": match_rates(images, shuffled)}
    every = max(1, len(images) // SHOWN_SAMPLES)
    cells = [Cell(*pair) for pair in zip(images, captions, strict=True)][::every][:SHOWN_SAMPLES]
    path = out / OUTPUTS["samples"]
    write_output(path, png_bytes(draw_sheet(cells)))
    return len(images), path.stat().st_size


def progress_steps(run: Path) -> list[int]:
    """Steps of the snapshots nearest to ``PROGRESS_SHARES`` of the run, in order."""
    saved = sorted(step for step, _ in folders.steps(folders.SNAPSHOT, run))
    return sorted({min(saved, key=lambda step: abs(step - share * saved[-1])) for share in PROGRESS_SHARES})


def sample_captions(
    run: Path, store: LatentStore, device: torch.device, *, step: int = 0, per_bucket: int = SAMPLES_PER_BUCKET
) -> tuple[list[np.ndarray], list[str]]:
    """Sample captions of the store, equally many from each bucket.

    Args:
      step: of the snapshot; 0: the newest.
      per_bucket: most captions of a bucket.
    Returns: images, (height, width, 3) uint8 each, and their captions.
    """
    snapshot = load_snapshot(run, device, step)
    texts = store.captions["text"].to_pylist()
    images, captions = [], []
    with ProgressLine() as progress:
        for number, bucket in enumerate(store.buckets):
            index = store.index(bucket)
            chosen = [texts[index.caption_ids[index.caption_starts[row]]] for row in spread(len(index), per_bucket)]
            how = {"steps": SAMPLE_STEPS, "guidance": GUIDANCE, "seed": number}
            request = SampleRequest(captions=chosen, bucket=bucket, **how, store=store.path)
            images += [pixels for _, pixels in ImageSampler(snapshot, run, request, device).draw(range(len(chosen)))]
            captions += [caption.strip() for caption in chosen]
            progress("sample", number + 1, len(store.buckets))
    return images, captions


def render_result(stages: list[Stage], rates: dict[str, dict[str, float]], out: Path) -> str:
    """The table of stages, the match rates, and the paths of the images."""
    lines = [f"{'stage':<18}{'time':>13}{'images':>9}{'images/s':>10}{'size':>11}"]
    for stage in stages:
        size = readable_size(stage.bytes) if stage.bytes else "-"
        rate = f"{stage.images / stage.seconds:,.0f}" if stage.images and stage.seconds else "-"
        lines.append(f"{stage.name:<18}{readable_time(stage.seconds):>13}{stage.images:>9,}{rate:>10}{size:>11}")
    lines += [
        f"{'total':<18}{readable_time(sum(stage.seconds for stage in stages)):>13}",
        "",
        f"{stages[-1].images} samples, main object as the caption says:",
        f"  {'':<20}{'color':>8}{'shape':>8}",
    ]
    for name, key in (("own captions", "score"), ("shuffled captions", "score_shuffled")):
        lines.append(f"  {name:<20}{rates[key]['colour']:8.0%}{rates[key]['shape']:8.0%}")
    return "\n".join([*lines, "", *(f"{name:<18}{out / file}" for name, file in OUTPUTS.items())])
