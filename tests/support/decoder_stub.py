"""A decoder child that does what the name of the file tells it; all others it decodes. Only tests start it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from leandit.precompute.images import decoder_child


def answer(job: dict[str, Any]) -> decoder_child.Answer:
    """Misbehave, or decode."""
    if "places" in job:
        for path, _, _ in job["places"]:
            if Path(path).name in ("kill", "sleep", "exit"):
                misbehave(Path(path), job)
    else:
        misbehave(Path(job["path"]), job)
    return decoder_child.answer(job)


def misbehave(path: Path, job: dict[str, Any]) -> None:
    """Do what the name of a file says."""
    if path.name == "stall" and path.with_name("stalls").exists():
        time.sleep(60)  # as a network folder whose server is away
    if "places" not in job:
        job["send_event"](decoder_child.READ)  # what follows is the decoder's
    match path.name:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "sleep":
            time.sleep(60)
        case "stop":  # neither dead nor alive
            os.kill(os.getpid(), signal.SIGSTOP)
        case "nonsense":
            os.write(int(sys.argv[1]), b"\0\0\0\4oops")
        case "memory":
            np.ones(10 << 30, np.uint8)
        case "kill once":
            if not (marker := path.with_name("killed")).exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "type error":
            None[0]  # type: ignore[index]
        case "name error":
            undefined_name  # type: ignore[name-defined]  # noqa: B018, F821


read_bytes = decoder_child.read_bytes


def read_from_a_broken_disk(path: str, *how: Any, **more: Any) -> bytes:
    """Fail as often as the file "broken" beside an image "eio.png" says."""
    marker = Path(path).with_name("broken")
    if Path(path).name == "eio.png" and marker.exists() and (left := int(marker.read_text())):
        marker.write_text(str(left - 1))
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read_bytes(path, *how, **more)


decoder_child.read_bytes = read_from_a_broken_disk

if __name__ == "__main__":
    time.sleep(float(os.environ.get("STUB_START_SECONDS", "0")))
    decoder_child.main(answer)
