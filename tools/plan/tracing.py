"""Runs real training steps on fake tensors and records their memory: ``python -m leandit.tools.plan.tracing``.

Fake tensors have shapes and no bytes, and torch's "fake" process group returns at once, so the model, the optimizer and
DDP, FSDP2 or DeepSpeed are the real ones. The process reads a ``TraceRequest`` and writes a ``TraceAnswer``; it is
never used for anything else, so that patches and cached fake tensors end with it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import sys
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from ...datasets.disk.files import write_atomic
from ...errors import LeanditError
from ...train.metrics.flops import latent_size_of
from ...train.models.diffusers.adapters import trained_parameters
from ...train.optim.state import is_sharded
from ...train.parallel import engine as engine_module
from ...train.parallel.ranks import ALONE, Ranks
from ...train.run import state as state_module
from ...train.run.state import Run
from ...train.step import train_step
from . import step_memory
from .step_memory import ACTIVATIONS, CATEGORIES, EMA, GRADIENTS, OPTIMIZER, PARAMETERS, StepMemory, Strategy, Traced
from .synthetic import synthetic_batch, synthetic_run

CPU = torch.device("cpu")
ROUNDING = {"cuda": 512, "cpu": 1}  # bytes that the allocator rounds up to (CUDACachingAllocator: kMinBlockSize)
SMALL, LARGE = 2, 3  # microbatches that define the lines; one image skips some copies
CHECKED = 5  # images of a step that checks the lines
TOLERANCE = 0.01  # largest relative error of the check


class Step(NamedTuple):
    """A traced step: (N, 5) bytes at each moment, and moments before the update."""

    moments: np.ndarray
    backward_moments: int

    @property
    def peak(self) -> int:
        """Largest number of bytes at any moment."""
        return int(self.moments.sum(1).max())


def main() -> None:
    """Answer the request of stdin on stdout; what libraries print goes to stderr."""
    answer_file = os.fdopen(os.dup(1), "wb")  # a pipe
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    request = step_memory.REQUEST.validate_json(sys.stdin.buffer.read())
    _prepare(request)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):  # one, because libraries cache tensors
            answer = step_memory.TraceAnswer(trace(request))
    except LeanditError as error:
        answer = step_memory.TraceAnswer(None, str(error), type(error).__name__)
    with answer_file:
        answer_file.write(step_memory.ANSWER.dump_json(answer))
    os._exit(0)  # process groups and DeepSpeed have nothing to tidy up


def trace(request: step_memory.TraceRequest) -> Traced:
    """Trace steps that are not the first one, and fit a line to each moment of them.

    Raises: LeanditError: the strategy does not fit the recipe; TraceError: memory is not linear in the images.
    """
    workload, bucket, strategy = request.workload, request.bucket, request.strategy
    ranks, section = _connect(strategy), strategy.section
    with tempfile.TemporaryDirectory(prefix="leandit-plan-") as folder, MemoryTracker(request.device_type) as tracker:
        if strategy.zero is not None:
            file = Path(folder) / "ds_config.json"
            write_atomic(file, json.dumps({"zero_optimization": dict(strategy.zero)}).encode())
            section = section.model_copy(update={"deepspeed_config": str(file)})
        # fp8 keeps as many bytes as bf16, which is what can be traced.
        changed = {"fp8": "none", "microbatch": 0, "precision": request.precision}
        section_run = workload.recipe.run.model_copy(update=changed)
        run = synthetic_run(
            workload.recipe.model_copy(update={"run": section_run, "parallel": section}),
            workload.spec,
            workload.tokens,
            CPU,
            ranks=ranks,
            store=workload.store,
        )
        if isinstance(forward := run.engine.forward, DistributedDataParallel):
            forward.register_comm_hook(None, noop_hook)  # the default waits for a result that never comes
            # After the first step the reducer would read numbers, to sort its buckets again.
            forward.reducer = _KeptBuckets(forward.reducer)  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in trained_parameters(run.engine.model).values():
            parameter.register_post_accumulate_grad_hook(
                lambda one: one.grad is not None and tracker.assign(GRADIENTS, [one.grad])
            )
        update, marks = run.engine.update, [0]

        def marked_update(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            marks[0] = len(tracker.moments)
            return update(*args, **kwargs)

        run.engine.update = marked_update

        def step(images: int, count: int) -> Step:
            run.microbatches = {bucket: images}
            batch = synthetic_batch(workload.store, bucket, images * count, workload.tokens, CPU)
            batch = replace(batch, global_size=images * count * ranks.world_size).finish()
            gc.collect()
            tracker.moments.clear()
            train_step(run, batch)
            return Step(np.array(tracker.moments, np.int64), marks[0])

        gc.disable()  # as in a training: what is freed must not depend on it
        gc.collect()
        gc.freeze()  # each step would look at the million objects of what is imported
        step(SMALL, 1)  # the first step allocates the optimizer's states
        states = _assign_states(tracker, run)
        in_blocks = sum(_held_bytes(p) for block in run.engine.model.blocks for p in block.parameters())
        latent = workload.store.latent
        known: dict[str, Any] = {
            "states": states,
            "outside_blocks": states[PARAMETERS] - in_blocks,
            "noise": 4 * latent.channels * math.prod(latent_size_of(bucket, latent)),
        }
        (whole, split), waiting = (_line(bucket, step, count, known) for count in (1, 2)), 0.0
        if ranks is ALONE:
            check_line(bucket, whole, step(CHECKED, 1).peak)
            waiting = max(0.0, (step(SMALL, 3).peak - split.total(SMALL)) / SMALL)
        return Traced(whole, replace(split, waiting=waiting))


def _line(bucket: str, step: Callable[[int, int], Step], count: int, known: dict[str, Any]) -> StepMemory:
    """The line of each moment through two sizes of a step of some microbatches."""
    first, second = step(SMALL, count), step(LARGE, count)
    if len(first.moments) != len(second.moments):
        lengths = f"{len(first.moments)} and {len(second.moments)}"
        raise step_memory.TraceError(
            f"bucket '{bucket}': {SMALL} and {LARGE} images run different steps ({lengths} moments)."
        )
    slope = (second.moments - first.moments) // (LARGE - SMALL)
    return StepMemory(
        base=first.moments - slope * SMALL,
        slope=slope,
        backward_moments=first.backward_moments,
        waiting=0.0,
        count=count,
        **known,
    )


def check_line(bucket: str, memory: StepMemory, traced: int) -> None:
    """Compare the line with the traced peak of another size.

    Raises: TraceError.
    """
    predicted = memory.total(CHECKED)
    if abs(predicted - traced) > TOLERANCE * traced:
        raise step_memory.TraceError(
            f"bucket '{bucket}': a step of {CHECKED} images takes {traced:,} bytes, {SMALL} and {LARGE} images "
            f"predict {predicted:,.0f}. The memory of other microbatches is unknown."
        )


def _held_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor holds, 8-bit weights by their codes and scales."""
    if is_sharded(tensor) or not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(_held_bytes(getattr(tensor, name)) for name in names)


def _assign_states(tracker: MemoryTracker, run: Run) -> dict[str, int]:
    """Sort what lives between steps into categories. Returns: the bytes of each; gradients are those of whole weights.

    Buffers of the model are whole on each device, and counted as activations.
    """
    engine: Any = run.engine
    parameters = list(engine.model.parameters())
    tracker.assign(PARAMETERS, [getattr(p, "ds_tensor", p) for p in parameters])  # ZeRO-3 keeps its part there
    optimizer = getattr(engine, "_zero", engine).optimizer
    masters = [p for group in optimizer.param_groups for p in group["params"]]  # DeepSpeed's copies of the weights
    known = {id(p) for p in parameters}
    state = [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor)]
    tracker.assign(OPTIMIZER, [*state, *(p for p in masters if id(p) not in known)])
    tracker.assign(EMA, [average for of_rule in engine.ema.averages for average in of_rule.values()])
    trained = sum(p.nbytes for p in trained_parameters(engine.model).values())
    return {name: tracker.live[name] for name in (PARAMETERS, OPTIMIZER, EMA)} | {GRADIENTS: trained}


def _connect(strategy: Strategy) -> Ranks:
    """The last rank, whose part of the gradients is computed first, in a process group that returns at once."""
    ranks = strategy.ranks
    if ranks == 1 and strategy.zero is None:
        return ALONE
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    return Ranks(ranks - 1, ranks, ranks - 1, ranks)


class _KeptBuckets:
    """DDP's reducer, whose buckets stay as they are."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return (lambda: False) if name == "_rebuild_buckets" else getattr(self._reducer, name)


def _prepare(request: step_memory.TraceRequest) -> None:
    """Let torch and DeepSpeed run where tensors have no numbers: skip the checks that compare ranks."""
    import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors

    dtype = torch.bfloat16 if request.precision == "bf16" else None
    modules: list[Any] = [state_module, engine_module]
    ddp: Any = importlib.import_module("torch.nn.parallel.distributed")
    nn.Module._apply = lambda module, *_, **__: module  # it cannot move fake tensors, which are in place  # pyright: ignore
    ddp._verify_param_shape_across_processes = lambda *_, **__: None
    ddp._sync_module_states = lambda *_, **__: None
    make_mesh = engine_module._mesh

    def real_mesh(*args: Any) -> Any:
        with _disable_current_modes():  # its ranks are numbers
            return make_mesh(*args)

    engine_module._mesh = real_mesh
    if request.strategy.zero is not None:
        _prepare_deepspeed()
        modules.append(importlib.import_module("leandit.train.parallel.deepspeed_engine"))
    state_module.first_device = lambda *_: CPU  # as the first rank: fake tensors take no memory, and need no weights
    engine_module.load_whole = lambda *_, **__: None
    for module in modules:  # on the GPU that is planned for, whatever this machine has
        module.autocast_dtype = lambda precision, device: dtype


def _prepare_deepspeed() -> None:
    with contextlib.suppress(ModuleNotFoundError):  # the engine raises with advice
        os.environ["DS_ACCELERATOR"] = "cpu"
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None  # compiles a kernel for collectives of a CPU
        importlib.import_module("deepspeed")
        for name, module in list(sys.modules.items()):
            if name.startswith("deepspeed") and hasattr(module, "assert_ints_same_as_other_ranks"):
                vars(module)["assert_ints_same_as_other_ranks"] = lambda _: None


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of every storage from its allocation until it is freed.

    Args:
      device_type: of whose allocator the rounding is.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.moments: list[tuple[int, ...]] = []  # bytes of each category after each allocation
        self._rounding = ROUNDING[device_type]
        self._known: dict[int, tuple[Any, str, int]] = {}
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> None:
            """FSDP frees gathered weights by resizing their storage, which no operation shows."""
            resize(storage, num_bytes)
            self._count_again(storage)

        torch.UntypedStorage.resize_ = resized  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls are of this question, which makes no tensor
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # its inner tensors are dispatched, and counted
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0  # an optimizer that is not fused reads found_inf
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._record(leaf)
        return result

    def assign(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Set the category of some tensors; all others are activations."""
        for tensor in tensors:
            for part in _parts(tensor):
                storage = part.untyped_storage()
                if id(storage) not in self._known:
                    self._record(part)
                reference, previous, num_bytes = self._known[id(storage)]
                self.live[previous] -= num_bytes
                self.live[category] += num_bytes
                self._known[id(storage)] = (reference, category, num_bytes)

    def _count_again(self, storage: torch.UntypedStorage) -> None:
        if known := self._known.get(id(storage)):
            reference, category, previous = known
            num_bytes = self._rounded(storage)
            self._known[id(storage)] = (reference, category, num_bytes)
            self.live[category] += num_bytes - previous
            self._note()

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return math.ceil(storage.nbytes() / self._rounding) * self._rounding

    def _note(self) -> None:
        self.moments.append(tuple(self.live[name] for name in CATEGORIES))

    def _record(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":  # it has no bytes on any device; DeepSpeed keeps shapes so
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        num_bytes = self._rounded(storage)
        reference = weakref.ref(storage, functools.partial(self._freed, key))
        self._known[key] = (reference, ACTIVATIONS, num_bytes)
        self.live[ACTIVATIONS] += num_bytes
        self._note()

    def _freed(self, key: int, _: Any) -> None:
        _, category, num_bytes = self._known.pop(key)
        self.live[category] -= num_bytes


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a tensor subclass (8-bit states, sharded tensors)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    inner = [getattr(tensor, name) for name in names]  # a sharded tensor names its mesh too
    return [part for one in inner if isinstance(one, Tensor) for part in _parts(one)]


if __name__ == "__main__":
    main()
