"""A spy on what reaches the encoders."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from leandit.precompute.encoders.text.encoder import CaptionEncoder, EncodedCaptions
from leandit.precompute.encoders.vae import ImageEncoder


@dataclass
class Seen:
    """What reached the encoders."""

    images: int = 0
    texts: list[str] = field(default_factory=list)

    def forget(self) -> None:
        self.images, self.texts = 0, []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    spy, encode_images, encode_texts = Seen(), ImageEncoder.encode, CaptionEncoder.encode

    def images(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
        spy.images += len(pixels) if hasattr(self, "identity") else 0  # it looks at one image while it is loaded
        return encode_images(self, pixels)

    def texts(self: CaptionEncoder, captions: list[str], **how: bool) -> EncodedCaptions:
        spy.texts += captions
        return encode_texts(self, captions, **how)

    monkeypatch.setattr(ImageEncoder, "encode", images)
    monkeypatch.setattr(CaptionEncoder, "encode", texts)
    return spy
