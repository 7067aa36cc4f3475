"""Cards of exports and of what is published: README.md, from the templates beside this module.

What a store or run says about itself is not trusted. Every value that a template prints is escaped, unless this module
made it: Markdown and HTML in it show as plain text, and YAML and code blocks cannot be ended early.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from ... import __version__
from ...datasets.format.layout import CAPTIONS, RECORDS, revision_prefix
from ...datasets.format.schema import Manifest, StoreSpec
from ...datasets.recipe import values_to_toml
from ...datasets.units import readable_size
from ...train.techniques.registry import ObjectiveSection
from ..terminal.text import printable

if TYPE_CHECKING:  # it loads torch, which publishing a store does without
    from ...train.models.spec import ModelSpec

CARD, SHEET = "README.md", "contact-sheet.png"
MARK = "<!-- Written by 'leandit publish', which replaces this page as long as this line is in it. -->"
MOST_BUCKETS, MOST_REASONS = 12, 20  # named in a card
# Licences that the hub knows by these names; others are named beside "other".
_LICENCES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m openrail++ afl-3.0 artistic-2.0 bsl-1.0 bsd
bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0
cc-by-2.5 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0
epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl
mpl-2.0 odc-by odbl openmdw-1.0 osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl gemma llama2 llama3
"""
LICENCES = frozenset(_LICENCES.split())
SIZES = {"n<1K": 10**3, "1K<n<10K": 10**4, "10K<n<100K": 10**5, "100K<n<1M": 10**6, "1M<n<10M": 10**7}
SIZES |= {"10M<n<100M": 10**8, "100M<n<1B": 10**9}


class Terms(NamedTuple):
    """What only the user can know about what is published.

    Args:
      licence: of the pictures (of a store), or of the weights (of a run).
      encoder_licence: of the encoders that made the latents and embeddings.
    """

    licence: str
    encoder_licence: str


def markdown(value: object) -> Markup:
    """Untrusted text as plain text of a Markdown page or table; text of this module as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", printable(str(value))))


def fenced(language: str, text: str) -> Markup:
    """A block of code that its own text cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{text.strip()}\n{fence}\n")


def front_matter(licence: str, **fields: Any) -> Markup:
    """YAML that the hub reads, with the licence."""
    from huggingface_hub import CardData

    name: dict[str, str] = {"license": licence}
    if licence not in LICENCES:
        key = "license_link" if licence.startswith("https://") else "license_name"
        name = {"license": "other", key: licence}
    return Markup(CardData(**name, **fields).to_yaml() + "\n")


def store_card(
    name: str,
    address: str,
    spec: StoreSpec,
    manifest: Manifest,
    rejects: Mapping[str, int],
    num_bytes: int,
    terms: Terms,
    *,
    sheet: bool,
) -> bytes:
    """The card of a store.

    Args:
      name: of the repository.
      address: URL that readers open.
      rejects: number of rejected records by reason.
      num_bytes: of all files.
      sheet: a contact sheet is published beside it.
    """
    title, prefix = name.partition("/")[2], revision_prefix(manifest.revision)
    tables = {"records": prefix + RECORDS} | ({"captions": prefix + CAPTIONS} if manifest.num_captions else {})
    head = front_matter(
        terms.licence,
        pretty_name=title,
        tags=["leandit", "latents", "diffusion"],
        size_categories=[next((size for size, end in SIZES.items() if manifest.num_stored < end), "n>1B")],
        configs=[{"config_name": table, "data_files": path} for table, path in tables.items()],
    )
    buckets = sorted(manifest.buckets.items(), key=lambda bucket: -bucket[1])
    named = ", ".join(f"{bucket}: {count}" for bucket, count in buckets[:MOST_BUCKETS])
    encoders = [("autoencoder", spec.vae)]
    encoders += [(f"text encoder {text.name}".strip(), text.encoder) for text in spec.text_encoders]
    encoders += [(f"feature {feature.name}", feature.encoder) for feature in spec.features]
    loading = f"""from leandit import LatentStore, make_loader

store = LatentStore("{address}")  # shards are fetched when they are needed
for batch in make_loader(store, global_batch=256, seed=0):
    batch.latents, batch.{"captions" if spec.text_encoders else "labels"}"""
    return _render(
        "store.md",
        head=head,
        name=title,
        spec=spec,
        manifest=manifest,
        sheet=sheet,
        buckets=named + (f", and {len(buckets) - MOST_BUCKETS} more" if len(buckets) > MOST_BUCKETS else ""),
        size=readable_size(num_bytes),
        loading=fenced("python", loading),
        address=Markup(address),
        encoders=encoders,
        recipe=fenced("toml", values_to_toml(spec.recipe)),
        rejects=sorted(rejects.items(), key=lambda reason: -reason[1])[:MOST_REASONS],
        **terms._asdict(),
    )


def model_card(
    name: str,
    rows: Mapping[str, Any],
    *,
    is_pipeline: bool,
    notes: Sequence[str],
    recipe: str,
    terms: Terms | None = None,
    loading: str = "",
) -> bytes:
    """The card of an export, or of a published run.

    Args:
      rows: as ``model_rows`` describes the model.
      is_pipeline: diffusers loads it.
      notes: how a pipeline differs from the trained model.
      recipe: TOML; empty if unknown.
      terms: of a published run.
      loading: Python that loads it.
    """
    if terms:
        task = "text-to-image" if "classes" not in rows else "class-conditional"
        library = "diffusers" if is_pipeline else "leandit"
        head = front_matter(terms.licence, library_name=library, tags=["leandit", "diffusion", task])
    else:
        head = Markup("library_name: diffusers\n" if is_pipeline else "")
    return _render(
        "model.md",
        head=head,
        name=name,
        rows=rows,
        loading=loading and fenced("python", loading),
        notes=notes,
        recipe=recipe and fenced("toml", recipe),
        **(terms._asdict() if terms else {}),
    )


def model_rows(state: Mapping[str, Any], spec: ModelSpec, weights: str) -> dict[str, Any]:
    """Rows of a card: the model, its training and its encoders.

    Args:
      state: of the snapshot.
      weights: which they are, and the name of their folder.
    """
    rows = {
        "model": spec.name,
        "weights": weights,
        "steps": state["step"],
        "objective": objective_words(state["objective"]),
        "root hash of the store": ", ".join(map(str, state.get("root_hashes") or [None])),
        "VAE": f"{state['vae']['model'].get('model')}, weights {state['vae']['weights_sha256']}",
    }
    if spec.adapter:
        source, frozen = state["frozen"]["source"], state["frozen"]["xxh3_128"]
        rows["adapters of"] = f"{source}, weights {frozen}, rank {spec.adapter.rank}, alpha {spec.adapter.alpha:g}"
    if average := state.get("average"):
        rows["length of the average"] = f"{average['length']:g} of the run"
    if not spec.takes_text:
        return rows | {"classes": len(state["classes"])}
    from ...train.sampling.snapshot import text_encoders

    for name, text in text_encoders(state).items():
        rows[f"text encoder {name}".strip()] = f"{text['model'].get('model')}, weights {text['weights_sha256']}"
    return rows


def objective_words(objective: Mapping[str, Any]) -> str:
    """The kind of an objective, and its settings that are not the defaults."""
    defaults = ObjectiveSection().model_dump()
    changed = [f"{key} {value}" for key, value in objective.items() if key != "kind" and value != defaults.get(key)]
    return ", ".join([str(objective["kind"]), *changed])


def _render(template: str, **values: Any) -> bytes:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,  # leaves what is Markup, and finalize makes everything that
        finalize=markdown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template(template).render(values, mark=Markup(MARK), version=__version__)
    return page.encode()
