"""The models that can be trained, behind one call: ``denoiser(x, t, conditioning)``.

Our own DiT takes class labels; diffusers' ``PixArtTransformer2DModel`` takes cached caption embeddings. What a model is
made of stands in a ``ModelSpec``, which travels with every checkpoint and snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from ..datasets.errors import RecipeError, RunError
from ..datasets.schema import LatentSpec, StoreSpec
from ..datasets.shuffle import keyed_hash
from .config import TrainRecipe
from .dit import PATCHES, SIZES, DiT
from .objectives import num_outputs

# name -> depth, heads, width of a head, patch; the first as published (PixArt-Sigma, arXiv 2403.04692)
PIXART_SIZES = {"pixart-sigma": (28, 16, 72, 2), "pixart-tiny": (6, 4, 64, 2)}
NOT_YET = ("sana-600m", "sana-1600m")


class Conditioning(NamedTuple):
    """What a batch is conditioned on: labels, or captions with their mask.

    Args:
      labels: (B,) int64, the number of classes for null.
      captions: (B, L, D).
      caption_mask: (B, L) 1 for valid tokens.
    """

    labels: Tensor | None = None
    captions: Tensor | None = None
    caption_mask: Tensor | None = None


class ModelSpec(BaseModel):
    """Everything needed to build a model again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    channels: int
    out_channels: int
    num_classes: int
    caption_width: int
    base_size: int

    @property
    def takes_text(self) -> bool:
        """Conditioned on captions, not on labels."""
        return self.name in PIXART_SIZES


def dit_names() -> list[str]:
    """Names of all published DiT sizes."""
    return [f"DiT-{size}/{patch}" for size in SIZES for patch in PATCHES]


def model_spec(recipe: TrainRecipe, store: StoreSpec, where: str) -> ModelSpec:
    """Derive the model from the recipe and the store it shall train on.

    Args:
      where: path of the store, for the messages.
    Raises: RecipeError: unknown model; RunError: the model does not fit the store.
    """
    name, latent = recipe.model.name, store.latent
    check_model_name(name)
    if recipe.model.channels not in (0, latent.channels):
        raise RunError(
            f"model '{name}': made for {recipe.model.channels} latent channels (model.channels), store '{where}' holds "
            f"{latent.channels}. Use a store of that VAE, or --set model.channels=0 to build the model for the store."
        )
    num_classes = 0
    if name in PIXART_SIZES:
        if store.text is None:
            raise RunError(f"model '{name}': it needs captions, store '{where}' has none. Precompute with text.kind.")
    else:
        found = len(store.classes or ())
        if not found:
            raise RunError(
                f"model '{name}': it needs class labels, store '{where}' has none. Use a model with captions."
            )
        num_classes = recipe.model.num_classes or found
        if num_classes < found:
            raise RunError(
                f"model '{name}': made for {num_classes} classes (model.num_classes), store '{where}' has {found}. "
                "Use --set model.num_classes=0 to build the model for the store."
            )
    return ModelSpec(
        name=name,
        channels=latent.channels,
        out_channels=num_outputs(recipe.objective, latent.channels),
        num_classes=num_classes,
        caption_width=store.text.width if store.text and name in PIXART_SIZES else 0,
        base_size=store.images.resolution_px // latent.downscale,
    )


def check_model_name(name: str) -> None:
    """Refuse a model that there is not.

    Raises: RecipeError.
    """
    if name in NOT_YET:
        raise RecipeError(f"model.name '{name}': this release does not train it yet; it has DiT and PixArt.")
    if name not in [*dit_names(), *PIXART_SIZES]:
        raise RecipeError(f"model.name '{name}': needed one of {', '.join([*dit_names(), *PIXART_SIZES])}.")


def pixels_per_token(spec: ModelSpec, latent: LatentSpec) -> int:
    """Side of a patch, in pixels of the picture."""
    return patch_of(spec) * latent.downscale


def patch_of(spec: ModelSpec) -> int:
    """Side of a patch, in latent pixels."""
    return PIXART_SIZES[spec.name][3] if spec.takes_text else int(spec.name.split("/")[1])


def check_sizes(spec: ModelSpec, latent: LatentSpec, buckets: list[str]) -> None:
    """Refuse buckets that are no whole number of patches.

    Raises: RunError.
    """
    step = pixels_per_token(spec, latent)
    for bucket in buckets:
        if any(int(side) % step for side in bucket.split("x")):
            raise RunError(
                f"model '{spec.name}': bucket '{bucket}' is no whole number of patches, {step} px are one patch. "
                "Use a model with smaller patches, or buckets that are multiples of it."
            )


class ClassDenoiser(nn.Module):
    """Our DiT behind the common call."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        size, patch = spec.name.removeprefix("DiT-").split("/")
        depth, width, heads = SIZES[size]
        self.net = DiT(
            depth=depth,
            width=width,
            heads=heads,
            patch=int(patch),
            channels=spec.channels,
            out_channels=spec.out_channels,
            num_classes=spec.num_classes,
            base_size=spec.base_size,
        )

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W), (B,) time in 0..1000, labels to (B, out_channels, H, W)."""
        assert conditioning.labels is not None
        return self.net(x, t, conditioning.labels)

    def checkpoint_activations(self) -> None:
        """Recompute blocks in the backward pass."""
        self.net.activation_checkpointing = True

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled."""
        return self.net.blocks


class TextDenoiser(nn.Module):
    """diffusers' PixArt transformer behind the common call, initialised for training from scratch."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        # diffusers takes seconds to import and brings its own optional libraries: only for the model that needs it.
        from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

        depth, heads, head_width, patch = PIXART_SIZES[spec.name]
        self.net = PixArtTransformer2DModel(
            num_layers=depth,
            num_attention_heads=heads,
            attention_head_dim=head_width,
            cross_attention_dim=heads * head_width,
            in_channels=spec.channels,
            out_channels=spec.out_channels,
            sample_size=spec.base_size,
            patch_size=patch,
            caption_channels=spec.caption_width,
            use_additional_conditions=False,
        )
        self._initialize_weights()

    def _initialize_weights(self) -> None:
        """Xavier, and zeros for the output; diffusers does neither.

        PixArt also zeroes what cross-attention adds, because it begins with the weights of a DiT without text, and has
        embeddings of deviation 0.02, which is what xavier gives at its width; from scratch, xavier fits all.
        """
        net = self.net
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        patch_weight = net.pos_embed.proj.weight
        nn.init.xavier_uniform_(patch_weight.view(patch_weight.shape[0], -1))
        nn.init.zeros_(net.proj_out.weight)
        nn.init.zeros_(net.proj_out.bias)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W), (B,) time in 0..1000, captions to (B, out_channels, H, W)."""
        return self.net(
            hidden_states=x,
            encoder_hidden_states=conditioning.captions,
            encoder_attention_mask=conditioning.caption_mask,
            timestep=t,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]

    def checkpoint_activations(self) -> None:
        """Recompute blocks in the backward pass."""
        self.net.enable_gradient_checkpointing()

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled."""
        return self.net.transformer_blocks


Denoiser = ClassDenoiser | TextDenoiser


def build_model(spec: ModelSpec, *, seed: int) -> Denoiser:
    """Build a model with weights that depend on the seed alone; float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_hash(seed) % 2**63)
        return TextDenoiser(spec) if spec.takes_text else ClassDenoiser(spec)


@dataclass(frozen=True)
class Conditioner:
    """Makes the conditioning of a batch.

    Args:
      spec: of the model.
      null_caption: (max_tokens, D) embedding of the empty caption, for a model with text.
    """

    spec: ModelSpec
    null_caption: Tensor | None

    def __call__(self, labels: Tensor | None, captions: Tensor | None, lengths: Tensor | None) -> Conditioning:
        """Conditioning of a batch, nothing dropped.

        Args:
          labels: (B,) int64, -1 for none.
          captions: (B, L, D), with their (B,) lengths.
        """
        if not self.spec.takes_text:
            assert labels is not None
            return Conditioning(labels=torch.where(labels < 0, self.spec.num_classes, labels))
        assert captions is not None
        assert lengths is not None
        places = torch.arange(captions.shape[1], device=captions.device)
        mask = (places[None] < lengths.to(captions.device)[:, None]).float()  # (B, L)
        return Conditioning(captions=captions.float(), caption_mask=mask)

    def drop(self, conditioning: Conditioning, where: Tensor) -> Conditioning:
        """Replace the conditioning of some images by null.

        A dropped caption keeps its mask, as in PixArt: the null caption's first rows take the place of its tokens.

        Args:
          where: (B,) bool.
        """
        if conditioning.labels is not None:
            return Conditioning(labels=torch.where(where, self.spec.num_classes, conditioning.labels))
        captions, null = conditioning.captions, self.null_caption
        assert captions is not None
        assert null is not None
        rows = null[: captions.shape[1]].to(captions)
        return conditioning._replace(captions=torch.where(where[:, None, None], rows, captions))
