"""One decode for several stores: each goes its own way through its pictures, and they are kept in step.

Every store has its own plan, its own shards and its own batches. Their batches are interleaved so that all ask for the
same picture at nearly the same time; whoever asks first has it cropped in the same go for all others that still miss
it. Those crops wait in memory, of which there is a bound; what is not there when its batch comes is decoded again. So
what waits saves work, and no byte of a store rests on it.

Only pixels are shared, never rejects: where not all crops of a picture can be made, each store asks for its own alone,
as it would without the others.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..datasets.buckets import bucket_size
from ..datasets.commits import Task
from ..datasets.errors import RecordRejected
from ..datasets.frozen import FrozenPlan
from ..datasets.layout import bucket_part
from .clock import StageClock
from .decoder import Crop, Decoders
from .picture_batches import BATCHES_AHEAD, Picture, PictureBatch, as_planned, decode_planned, picture_batches
from .sources import Source

WAITING_BYTES = 1 << 30  # of crops that wait for their store
NAME_COLUMNS = ["source_path", "source_offset", "source_bytes", "key"]

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

Waiting = Future[Picture | None]
"""A picture that is being decoded; None where it must be asked for alone."""


class Lane:
    """One store's way through its pictures: bucket after bucket, row after row; a place is a position on it.

    Args:
      plan: of the revision.
      missing: tasks that make latents and are not committed.
      clock: that tells the decoding for this store.
    """

    def __init__(self, plan: FrozenPlan, missing: Sequence[Task], clock: StageClock) -> None:
        self.plan, self.clock = plan, clock
        self._buckets = list(plan.bucket_positions)
        self._starts = np.cumsum([0, *(len(rows) for rows in plan.bucket_positions.values())])
        self.positions = np.concatenate(
            [np.empty(0, np.int64), *plan.bucket_positions.values()]
        )  # in the records table
        self._part_starts = {bucket_part(name): int(at) for name, at in zip(self._buckets, self._starts, strict=False)}
        sizes = [plan.records[name].to_numpy()[self.positions] for name in ("height_px", "width_px")]
        self._sizes = np.stack(sizes, axis=1).astype(np.int64)  # (places, 2), as planned
        self._is_missing = np.zeros(len(self.positions), bool)
        for part, shard in missing:
            rows, start = plan.layout.rows_of(part, shard), self._part_starts[part]
            self._is_missing[start + rows.start : start + rows.stop] = True
        self._waiting: dict[int, Waiting] = {}
        self._next = 0
        self.ids = self.ranks = self._place_of = np.empty(0, np.int64)

    def know(self, ids: np.ndarray, ranks: np.ndarray) -> None:
        """Take in which pictures are the same in all lanes, and in which order all lanes together go.

        Args:
          ids: (places,) of the picture at each place.
          ranks: (num_ids,) of each id.
        """
        self.ids, self.ranks = ids, ranks[ids]
        self._place_of = np.full(len(ranks), -1, np.int64)
        self._place_of[ids] = np.arange(len(ids))

    def place(self, part: str, row: int) -> int:
        """Place of a row of a bucket."""
        return self._part_starts[part] + row

    def crop(self, place: int) -> Crop:
        """What the store makes of the picture at a place."""
        bucket = self._buckets[int(np.searchsorted(self._starts, place, side="right")) - 1]
        images = self.plan.spec.images
        return Crop(bucket_size(bucket), images.crop, images.resize_filter)

    def size(self, place: int) -> tuple[int, int]:
        """Height and width in pixels of the picture when it was planned."""
        height_px, width_px = self._sizes[place].tolist()
        return height_px, width_px

    def wants(self, picture: int) -> int | None:
        """Place at which the store will still need a picture, given by its id; None where it will not."""
        place = int(self._place_of[picture])
        is_ahead = place >= self._next and self._is_missing[place] and place not in self._waiting
        return place if is_ahead else None

    def wait_for(self, place: int) -> Waiting:
        """A crop that will be made for a place."""
        self._waiting[place] = Future()
        return self._waiting[place]

    def take(self, place: int) -> Waiting | None:
        """The crop that waits for a place, if there is one."""
        return self._waiting.pop(place, None)

    def go_to(self, place: int) -> list[int]:
        """Go on to a place.

        Returns: places behind it with a crop that nobody will ask for any more: others have made their shards.
        """
        self._next = place
        behind = [one for one in self._waiting if one < place]
        for one in behind:
            del self._waiting[one]
        return behind


def keep_in_step(lanes: Sequence[Lane]) -> None:
    """Let lanes know which of their pictures are the same, and in which order to go.

    The same is a record of one key that lies at one place of the source in all plans: then its bytes are the same. The
    order is that of the first lane, then what only the second has, and so on. Where the buckets of two stores hold the
    same records, as with "square" and "pixart", it is the order of both.
    """
    names = [_names(lane.plan.records.select(NAME_COLUMNS).take(pa.array(lane.positions))) for lane in lanes]
    known = pc.unique(pa.chunked_array([chunk for column in names for chunk in column.chunks], pa.large_string()))
    ranks, num_ranked = np.full(len(known), -1, np.int64), 0
    all_ids = [pc.index_in(column, value_set=known).to_numpy().astype(np.int64) for column in names]
    for ids in all_ids:
        new = ids[ranks[ids] < 0]
        ranks[new] = np.arange(num_ranked, num_ranked + len(new))
        num_ranked += len(new)
    for lane, ids in zip(lanes, all_ids, strict=True):
        lane.know(ids, ranks)


def _names(records: pa.Table) -> pa.ChunkedArray:
    """One text for each record that says which bytes of the source it is."""
    columns = (records[name].cast(pa.large_string()) for name in NAME_COLUMNS)
    return pc.binary_join_element_wise(*columns, pa.scalar("\0", pa.large_string()))


class SharedDecoding:
    """Decodes for several lanes.

    Args:
      lanes: that are kept in step.
      decoders, origin: as of ``encode_pictures``.
      pool: of threads that ask the decoders.
    """

    def __init__(self, lanes: Sequence[Lane], decoders: Decoders, origin: Source, pool: ThreadPoolExecutor) -> None:
        self._lanes, self._decoders, self._origin, self._pool = lanes, decoders, origin, pool
        self._room_bytes = WAITING_BYTES
        self._lock = threading.Lock()
        self.num_decoded = 0

    def batches(self, tasks: Sequence[Iterable[Task]]) -> Iterator[tuple[Lane, PictureBatch, list[Picture]]]:
        """Hand out the batches of all lanes, each lane's in its own order, while the next ones are being decoded.

        Args:
          tasks: of each lane.
        """
        streams = [self._stream(lane, own) for lane, own in zip(self._lanes, tasks, strict=True)]
        ahead: deque[tuple[Lane, PictureBatch, list[Waiting]]] = deque()
        for _, lane, batch in heapq.merge(*streams, key=lambda entry: entry[0]):
            ahead.append((lane, batch, self._ask(lane, batch)))
            if len(ahead) > BATCHES_AHEAD * len(self._lanes):
                yield self._answered(*ahead.popleft())
        while ahead:
            yield self._answered(*ahead.popleft())

    @staticmethod
    def _stream(lane: Lane, tasks: Iterable[Task]) -> Iterator[tuple[int, Lane, PictureBatch]]:
        for batch in picture_batches(lane.plan, tasks):
            yield int(lane.ranks[lane.place(batch.part, batch.rows.start)]), lane, batch

    def _ask(self, lane: Lane, batch: PictureBatch) -> list[Waiting]:
        """Ask for the pictures of a batch, and for the crops that others need of them."""
        first = lane.place(batch.part, batch.rows.start)
        self._room_bytes += sum(_num_bytes(lane.crop(place)) for place in lane.go_to(first))
        return [self._ask_for(lane, batch, row) for row in batch.rows]

    def _ask_for(self, lane: Lane, batch: PictureBatch, row: int) -> Waiting:
        place = lane.place(batch.part, row)
        if waiting := lane.take(place):
            self._room_bytes += _num_bytes(lane.crop(place))
            return waiting
        others = []
        for other in self._lanes:
            there = None if other is lane else other.wants(int(lane.ids[place]))
            if there is not None and (size := _num_bytes(other.crop(there))) <= self._room_bytes:
                self._room_bytes -= size
                others.append((other, there, other.wait_for(there)))
        return self._pool.submit(self._decode, lane, batch, row, others)

    def _decode(
        self, lane: Lane, batch: PictureBatch, row: int, others: Sequence[tuple[Lane, int, Waiting]]
    ) -> Picture | None:
        """Decode a picture once for a lane and for others; where that fails, for the lane alone."""
        place, found = lane.place(batch.part, row), []
        try:
            if others:
                crops = [lane.crop(place), *(other.crop(there) for other, there, _ in others)]
                self._count()
                start = time.perf_counter()
                where = self._origin.place(*_of_source(batch, row), stage="decode")
                fetch_seconds = time.perf_counter() - start
                exif_orientation = lane.plan.spec.images.exif_orientation  # of all lanes, as check_targets sees
                found = self._decoders.crops(where, crops, exif_orientation=exif_orientation)
                lane.clock.add({"read": fetch_seconds + found[0].read_seconds, "decode": found[0].decode_seconds})
        except RecordRejected:
            pass  # perhaps only another's crop cannot be made, or all together take too long or too much memory
        finally:  # whatever happens, nobody waits for ever
            for i, (other, there, waiting) in enumerate(others, 1):
                picture = as_planned(found[i], other.size(there)) if found else None
                waiting.set_result(None if isinstance(picture, RecordRejected) else picture)
        return as_planned(found[0], lane.size(place)) if found else self._alone(lane, batch, row)

    def _alone(self, lane: Lane, batch: PictureBatch, row: int) -> Picture:
        """Decode a picture for one lane, as it would be without the others."""
        place = lane.place(batch.part, row)
        bucket, size = lane.crop(place).bucket, lane.size(place)
        self._count()
        where = _of_source(batch, row)
        return decode_planned(
            lane.plan.spec.images,
            self._origin,
            self._decoders,
            where,
            size=size,
            bucket=bucket,
            clock=lane.clock,
        )

    def _answered(
        self, lane: Lane, batch: PictureBatch, asked: Sequence[Waiting]
    ) -> tuple[Lane, PictureBatch, list[Picture]]:
        """Wait for the pictures of a batch."""
        with lane.clock.measure("wait_decode"):
            found = [waiting.result() for waiting in asked]
            pictures = [
                self._alone(lane, batch, row) if picture is None else picture
                for row, picture in zip(batch.rows, found, strict=True)
            ]
        return lane, batch, pictures

    def _count(self) -> None:
        with self._lock:
            self.num_decoded += 1


def _num_bytes(crop: Crop) -> int:
    """Of the decoded pixels."""
    return 3 * crop.bucket[0] * crop.bucket[1]


def _of_source(batch: PictureBatch, row: int) -> tuple[str, int, int]:
    return batch.source.paths[row], batch.source.offsets[row], batch.source.num_bytes[row]
