"""The cards of what is published: README.md with the front matter that the hub reads.

What a store or run says of itself is not trusted: it becomes text, never markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import __version__
from ...datasets.format.layout import CAPTIONS, RECORDS, revision_prefix
from ...datasets.format.schema import EncoderIdentity, Manifest, StoreSpec
from ...datasets.recipe import values_to_toml
from ..terminal.text import printable

CARD, SHEET = "README.md", "contact-sheet.png"
MARK = "<!-- Written by 'leandit publish', which replaces this page as long as this line is in it. -->"
MOST_BUCKETS, MOST_REASONS = 12, 20  # named in a card
# Licences that the hub knows by these names; others are named beside "other".
_LICENCES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m openrail++ afl-3.0 artistic-2.0 bsl-1.0 bsd
bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0
cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0
epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl
mpl-2.0 odc-by odbl openmdw-1.0 osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl gemma llama2 llama3
"""
LICENCES = frozenset(_LICENCES.split())
SIZES = {"n<1K": 10**3, "1K<n<10K": 10**4, "10K<n<100K": 10**5, "100K<n<1M": 10**6, "1M<n<10M": 10**7}
SIZES |= {"10M<n<100M": 10**8, "100M<n<1B": 10**9}


@dataclass(frozen=True)
class Terms:
    """What only the user can say of what is published.

    Args:
      licence: of the pictures (of a store), or of the weights (of a run).
      encoder_licence: of the encoders that made the latents and embeddings.
    """

    licence: str
    encoder_licence: str


def store_card(
    name: str,
    address: str,
    spec: StoreSpec,
    manifest: Manifest,
    rejects: Mapping[str, int],
    num_bytes: int,
    terms: Terms,
    *,
    has_sheet: bool,
) -> str:
    """The card of a store.

    Args:
      name: of the repository.
      address: URL that readers open.
      rejects: number of rejected records by reason.
      num_bytes: of all files.
    """
    prefix = revision_prefix(manifest.revision)
    tables = {"records": prefix + RECORDS} | ({"captions": prefix + CAPTIONS} if manifest.num_captions else {})
    head = {
        "pretty_name": name.partition("/")[2],
        "tags": ["leandit", "latents", "diffusion"],
        "size_categories": [next((size for size, end in SIZES.items() if manifest.num_stored < end), "n>1B")],
        "configs": [{"config_name": one, "data_files": path} for one, path in tables.items()],
    }
    embeddings = " and caption embeddings" if spec.text_encoders else ""
    return "\n".join(
        [
            front_matter(terms.licence, head),
            MARK,
            f"# {name.partition('/')[2]}\n",
            f"Latents{embeddings} of {manifest.num_stored} pictures, encoded once with leandit {__version__}, to train "
            "diffusion transformers without an encoder.\n",
            *([f"![Decoded records]({SHEET})\n"] if has_sheet else []),
            table(_store_rows(spec, manifest, num_bytes)),
            "## Load\n",
            fenced("python", _loading_a_store(address, bool(spec.text_encoders))),
            f"Or train on it: `leandit train RECIPE --store {address} --run RUN`. Needed: `pip install "
            "'leandit[train,publish]'`.\n",
            "## Encoders\n",
            _encoder_table(spec),
            "## Licence\n",
            _licence_lines("pictures, and with them the latents and captions", terms),
            "## How it was made\n",
            "Another program encoded it, and `leandit import` has copied that, with this recipe:\n"
            if spec.is_imported
            else "`leandit precompute recipe.toml --source PICTURES --store STORE`, with this recipe:\n",
            fenced("toml", values_to_toml(spec.recipe)),
            *_reject_lines(rejects),
        ]
    )


def run_card(
    name: str,
    described: Mapping[str, Any],
    terms: Terms,
    *,
    loading: tuple[str, str],
    notes: Sequence[str],
    recipe: str,
    is_pipeline: bool,
) -> str:
    """The card of a run.

    Args:
      described: rows of its table.
      loading: language and text of the code that loads it.
      recipe: TOML; empty if it is not known.
      is_pipeline: it holds a pipeline of diffusers.
    """
    head: dict[str, Any] = {"library_name": "diffusers" if is_pipeline else "leandit"}
    head["tags"] = ["leandit", "diffusion", "text-to-image" if "classes" not in described else "class-conditional"]
    noted = ["## Differences from the trained model\n", *(f"- {cell(note)}" for note in notes), ""] if notes else []
    made = ["## Recipe\n", fenced("toml", recipe)] if recipe else []
    return "\n".join(
        [
            front_matter(terms.licence, head),
            MARK,
            f"# {name.partition('/')[2]}\n",
            f"A diffusion transformer, trained with leandit {__version__}.\n",
            table(described),
            "## Load\n",
            fenced(*loading),
            "## Licence\n",
            _licence_lines("weights", terms),
            *noted,
            *made,
        ]
    )


def front_matter(licence: str, head: Mapping[str, Any]) -> str:
    """YAML with the licence first; every value is written as JSON, which YAML contains."""
    if licence in LICENCES:
        fields: dict[str, Any] = {"license": licence}
    else:
        is_link = licence.startswith("https://")
        fields = {"license": "other", "license_link" if is_link else "license_name": licence}
    fields |= head
    lines = (f"{key}: {value if key == 'license' else json.dumps(value)}" for key, value in fields.items())
    return "\n".join(["---", *lines, "---", ""])


def table(described: Mapping[str, Any]) -> str:
    """A table of two columns."""
    return "| | |\n|---|---|\n" + "".join(f"| {cell(name)} | {cell(value)} |\n" for name, value in described.items())


def cell(value: object) -> str:
    """Untrusted text as plain text of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", printable(str(value)))


def fenced(language: str, text: str) -> str:
    """A block of code that its own text cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}\n"


def _store_rows(spec: StoreSpec, manifest: Manifest, num_bytes: int) -> dict[str, Any]:
    buckets = sorted(manifest.buckets.items(), key=lambda entry: -entry[1])
    named = ", ".join(f"{bucket}: {count}" for bucket, count in buckets[:MOST_BUCKETS])
    more = f", and {len(buckets) - MOST_BUCKETS} more" if len(buckets) > MOST_BUCKETS else ""
    counts = f"{manifest.num_stored} stored + {manifest.num_rejected} rejected"
    latent = spec.latent
    described: dict[str, Any] = {
        "records": f"{manifest.num_planned} planned = {counts}",
        "buckets, height x width": named + more,
        "latents": f"{latent.kind}, {latent.channels} channels, 1/{latent.downscale} of the pixels, {latent.dtype}",
    }
    if manifest.num_captions:
        described["captions"] = f"{manifest.num_captions} distinct, {manifest.num_caption_tokens} tokens"
    if spec.classes:
        described["classes"] = len(spec.classes)
    return described | {
        "size": f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB",
        "revision": manifest.revision,
        "fingerprint": spec.fingerprint,
        "root hash": manifest.root_hash,
    }


def _loading_a_store(address: str, has_text: bool) -> str:
    lines = [
        "from leandit import LatentStore, make_loader",
        "",
        f'store = LatentStore("{address}")  # shards come when they are needed',
        "for batch in make_loader(store, global_batch=256, seed=0):",
        f"    batch.latents, batch.{'captions' if has_text else 'labels'}",
    ]
    return "\n".join(lines)


def _encoder_table(spec: StoreSpec) -> str:
    encoders: list[tuple[str, EncoderIdentity]] = [("autoencoder", spec.vae)]
    encoders += [(f"text encoder {one.name}".strip(), one.encoder) for one in spec.text_encoders]
    encoders += [(f"feature {one.name}", one.encoder) for one in spec.features]
    lines = ["| | model | class | SHA-256 of the weights |", "|---|---|---|---|"]
    for role, one in encoders:
        model = f"{one.model} at {one.revision}" if one.revision else one.model
        lines.append(f"| {' | '.join(cell(text) for text in (role, model, one.class_name, one.weights_sha256))} |")
    return "\n".join([*lines, ""])


def _licence_lines(what: str, terms: Terms) -> str:
    return (
        f"Of the {what}: {cell(terms.licence)}. Of the encoders: {cell(terms.encoder_licence)}. Both are as the "
        "publisher says.\n"
    )


def _reject_lines(rejects: Mapping[str, int]) -> list[str]:
    if not rejects:
        return []
    counts = sorted(rejects.items(), key=lambda entry: -entry[1])[:MOST_REASONS]
    return ["## Rejected records\n", table(dict(counts))]
