"""``leandit publish``: a store or a run as a repository of the Hugging Face hub.

The files that make a store readable are committed last, and only after the hub has listed all others with their sizes
and hashes, so nobody reads half of a store. The same command resumes: what the hub lists already is not sent again.
Absolute paths of this machine are not published.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ...datasets.disk.hashing import canonical_json, sha256_of
from ...datasets.format.layout import MANIFEST, RECORDS, REVISIONS
from ...datasets.maintenance.findings import HARMLESS
from ...datasets.maintenance.verify import verify_store
from ...datasets.revisions.local import without_local_folders
from ...datasets.store import LatentStore
from ...errors import DamageError, RecipeError, RunError, StoreError, StoreIncomplete
from ...recipe import values_to_toml
from ...train.weights.folders import METRICS, RECIPE, is_run
from ...units import readable_size
from ..terminal.text import Rows, printable
from .cards import CARD, MARK, Terms, model_card, store_card
from .hub import HubRepository, OutgoingFile
from .portable import portable_files

COMMIT_FILES = 100  # at most in a commit; files of a commit that was not made are uploaded, and not uploaded again
SHOWN_FILES = 20
LINE_BYTES = 1 << 16  # of a line that is compared
SNAPSHOT_STATE = re.compile(r"snapshot-(\d+)/state\.json")
REQUIRED = {
    "--private or --public": "who may read it",
    "--license": "that of the images (of a run: of the weights), such as 'cc-by-4.0', any other name, or an https link",
    "--encoder-license": "that of the encoders, whose output is published",
}
TEXTS, TEXT_BYTES = (".json", ".jsonl", ".toml", ".md"), 1 << 26  # a larger file is not searched for local paths
QUOTED_PATH = re.compile(r"[\"']((?:/|[A-Za-z]:[\\/])[^\"'\n]{1,4000})[\"']")
ANOTHER_PLACE = "Use another name, or another branch with --revision."
Progress = Callable[[str, int, int], None]


def publish(
    target: Path,
    url: str,
    progress: Progress,
    *,
    private: bool | None,
    licence: str,
    encoder_licence: str,
    branch: str = "main",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Publish a store or a run.

    Args:
      target: folder of a store or a run.
      url: of the repository.
      progress: called with (stage, files done, files).
      private: who may read it; None: missing.
      licence, encoder_licence: empty: missing.
      branch: of the repository.
      dry_run: send nothing.
    Returns: what was sent, as plain values.
    Raises: RecipeError: an answer is missing; StoreError, RunError: it cannot be published, or the hub refuses it;
      DamageError: bytes on this machine or on the hub are not those of the manifest.
    """
    terms, of_run = Terms(licence.strip(), encoder_licence.strip()), is_run(target)
    answers = (private is not None, *terms)
    if missing := [name for name, answer in zip(REQUIRED, answers, strict=True) if not answer]:
        wanted = "; ".join(f"{name}: {REQUIRED[name]}" for name in missing)
        raise RecipeError(f"publish '{target}': required, without a default: {wanted}. Pass them.")
    hub = HubRepository(url, branch)
    if of_run != (hub.kind == "model"):
        kind, expected = ("run", "hf://OWNER/NAME") if of_run else ("store", "hf://datasets/OWNER/NAME")
        raise RecipeError(f"--to '{url}': '{target}' is a {kind}. Pass {expected}.")
    files, notes = (run_files(target, hub, terms), []) if of_run else store_files(target, hub, terms)
    _refuse_local_paths(target, files)
    return _send(hub, files, notes, progress, private=bool(private), dry_run=dry_run)


# -------------------------------------------------------------------------------------------------------------- files


def store_files(root: Path, hub: HubRepository, terms: Terms) -> tuple[list[OutgoingFile], list[str]]:
    """The files of a complete store whose sizes and metadata are as its manifests say, and notes for the user.

    Raises: StoreNotFound, StoreError; StoreIncomplete; DamageError.
    """
    checked = verify_store(root, quick=True)
    if damage := [one for one in checked.findings if one.cause not in {*HARMLESS, "stray"}]:
        raise DamageError(
            f"store '{root}': {len(damage)} of its files differ from what was written, the first: "
            f"{printable(damage[0].line())}. Run 'leandit verify STORE --repair --source PATH', then publish."
        )
    if not checked.complete:
        raise StoreIncomplete(
            f"store '{root}': it is not complete, and no part of a store is published. Run the same precompute command "
            "again, then publish."
        )
    portable, notes = portable_files(root), list[str]()
    if strays := [one.path for one in checked.findings if one.cause != "single"]:
        notes.append(f"{len(strays)} files that do not belong to the store are not uploaded, such as '{strays[0]}'")
    card = store_card(LatentStore(root), portable, hub, terms)
    files = [OutgoingFile(CARD, card, is_last=True)]
    for path, entry in portable.entries.items():
        content, is_last = portable.changed.get(path, root / path), Path(path).name == MANIFEST
        files.append(OutgoingFile(path, content, entry.xxh3_128, is_last))
    return files, notes


def run_files(run: Path, hub: HubRepository, terms: Terms) -> list[OutgoingFile]:
    """The newest averaged weights of a run, its recipe and its metrics, all in one commit.

    Raises: RunError: there is no snapshot; DamageError.
    """
    from ...train.weights import checkpoint

    snapshots = checkpoint.find(checkpoint.SNAPSHOT, run)
    if not snapshots:
        raise RunError(f"run '{run}': there is no snapshot to publish. Train first: a checkpoint saves one too.")
    saved = checkpoint.read(snapshots[-1])
    state, folder = without_local_folders(saved.state), saved.path.name
    recipe = without_local_folders(tomllib.loads((run / RECIPE).read_text("utf-8"))) if (run / RECIPE).is_file() else {}
    text = values_to_toml(recipe) if recipe else ""
    files: dict[str, Path | bytes] = {f"{folder}/{name}": saved.path / name for name in saved.files}
    files[f"{folder}/{checkpoint.STATE}"] = canonical_json(state | {checkpoint.STATE_HASH: sha256_of(state)})
    files[CARD] = model_card(hub.title, state, terms=terms, hub=hub, weights=f"averaged, {folder}", recipe=text)
    if text:
        files[RECIPE] = text.encode()
    if (run / METRICS).is_file():
        metrics = (run / METRICS).read_bytes()
        files[METRICS] = metrics[: metrics.rfind(b"\n") + 1]  # whole lines of a file that may grow
    hashes = {f"{folder}/{name}": entry.xxh3_128 for name, entry in saved.files.items()}
    return [OutgoingFile(path, files[path], hashes.get(path, ""), is_last=True) for path in files]


def _refuse_local_paths(source: Path, files: Sequence[OutgoingFile]) -> None:
    """Raise if a text that is published names the folder of the source, the home folder, or a path of this machine.

    Raises: StoreError.
    """

    def is_here(path: str) -> bool:
        folder = os.path.dirname(path)
        return os.path.exists(path) or (folder != "/" and os.path.isdir(folder))

    folders = {os.path.abspath(source.parent), str(Path.home()), os.path.realpath(source.parent)} - {"/"}
    folders = [folder.rstrip("/") + "/" for folder in sorted(folders)]
    for file in files:
        for text in _texts_of(file):
            paths = [folder for folder in folders if folder in text]
            if paths := paths or list(filter(is_here, QUOTED_PATH.findall(text))):
                raise StoreError(
                    f"'{source}': file '{file.path}' names '{paths[0]}' of this machine, which is not published. "
                    "Remove what names it (of a store: 'leandit inspect STORE --rejects'), then publish again."
                )


def _texts_of(file: OutgoingFile) -> Iterator[str]:
    """The texts of a file that the program itself has written."""
    if file.path.endswith(RECORDS) and isinstance(file.content, Path):
        for batch in pq.ParquetFile(file.content).iter_batches(columns=["detail"]):
            yield from filter(None, batch["detail"].unique().to_pylist())
    elif file.path.endswith(TEXTS) and file.size <= TEXT_BYTES:
        yield file.read().decode(errors="replace")


# ------------------------------------------------------------------------------------------------------------ sending


def _send(
    hub: HubRepository,
    files: list[OutgoingFile],
    notes: list[str],
    progress: Progress,
    *,
    private: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """Send what the hub lacks. Returns: as ``publish``."""
    is_private = hub.is_private()
    if is_private not in (None, private):
        raise RecipeError(
            f"'{hub.address}' is {'private' if is_private else 'public'} already. Pass that option, or change it in "
            "the settings of the repository."
        )
    listed = hub.listing() if is_private is not None else {}
    if CARD in listed and MARK not in hub.read_text(CARD):
        notes.append(f"'{CARD}' there was not written by this command, so it is kept")
        files = [file for file in files if file.path != CARD]
    _refuse_other(hub, {file.path: file for file in files if file.is_last}, listed)
    missing = list[OutgoingFile]()
    for done, file in enumerate(files, start=1):
        missing += [] if file.is_same(listed.get(file.path)) else [file]
        progress("compare", done, len(files))
    result = {
        "url": hub.address,
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "files_sent": len(missing),
        "bytes_sent": sum(file.size for file in missing),
        "notes": notes,
    }
    if dry_run:
        return result | {"dry_run": True, "sent": [{"path": file.path, "bytes": file.size} for file in missing]}
    if missing:
        hub.create(private=private)
    first, last = ([file for file in missing if file.is_last is is_last] for is_last in (False, True))
    for start in range(0, len(first), COMMIT_FILES):
        commit = first[start : start + COMMIT_FILES]
        hub.commit(commit, f"leandit publish: {len(commit)} files")
        progress("upload", start + len(commit), len(missing))
    if first:
        _check_listing(hub, [file for file in files if not file.is_last])
    if last:
        hub.commit(last, "leandit publish: readable from this commit on")
        progress("upload", len(missing), len(missing))
    _check_listing(hub, files)
    return result


def _refuse_other(hub: HubRepository, files: Mapping[str, OutgoingFile], listed: Mapping[str, Any]) -> None:
    """Raise if the repository holds another store, a later revision, or another run: readers would get half of each.

    A run is known by the first line of its metrics, which has its first loss and times.

    Args:
      files: those that are sent last, by path.
    Raises: StoreError.
    """
    problem = ""
    for path in sorted(listed):
        if path not in files and re.fullmatch(rf"{REVISIONS}/\d+/{re.escape(MANIFEST)}", path):
            raise StoreError(
                f"'{hub.address}' holds a revision that this store lacks: '{path}'. Its readers would continue with "
                "that one. Publish the store that has it, or use another name or another branch with --revision."
            )
        if path in files and path.endswith(MANIFEST) and not files[path].is_same(listed[path]):
            problem = f"holds another store: its '{path}' differs."
    here, there = (
        [int(match[1]) for match in map(SNAPSHOT_STATE.fullmatch, paths) if match] for paths in (files, listed)
    )
    if here and max(there, default=0) > here[0]:
        problem = (
            f"holds the snapshot of step {max(there)}, and this one is of step {here[0]}: readers take the later one."
        )
    if METRICS in files and METRICS in listed:
        line = files[METRICS].read().partition(b"\n")[0].decode(errors="replace")[:LINE_BYTES]
        if line and hub.read_text(METRICS, LINE_BYTES).partition("\n")[0] != line:
            problem = f"holds another run: its '{METRICS}' begins differently."
    if problem:
        raise StoreError(f"'{hub.address}' {problem} {ANOTHER_PLACE}")


def _check_listing(hub: HubRepository, files: Sequence[OutgoingFile]) -> None:
    """Raise if the hub does not list the files with their sizes and hashes.

    Raises: DamageError.
    """
    listed = hub.listing()
    if wrong := [file.path for file in files if not file.is_same(listed.get(file.path))]:
        raise DamageError(
            f"'{hub.address}': {len(wrong)} files there differ from those that were sent, the first is '{wrong[0]}'. "
            "Run the same command again: it sends them again."
        )


def render(result: Mapping[str, Any]) -> Rows:
    """A result as rows of text."""
    dry_run, sent = result.get("dry_run"), result.get("sent", [])
    counts = [f"{result[f'files{part}']:,} files, {readable_size(result[f'bytes{part}'])}" for part in ("_sent", "")]
    rows = [("repository", result["url"]), ("to send" if dry_run else "sent", ", of ".join(counts))]
    rows += [("", f"{readable_size(file['bytes']):>10}  {file['path']}") for file in sent[:SHOWN_FILES]]
    rows += [("", f"and {len(sent) - SHOWN_FILES} more: see --json")] if len(sent) > SHOWN_FILES else []
    return rows if dry_run else [*rows, ("checked", "the hub lists the sizes and hashes of the local files")]
