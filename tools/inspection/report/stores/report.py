"""``leandit report STORE...``: what stores hold, and what is unusual about it, on one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .....datasets.format.table_schemas import REJECT_REASONS
from .....datasets.recipe import flatten
from .....datasets.store import LatentStore
from ..page import Alert, Section, count, mib, number, render_page, write_page
from .alerts import find_alerts, min_psnr, share
from .facts import NUM_EXTREMES, StoreFacts, read_facts, utc
from .figures import bucket_figures, byte_figures, caption_figures, class_figures, latent_figures
from .sheets import Progress, SheetOptions, bucket_sheets, reject_thumbnails

Rows = list[tuple[str, list[str]]]
"""Lines of a table: a name, and the value of each store."""

SECTIONS = {
    "identity": "Identity",
    "records": "Records",
    "buckets": "Buckets",
    "pictures": "Pictures",
    "captions": "Captions",
    "features": "Features",
    "classes": "Classes",
    "latents": "Latents",
    "bytes": "Bytes",
}


def report_stores(
    targets: Sequence[str], out: Path, options: SheetOptions, *, progress: Progress
) -> list[tuple[str, str]]:
    """Write a report of one store, or of several side by side.

    Args:
      targets: folders or URLs.
      out: the HTML file.
    Returns: rows for the user.
    Raises: as ``LatentStore``; SourceError; RecipeError: the scores cannot be read; EncoderError: of ``options.vae``.
    """
    stores = []
    for done, (target, name) in enumerate(zip(targets, short_names(targets), strict=True)):
        progress("read", done, len(targets))
        stores.append(read_facts(LatentStore(target, allow_incomplete=True, access="pread"), name))
    progress("read", len(targets), len(targets))
    alerts = [
        Alert(f"{facts.name}: {alert.text}" if len(stores) > 1 else alert.text, alert.section)
        for facts in stores
        for alert in find_alerts(facts)
    ]
    html = render_page("store.html", alerts=alerts, **contents(stores, options, progress))
    num_bytes = write_page(out, html)
    return [("size", mib(num_bytes)), *[("warning", alert.text) for alert in alerts]]


def short_names(targets: Sequence[str]) -> list[str]:
    """Last parts of paths, as many as it takes to tell them apart; a path that is given twice gets its number."""
    parts = [target.rstrip("/").split("/") for target in targets]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]


def contents(stores: Sequence[StoreFacts], options: SheetOptions, progress: Progress) -> dict[str, Any]:
    """What ``store.html`` prints."""
    sheets = [bucket_sheets(facts.store, options, num_stores=len(stores), progress=progress) for facts in stores]
    present = {
        "pictures": any(shown for shown, _ in sheets),
        "captions": any(facts.captions for facts in stores),
        "features": any(facts.store.spec.groups for facts in stores),
        "classes": any(facts.classes is not None for facts in stores),
    }
    return {
        "title": " and ".join(facts.name for facts in stores),
        "sections": [Section(id, title) for id, title in SECTIONS.items() if present.get(id, True)],
        "names": [facts.name for facts in stores],
        "tiles": [_tiles(facts) for facts in stores],
        "identity": side_by_side(stores, _identity),
        "stores": [_of_one(facts, options, *shown) for facts, shown in zip(stores, sheets, strict=True)],
        "records": side_by_side(stores, _records),
        "reasons": _reasons(stores),
        "bucket_figures": bucket_figures(stores),
        "captions": side_by_side(stores, _captions),
        "caption_figures": caption_figures(stores),
        "class_figures": class_figures(stores),
        "latents": side_by_side(stores, _latents),
        "latent_figures": latent_figures(stores),
        "bytes": side_by_side(stores, _bytes),
        "byte_figures": byte_figures(stores),
    }


def side_by_side(stores: Sequence[StoreFacts], rows_of: Callable[[StoreFacts], dict[str, str]]) -> Rows:
    """The same rows of each store, in the order of the one with most; "-" where one has none."""
    every = [rows_of(facts) for facts in stores]
    names = dict.fromkeys(name for rows in sorted(every, key=len, reverse=True) for name in rows)
    return [(name, [rows.get(name, "-") for rows in every]) for name in names]


def _tiles(facts: StoreFacts) -> list[tuple[str, str]]:
    """The few numbers at the top of a page: value and name."""
    summary = facts.summary
    stored, num_buckets = summary["num_stored"], len(summary["buckets"])
    tiles = [(count(stored), "record stored" if stored == 1 else "records stored")]
    tiles.append((count(summary["num_rejected"]), "rejected"))
    tiles.append((count(num_buckets), "bucket" if num_buckets == 1 else "buckets"))
    if facts.captions:
        tiles.append((count(len(facts.captions.characters)), "distinct captions"))
    if facts.classes is not None:
        tiles.append((count(len(facts.classes)), "classes"))
    return [*tiles, (mib(summary["bytes"]["total"]), "on disk")]


def _identity(facts: StoreFacts) -> dict[str, str]:
    summary, spec, written = facts.summary, facts.store.spec, facts.written
    rows = {
        "store": summary["store"],
        "state": "complete" if summary["complete"] else "not complete",
        "revision": f"{summary['revision']} of {summary['newest_revision']}",
        "fingerprint": summary["fingerprint"],
        "root hash": summary["root_hash"] or "none yet",
        "made by": f"leandit {spec.leandit_version}" + (", imported from another program" if spec.is_imported else ""),
        "pictures": f"{spec.images.crop} crop, {spec.images.resolution_px} px, {spec.images.resize_filter}",
        "latents": f"{spec.latent.kind}, {spec.latent.channels} channels at 1/{spec.latent.downscale} of the pixels, "
        f"{spec.latent.dtype}, codec {spec.codec}" + (", with flipped pictures" if spec.latent.flip else ""),
    }
    if written:
        rows["sealed"] = utc(written["sealing"])
        stages = zip(list(written.items()), list(written.items())[1:], strict=False)
        times = [f"{name} {duration(end - start)}" for (_, start), (name, end) in stages]
        rows["time by stage, with pauses"] = ", ".join(times)
    return rows | _encoders(facts)


def counted(part: int, whole: int) -> str:
    """A count with its share: "12 (0.4 %)"."""
    return f"{count(part)} ({share(part, whole)})" if part else "0"


def duration(seconds: float) -> str:
    """Seconds in the units that read best: "3.2 s", "14 min", "5 h 20 min"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _of_one(facts: StoreFacts, options: SheetOptions, sheets: list[Any], note: str) -> dict[str, Any]:
    """What has a table or pictures of its own for each store."""
    spec, thumbnails = facts.store.spec, []
    if options.source and facts.rejects:
        thumbnails = reject_thumbnails(facts.store, facts.rejects, options.source)
    return {
        "name": facts.name,
        "revisions": _revisions(facts),
        "recipe": [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in flatten(spec.recipe).items()],
        "rejects": [[one["key"], one["reason"], one["stage"], one["detail"] or ""] for one in facts.rejects],
        "more_rejects": facts.summary["num_rejected"] - len(facts.rejects),
        "thumbnails": thumbnails,
        "copies": [
            [count(uses), ", ".join(keys) + (" ..." if uses > len(keys) else "")] for uses, keys in facts.copies
        ],
        "buckets": [[name, count(rows), *_latent_shape(facts, name)] for name, rows in facts.store.buckets.items()],
        "sheets": sheets,
        "note": note,
        "longest": [[count(n), text] for text, n in facts.captions.longest] if facts.captions else [],
        "repeated": [[count(n), text] for text, n in facts.captions.repeated] if facts.captions else [],
        "features": _features(facts),
        "extremes": _extremes(facts),
        "channels": [
            [str(i), f"{mean:.3f}", "0", f"{std:.3f}", "1"]
            for i, (mean, std) in enumerate(zip(facts.channels.channel_mean, facts.channels.channel_std, strict=True))
        ],
        "checked": [
            [f"{one['psnr_db']:.1f}", one["key"]]
            for one in (facts.summary["self_check"] or {"pictures": []})["pictures"]
        ],
    }


def _latent_shape(facts: StoreFacts, bucket: str) -> list[str]:
    array = facts.store.latents(bucket)
    return [" x ".join(map(str, array.row_shape)), mib(array.row_bytes)]


def _encoders(facts: StoreFacts) -> dict[str, str]:
    """What encoded a store: of each encoder its class, origin and libraries, and the hashes of its files."""
    rows = {}
    for role, identity in facts.summary["encoders"].items():
        if identity:
            libraries = ", ".join(f"{name} {version}" for name, version in identity["libraries"].items())
            revision = f" at {identity['revision']}" if identity["revision"] else ""
            computed = f"computed in {identity['dtype']}" + (f" with {libraries}" if libraries else "")
            rows[f"encoder {role}"] = f"{identity['class_name']} from {identity['model']}{revision}, {computed}"
            rows[f"weights of {role}, SHA-256"] = identity["weights_sha256"]
            if identity["tokenizer_sha256"]:
                rows[f"tokenizer of {role}, SHA-256"] = identity["tokenizer_sha256"]
    return rows


def _revisions(facts: StoreFacts) -> list[list[str]]:
    return [
        [
            str(one.number),
            count(one.manifest.num_stored),
            count(one.manifest.num_rejected),
            count(one.manifest.num_captions),
            ", ".join(map(str, one.manifest.stack)),
            one.manifest.root_hash,
            utc(one.sealed),
        ]
        for one in facts.revisions
    ]


def _records(facts: StoreFacts) -> dict[str, str]:
    summary = facts.summary
    planned, stored, rejected = (summary[f"num_{status}"] for status in ("planned", "stored", "rejected"))
    rows = {
        "planned": count(planned),
        "stored": count(stored),
        "rejected": counted(rejected, planned),
    }
    if missing := planned - stored - rejected:
        rows["missing"] = count(missing)
    rows["copies of an earlier picture"] = count(facts.num_copies)
    if facts.aspects is not None:
        rows["enlarged pictures"] = counted(facts.num_enlarged, stored)
    for how, num in summary["fallbacks"].items():
        rows[f"encoded again, as {how}"] = count(num)
    return rows


def _reasons(stores: Sequence[StoreFacts]) -> list[list[str]]:
    """Each reason for which a picture was rejected: its count in each store, and what it means."""
    reasons = dict.fromkeys(reason for facts in stores for reason in facts.summary["rejects"])
    return [
        [reason, *(count(facts.summary["rejects"].get(reason, 0)) for facts in stores), REJECT_REASONS.get(reason, "")]
        for reason in reasons
    ]


def _captions(facts: StoreFacts) -> dict[str, str]:
    if not facts.captions:
        return {}
    captions, spread = facts.captions, ("fewest", "median", "95 %", "most")
    rows = {
        "captions of records": count(captions.num_uses),
        "distinct": counted(len(captions.characters), captions.num_uses),
        "of rejected pictures alone": count(int(np.count_nonzero(~captions.is_used))),
        "empty": count(captions.num_empty),
        "uses of the most repeated": count(captions.most_records),
    }
    for one in facts.tokens:
        of = f", {one.name}" if one.name else ""
        rows[f"tokens{of}"] = ", ".join(f"{name} {n}" for name, n in zip(spread, one.spread, strict=True))
        rows[f"cut at {one.max_tokens} tokens{of}"] = counted(one.num_truncated, len(one.tokens))
        quality = facts.summary["texts"][one.name]["caption_quality"] if one.name else facts.summary["caption_quality"]
        rows[f"bytes a caption{of}"] = (
            f"{quality['bytes_per_caption']:,.0f}, {quality['fewer_than_padded_float16']:g} times fewer than padded"
        )
        if quality["min_cosine"] is not None:
            rows[f"cosine with the encoder's{of}"] = (
                f"at least {quality['min_cosine']:.6f}, median {quality['median_cosine']:.6f}"
            )
    return rows


def _features(facts: StoreFacts) -> list[list[str]]:
    rows = []
    first = next(iter(facts.store.buckets), None)
    for one in facts.store.spec.features:
        found, spec = facts.summary["features"][one.name], one.spec
        height_px, width_px = (spec.images_px, spec.images_px)
        grid = " x ".join(map(str, spec.grid(height_px, width_px)))
        shape = {"patches": f"{grid} patches", "cls": "1 token", "both": f"{grid} patches and a class token"}[
            spec.output
        ]
        rows.append(
            [
                one.name,
                one.encoder.model,
                f"{shape}, {spec.width} wide",
                spec.dtype,
                mib(found["bytes_per_record"]),
                number(found["min_cosine"], 6),
            ]
        )
    for one in facts.store.spec.pictures:
        found = facts.summary["pictures"][one.name]
        shape = " x ".join(map(str, found["row_shape"] or [])) + (f" in {first}" if first else "")
        kind = "encoded as the record's picture" if one.kind == "picture" else "a mask"
        rows.append([one.name, f"column '{one.column}', {kind}", shape, "", mib(found["bytes_per_record"]), "-"])
    return rows


def _extremes(facts: StoreFacts) -> dict[str, list[list[str]]]:
    """The smallest and the largest classes, of a store with more than are listed."""
    counts = facts.classes
    if counts is None or len(counts) <= NUM_EXTREMES:
        return {}
    order = np.argsort(counts, kind="stable")
    names = facts.store.class_names
    rows = [[names.describe(int(label)), count(int(counts[label]))] for label in order]
    return {"smallest": rows[:NUM_EXTREMES], "largest": rows[::-1][:NUM_EXTREMES]}


def _latents(facts: StoreFacts) -> dict[str, str]:
    stats, num_stored, check = (
        facts.summary["latent_statistics"],
        facts.summary["num_stored"],
        facts.summary["self_check"],
    )
    rows = {"statistics of": f"all {count(num_stored)} records, as the store was sealed"}
    if not facts.is_sealed:
        rows["statistics of"] = f"{count(stats['num_rows_read'])} of {count(num_stored)} records"
    rows["not finite"] = (
        f"{count(stats['num_nonfinite'])} of {count(stats['num_rows_read'])} latents read for this page"
    )
    if not check:
        return rows | {"self-check": "none"}
    limit = min_psnr(facts)
    found = f"{check['median_psnr_db']:.1f} dB (median of {len(check['pictures'])} pictures)"
    return rows | {"self-check": found + (f", limit {limit:g} dB" if limit is not None else "")}


def _bytes(facts: StoreFacts) -> dict[str, str]:
    sizes = facts.summary["bytes"]
    parts = {name: size for name, size in sizes.items() if name != "total" and size}
    rows = {name: f"{mib(size)} ({share(size, sizes['total'])})" for name, size in parts.items()}
    rows["in all"] = mib(sizes["total"])
    rows["a record"] = mib(sizes["total"] / max(1, facts.summary["num_stored"]))
    separate = facts.separate_bytes["total"]
    rows["as a file for each record"] = f"{mib(separate)}, {separate / max(1, sizes['total']):.2f} times as much"
    return rows
