"""leandit: encode once, train lean.

The tour, in the order the data travels:

1. ``leandit.precompute`` (stage 1) runs every image through a VAE and every caption through a text encoder exactly
   once. Read ``precompute/pipeline.py``.
2. ``leandit.datasets`` is the store between the stages: sharded, memory-mapped, self-describing. It knows no encoder
   and no trainer. Read ``datasets/FORMAT.md``, then ``datasets/store.py``.
3. ``leandit.train`` (stage 2) trains a diffusion transformer on the store alone; no encoder is imported.
   Read ``train/loop.py``.
4. ``leandit.tools`` is what you type: the ``leandit`` command, the inspector, the demo.

``LatentStore``, ``create_store``, ``make_loader``, ``BatchReader``, ``Batch``, ``load_snapshot``, ``adapters`` and
``testing`` can be imported from here; each is loaded when it is first asked for, so that ``import leandit`` costs
nothing.

The four rooms have no ``__init__.py``: with one, ``datasets/`` would hide Hugging Face's library of the same name from
anyone who stands in the repository root.
"""

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import testing
    from .datasets.batches import adapters
    from .datasets.batches.batch import Batch
    from .datasets.batches.reader import BatchReader
    from .datasets.loader import make_loader
    from .datasets.store import LatentStore
    from .datasets.writer import RecordWriter, create_store
    from .errors import InvalidRecord
    from .train.sampling.snapshot import load_snapshot

if sys.version_info < (3, 11):  # noqa: UP036 - in a clone; pip refuses by itself
    raise SystemExit(f"leandit needs Python 3.11 or newer, and this is {sys.version.split()[0]}: {sys.executable}")

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "BatchReader",
    "InvalidRecord",
    "LatentStore",
    "RecordWriter",
    "adapters",
    "create_store",
    "load_snapshot",
    "make_loader",
    "testing",
]
logging.getLogger(__name__).addHandler(logging.NullHandler())  # programs decide what is shown
_HOMES = {
    "Batch": "datasets.batches.batch",
    "BatchReader": "datasets.batches.reader",
    "InvalidRecord": "errors",
    "LatentStore": "datasets.store",
    "RecordWriter": "datasets.writer",
    "create_store": "datasets.writer",
    "load_snapshot": "train.sampling.snapshot",
    "make_loader": "datasets.loader",
}
_MODULES = {"adapters": "datasets.batches.adapters", "testing": "testing"}


def __getattr__(name: str) -> Any:
    """A public name, imported from its home when it is first used (PEP 562)."""
    if name in _MODULES:
        value = import_module(f".{_MODULES[name]}", __name__)
    elif name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module 'leandit' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
