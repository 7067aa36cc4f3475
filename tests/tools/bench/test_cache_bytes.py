"""Bytes a record: ours are those of a store on disk, the peers' those that their users report, the page has both."""

from __future__ import annotations

from pathlib import Path

import pytest

from leandit.precompute.config import load
from leandit.tools.bench.encode import cache_bytes
from leandit.tools.bench.encode.cache_bytes import SETS, Encoder, ImageSet, our_bytes, render, rows_of, run
from leandit.tools.synthetic.store import make_store

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def test_the_page_has_what_the_command_prints() -> None:
    assert f"```\n{render(run(60))}\n```" in PAGE.read_text()


@pytest.mark.parametrize("padded", [False, True])
def test_our_bytes_are_those_of_a_store_on_disk(padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_bytes, "RECORDS", 9)
    encoders = (Encoder(16, 12, reads_padding=True), Encoder(8, 77, 8), Encoder(0, 77, 8))
    tiny = ImageSet("tiny", 64, 4, encoders, ())
    texts = {f"text_{i}": cache_bytes._text_spec(one, padded=padded) for i, one in enumerate(encoders)}
    make_store(tmp_path, {"64x64": 9}, channels=8, num_classes=0, token_counts=[5] * 9, text_width=4, texts=texts)
    latents = (tmp_path / "buckets/64x64").rglob("*")
    captions = (path for name in texts for path in (tmp_path / "captions" / name).rglob("*"))
    sizes = [
        sum(
            path.stat().st_size
            for path in paths
            if path.is_file() and "null" not in str(path.relative_to(tmp_path)) and path.parent.name not in parents
        )
        for paths, parents in ((latents, {"64x64"}), (captions, set(texts)))
    ]
    assert our_bytes(tiny, 5, keeps=2, padded=padded) == tuple(size // 9 for size in sizes)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("sd3-1024", "SD3"), ("flux1-1024", "Flux.1"), ("flux2-1024", "Flux.2"), ("qwen-image-1024", "Qwen-Image")],
)
def test_sets_have_the_text_of_the_shipped_recipes(recipe: str, name: str) -> None:
    shipped = load(recipe, [])
    ours = [cache_bytes._text_spec(one, padded=True) for one in next(s for s in SETS if s.name == name).encoders]
    wanted = [(s.max_tokens, s.output, s.full_length or s.output == "pooled") for s in shipped.text_sections.values()]
    assert sorted(wanted) == sorted((one.max_tokens, one.output, one.full_length) for one in ours)
    assert shipped.store.text_dtype == "int8"


def test_caches_have_the_bytes_that_their_users_report() -> None:
    sets = {one.name: one for one in SETS}
    flux2 = next(row for row in rows_of(sets["Flux.2"], 60) if row["cache"] == "diffusion-pipe")
    at_768_px = flux2["latent_bytes"] * (768 / 1024) ** 2 + flux2["text_bytes"]
    assert at_768_px * 100_000 == pytest.approx(1.69e12, rel=0.002)
    mlperf = next(row for row in rows_of(sets["Flux.1, MLPerf"], 60) if row["cache"] == "MLPerf")
    assert mlperf["latent_bytes"] + mlperf["text_bytes"] == pytest.approx(2.5e12 / 1.10e6, rel=0.05)


def test_the_text_of_mlperfs_set_is_an_eighth_in_our_form() -> None:
    def ratios(tokens: int) -> tuple[float, float]:
        row = rows_of(next(one for one in SETS if one.name == "Flux.1, MLPerf"), tokens)[-1]
        return round(row["text_of_ours"], 1), round(row["total_of_ours"], 1)

    assert {tokens: ratios(tokens) for tokens in (30, 60, 120)} == {30: (16.8, 11.4), 60: (8.5, 6.9), 120: (4.2, 3.9)}
    full = our_bytes(SETS[3], 60, keeps=2, padded=True)
    mlperf = rows_of(SETS[3], 60)[-1]
    assert round(mlperf["text_bytes"] / full[1], 1) == 2.0
    assert round((mlperf["latent_bytes"] + mlperf["text_bytes"]) / sum(full), 1) == 1.9
