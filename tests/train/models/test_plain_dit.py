"""Our DiT is the function of the published one, written out plainly."""

from __future__ import annotations

import pytest
import torch
from plain_dit import PlainDiT

from leandit.train.models.build import build_model
from leandit.train.models.dit import DiT, size_of
from leandit.train.models.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("tiny_models")
NAMES = [  # ours, the plain one's
    ("x_embedder.proj", "to_tokens"),
    ("t_embedder.mlp", "time_mlp"),
    ("y_embedder.embedding_table", "label_table"),
    ("final_layer.linear", "head"),
    ("final_layer.adaLN_modulation", "modulation"),
    ("adaLN_modulation", "modulation"),
    ("attn.qkv", "attention.to_qkv"),
    ("attn.proj", "attention.to_out"),
    ("mlp.fc1", "mlp.0"),
    ("mlp.fc2", "mlp.2"),
    ("pos_embed", "positions"),
]


def test_the_plain_dit_is_the_same_function_as_ours() -> None:
    spec = ModelSpec(name="DiT-S/2", channels=4, out_channels=8, num_classes=3, caption_width=0, base_size=8)
    ours = build_model(spec, seed=0).net
    assert isinstance(ours, DiT)
    torch.manual_seed(0)
    state = {
        name: torch.randn_like(tensor) if "pos" not in name else tensor for name, tensor in ours.state_dict().items()
    }
    ours.load_state_dict(state)
    depth, width, heads, patch = size_of(spec.name)
    sizes = {"depth": depth, "width": width, "heads": heads, "patch": patch, "num_classes": 3, "side": 8}
    plain = PlainDiT(**sizes, channels=4, out_channels=8)
    for one, other in NAMES:
        state = {name.replace(one, other): tensor for name, tensor in state.items()}
    plain.load_state_dict(state)
    x, t, y = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 900.0]), torch.tensor([1, 3])
    torch.testing.assert_close(plain(x, t, y), ours(x, t, y), rtol=1e-3, atol=1e-3)
