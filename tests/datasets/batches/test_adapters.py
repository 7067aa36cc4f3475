"""Batches for other trainers: their values against the store's, and each trainer's own code for a few steps."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stores import TEXTS, noise_store

from leandit import LatentStore, adapters, make_loader
from leandit.errors import RecipeError

PAGE = (Path(__file__).parents[3] / "docs/other-trainers.md").read_text()
SECTIONS = dict(re.findall(r"^(?:#+) (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
FUNCTIONS = "Functions for NeMo AutoModel and torchtitan"
POOLED = TEXTS["clip_l"].model_copy(update={"output": "pooled"})


@pytest.fixture(scope="module")
def flux_store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    texts = {"clip_l": POOLED, "t5": TEXTS["t5"]}
    return noise_store(tmp_path_factory.mktemp("flux") / "store", texts=texts)


@pytest.fixture(scope="module")
def short_store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """Captions without their padding."""
    texts = {"clip_l": POOLED, "t5": TEXTS["t5"].model_copy(update={"full_length": False, "attend_padding": False})}
    return noise_store(tmp_path_factory.mktemp("short") / "store", texts=texts)


@pytest.fixture
def page(
    three_text_store: LatentStore, flux_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs the code of a section, and gives the names that it has."""
    (tmp_path / "S3").symlink_to(three_text_store.path)
    (tmp_path / "flux-store").symlink_to(flux_store.path)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"transformer": small_sd3()}

    def run(*sections: str, **more: Any) -> dict[str, Any]:
        names.update(more)
        for section in ("Stores in other trainers", *sections):
            for block in re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL):
                exec(block, names)
        return names

    return run


def small_sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "pos_embed_max_size": 16}
    heads = {"attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16}
    return SD3Transformer2DModel(**sizes, **heads, joint_attention_dim=32, pooled_projection_dim=16)


def small_flux() -> Any:
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    heads = {"attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 2, 4)}
    return FluxTransformer2DModel(**sizes, **heads, joint_attention_dim=32, pooled_projection_dim=6)


def captions_of(store: LatentStore, records: torch.Tensor, name: str) -> np.ndarray:
    """(B, L, D) float32, read one by one."""
    return np.stack([store.caption(int(record), text=name) for record in records]).astype(np.float32)


def pooled_of(store: LatentStore, records: torch.Tensor, name: str) -> np.ndarray:
    """(B, P) float32, read one by one."""
    ids = [store.record_at(int(record)).caption_ids[0] for record in records]
    return np.stack([store.text(name).pooled_vector(i) for i in ids]).astype(np.float32)


def test_a_batch_of_diffusers_joins_the_text_encoders_as_stable_diffusion_3_does(three_text_store: LatentStore) -> None:
    of_store = make_loader(three_text_store, global_batch=4, seed=1)
    of_trainer = make_loader(
        three_text_store, global_batch=4, seed=1, collate_fn=adapters.diffusers_sd3(three_text_store)
    )
    for batch, named in zip(of_store, of_trainer, strict=True):
        clip_l, clip_g, t5 = (captions_of(three_text_store, batch.records, name) for name in ("clip_l", "clip_g", "t5"))
        wanted = np.zeros((len(batch), 7 + 9, 32), np.float32)
        wanted[:, :7, :8], wanted[:, :7, 8:20], wanted[:, 7:] = clip_l, clip_g, t5
        np.testing.assert_array_equal(named["prompt_embeds"], wanted)
        pooled = [pooled_of(three_text_store, batch.records, name) for name in ("clip_l", "clip_g")]
        np.testing.assert_array_equal(named["pooled_prompt_embeds"], np.concatenate(pooled, axis=1))
        np.testing.assert_array_equal(named["model_input"], batch.latents)
        assert {tensor.dtype for tensor in named.values()} == {torch.float32}


def test_a_batch_of_sdxl_has_its_sizes_and_trains(tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    clip_l = TEXTS["clip_l"].model_copy(update={"output": "tokens", "pooled_width": 0})
    store = noise_store(tmp_path / "store", texts={"clip_l": clip_l, "clip_g": TEXTS["clip_g"]})
    with pytest.raises(RecipeError, match=r"the sizes of \d+ images of bucket '\d+x\d+' are not known"):
        adapters.diffusers_sdxl(store)
    sizes = np.arange(6 * len(store.records), dtype=np.int32).reshape(-1, 6)
    store.__dict__["sizes"] = sizes  # noise has none
    sizes_of = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    sizes_of |= {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 4}
    sizes_of |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 20}
    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
    unet = UNet2DConditionModel(**sizes_of, **added, projection_class_embeddings_input_dim=10 + 6 * 4)
    for batch in make_loader(store, global_batch=4, seed=1):
        named = adapters.diffusers_sdxl(store)(batch)
        clips = [captions_of(store, batch.records, name) for name in ("clip_l", "clip_g")]
        np.testing.assert_array_equal(named["prompt_embeds"], np.concatenate(clips, axis=2))
        np.testing.assert_array_equal(named["pooled_prompt_embeds"], pooled_of(store, batch.records, "clip_g"))
        assert torch.equal(named["time_ids"], batch.sizes.float())
        for row, record in zip(named["time_ids"].tolist(), batch.records.tolist(), strict=True):
            height, width, _, _, top, left = sizes[record].tolist()
            assert row == [height, width, top, left, *map(int, batch.bucket.split("x"))]
        added = {"text_embeds": named["pooled_prompt_embeds"], "time_ids": named["time_ids"]}
        times = torch.full((len(batch),), 500)
        given = unet(named["model_input"], times, named["prompt_embeds"], added_cond_kwargs=added).sample
        torch.nn.functional.mse_loss(given, torch.randn_like(given)).backward()
        assert all(torch.isfinite(one.grad).all() for one in unet.parameters() if one.grad is not None)


def of_class(store: LatentStore, name: str, class_name: str, **changes: Any) -> LatentStore:
    """The store, as if a text encoder of another class or setting had made it."""
    found, texts = LatentStore(store.path), list(store.spec.texts)
    (i,) = (i for i, one in enumerate(texts) if one.name == name)
    encoder, spec = texts[i].encoder.model_copy(update={"class_name": class_name}), texts[i].spec
    texts[i] = texts[i].model_copy(update={"encoder": encoder, "spec": spec.model_copy(update=changes)})
    found.__dict__["spec"] = found.spec.model_copy(update={"texts": texts})
    return found


@pytest.fixture
def titan(page: Any) -> Any:
    return page(FUNCTIONS)["torchtitan_flux"]


@pytest.fixture
def nemo(page: Any) -> Any:
    return partial(page(FUNCTIONS)["nemo_automodel"], tokens="t5", pooled="clip_l")


def test_captions_of_another_models_text_encoders_are_refused(
    three_text_store: LatentStore, flux_store: LatentStore, nemo: Any, titan: Any
) -> None:
    plain, projected = "CLIPTextModel", "CLIPTextModelWithProjection"
    adapters.diffusers_sd3(of_class(three_text_store, "clip_l", projected))
    titan(of_class(flux_store, "clip_l", plain))
    with pytest.raises(RecipeError, match=f"'clip_l' is a {plain}, expected a {projected}"):
        adapters.diffusers_sd3(of_class(three_text_store, "clip_l", plain))
    for adapter in (titan, nemo):
        with pytest.raises(RecipeError, match=f"'clip_l' is a {projected}, expected a {plain}"):
            adapter(of_class(flux_store, "clip_l", projected))
    for adapter, store in ((adapters.diffusers_sd3, three_text_store), (titan, flux_store)):
        with pytest.raises(RecipeError, match=r"'t5' has not attended to its padding.*text.t5.attend_padding = true"):
            adapter(of_class(store, "t5", "T5EncoderModel", attend_padding=False))
    with pytest.raises(RecipeError, match=r"'t5' has no pooled vectors: text.t5.output = 'both'"):
        adapters.diffusers_sdxl(three_text_store, "clip_g", "t5")


def test_a_batch_of_nemo_has_its_padding_and_mask(short_store: LatentStore, flux_store: LatentStore, nemo: Any) -> None:
    for store, reads_mask in ((short_store, True), (flux_store, False)):
        named = nemo(store, reads_mask=reads_mask, dtype=torch.bfloat16)
        for batch in make_loader(store, global_batch=4, seed=1):
            values = named(batch)
            tokens, mask = values["text_embeddings"].float(), values["text_attention_mask"]
            assert tokens.shape == (len(batch), 16, 32)  # nine tokens, filled up to a multiple of eight
            for row, valid, record in zip(tokens, mask, batch.records, strict=True):
                caption = torch.tensor(store.caption(int(record), text="t5")).bfloat16().float()
                assert valid.tolist() == [True] * len(caption) + [False] * (16 - len(caption))
                torch.testing.assert_close(row[valid], caption, rtol=0, atol=0)
                assert not row[~valid].any()
            assert values["pooled_prompt_embeds"].dtype == values["image_latents"].dtype == torch.bfloat16
            assert values["data_type"] == "image"


def test_a_batch_of_torchtitan_is_what_its_encoders_would_have_given(flux_store: LatentStore, titan: Any) -> None:
    named = titan(flux_store)
    for batch in make_loader(flux_store, global_batch=4, seed=1):
        encodings, labels = named(batch)
        np.testing.assert_array_equal(encodings["t5_encodings"], captions_of(flux_store, batch.records, "t5"))
        np.testing.assert_array_equal(encodings["clip_encodings"], pooled_of(flux_store, batch.records, "clip_l"))
        np.testing.assert_array_equal(labels, batch.latents)
        assert encodings["img_encodings"] is labels


def test_a_store_without_what_the_trainer_reads_is_an_error_at_the_start(
    three_text_store: LatentStore,
    flux_store: LatentStore,
    short_store: LatentStore,
    label_store: LatentStore,
    caption_store: LatentStore,
    nemo: Any,
    titan: Any,
) -> None:
    with pytest.raises(RecipeError, match=r"\['clip_l', 'clip_g', 't5'\], expected 'umt5'"):
        adapters.diffusers_sd3(three_text_store, t5="umt5")
    for adapter in (titan, nemo):
        with pytest.raises(RecipeError, match=r"'t5' has captions without their padding.*text.t5.full_length = true"):
            adapter(short_store)
    with pytest.raises(RecipeError, match=r"are \[\], expected 't5'"):
        titan(label_store)
    with pytest.raises(RecipeError, match=r"'text' has captions without.*reads no mask: text\.full_length = true"):
        nemo(caption_store, tokens="")
    without = make_loader(
        three_text_store, global_batch=4, text="none", collate_fn=adapters.diffusers_sd3(three_text_store)
    )
    with pytest.raises(RecipeError, match="text='padded'"):
        next(iter(without))


def test_the_step_of_diffusers_scripts_trains_on_a_store(page: Any) -> None:
    assert_losses(page("diffusers' training scripts")["losses"], 5)


def test_an_accelerate_loop_trains_and_resumes_with_the_next_batch(page: Any) -> None:
    names = page("diffusers' training scripts", "accelerate")
    assert_losses(names["losses"], 3)
    names["accelerator"].load_state("state")
    next(iter(names["loader"]))
    assert names["loader"].dataset.number == 3  # after the third batch


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of Lightning: few workers, no logger
def test_lightning_trains_and_resumes_with_the_next_batch(page: Any) -> None:
    pytest.importorskip("lightning")
    names = page("diffusers' training scripts", "Lightning")
    assert_losses(names["losses"], 2)

    numbers: list[int] = []
    named = names["data"].collate_fn

    def numbered(batch: Any) -> Any:
        numbers.append(batch.number)
        return named(batch)

    data = names["StoreData"](names["store"], batch_size=4, seed=0, collate_fn=numbered)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = names["Trainer"](max_steps=4, accelerator="cpu", **options)
    trainer.fit(names["Sd3Module"](), data, ckpt_path="two.ckpt", weights_only=False)
    assert trainer.global_step == 4
    assert numbers == [2, 3]  # three batches an epoch


def test_nemo_automodel_trains_on_a_store(page: Any) -> None:
    pytest.importorskip("nemo_automodel", reason="needs nemo-automodel: pip install --no-deps nemo-automodel")
    names = page(FUNCTIONS, "NeMo AutoModel", flux=small_flux())
    assert_losses(names["losses"], 3)
    built = names["StoreDataloaderConfig"]("flux-store").build(dp_rank=1, dp_world_size=2, batch_size=2)
    assert len(next(iter(built.dataloader))["image_latents"]) == 2


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan: pip install torchtitan")
def test_torchtitan_trains_on_a_store(page: Any) -> None:
    assert_losses(page(FUNCTIONS, "torchtitan", titan=small_titan())["losses"], 5)


def small_titan() -> Any:
    """torchtitan's FLUX trainer with a small model: without its encoders, its job config and several ranks."""
    from contextlib import nullcontext

    from torchtitan.components.loss import MSELoss
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models import flux
    from torchtitan.models.flux.trainer import FluxTrainer

    set_spmd_backend("partial_dtensor")
    model = small_titan_config(flux).build()
    model.init_weights()
    titan: Any = FluxTrainer.__new__(FluxTrainer)
    titan.device, titan._dtype, titan.model_parts = torch.device("cpu"), torch.float32, [model]
    titan.autoencoder = titan.clip_encoder = titan.t5_encoder = None
    titan.parallel_dims = SimpleNamespace(dp_enabled=False, cp_enabled=False, cp=1)
    titan.config = SimpleNamespace(training=SimpleNamespace(seq_len=25))
    titan.ntokens_seen, titan.train_context, titan.loss_fn = 0, nullcontext, MSELoss(MSELoss.Config())
    titan.optimizers = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return titan


def small_titan_config(flux: Any) -> Any:
    """Its debug model with two heads of 16, for latents of 4 channels and the captions of the store."""
    hidden, patch, axes = 32, 4 * 2 * 2, (4, 6, 6)
    config = flux.flux_configs["flux-debug"]()
    sizes = {"hidden_size": hidden, "num_heads": 2, "mlp_ratio": 4.0}
    config.hidden_size, config.num_heads, config.axes_dim = hidden, 2, axes
    config.in_channels = config.out_channels = patch
    config.img_in.in_features, config.img_in.out_features = patch, hidden
    config.txt_in.in_features, config.txt_in.out_features = 32, hidden
    config.pe_config.dim, config.pe_config.axes_dim = sum(axes), axes
    for part, width in ((config.time_in_config, 256), (config.vector_in_config, 6)):
        part.in_dim = part.in_layer.in_features = width
        part.hidden_dim = part.in_layer.out_features = hidden
        part.out_layer.in_features = part.out_layer.out_features = hidden
    config.double_blocks = [flux._make_double_block_config(**sizes, qkv_bias=True)]
    config.single_blocks = [flux._make_single_block_config(**sizes)]
    last = config.final_layer_config
    last.hidden_size, last.out_channels = hidden, patch
    last.linear.in_features, last.linear.out_features = hidden, patch
    last.adaln_linear.in_features, last.adaln_linear.out_features = hidden, 2 * hidden
    return config


def test_zarr_alone_reads_what_the_store_gives(page: Any, flux_store: LatentStore) -> None:
    names = page("zarr-python alone")
    record = flux_store.record_at(3)
    assert record.key == names["record"]["key"]
    batches = make_loader(flux_store, global_batch=1)
    (latents,) = [batch.latents[0] for batch in batches if batch.records.tolist() == [3]]
    np.testing.assert_array_equal(names["latent"], latents)
    np.testing.assert_array_equal(names["embeddings"], flux_store.caption(3, text="t5"))


def assert_losses(losses: list[float], count: int) -> None:
    assert len(losses) == count
    assert np.isfinite(losses).all()
    assert all(loss > 0 for loss in losses)
