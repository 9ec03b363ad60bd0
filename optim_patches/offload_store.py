"""Tensors that wait on the host between the forward and the backward.

Packing starts a copy to page-locked memory and drops the device's tensor when that copy is done; unpacking takes the
copy back. The backward asks for them in reverse, so taking one back starts the copy of the one before it, which then
runs beside the recomputation. Copies in both directions have a stream each. The last tensors are asked for before they
have left, and are handed out as they are.

Host memory is used again from step to step, also for other shapes. A device tensor is held until its copy is through,
two at a time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim_patches.transfers import Transfers

_IN_FLIGHT = 2


@dataclass
class Counts:
    """What happened so far."""

    packed: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    not_left: int = 0  # asked for while their copy was on its way
    ahead: int = 0  # brought back before they were asked for
    late: int = 0


class Packed:
    """One tensor that is on the host."""

    def __init__(self, tensor: Tensor, *, host: Tensor, order: int) -> None:
        self.shape, self.dtype, self.size = tensor.shape, tensor.dtype, tensor.nbytes
        self.host = host
        self.order = order  # in the forward
        self.on_device: Tensor | None = None  # its bytes, when they are there
        self.arriving: Any = None  # ticket of the copy that brings them

    def tensor(self) -> Tensor:
        return self.on_device.view(self.dtype).view(self.shape)


@dataclass
class Leaving:
    """A device tensor whose copy to the host is not known to be through."""

    packed: weakref.ref[Packed]
    data: Tensor
    ticket: Any


class OffloadStore:
    """Packs and unpacks the tensors that autograd saves.

    Args:
        outward: copies to the host.
        inward: copies to the device.
        smallest: bytes below which a tensor stays where it is.
    """

    def __init__(self, *, outward: Transfers, inward: Transfers, smallest: int) -> None:
        self.outward, self.inward = outward, inward
        self.smallest = smallest
        self.counts = Counts()
        self._buffers: list[Tensor] = []
        self._free: list[Tensor] = []
        self._leaving: deque[Leaving] = deque()
        self._packed: list[weakref.ref[Packed]] = []  # in the order of the forward
        self._arrived: Any = None  # ticket of the last copy to the device
        self._wanted: frozenset[int] = frozenset()

    @contextmanager
    def saving(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A block in which those of ``tensors`` that autograd saves go to the host."""
        self._wanted = frozenset(tensor.data_ptr() for tensor in tensors if self._fits(tensor))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._wanted = frozenset()

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """Called by autograd when it saves a tensor."""
        if tensor.data_ptr() not in self._wanted or not self._fits(tensor):
            return tensor
        if self._arrived is not None:  # a host buffer that is written again must have been read
            self.inward.finish(self._arrived)
            self._arrived = None
        host = self._host_buffer(tensor.nbytes)
        packed = Packed(tensor, host=host, order=self.counts.packed)
        weakref.finalize(packed, self._free.append, host)
        data = tensor.detach().view(-1).view(torch.uint8)
        ticket = self.outward.start(data, host[: packed.size])
        self._leaving.append(Leaving(weakref.ref(packed), data, ticket))
        self._packed.append(weakref.ref(packed))
        self.counts.packed += 1
        self.counts.bytes_out += packed.size
        self._settle(keep=_IN_FLIGHT)
        return packed

    def unpack(self, saved: Tensor | Packed) -> Tensor:
        """Called by autograd when it needs a tensor again."""
        if isinstance(saved, Tensor):
            return saved
        self._hand_out_leaving()
        if saved.on_device is None:
            self.counts.late += 1
            self._fetch(saved)
        earlier = self._before(saved)
        if earlier is not None and earlier.on_device is None:
            self.counts.ahead += 1
            self._fetch(earlier)
        if saved.arriving is not None:
            self.inward.finish(saved.arriving)
            saved.arriving = None
        return saved.tensor()

    def close(self) -> None:
        """Give the host memory back; nothing may be packed any more."""
        self._settle(keep=0)
        self.inward.drain()
        for host in self._buffers:
            self.outward.release(host)
        self._buffers.clear()
        self._free.clear()

    @property
    def host_bytes(self) -> int:
        return sum(host.numel() for host in self._buffers)

    def _fits(self, tensor: Tensor) -> bool:
        return tensor.nbytes >= max(self.smallest, 1) and tensor.is_contiguous()

    def _host_buffer(self, size: int) -> Tensor:
        """A free buffer, the smallest that is large enough, or a new one in place of a free one that is too small."""
        free = sorted(self._free, key=Tensor.numel)
        found = next((host for host in free if host.numel() >= size), None)
        if found is None and free:
            self.inward.drain()
            self._drop(self._free, free[-1])
            self._drop(self._buffers, free[-1])
            self.outward.release(free[-1])
        if found is None:
            found = self.outward.host_buffer(size)
            self._buffers.append(found)
        else:
            self._drop(self._free, found)
        return found

    @staticmethod
    def _drop(buffers: list[Tensor], gone: Tensor) -> None:
        del buffers[next(k for k, each in enumerate(buffers) if each is gone)]

    def _settle(self, *, keep: int) -> None:
        """Let go of device tensors: what is queued from now on waits for their copies, and may reuse the memory."""
        while len(self._leaving) > keep:
            self.outward.finish(self._leaving.popleft().ticket)

    def _hand_out_leaving(self) -> None:
        """Tensors that are needed while they leave need not come back."""
        for leaving in self._leaving:
            packed = leaving.packed()
            if packed is not None and packed.on_device is None:
                packed.on_device = leaving.data
                self.counts.not_left += 1
        self._settle(keep=0)

    def _fetch(self, packed: Packed) -> None:
        packed.on_device = self.inward.device_buffer(packed.size)
        packed.arriving = self._arrived = self.inward.start(packed.host[: packed.size], packed.on_device)
        self.counts.bytes_back += packed.size

    def _before(self, packed: Packed) -> Packed | None:
        """The tensor that was packed before this one and is still needed."""
        alive = [(reference, reference()) for reference in self._packed]
        self._packed = [reference for reference, each in alive if each is not None]
        earlier = [each for _, each in alive if each is not None and each.order < packed.order]
        return earlier[-1] if earlier else None
