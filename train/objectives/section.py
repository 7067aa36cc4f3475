"""The objective's keys of a recipe. Nothing here imports torch, because recipes are checked before it is loaded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ...datasets.recipe import Section


class Objective(Section):
    """What the model learns, without what techniques add."""

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
    cosine_weight: Annotated[float, Field(ge=0)] = 0.0
    """Of "flow": weight of 1 - cosine between velocity and target over the channels (LightningDiT: 1)."""

    @model_validator(mode="after")
    def _keys_of_the_other_kind_are_not_set(self) -> Objective:
        if self.kind == "flow" and (self.predict, self.variance, self.min_snr_gamma) != ("epsilon", "learned", 0.0):
            raise ValueError('predict, variance and min_snr_gamma are keys of kind = "ddpm"; "flow" has none of them')
        if self.kind == "ddpm" and self.cosine_weight:
            raise ValueError('cosine_weight is a key of kind = "flow"; "ddpm" has no velocity')
        return self
