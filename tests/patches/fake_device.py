"""A device made of ordinary memory, for tests of what runs beside the computation.

A copy that was started leaves its target full of 0xFF, which reads as NaN, and happens only when somebody waits for it.
So a missing wait is NaN in the result, and so is a buffer that is overwritten too early. Page-locked memory that was
given up is spoiled in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optim_patches import transfers


@dataclass
class Copy:
    source: Tensor
    target: Tensor
    done: bool = False


class FakeTransfers:
    """Copies between CPU buffers, as late as possible."""

    made: list[FakeTransfers] = []

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.host_buffers: list[Tensor] = []
        self.device_buffers: list[Tensor] = []
        self.released = 0
        self.made.append(self)

    def host_buffer(self, size: int) -> Tensor:
        self.host_buffers.append(torch.full((size,), 0xFF, dtype=torch.uint8))
        return self.host_buffers[-1]

    def device_buffer(self, size: int) -> Tensor:
        self.device_buffers.append(torch.full((size,), 0xFF, dtype=torch.uint8))
        return self.device_buffers[-1]

    def start(self, source: Tensor, target: Tensor) -> Copy:
        target.fill_(0xFF)
        self.copies.append(Copy(source, target))
        return self.copies[-1]

    def finish(self, ticket: Copy) -> None:
        if not ticket.done:
            ticket.target.copy_(ticket.source)
            ticket.done = True

    def drain(self) -> None:
        for copy in self.copies:
            self.finish(copy)

    def release(self, host: Tensor) -> None:
        host.fill_(0xFF)
        self.released += 1


def install(monkeypatch) -> list[FakeTransfers]:
    """Make the CPU a device with memory of its own; the list fills with what patches make."""
    FakeTransfers.made = []
    monkeypatch.setitem(transfers.BACKENDS, "cpu", FakeTransfers)
    return FakeTransfers.made
