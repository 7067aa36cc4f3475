"""``leandit verify``: check a store, encode a sample again, repair damage."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets.format.schema import StoreSpec
from ...datasets.maintenance.findings import HARMLESS
from ...datasets.maintenance.verify import Verification, verify_store
from ...datasets.revisions.catalog import sealed_revisions
from ...datasets.revisions.plan import read_spec
from ...errors import RecipeError
from ...precompute.run.clock import Progress
from ...units import plural, readable_size, readable_time
from ..terminal.text import printable

if TYPE_CHECKING:
    from ...precompute.run.tasks import Runner, ShardRunner
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
    """Verify a store; optionally repair it, or encode a sample again.

    Args:
      source: all sources of the store, in the original order; None if nothing is encoded.
      device: returns the torch device; only called before encoding.
    Returns: the remaining findings, and what was repaired or encoded.
    Raises: RecipeError: encoding needs a source.
    """
    if deep and not source:
        raise RecipeError("verify --deep: encoding a sample again needs the images. Pass --source PATH.")
    if deep and sealed_revisions(store) and _newest_spec(store).is_imported:
        raise RecipeError(
            f"verify --deep: store '{store}' was imported, so nothing can encode it again. Without --deep, "
            "every byte is checked against its hash."
        )
    done: dict[str, Any] = {}
    verification = verify_store(store, quick=quick and not repair)
    if repair and verification.findings:
        from ...datasets.maintenance.repair import repair_without_encoding

        done["before"] = len(verification.findings)
        verification = repair_without_encoding(store, verification)
        if verification.damaged and source:
            from ...precompute.remake import repair as encode_damaged

            with _repairer(store, source, device, overrides) as runner:
                verification = encode_damaged(store, runner, verification, progress)
    if deep and source:
        done["deep"] = None  # a damaged or incomplete store is not encoded again
        if not verification.damaged and verification.revisions:
            from ...precompute.remake import deep_check

            with loaded_runner(store, source, device(), overrides) as runner:
                sample = deep_check(store, runner, num_records=DEEP_RECORDS, seed=0)
            verification.findings += sample.findings
            done["deep"] = asdict(sample) | {"findings": len(sample.findings)}
    return verification, done


@contextmanager
def _repairer(store: Path, source: SourcePaths, device: Any, overrides: list[str]) -> Iterator[ShardRunner]:
    """What makes damaged shards again: encoders, or the importer of an imported store.

    Raises: RecipeError: an imported store has one source.
    """
    spec = _newest_spec(store)
    if not spec.is_imported:
        with loaded_runner(store, source, device(), overrides) as runner:
            yield runner
        return
    from ...precompute.importing.pipeline import load_importer
    from ...precompute.sources.several import paths_of

    first, *others = paths_of(source)
    if others:
        raise RecipeError(f"verify '{store}': it was imported from one source. Pass one --source.")
    yield load_importer(spec, Path(first))


def check_url(url: str, *, quick: bool, deep: bool, repair: bool) -> tuple[Verification, dict[str, Any]]:
    """Verify a store at a URL, as ``check``.

    Raises: RecipeError: --deep and --repair need a local store.
    """
    if deep or repair:
        raise RecipeError(
            f"verify '{url}': --deep and --repair need the store in a folder. Copy it first, as with "
            "'aws s3 sync s3://BUCKET/NAME FOLDER'."
        )
    from .remote_verify import verify_remote

    return verify_remote(url, quick=quick), {}


@contextmanager
def loaded_runner(store: Path, source: SourcePaths, device: Any, overrides: list[str]) -> Iterator[Runner]:
    """Source and encoders of a store, from its recipe.

    Raises: FingerprintMismatch: other encoders made the newest revision.
    """
    from ...datasets.revisions.local import openable
    from ...precompute.config import PrecomputeRecipe
    from ...precompute.encoders.loading import describe_store, load_encoders
    from ...precompute.encoders.model_files import nothing_fetched
    from ...precompute.images.decoders import Decoders
    from ...precompute.planning.images import num_threads
    from ...precompute.planning.opening import check_fingerprint
    from ...precompute.run.tasks import Runner
    from ...precompute.sources.several import list_sources
    from ...recipe import parse_with_overrides, split_unknown

    spec = _newest_spec(store)
    stored, _ = split_unknown(PrecomputeRecipe, openable(spec, store).recipe)  # perhaps of another release
    recipe = parse_with_overrides(str(store), PrecomputeRecipe, stored, overrides)
    listed = list_sources(source, recipe.source, recipe.companion_columns, needs_labels=recipe.needs_labels)
    limit = recipe.images.max_megapixels
    with nothing_fetched(), Decoders(num_threads(), max_megapixels=limit) as decoders:
        encoders = load_encoders(recipe, device)
        check_fingerprint(store, spec, describe_store(recipe, listed, encoders, known=spec))
        yield Runner(encoders, decoders, listed)


def _newest_spec(store: Path) -> StoreSpec:
    return read_spec(store, (sealed_revisions(store) or [1])[-1])


def render(checked: Verification, done: dict[str, Any]) -> str:
    """A verification as text: what was checked, findings, what to do."""
    rate = f"{readable_size(checked.num_bytes)} in {readable_time(checked.seconds)}"
    rate += f", {readable_size(checked.mib_per_second * 2**20)}/s"
    rows = [
        ("store", checked.store),
        ("revisions", ", ".join(map(str, checked.revisions)) or "none complete"),
        ("checked", f"{checked.mode}: {checked.num_files:,} files, {rate}; {checked.num_records:,} records"),
    ]
    if "before" in done:
        rows.append(("repaired", f"{plural(done['before'], 'finding')} before, {len(checked.findings)} now"))
    if "deep" in done:
        again = "{num_records} records and {num_captions} captions encoded again: {num_exact} equal bit for bit, "
        again += "{num_close} within rounding, {findings} different"
        rows.append(("deep", again.format(**done["deep"]) if done["deep"] else "not done: see below"))
    rows += [(f"{finding.cause:<16}", finding.line()) for finding in checked.findings[:SHOWN]]
    if len(checked.findings) > SHOWN:
        rows.append(("", f"and {len(checked.findings) - SHOWN} more: see --json"))
    return "\n".join(printable(f"{name:<12}{value}") for name, value in [*rows, ("state", _state(checked))])


def _state(checked: Verification) -> str:
    causes = {finding.cause for finding in checked.findings} - HARMLESS
    if causes == {"stray"}:
        return "foreign files: remove them yourself, leandit never does"
    if "not_reproduced" in causes:
        return "DAMAGED: see above"
    if causes:
        return f"DAMAGED: run 'leandit verify {shlex.quote(checked.store)} --repair --source PATH'"
    if not checked.complete:
        return "whole so far, but incomplete: run the same precompute command again"
    state = "whole by sizes and metadata; bytes were not read" if checked.mode == "quick" else "whole"
    return state + (", with warnings" if checked.findings else "")
