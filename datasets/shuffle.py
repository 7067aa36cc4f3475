"""Keyed permutations and keyed choices, each computed for the indices that are asked for; no array of N is held.

Everything here is a pure function of integers. Seed, epoch, bucket and purpose go into a key, so that any part of any
epoch's order is known at once, on any rank, after any resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FEISTEL_ROUNDS = 6
# What a keyed hash is asked for; the numbers are part of the batch order and must not change.
(
    PURPOSE_BATCHES,
    PURPOSE_RECORDS,
    PURPOSE_CAPTION,
    PURPOSE_FLIP,
    PURPOSE_BLOCKS,
    PURPOSE_MIXTURE,
) = range(6)
WORD = 2**64 - 1
GOLDEN, FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64
# As arrays of no dimension, which numpy takes up faster than its scalars.
_GOLDEN = np.array(GOLDEN, np.uint64)
_FACTORS = tuple(np.array(factor, np.uint64) for factor in FACTORS)
_SHIFTS = tuple(np.array(shift, np.uint64) for shift in (30, 27, 31))
FEW = 12  # indices up to which Python's integers are faster than numpy's calls (measured on one core of a Xeon)


@dataclass(frozen=True)
class ShardWindow:
    """A shuffle for slow disks and remote stores: at any time only a few shards of a bucket are in use.

    Args:
      shards: blocks (K) of a window.
      rows: records of a block (R), one number or one for each bucket; the rows of a shard.
    """

    shards: int
    rows: int | Mapping[str, int]


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Apply a keyed permutation of range(size) to some indices.

    A Feistel network over the next even number of bits, walked until the value falls back into the range; on average
    under four walks, whatever the size.

    Args:
      indices: (B,) integers in 0..size - 1.
    Returns: (B,) int64.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3 (cycle walking).
    """
    return permute_groups(indices, np.zeros(len(indices), np.int64), [size], [key])


def unpermute(values: np.ndarray, size: int, key: int) -> np.ndarray:
    """Undo ``permute``: the indices that it sends to these values.

    Args:
      values: (B,) integers in 0..size - 1.
    Returns: (B,) int64.
    """
    return permute_groups(values, np.zeros(len(values), np.int64), [size], [key], inverse=True)


def permute_groups(
    indices: np.ndarray, groups: np.ndarray, sizes: Sequence[int], keys: Sequence[int], *, inverse: bool = False
) -> np.ndarray:
    """Apply several keyed permutations at once, each to its own indices; one call costs little more than one of them.

    Args:
      indices: (B,) integers, those of group g in 0..sizes[g] - 1.
      groups: (B,) which permutation each index goes through.
      sizes, keys: of each of the G permutations.
      inverse: undo them.
    Returns: (B,) int64, each as ``permute`` (or ``unpermute``) gives it.
    """
    halves = [max(1, ((size - 1).bit_length() + 1) // 2) for size in sizes]
    rounds = np.array([keyed_hash(key, r) for key in keys for r in range(FEISTEL_ROUNDS)], np.uint64)
    rounds = rounds.reshape(-1, FEISTEL_ROUNDS)[:, :: -1 if inverse else 1]  # (G, FEISTEL_ROUNDS)
    masks, limits = np.array([(1 << half) - 1 for half in halves], np.uint64), np.array(sizes, np.uint64)
    shifts = np.array(halves, np.uint64)
    found = np.array(indices, np.uint64)
    outside, walking = np.arange(len(found)), found  # walked until each value lies in its range
    while len(outside) > FEW:
        which = groups[outside] if len(sizes) > 1 else groups[:1]
        walking = _network(walking, shifts[which], masks[which], rounds[which].T + _GOLDEN, _scramble, inverse)
        found[outside] = walking
        still = walking >= limits[which]
        outside, walking = outside[still], walking[still]
    for place, value in zip(outside.tolist(), walking.tolist(), strict=True):
        group = int(groups[place])
        half, round_keys = halves[group], rounds[group].tolist()
        value = _network(value, half, (1 << half) - 1, round_keys, _mix_int, inverse)
        while value >= sizes[group]:
            value = _network(value, half, (1 << half) - 1, round_keys, _mix_int, inverse)
        found[place] = value
    return found.astype(np.int64)


def permute_in_windows(
    places: np.ndarray, size: int, *, rows: int, shards: int, block_key: int, row_key: int
) -> np.ndarray:
    """Apply a keyed permutation of range(size) that stays within a few blocks for a long time.

    The blocks, of ``rows`` consecutive values each, are permuted; every ``shards`` of them make a window; the values of
    a window are permuted. The last block may be shorter: the inverse permutation tells its window, where it is put
    last, so that all places have a closed form.

    Args:
      places: (B,) integers in 0..size - 1.
      rows: values in a block.
      shards: blocks in a window.
      block_key, row_key: of the order of the blocks, and of the values within the windows.
    Returns: (B,) int64.
    """
    num_blocks = -(-size // rows)
    missing = num_blocks * rows - size  # of the last block
    short_slot = int(unpermute(np.array([num_blocks - 1]), num_blocks, block_key)[0])
    short_window = short_slot // shards
    short_end = min((short_window + 1) * shards, num_blocks) * rows - missing
    padded = places + missing * (places >= short_end)  # as if all blocks were full
    windows, groups = np.unique(padded // (shards * rows), return_inverse=True)
    firsts = windows * shards  # slots: places of blocks after their permutation
    lasts = np.minimum(firsts + shards, num_blocks) - 1
    counts = (lasts + 1 - firsts) * rows - missing * (windows == short_window)
    keys = [keyed_hash(row_key, window) for window in windows.tolist()]
    inside = permute_groups(padded - firsts[groups] * rows, groups, counts.tolist(), keys)
    slots, which = np.unique(firsts[groups] + inside // rows, return_inverse=True)
    last = min((short_window + 1) * shards, num_blocks) - 1
    slots = np.where(slots == last, short_slot, np.where(slots == short_slot, last, slots))
    return permute(slots, num_blocks, block_key)[which] * rows + inside % rows


def keyed_choice(
    num_choices: np.ndarray, *, seed: int, epoch: int | np.ndarray, records: np.ndarray, purpose: int
) -> np.ndarray:
    """One number in range(num_choices) a record: a function of (seed, epoch, record, purpose) alone.

    Args:
      num_choices: (B,) integers from 1 to 2^32.
      epoch: one for all, or (B,) one for each record.
      records: (B,) positions in the records table.
    Returns: (B,) int64.
    """
    epochs, which = np.unique(epoch, return_inverse=True)
    keys = np.array([keyed_hash(seed, each, purpose) for each in epochs.tolist()], np.uint64)[which]
    hashes = _mix(records.astype(np.uint64) + keys)
    return ((hashes >> np.uint64(32)) * num_choices.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def keyed_hash(*values: int) -> int:
    """Mix integers into one of 64 bits; the order of the arguments matters."""
    state = 0
    for value in values:
        state = _mix_int(state ^ (value & WORD))
    return state


def _network(value: Any, half: Any, mask: Any, keys: Any, mix: Callable[[Any], Any], inverse: bool) -> Any:
    """The rounds of a Feistel network; backward they are the same rounds with the halves exchanged."""
    left, right = value >> half, value & mask
    if inverse:
        left, right = right, left
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    if inverse:
        left, right = right, left
    return (left << half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's step on every element (Steele, Lea and Flood 2014, figure 12); wraps around at 64 bits."""
    return _scramble(values + _GOLDEN)


def _scramble(z: np.ndarray) -> np.ndarray:
    """The second half of SplitMix64's step."""
    z = (z ^ (z >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


def _mix_int(value: int) -> int:
    """``_mix`` of one integer, which may be larger than 64 bits; without the overhead of an array."""
    z = (value + GOLDEN) & WORD
    z = ((z ^ (z >> 30)) * FACTORS[0]) & WORD
    z = ((z ^ (z >> 27)) * FACTORS[1]) & WORD
    return z ^ (z >> 31)
