"""Detect, without importing torch, that a complete store has nothing to do.

Loading the encoders takes seconds, mostly to import torch and diffusers. Their identity needs only their files: the
hash of the weights and the config. If anything differs, or cannot be known without loading (a GPU's dtype), the
ordinary path decides.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from .. import __version__
from ..datasets.format.schema import EncoderIdentity, Manifest, StoreSpec
from ..datasets.revisions.catalog import has_leftovers, planned_revisions, sealed_revisions
from ..datasets.revisions.local import with_stored_encoder_paths
from ..datasets.revisions.plan import read_plan
from ..datasets.revisions.writer import StoreWriter
from ..datasets.store import LatentStore
from .config import PrecomputeRecipe
from .encoders.model_files import VAE_WEIGHTS, ModelFiles, hash_files, library_majors, tokenizer_files
from .sources.several import SourcePaths, list_sources
from .sources.source import Source

LOG = logging.getLogger(__name__)
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))  # of NVIDIA, AMD; of either under Windows


def unchanged(
    recipe: PrecomputeRecipe, source_path: SourcePaths, store: Path, *, device: str
) -> tuple[Manifest | None, Source | None]:
    """Check whether a precompute with these arguments has nothing to do.

    Args:
      device: as the command line names it.
    Returns: the store's manifest, None if there may be work; and the source, if it was listed.
    Raises: LeanditError: of the source or the VAE, as the ordinary path raises it; DamageError: a file is missing.
    """
    if recipe.source.check == "content" or not store.is_dir():
        return None, None
    sealed = sealed_revisions(store)
    if not sealed or planned_revisions(store):
        return None, None
    if has_leftovers(store):
        LOG.info("store '%s': a process that died has left files in it, or another one writes to it", store)
        return None, None
    plan = read_plan(store, sealed[-1])
    if not _has_same_settings(plan.spec, recipe, store) or not _has_same_encoders(plan.spec, recipe, device):
        LOG.info("store '%s': settings or encoders may differ from its own, so the encoders are loaded", store)
        return None, None
    source = list_sources(source_path, recipe.source, recipe.companion_columns, needs_labels=recipe.needs_labels)
    LatentStore(store)  # checks that no file is missing
    listing = source.listing_hash(null_captions=recipe.null_captions)
    if source.renames(plan.spec.classes) or listing != plan.listing:
        LOG.info("store '%s': the listing of the source has changed", store)
        return None, source
    names = dict(zip(plan.spec.classes or (), plan.spec.class_names or (), strict=False))
    if any(names.get(name) != now for name, now in zip(source.classes or (), source.class_names or (), strict=False)):
        return None, source  # the file of class names has changed
    return StoreWriter(store, plan).seal(), source


def _has_same_settings(spec: StoreSpec, recipe: PrecomputeRecipe, store: Path) -> bool:
    """This release, recipe and Pillow made the store."""
    typed = with_stored_encoder_paths(spec.model_copy(update={"recipe": recipe.model_dump()}), store)
    libraries = spec.images.libraries
    return (
        spec.leandit_version == __version__
        and typed.recipe == spec.recipe
        and {encoder.name for encoder in spec.text_encoders} == recipe.text.keys()
        and libraries == library_majors(*libraries)
    )


def _has_same_encoders(spec: StoreSpec, recipe: PrecomputeRecipe, device: str) -> bool:
    """The recipe's encoder files made the store, and would compute in the same dtype here."""
    # A vision model is only known once it is loaded.
    vae = ModelFiles(recipe.vae, "vae.model", stem=VAE_WEIGHTS)
    if spec.features or not _is_same(spec.vae, vae, recipe.vae.dtype, device, "diffusers"):
        return False
    for encoder in spec.text_encoders:
        section = recipe.text[encoder.name]
        files = ModelFiles(section, "text.model")
        tokenizer = hash_files(tokenizer_files(files.tokenizer_folder(section.tokenizer_subfolder)))
        if not _is_same(encoder.encoder, files, section.dtype, device, "transformers", tokenizer):
            return False
    return True


def _is_same(
    known: EncoderIdentity,
    files: ModelFiles,
    dtype: str,
    device: str,
    library: str,
    tokenizer_files_sha256: str | None = None,
) -> bool:
    may_be_gpu = device != "cpu" and any(map(os.path.exists, GPU_FILES))
    if may_be_gpu and dtype != "float32":
        return False
    name = files.read().get("_class_name", known.class_name)
    hashes: dict[str, Any] = {
        "tokenizer_sha256": known.tokenizer_sha256,
        "tokenizer_files_sha256": tokenizer_files_sha256,
    }
    identity = files.identity(name, "float32", library, **hashes)
    return identity.model_copy(update={"model": known.model, "revision": known.revision}) == known
