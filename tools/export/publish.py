"""``leandit publish``: a store or a run as a repository of the Hugging Face hub.

The files that make a store readable are committed last, and only after the hub has listed all others with their sizes
and hashes, so nobody reads half of a store. The same command resumes: what the hub lists already is not sent again.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...datasets.errors import DamageError, RecipeError, StoreError
from ...datasets.format.layout import MANIFEST, REVISIONS
from ...datasets.units import readable_size
from ...train.weights.folders import is_run
from .card import CARD, MARK, Terms
from .hub import HubRepository, ListedFile, OutgoingFile
from .outgoing import METRICS, Outgoing, outgoing_run, outgoing_store

COMMIT_FILES, COMMIT_BYTES = 500, 8 << 30  # at most in a commit: a kill costs what is not yet uploaded of one
PLAIN_BYTES = 64 << 20  # of small files in a commit, which travel in its request
PLAIN_FILE_BYTES = 1 << 20
SHOWN_FILES = 20
LINE_BYTES = 1 << 16  # of a line that is compared
SNAPSHOT_STATE = re.compile(r"snapshot-(\d+)/state\.json")
REASONS = {
    "--private or --public": "who may read it",
    "--license": "that of the pictures (of a run: of the weights), as 'cc-by-4.0', any other name, or a https link",
    "--encoder-license": "that of the encoders, whose output is published",
}


@dataclass(frozen=True)
class PublishRequest:
    """What is published, and where.

    Args:
      target: folder of a store or a run.
      url: of the repository.
      private: who may read it; None: not said.
      licence, encoder_licence: empty: not said.
      pictures: publish a contact sheet of decoded records.
      vae: that decodes them; None: the store's own.
      as_pipeline: of a run: as diffusers' pipelines load it.
      branch: of the repository.
      dry_run: send nothing.
    """

    target: Path
    url: str
    private: bool | None
    licence: str = ""
    encoder_licence: str = ""
    pictures: bool = False
    vae: str | None = None
    as_pipeline: bool = False
    branch: str = "main"
    dry_run: bool = False


def publish(request: PublishRequest, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Publish a store or a run.

    Args:
      progress: called with (stage, files done, files).
    Returns: what was sent, as plain values.
    Raises: RecipeError: an answer is missing; StoreError, RunError: it cannot be published, or the hub refuses it;
      DamageError: bytes here or there are not those of the manifest.
    """
    terms = _terms(request)
    hub = HubRepository(request.url, request.branch)
    _check_kind(request, hub)
    with tempfile.TemporaryDirectory(prefix="leandit-publish-") as scratch:
        if hub.kind == "dataset":
            outgoing = outgoing_store(request.target, hub, terms, pictures=request.pictures, vae=request.vae)
        else:
            outgoing = outgoing_run(request.target, hub, terms, as_pipeline=request.as_pipeline, scratch=Path(scratch))
        try:
            return _send(request, hub, outgoing, progress)
        except FileNotFoundError as error:
            raise StoreError(
                f"'{request.target}': '{error.filename}' has gone while it was published. Let nothing change it "
                "meanwhile, then run the same command again."
            ) from error


def _terms(request: PublishRequest) -> Terms:
    """The licences. Raises: RecipeError: an answer is missing, and none is guessed."""
    given = (request.private is not None, request.licence.strip(), request.encoder_licence.strip())
    missing = [name for name, value in zip(REASONS, given, strict=True) if not value]
    if missing:
        asked = "; ".join(f"{name}: {REASONS[name]}" for name in missing)
        raise RecipeError(f"publish '{request.target}': not said, and never guessed: {asked}. Give them.")
    return Terms(request.licence.strip(), request.encoder_licence.strip())


def _check_kind(request: PublishRequest, hub: HubRepository) -> None:
    """Raise if the options are those of a store and the target is a run, or the other way round."""
    of_run = is_run(request.target)
    if of_run != (hub.kind == "model"):
        kind, needed = ("run", "hf://OWNER/NAME") if of_run else ("store", "hf://datasets/OWNER/NAME")
        raise RecipeError(f"--to '{request.url}': '{request.target}' is a {kind}. Give {needed}.")
    if of_run and request.pictures:
        raise RecipeError("--pictures: they are of a store. Leave it out for a run.")
    if not of_run and request.as_pipeline:
        raise RecipeError("--export: it is for a run. Leave it out for a store.")


def _send(
    request: PublishRequest, hub: HubRepository, outgoing: Outgoing, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    assert request.private is not None, "asked for before"
    private = hub.is_private()
    if private not in (None, request.private):
        raise RecipeError(
            f"'{hub.address}' is {'private' if private else 'public'} already. Give that option, or change it in the "
            "settings of the repository."
        )
    listed = hub.listing() if private is not None else {}
    outgoing = _without_foreign_card(hub, outgoing, listed)
    _refuse_other(hub, outgoing, listed)
    first, last = (_missing(files, listed, progress) for files in (outgoing.files, outgoing.last))
    result = {
        "url": hub.address,
        "files": len(outgoing.all),
        "bytes": sum(file.size for file in outgoing.all),
        "files_sent": len(first) + len(last),
        "bytes_sent": sum(file.size for file in (*first, *last)),
        "notes": outgoing.notes,
    }
    if request.dry_run:
        return result | {"dry_run": True, "sent": [{"path": f.path, "bytes": f.size} for f in (*first, *last)]}
    if first or last:
        hub.create(private=request.private)
    done = 0
    for files in _batches(first):
        hub.commit(files, f"leandit publish: {len(files)} files")
        done += len(files)
        progress("upload", done, len(first) + len(last))
    if first:
        _check_listing(hub, outgoing.files)
    if last:
        hub.commit(last, "leandit publish: readable from here on")
        progress("upload", done + len(last), len(first) + len(last))
    _check_listing(hub, outgoing.all)
    return result


def _without_foreign_card(hub: HubRepository, outgoing: Outgoing, listed: Mapping[str, ListedFile]) -> Outgoing:
    """Leave out the card where the repository has one that somebody else has written."""
    if CARD not in listed or MARK in hub.read_text(CARD):
        return outgoing
    note = f"'{CARD}' there was not written by this command, so it stays"
    last = [file for file in outgoing.last if file.path != CARD]
    return Outgoing(outgoing.files, last, [*outgoing.notes, note])


def _refuse_other(hub: HubRepository, outgoing: Outgoing, listed: Mapping[str, ListedFile]) -> None:
    """Raise if the repository holds another store, a later revision, or another run: readers would get half of each."""
    _refuse_later_revision(hub, outgoing, listed) if hub.kind == "dataset" else _refuse_other_run(hub, outgoing, listed)
    for file in outgoing.last:
        if file.path.endswith("manifest.json") and file.path in listed and not file.is_same(listed[file.path]):
            raise StoreError(
                f"'{hub.address}' holds another store: its '{file.path}' differs. Give another name, or another branch "
                "with --revision."
            )


def _refuse_later_revision(hub: HubRepository, outgoing: Outgoing, listed: Mapping[str, ListedFile]) -> None:
    known = {file.path for file in outgoing.last}
    for path in sorted(listed):
        if path not in known and re.fullmatch(rf"{REVISIONS}/\d+/{re.escape(MANIFEST)}", path):
            raise StoreError(
                f"'{hub.address}' holds a revision that this store lacks: '{path}'. Its readers would go on with that "
                "one. Publish the store that has it, or give another name or another branch with --revision."
            )


def _refuse_other_run(hub: HubRepository, outgoing: Outgoing, listed: Mapping[str, ListedFile]) -> None:
    """A run is known by the first line of its metrics, which has its first loss and times."""
    steps = [int(match[1]) for path in listed if (match := SNAPSHOT_STATE.fullmatch(path))]
    here = [int(match[1]) for file in outgoing.last if (match := SNAPSHOT_STATE.fullmatch(file.path))]
    if here and max(steps, default=0) > here[0]:
        raise StoreError(
            f"'{hub.address}' holds the snapshot of step {max(steps)}, and this one is of step {here[0]}: readers take "
            "the later one. Give another name, or another branch with --revision."
        )
    metrics = next((file.content for file in outgoing.last if file.path == METRICS), b"")
    assert isinstance(metrics, bytes)
    first = metrics.partition(b"\n")[0].decode(errors="replace")
    if first and METRICS in listed and hub.read_text(METRICS, LINE_BYTES).partition("\n")[0] != first[:LINE_BYTES]:
        raise StoreError(
            f"'{hub.address}' holds another run: its '{METRICS}' begins otherwise. Give another name, or another "
            "branch with --revision."
        )


def _missing(
    files: Sequence[OutgoingFile], listed: Mapping[str, ListedFile], progress: Callable[[str, int, int], None]
) -> list[OutgoingFile]:
    """The files that the repository does not list with these bytes."""
    missing = []
    for done, file in enumerate(files, start=1):
        if not file.is_same(listed.get(file.path)):
            missing.append(file)
        progress("compare", done, len(files))
    return missing


def _batches(files: Sequence[OutgoingFile]) -> Iterator[list[OutgoingFile]]:
    """Files in commits of bounded size."""
    batch: list[OutgoingFile] = []
    for file in files:
        sizes = [one.size for one in (*batch, file)]
        plain = sum(size for size in sizes if size <= PLAIN_FILE_BYTES)
        if batch and (len(sizes) > COMMIT_FILES or sum(sizes) > COMMIT_BYTES or plain > PLAIN_BYTES):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


def _check_listing(hub: HubRepository, files: Sequence[OutgoingFile]) -> None:
    """Raise if the hub does not list the files with their sizes and hashes.

    Raises: DamageError.
    """
    listed = hub.listing()
    wrong = [file.path for file in files if not file.is_same(listed.get(file.path))]
    if wrong:
        raise DamageError(
            f"'{hub.address}': {len(wrong)} files there are not those that were sent, the first is '{wrong[0]}'. Run "
            "the same command again: it sends them again."
        )


def render(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A result as rows of text."""
    verb = "to send" if result.get("dry_run") else "sent"
    sizes = [readable_size(result[f"bytes{which}"]) for which in ("_sent", "")]
    counts = f"{result['files_sent']:,} files, {sizes[0]}, of {result['files']:,} files, {sizes[1]}"
    rows = [("repository", result["url"]), (verb, counts)]
    sent = result.get("sent", [])
    rows += [("", f"{readable_size(file['bytes']):>10}  {file['path']}") for file in sent[:SHOWN_FILES]]
    rows += [("", f"and {len(sent) - SHOWN_FILES} more: see --json")] if len(sent) > SHOWN_FILES else []
    return rows if result.get("dry_run") else [*rows, ("checked", "sizes and hashes there are those of here")]
