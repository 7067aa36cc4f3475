"""Terms that recipes add to the plain loss. Pure functions; the sign is that of a loss.

Shapes: B images of a microbatch, T tokens, E model width, D width of a feature. What compares images compares those of
one microbatch, so such a term depends on ``run.microbatch`` and on the number of ranks.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def direction_error(velocity: Tensor, target: Tensor) -> Tensor:
    """1 - cosine between the channels of velocity and target, the mean over the places.

    Args:
      velocity, target: (B, C, H, W).
    Returns: (B,).
    Source: Yao et al. 2024 (FasterDiT), section 3.3; Yao and Wang 2025 (LightningDiT), section 4.
    """
    return (1 - F.cosine_similarity(velocity, target, dim=1)).flatten(1).mean(1)


def contrast(velocity: Tensor, target: Tensor) -> Tensor:
    """Minus the squared error to the target of the next image of the microbatch; zero for an image alone.

    Args:
      velocity, target: (B, C, H, W).
    Returns: (B,).
    Source: Stoica et al. 2025 (contrastive flow matching), equation 4.
    """
    if len(velocity) == 1:
        return velocity.new_zeros(1)
    return -(velocity - target.roll(1, 0)).square().flatten(1).mean(1)


def dispersion(tokens: Tensor, temperature: float) -> Tensor:
    """Logarithm of the mean similarity of all pairs of images, each with itself too: exp(-distance / temperature).

    The squared distance is divided by the number of entries, and temperature 1 is the published code, which has none.

    Args:
      tokens: (B, T, E) output of a block.
    Returns: (B,), the same value for each image.
    Source: Wang and He 2025 (dispersive loss), equation 6.
    """
    flat = tokens.float().flatten(1)
    flat = flat - flat.mean(0)  # no distance changes, but what all images share no longer rounds them away
    squares = flat.square().sum(1)
    distance = (squares[:, None] + squares[None] - 2 * flat @ flat.T).clamp_min(0) / flat.shape[1]
    similarity = (-distance / temperature).exp().mean()
    return similarity.log().expand(len(flat))


def misalignment(projected: Tensor, feature: Tensor) -> Tensor:
    """1 - cosine between projected tokens and those of an image feature, the mean over the tokens.

    Args:
      projected, feature: (B, T, D).
    Returns: (B,).
    Source: Yu et al. 2024 (REPA), equation 8.
    """
    return (1 - F.cosine_similarity(projected.float(), feature.float(), dim=2)).mean(1)


def resampled(feature: Tensor, grid: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Tokens (B, T, D) of a grid of patches as those of another grid, bilinear; unchanged if they are the same."""
    if grid == wanted:
        return feature
    picture = feature.float().mT.unflatten(2, grid)
    return F.interpolate(picture, wanted, mode="bilinear", antialias=True).flatten(2).mT
