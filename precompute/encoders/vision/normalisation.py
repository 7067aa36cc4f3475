"""The pixels that a vision model was trained with: mean and standard deviation of its preprocessor."""

from __future__ import annotations

import math
import sys
from typing import Any

from ....datasets.errors import EncoderError

PREPROCESSOR = "preprocessor_config.json"
GREY_LEVELS = 255


def normalisation(preprocessor: dict[str, Any], where: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, for pixels from 0 to 1.

    Args:
      preprocessor: of its preprocessor_config.json.
    Raises: EncoderError: absent, or pixels have another range.
    """
    numbers = []
    for key in ("image_mean", "image_std"):
        values = preprocessor.get(key)
        if not isinstance(values, list) or len(values) != 3 or not all(map(_is_finite, values)):
            raise EncoderError(
                f"{where}: '{key}' of its {PREPROCESSOR} is {str(values)[:80]}, needed three numbers: the ones that it "
                "was trained with."
            )
        numbers.append([float(value) for value in values])
    if min(numbers[1]) <= 0:
        raise EncoderError(f"{where}: 'image_std' of its {PREPROCESSOR} is {numbers[1]}, needed numbers above 0.")
    factor = preprocessor.get("rescale_factor", 1 / GREY_LEVELS)
    if not _is_finite(factor) or not math.isclose(factor, 1 / GREY_LEVELS, rel_tol=1e-3):
        raise EncoderError(
            f"{where}: 'rescale_factor' of its {PREPROCESSOR} is {str(factor)[:80]}, needed 1/255. Models of pixels in "
            "another range are not supported."
        )
    if off := [key for key in ("do_rescale", "do_normalize") if preprocessor.get(key, True) is not True]:
        raise EncoderError(f"{where}: '{off[0]}' of its {PREPROCESSOR} is not true, needed a model of such pixels.")
    return numbers[0], numbers[1]


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # an int may be larger than any float
