"""``leandit verify``: check a store, encode a sample again, repair what is damaged; as text or as values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets.errors import RecipeError
from ...datasets.format.layout import GROUP, revisions_with
from ...datasets.format.schema import StoreSpec
from ...datasets.maintenance.findings import HARMLESS, Finding
from ...datasets.maintenance.verify import Verification, verify_store
from ...datasets.revisions.catalog import read_spec, sealed_revisions
from ...precompute.progress.clock import Progress
from ..terminal.text import printable

if TYPE_CHECKING:
    from ...precompute.repair import Tools
    from ...precompute.sources.several import SourcePaths

DEEP_RECORDS = 64
SHOWN = 50  # findings in the text; --json has all


def check(
    store: Path,
    *,
    quick: bool,
    deep: bool,
    repair: bool,
    source: SourcePaths | None,
    device: Any,
    overrides: list[str],
    progress: Progress,
) -> tuple[Verification, dict[str, Any]]:
    """Verify a store, and repair it or encode a sample again where asked.

    Args:
      source: each that the store was made from, in the same order; none where nothing is encoded.
      device: gives the torch device; only called where something is encoded.
    Returns: what is (still) wrong, and what else was done.
    Raises: RecipeError: encoding needs a source.
    """
    if deep and not source:
        raise RecipeError("verify --deep: encoding a sample again needs the pictures. Give --source PATH.")
    if deep and revisions_with(store, GROUP) and _is_imported(store):
        raise RecipeError(
            f"verify --deep: store '{store}' was imported, so nothing can encode it again. Without --deep, "
            "every byte is checked against its hash."
        )
    done: dict[str, Any] = {}
    found = verify_store(store, quick=quick and not repair)
    if repair and found.findings:
        from ...datasets.maintenance.repair import repair_without_encoding

        done["before"] = len(found.findings)
        found = repair_without_encoding(store, found)
        if found.damaged and source:
            from ...precompute.repair import repair as encode_again

            if _is_imported(store):
                from ...precompute.importing.repair import load_importer
                from ...precompute.sources.several import paths_of

                first, *others = paths_of(source)
                if others:
                    raise RecipeError(f"verify '{store}': it was imported from one source. Give one --source.")
                found = encode_again(store, load_importer(_newest_spec(store), Path(first)), found, progress)
            else:
                with loaded_tools(store, source, device(), overrides) as tools:
                    found = encode_again(store, tools, found, progress)
    if deep and source and not found.damaged and found.revisions:
        from ...precompute.deep_check import deep_check

        with loaded_tools(store, source, device(), overrides) as tools:
            sample = deep_check(store, tools, num_records=DEEP_RECORDS, seed=0)
        found.findings += sample.findings
        done["deep"] = asdict(sample) | {"findings": len(sample.findings)}
    elif deep:
        done["deep"] = None  # what is damaged, or nowhere complete, is not worth encoding again
    return found, done


def check_url(url: str, *, quick: bool, deep: bool, repair: bool) -> tuple[Verification, dict[str, Any]]:
    """Verify a store at a URL; as ``check``.

    Raises: RecipeError: only a store in a folder is repaired or encoded again.
    """
    if deep or repair:
        raise RecipeError(
            f"verify '{url}': --deep and --repair need the store in a folder. Copy it first, as with "
            "'aws s3 sync s3://BUCKET/NAME FOLDER'."
        )
    from ...datasets.maintenance.remote_verify import verify_remote

    return verify_remote(url, quick=quick), {}


@contextmanager
def loaded_tools(store: Path, source: SourcePaths, device: Any, overrides: list[str]) -> Iterator[Tools]:
    """Source and encoders of a store, by its own recipe.

    Raises: FingerprintMismatch: the encoders are not those that made the newest revision.
    """
    from ...datasets.format.encoder_paths import encoder_section
    from ...datasets.recipe import parse_with_overrides
    from ...precompute.config import PrecomputeRecipe
    from ...precompute.encoders.describe import describe_store
    from ...precompute.encoders.vae import load_encoders
    from ...precompute.images.decoders import Decoders
    from ...precompute.planning.opening import check_fingerprint
    from ...precompute.planning.pictures import num_threads
    from ...precompute.repair import Tools
    from ...precompute.sources.several import list_sources

    spec = _newest_spec(store)
    encoders_here = {role: encoder_section(spec, role, store) for role in ("vae", "text")}
    recipe = parse_with_overrides(str(store), PrecomputeRecipe, spec.recipe | encoders_here, overrides)
    listed, encoders = list_sources(source, recipe.source), load_encoders(recipe, device)
    check_fingerprint(store, spec, describe_store(recipe, listed, encoders, known=spec))
    with Decoders(num_threads()) as decoders:
        yield Tools(listed, recipe, spec.fingerprint, encoders, decoders)


def _newest_spec(store: Path) -> StoreSpec:
    return read_spec(store, (sealed_revisions(store) or [1])[-1])


def _is_imported(store: Path) -> bool:
    """Its rows came from another program; there are no pictures and encoders."""
    return _newest_spec(store).is_imported


def render(found: Verification, done: dict[str, Any]) -> str:
    """A verification as text: what was checked, the findings, what to do."""
    rate = f"{found.num_bytes / 2**20:.1f} MiB in {found.seconds:.1f} s, {found.mib_per_second:.0f} MiB/s"
    lines = [
        f"{'store':<12}{found.store}",
        f"{'revisions':<12}{', '.join(map(str, found.revisions)) or 'none complete'}",
        f"{'checked':<12}{found.mode}: {found.num_files} files, {rate}; {found.num_records} records",
    ]
    if "before" in done:
        lines.append(f"{'repaired':<12}{done['before']} findings before, {len(found.findings)} now")
    if "deep" in done:
        lines.append(f"{'deep':<12}{_deep_line(done['deep']) if done['deep'] else 'not done: see below'}")
    lines += [_finding_line(finding) for finding in found.findings[:SHOWN]]
    if len(found.findings) > SHOWN:
        lines.append(f"{'':<12}and {len(found.findings) - SHOWN} more: see --json")
    lines.append(f"{'state':<12}{_state(found)}")
    return "\n".join(printable(line) for line in lines)


def _deep_line(deep: dict[str, Any]) -> str:
    return (
        f"{deep['num_records']} records and {deep['num_captions']} captions encoded again: {deep['num_exact']} equal "
        f"bit for bit, {deep['num_close']} within rounding, {deep['findings']} not"
    )


def _finding_line(finding: Finding) -> str:
    return f"{finding.cause:<16}{finding.line()}"


def _state(found: Verification) -> str:
    if found.damaged:
        causes = {finding.cause for finding in found.findings} - HARMLESS
        if causes == {"stray"}:
            return "files that are not the store's: remove them yourself, nothing here touches them"
        if "not_reproduced" in causes:
            return "DAMAGED: see above"
        return "DAMAGED: run 'leandit verify --repair --source PATH'"
    if not found.complete:
        return "whole so far, but incomplete: run the same precompute command again"
    return "whole" if not found.findings else "whole; what is listed above does no harm"
