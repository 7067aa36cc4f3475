"""The process that decodes the grids of a run, so that the trainer loads no decoder and does not wait for one.

The grid of a step is ``samples/step-<step>.safetensors`` until it is decoded, then ``samples/step-<step>.png``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODULE = "leandit.tools.sample.decode_grids"
LATENTS, IMAGE = "safetensors", "png"


def grid_files(folder: Path, suffix: str) -> dict[int, Path]:
    """The grids of a folder by step, the oldest first: ``LATENTS``, which are not decoded yet, or ``IMAGE``."""
    matches = [(re.fullmatch(rf"step-(\d+)\.{suffix}", path.name), path) for path in folder.glob("step-*")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


class Decoding:
    """Decodes all grids of a folder, one after the other, in one process at a time.

    Args:
      folder: of the grids, ``samples`` of the run.
      warn: called once if they cannot be decoded; they stay as latents.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._failed = False
        self._pending = set(grid_files(folder, LATENTS))  # steps whose images have not been returned
        if self._pending:
            self.start()

    def path_of(self, step: int) -> Path:
        """Where the latents of a step belong."""
        self._pending.add(step)
        return self._folder / f"step-{step}.{LATENTS}"

    def start(self) -> None:
        """Start the process, unless it runs or has failed; it decodes until no latents are left."""
        if self._failed or self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},  # the GPU is for training
            start_new_session=True,  # an interrupt of the terminal is for the trainer
        )

    def decoded(self, *, wait: bool = False) -> list[tuple[int, Path]]:
        """Steps and images of the grids that are new since the last call.

        Args:
          wait: until all grids are decoded, or the process has failed.
        """
        while self._process is not None and (wait or self._process.poll() is not None):
            if code := self._process.wait():
                self._fail(code)
            self._process = None
            if grid_files(self._folder, LATENTS):  # which it has not seen
                self.start()
        latents = grid_files(self._folder, LATENTS)
        images = grid_files(self._folder, IMAGE).items()
        new = [(step, path) for step, path in images if step in self._pending and step not in latents]
        self._pending -= {step for step, _ in new}
        return new

    def stop(self) -> None:
        """End the process; what it has not decoded stays."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        self._errors.close()

    def _fail(self, code: int) -> None:
        self._failed = True
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        why = next((line for line in reversed(lines) if line.strip()), f"it exited with {code}").rstrip(".")
        self._warn(
            f"the images of run.sample_every are not decoded: {why}. The latents are kept in '{self._folder}'; "
            f"'python -m {MODULE} {self._folder} --vae PATH' decodes them"
        )
