"""The rows of one image feature in one bucket: as stored, and as numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import StoreError
from ..format.row_layout import FEATURES, FLIP
from ..format.schema import FeatureSpec
from ..format.token_dtypes import StoredTokens, widen
from .sharded_array import ShardedArray


class FeatureArrays:
    """The rows of one image feature in one bucket, in the order of the latents.

    Args:
      spec: of the feature.
      folder: of the bucket within a revision.
      name: of the feature.
      open_array: returns the array at a path.
    """

    def __init__(self, spec: FeatureSpec, folder: str, name: str, open_array: Callable[[str], ShardedArray]) -> None:
        self.spec, self._folder, self._name, self._open = spec, f"{folder}/{FEATURES}/{name}", name, open_array

    @property
    def outputs(self) -> list[str]:
        """ "patches", "cls", or both."""
        return ["patches", "cls"] if self.spec.output == "both" else [self.spec.output]

    def arrays(self, output: str, *, flipped: bool = False) -> list[ShardedArray]:
        """Tokens in the dtype on disk; for int8 also the float32 scale of each.

        Args:
          output: "patches", (N, T, D) with scales (N, T); or "cls", (N, D) with scales (N,).
          flipped: of the flipped pictures.
        Raises: StoreError: the feature has no such output.
        """
        if self.spec.output not in (output, "both"):
            raise StoreError(
                f'feature \'{self._name}\': it stores no {output}. Precompute with output = "{output}" or "both".'
            )
        names = {"patches": ("patches", "patch_scales"), "cls": ("cls", "cls_scales")}[output]
        names = names if self.spec.dtype == "int8" else names[:1]
        return [self._open(f"{self._folder}/{name}{FLIP if flipped else ''}") for name in names]

    def row(self, row: int, output: str = "patches") -> np.ndarray:
        """One record's patches (T, D), or its class token (D,): stored float16, or float32 of stored int8."""
        parts = [array[row] for array in self.arrays(output)]
        if self.spec.dtype != "int8":
            return parts[0]
        tokens = widen(StoredTokens(np.atleast_2d(parts[0]), np.atleast_1d(parts[1])), "int8")
        return tokens.reshape(parts[0].shape)
