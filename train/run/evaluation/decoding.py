"""The process that decodes the grids of a run, so that the trainer loads no decoder and does not wait for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

MODULE = "leandit.tools.sample.decode_grids"
LATENTS, PICTURE = "safetensors", "png"


def waiting(folder: Path) -> dict[int, Path]:
    """Latents of the grids that are not decoded, by step, the oldest first."""
    found = [(re.fullmatch(rf"step-(\d+)\.{LATENTS}", path.name), path) for path in folder.glob("step-*")]
    return dict(sorted((int(name[1]), path) for name, path in found if name))


class Decoding:
    """Decodes all grids of a folder, one after the other, in one process at a time.

    Args:
      folder: of the grids, ``samples`` of the run.
      warn: called once if they cannot be decoded; they stay as latents.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._failed = False
        self._pending = set(waiting(self._folder))  # steps that have not been handed on
        if self._pending:
            self.start()

    def path_of(self, step: int) -> Path:
        """Where the latents of a step belong."""
        self._pending.add(step)
        return self._folder / f"step-{step}.{LATENTS}"

    def start(self) -> None:
        """Start the process, unless it runs or has failed; it decodes what is there until nothing is left."""
        if self._failed or self._process is not None:
            return
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}  # the GPU is for training
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # an interrupt of the terminal is for the trainer
        )

    def decoded(self) -> list[tuple[int, Path]]:
        """Steps and pictures of the grids that are new since the last call."""
        if self._process is not None and self._process.poll() is not None:
            self._settle()
        done = sorted(step for step in self._pending - set(waiting(self._folder)) if self._picture(step).is_file())
        self._pending -= set(done)
        return [(step, self._picture(step)) for step in done]

    def finish(self) -> None:
        """Wait until all grids are decoded, or the process has failed."""
        while self._process is not None:
            self._process.wait()
            self._settle()

    def stop(self) -> None:
        """End the process; what it has not decoded stays."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        self._errors.close()

    def _picture(self, step: int) -> Path:
        return self._folder / f"step-{step}.{PICTURE}"

    def _settle(self) -> None:
        """After the end of the process: start another for grids that it has not seen, or warn of its error."""
        process, self._process = self._process, None
        assert process is not None
        if process.returncode:
            self._failed = True
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            why = next((line for line in reversed(lines) if line.strip()), f"it ended with {process.returncode}")
            why = why.rstrip(".")
            self._warn(
                f"the pictures of run.sample_every are not decoded: {why}. The latents stay in '{self._folder}'; "
                f"'python -m {MODULE} {self._folder} --vae PATH' decodes them"
            )
        elif waiting(self._folder):
            self.start()
