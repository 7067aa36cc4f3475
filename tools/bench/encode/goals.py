"""What ``leandit bench precompute`` found beside its goals: ratios of the same round, and the table for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ...terminal.text import aligned

MIB = 2**20
Goal = dict[str, Any]


def goals_of(figures: Mapping[str, Any], *, on_cpu: bool) -> list[Goal]:
    """Every goal with what was measured, and whether it is met.

    Args:
      figures: "rates" of each cell in each round, "encode_share" of each precompute, "memory_mb", and "captions" where
        they were measured.
      on_cpu: decoding and encoding share the cores.
    """
    rates = figures["rates"]
    encoder, decode, ours = rates["bare encoder"], rates["bare decode"], rates["leandit"]
    # Where the cores do both, a picture takes the time of both; else the slower one sets the pace.
    together = [1 / (1 / e + 1 / d) if on_cpu else min(e, d) for e, d in zip(encoder, decode, strict=True)]
    slower = [min(e, d) for e, d in zip(encoder, decode, strict=True)]
    goals = [
        _ratio("end to end, of the bare encoder", ours, encoder, 0.95, note=_keeps_up(encoder, decode, on_cpu)),
        _ratio("end to end, of the slower of encoder and decode", ours, slower, 0.95),
    ]
    whole = [1.0] * len(figures["encode_share"])
    goals.append(_ratio("time in which the encode stage is busy, of end to end", figures["encode_share"], whole, 0.95))
    if on_cpu:
        goals.append(_ratio("end to end, of what these cores do of both", ours, together, 0.95))
    for peer in ("fast-DiT", "PixArt"):
        if peer in rates:
            goals.append(_ratio(f"images/s, of {peer}'s loop", ours, rates[peer], 5))
    if captions := figures.get("captions"):
        goals.append(_ratio("captions/s, of PixArt's loop", rates["leandit captions"], rates["PixArt captions"], 4))
        for dtype, least in (("float16", 5), ("int8", 10)):
            name = f"bytes a caption, padded to 300 in float16 (computed), of ours in {dtype} (on disk)"
            goals.append(_ratio(name, [captions["padded"]], [captions[dtype]], least))
        goals.append(_most("padding computed, of all tokens", captions["padding_share"], 0.02, "{:.1%}"))
    memory = figures["memory_mb"]
    beyond = (memory["run"] - memory["encoder"]) * 1e6 / MIB
    goals.append(_most("host memory beyond the running encoder, MiB", beyond, 1024, "{:.0f}"))
    return goals


def decode_keeps_up(encoder: Sequence[float], decode: Sequence[float]) -> bool:
    """Decoding alone is faster than the encoder alone."""
    return median(decode) > median(encoder)


def _keeps_up(encoder: Sequence[float], decode: Sequence[float], on_cpu: bool) -> str:
    if not decode_keeps_up(encoder, decode):
        return f"decoding cannot keep up: {median(decode):.1f} images/s, the encoder does {median(encoder):.1f}"
    return "decoding and encoding share the cores" if on_cpu else ""


def _ratio(name: str, of: Sequence[float], to: Sequence[float], least: float, note: str = "") -> Goal:
    """Median and range of the ratios of each round, and whether it is enough."""
    ratios = [a / b for a, b in zip(of, to, strict=True)]
    found, many = median(ratios), least >= 1
    form = "{:.2f}x" if many else "{:.3f}"
    spread = f"{form.format(min(ratios))}..{form.format(max(ratios))}" if len(ratios) > 1 else ""
    return {
        "what": name,
        "goal": f"at least {least:g}{'x' if many else ''}",
        "measured": found,
        "shown": form.format(found),
        "range": spread,
        "met": found >= least,
        "note": note,
    }


def _most(name: str, found: float, most: float, form: str) -> Goal:
    goal = f"at most {form.format(most)}"
    return {
        "what": name,
        "goal": goal,
        "measured": found,
        "shown": form.format(found),
        "range": "",
        "met": found <= most,
        "note": "",
    }


def render(result: Mapping[str, Any]) -> str:
    """The rates, and the table of goals."""
    machine = result["hardware"]
    head = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"device {machine['device']}; {result['date']}",
        f"{result['records']} pictures in {', '.join(result['buckets'])}, VAE {result['vae']}, text {result['text']}; "
        f"medians of {result['rounds']} rounds",
    ]
    rates = [("a second", "median", "range")] + [
        (name, f"{median(values):.2f}", f"{min(values):.2f}..{max(values):.2f}")
        for name, values in result["rates"].items()
    ]
    goals = [("goal", "measured", "range", "needed", "")] + [
        (goal["what"], goal["shown"], goal["range"], goal["goal"], "met" if goal["met"] else "missed")
        for goal in result["goals"]
    ]
    notes = [f"{goal['what']}: {goal['note']}" for goal in result["goals"] if goal["note"]]
    return "\n\n".join("\n".join(lines) for lines in (head, aligned(rates), aligned(goals), notes) if lines)
