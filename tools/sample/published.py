"""Sampling from a published checkpoint: two recipes replace what a run would have recorded.

The train recipe names the model and its objective; the precompute recipe names the VAE, the text encoder and the sizes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ...datasets.disk.hashing import xxh3_parts
from ...datasets.format.buckets import bucket_size
from ...datasets.format.class_names import imagenet_names
from ...errors import RecipeError
from ...precompute import config as precompute_config
from ...precompute.config import PrecomputeRecipe
from ...precompute.encoders.loading import describe_store, load_encoders
from ...precompute.encoders.text.encoder import CaptionEncoder, EncodedCaptions
from ...train import config as train_config
from ...train.models.build import build_model
from ...train.models.conditioning import Conditioner
from ...train.run.data import null_captions
from ...train.run.fit import model_spec
from ...train.run.state import snapshot_state
from ...train.sampling.snapshot import Snapshot, prepare_model
from ...train.weights.init_from import initial_weights
from .request import SampleRequest


def load_published(source: Path, request: SampleRequest, device: torch.device, *, compiled: bool) -> Snapshot:
    """Load published weights as a snapshot.

    Args:
      source: as ``model.init_from``: a hub id or folder in diffusers' layout, or a DiT's file in the official layout.
      request: names the two recipes, and other locations of the encoders.
      compiled: torch.compile the blocks.
    Raises: RecipeError, RunError: the weights are of another model; EncoderError: an encoder cannot be loaded.
    """
    if request.weights == "raw":
        raise RecipeError("--weights raw: only a run has them. Leave it out for a published checkpoint.")
    if not (request.recipe and request.encoders):
        raise RecipeError(
            "a published checkpoint needs --recipe (of its model, such as 'dit-xl-2-256') and --encoders (of its VAE "
            "and text encoder, such as 'imagenet-256')."
        )
    recipe = train_config.load(request.recipe, [])
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"init_from": str(source)})})
    encoders = _encoder_recipe(request)
    takes_text, num_classes = bool(encoders.text), recipe.model.num_classes
    if not (takes_text or num_classes):
        raise RecipeError("--recipe: its model.num_classes is 0. Expected the number of classes, as in 'dit-xl-2-256'.")
    loaded = load_encoders(encoders, device)
    wnids = list(imagenet_names())
    names = wnids if num_classes == len(wnids) else [str(label) for label in range(num_classes)]
    store = describe_store(encoders, None, loaded).model_copy(update={"classes": None if takes_text else names})
    # The squarest bucket is drawn by default, so it gets the largest count.
    sides = {name: bucket_size(name) for name in store.images.buckets}
    squarest_last = sorted(sides, key=lambda name: abs(np.log(sides[name][0] / sides[name][1])), reverse=True)
    buckets = {name: count for count, name in enumerate(squarest_last)}
    spec = model_spec(recipe, store, f"--encoders of {source}").plain
    model = build_model(spec, seed=0)
    weights, _ = initial_weights(str(source), model, spec)
    model.load_state_dict(weights)
    null, null_pooled = (
        part if part is None else part.to(device)
        for part in null_captions(spec, store, lambda name: encoded_null(loaded.captions[name]))
    )
    return Snapshot(
        path=source,
        step=0,
        model=prepare_model(model, device, compiled=compiled),
        spec=spec,
        objective=recipe.objective,
        sample_shift=recipe.run.sample_shift,
        latent=store.latent,
        text=store.text,
        conditioner=Conditioner(spec, null, null_pooled=null_pooled),
        state=snapshot_state(
            recipe,
            store,
            spec,
            latent=store.latent,
            place=Path(),
            buckets=buckets,
            root_hashes=(),
            base_knows_null=True,
        ),
        weights_hash=xxh3_parts([np.ascontiguousarray(weights[name].numpy()) for name in sorted(weights)])[1],
    )


def _encoder_recipe(request: SampleRequest) -> PrecomputeRecipe:
    """The recipe of the encoders, with those that the request names, each in a folder of its own.

    Raises: RecipeError: there are several text encoders.
    """
    encoders = precompute_config.load(request.encoders, [])
    changes, location = {}, {"subfolder": "", "revision": ""}
    if request.text and any(encoders.text):
        raise RecipeError(f"--text '{request.text}': the recipe has several text encoders. Name their folders in it.")
    if request.vae:
        changes["vae"] = encoders.vae.model_copy(update=location | {"model": request.vae})
    if request.text and encoders.text:
        location |= {"model": request.text, "tokenizer_subfolder": ""}
        changes["text"] = {"": encoders.text[""].model_copy(update=location)}
    return encoders.model_copy(update=changes)


def encoded_null(encoder: CaptionEncoder) -> EncodedCaptions:
    """Tokens and pooled vector of the empty caption; the encoder is not used again."""
    null = encoder.encode_null().row(0)
    encoder.release()
    return null
