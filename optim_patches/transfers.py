"""Copies between pinned host memory and a device, beside the computation.

A copy is started on a stream of its own and begins when everything that was queued for computing before it is done, so
that it may overwrite what that work was reading. ``finish`` makes what is queued from then on wait for the copy; the
host never waits. Page-locked memory is registered rather than taken from PyTorch's pinned pool, which rounds each
piece up to a power of two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Transfers(Protocol):
    """Moves bytes. Buffers are one-dimensional ``uint8`` tensors."""

    def host_buffer(self, size: int) -> Tensor:
        """Page-locked host memory."""

    def device_buffer(self, size: int) -> Tensor:
        """Device memory."""

    def start(self, source: Tensor, target: Tensor) -> Any:
        """Copy as soon as the work queued so far is done; returns what :meth:`finish` takes."""

    def finish(self, ticket: Any) -> None:
        """Let the work queued from now on wait for a copy."""

    def drain(self) -> None:
        """Let the host wait until all copies are done."""

    def release(self, host: Tensor) -> None:
        """Give up a host buffer, after its last copy in this object."""


class CudaTransfers:
    """Copies on a CUDA stream."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self._registered: set[int] = set()

    def host_buffer(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        if size and int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
            self._registered.add(buffer.data_ptr())
            return buffer
        with suppress(RuntimeError):  # the next launch reports the error of the registration, and so forgets it
            torch.zeros(1, device=self.device)
        logger.warning("Page-locking %.1f MiB of host memory failed; PyTorch's pinned pool is used.", size / 2**20)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def start(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def finish(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def drain(self) -> None:
        self.stream.synchronize()

    def release(self, host: Tensor) -> None:
        self.drain()
        if host.data_ptr() in self._registered:
            self._registered.remove(host.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


#: How bytes move on each kind of device. On a CPU both sides are the same memory, and there is nothing to gain.
BACKENDS: dict[str, Callable[[], Transfers]] = {"cuda": CudaTransfers}
