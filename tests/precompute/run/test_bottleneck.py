"""The verdict over a precompute: which stage bounds it, and what to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from making import caption_recipe, encode

from leandit.precompute.run import bottleneck
from leandit.precompute.run.bottleneck import advice, bound_by, stage_times
from leandit.tools.terminal.outcome import NOTHING_TO_DO, precompute_rows


@pytest.mark.parametrize(
    ("seconds", "bound", "words"),
    [
        ({"decode": 90}, "decode", ["4 threads decode 44.4 images/s", "cores"]),
        ({"read": 90}, "read", ["4 threads read 44.4 images/s", "disk"]),
        ({}, "encode", ["50.0 images/s", "GPU"]),
        ({"write": 50}, "write", ["20.0 images/s", "store.codec"]),
        ({"text": 99}, "text", ["1 min 39 s"]),
    ],
)
def test_the_stage_that_is_busy_longest_bounds_the_run(seconds: dict[str, float], bound: str, words: list[str]) -> None:
    every = {"read": 1, "decode": 40, "encode": 20, "write": 1, "plan": 500.0, "wait_decode": 100.0} | seconds
    times = stage_times(every, 1000, 4)
    assert bound_by(times) == bound
    for on_cpu in (True, False):
        said = advice(times, on_cpu=on_cpu, codec="blosc")
        assert [word for word in words if word not in said] == []
    assert "set store.codec 'none'" not in advice(times, on_cpu=True, codec="none")


def test_a_run_tells_what_bounds_it_and_one_without_images_does_not_say_that_all_was_there(
    caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bottleneck, "MIN_SHOWN_SECONDS", 0.0)
    source, store = Path(shutil.copytree(caption_folder, tmp_path / "source")), tmp_path / "store"
    report = encode(caption_recipe(), source, store)
    times = {time.name: time for time in report.times}
    assert list(times) == ["read", "decode", "text", "encode", "write"]
    assert times["decode"].threads == report.num_decoders
    rows = precompute_rows(report, store)
    assert [row[1].split()[0] for row in rows if not row[0]] == list(times)
    assert [words in dict(rows)["startup"] for words in ("s loading the encoders", "s planning", "overlap")] == [
        True
    ] * 3
    assert rows[-1][0] == "bound by"
    assert rows[-1][1].startswith(bound_by(report.times))

    monkeypatch.undo()
    text, none = (source / "metadata.jsonl").read_text(), '{"file_name": "none.png", "captions": ["a red ring"]}\n'
    for content, said in (
        (text, NOTHING_TO_DO),
        (text.replace("circle", "ring"), "no image was encoded"),
        (text.replace("circle", "ring") + none, "no image was encoded"),
        (text.replace("circle", "ring") + none, NOTHING_TO_DO),
    ):
        (source / "metadata.jsonl").write_text(content)
        assert precompute_rows(encode(caption_recipe(), source, store), store)[-1] == ("this run", said)
