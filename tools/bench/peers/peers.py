"""The table of peers: how the files of each are written and read.

Each is used as its documentation advises, the fastest way that it offers for batches in random order.
Left out: ffcv, which needs a C++ compiler and OpenCV's headers to install.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

from ..harness.work import STORE, Epochs, Rows, Workload
from . import arrays, files, flat, hf_datasets, streams

IN_PROCESS, WORKERS = "w0", "w2"
NUM_WORKERS = {IN_PROCESS: 0, WORKERS: 2}
LIMIT = "memmap gather"
LEFT_OUT = {"ffcv": "needs a C++ compiler and OpenCV to install"}


@dataclass(frozen=True)
class Peer:
    """One way to keep and read latents.

    Args:
      name: on the command line.
      how: its use, in one line.
      files: folder of its files, shared by peers of the same folder; ``STORE`` is the store itself.
      write: makes the files from the store's rows; None if it reads the store itself.
      open: (workload, folder, seed, workers) to the batches of an epoch.
      libraries: distributions by the module that is imported before the clock starts.
      load: replaces the plain imports of the libraries.
      workloads: names of the workloads that it reads.
      modes: "w0" in process, "w2" with two workers, or two threads if it reads in threads.
    """

    name: str
    how: str
    files: str
    write: Callable[[list[Rows], Path], None] | None
    open: Callable[[Workload, Path, int, int], Epochs]
    libraries: Mapping[str, str] = field(default_factory=dict)
    workloads: tuple[str, ...] = ("latents", "captions")
    modes: tuple[str, ...] = (IN_PROCESS, WORKERS)
    load: Callable[[], object] | None = None

    def import_libraries(self) -> None:
        """Import what the peer needs."""
        if self.load:
            self.load()
        else:
            for module in self.libraries:
                importlib.import_module(module)

    @property
    def missing(self) -> list[str]:
        """Distributions that are not installed."""
        installed = {distribution.name.lower().replace("_", "-") for distribution in metadata.distributions()}
        return [name for name in self.libraries.values() if name.lower().replace("_", "-") not in installed]

    @property
    def versions(self) -> dict[str, str]:
        """The version of each distribution."""
        return {name: metadata.version(name) for name in self.libraries.values()}


SAFETENSORS = {"safetensors": "safetensors"}
ZARR = "zarr"  # the store itself, with what a reader of its arrays needs besides them
LATENTS, EVERY = ("latents",), ("latents", "captions", "aligned")
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            LIMIT,
            "np.take from one mapped flat file into reused memory",
            "flat",
            flat.write_flat,
            flat.open_gather,
            workloads=EVERY,
        ),
        Peer(
            "leandit",
            "make_loader, reading ahead in threads",
            STORE,
            None,
            arrays.open_leandit,
            workloads=EVERY,
            load=arrays.load_leandit,
        ),
        Peer(
            "leandit unchecked",
            'make_loader, check="never": rows are not compared with their checksums',
            STORE,
            None,
            partial(arrays.open_leandit, check="never"),
            workloads=EVERY,
            load=arrays.load_leandit,
        ),
        Peer(
            "leandit gather",
            "store.latents(bucket).take(rows, out=buffer), no loader",
            STORE,
            None,
            arrays.open_take,
            workloads=LATENTS,
            modes=(IN_PROCESS,),
            load=arrays.load_leandit,
        ),
        Peer(
            "memmap dataset",
            "flat file, Dataset of samples, DataLoader",
            "flat",
            flat.write_flat,
            flat.open_mapped,
            workloads=EVERY,
        ),
        Peer(
            "npy",
            "a file an image, as fast-DiT (captions as PixArt)",
            "npy",
            files.write_npy,
            files.open_npy,
            workloads=EVERY,
        ),
        Peer(
            "safetensors",
            "shards, opened for every sample, as LightningDiT",
            "safetensors",
            files.write_safetensors,
            files.open_safetensors,
            SAFETENSORS,
        ),
        Peer(
            "safetensors kept",
            "the same shards, kept open",
            "safetensors",
            files.write_safetensors,
            files.open_safetensors_kept,
            SAFETENSORS,
        ),
        Peer(
            "webdataset",
            "tars, shard shuffle and shuffle buffer, batched in the workers",
            "webdataset",
            streams.write_webdataset,
            streams.open_webdataset,
            {"webdataset": "webdataset"},
        ),
        Peer(
            "mosaicml",
            "MDS, StreamingDataset(shuffle=True)",
            "mosaicml",
            streams.write_mosaicml,
            streams.open_mosaicml,
            {"streaming": "mosaicml-streaming"},
        ),
        Peer(
            "litdata",
            "StreamingDataset(shuffle=True), StreamingDataLoader",
            "litdata",
            streams.write_litdata,
            streams.open_litdata,
            {"litdata": "litdata"},
        ),
        Peer(
            "hf binary",
            "Datasets, columns of bytes, a batch of rows at once",
            "hf-binary",
            hf_datasets.write_hf_binary,
            hf_datasets.open_hf_binary,
            {"datasets": "datasets"},
        ),
        Peer(
            "zarr",
            "zarr-python on the store: oindex a batch",
            ZARR,
            arrays.write_beside,
            arrays.open_zarr,
            {"zarr": "zarr"},
        ),
        Peer(
            "tensorstore",
            "on the store: an indexed read a batch",
            ZARR,
            arrays.write_beside,
            arrays.open_tensorstore,
            {"tensorstore": "tensorstore"},
        ),
    )
}
