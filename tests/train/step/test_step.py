"""Training with features of the store, routed tokens and added terms: what a step computes, resumes and reports."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from making import CPU, train_recipe

from leandit.datasets.store import LatentStore
from leandit.errors import LeanditError
from leandit.train import step as step_module
from leandit.train.models.conditioning import Extras, Microbatch, select
from leandit.train.objectives.losses import PLAIN
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.step import image_losses, train_step

pytestmark = pytest.mark.usefixtures("tiny_models")
FLOW = ("objective.kind=flow", "model.name=DiT-S/1")
REPA = (*FLOW, "align.dino.block=1", "align.dino.projector_width=8")
TERMS = (*REPA, "align.dino.class_weight=0.03", "objective.cosine_weight=1.0", "objective.contrastive_weight=0.05")
TERMS += ("objective.dispersive_weight=0.5", "objective.dispersive_block=2")
OWN = ("self_align.weight=0.5", "self_align.block=1", "self_align.teacher_block=2", "self_align.projector_width=8")
ROUTED = ("routing.first_block=1", "routing.last_block=1")
ALL = (*TERMS, *OWN, "routing.kind=tread", *ROUTED)


@pytest.fixture(scope="module")
def store(feature_store: LatentStore) -> LatentStore:
    return feature_store


def state_of(store: LatentStore, *overrides: str) -> Run:
    return Run.open(train_recipe("dit-s-4", *overrides), [store], CPU, print)


def run_to(store: LatentStore, run: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    how = (f"run.steps={steps}", "run.checkpoint_every=2", "schedule.kind=constant")
    runs.run_to(train_recipe("dit-s-4", *overrides, *how), store, run)
    return runs.lines(run)


def microbatches_of(state: Run, monkeypatch: pytest.MonkeyPatch) -> list[Microbatch]:
    """What a step computes the losses of."""
    seen: list[Microbatch] = []
    monkeypatch.setattr(step_module, "image_losses", lambda *of: (seen.append(of[1]), image_losses(*of))[1])
    train_step(state, next(iter(state.loader)))
    return seen


def test_the_reported_loss_is_the_plain_one(store: LatentStore, tmp_path: Path) -> None:
    first, plain = (run_to(store, tmp_path / f"{len(how)}", 1, *how)[0] for how in (ALL, FLOW))
    assert plain["loss"] == pytest.approx(first["loss"], rel=1e-5)  # a new model puts out zero
    assert plain["loss_terms"] == {}


def test_the_alignment_is_to_features_of_the_same_records(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(store, *REPA)
    records = next(iter(state.loader)).records.tolist()
    seen = microbatches_of(state_of(store, *REPA), monkeypatch)
    patches = torch.cat([images.targets["dino"] for images in seen])
    assert patches.shape == (len(records), 16, 6)  # on the grid of the model's 4 x 4 tokens
    stored = store.feature("dino", "32x32")
    for place, record in enumerate(records):
        tokens = torch.from_numpy(stored.row(store.record_at(record).row)).mT.unflatten(1, (2, 2))[None]
        expected = torch.nn.functional.interpolate(tokens, (4, 4), mode="bilinear", antialias=True).flatten(2).mT[0]
        torch.testing.assert_close(patches[place], expected)


VALUES = ("model.value_residual=true", "model.norm=rms", "objective.dispersive_block=1")
SPRINT = ("routing.kind=sprint", "routing.path_drop=0.3", "routing.first_block=2", "routing.last_block=2", *VALUES)


@pytest.mark.parametrize("routing", [("routing.kind=tread", *ROUTED), SPRINT], ids=["tread", "sprint"])
def test_a_run_with_everything_resumes_bit_for_bit(
    routing: tuple[str, ...], store: LatentStore, tmp_path: Path
) -> None:
    everything = (*TERMS, *OWN, *routing, "data.holdout=0.3", "run.ema_decay=0.0", "routing.share=0.9")
    for run, step, every in (("whole", 4, 2), ("parts", 2, 0), ("parts", 4, 0)):
        run_to(store, tmp_path / run, step, *everything, f"run.evaluate_every={every}")
    assert runs.bits(tmp_path / "whole", 4) == runs.bits(tmp_path / "parts", 4)
    reports = runs.lines(tmp_path / "whole")
    names = {"cosine", "contrastive", "dispersive", "align.dino", "class.dino", "align.self-alignment"}
    assert all(report["loss_terms"].keys() == names for report in reports)
    evaluated = {report["step"]: report["held_out"] for report in reports if report["held_out"]}
    assert list(evaluated) == [2, 4]
    assert all(0.1 < one["loss"] < 10 for one in evaluated.values())
    assert all(one["averaged_loss"] == pytest.approx(one["loss"]) for one in evaluated.values())


def test_the_model_aligns_with_its_earlier_average(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(store, *FLOW, *OWN, "run.ema_decay=0.5", "optimizer.lr=1e-2")
    batches = iter(state.loader)
    for _ in range(3):
        train_step(state, next(batches))
    average = copy.deepcopy(state.engine.model)
    with torch.no_grad():
        for name, weight in state.engine.ema.weights.items():
            average.get_parameter(name).copy_(weight)
    before = {name: tensor.clone() for name, tensor in state.engine.model.state_dict().items()}
    images = microbatches_of(state, monkeypatch)[0]
    less_time = images.draws["less_time"]
    times = (images.times - 0.2 * less_time).clamp_min(0)
    assert 0.1 < less_time.max() <= 1
    noisy = (1 - times[:, None, None, None]) * images.latents + times[:, None, None, None] * images.noise
    expected = average(noisy, times * 1000, images.conditioning, Extras(watched=2)).watched
    teacher = images.targets["self-alignment"]
    torch.testing.assert_close(teacher, expected)
    assert not teacher.requires_grad
    assert any(not torch.equal(before[name], tensor) for name, tensor in state.engine.model.state_dict().items())


def test_alignment_and_routing_stop_after_their_last_step(store: LatentStore) -> None:
    state = state_of(store, *ALL, "align.dino.stop_step=1", "routing.stop_step=1")
    first, second = (train_step(state, batch) for _, batch in zip(range(2), state.loader, strict=False))
    assert first.terms["align.dino"] > 0 == second.terms["align.dino"]
    assert second.terms["class.dino"] > 0  # the model still denoises it


@pytest.mark.parametrize("microbatch", [1, 3, 4])
def test_terms_and_gradients_are_the_same_in_any_microbatches_even_where_a_last_image_is_alone(
    microbatch: int, store: LatentStore
) -> None:
    """Contrastive and dispersive terms compare the images of the global batch, whatever fits in memory."""
    states = [state_of(store, *ALL, "run.global_batch=7", f"run.microbatch={size}") for size in (0, microbatch)]
    gradients = []
    for state in states:
        with torch.no_grad():
            for number, parameter in enumerate(state.engine.model.parameters()):  # a new model puts out zero
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        batch = next(iter(state.loader))
        assert len(batch) == 7
        taken: dict[str, torch.Tensor] = {}
        state.engine.optimizer.register_step_pre_hook(
            lambda *_, state=state, taken=taken: taken.update(
                {name: p.grad.clone() for name, p in state.engine.model.named_parameters() if p.grad is not None}
            )
        )
        gradients.append((train_step(state, batch), taken))
    (whole, whole_gradients), (parts, part_gradients) = gradients
    assert whole.terms["contrastive"] < 0 > whole.terms["dispersive"]
    for name, term in whole.terms.items():
        torch.testing.assert_close(parts.terms[name], term, rtol=1e-4, atol=1e-6)
    assert whole_gradients.keys() == part_gradients.keys() != set()
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(part_gradients[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item())


def test_contrast_is_to_the_target_of_the_image_before_in_the_global_batch(
    store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(
        store, *FLOW, "objective.contrastive_weight=0.1", "run.global_batch=5", "run.microbatch=2", "optimizer.lr=1e-30"
    )
    parts = microbatches_of(state, monkeypatch)
    assert [len(part) for part in parts] == [2, 2, 1]
    targets = torch.cat([part.noise - part.latents for part in parts])
    for part, before in zip(parts, (targets[[4, 0]], targets[[1, 2]], targets[[3]]), strict=True):
        expected = -0.1 * before.square().mean((1, 2, 3))  # a new model puts out zero
        torch.testing.assert_close(image_losses(state, part, 1)["contrastive"], expected)


def test_a_rank_without_images_has_the_same_terms(store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(store, *ALL)
    images = microbatches_of(state, monkeypatch)[0]
    losses, empty = (image_losses(state, part, 1) for part in (images, select(images, slice(0, 0))))
    assert losses.keys() == empty.keys() > {PLAIN}
    assert all(loss.sum() == 0 for loss in empty.values())
    torch.stack([loss.sum() for loss in empty.values()]).sum().backward()
    gradients = [parameter.grad for parameter in state.engine.model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("share", "stay"), [(0.1, 15), (0.3, 12), (0.5, 8), (0.75, 4), (0.97, 1)])
def test_the_number_of_tokens_that_skip_is_rounded_down_as_published(
    share: float, stay: int, store: LatentStore
) -> None:
    """Of 16 tokens; TREAD's code, at 256: 231 stay at a share of 0.1, 180 at 0.3."""
    state = state_of(store, *FLOW, "routing.kind=tread", *ROUTED, f"routing.share={share}")
    tokens = []
    for block in state.engine.model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].shape[1]))
    train_step(state, next(iter(state.loader)))
    assert tokens == [stay, 16]


@pytest.mark.parametrize("kind", ["tread", "sprint"])
def test_evaluation_predicts_with_all_tokens(kind: str, store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(store, *TERMS, *OWN, f"routing.kind={kind}", *ROUTED, "routing.share=0.9", "optimizer.lr=1e-2")
    for _, batch in zip(range(3), state.loader, strict=False):  # so that the model puts out more than zero
        train_step(state, batch)
    images = microbatches_of(state, monkeypatch)[0]
    share = images.times[:, None, None, None]
    tokens = (1 - images.times[:, None]) * images.targets["class_token"]
    tokens = tokens + images.times[:, None] * images.draws["class_noise"]
    noisy = (1 - share) * images.latents + share * images.noise
    with torch.no_grad():
        model = state.engine.model
        velocity = model(noisy, images.times * 1000, images.conditioning, Extras(class_token=tokens)).output
        expected = (velocity - (images.noise - images.latents)).square().mean((1, 2, 3))
        routed = image_losses(state, images, 5)[PLAIN]
        torch.testing.assert_close(state.predict(images, state.inputs(images)).output, velocity)
    assert not torch.allclose(routed, expected, rtol=1e-4)


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm", "sde"])
def test_a_model_with_a_class_token_draws_latents(sampler: Any, store: LatentStore, tmp_path: Path) -> None:
    run_to(store, tmp_path / "run", 2, *ALL)
    snapshot, how = load_snapshot(tmp_path / "run", CPU), dict[str, Any](size=(4, 4), seed=0)
    conditioning, solver = snapshot.conditioner(torch.tensor([0, 1, 2]), {}), Solver(sampler, steps=4, guidance=2.0)
    drawn = draw_latents(snapshot, conditioning, **how, solver=solver)
    assert drawn.shape == (3, 4, 4, 4)
    alone = draw_latents(snapshot, select(conditioning, [1]), **how, solver=solver, numbers=[1])
    torch.testing.assert_close(drawn[1:2], alone, rtol=1e-4, atol=1e-5)


def test_a_null_is_drawn_without_the_path(store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPRINT's path-drop guidance; the share of dropped images is that of the recipe."""
    run_to(store, tmp_path / "run", 2, *FLOW, *SPRINT)
    snapshot, seen = load_snapshot(tmp_path / "run", CPU), list[Any]()
    snapshot.model.register_forward_pre_hook(lambda _, given: seen.append(given[3:]))
    conditioning = snapshot.conditioner(torch.tensor([0, 1, 2]), {})
    for guidance in (1.0, 2.0):
        solver = Solver(sampler="euler", steps=1, guidance=guidance)
        assert draw_latents(snapshot, conditioning, size=(4, 4), seed=0, solver=solver).shape == (3, 4, 4, 4)
    assert seen[0] == ()
    assert seen[1][0].without_path.tolist() == [False] * 3 + [True] * 3
    state = state_of(store, *FLOW, *SPRINT)
    images = microbatches_of(state, monkeypatch)[0]
    (routing,) = (one for one in state.techniques if one.key == "routing")
    dropped = routing.asks(Extras(), images, 1).without_path
    assert torch.equal(dropped, images.draws["path"] < 0.3)


def test_a_run_begins_from_one_with_projectors_and_the_other_way_round(store: LatentStore, tmp_path: Path) -> None:
    run_to(store, tmp_path / "repa", 2, *REPA)
    run_to(store, tmp_path / "plain", 2, *FLOW)
    for source, overrides in (("repa", FLOW), ("plain", REPA), ("repa", REPA)):
        state = state_of(store, *overrides, f"model.init_from={tmp_path / source}")
        own = state.engine.model.state_dict()
        saved = load_snapshot(tmp_path / source, CPU).model.state_dict()
        assert all(torch.equal(own[name], saved[name]) for name in own.keys() & saved.keys())


def test_four_frames_lead_from_the_step_to_the_model(store: LatentStore) -> None:
    state, frames = state_of(store, *REPA), list[str]()

    def look(*_: Any) -> None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name != "train_step":
            if "torch" not in frame.f_code.co_filename:
                frames.append(frame.f_code.co_qualname)
            frame = frame.f_back

    state.engine.model.register_forward_pre_hook(look)
    train_step(state, next(iter(state.loader)))
    assert frames[1:] == ["Run.predict", "image_losses"]  # frames[0] is the hook, and DiT.forward is the third


DISPERSIVE, TREAD = "objective.dispersive_weight=0.5", "routing.kind=tread"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("align.clip.block=1",), r"no image feature 'clip' .available: dino.*features\.clip"),
        (("align.dino.block=3",), r"align\.dino\.block 3: model 'DiT-S/1' has 2 blocks"),
        ((TREAD,), r"routing\.first_block 3, routing\.last_block 0: the model has 2 blocks"),
        ((DISPERSIVE, "objective.dispersive_block=7"), "has 2 blocks"),
        ((DISPERSIVE, TREAD, *ROUTED), r"objective\.dispersive_block 1: .*some skip the blocks 1 to 1"),
        ((TREAD, "routing.path_drop=0.1"), 'path_drop needs kind = "sprint"'),
        ((TREAD, *ROUTED, "model.value_residual=true"), "first_block 1 has only the values"),
        (("model.name=pixart-tiny", TREAD), "routing need the blocks of a DiT"),
    ],
)
def test_what_store_or_model_lacks_is_named(overrides: tuple[str, ...], message: str, store: LatentStore) -> None:
    with pytest.raises(LeanditError, match=message):
        state_of(store, *FLOW, *overrides)
