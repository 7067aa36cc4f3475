"""The ``leandit`` command: exit codes, one-line errors, what goes where, and a frozen list of flags."""

from __future__ import annotations

import ast
import errno
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from click.testing import CliRunner
from faults import flip, without_seal
from forked import IN_TURN, run_forked
from making import LABEL_RECIPE, ROOT, TRAIN_RECIPE, Ended, Leandit, all_commands, encode, label_recipe, tree_digest
from noise_store import make_store
from safetensors.torch import load_file

from leandit import __version__
from leandit.datasets.disk.files import remove
from leandit.datasets.store import LatentStore
from leandit.recipe import shipped_recipes
from leandit.tools.cli.commands import app
from leandit.tools.cli.options import written_path

SCRIPT = Path(sys.executable).with_name("leandit")
SHARD = "buckets/32x32/moments/c/0/0/0/0"
PRECOMPUTE, TRAIN = sorted(shipped_recipes("leandit.precompute")), sorted(shipped_recipes("leandit.train"))

# Put a new knob in the recipe: a flag is for where things lie, and for how this one call behaves.
FLAGS = {
    "precompute": ("--address --device --drop-gone --dry-run --engine --part --retry-rejected --set --source --store"),
    "import": "--null --set --source --store",
    "train": "--continue-with --device --dry-run --run --set --store",
    "inspect": "--bucket --class --count --json --originals --rejects --revision --sheet --source --vae",
    "verify": "--deep --device --json --quick --repair --set --source",
    "compact": "--out --without",
    "report": "--count --out --vae",
    "view": "--device --open --port --revision --vae",
    "sample": (
        "--base --batch --bucket --caption --compile --device --diffusion --encoders --guidance "
        "--guidance-times --guided-channels --image --json --label --last-step --npz --num --out --precision --recipe "
        "--sampler --seed --shift --steps --store --text --vae --weights"
    ),
    "evaluate": (
        "--against --against-num --base --bucket --captions --clip --crop --device --diffusion --features "
        "--guidance --guidance-times --guided-channels --json --keep-statistics --last-step --num --out "
        "--precision --resize --sampler --seed --shift --source --steps --text --vae --weights"
    ),
    "average": "--length --out --step",
    "export": "--base --encoders --format --json --merged --out --step --text --vae --weights",
    "publish": "--dry-run --encoder-license --json --license --private --revision --to",
    "recipes": "--json --keys",
    "demo": "--images --out --set",
    "bench": "",
    "plan": "",
    "plan train": "--gpu --gpus --images --json --network-gbit --resolution --run --set --store",
    "bench train": "--device --json --rounds --set --steps --store",
    "bench loader": "--batch --cold --json --scratch --seconds",
}
COMMANDS = all_commands(typer.main.get_command(app))
EVERYWHERE = {"--install-completion", "--quiet", "--show-completion", "--traceback", "--verbose", "--version"}


pytestmark = pytest.mark.usefixtures("tiny_models")


def settings(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


TINY = settings(["model.name=DiT-S/4", "model.num_classes=0", "run.compile=false", *TRAIN_RECIPE])


def test_the_flags_of_every_command_are_frozen() -> None:
    found = {
        name: " ".join(sorted(flag for param in command.params for flag in param.opts if flag.startswith("--")))
        for name, command in COMMANDS.items()
    }
    assert found == FLAGS
    everywhere = typer.main.get_command(app).params
    assert {flag for param in everywhere if not param.hidden for flag in param.opts} == EVERYWHERE


def required_words(command: Any) -> list[str]:
    """A value for each required argument and option, without the others."""
    words: list[str] = []
    for parameter in command.params:
        if parameter.required:
            words += [word for word in parameter.opts[:1] if word.startswith("--")] + ["0.1"]
    return words


OUTPUTS = [
    (name, param.opts[0])
    for name, command in COMMANDS.items()
    for param in command.params
    if (hint := getattr(param, "type_descriptor", None)) and hint.parameter_info.parser is written_path
    if param.opts[0].startswith("--")
]
assert len(OUTPUTS) > 10


def test_a_url_as_an_output_is_refused_before_anything_is_done(leandit: Leandit) -> None:
    for command, option in OUTPUTS:
        ended = leandit(*command.split(), *required_words(COMMANDS[command]), option, "s3://bucket/out")
        assert (ended.code, ended.out, os.listdir()) == (2, "", []), command
        words = " ".join(ended.err.replace("│", "").split())
        assert "'s3://bucket/out' is a URL" in words
        assert "Pass a folder" in words


def test_a_file_url_is_a_path(leandit: Leandit, label_store: LatentStore, tmp_path: Path) -> None:
    (tmp_path / "a store").symlink_to(label_store.path)
    ended = leandit("inspect", f"file://{tmp_path}/a%20store", "--json")
    assert (ended.code, json.loads(ended.out)["store"]) == (0, f"{tmp_path}/a store")
    assert leandit("sample", "file://elsewhere/run", "--out", "there").code == 2


MISTAKES = {  # the command, its exit code, and what its line begins with and holds
    "precompute imagenet-256 --source nope --store s": (3, "source 'nope': "),
    "precompute imagenet-25 --source . --store s": (2, "recipe 'imagenet-25': "),
    "precompute imagenet-256 --source . --store s --set vae.dtype=int3": (2, "recipe 'imagenet-256': "),
    "precompute imagenet-256": (2, "precompute: expected --source PATH and --store PATH"),
    "train dit-s-2-256": (2, "train: expected --store PATH and --run PATH"),
    "train dit-s-2-256 --store nope --run r": (3, "store 'nope': ", "leandit precompute"),
    "train dit-s-2-256 --store a --run r --set data.mixture=[{store='b'}]": (2, "--store 'a': the recipe names"),
    "train dit-s-2-256 --run r --set data.mixture=[{store='../three',weight=0},{store='../four'}]": (
        2,
        "recipe 'dit-s-2-256': ",
    ),
    "train dit-s-2-256 --set optimizer.lrr=1 --dry-run": (2, "recipe", "optimizer.lrr", "optimizer.lr'"),
    "train dit-s-2-256 --set run.steps=many --dry-run": (2, "recipe", "run.steps", "many"),
    "sample nope --out o": (3, "run 'nope': ", "Train first"),
    "sample run --out o --label lion": (2, "--label: no class 'lion'. There are 3 classes, 0 to 2: cat, dog,"),
    "sample run --out o --caption cat": (2, "--caption: model 'DiT-S/4' takes class labels. Use --label."),
    "sample nope --out o --guidance-times 3,4": (2, "--guidance-times '3,4'"),
    "sample shelf --out o": (3, "'shelf' is a store, not a run.", "leandit train RECIPE --store shelf --run RUN"),
    "average nope --length 0.1 --out o": (3, "run 'nope': "),
    "evaluate nope --against run": (3, "'nope': there is no such run, store, folder or file"),
    "evaluate run": (2, "evaluate: nothing to measure. Pass a reference with --against"),
    "evaluate run --against run --features ./nope": (2, "evaluate: 'run' is a run, so its images need a"),
    "evaluate . --against run --features ./nope": (3, "--features './nope': there is no such folder"),
    "inspect nope": (3, "store 'nope'"),
    "inspect nope --originals photos": (2, "inspect --originals: it takes no value", "'photos'", "--source PATH"),
    "inspect nope --bucket 8x8": (2, "inspect: ", "Pass --sheet"),
    "inspect nope --sheet s.png --originals": (2, "inspect --originals: the store", "--source PATH"),
    "inspect nope key --rejects": (2, "inspect --rejects: ", "Leave out KEY"),
    "inspect nope key --sheet s.png --class 3": (2, "inspect KEY: it shows one record"),
    "verify nope --deep": (2, "", "--deep", "--source"),
    "compact nope --out new": (3, "", "nope"),
    "--verbose --quiet recipes": (2, "--verbose and --quiet"),
    "recipes pixart-265": (2, "recipe 'pixart-265'", "Did you mean 'pixart-256'?"),
    "precompute imagenet-256 --source . --store s --set vae.model=./nope": (3, "vae.model './nope': "),
    "precompute imagenet-256 --source . --store s --set vae.model=./mochi": (3, "vae.model 'mochi': its config"),
}
MISTAKES_SEEN_BY_TORCH = {
    "train dit-s-2-256 --device gpu --dry-run": (2, "--device 'gpu'"),
    "train dit-s-2-256 --device cuda:99 --dry-run": (2, "--device 'cuda:99'"),
    "bench loader nope": (3, "", "nope", "leandit precompute"),
    "plan train dit-s-2-256 --resolution 256 --gpu 4090": (2, "--gpu '4090': not known. Did you mean 'RTX-4090'?"),
    "plan train dit-s-2-256 --resolution 256 --gpu h20": (2, "--gpu 'h20': not known. Did you mean 'H200'?"),
}


def assert_mistake(mistake: tuple[Any, ...], code: int, said: str) -> None:
    wanted, beginning, *words = mistake
    assert (code, said.count("\n")) == (wanted, 1), said
    assert said.startswith(f"leandit: {beginning}"), said
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("command", MISTAKES_SEEN_BY_TORCH)
def test_a_mistake_that_is_found_late_is_one_line_too(command: str, leandit: Leandit) -> None:
    ended = leandit(*command.split())
    assert_mistake(MISTAKES_SEEN_BY_TORCH[command], ended.code, ended.err)


def test_a_mistake_is_one_line_and_its_exit_code_and_is_found_before_torch_is_loaded(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "mochi").mkdir(parents=True)
    (here / "mochi/config.json").write_text('{"_class_name": "AutoencoderKLMochi"}')
    (here / "shelf").mkdir()
    (here / "shelf/zarr.json").write_text("{}")
    for step, classes in ((9, ["lion", "dog", "zebra"]), (10, ["cat", "dog", "zebra"])):  # the newest counts
        (here / f"run/snapshot-{step}").mkdir(parents=True)
        spec = {"name": "DiT-S/4", "num_classes": 4, "caption_width": 0}
        state = json.dumps({"spec": spec, "classes": classes})
        (here / f"run/snapshot-{step}/state.json").write_text(state)
    words = json.dumps([command.split() for command in MISTAKES])
    ended = subprocess.run([sys.executable, "-c", IN_TURN, words], cwd=here, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    for (command, mistake), (code, said, loaded) in zip(MISTAKES.items(), found, strict=True):
        assert_mistake(mistake, code, said)
        assert not loaded, (command, loaded)
    assert sorted(os.listdir(here)) == ["mochi", "run", "shelf"]


def test_a_warning_of_a_store_is_one_line(label_store: LatentStore, tmp_path: Path) -> None:
    store = shutil.copytree(label_store.path, tmp_path / "store")
    plan = store / "revisions/000002/plan"
    plan.mkdir(parents=True)
    (plan / "plan.json").write_text("{}")
    ended = run_forked(["-m", "leandit.tools.cli.main", "inspect", store], check=True)
    (line,) = [line for line in ended.stderr.splitlines() if "Revision 2" in line]
    assert line.startswith(f"leandit: store '{store}': revision 1 is opened. Revision 2 was started")


def test_the_installed_command_ends_with_the_code_of_the_error_and_shows_its_traceback_when_asked_for(
    tmp_path: Path, label_store: LatentStore, leandit: Leandit
) -> None:
    ended = subprocess.run([SCRIPT, "inspect", "no-store"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.startswith("leandit: store 'no-store'")
    said = leandit("--traceback", "inspect", "no\x1b[2J\nstore").err
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith("leandit: store 'no\\x1b[2J\\nstore'")  # no control character
    assert leandit("--version") == Ended(0, f"{__version__}\n", "")
    damaged = shutil.copytree(label_store.path, tmp_path / "store")
    (damaged / SHARD).write_bytes(b"")
    ended = leandit("inspect", damaged)
    assert (ended.code, ended.out, "bytes" in ended.err) == (4, "", True)
    for command in ("fly", "inspect", "inspect store --loud", "train --steps=4", "precompute a --part 3/2"):
        ended = leandit(*command.split())
        assert (ended.code, ended.out, "Traceback" in ended.err) == (2, "", False)
    # What the launcher of DeepSpeed adds to a command is taken.
    assert leandit("--local_rank=1", "recipes").code == 0
    assert "local_rank" not in leandit("--help").out


def test_every_command_has_help_with_an_example(leandit: Leandit) -> None:
    for command in FLAGS:
        ended = leandit(*command.split(), "--help")
        assert (ended.code, f"Example: leandit {command}" in " ".join(ended.out.split())) == (0, True), command


def test_verify_finds_and_repairs(
    label_store: LatentStore, class_folder: Path, tmp_path: Path, leandit: Leandit
) -> None:
    path, unfinished = shutil.copytree(label_store.path, tmp_path / "store"), tmp_path / "unfinished"
    ended = leandit("verify", path)
    assert (ended.code, ended.err, ended.out.splitlines()[-1].split()) == (0, "", ["state", "whole"])
    flip(path / SHARD, 80)
    quick = leandit("verify", path, "--quick")
    assert (quick.code, quick.out.splitlines()[-1].endswith("bytes were not read")) == (0, True)
    ended = leandit("verify", path)
    assert (ended.code, f"bucket '32x32', shard 0: file '{SHARD}'" in ended.out) == (4, True)
    assert f"DAMAGED: run 'leandit verify {path} --repair --source PATH'" in ended.out
    ended = leandit("verify", path, "--json")
    assert (ended.code, json.loads(ended.out)["findings"][0]["path"]) == (4, SHARD)
    assert leandit("verify", path, "--repair").code == 4
    repair = ["verify", path, "--repair", "--source", class_folder]
    ended = leandit(*repair, "--set", "vae.batch_size=3")
    assert (ended.code, ended.out, "batch_size" in ended.err) == (3, "", True)
    ended = leandit(*repair, "--deep", "--device", "cpu")
    assert (ended.code, "repair: 1 of 1" in ended.err) == (0, True)
    assert "1 finding before, 0 now" in ended.out
    assert "15 records and 0 captions encoded again: 15 equal bit for bit" in ended.out
    (path / "revisions/000001/manifest.json").unlink()
    ended = leandit("verify", path, "--json")
    assert (ended.code, json.loads(ended.out)["complete"]) == (4, True)
    assert leandit("verify", path, "--repair").code == 0
    assert tree_digest(path) == tree_digest(label_store.path)
    without_seal(lambda: encode(label_recipe(), class_folder, unfinished))
    ended = leandit("verify", unfinished, "--json")
    assert (ended.code, json.loads(ended.out)["complete"]) == (3, False)
    assert leandit("verify", unfinished, "--repair").code == 0
    assert LatentStore(unfinished).root_hash == label_store.root_hash


def test_a_store_grows_and_is_compacted(class_folder: Path, tmp_path: Path, leandit: Leandit) -> None:
    source, store, new = shutil.copytree(class_folder, tmp_path / "source"), tmp_path / "store", tmp_path / "new"
    (source / "n001/1.png").write_bytes(b"no image")
    command = ["precompute", "imagenet-256", "--source", source, "--store", store, *settings(LABEL_RECIPE)]
    assert leandit(*command).code == 0
    assert "1 retried" in leandit(*command, "--retry-rejected").out
    ended = leandit("inspect", store, "--rejects")
    assert (ended.code, "(tried 2 times)" in ended.out, ended.out.splitlines()[-1]) == (0, True, "1 rejected")
    (reject,) = json.loads(leandit("inspect", store, "--rejects", "--json").out)
    assert (reject["key"], reject["reason"], reject["attempts"]) == ("n001/1.png", "not_an_image", 2)
    assert json.loads(leandit("inspect", store, "--json", "--revision", 1).out)["revision"] == 1

    (source / "n002/2.png").unlink()
    assert "(--drop-gone leaves them out)" in leandit(*command).out
    assert "13 stored" in leandit(*command, "--drop-gone").out
    ended = leandit(*command, "--set", "vae.keep=mean")
    assert (ended.code, ended.out, "use another --store" in " ".join(ended.err.split())) == (3, "", True)

    before = tree_digest(store)
    for _ in range(2):  # the second time it is there
        ended = leandit("compact", store, "--out", new)
        assert (ended.code, "revision 4, 13 records" in ended.out) == (0, True)
    assert tree_digest(store) == before
    ended = leandit("inspect", new, "--revision", 1)
    assert (ended.code, ended.out, "Available: 4" in ended.err) == (3, "", True)
    assert leandit("compact", store, "--out", source).code == 3


def missing(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named '{module}'", name=module)


PRECOMPUTED, PLANNED = (
    "--quiet precompute imagenet-256 --source . --store s",
    "train dit-s-2-256 --dry-run --device cpu",
)


OTHER_ERRORS = (
    (PRECOMPUTED, MemoryError(), 5, "out of memory"),
    (PRECOMPUTED, KeyboardInterrupt(), 130, "interrupted"),
    (PRECOMPUTED, PermissionError(errno.EACCES, "Permission denied", "s/a"), 5, "'s/a': Permission denied. Grant"),
    (PRECOMPUTED, ZeroDivisionError("by zero"), 1, "ZeroDivisionError"),
    (PRECOMPUTED, missing("s3fs"), 5, "s3fs is not installed. Install it with: pip install 'leandit[remote]'"),
    (PLANNED, missing("torch"), 5, "pip install 'leandit[train]'"),
    (PLANNED, missing("braceexpand"), 5, "pip install 'leandit[precompute]'"),  # the rest of train is there then
    ("demo", missing("torchdata.stateful_dataloader"), 5, "pip install 'leandit[train]'"),
)


@pytest.mark.parametrize(("command", "error", "code", "words"), OTHER_ERRORS)
def test_other_errors_have_their_exit_codes_and_one_line(
    command: str, error: BaseException, code: int, words: str, leandit: Leandit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    for place in ("tools.plan.dry_run.describe_train", "tools.demo.demo.run_demo", "precompute.pipeline.precompute"):
        monkeypatch.setattr(f"leandit.{place}", fail)
    ended = leandit(*command.split())
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert words in ended.err


def test_results_go_to_stdout_and_progress_to_stderr(class_folder: Path, tmp_path: Path, leandit: Leandit) -> None:
    store, run, out = tmp_path / "store", tmp_path / "run", tmp_path / "out"
    again = ["precompute", "imagenet-256", "--source", class_folder, "--store", store, *settings(LABEL_RECIPE)]
    ended = leandit("--verbose", *again)
    assert (ended.code, "images: 15 of 15" in ended.err, "images: " in ended.out) == (0, True, False)
    assert any(f"store '{store}': revision 1 is new, fingerprint " in line for line in decisions(ended.err))
    assert "15 planned = 15 stored + 0 rejected" in ended.out
    ended = leandit("inspect", store, "--json", "--sheet", tmp_path / "sheet.png")
    assert (json.loads(ended.out)["num_stored"], "sheet.png" in ended.err) == (15, True)
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(leandit("inspect", store, "n001/2.png", "--json").out)["class"] == "n001"

    command = ["train", "dit-s-2-256", "--store", store, "--run", run, *TINY, "--device", "cpu"]
    ended = leandit("--verbose", *command)
    assert (ended.code, "train: 6 of 6" in ended.err, "train: " in ended.out) == (0, True, False)
    assert f"leandit: run '{run}' starts from new weights; store '{store}' is mapped (" in ended.err
    decided = decisions(ended.err)
    assert 2 <= len(decided) < 25  # not one a step
    for words in (
        f"manifest] store '{store}': revision 1, the newest; 15 records",
        f"run '{run}': no checkpoint, so it",
    ):
        assert any(words in line for line in decided)
    assert re.search(r"from step 1, 45 images \(some batches were partial\), at best", ended.out)
    assert re.search(r"loss +\d\.\d+ at step 1, \d\.\d+ at step 6\n", ended.out)
    ended = leandit(*command)
    assert ("finished" in ended.out, decisions(ended.err)) == (True, [])
    assert "6 of 4; the recipe asks for fewer" in leandit(*command, "--set", "run.steps=4").out

    command = ["sample", run, "--out", out, "--label", 1, "--label", "n002", "--steps", 2]
    drawn = json.loads(leandit(*command, "--json").out)
    assert (drawn["samples"], drawn["sampler"]) == (["1: n001", "2: n002"], "ddim")
    assert (out / "grid.png").read_bytes().startswith(b"\x89PNG")
    command = ["sample", run, "--out", tmp_path / "set", "--num", 3, "--npz", "--steps", 2, "--sampler", "dpm"]
    ended = leandit(*command, "--guidance-times", "0.2,0.7", "--precision", "bf16")
    assert ended.code == 0, ended.err
    assert "3 of 3, 3 generated" in ended.out
    assert "samples_3x32x32x3.npz" in ended.out

    ended = leandit("export", run, "--out", tmp_path / "folder", "--json")
    assert (json.loads(ended.out)["pipeline"], "embeds the time differently" in ended.err) == ("DiTPipeline", True)
    assert leandit("export", run, "--out", tmp_path / "folder").code == 3
    ended = leandit("--quiet", *again)
    assert (ended.err, "nothing to encode" in ended.out) == ("", True)
    assert leandit("--quiet", "inspect", "no-store").err.startswith("leandit: store 'no-store'")


def test_a_young_average_and_raw_weights(label_store: LatentStore, tmp_path: Path, leandit: Leandit) -> None:
    train = ["train", "dit-s-2-256", "--store", label_store.path, *TINY, *settings(["run.steps=3"])]
    young = "73% of the averaged weights is still the initial weights"
    assert "at its end 73% of it is still" in leandit(*train, "--run", tmp_path / "run").err  # 0.9 ** 3
    sample = ["sample", tmp_path / "run", "--out", tmp_path / "out", "--label", 1, "--steps", 2]
    assert young in leandit(*sample).err
    assert young not in leandit(*sample, "--weights", "raw").err
    for weights, group in (("averaged", "ema"), ("raw", "model")):
        out = tmp_path / weights
        leandit("export", tmp_path / "run", "--out", out, "--format", "official", "--weights", weights)
        trained = load_file(tmp_path / f"run/checkpoint-3/{group}.safetensors")
        written = load_file(out / "DiT-S-4.safetensors")
        assert all(torch.equal(written[name.removeprefix("net.")], tensor) for name, tensor in trained.items())
    tuned = [*train, "--run", tmp_path / "tuned", "--set", f"model.init_from={tmp_path / 'run'}"]
    assert young in leandit(*tuned).err
    shutil.rmtree(tmp_path / "run/checkpoint-3")
    ended = leandit(*sample, "--weights", "raw")
    assert ended.code == 3
    assert "without a checkpoint it has no raw weights" in ended.err


def test_a_dry_run_counts_and_checks(caption_folder: Path, caption_store: LatentStore, leandit: Leandit) -> None:
    before = tree_digest(caption_folder), tree_digest(caption_store.path)
    for command, begin, words, answer in (
        ("precompute demo --source {} --store new", "[store]", ("14 records", "9 distinct"), "iB on this machine"),
        ("train demo --store {} --run new", "[model]", ("14 records", "pixart-tiny, 53.9 k parameters"), "64x64 "),
        ("precompute imagenet-256", "[images]", (), "pass --s"),
        ("train dit-xl-2-256", "[optimizer]", (), "\ndevice "),
    ):
        place = caption_folder if "source" in command else caption_store.path
        ended = leandit(*command.format(place).split(), "--dry-run", "--device", "cpu")
        assert ended.code == 0, ended.err
        assert [word for word in words if word not in ended.out] == []
        assert 0 <= ended.out.index(begin) < ended.out.rindex(answer)  # it ends with the answer
    assert leandit("train", "dit-s-2-256", "--store", caption_store.path, "--dry-run").code == 3
    assert tree_digest(Path()) == {}
    assert (tree_digest(caption_folder), tree_digest(caption_store.path)) == before


def test_a_dry_run_refuses_what_a_precompute_would_and_says_what_is_there(
    class_folder: Path, label_store: LatentStore, tmp_path: Path, leandit: Leandit, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, plan_only = shutil.copytree(label_store.path, tmp_path / "store"), tmp_path / "plan-only"
    without_seal(lambda: encode(label_recipe(), class_folder, plan_only))
    for name in ("buckets", "zarr.json", "revisions/000001/commits"):
        remove(plan_only / name)
    (tmp_path / "file").write_text("")
    (tmp_path / "elsewhere/x").mkdir(parents=True)
    command = ["precompute", "imagenet-256", "--source", class_folder, "--dry-run", "--device", "cpu"]
    command += settings(LABEL_RECIPE)
    before = tree_digest(tmp_path)
    assert "revision 1 is complete: only what has changed" in leandit(*command, "--store", store).out
    ended = leandit(*command, "--store", store, "--set", "images.resolution=64")
    assert (ended.code, "images.resolution_px is 32 in the store, 64 now\n" in ended.err) == (3, True)
    ended = leandit(*command, "--store", plan_only)
    assert "not complete, 1 of 1 shards (15 of 15 images) are missing" in ended.out
    for wrong in (tmp_path / "file", tmp_path / "elsewhere", class_folder / "a-store"):
        assert leandit(*command, "--store", wrong).code == 3
    monkeypatch.setattr("leandit.tools.plan.precompute_cost.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert leandit(*command).code == 0  # it is not known yet where the store will be
    ended = leandit(*command, "--store", tmp_path / "new")
    assert (ended.code, "before any codec" in ended.out, "the disk has 1000 B free" in ended.err) == (5, True, True)
    assert tree_digest(tmp_path) == before


SIGNALLED = """
import os, sys
class Finder:
    def find_spec(name, *_):
        if name == module:
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Finder)
module, number = sys.argv[1:3]
sys.argv[:] = ["leandit", *sys.argv[3:]]
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
from leandit.tools.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("leandit.tools.cli.commands", signal.SIGINT, 130),
        pytest.param("typer", signal.SIGTERM, 75, marks=pytest.mark.integration),
        pytest.param("pyarrow.lib", signal.SIGINT, 130, marks=pytest.mark.integration),
        ("leandit.tools.inspection.store_facts", signal.SIGTERM, 75),
    ],
)
def test_a_signal_at_a_start_ends_it(module: str, number: signal.Signals, code: int, label_store: LatentStore) -> None:
    command = [sys.executable, "-c", SIGNALLED, module, str(int(number)), "inspect", str(label_store.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    what = {130: "interrupted", 75: "terminated"}[code]
    said = f"leandit: {what}; run the same command again to resume"
    assert (ended.returncode, ended.stderr.strip()) == (code, said)


def test_a_recipe_that_names_its_stores_needs_no_store(leandit: Leandit) -> None:
    for name, buckets in (("photos", {"32x32": 12}), ("art", {"32x64": 6})):
        make_store(Path(name), buckets, num_classes=3)
    parts = 'mixture = [{ store = "photos" }, { store = "art", weight = 3 }]'
    Path("both.toml").write_text(f"[data]\n{parts}\n")
    ended = leandit("train", "both.toml", *TINY, "--run", "run", "--device", "cpu")
    assert (ended.code, "6 of 6" in ended.out) == (0, True), ended.err
    assert "nothing to do" in leandit("train", "run/recipe.toml", "--run", "run", "--device", "cpu").out
    shown = leandit("train", "both.toml", *TINY, "--dry-run", "--device", "cpu")
    assert "'art', 6 records, 0.75 of the batches" in shown.out
    for words in (["train", "both.toml", "--run", "other"], ["plan", "train", "both.toml"]):
        refused = leandit(*words, "--store", "art")
        assert (refused.code, "the recipe names its own, 'photos' first" in refused.err) == (2, True)
    assert not Path("other").exists()


def decisions(err: str) -> list[str]:
    """The lines of --verbose."""
    return [line for line in err.splitlines() if re.match(r"leandit: \[\d+\.\d s [\w.]+\] ", line)]


@pytest.mark.integration  # a plan traces the model for ten seconds
def test_what_to_run_next_is_named(class_folder: Path, leandit: Leandit, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Path("a store")
    command = ["precompute", "imagenet-256", "--source", class_folder, *settings(LABEL_RECIPE), "--store", store]
    (*_, encode) = next_of(leandit(*command, "--dry-run"))
    assert (encode[:2], "--dry-run" in encode) == (["precompute", "imagenet-256"], False)
    made = leandit(*encode)
    look, train = next_of(made)
    assert train == ["train", "dit-b-2-256", "--store", "a store", "--run", "runs/dit-b-2-256"]
    assert "next: " not in made.out
    assert next_of(leandit(*command)) == [look, train]
    assert leandit(*look).code == 0
    planned = leandit("plan", "train", "dit-s-2-256", "--store", store, *TINY)
    assert next_of(planned)[0][:6] == ["train", "dit-s-2-256", "--store", "a store", "--run", "runs/dit-s-2-256"]
    sample, report = next_of(leandit("train", "dit-s-2-256", "--store", store, "--run", "runs/a", *TINY))
    assert sample == ["sample", "runs/a", "--out", "runs/a-samples"]
    drawn = leandit(*sample, "--steps", 1, "--json")
    assert ("next" in json.loads(drawn.out), [words[0] for words in next_of(drawn)]) == (False, ["report", "export"])
    assert next_of(leandit(*report)) == [["view", "runs/a"]]
    verify, _ = next_of(leandit("compact", store, "--out", "new"))
    assert leandit(*verify).code == 0
    assert next_of(leandit("--quiet", *verify, "--quick")) == []


def test_an_export_that_holds_the_model_is_named(caption_store: LatentStore, leandit: Leandit) -> None:
    changes = [*TRAIN_RECIPE, "model.name=DiT-S/2", "conditioning.kind=caption", "conditioning.drop=0"]
    sample, _ = next_of(leandit("train", "demo", "--store", caption_store.path, "--run", "run", *settings(changes)))
    assert sample == ["sample", "run", "--out", "run-samples", "--guidance", "1"], "it has not learned the null caption"
    _, export = next_of(leandit(*sample, "--steps", 1))
    assert export == ["export", "run", "--out", "run-official", "--format", "official"], "a DiT of captions"
    assert leandit(*export).code == 0
    assert [words[0] for words in next_of(leandit(*sample, "--steps", 1))] == ["report"], "the folder is there"


def next_of(ended: Ended) -> list[list[str]]:
    """Words of the commands that are named as next."""
    return [shlex.split(line)[2:] for line in ended.err.splitlines() if line.startswith("next: leandit ")]


def test_shipped_recipes_are_listed_and_printed_to_start_from(leandit: Leandit) -> None:
    listed = leandit("recipes").out.splitlines()
    assert listed[0] == "leandit precompute RECIPE"
    assert len(listed) == len(PRECOMPUTE) + len(TRAIN) + 2
    assert "Captioned images for PixArt-Sigma at 256 px" in next(line for line in listed if "pixart-256" in line)
    one_line = json.loads(leandit("recipes", "--json").out)
    assert all(10 < len(one["what"]) < 160 for one in one_line), one_line
    assert leandit("recipes", "pixart-256").out.rstrip() == shipped_recipes("leandit.precompute")["pixart-256"].rstrip()
    assert [one["stage"] for one in json.loads(leandit("recipes", "demo", "--json").out)] == ["precompute", "train"]


COMPLETIONS = {
    "leandit pu": ["publish"],
    "leandit precompute pixart-2": ["pixart-256"],
    "leandit plan train lightning": ["lightningdit-xl-1-256"],
    "leandit recipes sd3": ["sd3-1024", "sd3-512", "sd3.5-medium-512"],
    "leandit train mine.t": [],
}
COMPLETE = """
import os, sys
from leandit.tools.cli.main import main
lines, sys.argv = sys.argv[1:], ["leandit"]
for line in lines:
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    try:
        main()
    except SystemExit:
        print(";")
assert "torch" not in sys.modules
"""


def test_a_shell_completes_commands_and_recipes_without_torch() -> None:
    command, env = [sys.executable, "-c", COMPLETE, *COMPLETIONS], os.environ | {"_LEANDIT_COMPLETE": "complete_bash"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    offered = [words.split() for words in ended.stdout.split(";")[:-1]]
    assert (offered, ended.stderr) == ([*COMPLETIONS.values()], "")


README = (ROOT / "README.md").read_text()


def test_commands_and_imports_of_the_readme_work(label_store: LatentStore, class_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet/train").symlink_to(class_folder)
    (tmp_path / "imagenet-256").symlink_to(label_store.path)
    ended = {}
    for line in re.findall(r"^leandit .*$", README, re.MULTILINE):
        words = shlex.split(line, comments=True)[1:]
        only_looks = ["--dry-run"] if words[0] in ("precompute", "train") else []
        only_looks += ["--help"] if words[0] == "view" else []  # it would serve pages until Ctrl-C
        ended[words[0]] = run_forked([SCRIPT, *words, *only_looks], cwd=tmp_path)
    codes = {name: one.returncode for name, one in ended.items()}
    # There is no run to sample from yet.
    assert codes == {"precompute": 0, "view": 0, "train": 0, "sample": 3, "verify": 0}, ended
    assert "run 'runs/xl'" in ended["sample"].stderr
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    imports = [node for node in ast.parse(snippet).body if isinstance(node, ast.ImportFrom)]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    assert names
    assert [name for module, name in names if not hasattr(importlib.import_module(module or ""), name)] == []


def help_pages(command: Any, *names: str) -> Iterator[tuple[str, str]]:
    """Help of a command and of those below it, at 80 columns."""
    page = CliRunner().invoke(command, ["--help"], prog_name="leandit", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    yield " ".join(names), page.output
    for name, child in getattr(command, "commands", {}).items():
        yield from help_pages(child, *names, name)


def test_help_at_80_columns_cuts_nothing() -> None:
    pages = dict(help_pages(typer.main.get_command(app)))
    assert {"", "train", "plan train", "bench loader"} <= pages.keys()
    assert [name for name, page in pages.items() if "…" in page] == []
    assert max(len(line) for page in pages.values() for line in page.splitlines()) <= 80
