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
            if Path(path).name in ("EIO once.png", "EIO always.png"):
                fail_to_open(Path(path), once=Path(path).name == "EIO once.png")
            if Path(path).name in ("kill", "sleep", "exit"):
                answer({**job, "path": path})
        return decoder_child.answer(job)
    match Path(job["path"]).name:
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
            if not (marker := Path(job["path"]).with_name("killed")).exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "EIO once.png" | "EIO always.png" as name:
            fail_to_open(Path(job["path"]), once=name == "EIO once.png")
        case "name error":
            undefined_name  # type: ignore[name-defined]  # noqa: B018, F821
        case "environment":
            raise AssertionError(f"{os.environ['OMP_NUM_THREADS']} fds={sorted(os.listdir('/proc/self/fd'))}")
    return decoder_child.answer(job)


def fail_to_open(failing: Path, *, once: bool) -> None:
    """Let the disk fail when a file is opened."""
    real = os.open

    def fail(path: str, *args: Any, **options: Any) -> int:
        if path != str(failing):
            return real(path, *args, **options)
        if once:
            os.open = real
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    os.open = fail


if __name__ == "__main__":
    decoder_child.main(answer)
