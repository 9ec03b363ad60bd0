"""Frozen blocks that live on the host and pass through a few device buffers.

A block's frozen weights lie one behind the other in one page-locked host buffer, so that a block is one copy. A ring of
device buffers takes the blocks in turn. When a block is entered it is there already, and the copy of the next one
starts: the next in order in a forward, the previous in a backward. The buffer that is overwritten is the one that was
used longest ago; everything that read it has been queued by then, so waiting for the queue is enough. Nothing is ever
copied back, because nothing changes a frozen weight.

While a block is away its parameters show one NaN (or zero byte) stretched over their shape: shapes, types and devices
stay what they were, and a read at the wrong moment is seen in the loss. Taking a block out raises the version of its
parameters, so that autograd refuses to use what an earlier forward saved of them; a block must therefore be recomputed
in the backward (gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optim_patches.transfers import Transfers

_ALIGNMENT = 256


def in_backward() -> bool:
    """Whether this code runs inside a backward pass, as a recomputation does."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Counts:
    """What happened since the blocks were put on the host."""

    calls: int = 0
    backward_calls: int = 0
    copies: int = 0
    copied_bytes: int = 0
    late: int = 0  # copies that were started only when the block was needed


@dataclass
class Piece:
    """One parameter and its place in the block's buffer."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    offset: int
    hollow: Tensor

    def view(self, buffer: Tensor) -> Tensor:
        shape, dtype = self.hollow.shape, self.hollow.dtype
        return buffer[self.offset : self.offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def frozen_parameters(block: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """``(owner, name, parameter)`` of what is not trained in a block: everything but its adapters."""
    found, seen = [], set()
    for owner in block.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((owner, name, parameter))
    return found


def frozen_bytes(block: nn.Module) -> int:
    """Device memory that a block's frozen parameters take, in one buffer."""
    return sum(_aligned(parameter.nbytes) for _, _, parameter in frozen_parameters(block))


class HostBlock:
    """The frozen parameters of one block, kept in a host buffer."""

    def __init__(self, block: nn.Module, *, transfers: Transfers, device: torch.device) -> None:
        self.pieces: list[Piece] = []
        offset = 0
        for owner, name, parameter in frozen_parameters(block):
            hollow = _hollow(parameter, device)
            self.pieces.append(Piece(owner, name, parameter, offset, hollow))
            offset += _aligned(parameter.nbytes)
        self.size = offset
        self._views: dict[int, list[Tensor]] = {}  # of the pieces, by the address of the device buffer
        self.host = transfers.host_buffer(offset)
        for piece in self.pieces:
            piece.view(self.host).copy_(piece.parameter.data)
            piece.parameter.data = piece.hollow

    def bind(self, buffer: Tensor) -> None:
        """Let the parameters be what lies in a device buffer."""
        views = self._views.get(buffer.data_ptr())
        if views is None:
            views = self._views[buffer.data_ptr()] = [piece.view(buffer) for piece in self.pieces]
        for piece, view in zip(self.pieces, views, strict=True):
            piece.parameter.data = view

    def leave(self) -> None:
        """Take the parameters out of their device buffer."""
        for piece in self.pieces:
            piece.parameter.data = piece.hollow
        torch.autograd.graph.increment_version([piece.parameter for piece in self.pieces])

    def restore(self) -> None:
        """Ordinary parameters again, on the device."""
        self._views.clear()
        for piece in self.pieces:
            piece.parameter.data = piece.view(self.host).to(piece.hollow.device, copy=True)


@dataclass
class Slot:
    """One device buffer of the ring."""

    buffer: Tensor
    block: int | None = None
    ticket: Any = None  # of a copy that nobody waited for yet
    used: int = -1  # when it was last used, by the ring's clock


class BlockRing:
    """Brings blocks to the device in the order in which they are used.

    Args:
        blocks: the host blocks, in the order of the forward.
        ends: numbers of the blocks with which a network ends (several networks may share a ring).
        slots: device buffers; with two, one block computes while the next one comes.
    """

    def __init__(self, blocks: Sequence[HostBlock], *, ends: Sequence[int], transfers: Transfers, slots: int) -> None:
        self.blocks = list(blocks)
        self.transfers = transfers
        self.counts = Counts()
        size = max(block.size for block in self.blocks)
        self.slots = [Slot(transfers.device_buffer(size)) for _ in range(slots)]
        self.host_bytes, self.device_bytes = sum(block.size for block in self.blocks), slots * size
        self._next, self._previous = _neighbours(len(self.blocks), ends)
        self._clock = 0

    def enter(self, number: int, *, backward: bool, again: bool = False) -> None:
        """Have a block on the device, and let the one that follows come.

        Args:
            backward: whether this is the backward, in which the blocks are needed in reverse.
            again: whether a further forward follows this one, as when sampling: the first block comes after the last.
        """
        self.counts.calls += 1
        self.counts.backward_calls += backward
        self.counts.late += self._find(number) is None
        self.bring(number)
        window = self._window(number, backward=backward, again=again)
        for following in window[1:]:
            if self._find(following) is None:
                self._start(following, keep=window)

    def bring(self, number: int) -> None:
        """Have a block on the device."""
        slot = self._find(number) or self._start(number)
        if slot.ticket is not None:
            self.transfers.finish(slot.ticket)
            slot.ticket = None
        self._clock += 1
        slot.used = self._clock

    def close(self) -> None:
        """Make all parameters ordinary ones again, and give up the buffers."""
        self._empty()
        for block in self.blocks:
            block.restore()
            self.transfers.release(block.host)
        self.slots.clear()

    def _empty(self) -> None:
        for slot in self.slots:
            if slot.ticket is not None:
                self.transfers.finish(slot.ticket)
            if slot.block is not None:
                self.blocks[slot.block].leave()
            slot.block, slot.ticket = None, None

    def _find(self, number: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.block == number), None)

    def _window(self, number: int, *, backward: bool, again: bool) -> list[int]:
        """A block and those that follow it, as many as there are buffers."""
        window = [number]
        while len(window) < len(self.slots):
            following = self._previous[window[-1]] if backward else self._next[window[-1]]
            if following is None and again and not backward:
                following = self._first(number)
            if following is None or following in window:
                break
            window.append(following)
        return window

    def _start(self, number: int, *, keep: Sequence[int] = ()) -> Slot:
        slot = min((each for each in self.slots if each.block not in keep), key=lambda each: each.used)
        if slot.ticket is not None:  # came and was never used: its copy must not run into the next one
            self.transfers.finish(slot.ticket)
        if slot.block is not None:
            self.blocks[slot.block].leave()
        block = self.blocks[number]
        self._clock += 1
        slot.block, slot.used = number, self._clock
        slot.ticket = self.transfers.start(block.host, slot.buffer[: block.size])
        block.bind(slot.buffer)
        self.counts.copies += 1
        self.counts.copied_bytes += block.size
        return slot

    def _first(self, number: int) -> int:
        while self._previous[number] is not None:
            number = self._previous[number]
        return number


class StreamedCall:
    """Stands in a block's compiled call slot: brings the block, then calls it. It stays outside of compiled code."""

    def __init__(self, block: nn.Module, *, ring: BlockRing, number: int) -> None:
        self.inner = block._compiled_call_impl
        self.call = block._call_impl if self.inner is None else self.inner
        self.ring = ring
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backward, grad = in_backward(), torch.is_grad_enabled()
        self.ring.enter(self.number, backward=backward, again=not grad)
        out = self.call(*args, **kwargs)
        if grad and not backward:
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._before_backward)
        return out

    def _before_backward(self, gradient: Tensor) -> None:
        """A backward may read a weight before it recomputes anything, so the block comes first."""
        self.ring.enter(self.number, backward=True)


@dataclass
class StateHooks:
    """State dicts hold the real weights of blocks that are away."""

    ring: BlockRing
    handles: list[Any] = field(default_factory=list)

    def install(self) -> None:
        for number, block in enumerate(self.ring.blocks):
            owners: dict[int, list[Piece]] = {}
            for piece in block.pieces:
                owners.setdefault(id(piece.owner), []).append(piece)
            for pieces in owners.values():
                self.handles.append(pieces[0].owner.register_state_dict_pre_hook(self._bring(number)))
                self.handles.append(pieces[0].owner.register_state_dict_post_hook(self._swap(block, pieces)))

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _bring(self, number: int) -> Callable[..., None]:
        def bring(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            self.ring.bring(number)

        return bring

    def _swap(self, block: HostBlock, pieces: list[Piece]) -> Callable[..., None]:
        def swap(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for piece in pieces:
                key = prefix + piece.name
                if key in state and state[key].data_ptr() == piece.parameter.data_ptr():  # not made anew by others
                    state[key] = piece.view(block.host)

        return swap


def _neighbours(count: int, ends: Sequence[int]) -> tuple[list[int | None], list[int | None]]:
    following = [None if number in ends else number + 1 for number in range(count)]
    previous = [number - 1 if number and number - 1 not in ends else None for number in range(count)]
    return following, previous


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _hollow(parameter: Tensor, device: torch.device) -> Tensor:
    value = torch.nan if parameter.is_floating_point() else 0
    return torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
