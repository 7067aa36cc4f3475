"""The report of ``leandit bench precompute``: ratios of rates of the same round, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from ...terminal.text import aligned
from ..harness.rounds import ratios

MIB = 2**20


def ratios_of(figures: Mapping[str, Any], *, on_cpu: bool) -> dict[str, list[float]]:
    """Every ratio in each round, by what it compares.

    Args:
      figures: "rates" of each cell in each round, "encode_share" of each precompute; "memory_mb" and "captions" where
        they were measured.
      on_cpu: decoding and encoding share the cores.
    """
    rates = figures["rates"]
    encoder, decode, ours = rates["bare encoder"], rates["bare decode"], rates["leandit"]
    compared = {
        "end to end, of the bare encoder": ratios(ours, encoder),
        "end to end, of the slower of encoder and decode": ratios(ours, list(map(min, encoder, decode))),
        "time in which the encode stage is busy, of end to end": figures["encode_share"],
    }
    if on_cpu:  # the cores do both, so a picture takes the time of both
        both = [1 / (1 / e + 1 / d) for e, d in zip(encoder, decode, strict=True)]
        compared["end to end, of what these cores do of both"] = ratios(ours, both)
    for peer in ("fast-DiT", "PixArt"):
        if peer in rates:
            compared[f"images/s, of {peer}'s loop"] = ratios(ours, rates[peer])
    if captions := figures.get("captions"):
        compared["captions/s, of PixArt's loop"] = ratios(rates["leandit captions"], rates["PixArt captions"])
        for dtype in [name for name in ("float16", "int8") if name in captions]:
            name = f"bytes a caption, padded to 300 in float16 (computed), of ours in {dtype} (on disk)"
            compared[name] = [captions["padded"] / captions[dtype]]
        compared["padding computed, of all tokens"] = [captions["padding_share"]]
    if memory := figures.get("memory_mb"):
        compared["host memory beyond the running encoder, MiB"] = [(memory["run"] - memory["encoder"]) * 1e6 / MIB]
    return compared


def bottleneck(rates: Mapping[str, list[float]], *, on_cpu: bool) -> str:
    """What limits a precompute besides its encoder; empty if nothing does."""
    encoder, decode = median(rates["bare encoder"]), median(rates["bare decode"])
    if decode <= encoder:
        return f"decoding cannot keep up: {decode:.1f} images/s, the encoder does {encoder:.1f}"
    return "decoding and encoding share the cores" if on_cpu else ""


def render(result: Mapping[str, Any]) -> str:
    """The rates, and the table of ratios."""
    machine = result["hardware"]
    head = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"device {machine['device']}; {result['date']}",
        f"{result['records']} pictures in {', '.join(result['buckets'])}, VAE {result['vae']}, text {result['text']}; "
        f"medians of {result['rounds']} rounds",
    ]
    rates = [("a second", "median", "range"), *(_row(name, values, ".2f") for name, values in result["rates"].items())]
    rows = [("ratio", "median", "range"), *(_row(name, values, ".3g") for name, values in result["ratios"].items())]
    notes = [note] if (note := bottleneck(result["rates"], on_cpu=machine["device"] == "cpu")) else []
    return "\n\n".join("\n".join(lines) for lines in (head, aligned(rates), aligned(rows), notes) if lines)


def _row(name: str, values: list[float], form: str) -> tuple[str, str, str]:
    spread = f"{min(values):{form}}..{max(values):{form}}" if len(values) > 1 else ""
    return name, f"{median(values):{form}}", spread
