"""The sections of a train recipe about the loss: the objective, and what is added to reach it sooner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..datasets.recipe import Count, Positive, Section

SELF = "self-alignment"  # a name that no image feature can have
Weight = Annotated[float, Field(ge=0)]


class ObjectiveSection(Section):
    """What the model learns."""

    kind: Literal["ddpm", "flow"] = "ddpm"
    """"ddpm": noise and learned variance (DiT, PixArt). "flow": velocity from data to noise (Sana, SD3)."""
    predict: Literal["epsilon", "v"] = "epsilon"
    """What "ddpm" predicts: the noise, or v = signal * noise - noise_share * data."""
    variance: Literal["learned", "fixed"] = "learned"
    """Of "ddpm": "learned" doubles the model's output channels; "fixed" has none for it."""
    min_snr_gamma: Annotated[float, Field(ge=0)] = 0.0
    """Of "ddpm": largest weight of a step's error of the data (customary: 5); 0: no weighting."""
    time: Literal["uniform", "logit_normal"] = "logit_normal"
    """How "flow" draws its times."""
    time_mean: float = 0.0
    """Of "logit_normal": mean of the logit; above 0 is towards noise."""
    time_std: Annotated[float, Field(gt=0)] = 1.0
    """Of "logit_normal": standard deviation of the logit."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """Shift of the times of "flow" towards noise: t' = s t / (1 + (s - 1) t)."""
    cosine_weight: Weight = 0.0
    """Of "flow": weight of 1 - cosine between velocity and target over the channels (LightningDiT: 1)."""
    contrastive_weight: Weight = 0.0
    """Of "flow": weight of minus the error to the target of another image (contrastive flow matching: 0.05)."""
    dispersive_weight: Weight = 0.0
    """DiT: weight of the loss that drives the tokens of different images apart (dispersive loss: 0.5)."""
    dispersive_block: Count = 0
    """The block whose output disperses, from 1; 0: after a quarter of the depth."""
    dispersive_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the dispersive loss; the published code has none, which is 1."""

    @model_validator(mode="after")
    def _keys_of_the_other_kind_are_not_set(self) -> ObjectiveSection:
        of_ddpm = (self.predict, self.variance, self.min_snr_gamma)
        if self.kind == "flow" and of_ddpm != ("epsilon", "learned", 0.0):
            raise ValueError('predict, variance and min_snr_gamma are keys of kind = "ddpm"; "flow" has none of them')
        if self.kind == "ddpm" and (self.cosine_weight or self.contrastive_weight):
            raise ValueError('cosine_weight and contrastive_weight are keys of kind = "flow"; "ddpm" has no velocity')
        return self


class AlignSection(Section):
    """Alignment of a block's tokens with an image feature of the store (REPA), of which NAME is the name."""

    block: Positive = 8
    """The block whose output is projected and compared with the feature, from 1."""
    weight: Weight = 0.5
    """Weight of 1 - cosine, the mean over the tokens."""
    stop_step: Count = 0
    """Last step that aligns (HASTE); 0: all."""
    projector_width: Positive = 2048
    """Hidden width of the projector, three linear maps with SiLU between."""
    class_weight: Weight = 0.0
    """Above 0, the model denoises the feature's class token too (REG: 0.03): weight of the error of its velocity."""


class SelfAlignSection(Section):
    """Alignment of a block's tokens with those of a later block of the averaged model at less noise (SRA)."""

    weight: Weight = 0.0
    """Weight of 1 - cosine, the mean over the tokens (SRA: 0.5); 0: none."""
    block: Positive = 4
    """The block whose output is projected, from 1."""
    teacher_block: Positive = 8
    """The block of the averaged model whose output is the target."""
    less_time: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The averaged model sees a time that is earlier by 0 to this, uniform for each image."""
    stop_step: Count = 0
    """Last step that aligns; 0: all."""
    projector_width: Positive = 2048
    """Hidden width of the projector."""


class RoutingSection(Section):
    """Some tokens skip the middle blocks of a DiT in training; each image has its own random ones."""

    kind: Literal["none", "tread", "sprint"] = "none"
    """"tread": they come back unchanged. "sprint": the outputs of both ways are fused, with a mask token for skipped
    ones; a fused model keeps this layer when it draws."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the tokens that skip; the number is the same for all images, so compiled shapes stay the same."""
    first_block: Positive = 3
    """The first block that they skip, from 1."""
    last_block: Count = 0
    """The last one; 0: three blocks follow it for "tread", as published, two for "sprint"."""
    stop_step: Count = 0
    """Last step that routes, before steps with all tokens; 0: all."""
