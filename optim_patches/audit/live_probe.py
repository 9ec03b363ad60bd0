"""Counters on the running objects, for the first few steps only.

A denoiser and its blocks are watched through the slot that ``module.compile()`` uses: a callable there is run instead
of the module's own call. It stays outside of compiled code, costs about a microsecond a call, and changes no graph.
Encoders are watched by wrapping their ``encode``/``decode`` methods and forward. ``remove`` takes everything away again
and keeps the numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from optim_patches.audit.flops import shapes_of
from optim_patches.base import ENCODER_ROLES, Target, unwrap
from optim_patches.compile import find_blocks

KEPT_TIMESTEPS = 64


@dataclass
class ProbeCounts:
    """What was seen while the counters were installed."""

    denoiser_calls: int = 0
    block_calls: int = 0
    recomputed_calls: int = 0
    recomputed_blocks: set[str] = field(default_factory=set)
    blocks: int = 0
    blocks_visible: bool = True
    input_dtypes: Counter[str] = field(default_factory=Counter)
    autocast: Counter[str] = field(default_factory=Counter)
    encoder_devices: dict[str, Counter[str]] = field(default_factory=dict)
    encoder_calls: Counter[str] = field(default_factory=Counter)
    vae_batches: Counter[int] = field(default_factory=Counter)
    padded_calls: int = 0
    timesteps: list[torch.Tensor] = field(default_factory=list)
    graph_captures: int = 0
    graph_replays: int = 0
    first_call: tuple[tuple, dict[str, Any]] | None = None  # shapes only

    @property
    def denoiser_steps(self) -> int:
        """Training calls of the denoisers that were watched: micro-steps, where one network is trained."""
        return self.denoiser_calls


class Watched:
    """Runs ``before`` and then the call it stands for."""

    def __init__(self, module: nn.Module, before: Callable[[tuple, dict], None]) -> None:
        self.inner = module._compiled_call_impl
        self.call = module._call_impl if self.inner is None else self.inner
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.before(args, kwargs)
        return self.call(*args, **kwargs)


class Probe:
    """Installs the counters on a target, and removes them."""

    def __init__(self) -> None:
        self.counts = ProbeCounts()
        self._undo: list[Callable[[], None]] = []
        self._attention_before: dict[str, dict[str, int]] = {}

    def install(self, target: Target) -> None:
        """Start counting. Call after the models are wrapped and compiled, before the first step."""
        encoders = {role: unwrap(model) for role, model in target.models.items() if role in ENCODER_ROLES}
        for role, model in encoders.items():
            self._watch_encoder(role, model)
        for role, model in target.denoisers().items():
            self._watch(model, functools.partial(self._saw_denoiser, encoders, target.device))
            if model._compiled_call_impl.inner is not None:
                self.counts.blocks_visible = False
                continue
            for name, block in find_blocks(model):
                self.counts.blocks += 1
                position = _position(block, "seq_lens")
                self._watch(block, functools.partial(self._saw_block, f"{role}.{name}", target.device, position))
        self._watch_graphs()
        self._attention_before = attention_counts()

    def remove(self) -> None:
        """Stop counting; the numbers stay."""
        while self._undo:
            self._undo.pop()()

    def attention(self) -> dict[str, int]:
        """Attention calls per backend since ``install``; calls in compiled graphs are counted once per graph."""
        before = self._attention_before
        totals = {}
        for name, kinds in attention_counts().items():
            delta = sum(kinds.values()) - sum(before.get(name, {}).values())
            if delta:
                totals[name] = delta
        return totals

    def _watch_graphs(self) -> None:
        """Count CUDA graphs that anybody captures and replays."""
        graph = torch.cuda.CUDAGraph
        for method, counter in (("capture_begin", "graph_captures"), ("replay", "graph_replays")):
            own = getattr(graph, method, None)
            if own is None:
                continue

            def call(*args: Any, _own: Callable[..., Any] = own, _counter: str = counter, **kwargs: Any) -> Any:
                setattr(self.counts, _counter, getattr(self.counts, _counter) + 1)
                return _own(*args, **kwargs)

            inherited = method not in vars(graph)
            setattr(graph, method, call)
            self._undo.append(functools.partial(delattr, graph, method) if inherited
                              else functools.partial(setattr, graph, method, own))  # fmt: skip

    def _watch(self, module: nn.Module, before: Callable[[tuple, dict], None]) -> None:
        watched = Watched(module, before)
        module._compiled_call_impl = watched

        def undo() -> None:
            if module._compiled_call_impl is watched:
                module._compiled_call_impl = watched.inner

        self._undo.append(undo)

    def _watch_encoder(self, role: str, model: nn.Module) -> None:
        handle = model.register_forward_pre_hook(lambda *_: self._saw_encoder(role, None))
        self._undo.append(handle.remove)
        for method in ("encode", "decode"):
            own = getattr(model, method, None)
            if own is None:
                continue
            earlier = {key: value for key, value in model.__dict__.items() if key == method}
            model.__dict__[method] = self._wrapped(role, own)
            self._undo.append(functools.partial(model.__dict__.update, earlier))
            self._undo.append(functools.partial(model.__dict__.pop, method, None))

    def _wrapped(self, role: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()), None)
            self._saw_encoder(role, first)
            return method(*args, **kwargs)

        return call

    def _saw_encoder(self, role: str, value: Any) -> None:
        self.counts.encoder_calls[role] += 1
        if role == "vae" and isinstance(value, torch.Tensor):
            self.counts.vae_batches[value.shape[0]] += 1

    def _saw_denoiser(self, encoders: dict[str, nn.Module], device: str, args: tuple, kwargs: dict) -> None:
        if not torch.is_grad_enabled():
            return  # sampling, or a network that is only asked, not trained
        self.counts.denoiser_calls += 1
        if self.counts.first_call is None:
            self.counts.first_call = shapes_of((args, kwargs))
        times = kwargs.get("t", kwargs.get("timestep"))
        if isinstance(times, torch.Tensor) and len(self.counts.timesteps) < KEPT_TIMESTEPS:
            self.counts.timesteps.append(times.detach())
        for role, model in encoders.items():
            parameter = next(model.parameters(), None)
            if parameter is not None:
                self.counts.encoder_devices.setdefault(role, Counter())[parameter.device.type] += 1

    def _saw_block(self, name: str, device: str, lens_at: int, args: tuple, kwargs: dict) -> None:
        counts = self.counts
        counts.block_calls += 1
        if torch._C._current_graph_task_id() != -1:
            counts.recomputed_calls += 1
            counts.recomputed_blocks.add(name)
        lengths = args[lens_at] if 0 <= lens_at < len(args) else kwargs.get("seq_lens")
        counts.padded_calls += lengths is not None
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
        if first is not None:
            counts.input_dtypes[short(first.dtype)] += 1
        on = torch.is_autocast_enabled(device)
        counts.autocast[short(torch.get_autocast_dtype(device)) if on else "off"] += 1


def _position(module: nn.Module, name: str) -> int:
    """Index of an argument of ``module.forward``, -1 when it has none of that name."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index(name) if name in names else -1


def short(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def attention_counts() -> dict[str, dict[str, int]]:
    """The attention dispatcher's counters, empty where the models are not ours."""
    try:
        from videox_fun.models import attention_utils
    except ImportError:
        return {}
    return attention_utils.attention_counts()
