"""Sections of a train recipe that the rest is built on: the objective without techniques, and ``[data]``.

Nothing here imports torch, because recipes are checked before it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..recipe import Count, Section, Share

SampleShift = Literal["auto", "resolution"] | Annotated[float, Field(gt=0)]
SampleGuidance = Literal["auto"] | Annotated[float, Field(ge=0, le=100)]


class Objective(Section):
    """What the model learns, without what techniques add."""

    kind: Literal["ddpm", "flow"] = "ddpm"
    """"ddpm": noise and learned variance (DiT, PixArt). "flow": velocity from data to noise (Sana, SD3)."""
    predict: Literal["epsilon", "v"] = "epsilon"
    """What "ddpm" predicts: the noise, or v = signal * noise - noise_share * data."""
    variance: Literal["learned", "fixed"] = "learned"
    """For "ddpm": "learned" doubles the model's output channels; "fixed" adds none."""
    min_snr_gamma: Annotated[float, Field(ge=0)] = 0.0
    """For "ddpm": cap on the SNR that weights a step (usually 5); 0: no weighting."""
    time: Literal["uniform", "logit_normal"] = "logit_normal"
    """Distribution of the times of "flow"."""
    time_mean: float = 0.0
    """For "logit_normal": mean of the logit; above 0 is towards noise."""
    time_std: Annotated[float, Field(gt=0)] = 1.0
    """For "logit_normal": standard deviation of the logit."""
    shift: Literal["resolution"] | Annotated[float, Field(gt=0)] = 1.0
    """Shift s of the times of "flow" towards noise: t' = s t / (1 + (s - 1) t). "resolution": what the pipeline of the
    model computes from the size of the images, for each bucket (FLUX.1, FLUX.2, Qwen-Image, Z-Image, SD3)."""
    cosine_weight: Annotated[float, Field(ge=0)] = 0.0
    """For "flow": weight of 1 - cosine between velocity and target over the channels (LightningDiT: 1)."""

    @model_validator(mode="after")
    def _keys_of_the_other_kind_are_not_set(self) -> Objective:
        if self.kind == "flow" and (self.predict, self.variance, self.min_snr_gamma) != ("epsilon", "learned", 0.0):
            raise ValueError('predict, variance and min_snr_gamma are keys of kind = "ddpm"; "flow" has none of them')
        if self.kind == "ddpm" and self.shift == "resolution":
            raise ValueError('shift is a key of kind = "flow"; the steps of "ddpm" are not shifted')
        if self.kind == "ddpm" and self.cosine_weight:
            raise ValueError('cosine_weight is a key of kind = "flow"; "ddpm" has no velocity')
        return self


class RecordsSection(Section):
    """Which records of a store train, and how often each of their captions."""

    labels: list[str | int] = Field(default=[])
    """Names or numbers of the classes to train on; empty: all."""
    min_aspect: Annotated[float, Field(ge=0)] = 0.0
    """Smallest height / width of the source image; 0: no limit."""
    max_aspect: Annotated[float, Field(ge=0)] = 0.0
    """Largest height / width of the source image; 0: no limit."""
    scores: str = ""
    """Parquet file with a score for each record; empty: no scores."""
    score_column: str = "score"
    """Its column of numbers."""
    score_key: str = "key"
    """Its column with the records' keys."""
    min_score: float = 0.0
    """Records with a lower score, or none, are left out."""
    caption_scores: str = ""
    """Parquet file with a list of scores for each record, one per caption (Sana: CLIP's); empty: equal odds."""
    min_caption_score: float = 0.0
    """Captions with a lower score are not drawn, unless a record has no better one (Sana's clip_thr: 25)."""
    caption_temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Captions are drawn in proportion to score ** (1 / temperature) (Sana's clip_thr_temperature: 0.1)."""
    original_share: Share = 0.0
    """Share of draws that take a record's first caption (PixArt-Sigma's real_prompt_ratio: 0.5); 0: like the others."""

    @model_validator(mode="before")
    @classmethod
    def _named_stores_inherit(cls, values: Any) -> Any:
        """Keys of records that stand beside stores hold for each of these stores that does not say otherwise."""
        if not isinstance(values, dict):
            return values
        shared = {key: value for key, value in values.items() if key in RecordsSection.model_fields}
        mixture = values.get("mixture")
        if not isinstance(mixture, list):
            return values
        return values | {"mixture": [shared | store if isinstance(store, dict) else store for store in mixture]}

    @model_validator(mode="after")
    def _scores_are_named(self) -> RecordsSection:
        names_stores = getattr(self, "mixture", [])  # then each of them is checked
        if self.min_score and not self.scores and not names_stores:
            raise ValueError("min_score needs scores, the Parquet file with a score for each record")
        return self

    @property
    def has_filter(self) -> bool:
        """Whether records may be left out."""
        return bool(self.labels or self.min_aspect or self.max_aspect or self.scores)

    @property
    def of_records(self) -> dict[str, Any]:
        """The keys of this class."""
        return {key: getattr(self, key) for key in RecordsSection.model_fields}


class StoreSection(RecordsSection):
    """A store of a mixture."""

    store: Annotated[str, Field(min_length=1)]
    """Folder, from the working directory, or URL."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the batches: this weight over the sum of all weights."""
    revision: Count = 0
    """Revision of the store; 0: the newest when the run starts, which the run then keeps."""


def batch_shares(sections: Sequence[StoreSection]) -> list[float]:
    """Share of the batches of each store of a mixture: its weight over the sum of all weights."""
    total = sum(section.weight for section in sections)
    return [section.weight / total for section in sections]


class DataSection(RecordsSection):
    """The stores, which of their records train, and in what order."""

    leftovers: Literal["short", "drop"] = "short"
    """Records left over in a bucket: "short": in a smaller batch; "drop": skipped."""
    window_shards: Count = 0
    """Shuffle within this many shards of a bucket at a time, for slow disks and stores at a URL; 0: over all."""
    check: Literal["first", "always", "never"] = "first"
    """When rows are compared with their checksums: the first time that they are read, always, or never."""
    access: Literal["auto", "map", "pread"] = "auto"
    """How stores are read: mapped, or by pread in threads; "auto": by pread on network file systems (NFS, SMB, Lustre,
    GPFS, Ceph, FUSE, 9p and others), where a lost file would end a process that has mapped it."""
    batch_tokens: Count = 0
    """Image tokens per update, so that large buckets have smaller batches; 0: run.global_batch images of any size."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the records kept out of training, by a hash of their keys; run.evaluate_every reports their loss."""
    mixture: list[StoreSection] = Field(default=[])
    """Stores to train on together, each with a weight, instead of --store. Filter and caption keys beside it
    apply to all."""
