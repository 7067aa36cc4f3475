"""leandit: encode once, train lean.

The tour, in the order the data travels:

1. ``leandit.precompute`` (stage 1) runs every image through a VAE and every caption through T5 exactly once.
   Read ``precompute/pipeline.py``.
2. ``leandit.datasets`` is the store between the stages: sharded, memory-mapped, self-describing. It knows no encoder
   and no trainer. Read ``datasets/FORMAT.md``, then ``datasets/store.py``.
3. ``leandit.train`` (stage 2) trains a diffusion transformer on the store alone; no encoder is imported.
   Read ``train/loop.py``.
4. ``leandit.tools`` is what you type: the ``leandit`` command, the inspector, the demo.

The four folders have no ``__init__.py`` on purpose: with one, ``datasets/`` would hide Hugging Face's library of the
same name from whoever stands in the repository root.
"""

__version__ = "0.1.0"
