"""A rank's slice of one global batch: tensors as stored, and the model's input computed from them on their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..disk.cached import cached_property
from ..format.schema import LatentSpec
from .captions import Captions
from .latents import final_latents, mean_latents, widen_int8
from .view_sizes import DrawnViews


@dataclass(frozen=True, eq=False, repr=False)
class FeatureBatch:
    """A feature of the images of a batch, in the dtype of the store; what is not stored is None.

    Args:
      stored_patches, stored_cls: (B, T, D) tokens of the patches, row by row; (B, D) class tokens.
      patch_scales, cls_scales: (B, T, 1, groups) and (B, 1, groups) float16 of int8 tokens.
    """

    stored_patches: torch.Tensor | None = None
    patch_scales: torch.Tensor | None = None
    stored_cls: torch.Tensor | None = None
    cls_scales: torch.Tensor | None = None

    @cached_property
    def patches(self) -> torch.Tensor | None:
        """(B, T, D) on the device of the batch: as stored, or float32 of int8, one exact product each."""
        return _final(self.stored_patches, self.patch_scales)

    @cached_property
    def cls(self) -> torch.Tensor | None:
        """(B, D), likewise."""
        return _final(self.stored_cls, self.cls_scales)


def _final(stored: torch.Tensor | None, scales: torch.Tensor | None) -> torch.Tensor | None:
    return stored if stored is None or scales is None else widen_int8(stored, scales)


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """A rank's slice of one global batch of one bucket; B records, 0 only if a "short" batch has fewer records than
    there are ranks.

    Args:
      stored: (B, 2C, H, W) moments or (B, C, H, W) latents as stored, in the store's dtype.
      labels: (B,) int64 class index, -1 for none.
      records: (B,) int64 positions in the records table.
      draw_keys: (B,) int64 keys of the posterior draw, or None without a posterior.
      spec: describes ``stored``, and how it becomes the model's input.
      bucket: "HxW" in pixels.
      number: the global batch's, over all epochs.
      global_size: records in the global batch.
      epoch: the batch's.
      store: index into the reader's stores.
      texts: captions of each text encoder, by name; that of ``[text]`` is empty.
      pads: ``captions`` are padded, not packed.
      features: image features, by name.
      stored_companions: companion images as stored, by name: (B, 2C, H, W) moments or (B, C, H, W) latents (int8
        with the bytes of the scales); for a mask (B, H, W) uint8.
      drawn: which view of each image was read.
    """

    stored: torch.Tensor
    labels: torch.Tensor
    records: torch.Tensor
    draw_keys: torch.Tensor | None
    spec: LatentSpec
    bucket: str
    number: int
    global_size: int
    epoch: int
    store: int = 0
    texts: Mapping[str, Captions] = field(default_factory=dict)
    pads: bool = True
    features: Mapping[str, FeatureBatch] = field(default_factory=dict)
    stored_companions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    drawn: DrawnViews | None = None

    def __len__(self) -> int:
        return len(self.stored)

    def __repr__(self) -> str:
        return f"Batch(number={self.number}, epoch={self.epoch}, bucket='{self.bucket}', records={len(self)})"

    @cached_property
    def latents(self) -> torch.Tensor:
        """(B, C, H, W) float32, drawn, shifted and scaled: the model's input at t = 0, on the device of the batch."""
        return final_latents(self.stored, self.spec, self.draw_keys)

    @cached_property
    def companions(self) -> dict[str, torch.Tensor]:
        """Companion images as the model sees them, by name, on the device of the batch.

        (B, C, H, W) float32, the mean of the posterior (nothing is drawn), shifted and scaled; or a mask, (B, H, W)
        uint8 gray from 0 to 255.
        """
        return {
            name: stored if stored.dtype == torch.uint8 else mean_latents(stored, self.spec)
            for name, stored in self.stored_companions.items()
        }

    @cached_property
    def sizes(self) -> torch.Tensor:
        """(B, 6) int64, in pixels, of the view that was read of each image, on the device of the batch.

        Height and width of the source image, upright; top and left of the crop in the resized image, of a flipped view
        in the resized and then flipped image; height and width of the bucket: SDXL's micro-conditioning, in its order.

        Raises: StoreError: the size of an image is not known, as in imported stores.
        Source: Podell et al. 2023 (SDXL), section 2.2.
        """
        assert self.drawn is not None, "a reader makes batches with their views"
        return torch.from_numpy(self.drawn.look_up()).to(self.stored.device)

    @property
    def text(self) -> Captions | None:
        """Captions of the first text encoder; None if the store has none, or the reader was created without them."""
        return next(iter(self.texts.values()), None)

    @property
    def captions(self) -> torch.Tensor | None:
        """(B, L, D) or packed (sum L, D) of the first text encoder, or None: as stored, or float32 of int8."""
        text = self.text
        return None if text is None or not text.has_tokens else text.padded if self.pads else text.embeddings

    @property
    def caption_lengths(self) -> torch.Tensor | None:
        """(B,) int64 tokens of each caption of the first text encoder, or None."""
        return None if self.text is None or not self.text.has_tokens else self.text.offsets.diff().long()

    def finish(self) -> Batch:
        """Compute latents, captions, features and images now."""
        _ = self.latents, self.companions, self.captions, *(text.embeddings for text in self.texts.values())
        _ = [(feature.patches, feature.cls) for feature in self.features.values()]
        return self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of a batch on a GPU until the stream has finished its current work."""
        for part in (self, *self.texts.values(), *self.features.values()):
            for value in vars(part).values():  # the latents too, once they are computed
                for tensor in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        tensor.record_stream(stream)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device, copied asynchronously from pinned memory, on the current stream of the device.

        This batch may be dropped at once: torch's allocator keeps pinned memory until the copies from it are done.
        """

        def moved(part: Any) -> dict[str, Any]:
            values = part if isinstance(part, Mapping) else {one.name: getattr(part, one.name) for one in fields(part)}
            tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

        return replace(
            self,
            **moved(self),
            texts={name: replace(text, **moved(text)) for name, text in self.texts.items()},
            features={name: replace(feature, **moved(feature)) for name, feature in self.features.items()},
            stored_companions=moved(self.stored_companions),
        )
