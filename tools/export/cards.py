"""Cards of exports and of what is published: README.md, from the templates beside this module.

What a store or run says about itself is not trusted. Every value that a template prints is escaped, unless this module
made it: Markdown and HTML in it show as plain text, and YAML and code blocks cannot be ended early.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from ... import __version__
from ...datasets.format.layout import CAPTIONS, RECORDS, revision_prefix
from ...datasets.revisions.local import portable, read_local, whole_spec
from ...datasets.store import LatentStore
from ...recipe import values_to_toml
from ...train.techniques.registry import ObjectiveSection
from ...units import readable_size
from ..inspection.store_facts import StoreFacts
from ..terminal.text import printable
from .hub import HubRepository
from .portable import StoreFiles

CARD = "README.md"
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
# The hub's size_categories, by the number of digits of the number of records.
SIZES = ["n<1K"] * 4 + ["1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B"]


class Terms(NamedTuple):
    """What only the user knows: the licences of the images or the weights, and of the encoders that made them."""

    licence: str
    encoder_licence: str


def store_card(store: LatentStore, files: StoreFiles, hub: HubRepository, terms: Terms) -> bytes:
    """The card of a store, of which these files are published."""
    manifest, name = files.manifest, hub.title
    local = read_local(store.path, manifest.revision)
    spec = whole_spec(manifest.spec, local and portable(local))
    prefix, num_digits = revision_prefix(manifest.revision), len(str(manifest.num_stored))
    tables = {"records": RECORDS} | ({"captions": CAPTIONS} if manifest.num_captions else {})
    head = front_matter(
        terms.licence,
        pretty_name=name,
        tags=["leandit", "latents", "diffusion"],
        size_categories=[SIZES[num_digits] if num_digits < len(SIZES) else "n>1B"],
        configs=[{"config_name": table, "data_files": prefix + path} for table, path in tables.items()],
    )
    encoders = [("autoencoder", spec.vae)]
    encoders += [(f"text encoder {text.name}".strip(), text.encoder) for text in spec.text_encoders]
    encoders += [(f"feature {feature.name}", feature.encoder) for feature in spec.features]
    buckets = sorted(manifest.buckets.items(), key=lambda bucket: -bucket[1])
    rejects = StoreFacts(store).records["rejects"]
    return _render(
        "store.md",
        head=head,
        name=name,
        spec=spec,
        manifest=manifest,
        buckets=", ".join(f"{bucket}: {count}" for bucket, count in buckets[:MOST_BUCKETS]),
        num_more=len(buckets) - MOST_BUCKETS,
        size=readable_size(sum(entry.bytes for entry in files.entries.values())),
        address=Markup(hub.address),
        encoders=encoders,
        recipe=values_to_toml(spec.recipe),
        rejects=sorted(rejects.items(), key=lambda reason: -reason[1])[:MOST_REASONS],
        **terms._asdict(),
    )


def model_card(
    name: str,
    state: Mapping[str, Any],
    *,
    is_pipeline: bool = False,
    terms: Terms | None = None,
    hub: HubRepository | None = None,
    **shown: Any,
) -> bytes:
    """The card of an export, or of a published run.

    Args:
      state: of the snapshot.
      is_pipeline: diffusers loads it.
      terms, hub: of a published run.
      shown: "weights" (which they are, and the name of their folder), "recipe" in TOML; of an export its "layout" and
        "notes" on how a pipeline differs from the trained model.
    """
    from ...train.models.spec import ModelSpec
    from ...train.sampling.snapshot import text_encoders

    spec, head = ModelSpec.model_validate(state["spec"]), Markup("library_name: diffusers\n" if is_pipeline else "")
    if terms:
        tags = ["leandit", "diffusion", "text-to-image" if spec.takes_text else "class-conditional"]
        head = front_matter(terms.licence, library_name="leandit", tags=tags)
    return _render(
        "model.md",
        head=head,
        name=name,
        state=state,
        spec=spec,
        objective=objective_words(state["objective"]),
        root_hashes=", ".join(map(str, state.get("root_hashes") or [None])),
        texts=text_encoders(state) if spec.takes_text else {},
        # Name and branch were checked when the repository was named.
        place=hub and Markup(f'"{hub.name}"' + (f', revision="{hub.branch}"' if hub.branch != "main" else "")),
        **shown,
        **(terms._asdict() if terms else {}),
    )


def objective_words(objective: Mapping[str, Any]) -> str:
    """The kind of an objective, and its settings that are not the defaults."""
    defaults = ObjectiveSection().model_dump()
    changed = [f"{key} {value}" for key, value in objective.items() if key != "kind" and value != defaults.get(key)]
    return ", ".join([str(objective["kind"]), *changed])


def front_matter(licence: str, **fields: Any) -> Markup:
    """YAML that the hub reads, with the licence."""
    from huggingface_hub import CardData

    name: dict[str, str] = {"license": licence}
    if licence not in LICENCES:
        key = "license_link" if licence.startswith("https://") else "license_name"
        name = {"license": "other", key: licence}
    return Markup(CardData(**name, **fields).to_yaml() + "\n")


def markdown(value: object) -> Markup:
    """Untrusted text as plain text of a Markdown page or table; text of this module as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", printable(str(value))))


def fenced(text: str, language: str) -> Markup:
    """A block of code that its own text cannot end."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return Markup(f"{fence}{language}\n{text.strip()}\n{fence}\n")


def _render(template: str, **values: Any) -> bytes:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,  # leaves what is Markup, and finalize makes everything that
        finalize=markdown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["fenced"] = fenced
    page = environment.get_template(template).render(values, mark=Markup(MARK), version=__version__)
    return page.encode()
