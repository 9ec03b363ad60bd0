"""A network's block stack as captured graphs, one pair (forward, backward) per shape.

The first call with a shape runs the blocks a few times, then records what they launch, forward and backward. Later
calls copy their inputs into the recorded places, replay, and hand out copies of what comes out. All graphs take their
memory from one pool: what one graph keeps between its forward and its backward, another may overwrite. So between a
forward and its backward no other forward is replayed; such a call runs the blocks themselves, and is counted.

A graph reads parameters where they were when it was recorded. When one has moved, it is recorded anew.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

logger = logging.getLogger(__name__)

WARMUP = 3


class Graphs(Protocol):
    """A recorded forward and backward.

    Attributes:
        used: for each parameter that was offered, whether a gradient reaches it.
    """

    used: list[bool]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Replay the forward; the result is overwritten by the next one."""

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Replay the backward: gradients of the inputs that want one, then of the parameters that are used."""


Capture = Callable[[Callable[[Sequence[Tensor]], Tensor], Sequence[Tensor], Sequence[Tensor]], Graphs]


class CudaGraphs:
    """Records on the current CUDA device, from a pool that all instances of one :class:`CudaCapture` share."""

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor], *,
        pool: Any,
    ) -> None:  # fmt: skip
        self.statics = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        own = [tensor for tensor in self.statics if tensor.requires_grad]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                out = function(self.statics)
                found = torch.autograd.grad(out, [*own, *parameters], torch.zeros_like(out), allow_unused=True)
        torch.cuda.current_stream().wait_stream(side)
        self.used = [gradient is not None for gradient in found[len(own) :]]
        del out, found
        wanted = [*own, *(parameter for parameter, used in zip(parameters, self.used, strict=True) if used)]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool):
            out = function(self.statics)
        self.gradient = torch.zeros_like(out)
        with torch.cuda.graph(self._backward, pool=pool):
            self.gradients = torch.autograd.grad(out, wanted, self.gradient, allow_unused=True)
        self.out = out.detach()

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            for static, tensor in zip(self.statics, inputs, strict=True):
                static.copy_(tensor)
        self._forward.replay()
        return self.out

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        self.gradient.copy_(gradient)
        self._backward.replay()
        return list(self.gradients)


class CudaCapture:
    """Makes :class:`CudaGraphs` that share their memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, function: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> CudaGraphs:
        kind = "cuda"
        with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
            # The cache of casts would hold tensors of the recording, which later code must not meet.
            with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind),
                                cache_enabled=False):  # fmt: skip
                return CudaGraphs(function, inputs, parameters, pool=self.pool)


#: What records on each kind of device.
CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": CudaCapture}


@dataclasses.dataclass
class Entry:
    """The graphs of one shape, the parameters they train, and where all parameters were."""

    graphs: Graphs
    parameters: list[nn.Parameter]
    places: tuple[int, ...]
    replays: int = 0


class _Token:
    """Lives as long as a backward is still to come."""


class GraphedBlocks:
    """Stands in for a network's ``run_blocks``.

    Attributes:
        entries: recorded graphs, by shape.
        eager: calls with gradient that ran the blocks themselves, by reason.
        failure: why recording failed; from then on nothing is recorded.
    """

    def __init__(self, model: nn.Module, *, capture: Capture, limit: int) -> None:
        self.model = model
        self.capture = capture
        self.limit = limit
        self.entries: dict[Any, Entry] = {}
        self.eager: Counter[str] = Counter()
        self.captured = 0
        self.failure = ""
        self._pending: weakref.ref[_Token] | None = None

    def __call__(self, embedded: Any) -> Tensor:
        if not torch.is_grad_enabled() or not self.model.training:
            return self._blocks(embedded)
        entry = self._entry(embedded)
        if isinstance(entry, str):
            self.eager[entry] += 1
            return self._blocks(embedded)
        entry.replays += 1
        inputs = list(_tensors(embedded).values())
        return _Replay.apply(self, entry, len(inputs), *inputs, *entry.parameters)

    def started(self) -> _Token:
        """Note that a backward is to come; it has come when the token is gone or :meth:`finished` is called."""
        token = _Token()
        self._pending = weakref.ref(token)
        return token

    def finished(self) -> None:
        self._pending = None

    def _blocks(self, embedded: Any) -> Tensor:
        return type(self.model).run_blocks(self.model, embedded)

    def _entry(self, embedded: Any) -> Entry | str:
        """The graphs for these inputs, recorded if need be, or why there are none."""
        if self.failure:
            return "recording failed"
        if self._pending is not None and self._pending() is not None:
            return "another forward waited for its backward"
        places = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        key = _key(embedded)
        entry = self.entries.get(key)
        if entry is not None and entry.places == places:
            return entry
        if entry is None and len(self.entries) >= self.limit:
            return f"more than {self.limit} shapes"
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        names = list(_tensors(embedded))

        def function(inputs: Sequence[Tensor]) -> Tensor:
            return self._blocks(dataclasses.replace(embedded, **dict(zip(names, inputs, strict=True))))

        try:
            graphs = self.capture(function, list(_tensors(embedded).values()), trained)
        except RuntimeError as error:
            self.failure = str(error).strip().splitlines()[0]
            logger.warning("--cuda_graph: recording failed, the blocks run without graphs: %s", error)
            return "recording failed"
        self.captured += 1
        used = [parameter for parameter, wanted in zip(trained, graphs.used, strict=True) if wanted]
        self.entries[key] = Entry(graphs, used, places)
        return self.entries[key]


class _Replay(torch.autograd.Function):
    """A recorded forward and backward as one node."""

    @staticmethod
    def forward(ctx: FunctionCtx, blocks: GraphedBlocks, entry: Entry, number: int, *tensors: Tensor) -> Tensor:
        ctx.blocks, ctx.entry = blocks, entry
        ctx.wanted = [tensor.requires_grad for tensor in tensors]
        ctx.token = blocks.started()
        return entry.graphs.forward(tensors[:number]).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.token is None:
            raise RuntimeError("--cuda_graph: the backward of a forward can be replayed once only.")
        found = iter(ctx.entry.graphs.backward(gradient))
        # Copies: the optimizer may keep a gradient until after the next replay.
        gradients = [next(found) if wanted else None for wanted in ctx.wanted]
        ctx.token = None
        ctx.blocks.finished()
        return None, None, None, *(None if each is None else each.clone() for each in gradients)


def _tensors(embedded: Any) -> dict[str, Tensor]:
    values = ((field.name, getattr(embedded, field.name)) for field in dataclasses.fields(embedded))
    return {name: value for name, value in values if isinstance(value, Tensor)}


def _key(embedded: Any) -> tuple[Any, ...]:
    """What a graph is recorded for."""
    tensors = _tensors(embedded)
    shapes = tuple((name, tuple(value.shape), value.dtype, value.requires_grad) for name, value in tensors.items())
    names = (field.name for field in dataclasses.fields(embedded) if field.name not in tensors)
    others = tuple((name, getattr(embedded, name)) for name in names)
    kind = next(iter(tensors.values())).device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return type(embedded), shapes, others, autocast
