"""The loop that a user of diffusers has: its class, trained as its example scripts and those of DiT do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....train.models.build import diffusers_config
from ....train.models.conditioning import Conditioner, Conditioning
from ....train.models.diffusers_models.families import family_of, transformer_class
from ....train.models.dit import size_of
from ....train.models.spec import ModelSpec
from ....train.objectives.losses import draw_times, loss_per_image
from ...synthetic.batches import synthetic_batch
from .steps import Step, StepRequest


def usual_step(request: StepRequest) -> Step:
    """One step of the usual loop around diffusers' model, with our objective, on the same kind of batch.

    Modules are eager, AdamW is as torch constructs it, and the loss is read of each microbatch. Averages are computed
    parameter by parameter: by a loop in Python for DiT, by diffusers' ``EMAModel`` for models with text. Blocks are
    recomputed where the recipe says so. Captions are ready on the device, padded to the longest.
    """
    work, device, recipe = request.work, request.device, request.work.recipe
    spec = work.spec
    model = (DiffusersText(spec) if spec.takes_text else DiffusersDiT(spec)).to(device).train()
    if recipe.run.activation_checkpointing != "none":
        model.net.enable_gradient_checkpointing()
    update_averages = (_diffusers_averages if spec.takes_text else _plain_averages)(model, recipe.run.ema_decay)
    section = recipe.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    dtype, size = request.autocast, recipe.run.global_batch
    batch = synthetic_batch(work.store, work.largest_bucket, size, work.tokens, device)
    null = torch.zeros(work.tokens, spec.caption_width, device=device) if spec.takes_text else None
    null_pooled = torch.zeros(spec.pooled_width, device=device) if spec.pooled_width else None
    conditioner = Conditioner(spec, null, null_pooled=null_pooled)
    conditioning = conditioner(batch.labels, batch.texts, widen=dtype is None)
    microbatch = recipe.run.microbatch or size
    generator = torch.Generator(device).manual_seed(0)

    def step() -> None:
        for start in range(0, size, microbatch):
            rows = slice(start, start + microbatch)
            x = batch.latents[rows]
            noise = torch.randn(x.shape, device=device)
            t = draw_times(recipe.objective, len(x), generator)
            dropped = torch.rand(len(x), device=device) < recipe.conditioning.drop
            given = conditioner.drop(conditioning.part(rows), dropped)

            def predict(noisy: Tensor, time: Tensor, given: Conditioning = given) -> Tensor:
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    return model(noisy, time, given)

            loss = loss_per_image(recipe.objective, predict, x, noise, t).sum() / size
            loss.backward()
            loss.item()
        if recipe.run.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.run.grad_clip)
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that no gradients wait while our step has its turn
        update_averages()

    return step


def is_of_diffusers(spec: ModelSpec) -> bool:
    """Whether diffusers has a class of this model: not of our DiT with captions."""
    return not spec.takes_text or family_of(spec.name) is not None


def _plain_averages(model: nn.Module, decay: float) -> Step:
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update() -> None:
        for name, parameter in model.named_parameters():
            averages[name].mul_(decay).add_(parameter, alpha=1 - decay)

    return update


def _diffusers_averages(model: nn.Module, decay: float) -> Step:
    from diffusers.training_utils import EMAModel

    averages = EMAModel(model.parameters(), decay=decay)
    return lambda: averages.step(model.parameters())


class DiffusersDiT(nn.Module):
    """diffusers' class with the call of ours; its own label dropout is turned off."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

        depth, width, heads, patch = size_of(spec.name)
        self.net = DiTTransformer2DModel(
            num_layers=depth,
            num_attention_heads=heads,
            attention_head_dim=width // heads,
            in_channels=spec.channels,
            out_channels=spec.out_channels,
            sample_size=spec.base_size,
            patch_size=patch,
            num_embeds_ada_norm=spec.num_classes,
        )
        for module in self.net.modules():
            if hasattr(module, "dropout_prob"):
                setattr(module, "dropout_prob", 0.0)  # noqa: B010 (for a type checker it is a tensor)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        return self.net(x, timestep=t, class_labels=conditioning.labels, return_dict=False)[0]


class DiffusersText(nn.Module):
    """diffusers' PixArt, Sana or SD3 as it comes, with the call of ours."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        family = family_of(spec.name)
        assert family is not None
        self.net = transformer_class(family)(**diffusers_config(spec))
        self._is_joint = family == "sd3"

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        captions, mask = conditioning.captions, conditioning.caption_mask
        more = {"pooled_projections": conditioning.pooled} if self._is_joint else {"encoder_attention_mask": mask}
        return self.net(x, encoder_hidden_states=captions, timestep=t, return_dict=False, **more)[0]
