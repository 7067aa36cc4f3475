"""The time of a step on many GPUs: its limits, its order, and how far it is from published runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leandit.tools.plan import scaling
from leandit.tools.plan.scaling import COUNTS, StepWork, render_scaling, sent_bytes, step_time
from leandit.tools.plan.scaling import scaling as scaling_rows
from leandit.tools.plan.strategies import recipe_strategy
from leandit.train.config import ParallelSection, load
from leandit.train.metrics.gpus import GPUS, gpu_by_name

TERA = 1e12
XL2_FLOPS, VAE_FLOPS, DINO_FLOPS = 0.712 * TERA, 0.273 * TERA, 0.044 * TERA  # of an image of 256 px


@dataclass(frozen=True)
class PublishedRun:
    """A run, named as in docs/planning.md, and what it reached; the constants of the model are fitted to some.

    Args:
      rate: images a second and GPU.
      microbatch: images of each forward of a GPU; 0: all of them.
      network_gbit: a GPU; not published.
    """

    name: str
    rate: float
    gpu: str
    gpus: int
    batch: int
    work: StepWork
    strategy: str = "ddp"
    microbatch: int = 0
    network_gbit: float = 400.0
    is_fitted: bool = False

    @property
    def predicted(self) -> float:
        """Images a second and GPU by the model."""
        gpu, images = gpu_by_name(self.gpu), self.batch // self.gpus
        parts = self.gpus, images, self.microbatch or images
        return images / step_time(self.work, gpu, self.strategy, *parts, network_gbit=self.network_gbit).seconds


def work(
    flops: float,
    parameters: float,
    bytes_a_parameter: int = 20,
    precision: str = "fp16",
    launches: tuple[int, int] = (3359, 3001),
) -> StepWork:
    """The work of a model that is gathered in 16 bits; 20 bytes a parameter are AdamW with one average.

    Args:
      launches: operations that allocate, as traced; by default those of a DiT-XL.
    """
    weights = 4 * parameters
    return StepWork(flops, weights, weights, bytes_a_parameter * parameters, 2 * parameters, precision, launches)


DIT = work(XL2_FLOPS, 675e6)
RECOMPUTED = work(XL2_FLOPS * 4 / 3, 675e6, launches=(4339, 3981))
REPA = work(XL2_FLOPS + DINO_FLOPS, 675e6)
ONLINE = work(XL2_FLOPS + VAE_FLOPS, 675e6, precision="tf32")
RECOMPUTED_ONLINE = work(XL2_FLOPS * 4 / 3 + VAE_FLOPS, 675e6, precision="tf32", launches=(4339, 3981))
MASKED = work(0.39 * TERA, 730e6)
SD2_256, SD2_512 = (work(flops * TERA, 866e6, 16, launches=(3300, 2900)) for flops in (0.543, 2.413))
WAN = work(37440 * 176e9, 14.3e9, 16, "bf16")
WAN_TFLOP = 37440 * 176e9 / TERA  # NVIDIA publishes TFLOP/s

SHARED = ("fsdp, gradients", 16, 200.0)
RUNS = (
    PublishedRun("fast-DiT XL/2, 1 A100", 96.0, "A100-80", 1, 128, RECOMPUTED, is_fitted=True),
    PublishedRun("fast-DiT XL/2, 2 A100", 85.0, "A100-80", 2, 128, RECOMPUTED, is_fitted=True),
    PublishedRun("fast-DiT XL/2, 1 A100, TF32", 53.8, "A100-80", 1, 128, RECOMPUTED_ONLINE),
    PublishedRun("fast-DiT XL/2, 2 A100, TF32", 49.3, "A100-80", 2, 128, RECOMPUTED_ONLINE),
    PublishedRun("DiT-XL/2, 8 A100, TF32", 25.9, "A100-80", 8, 256, ONLINE),
    PublishedRun("MaskDiT-XL/2, 8 A100", 273.0, "A100-80", 8, 1024, MASKED, is_fitted=True),
    PublishedRun("REPA SiT-XL/2, 8 H100", 173.0, "H100", 8, 256, REPA, is_fitted=True),
    PublishedRun("LightningDiT-XL/1, 8 H800", 284.0, "H100", 8, 1024, DIT, is_fitted=True),
    *(
        PublishedRun(f"SD2 U-Net {side} px, {gpus} A100", rate / gpus, "A100-80", gpus, 2048, unet, *SHARED, gpus == 8)
        for side, unet, rates in (
            (256, SD2_256, (1100, 2180, 4080, 8530, 11600)),
            (512, SD2_512, (290, 585, 1195, 2340, 4590)),
        )
        for gpus, rate in zip((8, 16, 32, 64, 128), rates, strict=True)
    ),
    *(
        PublishedRun(f"Wan 2.1 14B, {gpus} H100", rate / WAN_TFLOP, "H100", gpus, gpus, WAN, "fsdp")
        for gpus, rate in ((8, 175.88), (64, 228.85))
    ),
)


DOCS = Path(__file__).parents[3] / "docs" / "planning.md"
STRATEGIES = ("ddp", "fsdp", "fsdp, gradients", "hsdp", "zero-1", "zero-2", "zero-3")
H100 = next(gpu for gpu in GPUS if gpu.name == "H100")
HEAVY = dataclasses.replace(DIT, flops=20 * DIT.flops)
FP32 = dataclasses.replace(DIT, gathered=DIT.weights, precision="fp32")


def sent(strategy: str, ranks: int, microbatches: int = 1) -> float:
    return sum(sent_bytes(strategy, FP32, ranks, microbatches).values())


def seconds(strategy: str, ranks: int, images: int = 32, **changes: float) -> float:
    return step_time(DIT, H100, strategy, ranks, images, images, **changes).seconds


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_one_gpu_does_not_communicate(strategy: str) -> None:
    assert sent(strategy, 1) == 0
    time = step_time(DIT, H100, strategy, 1, 32, 32)
    assert time.exposed == 0
    assert time.seconds == time.compute + time.update > 0


@pytest.mark.parametrize("ranks", [2, 8, 64, 128])
def test_each_strategy_sends_what_its_algorithm_says(ranks: int) -> None:
    share = (ranks - 1) / ranks * FP32.weights
    assert sent("ddp", ranks) == pytest.approx(2 * share)
    assert sent("ddp", ranks, microbatches=4) == sent("ddp", ranks)
    assert sent("fsdp", ranks) == pytest.approx(1.5 * sent("ddp", ranks))
    assert sent("fsdp", ranks, microbatches=4) == pytest.approx(4 * sent("fsdp", ranks))
    assert sent("fsdp, gradients", ranks) == sent("zero-1", ranks) == sent("zero-2", ranks) == sent("ddp", ranks)
    assert sent("zero-2", ranks, microbatches=4) == pytest.approx(5 * share)  # gradients of each, weights once
    assert sent("zero-3", ranks) == sent("fsdp", ranks) == sent("fsdp, offloaded", ranks)


def test_hsdp_sends_between_machines_only_gradients_of_its_part() -> None:
    parts = sent_bytes("hsdp", FP32, 64)
    across = parts.pop("between")
    assert sum(parts.values()) == pytest.approx(3 * 7 / 8 * FP32.weights)
    assert across == pytest.approx(2 * 7 / 8 * FP32.weights / 8)
    assert sent_bytes("hsdp", FP32, 64, 4)["between"] == pytest.approx(across)  # after the last microbatch alone
    assert sent_bytes("hsdp", FP32, 8) == sent_bytes("fsdp", FP32, 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_bandwidth_is_never_slower_and_more_images_never_faster(strategy: str) -> None:
    by_network = [seconds(strategy, 64, network_gbit=gbit) for gbit in (1, 10, 100, 400, 1600)]
    assert by_network == sorted(by_network, reverse=True)
    assert by_network[0] > by_network[-1]
    slow_link = dataclasses.replace(H100, link_gb_s=1.0)
    assert step_time(DIT, slow_link, strategy, 8, 32, 32).seconds > seconds(strategy, 8)
    for ranks in (8, 128):
        by_images = [seconds(strategy, ranks, images) for images in (1, 2, 8, 32, 128)]
        assert all(more >= less * (1 - 1e-9) for less, more in itertools.pairwise(by_images))


def test_what_fits_behind_the_backward_is_hidden() -> None:
    assert step_time(DIT, H100, "ddp", 64, 32, 32).exposed == 0
    slow = step_time(DIT, H100, "ddp", 64, 32, 32, network_gbit=10)
    sent_seconds = slow.exposed + 2 / 3 * slow.compute
    assert sent_seconds == pytest.approx(2 * 63 / 64 * DIT.gradients / (0.8 * 8 * 10 / 8 * 1e9))
    assert slow.limit == "communication"
    parts = step_time(DIT, H100, "ddp", 64, 32, 8, network_gbit=10)
    assert parts.exposed == pytest.approx(sent_seconds - 2 / 3 * parts.compute / 4)


def test_a_measured_mfu_takes_the_place_of_the_fit_but_not_of_launches() -> None:
    time = step_time(DIT, H100, "ddp", 8, 256, 256, mfu=0.5)
    assert time.compute == pytest.approx(256 * DIT.flops / (989.4e12 * 0.5))
    assert step_time(DIT, H100, "ddp", 8, 1, 1, mfu=0.5).compute == DIT.launches[0] * scaling.LAUNCH_SECONDS


def test_the_table_is_of_the_recipes_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parents[1])
    for section, names in (
        (ParallelSection(), ("single", "ddp")),
        (ParallelSection(strategy="fsdp", shard="gradient"), ("single", "fsdp, gradients")),
        (ParallelSection(strategy="hsdp"), ("single", "hsdp")),
        (ParallelSection(deepspeed_config="docs/ds-zero-2.json"), ("zero-2", "zero-2")),
    ):
        recipe = load("dit-s-2-256", []).model_copy(update={"parallel": section})
        assert (recipe_strategy(recipe, 1), recipe_strategy(recipe, 8)) == names


def table(batch: int = 256, gpus: int = 8, *, fits: bool = True) -> dict[str, Any]:
    result = scaling_rows(
        lambda ranks, images: step_time(HEAVY, H100, "ddp", ranks, images, images) if fits else None,
        "ddp",
        batch=batch,
        images=1000 * batch,
        gpus=gpus,
    )
    return result | {"gpu": "H100"}


def test_the_table_has_dashes_where_a_gpu_has_no_image() -> None:
    result = table(batch=64, gpus=24)
    rows = {row["gpus"]: row for row in result["rows"]}
    assert list(rows) == sorted({*COUNTS, 24})
    assert (rows[64]["images_a_gpu"], rows[128]["seconds"], rows[1]["of_linear"]) == (1, None, 1)
    assert all(0 < row["of_linear"] <= 1 for row in result["rows"] if row["of_linear"])
    assert rows[8]["seconds"] == pytest.approx(1000 * rows[8]["step_seconds"])
    assert rows[8]["gpu_hours"] == pytest.approx(8 * rows[8]["seconds"] / 3600)
    assert "predicted, not measured" in render_scaling(result)[0]
    *_, last, note = render_scaling(result)
    assert last.split()[:3] == ["128", "-", "-"]
    assert "more GPUs than images" in note
    assert render_scaling(table(fits=False))[-1].startswith("no number of GPUs fits one image")


def documented(heading: str) -> Iterator[list[str]]:
    """Cells of the rows of the table below a line of docs/planning.md that begins so."""
    text = DOCS.read_text().split(heading, 1)[1]
    lines = text[text.index("\n|") + 1 :].splitlines()[2:]
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_documented_rates_are_what_the_model_says_of_published_runs() -> None:
    by_name = {run.name: run for run in RUNS}
    rows = list(documented("Images/s per GPU:"))
    assert {row[0].strip("\\*") for row in rows} == {run.name for run in RUNS}
    for name, published, predicted, ratio, _ in rows:
        run = by_name[name.strip("\\*")]
        assert run.is_fitted == name.startswith("\\*")
        assert float(published) == pytest.approx(run.rate, rel=0.005)
        assert float(predicted) == pytest.approx(run.predicted, rel=0.005)
        assert float(ratio) == pytest.approx(run.predicted / run.rate, abs=0.006)


@pytest.mark.parametrize(("name", "step"), [("MATMUL_SHARE", 0.3), ("BYTES_PER_FLOP", 0.15)])
def test_the_constants_fit_the_runs_of_one_machine(name: str, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def error() -> float:
        return sum(math.log(run.predicted / run.rate) ** 2 for run in RUNS if run.is_fitted)

    fitted, value = error(), getattr(scaling, name)
    for factor in (1 - step, 1 + step):
        monkeypatch.setattr(scaling, name, value * factor)
        assert error() > fitted
