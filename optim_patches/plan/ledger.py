"""Live bytes while code runs, by what they are for.

A :class:`Ledger` watches every operation. A storage counts from the operation that brings it up until nothing refers to
it any more, so what autograd keeps is counted exactly as long as autograd keeps it. Nothing needs to be computed for
that: with tensors that have a shape and no contents, the model's own code, autograd and checkpointing give the same
storages in the same order as a real step.

Two kinds of tensors without contents stand for the two kinds of device:

* ``cpu``: fake CPU tensors, which take the code paths of the CPU.
* ``cuda``: meta tensors, which take those of an accelerator. Two operators decompose there although an accelerator has
  one kernel for each; :func:`accelerator_kernels` puts the kernels' own shape functions in their place.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The caching allocator of CUDA hands out multiples of this many bytes.
CUDA_GRANULE = 512
WEIGHTS, GRADIENTS, INPUTS = "weights", "gradients", "inputs"
ACTIVATIONS, RECOMPUTED, WORKSPACE = "activations", "recomputed", "workspace"


@dataclass
class Segment:
    """The largest sum of live bytes in one stretch of the code, and its parts at that moment."""

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class Ledger(TorchDispatchMode):
    """Counts storages by category and remembers the largest sum of each named segment."""

    def __init__(self, *, granule: int = 1) -> None:
        super().__init__()
        self.granule = granule
        self.parts: Counter[str] = Counter()
        self.total = 0
        self.segments: dict[str, Segment] = {}
        #: Told of every operation, its arguments and its result.
        self.observer: Callable[[Any, Any, Any], None] | None = None
        self._segment = Segment()
        self._entries: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A backward computes with gradients off; what it computes with gradients on is a block's forward once more.
        again = in_backward() and torch.is_grad_enabled()
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf, RECOMPUTED if again else WORKSPACE)
        if self.observer is not None:
            self.observer(func, args, out)
        return out

    def enter(self, name: str) -> None:
        """Begin a segment; a name that comes again goes on with its record."""
        self._segment = self.segments.setdefault(name, Segment())
        self._look()

    def add(self, tensor: Tensor, category: str) -> None:
        """Count a tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        if storage in self._entries:
            return
        size = -(-storage.nbytes() // self.granule) * self.granule
        entry = [size, category]
        self._entries[storage] = entry
        self.parts[category] += size
        self.total += size
        self._look()
        weakref.finalize(storage, self._free, entry)

    def pass_through(self, size: int) -> None:
        """Count bytes that a kernel holds only while it runs."""
        entry = [size, WORKSPACE]
        self.parts[WORKSPACE] += size
        self.total += size
        self._look()
        self._free(entry)

    def own(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count tensors under a category, also those that are known under another."""
        for tensor in tensors:
            self.add(tensor, category)
            self._move(tensor, category)

    def kept(self, tensor: Tensor) -> Tensor:
        """Called for what autograd saves: a temporary result becomes an activation."""
        entry = self._entries.get(tensor.untyped_storage())
        if entry is not None and entry[1] == WORKSPACE:
            self._move(tensor, RECOMPUTED if in_backward() else ACTIVATIONS)
        return tensor.detach()

    def _move(self, tensor: Tensor, category: str) -> None:
        entry = self._entries.get(tensor.untyped_storage())
        if entry is None or entry[1] == category:
            return
        self.parts[entry[1]] -= entry[0]
        self.parts[category] += entry[0]
        entry[1] = category

    def _look(self) -> None:
        if self.total > self._segment.total:
            self._segment.total, self._segment.parts = self.total, {k: v for k, v in self.parts.items() if v}

    def _free(self, entry: list) -> None:
        self.total -= entry[0]
        self.parts[entry[1]] -= entry[0]


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def watching(ledger: Ledger) -> Iterator[None]:
    """Count, and tell what autograd saves from what it does not."""
    with torch.autograd.graph.saved_tensors_hooks(ledger.kept, lambda tensor: tensor), ledger:
        yield


@contextmanager
def empty_tensors(device: str) -> Iterator[torch.device]:
    """A block in which tensors made on the yielded device have no contents."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(FakeTensorMode())
            yield torch.device("cpu")
        else:
            stack.enter_context(accelerator_kernels())
            yield torch.device("meta")


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Attention and RMS norm as the one kernel each that an accelerator runs."""
    attention, rms = F.scaled_dot_product_attention, F.rms_norm

    def flash(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if attn_mask is not None:
            bias = attn_mask.expand(*q.shape[:-1], k.shape[-2])
            operator = torch.ops.aten._scaled_dot_product_efficient_attention
            return operator(q, k, v, bias.to(q.dtype), torch.is_grad_enabled())[0]
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]

    def fused(x: Tensor, shape: Iterable[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]

    F.scaled_dot_product_attention, F.rms_norm = flash, fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = attention, rms
