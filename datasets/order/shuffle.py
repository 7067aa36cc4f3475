"""Keyed permutations and keyed draws, computed only for the indices in question: no array of N is held.

All are pure functions of integers. Seed, epoch, bucket and purpose go into a key, so every part of every epoch's order
is known at once, on any rank, after any resume.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FEISTEL_ROUNDS = 6
# Purposes of a keyed hash; the numbers are part of the batch order and must not change.
(
    PURPOSE_BATCHES,
    PURPOSE_RECORDS,
    PURPOSE_CAPTION,
    PURPOSE_VIEW,
    PURPOSE_BLOCKS,
    PURPOSE_MIXTURE,
    PURPOSE_DRAW,
) = range(7)
WORD = 2**64 - 1
GOLDEN, FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64
# Arrays without a dimension: numpy converts them faster than its scalars.
_GOLDEN, _HALF = np.array(GOLDEN, np.uint64), np.array(32, np.uint64)
_FACTORS = tuple(np.array(factor, np.uint64) for factor in FACTORS)
_SHIFTS = tuple(np.array(shift, np.uint64) for shift in (30, 27, 31))
TABLE_ROWS = 1 << 13  # of a grid whose moves are kept in a table, 384 KiB: of 67 million records
KEPT_TABLES = 512  # of the buckets of all stores, and epochs


@dataclass(frozen=True)
class ShardWindow:
    """A shuffle for slow disks and remote stores: at any time only a few shards of a bucket are in use.

    Args:
      shards: blocks (K) of a window.
      rows: records of a block (R), one number or one for each bucket; the rows of a shard.
    """

    shards: int
    rows: int | Mapping[str, int]


def permute(indices: np.ndarray, size: int, key: int, *, inverse: bool = False) -> np.ndarray:
    """Apply a keyed permutation of range(size) to (B,) indices, as ``permute_groups``; returns (B,) int64."""
    return permute_groups(indices, np.zeros(len(indices), np.int64), [size], [key], inverse=inverse)


def permute_groups(
    indices: np.ndarray, groups: np.ndarray, sizes: Sequence[int], keys: Sequence[int], *, inverse: bool = False
) -> np.ndarray:
    """Apply several keyed permutations at once, each to its own indices; one call costs little more than one of them.

    Each is a Feistel network over a grid of about the square root of its size on each side, walked until the value
    falls back into the range: of a thousand values, some thirty walk twice.

    Args:
      indices: (B,) integers, those of group g in 0..sizes[g] - 1.
      groups: (B,) the permutation of each index.
      sizes, keys: of each of the G permutations.
      inverse: undo them.
    Returns: (B,) int64.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3 (cycle walking) and section 4
      (generalized Feistel).
    """
    grids = [_grid(size) for size in sizes]
    heights, widths = np.array(grids, np.int64).T
    limits = np.array(sizes, np.int64)
    moves = _moves_by_table(grids, keys) if heights.max() <= TABLE_ROWS else _moves_by_hash(keys)

    def walk(values: np.ndarray, which: Any) -> np.ndarray:
        return _network(values, heights[which], widths[which], functools.partial(moves, which), inverse)

    which = groups if len(sizes) > 1 else 0  # numpy divides by a scalar much faster than by an array
    values = walk(np.asarray(indices, np.int64), which)
    while len(outside := np.flatnonzero(values >= limits[which])):
        values[outside] = walk(values[outside], groups[outside] if len(sizes) > 1 else 0)
    return values


def permute_in_windows(
    places: np.ndarray, size: int, *, rows: int, shards: int, block_key: int, row_key: int
) -> np.ndarray:
    """Apply a keyed permutation of range(size) that stays within a few blocks for a long time.

    Blocks of ``rows`` consecutive values are permuted; every ``shards`` of them make a window; the values of a window
    are permuted. The last block may be shorter: it is put last in its window, which the inverse permutation gives, so
    that all places have a closed form.

    Args:
      places: (B,) integers in 0..size - 1.
      rows: values in a block.
      shards: blocks in a window.
      block_key, row_key: of the order of the blocks, and of the values within the windows.
    Returns: (B,) int64.
    """
    num_blocks = -(-size // rows)
    missing = num_blocks * rows - size  # of the last block
    short_slot = int(permute(np.array([num_blocks - 1]), num_blocks, block_key, inverse=True)[0])
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
    """One number in range(num_choices) for each record: a function of (seed, epoch, record, purpose) alone.

    Args:
      num_choices: (B,) integers from 1 to 2^32.
      epoch: one for all, or (B,) one for each record.
      records: (B,) positions in the records table.
    Returns: (B,) int64.
    """
    bits = _keyed_bits(seed, epoch, records, purpose)
    return (bits * num_choices.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def keyed_uniform(*, seed: int, epoch: int | np.ndarray, records: np.ndarray, purpose: int) -> np.ndarray:
    """One number from 0 to below 1 for each record, (B,) float64; ``keyed_choice`` is its part of n equal ones."""
    return _keyed_bits(seed, epoch, records, purpose) / 2.0**32


def _keyed_bits(seed: int, epoch: int | np.ndarray, records: np.ndarray, purpose: int) -> np.ndarray:
    """(B,) uint64 of 32 bits."""
    epochs, which = np.unique(epoch, return_inverse=True)
    keys = np.array([keyed_hash(seed, each, purpose) for each in epochs.tolist()], np.uint64)[which]
    return mix(records.astype(np.uint64) + keys) >> np.uint64(32)


def keyed_hash(*values: int) -> int:
    """Mix integers into one of 64 bits; the order of the arguments matters."""
    state = 0
    for value in values:
        state = _mix_int(state ^ (value & WORD))
    return state


def _grid(size: int) -> tuple[int, int]:
    """Height and width of the smallest nearly square grid with so many places."""
    height = math.isqrt(max(size - 1, 0)) + 1
    return height, max(1, -(-size // height))


def _network(
    values: np.ndarray, height: Any, width: Any, moves: Callable[[int, np.ndarray, Any], np.ndarray], inverse: bool
) -> np.ndarray:
    """A permutation of the places of a grid: row and column move in turn, each by a hash of the other.

    Args:
      values: (B,) int64 row * width + column.
      height, width: int64, of one grid or (B,) of each.
      moves: (round, (B,) coordinate that stays, side of the one that moves) to (B,) moves below that side.
    """
    rows = values // width
    columns = values - rows * width
    for number in reversed(range(FEISTEL_ROUNDS)) if inverse else range(FEISTEL_ROUNDS):
        moving, staying, side = (columns, rows, width) if number % 2 else (rows, columns, height)
        step = moves(number, staying, side)
        moving += side - step if inverse else step
        # Modulo the side: for smaller values the difference wraps around.
        unsigned = moving.view(np.uint64)
        np.minimum(unsigned, (moving - side).view(np.uint64), out=unsigned)
    return rows * width + columns


def _moves_by_table(grids: Sequence[tuple[int, int]], keys: Sequence[int]) -> Callable[..., np.ndarray]:
    """Moves of ``_network`` from tables: a grid has few coordinates, so each is hashed once."""
    tables = [_move_table(*grid, key) for grid, key in zip(grids, keys, strict=True)]
    if len(tables) == 1:
        return lambda group, number, staying, side: tables[0][number].take(staying)
    joined, starts = np.concatenate(tables, axis=1), np.cumsum([0, *(height for height, _ in grids)])
    return lambda groups, number, staying, side: joined[number].take(staying + starts[groups])


@functools.lru_cache(maxsize=KEPT_TABLES)
def _move_table(height: int, width: int, key: int) -> np.ndarray:
    """(FEISTEL_ROUNDS, height) int64 moves of each round, for each coordinate that stays."""
    moves, coordinates = _moves_by_hash([key]), np.arange(height)
    return np.array([moves(0, r, coordinates, width if r % 2 else height) for r in range(FEISTEL_ROUNDS)])


def _moves_by_hash(keys: Sequence[int]) -> Callable[..., np.ndarray]:
    """Moves of ``_network``, hashed for each value: for grids too large for a table."""
    rounds = np.array([[keyed_hash(key, r) for key in keys] for r in range(FEISTEL_ROUNDS)], np.uint64)

    def moves(groups: Any, number: int, staying: np.ndarray, side: Any) -> np.ndarray:
        bits = mix(staying.astype(np.uint64) + rounds[number][groups]) >> _HALF
        return (bits * np.asarray(side, np.uint64) >> _HALF).astype(np.int64)

    return moves


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's step on every element (Steele, Lea and Flood 2014, figure 12); wraps around at 64 bits."""
    z, spare = values + _GOLDEN, np.empty(values.shape, np.uint64)
    z ^= np.right_shift(z, _SHIFTS[0], out=spare)
    z *= _FACTORS[0]
    z ^= np.right_shift(z, _SHIFTS[1], out=spare)
    z *= _FACTORS[1]
    z ^= np.right_shift(z, _SHIFTS[2], out=spare)
    return z


def _mix_int(value: int) -> int:
    """``mix`` of one integer of any size, without the overhead of an array."""
    z = (value + GOLDEN) & WORD
    z = ((z ^ (z >> 30)) * FACTORS[0]) & WORD
    z = ((z ^ (z >> 27)) * FACTORS[1]) & WORD
    return z ^ (z >> 31)
