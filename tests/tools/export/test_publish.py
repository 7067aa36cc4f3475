"""Published stores and runs: whole or not readable, sent once, resumed, without secrets and local paths."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import flip
from forked import ForkedPython
from hub_server import TOKEN, Hub, Repository, Stored
from making import (
    CPU,
    ROOT,
    caption_recipe,
    encode,
    label_recipe,
    make_caption_folder,
    no_progress,
    read_metadata,
    train_recipe,
    tree_digest,
    write_metadata,
)
from runs import run_to

from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.repair import repair_without_encoding
from leandit.datasets.maintenance.verify import REVISION_FILES, Verification, verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, LeanditError, RecipeError, StoreError, StoreIncomplete
from leandit.tools.cli.main import main
from leandit.tools.export import publish as publishing
from leandit.tools.export.cards import Terms, model_card
from leandit.tools.export.publish import publish
from leandit.tools.inspection.remote_verify import verify_remote
from leandit.train.models.spec import AdapterSpec, ModelSpec
from leandit.train.sampling.snapshot import load_snapshot

NAME = "somebody/images-64"
URL = f"hf://datasets/{NAME}"
SAID = {"private": True, "licence": "cc-by-4.0", "encoder_licence": "mit"}
pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture
def copy(caption_store: LatentStore, tmp_path: Path) -> Path:
    """A store that the test may change."""
    return Path(shutil.copytree(caption_store.path, tmp_path / "copy"))


def send(store: Path, url: str = URL, **changes: object) -> dict:
    return publish(store, url, no_progress, **SAID | changes)


def assert_uploaded_once(hub: Hub) -> None:
    """No file was uploaded twice; second copies of tables have the bytes of the first."""
    contents = Counter(hashlib.sha256(one.content).hexdigest() for one in published(hub).values())
    assert all(count <= contents[sha256] for sha256, count in hub.uploads.items())


def published_files(store: Path) -> dict[str, bytes]:
    """Files of a store but their second copies, which are not published."""
    return {path: content for path, content in tree_digest(store).items() if "/twin/" not in path}


def causes(verification: Verification) -> set[str]:
    return {finding.cause for finding in verification.findings}


def published(hub: Hub, name: str = NAME, branch: str = "main") -> dict[str, Stored]:
    return hub.dataset(name).files(branch)


def test_a_published_store_is_read_where_it_lies(hub: Hub, caption_store: LatentStore) -> None:
    sent = send(caption_store.path)
    assert sent["files_sent"] == sent["files"]
    assert hub.dataset(NAME).private
    files = published(hub)
    assert sum(len(one.content) for one in files.values()) == sent["bytes"]
    for path in published_files(caption_store.path):
        assert files[path].content == (caption_store.path / path).read_bytes()

    there = LatentStore(URL)
    assert there.root_hash == caption_store.root_hash
    for bucket in caption_store.buckets:
        rows = caption_store.index(bucket).rows
        np.testing.assert_array_equal(there.latents(bucket).take(rows), caption_store.latents(bucket).take(rows))
    here = [batch.latents for batch in make_loader(caption_store, global_batch=4, seed=0)]
    for batch, latents in zip(make_loader(there, global_batch=4, seed=0), here, strict=True):
        np.testing.assert_array_equal(batch.latents, latents)
    verified = verify_remote(URL)
    assert (causes(verified), verified.complete) == ({"single"}, True)
    commits = len(hub.dataset(NAME).branches["main"])
    assert commits > 2
    again = send(caption_store.path)
    assert (again["files_sent"], again["bytes_sent"]) == (0, 0)
    assert len(hub.dataset(NAME).branches["main"]) == commits
    assert_uploaded_once(hub)


def test_all_crops_of_an_image_are_published(hub: Hub, class_folder: Path, tmp_path: Path) -> None:
    encode(label_recipe("images.variants=2", "vae.flip=true"), class_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    send(store.path)
    rows = store.index("32x32").rows
    for variant, flipped in ((0, False), (1, False), (1, True)):
        here, there = (each.latents("32x32", variant=variant, flipped=flipped) for each in (store, LatentStore(URL)))
        np.testing.assert_array_equal(there.take(rows), here.take(rows))
    batches = (make_loader(place, global_batch=4, seed=0) for place in (store, LatentStore(URL)))
    for here, there in zip(*batches, strict=True):
        np.testing.assert_array_equal(there.latents, here.latents)


def test_nobody_reads_half_of_a_store(hub: Hub, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    told, wanted = send(caption_store.path, dry_run=True), published_files(caption_store.path)
    assert {file["path"] for file in told["sent"]} == {*wanted, "README.md"}
    assert told["bytes_sent"] == sum(file["bytes"] for file in told["sent"])
    assert hub.repositories == {}
    monkeypatch.setattr(publishing, "COMMIT_FILES", 5)
    send(caption_store.path)
    commits = hub.dataset(NAME).branches["main"]
    assert len(commits) > 6
    assert not any(MANIFEST in files for files in commits[:-1])
    assert {path: one.content for path, one in commits[-1].items() if path in wanted} == wanted
    assert commits[-1].keys() - wanted.keys() == {"README.md"}
    hub.dataset(NAME).branches["main"].pop()
    with pytest.raises(StoreIncomplete):
        LatentStore(URL)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_network_faults_pass(seed: int, hub: Hub, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "COMMIT_FILES", 9)
    chance = random.Random(seed)
    hub.fault = lambda number, request: chance.choice(["500", "cut", "lost", "", "", "", "", "", ""])
    send(caption_store.path)
    hub.fault = lambda number, request: ""
    wanted = published_files(caption_store.path)
    assert {path: one.content for path, one in published(hub).items() if path in wanted} == wanted
    assert causes(verify_remote(URL)) == {"single"}


def test_a_failing_hub_is_one_error(hub: Hub, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "COMMIT_FILES", 5)
    hub.fault = lambda number, request: "500" if number > 40 else ""
    with pytest.raises(StoreError, match=rf"'{URL}' could not be .* 6 attempts.*resumes"):
        send(caption_store.path)
    assert MANIFEST not in published(hub)
    hub.fault = lambda number, request: ""
    sent = send(caption_store.path)
    assert 0 < sent["files_sent"] < sent["files"]
    assert_uploaded_once(hub)
    assert LatentStore(URL).root_hash == caption_store.root_hash


CHILD = """
import sys
import pytest
from pathlib import Path
from hub_server import use_hub
from leandit.tools.export import publish as publishing
publishing.COMMIT_FILES = 5
use_hub(sys.argv[1], pytest.MonkeyPatch())
said = {"private": True, "licence": "cc-by-4.0", "encoder_licence": "mit"}
publishing.publish(Path(sys.argv[2]), sys.argv[3], lambda *_: None, **said)
"""


@pytest.mark.parametrize("number", [8, 51, *(pytest.param(n, marks=pytest.mark.slow) for n in range(60))])
def test_a_killed_publication_goes_on(number: int, hub: Hub, caption_store: LatentStore) -> None:
    command = ["-c", CHILD, hub.url, caption_store.path, URL]
    process = ForkedPython(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    hub.fault = lambda seen, request: process.kill() or "" if seen == number else ""
    process.communicate(timeout=240)
    hub.fault = lambda number, request: ""
    assert process.returncode in (-signal.SIGKILL, 0)
    for files in (repository.files().keys() for repository in hub.repositories.values()):
        assert MANIFEST not in files or published_files(caption_store.path).keys() <= files
    send(caption_store.path)
    assert_uploaded_once(hub)
    assert causes(verify_remote(URL)) == {"single"}


def test_a_branch_is_a_place_of_its_own(hub: Hub, caption_store: LatentStore) -> None:
    for branch, quoted in (("second", "second"), ("work/third", "work%2Fthird")):
        assert send(caption_store.path, branch=branch)["url"] == f"{URL}@{quoted}"
        assert published(hub) == {}
        assert MANIFEST in published(hub, branch=branch)
        card = published(hub, branch=branch)["README.md"].content.decode()
        there = LatentStore(re.findall(r'LatentStore\("(.*?)"\)', card)[0])
        assert there.root_hash == caption_store.root_hash
        np.testing.assert_array_equal(there.caption(3), caption_store.caption(3))


NAMELESS = "--private or --public: who may read it"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"private": None, "licence": " ", "encoder_licence": ""}, f"{NAMELESS}.*; --license.*; --encoder-license"),
        ({"url": "hf://datasets/one-name"}, "expected hf://datasets/OWNER/NAME"),
        ({"url": f"hf://{NAME}"}, "is a store. Pass hf://datasets/OWNER/NAME"),
        ({"url": "s3://bucket/images"}, "expected hf://"),
        *(({"branch": name}, "expected the name of a branch") for name in ("", "a b", "/a", "a//b", "../a", "-a")),
    ],
)
def test_nothing_is_guessed(changes: dict, words: str, hub: Hub, caption_store: LatentStore) -> None:
    with pytest.raises(RecipeError, match=words):
        send(caption_store.path, **changes)
    assert hub.requests == []


MANIFEST = "revisions/000001/manifest.json"
SHARD = "buckets/64x64/moments/c/0/0/0/0"


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda store: flip(store / MANIFEST, 800), DamageError, "manifest.json"),
        (lambda store: flip(store / SHARD, 800), DamageError, "its bytes are not those of the manifest"),
        (lambda store: (store / SHARD).unlink(), DamageError, "verify .*--repair"),
    ],
    ids=["metadata", "shard", "missing"],
)
def test_no_damaged_store(
    damage: Any, error: type[LeanditError], words: str, hub: Hub, copy: Path, unsealed_store: Path
) -> None:
    with pytest.raises(StoreIncomplete, match="not complete"):
        send(unsealed_store)
    assert hub.repositories == {}
    damage(copy)
    with pytest.raises(error, match=words):
        send(copy)
    assert all(MANIFEST not in repository.files() for repository in hub.repositories.values())


def test_what_is_there_is_respected(hub: Hub, caption_store: LatentStore, label_store: LatentStore) -> None:
    hub.repositories[f"datasets/{NAME}"] = Repository(private=False)
    with pytest.raises(RecipeError, match="is public already"):
        send(caption_store.path)
    hub.dataset(NAME).branches["main"] = [{"README.md": Stored(b"# By hand", "")}]
    assert "was not written by this command" in send(caption_store.path, private=False)["notes"][0]
    assert published(hub)["README.md"].content == b"# By hand"
    before = dict(published(hub))
    with pytest.raises(StoreError, match=r"holds another store: its 'revisions/000001/manifest\.json' differs"):
        send(label_store.path, private=False)
    assert published(hub) == before


def test_strays_stay_at_home_and_a_download_is_a_store(hub: Hub, copy: Path, tmp_path: Path) -> None:
    (copy / "notes.txt").write_text("my password")
    assert "'notes.txt'" in send(copy)["notes"][0]
    assert "notes.txt" not in published(hub)
    down = download(hub, tmp_path / "down")
    (down / ".gitattributes").write_text("*.parquet filter=lfs")
    found = verify_store(down)
    assert (causes(found), found.damaged) == ({"single"}, False)
    assert LatentStore(down).root_hash == LatentStore(copy).root_hash
    assert repair_without_encoding(down, found).findings == []  # its second copies are there again
    assert {path.name for path in (down / "revisions/000001/twin").iterdir()} == {*REVISION_FILES}


def download(hub: Hub, folder: Path, name: str = f"datasets/{NAME}") -> Path:
    for path, stored in hub.repositories[name].files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(stored.content)
    return folder


def assert_anonymous(hub: Hub, tmp_path: Path) -> None:
    """No stored byte names a folder of this machine, or the token."""
    for repository in hub.repositories.values():
        for path, stored in repository.files().items():
            for secret in (str(tmp_path), str(Path.home()) + "/", TOKEN):
                assert secret.encode() not in stored.content, path


@pytest.fixture
def placed_store(tmp_path: Path) -> Path:
    """A store of two revisions whose VAE lies elsewhere, so that its recipe names a folder of this machine."""
    vae = shutil.copytree(ROOT / "precompute/demo_encoders/vae", tmp_path / "models/my-vae")
    source, store = make_caption_folder(tmp_path / "images"), tmp_path / "stores/store"
    rows = read_metadata(source)
    for count in (10, 14):
        part = shutil.copytree(source, tmp_path / f"part-{count}")
        write_metadata(part, rows[:count])
        encode(caption_recipe(f"vae.model={vae}"), part, store)
    return store


def test_local_folders_are_not_published_but_all_revisions(placed_store: Path, hub: Hub, tmp_path: Path) -> None:
    here = LatentStore(placed_store)
    assert str(tmp_path).encode() in (placed_store / "revisions/000002/local.json").read_bytes()
    assert send(placed_store)["notes"] == []
    assert_anonymous(hub, tmp_path)
    there = LatentStore(URL)
    assert (there.spec.vae.model, there.spec.fingerprint) == ("my-vae", here.spec.fingerprint)
    assert there.root_hash == here.root_hash
    verified = verify_store(download(hub, tmp_path / "down"))
    assert (causes(verified), verified.revisions, verified.complete) == ({"single"}, [1, 2], True)
    for bucket in here.buckets:
        rows, down = here.index(bucket).rows, LatentStore(tmp_path / "down").latents(bucket)
        np.testing.assert_array_equal(down.take(rows), here.latents(bucket).take(rows))
    assert send(placed_store)["files_sent"] == 0


def test_a_grown_store_is_published_by_what_is_new(hub: Hub, placed_store: Path, tmp_path: Path) -> None:
    first = Path(shutil.copytree(placed_store, tmp_path / "first"))
    shutil.rmtree(first / "revisions/000002")
    for finding in verify_store(first).findings:
        if finding.cause == "abandoned":
            (first / finding.path).unlink()
    assert repair_without_encoding(first, verify_store(first)).findings == []
    send(first)
    sent = send(placed_store)
    assert 0 < sent["files_sent"] < sent["files"] / 1.5
    assert (LatentStore(URL).revision, LatentStore(URL, revision=1).revision) == (2, 1)
    before = dict(published(hub))
    with pytest.raises(StoreError, match=r"holds a revision that this store lacks: 'revisions/000002/manifest\.json'"):
        send(first)
    assert published(hub) == before


def test_the_card_says_what_it_is_and_how_it_is_read(hub: Hub, caption_store: LatentStore) -> None:
    send(caption_store.path, licence="My own licence", encoder_licence="mit")
    card = published(hub)["README.md"].content.decode()
    head = yaml_of(card)
    assert (head["license"], head["license_name"]) == ("other", "My own licence")
    assert head["configs"][0] == {"config_name": "records", "data_files": "revisions/000001/records.parquet"}
    assert f'LatentStore("{URL}")' in card
    assert caption_store.spec.vae.weights_sha256 in card
    assert "14 planned = 14 stored" in card
    assert str(caption_store.root_hash) in card
    assert "Encoders: mit" in card
    blocks = re.findall(r"```toml\n(.*?)```", card, re.DOTALL)
    assert tomllib.loads(blocks[0])["images"]["buckets"] == ["48x80", "64x64", "80x48"]
    assert causes(verify_remote(URL)) == {"single"}


def yaml_of(card: str) -> dict:
    """The front matter."""
    import yaml

    return yaml.safe_load(card.split("---\n")[1])


def test_untrusted_text_is_no_markup_in_a_card() -> None:
    evil = "x |<img src=x onerror=y>`[a](javascript:b)\x1b[31m\u202e"
    encoder = {"model": {"model": evil}, "weights_sha256": evil}
    spec = ModelSpec(name=evil, channels=4, out_channels=4, num_classes=0, caption_width=8, base_size=4)
    spec = spec.model_copy(update={"adapter": AdapterSpec(rank=4, alpha=6.0, targets=("to_q",))})
    state = {"step": evil, "objective": {"kind": evil, evil: evil}, "root_hashes": [evil], "vae": encoder}
    state |= {"texts": {evil: encoder}, "frozen": {"source": evil, "xxh3_128": evil}, "spec": spec.model_dump()}
    how: dict[str, Any] = {"weights": evil, "layout": evil, "is_pipeline": False, "notes": [evil]}
    card = model_card(evil, state, **how, recipe="a = '```'\n", terms=Terms("a: b\n- c", evil)).decode()
    front, page, recipe = card.partition("<!-- Written")[0], *card.split("-->")[1].split("## Recipe\n\n")
    for mark in ("<", "`", "[a]", "\x1b", "\u202e"):
        assert mark not in re.sub(r"\\.", "", page), mark
    assert page.count("\n| text encoder x") == 1
    assert recipe.startswith("````toml\n")
    assert yaml_of(front)["license_name"] == "a: b\n- c"


@pytest.fixture(scope="module")
def run(caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model of captions, whose recipe names a local folder."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = train_recipe("pixart-tiny", f"run.remote_folder={folder.parent}")
    run_to(recipe, caption_store, folder)
    return folder


def test_a_published_run_is_a_run(run: Path, hub: Hub, tmp_path: Path) -> None:
    assert str(run.parent) in (run / "recipe.toml").read_text()
    send(run, url="hf://somebody/tiny", private=False)
    assert not hub.repositories["somebody/tiny"].private
    down = download(hub, tmp_path / "down", "somebody/tiny")
    assert {path.name for path in down.iterdir()} == {"snapshot-6", "recipe.toml", "metrics.jsonl", "README.md"}
    assert_anonymous(hub, run.parent)
    here, there = load_snapshot(run, CPU), load_snapshot(down, CPU)
    assert there.weights_hash == here.weights_hash
    assert tomllib.loads((down / "recipe.toml").read_text())["run"]["remote_folder"] == run.parent.name
    assert len((down / "metrics.jsonl").read_text().splitlines()) == 6
    head = yaml_of((down / "README.md").read_text())
    assert (head["license"], head["library_name"]) == ("cc-by-4.0", "leandit")
    assert len(hub.repositories["somebody/tiny"].branches["main"]) == 2  # all in one commit


def test_a_run_does_not_join_another(run: Path, hub: Hub, tmp_path: Path) -> None:
    url, other = "hf://somebody/tiny", shutil.copytree(run, tmp_path / "other")
    send(run, url=url, branch="second")
    card = hub.repositories["somebody/tiny"].files("second")["README.md"].content.decode()
    assert '("somebody/tiny", revision="second")' in card
    send(run, url=url)
    assert send(run, url=url)["files_sent"] == 0
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join([lines[0].replace('"loss": ', '"loss": 1'), *lines[1:]]))
    with pytest.raises(StoreError, match=r"holds another run: its 'metrics\.jsonl' begins differently"):
        send(other, url=url)
    branch = hub.repositories["somebody/tiny"].branches["main"]
    branch.append(branch[-1] | {"snapshot-60/state.json": Stored(b"{}", "")})
    with pytest.raises(StoreError, match="the snapshot of step 60, and this one is of step 6"):
        send(run, url=url)


def test_any_path_of_this_machine_is_refused(run: Path, hub: Hub, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "runs/copy")
    (tmp_path / "elsewhere").mkdir()
    with open(copy / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": 7, "note": {str(tmp_path / "elsewhere/scores.parquet"): 1}}) + "\n")
    with pytest.raises(StoreError, match=r"file 'metrics\.jsonl' names '.*elsewhere/scores\.parquet' of this machine"):
        send(copy, url="hf://somebody/tiny")
    assert hub.repositories == {}


def test_the_command_says_what_it_sent_and_never_its_token(
    hub: Hub, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def leandit(*words: object) -> tuple[int, str, str]:
        command = ["leandit", "publish", caption_store.path, "--to", URL, "--private", "--license", "mit", *words]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        assert TOKEN not in out + err
        assert "X-Amz-Signature" not in out + err
        return int(end.value.code or 0), out, err

    assert "--encoder-license" in leandit()[2]
    said = ("--encoder-license", "mit")
    code, out, _ = leandit(*said, "--dry-run", "--json")
    assert (code, json.loads(out)["dry_run"]) == (0, True)
    hub.fault = lambda number, request: "500" if number % 7 == 0 else ""
    code, out, _ = leandit(*said)
    assert code == 0
    assert "the hub lists the sizes and hashes" in out
    hub.repositories.clear()
    hub.objects.clear()
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}_that_is_wrong")
    code, _, err = leandit(*said)
    assert (code, "HF_TOKEN" in err) == (3, True)
