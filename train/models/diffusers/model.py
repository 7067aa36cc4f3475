"""A transformer of diffusers behind the common call: what the file of one model defines.

A new model is a file with a subclass, entered in ``build.FAMILIES``. diffusers takes seconds to import, and brings its
own optional libraries: only ``transformer`` imports it, when a model is built.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...objectives.shift import TimeShift
from ..conditioning import Conditioning
from ..layers import residual_stream
from ..roles import RolePatterns, layers_of
from ..spec import ModelSpec, TextInput

Config = dict[str, Any]
# Kind of a text encoder in a precompute recipe -> its class in a pipeline's folder, and that of its tokenizer.
T5 = {"t5": ("T5EncoderModel", "T5Tokenizer")}
GEMMA = {"gemma2": ("Gemma2Model", "GemmaTokenizer")}
# What a pipeline of diffusers undoes before its VAE decodes: scaling_factor of the VAE's config; it and shift_factor;
# latents_mean and latents_std; the running statistics of the VAE's batch norm, which are weights.
Normalisation = Literal["scale", "scale and shift", "mean and std", "batch norm"]
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj")  # of a stream of captions
TWO_STREAMS = tuple(f"attn.{name}" for name in (*ATTENTION, *TEXT_ATTENTION, "to_add_out"))
QUERY_KEY_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
INIT_STD = 0.02  # of embedders of time, size and text, as DiT's


class DiffusersModel(nn.Module):
    """A transformer of diffusers, ``net``, as a function of noisy latents, time and conditioning.

    Args:
      config: arguments of diffusers' class.

    Attributes:
      family: name of the family.
      transformer_class: module and name of diffusers' class.
      pipeline_class: name of its pipeline.
      sizes: model name -> the arguments of diffusers' class that its size fixes.
      patch: side of a token in latent pixels.
      recipe: precompute recipe whose stores fit the published sizes; other resolutions have a recipe beside it.
      texts: the text encoders that the model reads, padding included; empty: the valid tokens of one.
      text_width: of the valid tokens that the published sizes read.
      caption_multiple: the valid tokens are padded to a multiple of so many.
      text_classes: of each text encoder of its pipeline the classes by kind: see ``T5``.
      downscale: pixels of a side of a latent position, of the VAE that it is published with.
      vae: class of that VAE.
      roles: what its linear layers and convolutions do, by their names in ``net``: see ``roles.py``.
      adapted: ends of the names of the linear layers that get adapters by default; their role is "hidden".
      has_convolutions: the feed-forward layers of its blocks are convolutions.
      normalisation: what its pipeline undoes before the VAE decodes.
      drawn_px: side of the images that its pipeline draws by default; 0: as the config's sample_size says.
      binned_sides: values of sample_size for which its pipeline has a table of sizes; for others it raises an error
        unless use_resolution_binning=False. Empty: it has no tables.
      residual: dtype of the residual stream under autocast to bfloat16; in any other precision it is float32.
      is_flow: it gives a velocity alone, so it trains with flow matching alone.
      samples_flows: its pipeline takes schedulers of flows.
      rounds_times: its published code rounds the times that the model gets down to whole numbers of 0..1000.
      takes_guidance: distilled weights of it take the scale of the guidance as an input.
      guidance_argument: how its pipeline takes classifier-free guidance of the scale G.
      guidance: that scale, where the weights take one.
      resolution_shift: the shift of times that its pipeline computes from the size of an image, as published.
      pads_null: see ``ModelSpec.pads_null``.
      takes_reference: it may see the latents of another image, to edit it.
    """

    family: ClassVar[str]
    transformer_class: ClassVar[str]
    pipeline_class: ClassVar[str] = ""
    sizes: ClassVar[dict[str, Config]]
    patch: ClassVar[int]
    recipe: ClassVar[str]
    texts: ClassVar[tuple[TextInput, ...]] = ()
    text_width: ClassVar[int] = 0
    caption_multiple: ClassVar[int] = 1
    text_classes: ClassVar[tuple[Mapping[str, tuple[str, str]], ...]] = (T5 | GEMMA,)
    downscale: ClassVar[int] = 8
    vae: ClassVar[str] = "AutoencoderKL"
    roles: ClassVar[RolePatterns]
    normalisation: ClassVar[Normalisation] = "scale and shift"
    drawn_px: ClassVar[int] = 1024
    binned_sides: ClassVar[tuple[int, ...]] = ()
    adapted: ClassVar[tuple[str, ...]] = ATTENTION
    has_convolutions: ClassVar[bool] = False
    is_flow: ClassVar[bool] = False
    samples_flows: ClassVar[bool] = True
    rounds_times: ClassVar[bool] = False
    takes_guidance: ClassVar[bool] = False
    guidance_argument: ClassVar[str] = "guidance_scale=G"
    resolution_shift: ClassVar[TimeShift | None] = None
    pads_null: ClassVar[bool] = True
    takes_reference: ClassVar[bool] = False
    residual: Literal["float32", "bf16"] = "float32"
    guidance: float = 1.0

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        with without_warnings():
            self.net = self.transformer()(**config)
        self.optimize()
        self.initialize_weights()

    @classmethod
    def transformer(cls) -> Any:
        """diffusers' class."""
        module, _, name = cls.transformer_class.partition(".")
        return getattr(importlib.import_module(f"diffusers.models.transformers.{module}"), name)

    @classmethod
    def pipeline(cls, spec: ModelSpec) -> str:
        """Name of diffusers' pipeline."""
        return cls.pipeline_class

    @classmethod
    def needs(cls, spec: ModelSpec) -> Config:
        """The arguments that store and objective fix; a published config must have the same."""
        widths = {"in_channels": spec.channels, "out_channels": spec.out_channels}
        return widths | {"caption_channels": spec.caption_width}

    @classmethod
    def config(cls, spec: ModelSpec) -> Config:
        """All arguments for training from scratch."""
        return {**cls.sizes[spec.name], "patch_size": cls.patch, **cls.needs(spec)}

    @classmethod
    def patch_side(cls, spec: ModelSpec) -> int:
        """Side of a patch, in latent pixels."""
        return spec.config.get("patch_size", cls.patch)

    @classmethod
    def config_to_draw(cls, config: Config, side: int) -> Config:
        """The config of a model for its pipeline to draw ``side`` latent pixels by default, with the same positions.

        diffusers' classes with a ``sample_size`` also measure positions by it. The others are left as they are.

        Args:
          config: all arguments of diffusers' class.
        """
        return config

    @classmethod
    def most_tokens(cls, spec: ModelSpec) -> int | None:
        """Side of the largest grid of tokens that the model has positions for; None: any."""
        return None

    @property
    def zeroed(self) -> list[nn.Module]:
        """The layers that begin at zero in a DiT: modulations and the output."""
        return list(layers_of(self, "modulation", "head").values())

    def optimize(self) -> None:
        """Replace what diffusers computes slower or less precisely; names of parameters stay."""

    def initialize_weights(self) -> None:
        """Initialize for training from scratch as the published code does, unlike diffusers."""
        raise NotImplementedError

    def inputs(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Config:
        """Arguments of ``net``: latents packed as it takes them, its scale of time, its text."""
        raise NotImplementedError

    def velocity(self, output: Any, x: Tensor) -> Tensor:
        """What ``net`` returns, unpacked to (B, out_channels, H, W) and towards the noise."""
        return output

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, C, H, W), (B,) time in 0..1000, where 1000 is pure noise, captions to (B, out_channels, H, W)."""
        return self.velocity(self.net(**self.inputs(x, t, conditioning), return_dict=False)[0], x)

    @classmethod
    def rescale_guided(cls, guided: Tensor, conditional: Tensor) -> Tensor:
        """The guided velocity as its pipeline scales it; both (B, C, H, W)."""
        return guided

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks that are compiled, sharded and checkpointed one by one."""
        return self.net.transformer_blocks


def keep_streams(model: DiffusersModel, *embedders: nn.Module) -> None:
    """Keep the residual streams in ``model.residual`` under autocast, and queries and keys in the dtype of products.

    The first block takes float32: FLUX.1 and Qwen-Image round the time to the dtype of the embedded latents.

    Args:
      embedders: modules whose outputs are the streams.
    """

    def keep(_: nn.Module, inputs: Any, tokens: Any) -> Any:
        if isinstance(tokens, tuple):  # of a block with two streams; None: captions that nothing reads
            return tuple(None if stream is None else residual_stream(stream, model.residual) for stream in tokens)
        return residual_stream(tokens, model.residual)

    for embedder in embedders:
        embedder.register_forward_hook(lambda _, inputs, tokens: residual_stream(tokens, "float32"))  # pyright: ignore
    for block in model.blocks:
        block.register_forward_hook(keep)
    for name, module in model.net.named_modules():  # norms with float32 weights would make attention float32
        if name.rpartition(".")[2] in QUERY_KEY_NORMS and type(module).__name__ == "RMSNorm":
            module.register_forward_hook(lambda _, inputs, normed: normed.to(inputs[0].dtype))


def pack(x: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H/2 * W/2, 4C): squares of 2 x 2 positions as tokens, row by row."""
    return F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)


def pack_all(images: Iterable[Tensor]) -> Tensor:
    """The tokens of latents (B, C, H, W) after each other."""
    return torch.cat([pack(image) for image in images], dim=1)


def unpack(tokens: Tensor, x: Tensor) -> Tensor:
    """The inverse of ``pack_all`` for the first latents, of the height and width of ``x``."""
    rows, columns = x.shape[2] // 2, x.shape[3] // 2
    return F.pixel_shuffle(tokens[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns)), 2)


def add_positions(embed: Any) -> None:
    """Let diffusers' patch embedding add its positions in float32, from a table that is made once for each size."""
    tables: dict[tuple[int, int, torch.device], Tensor] = {}

    def table(rows: int, columns: int, device: torch.device) -> Tensor:
        if embed.pos_embed_max_size:  # the center of a table that all sizes share
            return embed.cropped_pos_embed(rows * embed.patch_size, columns * embed.patch_size)
        from diffusers.models.embeddings import get_2d_sincos_pos_embed

        if (key := (rows, columns, device)) not in tables:
            with torch.inference_mode(False):  # a table made while sampling may be used in training later
                positions: Any = get_2d_sincos_pos_embed(
                    embed.proj.out_channels,
                    (rows, columns),
                    base_size=embed.base_size,
                    interpolation_scale=embed.interpolation_scale,
                    output_type="pt",
                )
                tables[key] = positions.float().unsqueeze(0).to(device)
        return tables[key]

    def forward(self: Any, latent: Tensor) -> Tensor:
        tokens = self.proj(latent)
        rows, columns = tokens.shape[2:]
        return tokens.flatten(2).transpose(1, 2) + table(rows, columns, tokens.device)

    embed.forward = MethodType(forward, embed)


def stream_projections(blocks: Iterable[Any]) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The queries, keys and values of blocks with two streams, those of images and of captions, for ``initialize``."""
    return [(block.attn, names) for block in blocks for names in (ATTENTION[:3], TEXT_ATTENTION)]


def initialize(
    net: nn.Module,
    fused: Iterable[tuple[nn.Module, tuple[str, ...]]],
    patches: nn.Module,
    embedders: Iterable[nn.Module],
    zeros: Iterable[nn.Module],
) -> None:
    """First weights as DiT's: Xavier for linear layers, zeros for their biases.

    Args:
      fused: modules with the names of linear layers that read the same input, and are drawn as the one matrix that they
        are in the published code: its bound counts the outputs of all of them.
      patches: patch embedding, drawn as the linear map that it is.
      embedders: whose linear layers get a small standard deviation.
      zeros: layers whose weights begin at zero.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module, names in fused:
        layers: list[Any] = [module.get_submodule(name) for name in names]
        bound = math.sqrt(6 / (layers[0].in_features + sum(layer.out_features for layer in layers)))
        for layer in layers:
            nn.init.uniform_(layer.weight, -bound, bound)
    kernel: Any = patches.weight
    nn.init.xavier_uniform_(kernel.view(len(kernel), -1))
    for module in (module for embedder in embedders for module in embedder.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=INIT_STD)
    for layer in zeros:
        nn.init.zeros_(layer.weight)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence what diffusers' optional libraries log during their import."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
