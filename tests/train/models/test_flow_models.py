"""FLUX.1, FLUX.2, Qwen-Image, Z-Image: loss and gradients of diffusers' trainers, published sizes, few graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline, FluxPipeline, QwenImagePipeline
from making import shake, train_recipe
from torch import Tensor

from leandit.datasets.batches.captions import Captions
from leandit.datasets.format.schema import TextSpec
from leandit.errors import RecipeError, RunError
from leandit.tools.plan.noise_spec import noise_spec
from leandit.train.models.build import FAMILIES, diffusers_config, transformer_class
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.spec import ModelSpec, TextInput
from leandit.train.objectives.losses import PLAIN, objective_losses
from leandit.train.run.fit import model_spec

pytestmark = pytest.mark.usefixtures("tiny_models")
BASE = ModelSpec(name="", channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
TEXT = TextInput(name="", tokens=7, width=6)
SPECS = {
    "flux1": BASE.model_copy(update={"name": "flux1-tiny", "texts": (TEXT.model_copy(update={"pooled_width": 5}),)}),
    "flux2": BASE.model_copy(update={"name": "flux2-tiny", "texts": (TEXT,)}),
    "qwen-image": BASE.model_copy(update={"name": "qwen-image-tiny"}),
    "z-image": BASE.model_copy(update={"name": "z-image-tiny"}),
}
DISTILLED = {"guidance_embeds": True}
CASES = [*((family, {}) for family in SPECS), ("flux1", DISTILLED), ("flux2", DISTILLED)]
RAGGED, EQUAL = (4, 1, 40), (9, 9, 9)  # tokens of captions; Z-Image pads 40 to 64, the others to 32
TIMES = torch.tensor([3.0, 500.0, 999.0])


def conditioning(spec: ModelSpec, lengths: tuple[int, ...] = RAGGED) -> Conditioning:
    generator = torch.Generator().manual_seed(1)
    if spec.texts:
        pooled = torch.randn((3, 5), generator=generator) if spec.pooled_width else None
        return Conditioning(captions=torch.randn((3, 7, 6), generator=generator), pooled=pooled)
    return Conditioning(captions=Captions.of([torch.randn((length, 6), generator=generator) for length in lengths]))


def by_diffusers(family: str, net: Any, x: Tensor, t: Tensor, given: Conditioning) -> Tensor:
    """The velocity as pipelines and training scripts of diffusers compute it; packing and ids are the pipelines'."""
    batch, channels, height, width = x.shape
    sizes, captions = (batch, channels, height, width), given.captions
    guidance = torch.full((batch,), 3.5) if getattr(net.config, "guidance_embeds", False) else None
    how: dict[str, Any] = {"timestep": t / 1000, "return_dict": False}
    if family == "z-image":
        rows = list(captions.embeddings.split(captions.lengths))
        return -torch.stack(net(list(x.unsqueeze(2).unbind()), (1000 - t) / 1000, rows, return_dict=False)[0]).squeeze(
            2
        )
    reference = given.reference
    if family == "qwen-image":
        text = {"encoder_hidden_states": captions.padded, "encoder_hidden_states_mask": captions.mask}
        packed = QwenImagePipeline._pack_latents(x, *sizes)
        shapes, count = [(1, height // 2, width // 2)], packed.shape[1]
        if reference is not None:  # as QwenImageEditPipeline
            packed = torch.cat([packed, QwenImagePipeline._pack_latents(reference, *sizes)], dim=1)
            shapes = shapes * 2
        out = net(packed, **text, **how, img_shapes=[shapes] * batch)[0][:, :count]
        return QwenImagePipeline._unpack_latents(out, 8 * height, 8 * width, 8).squeeze(2)
    if family == "flux2":
        ids, text_ids = Flux2KleinPipeline._prepare_latent_ids(x), Flux2KleinPipeline._prepare_text_ids(captions)  # pyright: ignore
        packed, image_ids = Flux2KleinPipeline._pack_latents(x), ids
        if reference is not None:
            packed = torch.cat([packed, Flux2KleinPipeline._pack_latents(reference)], dim=1)
            theirs = Flux2KleinPipeline._prepare_image_ids([reference[:1]])  # pyright: ignore
            image_ids = torch.cat([ids, theirs.expand(batch, -1, -1)], dim=1)
        out = net(packed, captions, img_ids=image_ids, txt_ids=text_ids, guidance=guidance, **how)[0]
        return Flux2KleinPipeline._unpack_latents_with_ids(out[:, : ids.shape[1]], ids)  # pyright: ignore
    ids = FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, x.device, x.dtype)
    packed, text_ids = FluxPipeline._pack_latents(x, *sizes), torch.zeros(7, 3)
    count = packed.shape[1]
    if reference is not None:  # as FluxKontextPipeline
        packed = torch.cat([packed, FluxPipeline._pack_latents(reference, *sizes)], dim=1)
        ids = torch.cat([ids, ids + torch.tensor([1, 0, 0])], dim=0)
    out = net(packed, captions, given.pooled, img_ids=ids, txt_ids=text_ids, guidance=guidance, **how)[0]
    return FluxPipeline._unpack_latents(out[:, :count], 8 * height, 8 * width, 8)


@pytest.mark.parametrize("lengths", [RAGGED, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("edits", [False, True], ids=["", "edits"])
@pytest.mark.parametrize(("family", "more"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_loss_and_gradients_are_those_of_diffusers_trainers(
    family: str, more: dict[str, Any], edits: bool, lengths: tuple[int, ...]
) -> None:
    """Their loss is the mean square of the model's output less noise plus image, at the same draws."""
    if edits and not FAMILIES[family].takes_reference:
        pytest.skip("it edits no image")
    spec = SPECS[family]
    config = diffusers_config(spec) | more
    ours = shake(FAMILIES[family](config))
    ours.guidance = 3.5
    theirs = transformer_class(family)(**config)
    theirs.load_state_dict(ours.net.state_dict())
    latents, noise = (torch.randn((3, 4, 8, 12), generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    shares, given = (TIMES / 1000)[:, None, None, None], conditioning(spec, lengths)
    given = given._replace(reference=latents.flip(0)) if edits else given
    noisy = (1 - shares) * latents + shares * noise
    wanted = (by_diffusers(family, theirs, noisy, TIMES, given) - (noise - latents)).square().mean()
    objective = train_recipe("sd3-tiny").objective
    output = ours(noisy, TIMES, given)
    found = objective_losses(objective, output, latents, noise, TIMES)[PLAIN].mean()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    wanted.backward()
    found.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.net.named_parameters():
        assert parameter.grad is not None, f"{name}: DDP would wait for it"
        wanted_gradient = gradients[name]  # None: of captions behind the last block of Qwen-Image
        wanted_gradient = torch.zeros_like(parameter) if wanted_gradient is None else wanted_gradient
        torch.testing.assert_close(parameter.grad, wanted_gradient, rtol=1e-4, atol=1e-6)
    for residual in ("float32", "bf16"):
        ours.residual, streams = residual, set[torch.dtype]()

        def look(_: Any, __: Any, tokens: Any, seen: set[torch.dtype] = streams) -> None:
            seen.update(one.dtype for one in (tokens if isinstance(tokens, tuple) else (tokens,)) if one is not None)

        for block in ours.blocks:
            block.register_forward_hook(look)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rounded = ours(noisy, TIMES, given)
        assert streams == {torch.bfloat16 if residual == "bf16" else torch.float32}
        assert (rounded - output).norm() < 0.05 * output.norm()


WIDTH = 96  # of a FLUX.1 whose bounds are met by enough numbers
HIDDEN = 4 * WIDTH  # of a feed-forward layer


def xavier_bound(inputs: int, outputs: int) -> float:
    return (6 / (inputs + outputs)) ** 0.5


FLUX1_BOUNDS = {  # torchtitan's: queries, keys and values are one matrix, in a block of one stream with proj_mlp
    "single_transformer_blocks.0.attn.to_q": xavier_bound(WIDTH, 7 * WIDTH),
    "single_transformer_blocks.0.attn.to_k": xavier_bound(WIDTH, 7 * WIDTH),
    "single_transformer_blocks.0.attn.to_v": xavier_bound(WIDTH, 7 * WIDTH),
    "single_transformer_blocks.0.proj_mlp": xavier_bound(WIDTH, 7 * WIDTH),
    "single_transformer_blocks.0.proj_out": xavier_bound(WIDTH + HIDDEN, WIDTH),
    "single_transformer_blocks.0.norm.linear": 0.0,
    "transformer_blocks.0.attn.to_q": xavier_bound(WIDTH, 3 * WIDTH),
    "transformer_blocks.0.attn.add_v_proj": xavier_bound(WIDTH, 3 * WIDTH),
    "transformer_blocks.0.attn.to_out.0": xavier_bound(WIDTH, WIDTH),
    "transformer_blocks.0.attn.to_add_out": xavier_bound(WIDTH, WIDTH),
    "transformer_blocks.0.ff.net.0.proj": xavier_bound(WIDTH, HIDDEN),
    "transformer_blocks.0.ff_context.net.2": xavier_bound(HIDDEN, WIDTH),
    "transformer_blocks.0.norm1.linear": 0.0,
    "transformer_blocks.0.norm1_context.linear": 0.0,
    "x_embedder": xavier_bound(16, WIDTH),
    "norm_out.linear": 0.0,
    "proj_out": 0.0,
}


def test_flux1_begins_as_the_trainer_of_the_benchmark() -> None:
    config = diffusers_config(SPECS["flux1"]) | {"attention_head_dim": 48, "axes_dims_rope": [8, 20, 20]}
    torch.manual_seed(0)
    net: Any = FAMILIES["flux1"](config).net
    for name, bound in FLUX1_BOUNDS.items():
        layer = net.get_submodule(name)
        assert layer.weight.abs().max().item() == pytest.approx(bound, rel=0.01), name
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03), name
        assert not layer.bias.any(), name
    for name, layer in net.time_text_embed.named_modules():
        if isinstance(layer, torch.nn.Linear):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1), name


def test_what_does_not_fit_is_refused() -> None:
    full = TextSpec(
        kind="causal_lm", width=6, max_tokens=9, dtype="float16", template="", batch_size=1, full_length=True
    )

    def fit(*settings: str, text: TextSpec = full) -> ModelSpec:
        store = noise_spec({"64x64": 1}, 4, 0, 9, 0, 64, "none", texts={"qwen": text})
        return model_spec(train_recipe("sd3-tiny", *settings), store, "s")

    assert fit("model.name=flux2-tiny").caption_width == 6
    with pytest.raises(RunError, match="the model reads padding too: precompute with full_length = true"):
        fit("model.name=flux2-tiny", text=full.model_copy(update={"full_length": False}))
    with pytest.raises(RunError, match=r"it takes the captions of \[text\]"):
        fit("model.name=z-image-tiny")
    with pytest.raises(RecipeError, match="'ddpm': model 'z-image-tiny' predicts a velocity"):
        fit("model.name=z-image-tiny", "objective.kind=ddpm")
