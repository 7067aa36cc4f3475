"""What is published of a store or of a run: its files and a card, without paths of this machine."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ...datasets.disk.hashing import canonical_json, sha256_of
from ...datasets.errors import DamageError, RunError, StoreError, StoreIncomplete
from ...datasets.format.layout import MANIFEST, RECORDS
from ...datasets.format.schema import StoreSpec
from ...datasets.maintenance.portable import portable_files
from ...datasets.maintenance.verify import verify_store
from ...datasets.recipe import values_to_toml
from ...datasets.revisions.encoder_paths import portable_spec, without_local_folders
from ...datasets.store import LatentStore
from ..inspection.store_facts import StoreFacts
from ..terminal.text import printable
from .card import CARD, SHEET, Terms, run_card, store_card
from .hub import HubRepository, OutgoingFile

STAYS = ("stray", "temporary")  # findings of files that are not of the store: they are not published
TEXTS = (".json", ".jsonl", ".toml", ".md")
QUOTED_PATH = re.compile(r"[\"']((?:/|[A-Za-z]:[\\/])[^\"'\n]{1,4000})[\"']")
TEXT_BYTES = 1 << 26  # a larger file is not searched for local folders
METRICS, TRAIN_RECIPE = "metrics.jsonl", "recipe.toml"


@dataclass
class Outgoing:
    """What is published.

    Args:
      files: that come first, in any number of commits.
      last: that come in one commit at the end: what makes the others readable, and the card.
      notes: for the user.
    """

    files: list[OutgoingFile]
    last: list[OutgoingFile]
    notes: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[OutgoingFile]:
        """All files in their order."""
        return [*self.files, *self.last]


def outgoing_store(root: Path, hub: HubRepository, terms: Terms, *, pictures: bool, vae: str | None) -> Outgoing:
    """The files of a complete store whose sizes and metadata are as its manifests say.

    Args:
      pictures: decode some records for a contact sheet.
      vae: that decodes them; None: the store's own.
    Raises: StoreNotFound, StoreError; StoreIncomplete; DamageError; EncoderError: the VAE cannot be loaded.
    """
    strays = _verify(root)
    found, opened = portable_files(root), LatentStore(root)
    notes = [f"{len(strays)} files that are not of the store stay here, such as '{strays[0]}'"] if strays else []
    if opened.root_hash != found.manifest.root_hash:
        notes.append(
            "of local folders in its recipe the last name alone is published, so the root hash there is "
            f"{found.manifest.root_hash}, and here {opened.root_hash}"
        )
    files = [
        OutgoingFile(path, found.changed.get(path, root / path), entry.xxh3_128)
        for path, entry in sorted(found.entries.items())
    ]
    card = store_card(
        hub.name,
        hub.address,
        StoreSpec.model_validate(portable_spec(opened.spec.model_dump())),
        found.manifest,
        StoreFacts(opened).records["rejects"],
        sum(entry.bytes for entry in found.entries.values()),
        terms,
        has_sheet=pictures,
    )
    last = [file for file in files if Path(file.path).name == MANIFEST]
    last.append(OutgoingFile(CARD, card.encode()))
    if pictures:
        last.append(OutgoingFile(SHEET, _contact_sheet(opened, vae)))
    outgoing = Outgoing([file for file in files if file not in last], last, notes)
    _refuse_local_folders(root, outgoing.all)
    return outgoing


def _verify(root: Path) -> list[str]:
    """Paths of files that are not of the store.

    Raises: DamageError; StoreIncomplete; StoreNotFound, StoreError.
    """
    checked = verify_store(root, quick=True)
    if damage := [one for one in checked.findings if one.cause not in (*STAYS, "unsealed")]:
        raise DamageError(
            f"store '{root}': {len(damage)} of its files are not as they were written, the first: "
            f"{printable(damage[0].line())}. Run 'leandit verify --repair --source PATH', then publish."
        )
    if not checked.complete:
        raise StoreIncomplete(
            f"store '{root}': it is not complete, and no part of a store is published. Run the same precompute command "
            "again, then publish."
        )
    return [one.path for one in checked.findings]


def _contact_sheet(store: LatentStore, vae: str | None) -> bytes:
    from ..inspection.contact_sheet import write_sheet

    with tempfile.TemporaryDirectory(prefix="leandit-publish-") as scratch:
        write_sheet(store, Path(scratch) / SHEET, vae=vae)
        return (Path(scratch) / SHEET).read_bytes()


def outgoing_run(run: Path, hub: HubRepository, terms: Terms, *, as_pipeline: bool, scratch: Path) -> Outgoing:
    """The newest averaged weights of a run, its recipe and its metrics, all in one commit.

    Args:
      as_pipeline: as diffusers' pipelines load them, not as a snapshot.
      scratch: an empty folder, for the pipeline.
    Raises: RunError: there is no snapshot, or diffusers cannot hold the model; DamageError.
    """
    from ...train.models.spec import ModelSpec
    from ...train.weights import checkpoint
    from .export_card import model_rows

    snapshots = checkpoint.find(checkpoint.SNAPSHOT, run)
    if not snapshots:
        raise RunError(f"run '{run}': there is no snapshot to publish. Train first: a checkpoint makes one too.")
    saved = checkpoint.read(snapshots[-1])
    state = without_local_folders(saved.state)
    recipe = values_to_toml(without_local_folders(_recipe_of(run)))
    if as_pipeline:
        files, loading, notes = _pipeline_files(run, hub, scratch)
    else:
        document = canonical_json(state | {checkpoint.STATE_HASH: sha256_of(state)})
        files = [OutgoingFile(f"{saved.path.name}/{checkpoint.STATE}", document)]
        for name, entry in saved.files.items():
            files.append(OutgoingFile(f"{saved.path.name}/{name}", saved.path / name, entry.xxh3_128))
        loading, notes = ("python", _LOAD_RUN.format(arguments=_arguments(hub))), list[str]()
    described = model_rows(state, ModelSpec.model_validate(state["spec"]), f"averaged, {saved.path.name}")
    card = run_card(hub.name, described, terms, loading=loading, notes=notes, recipe=recipe, is_pipeline=as_pipeline)
    files.append(OutgoingFile(CARD, card.encode()))
    files += [OutgoingFile(TRAIN_RECIPE, recipe.encode())] if recipe else []
    files += [OutgoingFile(METRICS, _whole_lines(run / METRICS))] if (run / METRICS).is_file() else []
    _refuse_local_folders(run, files)
    return Outgoing([], files, notes)


_LOAD_RUN = """from huggingface_hub import snapshot_download

run = snapshot_download({arguments})  # then: leandit sample RUN --out samples
"""


def _arguments(hub: HubRepository) -> str:
    """Of the functions that load it."""
    return f'"{hub.name}"' + (f', revision="{hub.branch}"' if hub.branch != "main" else "")


def _recipe_of(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / TRAIN_RECIPE).read_text("utf-8")) if (run / TRAIN_RECIPE).is_file() else {}


def _whole_lines(path: Path) -> bytes:
    """The lines of a file that may be growing."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _pipeline_files(
    run: Path, hub: HubRepository, scratch: Path
) -> tuple[list[OutgoingFile], tuple[str, str], list[str]]:
    """Files of the exported pipeline, the code that loads it, notes."""
    from .export import export

    result = export(run, scratch / "pipeline")
    files = [OutgoingFile(path, scratch / "pipeline" / path) for path in result["files"] if path != CARD]
    if result["format"] == "adapters":
        return files, ("python", f"pipeline.load_lora_weights({_arguments(hub)})"), result["notes"]
    code = (
        f"from diffusers import {result['pipeline']}\n\n# Give the encoders of the table as keywords, such as vae=...\n"
    )
    return (
        files,
        ("python", f"{code}pipeline = {result['pipeline']}.from_pretrained({_arguments(hub)})"),
        result["notes"],
    )


def _refuse_local_folders(source: Path, files: Sequence[OutgoingFile]) -> None:
    """Raise if a text that is published names the folder of the source, the home folder, or a path of this machine.

    Raises: StoreError.
    """
    folders = {os.path.abspath(source.parent), str(Path.home()), os.path.realpath(source.parent)} - {"/"}
    names = [folder.rstrip("/") + "/" for folder in sorted(folders)]
    for file in files:
        for text in _texts_of(file):
            paths = (path for path in QUOTED_PATH.findall(text) if _is_here(path))
            if found := next((name for name in names if name in text), None) or next(paths, None):
                raise StoreError(
                    f"'{source}': file '{file.path}' names '{found}' of this machine, which is not published. Remove "
                    "what names it (of a store: 'leandit inspect STORE --rejects'), then publish again."
                )


def _is_here(path: str) -> bool:
    folder = os.path.dirname(path)
    return os.path.exists(path) or (folder != "/" and os.path.isdir(folder))


def _texts_of(file: OutgoingFile) -> Iterator[str]:
    """The texts of a file that the program itself has written."""
    if file.path.endswith(RECORDS) and isinstance(file.content, Path):
        for batch in pq.ParquetFile(file.content).iter_batches(columns=["detail"]):
            yield from (text for text in batch["detail"].unique().to_pylist() if text)
    elif file.path.endswith(TEXTS) and file.size <= TEXT_BYTES:
        content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
        yield content.decode(errors="replace")
