"""A key of a recipe that has no effect is refused where the command sets it, and announced where a file does."""

from __future__ import annotations

from pathlib import Path

import pytest
from features import MAKERS
from making import Leandit

from leandit.datasets.store import LatentStore
from leandit.precompute import config as precompute_config
from leandit.precompute.effects import CONDITIONS as PRECOMPUTE
from leandit.precompute.importing.recipe import KIND_KEYS
from leandit.recipe import shipped_recipes
from leandit.tools.cli.recipe_keys import recipe_keys
from leandit.train import config as train_config
from leandit.train.effects import CONDITIONS as TRAIN

LABELS, CAPTIONS = "dit-s-2-256", "pixart-sigma-256"
NO_EFFECT: list[tuple[str, str, str, str]] = [  # command, recipe, override, what the key needs
    ("train", LABELS, "lora.frozen=bf16", "lora.rank"),
    ("train", LABELS, "objective.time=uniform", "flow"),
    ("train", LABELS, "objective.time_mean=0.5", "flow"),
    ("train", "sit-xl-2-256", "objective.time_mean=0.5", "logit_normal"),
    ("train", "sit-xl-2-256", "objective.time_std=2.0", "logit_normal"),
    ("train", LABELS, "objective.shift=3.0", "flow"),
    ("train", "sit-xl-2-256-irepa", "align.dinov2.projector_width=512", "mlp"),
    ("train", LABELS, "self_align.block=2", "self_align.weight"),
    ("train", LABELS, "self_align.teacher_block=7", "self_align.weight"),
    ("train", LABELS, "self_align.less_time=0.1", "self_align.weight"),
    ("train", LABELS, "self_align.stop_step=100", "self_align.weight"),
    ("train", LABELS, "self_align.projector_width=512", "self_align.weight"),
    ("train", LABELS, "routing.share=0.25", "routing.kind"),
    ("train", LABELS, "routing.first_block=2", "routing.kind"),
    ("train", LABELS, "routing.last_block=9", "routing.kind"),
    ("train", LABELS, "routing.stop_step=100", "routing.kind"),
    ("train", LABELS, "routing.path_drop=0.1", "sprint"),
    ("train", CAPTIONS, "optimizer.eps=1e-6", "came"),
    ("train", LABELS, "optimizer.momentum=0.9", "muon"),
    ("train", LABELS, "optimizer.decay_all=false", "weight_decay"),
    ("train", LABELS, "schedule.final_lr_share=0.1", "schedule.kind"),
    ("train", LABELS, "ema.lengths=[0.1]", "power"),
    ("train", LABELS, "ema.keep_every=100", "power"),
    ("train", LABELS, "data.score_column=aesthetic", "scores"),
    ("train", LABELS, "data.score_key=name", "scores"),
    ("train", CAPTIONS, "data.min_caption_score=25.0", "caption_scores"),
    ("train", CAPTIONS, "data.caption_temperature=0.1", "caption_scores"),
    ("train", LABELS, "data.caption_scores=scores.parquet", "captions"),
    ("train", LABELS, "data.original_share=0.5", "captions"),
    ("train", LABELS, "run.evaluate_every=500", "data.holdout"),
    ("train", LABELS, "run.evaluate_images=8", "data.holdout"),
    ("train", LABELS, "run.evaluate_times=mlperf", "data.holdout"),
    ("train", CAPTIONS, 'run.sample_captions=["a cat"]', "run.sample_every"),
    ("train", LABELS, "run.sample_count=4", "run.sample_every"),
    ("train", LABELS, "run.sample_steps=50", "run.sample_every"),
    ("train", LABELS, "run.sample_guidance=2.0", "run.sample_every"),
    ("train", LABELS, "parallel.shard=gradient", "fsdp"),
    ("train", LABELS, "parallel.replicas=2", "hsdp"),
    ("precompute", "imagenet-256", "source.caption=title", "text encoder"),
    ("precompute", "imagenet-256", "source.text_file=whole", "text encoder"),
    ("precompute", "imagenet-256", "source.missing_caption=null", "text encoder"),
    ("precompute", "imagenet-256", "images.step_px=16", "area"),
    ("precompute", "imagenet-256", "images.max_ratio=2.0", "several buckets"),
    ("precompute", "imagenet-256", "images.variant_zoom=1.5", "images.variants"),
    ("precompute", "imagenet-256", "store.text_dtype=int8", "text encoder"),
    ("precompute", "imagenet-256", "store.min_text_cosine=0.5", "float32"),
    ("precompute", "imagenet-256", "store.on_low_quality=reject", "store.min_text_cosine"),
    ("precompute", "imagenet-256", "text.max_tokens=77", "text.kind"),
]


@pytest.mark.parametrize(("command", "recipe", "override", "need"), NO_EFFECT, ids=lambda value: str(value)[:40])
def test_an_override_without_effect_is_refused_with_what_it_needs(
    command: str, recipe: str, override: str, need: str, leandit: Leandit
) -> None:
    ended = leandit(command, recipe, "--dry-run", "--device", "cpu", "--set", override)
    key = override.partition("=")[0]
    assert ended.code == 2
    assert f"{key} has no effect" in ended.err
    assert need in ended.err
    assert len(ended.err.strip().split("\n")) == 1


ANNOUNCED: dict[str, tuple[str, str]] = {  # what a recipe file says, by command and the key that it names in vain
    "run.ema_decay": ("train", '[ema]\nkind = "power"\n[run]\nema_decay = 0.9'),
    "ema.warmup": ("train", '[ema]\nkind = "power"\nwarmup = false'),
    "model.num_classes": ("train", 'num_classes = 10\n[conditioning]\nkind = "caption"'),
    "run.residual": ("train", '[run]\nprecision = "fp32"\nresidual = "bf16"'),
    "run.sample_count": (
        "train",
        '[conditioning]\nkind = "caption"\n[run]\nsample_every = 9\nsample_count = 3\nsample_captions = ["a cat"]',
    ),
    "vae.revision": ("precompute", 'revision = "abc"'),
    "text.revision": ("precompute", '[text]\nkind = "t5"\nmodel = "shipped:t5"\nrevision = "abc"'),
    "objective.dispersive_block": ("train", "[objective]\ndispersive_block = 3"),
    "objective.dispersive_temperature": ("train", "[objective]\ndispersive_temperature = 0.5"),
    "optimizer.betas": ("train", "[optimizer]\nbetas = [0.9, 0.95, 0.99]"),
    "optimizer.momentum": ("train", "[optimizer]\nmomentum = 0.9"),
    "run.global_batch": ("train", "[data]\nbatch_tokens = 4096\n[run]\nglobal_batch = 64"),
    "data.mixture.0.score_column": ("train", '[[data.mixture]]\nstore = "STORE"\nscore_column = "x"'),
    "images.variant_zoom": ("precompute", "[images]\nvariant_zoom = 1.5"),
}


@pytest.mark.parametrize("key", ANNOUNCED)
def test_a_key_without_effect_in_a_recipe_file_is_announced(
    key: str, label_store: LatentStore, leandit: Leandit, tmp_path: Path
) -> None:
    command, text = ANNOUNCED[key]
    model = '[model]\nname = "DiT-S/2"\n' if command == "train" else '[vae]\nmodel = "shipped:vae"\n'
    (tmp_path / "recipe.toml").write_text(model + text.replace("STORE", str(label_store.path)))
    ended = leandit(command, tmp_path / "recipe.toml", "--dry-run", "--device", "cpu")
    assert ended.code == 0
    assert f"{key} has no effect" in ended.out + ended.err


def test_every_key_of_the_shipped_recipes_has_an_effect() -> None:
    for name in shipped_recipes(train_config.PACKAGE):
        assert train_config.notes(train_config.load(name, [])) == [], name
    for name in shipped_recipes(precompute_config.PACKAGE):
        assert precompute_config.notes(precompute_config.load(name, [])) == [], name


def test_an_override_that_turns_a_feature_off_leaves_its_keys_in_the_recipe(leandit: Leandit, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[model]\nname = "DiT-S/2"\n[run]\nsample_every = 10\nsample_steps = 5')
    ended = leandit("train", tmp_path / "recipe.toml", "--dry-run", "--device", "cpu", "--set", "run.sample_every=0")
    assert ended.code == 0
    assert "run.sample_steps has no effect: it needs run.sample_every above 0" in ended.out


def test_a_command_that_turns_a_feature_off_may_set_its_keys(leandit: Leandit) -> None:
    words = ["--set", "run.sample_every=0", "--set", "run.sample_steps=5"]
    ended = leandit("train", LABELS, "--dry-run", "--device", "cpu", *words)
    assert ended.code == 0
    assert "run.sample_steps has no effect: it needs run.sample_every above 0" in ended.out


def test_a_section_of_text_without_a_kind_is_refused(leandit: Leandit, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[vae]\nmodel = "shipped:vae"\n[text]\nmodel = "shipped:t5"')
    ended = leandit("precompute", tmp_path / "recipe.toml", "--dry-run")
    assert ended.code == 2
    assert "[text] has keys but no kind" in ended.err


# Keys that every recipe reads, or whose own checks refuse them where they have no effect.
ALWAYS_READ = {
    "train": """
model.name init_from channels guidance reference qk_norm norm mlp positions time value_residual
lora.rank alpha targets
objective.kind predict variance min_snr_gamma cosine_weight contrastive_weight dispersive_weight
conditioning.kind texts drop
latent.normalise
align.NAME.stop_step block weight class_weight projector spatial_norm
self_align.weight
routing.kind
optimizer.name lr lr_base_batch weight_decay
schedule.kind warmup_steps
ema.kind
data.labels min_aspect max_aspect scores min_score leftovers window_shards check access batch_tokens
data.holdout mixture
data.mixture.store weight revision
run.steps microbatch seed precision fp8 compile activation_checkpointing grad_clip checkpoint_every keep_checkpoints
run.keep_every async_checkpoint prefetch remote_gib remote_folder log_every sample_every wandb revision
run.skip_nonfinite allow_incomplete sample_shift
parallel.strategy cpu_offload deepspeed_config
""",
    "precompute": """
source.kind image label root split labels class_names sizes check max_reject_share max_rejects_in_a_row
images.resolution crop buckets min_px variants max_megapixels color
vae.model subfolder revision dtype keep flip batch_size tile_px min_psnr
text.kind model subfolder revision tokenizer_subfolder max_tokens dtype batch_size instruction output full_length
text.attend_padding padding_side layers template drop_prefix_tokens
captions.sample
features.NAME.model subfolder revision output layer resolution encoder_dtype dtype
companions.NAME.column kind
store.dtype shard_mib codec
""",
    "import": """
source.num_classes max_reject_share max_rejects_in_a_row
vae.model subfolder downscale shift scale multiplier pixels
text.model
store.dtype text_dtype shard_mib codec
""",
}


@pytest.mark.parametrize("stage", ALWAYS_READ)
def test_every_key_is_always_read_or_has_a_condition(stage: str) -> None:
    always = {
        f"{line.split()[0].rpartition('.')[0]}.{name.rpartition('.')[2]}"
        for line in ALWAYS_READ[stage].strip().split("\n")
        for name in line.split()
    }
    conditions = {"train": TRAIN, "precompute": PRECOMPUTE, "import": []}[stage]
    conditional = {condition.key for condition in conditions} | (set(KIND_KEYS) if stage == "import" else set())
    keys = {key.name for key in recipe_keys(stage)}
    assert always & conditional == set()
    assert keys - conditional == always
    tested = {override.partition("=")[0].replace("dinov2", "NAME") for _, _, override, _ in NO_EFFECT} | {*ANNOUNCED}
    of_stores = ("data.mixture.",)  # the same keys as those of [data]
    if stage != "import":
        assert {key for key in conditional if not key.startswith(of_stores)} <= tested


@pytest.mark.parametrize(
    ("kind", "override"),
    [
        *(("fast-dit", f"{key}=x") for key in ("layout.latents", "layout.captions", "layout.text", "layout.label")),
        *(("pixart", f"{key}=x") for key in ("layout.text", "layout.label", "layout.mask")),
        ("edm2", "layout.dtype=float32"),
        ("mar", "layout.channels=8"),
        ("nemo", "layout.width=8"),
        ("mds", "text.check=mask"),
        ("lightningdit", "text.model=google/t5-v1_1-xxl"),
        ("mar", "store.text_dtype=int8"),
        ("pixart", "source.num_classes=10"),
    ],
)
def test_a_setting_that_an_import_does_not_read_is_refused(
    kind: str, override: str, leandit: Leandit, tmp_path: Path
) -> None:
    made = MAKERS[kind](tmp_path / "features")
    words = ["--source", made.source, "--store", tmp_path / "store", "--set", override]
    ended = leandit("import", kind, *words)
    assert ended.code == 2
    assert f"{override.partition('=')[0]} has no effect" in ended.err
    assert not (tmp_path / "store").exists()


def test_a_null_caption_for_features_without_captions_is_refused(leandit: Leandit, tmp_path: Path) -> None:
    made = MAKERS["mar"](tmp_path / "features")
    ended = leandit("import", "mar", "--source", made.source, "--store", tmp_path / "store", "--null", "zeros")
    assert ended.code == 2
    assert "--null 'zeros' has no effect" in ended.err
