"""Peak memory of one call.

On CUDA the allocator knows. On the CPU every operation is watched: storages are counted when they first appear and
until they are freed, which includes what autograd keeps and leaves out what kernels use internally.
``keep_freed_memory`` is for timing: it takes the page faults of fresh memory out of it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

#: Options of ``mallopt(3)`` and values: no allocation by ``mmap``, no memory given back, the heap grown in big steps.
_MALLOC_OPTIONS = {-3: 2**31 - 1, -1: 2**31 - 1, -2: 2**28}


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next allocation; False where it is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) for option, value in _MALLOC_OPTIONS.items())


class LiveBytes(TorchDispatchMode):
    """Bytes of storages created inside the context that are alive, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return out

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """Leave out storages that existed before, which views inside the context would bring up."""
        for tensor in tensors:
            self._seen.add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.current -= size


def peak_bytes(call: Callable[[], None], device: torch.device, *, held: list[torch.Tensor]) -> int:
    """Peak bytes above ``held``, the tensors that exist before the call (weights, inputs)."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    tracker = LiveBytes()
    tracker.ignore(held)
    with tracker:
        call()
    return tracker.peak
