"""Runs that another release wrote, and whose first weights have moved: they resume, report and sample."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making import TRAIN_RECIPE, Leandit, tree_digest
from runs import bits, lines

from leandit.datasets.disk.hashing import canonical_json, sha256_of
from leandit.datasets.store import LatentStore

pytestmark = pytest.mark.usefixtures("tiny_models")

CONSTANT = ("schedule.kind=constant", "schedule.warmup_steps=0", "run.compile=false", "run.checkpoint_every=2")
Train = Callable[..., Any]


@pytest.fixture
def train(leandit: Leandit, label_store: LatentStore) -> Train:
    """Train a DiT on labels to a number of steps, on the CPU."""

    def run(folder: Path, steps: int, *settings: str, options: tuple[object, ...] = ()) -> Any:
        sets = ["model.name=DiT-S/4", "model.num_classes=0", *TRAIN_RECIPE, *CONSTANT, f"run.steps={steps}", *settings]
        flags = [part for setting in sets for part in ("--set", setting)]
        where = ("--store", label_store.path, "--run", folder, "--device", "cpu")
        return leandit("train", "dit-s-2-256", *where, *flags, *options)

    return run


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_bytes(canonical_json(values))


def change_state(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state of a checkpoint or snapshot as another release would have written it, with its hash."""

    def rehashed(values: dict[str, Any]) -> None:
        del values["state_sha256"]
        change(values)
        values["state_sha256"] = sha256_of(values)

    change_json(path / "state.json", rehashed)


def older(run: Path) -> None:
    """Take away what a newer release has added since."""

    def older_manifest(values: dict[str, Any]) -> None:
        for section, key in (
            ("run", "residual"),
            ("data", "check"),
            ("data", "access"),
            ("model", "value_residual"),
            ("ema", "keep_every"),
        ):
            del values["recipe"][section][key]
        del values["recipe"]["self_align"]
        del values["spec"]["reference"], values["spec"]["options"]["value_residual"]

    change_json(run / "run.json", older_manifest)
    reports = [{name: value for name, value in line.items() if name not in ("mfu", "epoch")} for line in lines(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reports))
    start = json.loads((run / "starts.jsonl").read_text())
    (run / "starts.jsonl").write_text(json.dumps({"time": start["time"], "from_step": 0}) + "\n")
    change_state(run / "checkpoint-2", lambda state: state["spec"].pop("reference"))


def newer(run: Path) -> None:
    """Add what an older release has never seen, or a newer one has removed."""

    def newer_manifest(values: dict[str, Any]) -> None:
        values["recipe"]["objective"]["glitter_weight"] = 0.25
        values["recipe"]["sparkle"] = {"blocks": [1, 2]}
        values["spec"]["options"]["gated"] = False
        values["stores"][0]["codec"] = "blosc"
        values["written_by"] = "9.9.9"

    def newer_state(state: dict[str, Any]) -> None:
        state["curriculum"] = {"stage": 2}
        state["spec"]["options"]["gated"] = False
        for entry in state["files"].values():
            entry["crc32c"] = 1

    change_json(run / "run.json", newer_manifest)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line | {"tflops": 3.0}) + "\n" for line in lines(run)))
    start = json.loads((run / "starts.jsonl").read_text())
    (run / "starts.jsonl").write_text(json.dumps(start | {"container": "nightly"}) + "\n")
    change_state(run / "checkpoint-2", newer_state)


@pytest.mark.parametrize("other_release", [older, newer])
def test_a_run_of_another_release_resumes_bit_for_bit_and_has_its_report(
    other_release: Callable[[Path], None], train: Train, leandit: Leandit, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train(whole, 4).code == 0
    assert train(run, 2).code == 0
    other_release(run)
    report = leandit("report", run, "--out", tmp_path / "report.html")
    assert (report.code, (tmp_path / "report.html").is_file()) == (0, True)
    ended = train(run, 4)
    assert ended.code == 0, ended.err
    assert bits(run, 4) == bits(whole, 4)
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]
    page = (tmp_path / "report.html").read_text()
    for key, value in (("objective.glitter_weight", "0.25"), ("sparkle.blocks", "[1, 2]")):
        assert (f"{key} = {value}" in ended.err) == (other_release is newer)
        assert (key in page) == (other_release is newer)
    again = train(run, 5)
    assert (again.code, "glitter_weight" in again.err) == (0, False)


def test_another_value_of_a_key_that_is_new_is_refused(train: Train, tmp_path: Path) -> None:
    assert train(tmp_path / "run", 2).code == 0
    change_json(tmp_path / "run/run.json", lambda values: values["recipe"]["model"].pop("qk_norm"))
    before = tree_digest(tmp_path / "run")
    ended = train(tmp_path / "run", 4, "model.qk_norm=true")
    assert ended.code == 3
    assert "model.qk_norm was False, is True" in ended.err
    assert tree_digest(tmp_path / "run") == before


def test_a_snapshot_outlives_a_removed_technique_and_names_it(train: Train, leandit: Leandit, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, 2).code == 0
    whole = tmp_path / "whole"
    shutil.copytree(run, whole)

    def with_removed(state: dict[str, Any]) -> None:
        state["objective"] |= {"glitter_weight": 0.25, "sparkle": 0.0}
        state["spec"]["sparkles"] = False
        state["latent"]["colour"] = "srgb"

    change_state(run / "snapshot-2", with_removed)
    grids = []
    for folder in (whole, run):
        ended = leandit("sample", folder, "--out", folder / "grid", "--steps", 2, "--label", 0, "--device", "cpu")
        assert ended.code == 0, ended.err
        assert ("objective.glitter_weight = 0.25" in ended.err) == (folder == run)
        grids.append((folder / "grid/grid.png").read_bytes())
    assert grids[0] == grids[1]
    export = leandit("export", run, "--out", tmp_path / "out", "--format", "official")
    assert export.code == 0, export.err


def test_a_snapshot_of_a_model_that_this_release_does_not_know_is_refused_by_name(
    train: Train, leandit: Leandit, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(run, 1).code == 0
    change_state(run / "snapshot-1", lambda state: state["spec"]["options"].update(gated="sigmoid"))
    ended = leandit("sample", run, "--out", tmp_path / "grid", "--label", 0, "--device", "cpu")
    assert ended.code in (3, 4)
    assert "gated" in ended.err


# ----------------------------------------------------------------------------------------- the first weights have moved


@pytest.fixture
def base(train: Train, leandit: Leandit, tmp_path: Path) -> Path:
    """A DiT file to fine-tune."""
    assert train(tmp_path / "base", 1).code == 0
    assert leandit("export", tmp_path / "base", "--out", tmp_path / "official", "--format", "official").code == 0
    (file,) = (tmp_path / "official").glob("*.pt")
    return file


@pytest.mark.parametrize("kind", ["file", "run"])
def test_a_full_fine_tune_resumes_without_its_first_weights(
    kind: str, base: Path, train: Train, tmp_path: Path
) -> None:
    source = base if kind == "file" else tmp_path / "base"
    named = f"model.init_from={source}"
    assert train(tmp_path / "whole", 4, named).code == 0
    for number in range(3):
        assert train(tmp_path / f"{number}", 2, named).code == 0
    moved = tmp_path / "elsewhere.pt"
    source.rename(moved)
    for number, settings in enumerate(([named], [f"model.init_from={moved}"], [])):
        ended = train(tmp_path / f"{number}", 4, *settings)
        assert ended.code == 0, ended.err
        assert bits(tmp_path / f"{number}", 4) == bits(tmp_path / "whole", 4)
        assert ("is not read" in ended.err) == (number == 1)


def test_before_its_first_checkpoint_a_run_needs_its_first_weights(base: Path, train: Train, tmp_path: Path) -> None:
    named = f"model.init_from={base}"
    assert train(tmp_path / "whole", 2, named).code == 0
    assert train(tmp_path / "run", 2, named).code == 0
    for kind in ("checkpoint", "snapshot"):
        shutil.rmtree(tmp_path / f"run/{kind}-2")
    moved = tmp_path / "elsewhere.pt"
    base.rename(moved)
    assert train(tmp_path / "run", 2, named).code == 3
    assert train(tmp_path / "run", 2, f"model.init_from={moved}").code == 0
    assert bits(tmp_path / "run", 2) == bits(tmp_path / "whole", 2)
