"""``leandit demo``: both stages on generated pictures, on a CPU, in minutes, with a measurement at the end.

Draws captioned pictures, encodes them once, inspects the store, trains a small text-conditioned DiT, samples, and
counts samples whose colour and shape match the caption; shuffled captions are the baseline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ...datasets.disk.files import write_atomic
from ...datasets.disk.hashing import canonical_json
from ...datasets.store import LatentStore
from ...datasets.units import readable_size, readable_time
from ...precompute import config as precompute_config
from ...precompute.pipeline import precompute
from ...train import config as train_config
from ...train.loop import StopRequest, train
from ...train.metrics.window import StepReport
from ...train.sampling.snapshot import load_snapshot
from ...train.weights import folders
from ..inspection.contact_sheet import choose_records, store_sheet
from ..inspection.decoder import LatentDecoder
from ..inspection.grid import Cell, draw_sheet
from ..inspection.store_facts import StoreFacts
from ..inspection.store_text import render
from ..sample.request import SampleRequest
from ..sample.sampler import ImageSampler
from ..terminal.progress import ProgressLine
from .charts import draw_loss
from .pictures import draw_scene, main_object_of, make_scenes, read_main_object

RECIPE = "demo"
SAMPLES_PER_BUCKET = 64
SAMPLE_STEPS = 24
GUIDANCE = 3.0
PROGRESS_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the run: the columns of progress.png
PROGRESS_PER_BUCKET = 2  # captions, its rows
PICTURES = {  # what each file of the output folder shows
    "contact sheet": "contact-sheet.png",
    "loss": "loss.png",
    "progress": "progress.png",
    "samples": "samples.png",
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Stage:
    """One row of the demo's table."""

    name: str
    seconds: float
    images: int
    bytes: int

    @property
    def images_per_second(self) -> float:
        """Rate of the stage."""
        return self.images / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Score:
    """Share of samples whose main object has the colour and the shape of the caption."""

    colour: float
    shape: float


def run_demo(
    out: Path, *, num_pictures: int, overrides: list[str], stop: StopRequest, say: Callable[[str], None]
) -> dict:
    """Run all stages; the same call again resumes.

    Args:
      out: folder for pictures, store, run and results.
      overrides: of the train recipe.
      say: prints results.
    Returns: stages, scores and paths, as plain values.
    """
    stages: list[Stage] = []

    def timed(name: str, stage: Callable[[], tuple[int, int]]) -> None:
        """Run a stage that returns its images and bytes."""
        start = time.perf_counter()
        images, size = stage()
        stages.append(Stage(name, time.perf_counter() - start, images, size))

    timed("draw pictures", lambda: (num_pictures, _draw_pictures(out, num_pictures)))
    timed("precompute", lambda: _precompute(out))
    timed("inspect", lambda: _inspect(out, say))
    timed("train", lambda: _train(out, overrides, stop))
    timed("sample progress", lambda: _sample_progress(out))
    scores: list[Score] = []
    timed("sample, measure", lambda: _sample(out, scores))
    matched, shuffled, num_samples = *scores, stages[-1].images
    result = {
        "stages": [asdict(stage) for stage in stages],
        "num_samples": num_samples,
        "score": asdict(matched),
        "score_shuffled": asdict(shuffled),
        **{name.replace(" ", "_"): str(out / file) for name, file in PICTURES.items()},
    }
    write_atomic(out / "demo.json", canonical_json(result))
    say(render_result(stages, matched, shuffled, num_samples, out))
    return result


def _draw_pictures(out: Path, num_pictures: int) -> int:
    with ProgressLine() as progress:
        return draw_pictures_folder(out / "pictures", num_pictures, progress)


def _precompute(out: Path) -> tuple[int, int]:
    recipe, source, store = precompute_config.load(RECIPE, []), out / "pictures", out / "store"
    with ProgressLine() as progress:
        report = precompute(recipe, source_path=source, store_path=store, device=CPU, progress=progress)
    assert report.manifest is not None, "without parts, a precompute ends with the seal"
    return report.num_encoded, sum(entry.bytes for entry in report.manifest.files)


def _inspect(out: Path, say: Callable[[str], None]) -> tuple[int, int]:
    store = LatentStore(out / "store")
    say(render(StoreFacts(store)) + "\n")
    decoder = LatentDecoder.of_store(store, None, CPU)
    store_sheet(store, decoder, choose_records(store, count=24)).save(out / PICTURES["contact sheet"])
    return store.records.num_rows, 0


def _train(out: Path, overrides: list[str], stop: StopRequest) -> tuple[int, int]:
    recipe, run = train_config.load(RECIPE, overrides), out / "run"
    with ProgressLine() as progress:

        def show(report: StepReport) -> None:
            note = f"loss {report.loss:.3f}  {report.images_per_second:.0f} images/s"
            progress("train", report.step, recipe.run.steps, note)

        outcome = train(recipe, store_path=out / "store", run=run, device=CPU, report=show, stop=stop)
    if not outcome.finished:
        raise KeyboardInterrupt
    draw_loss(run).save(out / PICTURES["loss"])
    return outcome.num_images, sum(path.stat().st_size for path in run.glob("snapshot-*/*"))


def _sample_progress(out: Path) -> tuple[int, int]:
    """Sample the same captions with the same noise at some steps: a row a caption, a column a step."""
    steps, store = progress_steps(out / "run"), LatentStore(out / "store")
    drawn = [sample_captions(out / "run", store, CPU, step=step, per_bucket=PROGRESS_PER_BUCKET) for step in steps]
    captions = drawn[-1][1]
    cells = [
        Cell(pictures[row], captions[row], f"step {step} of {steps[-1]}")
        for row in range(len(captions))
        for step, (pictures, _) in zip(steps, drawn, strict=True)
    ]
    path = out / PICTURES["progress"]
    draw_sheet(cells, columns=len(steps)).save(path)
    return len(cells), path.stat().st_size


def _sample(out: Path, scores: list[Score]) -> tuple[int, int]:
    """Sample, and append the scores for the right and for shuffled captions."""
    pictures, captions = sample_captions(out / "run", LatentStore(out / "store"), CPU)
    scores += [score(pictures, captions), score(pictures, shuffle(captions))]
    shown = list(zip(pictures, captions, strict=True))[:: len(pictures) // 24][:24]
    path = out / PICTURES["samples"]
    draw_sheet([Cell(pixels, caption) for pixels, caption in shown]).save(path)
    return len(pictures), path.stat().st_size


def progress_steps(run: Path) -> list[int]:
    """Steps of the snapshots nearest to ``PROGRESS_SHARES`` of the run, in order."""
    saved = sorted(step for step, _ in folders.steps(folders.SNAPSHOT, run))
    return sorted({min(saved, key=lambda step: abs(step - share * saved[-1])) for share in PROGRESS_SHARES})


def draw_pictures_folder(folder: Path, count: int, progress: ProgressLine) -> int:
    """Draw the pictures and their ``metadata.jsonl``, unless they exist.

    Returns: bytes of the folder.
    """
    scenes = make_scenes(count, seed=0)
    rows = [{"file_name": f"images/{i:05d}.png", "captions": scene.captions} for i, scene in enumerate(scenes)]
    metadata = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / "metadata.jsonl"
    if not path.is_file() or path.read_bytes() != metadata:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for i, (scene, row) in enumerate(zip(scenes, rows, strict=True), 1):
            draw_scene(scene).save(folder / row["file_name"])
            progress("draw", i, count)
        write_atomic(path, metadata)
    return sum(file.stat().st_size for file in (folder / "images").iterdir())


def sample_captions(
    run: Path, store: LatentStore, device: torch.device, *, step: int = 0, per_bucket: int = SAMPLES_PER_BUCKET
) -> tuple[list[np.ndarray], list[str]]:
    """Sample captions of the store, equally many from each bucket.

    Args:
      step: of the snapshot; 0: the newest.
      per_bucket: most captions of a bucket.
    """
    snapshot = load_snapshot(run, device, step)
    texts = store.captions["text"].to_pylist()
    pictures, captions = [], []
    with ProgressLine() as progress:
        for number, bucket in enumerate(store.buckets):
            index = store.index(bucket)
            chosen = np.linspace(0, len(index.rows) - 1, min(per_bucket, len(index.rows))).round().astype(int)
            wanted = [texts[index.caption_ids[index.caption_starts[i]]] for i in chosen]
            how = {"steps": SAMPLE_STEPS, "guidance": GUIDANCE, "seed": number}
            request = SampleRequest(captions=wanted, bucket=bucket, **how, store=store.path)
            drawn = ImageSampler(snapshot, run, request, device).draw(range(len(wanted)))
            pictures += [pixels for _, pixels in drawn]
            captions += [caption.strip() for caption in wanted]
            progress("sample", number + 1, len(store.buckets))
    return pictures, captions


def score(pictures: list[np.ndarray], captions: list[str]) -> Score:
    """Compare the main object of each picture, by the pixel rule, with its caption."""
    found = [read_main_object(picture) for picture in pictures]
    said = [main_object_of(caption) for caption in captions]
    return Score(
        colour=float(np.mean([f is not None and f[0] == s[0] for f, s in zip(found, said, strict=True)])),
        shape=float(np.mean([f is not None and f[1] == s[1] for f, s in zip(found, said, strict=True)])),
    )


def shuffle(captions: list[str]) -> list[str]:
    """The captions in another order: the baseline of a model that ignores them."""
    return [captions[i] for i in np.random.default_rng(0).permutation(len(captions))]


def render_result(stages: list[Stage], matched: Score, shuffled: Score, num_samples: int, out: Path) -> str:
    """The table of stages, the scores, and the pictures."""
    lines = [f"{'stage':<18}{'time':>13}{'images':>9}{'images/s':>10}{'size':>11}"]
    for s in stages:
        size = readable_size(s.bytes) if s.bytes else "-"
        rate = f"{s.images_per_second:,.0f}" if s.images else "-"
        lines.append(f"{s.name:<18}{readable_time(s.seconds):>13}{s.images:>9,}{rate:>10}{size:>11}")
    lines += [
        f"{'total':<18}{readable_time(sum(s.seconds for s in stages)):>13}",
        "",
        f"{num_samples} samples, main object as the caption says:",
        f"  {'':<20}{'colour':>8}{'shape':>8}",
        f"  {'own captions':<20}{matched.colour:8.0%}{matched.shape:8.0%}",
        f"  {'shuffled captions':<20}{shuffled.colour:8.0%}{shuffled.shape:8.0%}",
        "",
        *(f"{name:<18}{out / file}" for name, file in PICTURES.items()),
    ]
    return "\n".join(lines)
