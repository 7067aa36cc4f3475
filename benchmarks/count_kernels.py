"""How many kernels a training step launches, and how many bytes they read and write: ours beside the usual loops.

    python benchmarks/count_kernels.py dit-xl-2-256 --set run.global_batch=64

Counted on fake tensors, which have shapes and no bytes, so it needs neither memory nor a GPU. In eager code, each
operation that is not a view is a kernel, also one over a list of tensors. In compiled blocks, each node that torch's
compiler has left after fusing is one. What goes into and comes out of a kernel counts once, as if no cache held it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from measuring import clear_caches, log, print_table
from torch import Tensor
from torch._inductor import config as compiler
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from training import DIFFUSERS, FAST_DIT, OURS, Setting, Step, diffusers_step, fast_dit_step, is_in_diffusers, our_step

from leandit.datasets.units import readable_size
from leandit.tools.plan.workload import workload_at_resolution
from leandit.train.config import load

aten = torch.ops.aten
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias"}


@dataclass(frozen=True)
class Work:
    """What a step asks of the device.

    Args:
      kernels: launched.
      products: of them matrix products, convolutions and attention.
      bytes: read and written.
      flops: of the products.
    """

    kernels: int = 0
    products: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def count(make_step: Callable[[], Step]) -> Work:
    """The work of one step that is not the first.

    Args:
      make_step: builds model and optimizer on the CPU, and returns what makes one step.
    """
    clear_caches()
    counter = _Counter()
    scheduled = mock.patch.object(GraphLowering, "compile_to_module", lambda graph: counter.schedule(graph))
    with _uncached(), _as_on_a_gpu(), scheduled, FakeTensorMode(allow_non_fake_inputs=True), counter:
        step = make_step()
        step()
        counter.work = Work()
        step()
    clear_caches()
    return counter.work


class _Counter(TorchDispatchMode):
    """Adds up eager operations, and compiled graphs whenever they run."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let blocks be compiled while this mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 1  # a loss that is read, and the number of a step
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.namespace == "prim" or func.overloadpacket.__name__ in FREE):
            size = sum(_bytes(leaf) for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
            flops = _flops(func, args, kwargs or {}, result)
            self.work += Work(1, int(flops > 0), size, flops)
        return result

    def schedule(self, graph: Any) -> Any:
        """In the place of compiling a graph: fuse it, and count its kernels whenever it is called."""
        graph.init_wrapper_code()
        graph._update_scheduler()
        nodes = [node for node in graph.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
        sizes = [size for node in nodes if (size := node.get_read_write_buffers_sizes())]  # 0: it only names an output
        calls = [node for node in graph.orig_gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        flops = [_flops(node.target, *_values((node.args, node.kwargs, node))) for node in calls]
        work = Work(len(sizes), sum(each > 0 for each in flops), sum(sizes), sum(flops))

        def call(inputs: list[Any]) -> list[Any]:
            self.work += work
            given = dict(zip(graph.orig_gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
            (results,) = graph.orig_gm.graph.output_node().args
            return [given[node] if node in given else _blank(node) for node in results]

        return SimpleNamespace(call=call, __file__=__file__, runner=None)


def _values(arguments: Any) -> Any:
    """The fake tensors in the place of the nodes that make them."""
    return tree_map(lambda leaf: leaf.meta.get("val") if isinstance(leaf, Node) else leaf, arguments)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Of a product; 0 of other operations."""
    packet = func.overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(x.shape for x in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(x.shape for x in args[:4]))
    if packet is aten.convolution_backward:  # torch's formula takes the groups of a depthwise one for one group
        sides = 2 - args[-1][:2].count(False)
        return sides * conv_flop_count(args[1].shape, args[2].shape, args[0].shape)
    return flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0


def _bytes(tensor: Tensor) -> int:
    """Bytes of its elements; an expanded axis counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def _blank(node: Any) -> Any:
    """A fake tensor of the size and order of a node's result; what is no tensor as it is."""
    value = node.meta["val"] if isinstance(node, Node) else node
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Compile again: a graph in torch's cache would not be scheduled."""
    torch._dynamo.reset()
    try:
        with compiler.patch(force_disable_caches=True):
            yield
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """torch's AdamW and its norm of gradients take lists of tensors, as they do on a GPU."""
    with (
        mock.patch("torch.optim.adam._default_to_fused_or_foreach", return_value=(False, True)),
        mock.patch("torch.nn.utils.clip_grad._has_foreach_support", return_value=True),
    ):
        yield


def count_steps(setting: Setting, fast_dit: Path | None = None) -> dict[str, Work]:
    """The work of one step of ours, of ours without compiled blocks, and of the usual loops."""
    setting = replace(setting, as_on_gpu=True)
    work, run = setting.work, setting.work.recipe.run
    steps: dict[str, Callable[[], Step]] = {OURS: lambda: our_step(setting)}
    if run.compile:
        eager = work.recipe.model_copy(update={"run": run.model_copy(update={"compile": False})})
        eager_setting = replace(setting, work=replace(work, recipe=eager))
        steps["not compiled"] = lambda: our_step(eager_setting)
    if is_in_diffusers(work.spec):
        steps[DIFFUSERS] = lambda: diffusers_step(setting)
    if fast_dit:
        steps[FAST_DIT] = lambda: fast_dit_step(setting, fast_dit)
    counted = {}
    for name, make_step in steps.items():
        log(f"counting {name}")
        counted[name] = count(make_step)
    return counted


def main(
    recipe: Annotated[str, typer.Argument(help="Name of a train recipe, or a TOML file.")],
    resolution: Annotated[int, typer.Option(help="Side of the images, in pixels.")] = 256,
    fast_dit: Annotated[Path | None, typer.Option(help="Checkout of github.com/chuanyangjin/fast-DiT.")] = None,
    overrides: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key.")] = [],  # noqa: B006
) -> None:
    """Kernels, bytes and FLOPs of one training step, ours and the usual ones; on any machine."""
    work = workload_at_resolution(load(recipe, overrides), resolution)
    counted = count_steps(Setting(work, torch.device("cpu")), fast_dit)
    ours, rows = counted[OURS], [["step", "kernels", "products", "read and written", "FLOPs"]]
    for name, each in counted.items():
        times = [
            "" if each is ours else f" ({a / b:.2f}x)"
            for a, b in ((each.kernels, ours.kernels), (each.bytes, ours.bytes))
        ]
        size = readable_size(each.bytes) + times[1]
        rows.append([name, f"{each.kernels:,}{times[0]}", f"{each.products:,}", size, f"{each.flops / 1e12:.1f} T"])
    batch, microbatch = work.recipe.run.global_batch, work.recipe.run.microbatch
    print(f"{work.spec.name}, {resolution} px, {batch} images in microbatches of {microbatch or batch}")
    print_table(rows)


if __name__ == "__main__":
    typer.run(main)
