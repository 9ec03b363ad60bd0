"""A stand-in for CUDA graphs: recorded places that are overwritten, one shared memory, code that runs instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from optim_patches import graph_cache


class FakeCapture:
    """Makes :class:`FakeGraphs`; what one keeps between forward and backward is lost when another runs."""

    made: list[FakeCapture] = []
    fails: str = ""

    def __init__(self) -> None:
        self.owner: FakeGraphs | None = None
        self.recorded: list[FakeGraphs] = []
        self.made.append(self)

    def __call__(
        self, function: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> FakeGraphs:
        if self.fails:
            raise RuntimeError(self.fails)
        with torch.random.fork_rng(devices=[]):
            self.recorded.append(FakeGraphs(self, function, inputs, parameters))
        return self.recorded[-1]


class FakeGraphs:
    def __init__(self, capture: FakeCapture, function, inputs, parameters) -> None:
        self.capture, self.function = capture, function
        self.statics = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        own = [tensor for tensor in self.statics if tensor.requires_grad]
        out = function(self.statics)
        found = torch.autograd.grad(out, [*own, *parameters], torch.zeros_like(out), allow_unused=True)
        self.used = [gradient is not None for gradient in found[len(own) :]]
        self.wanted = [*own, *(p for p, used in zip(parameters, self.used, strict=True) if used)]
        self.places = [parameter.data_ptr() for parameter in self.wanted[len(own) :]]
        self.out, self.gradient = out.detach().clone(), torch.zeros_like(out)
        self.gradients = [torch.empty_like(tensor) for tensor in self.wanted]
        self.live: Tensor | None = None

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        if self.capture.owner is not None:
            self.capture.owner.live = None  # its memory is used now
        self.capture.owner = self
        with torch.no_grad():
            for static, tensor in zip(self.statics, inputs, strict=True):
                static.copy_(tensor)
        with torch.enable_grad():
            self.live = self.function(self.statics)
        self.out.copy_(self.live.detach())
        return self.out

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        assert self.live is not None, "another graph has run in this one's memory"
        self.gradient.copy_(gradient)
        found = torch.autograd.grad(self.live, self.wanted, self.gradient, allow_unused=True)
        results = [None if value is None else static.copy_(value)
                   for static, value in zip(self.gradients, found, strict=True)]
        self.live = None
        self.out.fill_(torch.nan)
        return results


def install(monkeypatch, *, fails: str = "") -> list[FakeCapture]:
    """Let the CPU record; the list fills with what patches make."""
    FakeCapture.made = []
    monkeypatch.setattr(FakeCapture, "fails", fails)
    monkeypatch.setitem(graph_cache.CAPTURES, "cpu", FakeCapture)
    return FakeCapture.made
