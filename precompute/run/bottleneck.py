"""The stage that limits a precompute, the rate of each stage, and advice; pure functions of measured seconds.

Decoding, encoding and writing overlap, so the run takes about as long as its slowest stage. Captions are encoded before
the images, on the same device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...units import readable_time

READ, DECODE, ENCODE, TEXT, WRITE = "read", "decode", "encode", "text", "write"
LOAD, PLAN, CHECK = "load", "plan", "check"  # before the stages; a plan includes its self-check

MIN_SHOWN_SECONDS = 0.05


@dataclass(frozen=True)
class StageTime:
    """Time of one stage.

    Args:
      name: of the stage.
      seconds: busy, summed over its threads.
      threads: of the stage; reading and decoding share theirs.
      images_per_second: rate of its threads alone; None for captions, and if it took no time.
    """

    name: str
    seconds: float
    threads: int
    images_per_second: float | None

    @property
    def busy_seconds(self) -> float:
        """Wall time with all its threads."""
        return self.seconds / self.threads


def stage_times(seconds: Mapping[str, float], num_images: int, num_decoders: int) -> list[StageTime]:
    """Time and rate of each stage, in the order of the data.

    Args:
      seconds: of each stage, summed over its threads; other keys are ignored.
      num_images: that went through all stages.
      num_decoders: images that are read and decoded concurrently; one thread encodes, and one writes.
    """
    found = []
    for name in (READ, DECODE, TEXT, ENCODE, WRITE):
        if name not in seconds:
            continue
        taken, threads = max(0.0, seconds[name]), num_decoders if name in (READ, DECODE) else 1
        rate = num_images * threads / taken if taken and name != TEXT else None
        found.append(StageTime(name, taken, threads, rate))
    return found


def before_stages(seconds: Mapping[str, float]) -> str:
    """What took time before the stages, in words.

    Args:
      seconds: as in ``stage_times``.
    """
    check = seconds.get(CHECK, 0.0)
    plan = max(0.0, seconds.get(PLAN, 0.0) - check)
    took = {"loading the encoders": seconds.get(LOAD, 0.0), "planning": plan, "self-check": check}
    return ", ".join(f"{readable_time(value)} {what}" for what, value in took.items() if value >= MIN_SHOWN_SECONDS)


def bound_by(times: list[StageTime]) -> str:
    """The slowest stage; reading and decoding, which share threads, count as one, named by the longer."""
    busy = {time.name: time.busy_seconds for time in times}
    images = busy.get(READ, 0.0) + busy.get(DECODE, 0.0)
    both = READ if busy.get(READ, 0.0) > busy.get(DECODE, 0.0) else DECODE
    totals = {both: images} | {name: busy[name] for name in (TEXT, ENCODE, WRITE) if name in busy}
    return max(totals, key=lambda name: totals[name])


def advice(times: list[StageTime], *, on_cpu: bool, codec: str) -> str:
    """How to make the run faster: one sentence, with the number it rests on.

    Args:
      codec: of the store.
    """
    bound = bound_by(times)
    found = {time.name: time for time in times}
    time = found.get(bound, StageTime(bound, 0.0, 1, None))
    rate = f"{time.images_per_second:,.1f} images/s" if time.images_per_second else readable_time(time.seconds)
    threads = f"{time.threads} thread{'s' if time.threads > 1 else ''}"
    device = "a GPU" if on_cpu else "vae.dtype 'bfloat16', a larger vae.batch_size, or another GPU"
    text_device = "a GPU" if on_cpu else "a larger text.batch_size, or another GPU"
    uncompressed = "" if codec == "none" else "set store.codec 'none', or "
    return {
        READ: f"{threads} read {rate}: put the source on a faster disk, pack it into tars, or copy it here first",
        DECODE: f"{threads} decode {rate}: give it more cores or more processes, or make the originals smaller",
        ENCODE: f"the VAE runs at {rate}: {device} would make it faster",
        TEXT: f"captions took {rate}: {text_device} would make them faster",
        WRITE: f"the disk writes {rate}: {uncompressed}put the store on a faster or a local disk",
    }[bound]
