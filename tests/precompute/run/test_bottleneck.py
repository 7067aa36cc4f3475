"""The verdict over a precompute: which stage bounds it, and what to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from making import caption_recipe, encode
from PIL import Image

from leandit.precompute.run import bottleneck
from leandit.precompute.run.bottleneck import Workers, advice, before_stages, bound_by, stage_times
from leandit.tools.terminal.outcome import NOTHING_TO_DO, precompute_rows

WORKERS = Workers("cpu", 1, 4)


@pytest.mark.parametrize(
    ("seconds", "bound", "words"),
    [
        ({"read": 1, "decode": 90, "encode": 20, "write": 1}, "decode", ["4 threads decode 44.4 images/s", "cores"]),
        ({"read": 90, "decode": 1, "encode": 20, "write": 1}, "read", ["4 threads read 44.4 images/s", "disk"]),
        ({"read": 1, "decode": 40, "encode": 20, "write": 1}, "encode", ["50.0 images/s", "GPU"]),
        ({"read": 1, "decode": 40, "encode": 20, "write": 50}, "write", ["20.0 images/s", "store.codec"]),
        ({"read": 1, "decode": 40, "encode": 20, "write": 1, "text": 99}, "text", ["1 min 39 s"]),
    ],
)
def test_the_stage_that_is_busy_longest_bounds_the_run(seconds: dict[str, float], bound: str, words: list[str]) -> None:
    times = stage_times(seconds | {"plan": 500.0, "wait_decode": 100.0}, 1000, WORKERS)
    assert bound_by(times) == bound
    for on_cpu in (True, False):
        said = advice(times, on_cpu=on_cpu, codec="zstd")
        assert [word for word in words if word not in said] == []


def test_what_comes_before_the_stages_is_told_apart_and_for_several_processes_once() -> None:
    seconds = {"load": 4.0, "plan": 9.0, "check": 2.0, "encode": 5.0}
    assert before_stages(seconds, WORKERS) == "4.0 s loading the encoders, 7.0 s planning, 2.0 s self-check"
    two = Workers("cpu", 2, 4)
    assert before_stages(seconds, two) == "2.0 s loading the encoders, 2.5 s planning, 2.0 s self-check"
    assert before_stages({"encode": 5.0}, WORKERS) == ""


def test_a_codec_that_is_none_is_not_advised() -> None:
    times = stage_times({"decode": 4, "write": 50}, 1000, WORKERS)
    said = [advice(times, on_cpu=True, codec=codec) for codec in ("none", "zstd")]
    assert ["set store.codec 'none'" in words for words in said] == [False, True]
    assert ["put the store on a faster or a local disk" in words for words in said] == [True, True]


def test_a_run_that_encodes_captions_alone_or_only_rejects_does_not_say_that_all_was_there(
    caption_folder: Path, tmp_path: Path
) -> None:
    source, lines = Path(shutil.copytree(caption_folder, tmp_path / "source")), caption_folder / "metadata.jsonl"

    def said() -> tuple[str, str]:
        report = encode(caption_recipe(), source, tmp_path / "store")
        rows = precompute_rows(report, tmp_path / "store")
        assert report.num_encoded == 0
        return rows[-1]

    def write(old: str, new: str, more: str = "") -> None:
        (source / "metadata.jsonl").write_text(lines.read_text().replace(old, new) + more)

    encode(caption_recipe(), source, tmp_path / "store")
    assert said() == ("this run", NOTHING_TO_DO)
    write("circle", "ring")
    assert said() == ("this run", "no image was encoded")
    write("circle", "ring", '{"file_name": "images/none.png", "captions": ["a red ring"]}\n')
    assert said() == ("this run", "no image was encoded")
    assert said() == ("this run", NOTHING_TO_DO)


def test_a_run_tells_reading_from_decoding_and_what_to_change(
    caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bottleneck, "MIN_SHOWN_SECONDS", 0.0)
    stages, source = set[str](), shutil.copytree(caption_folder, tmp_path / "source")
    for path in source.rglob("*.png"):  # large enough that decoding takes clearly longer than reading
        image = Image.open(path)
        image.resize((12 * image.width, 12 * image.height)).save(path)
    report = encode(caption_recipe(), source, tmp_path / "store", progress=lambda stage, *_: stages.add(stage))
    times = {time.name: time for time in report.times}
    assert list(times) == ["read", "decode", "text", "encode", "write"]
    assert 0 < times["read"].seconds < times["decode"].seconds
    assert times["decode"].threads == report.workers.num_decoders
    rows = precompute_rows(report, tmp_path / "store")
    assert [row[1].split()[0] for row in rows if not row[0]] == list(times)
    said = dict(rows)["startup"]
    assert [words in said for words in ("s loading the encoders", "s planning", "overlap")] == [True] * 3
    assert {"captions", "images"} <= stages
    assert rows[-1][0] == "bound by"
    assert rows[-1][1].startswith(bound_by(report.times))
