"""Sampling: the solvers recover known targets, and ``sample`` finds captions, buckets and decoders or says why not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU, train_recipe
from torch import Tensor, nn

from leandit.datasets.errors import EncoderError, LeanditError, RecipeError, RunError
from leandit.datasets.store import LatentStore
from leandit.precompute.model_files import local_folder
from leandit.tools.sampler import Request, make_conditioning, sample
from leandit.train.conditioning import Conditioner, Conditioning
from leandit.train.config import ObjectiveSection
from leandit.train.loop import StopRequest, train
from leandit.train.objectives import ddpm_schedule
from leandit.train.sample import SAMPLERS, Guided, Sampler, Snapshot, Solver, draw_latents, load_snapshot
from leandit.train.spec import ModelSpec

LABELS = ModelSpec(name="DiT-S/2", channels=2, out_channels=4, num_classes=2, caption_width=0, base_size=8)
ALPHA_BAR = ddpm_schedule(CPU)["alpha_bar"].double()
MEANS = torch.tensor([0.7, -1.2, 3.0])  # of the classes 0, 1 and null


pytestmark = pytest.mark.usefixtures("tiny_models")


class Known(nn.Module):
    """The exact denoiser of latents that are Gaussian with the mean of their class.

    Args:
      objective: what it puts out: velocity, or noise or v, and a variance between the two bounds.
      std: of the latents, in each place.
    """

    def __init__(self, objective: ObjectiveSection, std: float) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self._kind, self._std = objective.kind, std
        self._predicts_v = objective.predict == "v"

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        assert conditioning.labels is not None
        mean = MEANS[conditioning.labels].double()[:, None, None, None]
        if self._kind == "flow":
            b = t.double()[:, None, None, None] / 1000
            a = 1 - b
        else:
            alpha_bar = ALPHA_BAR[t.long()][:, None, None, None]
            a, b = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        # x_t = a data + b noise; the best guesses of both, given x_t (Bishop 2006, equation 2.116).
        surprise = (x.double() - a * mean) / (a**2 * self._std**2 + b**2)
        data, noise = mean + a * self._std**2 * surprise, b * surprise
        if self._kind == "flow":
            return (noise - data).float()
        return torch.cat([a * noise - b * data if self._predicts_v else noise, torch.zeros_like(noise)], 1).float()


def snapshot_of(objective: ObjectiveSection, std: float) -> Snapshot:
    model = Known(objective, std).eval()
    return Snapshot(Path(), 0, model, LABELS, objective, None, None, Conditioner(LABELS, None), {})  # type: ignore


def draw(objective: ObjectiveSection, std: float, count: int = 2, **options: Any) -> Tensor:
    labels = torch.arange(2).repeat_interleave(count // 2)
    seed = int(options.pop("seed", 0))
    solver = Solver(**({"steps": 100, "guidance": 1.0} | options))  # type: ignore
    return draw_latents(snapshot_of(objective, std), Conditioning(labels=labels), size=(8, 8), seed=seed, solver=solver)


OBJECTIVES = [
    ObjectiveSection(kind="flow"),
    ObjectiveSection(kind="flow", shift=3.0),
    ObjectiveSection(kind="ddpm"),
    ObjectiveSection(kind="ddpm", predict="v"),
]
WAYS = [(objective, sampler) for objective in OBJECTIVES for sampler in SAMPLERS[objective.kind]]
WAYS_IDS = [f"{objective.kind}-{objective.shift:g}-{objective.predict}-{sampler}" for objective, sampler in WAYS]


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
@pytest.mark.parametrize("steps", [1, 4, 50])
def test_a_constant_target_is_recovered_exactly(objective: ObjectiveSection, sampler: Sampler, steps: int) -> None:
    steps = max(steps, 2) if sampler == "ddpm" else steps
    latents = draw(objective, 0.0, steps=steps, sampler=sampler)
    tolerance = 1e-3 if objective.kind == "flow" else 0.02  # DDIM's first step divides by the square root of 4e-5
    torch.testing.assert_close(latents[0], torch.full((2, 8, 8), 0.7), rtol=0, atol=tolerance)
    torch.testing.assert_close(latents[1], torch.full((2, 8, 8), -1.2), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
@pytest.mark.parametrize("steps", [150, 250, 350])
def test_a_gaussian_target_is_recovered(objective: ObjectiveSection, sampler: Sampler, steps: int) -> None:
    latents = draw(objective, 0.5, count=64, steps=steps, sampler=sampler)
    for part, mean in ((latents[:32], 0.7), (latents[32:], -1.2)):
        assert part.mean() == pytest.approx(mean, abs=0.02)
        assert part.std() == pytest.approx(0.5, abs=0.015 if sampler != "ddpm" else 0.03)


@pytest.mark.parametrize(("sampler", "steps"), [("ddim", 1000), ("dpm", 999), ("ddpm", 1000)])
def test_as_many_steps_as_there_are_times_are_as_good(sampler: Sampler, steps: int) -> None:
    assert draw(OBJECTIVES[2], 0.5, steps=steps, sampler=sampler).std(dim=(1, 2, 3)) == pytest.approx(0.5, abs=0.1)
    with pytest.raises(RecipeError, match="--sampler dpm needs 999 at most"):
        draw(OBJECTIVES[2], 0.5, steps=1000, sampler="dpm")


def test_a_learned_variance_is_never_guided() -> None:
    outputs = []
    for channels in (2, 4):
        solver = Solver("ddpm", guidance=3.0, guided_channels=channels)
        labels = Conditioning(labels=torch.tensor([0, 1]))
        x = torch.randn((2, 2, 8, 8), generator=torch.Generator().manual_seed(0))
        outputs.append(Guided(snapshot_of(OBJECTIVES[2], 0.5), labels, solver, CPU)(x, 500.0))
    assert torch.equal(*outputs)


def test_guidance_moves_away_from_null_by_its_formula() -> None:
    latents = draw(OBJECTIVES[0], 0.0, guidance=3.0)
    assert latents[0].mean() == pytest.approx(3.0 + 3 * (0.7 - 3.0), abs=1e-2)
    assert latents[1].mean() == pytest.approx(3.0 + 3 * (-1.2 - 3.0), abs=1e-2)


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
def test_a_picture_depends_on_the_seed_and_its_number_alone(objective: ObjectiveSection, sampler: Sampler) -> None:
    snapshot, solver = snapshot_of(objective, 0.5), Solver(sampler, steps=5, guidance=2.0)

    def drawn(numbers: list[int], seed: int = 0) -> Tensor:
        torch.manual_seed(len(numbers))
        labels = torch.tensor(numbers) % 2
        return draw_latents(
            snapshot, Conditioning(labels=labels), size=(8, 8), seed=seed, solver=solver, numbers=numbers
        )

    alone, together = torch.cat([drawn([7]), drawn([2])]), drawn([2, 5, 7])
    torch.testing.assert_close(alone, together[[2, 0]], rtol=1e-5, atol=1e-5)
    assert (drawn([7], seed=1) - alone[:1]).abs().max() > 0.1


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
def test_guidance_asks_for_null_within_its_interval_alone_and_in_one_batch(
    objective: ObjectiveSection, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, list[int]]] = []
    forward = Known.forward

    def watch(self: Known, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        assert conditioning.labels is not None
        assert t.unique().numel() == 1
        seen.append((float(t[0]) / 1000, conditioning.labels.tolist()))
        return forward(self, x, t, conditioning)

    monkeypatch.setattr(Known, "forward", watch)
    draw(objective, 0.5, steps=10, sampler=sampler, guidance=2.0, interval=(0.3, 0.6))
    assert len(seen) == (19 if sampler == "heun" else 10)
    guided = [labels for t, labels in seen if 0.3 <= t <= 0.6]
    assert 0 < len(guided) < len(seen)
    assert all(labels == [0, 1, 2, 2] for labels in guided)
    assert all(labels == [0, 1] for t, labels in seen if not 0.3 <= t <= 0.6)


@pytest.mark.parametrize("kind", ["flow", "ddpm"])
def test_guidance_of_the_first_channels_leaves_the_others_as_they_are(kind: Any) -> None:
    objective = ObjectiveSection(kind=kind)
    plain, all_of_them, first = (
        draw(objective, 0.5, steps=8, guidance=guidance, guided_channels=channels)
        for guidance, channels in ((1.0, 0), (3.0, 0), (3.0, 1))
    )
    torch.testing.assert_close(first[:, :1], all_of_them[:, :1])
    torch.testing.assert_close(first[:, 1:], plain[:, 1:])
    assert (first[:, :1] - plain[:, :1]).abs().max() > 1


def test_the_learned_variance_is_what_the_ancestral_sampler_draws_with() -> None:
    """Between the two bounds of Nichol and Dhariwal 2021, equation 15, of the steps that are made."""
    from leandit.train.sample import build_scheduler

    scheduler = build_scheduler(ObjectiveSection(kind="ddpm"), "ddpm")
    scheduler.set_timesteps(250)
    assert scheduler.timesteps[0] == 999
    assert scheduler.timesteps[-1] == 0
    t, before = scheduler.timesteps[100], scheduler.timesteps[101]
    beta = 1 - ALPHA_BAR[t] / ALPHA_BAR[before]
    posterior = beta * (1 - ALPHA_BAR[before]) / (1 - ALPHA_BAR[t])
    x, generators = torch.zeros(64, 1, 16, 16), [torch.Generator().manual_seed(i) for i in range(64)]
    for value in (-1.0, 0.0, 1.0):
        output = torch.cat([torch.zeros_like(x), torch.full_like(x, value)], 1)
        drawn = scheduler.step(output, t, x, generator=generators).prev_sample
        share = (value + 1) / 2
        wanted = (share * beta.log() + (1 - share) * posterior.log()).exp().sqrt()
        assert drawn.std() == pytest.approx(float(wanted), rel=0.02)


@pytest.mark.parametrize(("kind", "sampler"), [("flow", "ddim"), ("ddpm", "euler")])
def test_a_sampler_of_another_objective_is_refused(kind: Any, sampler: Sampler) -> None:
    with pytest.raises(RecipeError, match=f"--sampler {sampler}.*{kind}"):
        draw(ObjectiveSection(kind=kind), 0.5, sampler=sampler)


def test_the_ancestral_sampler_needs_both_ends_of_the_time() -> None:
    with pytest.raises(RecipeError, match=r"--steps 1.*2 at least"):
        draw(ObjectiveSection(kind="ddpm"), 0.5, sampler="ddpm", steps=1)


def test_guidance_of_one_never_asks_for_null(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    forward = Known.forward

    def watch(self: Known, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        assert conditioning.labels is not None
        seen.append(conditioning.labels)
        return forward(self, x, t, conditioning)

    monkeypatch.setattr(Known, "forward", watch)
    draw(OBJECTIVES[0], 0.5, steps=3)
    assert len(seen) == 3
    assert torch.stack(seen).max() == 1
    draw(OBJECTIVES[0], 0.5, steps=3, guidance=2.0)
    assert torch.stack(seen[3:]).max() == 2


def test_the_draw_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = draw(OBJECTIVES[2], 0.5, steps=5)
    torch.manual_seed(2)
    assert torch.equal(first, draw(OBJECTIVES[2], 0.5, steps=5))
    assert not torch.equal(first, draw(OBJECTIVES[2], 0.5, steps=5, seed=1))


@dataclass(frozen=True)
class Runs:
    """A trained run on labels and one on captions."""

    labels: Path
    captions: Path


@pytest.fixture(scope="module")
def runs(label_store: LatentStore, caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    for name, store in (("dit-s-4", label_store), ("pixart-tiny", caption_store)):
        recipe = train_recipe(name, "run.steps=4", "run.ema_decay=0.0", "run.checkpoint_every=4", "optimizer.lr=1e-2")
        train(recipe, store_path=store.path, run=root / name, device=CPU, report=lambda _: None, stop=StopRequest())
    return Runs(root / "dit-s-4", root / "pixart-tiny")


Draw = Callable[..., dict]


@pytest.fixture
def go(tmp_path: Path) -> Draw:
    """Sample into a folder of the test."""

    def run(
        path: Path, request: Request, *, store: Path | None = None, vae: str | None = None, text: str | None = None
    ) -> dict:
        return sample(path, request, out=tmp_path / "out", device=CPU, store=store, vae=vae, text=text)

    return run


def test_sampling_twice_gives_the_same_picture_and_another_seed_another(go: Draw, runs: Runs) -> None:
    grids = []
    for seed in (0, 0, 1):
        result = go(runs.labels, Request(labels=(0, 2), steps=3, seed=seed))
        grids.append(Path(result["grid"]).read_bytes())
    assert grids[0] == grids[1] != grids[2]
    assert (result["samples"], result["warning"]) == (["0: n000", "2: n002"], None)


@pytest.mark.parametrize("bucket", ["32x32", "64x32", "96x64"])
def test_other_sizes_than_those_of_the_store_work(bucket: str, go: Draw, runs: Runs) -> None:
    assert go(runs.labels, Request(labels=(1,), steps=2, bucket=bucket))["bucket"] == bucket


def test_captions_of_the_store_equal_those_encoded_live(
    go: Draw, runs: Runs, caption_store: LatentStore, tmp_path: Path
) -> None:
    captions = caption_store.captions["text"].to_pylist()[:4]
    moved = shutil.copytree(runs.captions, tmp_path / "elsewhere/run")  # from here the run does not find its store
    snapshot = load_snapshot(runs.captions, CPU)
    request = Request(captions=captions)
    stored = make_conditioning(snapshot, request, runs.captions, None, None, CPU)[1]
    live = make_conditioning(snapshot, request, moved, None, "shipped:t5", CPU)[1]
    assert stored.captions is not None
    assert live.captions is not None
    assert stored.caption_mask is not None
    assert live.caption_mask is not None
    assert torch.equal(stored.caption_mask, live.caption_mask)
    torch.testing.assert_close(stored.captions, live.captions, rtol=2e-3, atol=2e-3)  # stored as float16
    assert not torch.equal(stored.captions, live.captions)  # so they were not both read from the store


def test_any_new_caption_can_be_drawn_beside_one_of_the_store(go: Draw, runs: Runs) -> None:
    captions = ("a tiny yellow square", "a red circle", "a purple triangle and a cyan square")
    assert go(runs.captions, Request(captions=captions, steps=2))["samples"] == list(captions)


def test_without_a_wish_labels_or_captions_of_the_store_are_drawn(go: Draw, runs: Runs) -> None:
    assert go(runs.labels, Request(count=3, steps=1))["samples"] == ["0: n000", "1: n001", "2: n002"]
    assert len(go(runs.captions, Request(count=3, steps=1))["samples"]) == 3


@pytest.mark.parametrize(
    ("which", "request_", "words"),
    [
        ("labels", Request(labels=(3,)), "label 3.*0 to 2"),
        ("labels", Request(labels=(-1,)), "label -1"),
        ("labels", Request(captions=("a red circle",)), "takes class labels"),
        ("captions", Request(labels=(1,)), "takes captions"),
        ("labels", Request(labels=(1,), bucket="30x32"), "30x32.*multiples"),
        ("labels", Request(labels=(1,), bucket="big"), "big.*HEIGHTxWIDTH"),
    ],
)
def test_what_the_model_cannot_draw_is_refused(which: str, request_: Request, words: str, go: Draw, runs: Runs) -> None:
    with pytest.raises(RecipeError, match=words):
        go(getattr(runs, which), request_)


def test_a_store_that_is_not_there_is_refused_when_it_is_named(go: Draw, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(LeanditError, match="nowhere"):
        go(runs.captions, Request(captions=("a red circle",), steps=1), store=tmp_path / "nowhere")


def test_a_run_without_a_snapshot_is_refused(go: Draw, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no snapshot"):
        go(tmp_path, Request())


def other_vae(folder: Path, channels: int) -> str:
    """A tiny untrained VAE of half the size each way, as the shipped one would be with other weights."""
    from diffusers import AutoencoderKL

    levels = 4
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(4,) * levels,
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=channels,
        mid_block_add_attention=False,
    ).save_pretrained(folder)
    return str(folder)


def test_another_vae_is_used_with_a_warning(go: Draw, runs: Runs, tmp_path: Path) -> None:
    result = go(runs.labels, Request(labels=(0,), steps=1), vae=other_vae(tmp_path / "vae", 4))
    assert "not the VAE that the store was made with" in result["warning"]
    copy = shutil.copytree(local_folder("shipped:vae"), tmp_path / "same")  # type: ignore[arg-type]
    assert go(runs.labels, Request(labels=(0,), steps=1), vae=str(copy))["warning"] is None


def test_a_vae_of_other_channels_is_refused(go: Draw, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(EncoderError, match="8 channels, the model makes 4"):
        go(runs.labels, Request(labels=(0,), steps=1), vae=other_vae(tmp_path / "vae", 8))
