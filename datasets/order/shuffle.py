"""Keyed permutations and keyed choices, each computed for the indices that are asked for; no array of N is held.

Everything here is a pure function of integers. Seed, epoch, bucket and purpose go into a key, so that any part of any
epoch's order is known at once, on any rank, after any resume.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    PURPOSE_DRAW,
) = range(7)
WORD = 2**64 - 1
TABLE_ROWS = 1 << 13  # of a grid whose moves are kept in a table, 384 KiB: of 67 million records
KEPT_TABLES = 512  # of the buckets of all stores, and epochs
GOLDEN, FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64
# As arrays of no dimension, which numpy converts faster than its scalars.
_GOLDEN = np.array(GOLDEN, np.uint64)
_FACTORS = tuple(np.array(factor, np.uint64) for factor in FACTORS)
_HALF = np.array(32, np.uint64)
_SHIFTS = tuple(np.array(shift, np.uint64) for shift in (30, 27, 31))


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

    A Feistel network over a grid of about the square root of the size on each side, walked until the value falls back
    into the range: of a thousand values, some thirty walk twice, and fewer of more.

    Args:
      indices: (B,) integers in 0..size - 1.
    Returns: (B,) int64.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3 (cycle walking) and section 4
      (generalized Feistel).
    """
    height, width = _grid(size)
    values = np.asarray(indices, np.int64)
    rows = values // width
    columns = values - rows * width
    for number in range(FEISTEL_ROUNDS):  # row and column are moved in turn, each by a hash of the other
        moving, staying, side = (columns, rows, width) if number % 2 else (rows, columns, height)
        if height <= TABLE_ROWS:
            moving += _move_table(height, width, key)[number].take(staying)
        else:
            moving += _moves(staying, side, keyed_hash(key, number))
        np.subtract(moving, side, out=moving, where=moving >= side)
    permuted = rows * width + columns
    for place in np.flatnonzero(permuted >= size).tolist():
        permuted[place] = permute_one(int(permuted[place]), size, key)
    return permuted


def permute_one(index: int, size: int, key: int, *, inverse: bool = False) -> int:
    """``permute`` of one index; with ``inverse`` the index that it sends to this one."""
    height, width = _grid(size)
    numbers = range(FEISTEL_ROUNDS)[:: -1 if inverse else 1]
    rounds = [(number % 2, keyed_hash(key, number)) for number in numbers]
    while True:
        row, column = divmod(index, width)
        for moves_column, round_key in rounds:
            staying, side = (row, width) if moves_column else (column, height)
            step = (_mix_int((staying + round_key) & WORD) >> 32) * side >> 32
            step = -step if inverse else step
            row, column = (row, (column + step) % width) if moves_column else ((row + step) % height, column)
        index = row * width + column
        if index < size:
            return index


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
    short_slot = permute_one(num_blocks - 1, num_blocks, block_key, inverse=True)
    short_window = short_slot // shards
    short_end = min((short_window + 1) * shards, num_blocks) * rows - missing
    padded = places + missing * (places >= short_end)  # as if all blocks were full
    permuted = np.empty(len(places), np.int64)
    windows = padded // (shards * rows)
    for window in np.unique(windows).tolist():
        first, stop = window * shards, min((window + 1) * shards, num_blocks)  # slots: places of permuted blocks
        of_window = windows == window
        count = (stop - first) * rows - missing * (window == short_window)
        inside = permute(padded[of_window] - first * rows, count, keyed_hash(row_key, window))
        slots, which = np.unique(first + inside // rows, return_inverse=True)
        if window == short_window:  # its last slot and that of the short block change places
            slots = np.where(slots == stop - 1, short_slot, np.where(slots == short_slot, stop - 1, slots))
        permuted[of_window] = permute(slots, num_blocks, block_key)[which] * rows + inside % rows
    return permuted


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
    drawn = _keyed_bits(seed, epoch, records, purpose)
    return (drawn * num_choices.astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def keyed_uniform(*, seed: int, epoch: int | np.ndarray, records: np.ndarray, purpose: int) -> np.ndarray:
    """One number from 0 to below 1 a record, (B,) float64; of n equal parts it is in the one of ``keyed_choice``."""
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
    """Height and width of the smallest grid, nearly square, that has a place for each of so many values."""
    height = math.isqrt(max(size - 1, 0)) + 1
    return height, max(1, -(-size // height))


def _moves(staying: np.ndarray, side: int, key: int) -> np.ndarray:
    """(B,) int64 moves below ``side`` of a round of ``permute``, by hashes of the (B,) coordinates that stay."""
    bits = mix(staying.astype(np.uint64) + np.uint64(key)) >> _HALF
    return (bits * np.uint64(side) >> _HALF).view(np.int64)


@functools.lru_cache(maxsize=KEPT_TABLES)
def _move_table(height: int, width: int, key: int) -> np.ndarray:
    """(FEISTEL_ROUNDS, height) int64 ``_moves`` of each round for each coordinate: a batch takes half the time."""
    coordinates = np.arange(height)
    sides = [(width if number % 2 else height, keyed_hash(key, number)) for number in range(FEISTEL_ROUNDS)]
    return np.array([_moves(coordinates, side, round_key) for side, round_key in sides])


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
    """``mix`` of one integer, which may be larger than 64 bits; without the overhead of an array."""
    z = (value + GOLDEN) & WORD
    z = ((z ^ (z >> 30)) * FACTORS[0]) & WORD
    z = ((z ^ (z >> 27)) * FACTORS[1]) & WORD
    return z ^ (z >> 31)
