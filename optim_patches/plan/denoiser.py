"""The denoiser's step without weights: forward, loss and backward of the model's own code.

Blocks are alike, so a few of them say everything: the step is traced with four and with five blocks, and each moment
of it (the first block's forward, the last one's backward, ...) is continued along the straight line to the real number.
The moments in the middle need no trace of their own: between the first and the last block every sum is linear, so the
largest is at an end.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from optim_patches.plan.ledger import (
    CUDA_GRANULE,
    GRADIENTS,
    INPUTS,
    WEIGHTS,
    Ledger,
    Segment,
    empty_tensors,
    in_backward,
    watching,
)
from optim_patches.plan.spec import Part, RunSpec, Sample

#: Blocks of the two traces that are continued to the real number.
FEW, MORE = 4, 5
#: How much a latent measures in pixels and frames, and a patch in latents.
_SPATIAL, _TEMPORAL = 8, 4
_LARGEST_ERROR = 50.0

#: Puts adapters into a network without weights; they are not the planner's to know.
Adapt = Callable[[nn.Module, RunSpec], None]


@dataclass
class Census:
    """Numbers of parameters: of one block, of everything else, and of what is trained."""

    block_linear: int = 0  # frozen weights of a block that quantization may hold
    block_frozen: int = 0
    rest_frozen: int = 0
    trained: int = 0
    largest_trained: int = 0
    largest_linear: int = 0
    block_trained: int = 0
    small_trained: int = 0  # of tensors below 4096 values, which 8-bit optimizers keep wide


@dataclass
class StepTrace:
    """What one step of one size takes, by moment."""

    segments: dict[str, Segment] = field(default_factory=dict)
    census: Census = field(default_factory=Census)
    tokens: int = 0
    block_input: int = 0  # bytes that a checkpointed block keeps
    attention_out: int = 0  # bytes that its attentions compute


def load_class(path: str) -> type[nn.Module]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build(part: Part, *, device: torch.device, precision: str = "bf16") -> nn.Module:
    """A network without weights, in the run's precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}[precision]
    with torch.device("meta"):
        model = load_class(part.cls)(**part.kwargs)
    return on_device(model, device, dtype)


def on_device(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Give a network new tensors without contents. (``Module.to`` cannot exchange those of a fake mode.)"""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                kind = dtype if dtype is not None and old.is_floating_point() else old.dtype
                new = torch.empty(old.shape, dtype=kind, device=device)
                tensors[name] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    return model


def latent_shape(sample: Sample, *, channels: int, temporal: int = _TEMPORAL, spatial: int = _SPATIAL) -> list[int]:
    frames = (sample.frames - 1) // temporal + 1
    return [sample.batch, channels, frames, sample.height // spatial, sample.width // spatial]


def trace_step(spec: RunSpec, sample: Sample, *, adapt: Adapt | None = None) -> StepTrace:
    """One size's step with the run's real number of blocks."""
    if spec.blocks <= MORE:
        return trace_blocks(spec, sample, blocks=spec.blocks, adapt=adapt)
    few, more = (trace_blocks(spec, sample, blocks=n, adapt=adapt) for n in (FEW, MORE))
    further = spec.blocks - MORE
    segments = {name: _continue(few.segments[name], segment, further) for name, segment in more.segments.items()
                if name in few.segments}
    old, new = few.census, more.census
    census = replace(
        new, trained=new.trained + further * (new.trained - old.trained),
        small_trained=new.small_trained + further * (new.small_trained - old.small_trained),
    )  # fmt: skip
    return replace(more, segments=segments, census=census)


def _continue(few: Segment, more: Segment, further: int) -> Segment:
    names = {*few.parts, *more.parts}
    parts = {name: more.parts.get(name, 0) + further * (more.parts.get(name, 0) - few.parts.get(name, 0))
             for name in names}
    return Segment(more.total + further * (more.total - few.total), {k: v for k, v in parts.items() if v > 0})


def trace_blocks(spec: RunSpec, sample: Sample, *, blocks: int, adapt: Adapt | None = None) -> StepTrace:
    """One size's step with a given number of blocks."""
    part = replace(spec.denoiser, kwargs={**spec.denoiser.kwargs, "num_layers": blocks})
    ledger = Ledger(granule=1 if spec.device == "cpu" else CUDA_GRANULE)
    with empty_tensors(spec.device) as device:
        model = build(part, device=device, precision=spec.precision)
        choose_trained(model, spec, adapt)
        model.train()
        if spec.checkpointing:
            model.enable_gradient_checkpointing()
        trace = StepTrace(census=count(model))
        ledger.own([*model.parameters(), *model.buffers()], WEIGHTS)
        inputs = step_inputs(model, spec, sample, device)
        ledger.enter("forward/before")
        ledger.own(tree_tensors(inputs), INPUTS)
        with watching(ledger), _moments(model, ledger, trace):
            _step(model, inputs, ledger)
    trace.segments = dict(ledger.segments)
    trace.tokens = model.count_tokens(inputs["latents"].shape)
    return trace


def choose_trained(model: nn.Module, spec: RunSpec, adapt: Adapt | None) -> None:
    """Freeze the network and mark what is trained."""
    model.requires_grad_(False)
    if spec.adapters is not None:
        if adapt is None:
            raise ValueError("A run with adapters is planned with the function that makes them (adapt=...).")
        adapt(model, spec)
        return
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in spec.words))


def step_inputs(model: nn.Module, spec: RunSpec, sample: Sample, device: torch.device) -> dict[str, Any]:
    """What the objective hands the denoiser: latents, text, conditions."""
    config, dtype = model.config, model.patch_embedding.weight.dtype
    shape = latent_shape(sample, channels=config.out_dim, spatial=spec.spatial)

    def empty(*size: int) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype)

    inputs: dict[str, Any] = {
        "latents": empty(*shape),
        "text": [empty(min(spec.text_tokens, config.text_len), config.text_dim) for _ in range(sample.batch)],
    }
    extra = config.in_dim - config.out_dim
    if extra > 0:
        inputs["y"] = empty(shape[0], extra, *shape[2:])
    if hasattr(model, "img_emb"):
        inputs["clip_fea"] = empty(sample.batch, 257, 1280)
    return inputs


def _step(model: nn.Module, inputs: dict[str, Any], ledger: Ledger) -> None:
    """Flow matching as the trainer does it."""
    latents = inputs["latents"]
    noise = torch.randn_like(latents)
    sigmas = latents.new_empty((latents.shape[0], 1, 1, 1, 1))
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    frames, height, width = latents.shape[2:]
    conditions = {name: inputs[name] for name in ("y", "clip_fea") if name in inputs}
    timesteps = torch.empty(latents.shape[0], device=latents.device)
    prediction = model(x=noisy, context=inputs["text"], t=timesteps, seq_len=-(-frames * height * width // 4),
                       **conditions)  # fmt: skip
    ledger.enter("turn")
    target = noise - latents
    error = prediction.float() - target.float()
    squared = error.square() * (error.detach().abs() <= _LARGEST_ERROR)
    squared.mean().backward()
    ledger.enter("update")


@contextmanager
def _moments(model: nn.Module, ledger: Ledger, trace: StepTrace) -> Iterator[None]:
    """Name the moments of a step, and mark gradients as such."""
    from optim_patches.checkpointing import is_attention

    blocks = list(model.blocks)
    handles = []

    def before(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not in_backward():
                ledger.enter(_name("forward", number, len(blocks)))
                if number == 0:
                    trace.block_input = args[0].nbytes

        return hook

    def after(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: Tensor) -> None:
            if in_backward():
                return
            if out.requires_grad:
                out.register_hook(lambda grad: ledger.enter(_name("backward", number, len(blocks))))
            if number == len(blocks) - 1:
                ledger.enter("forward/after")

        return hook

    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(number), with_kwargs=True))
        handles.append(block.register_forward_hook(after(number), with_kwargs=True))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles += [parameter.register_post_accumulate_grad_hook(lambda p: ledger.own([p.grad], GRADIENTS))
                for parameter in trained]

    def attention(func: Any, args: Any, out: Any) -> None:
        if is_attention(func) and not in_backward():
            trace.attention_out += sum(leaf.nbytes for leaf in tree_tensors(out))

    ledger.observer = attention
    try:
        yield
    finally:
        trace.attention_out //= max(len(blocks), 1)
        for handle in handles:
            handle.remove()


def _name(way: str, number: int, count: int) -> str:
    """Moments that several numbers of blocks have in common; those in the middle share one name of no interest."""
    names = {count - 2: "next to last", count - 1: "last", 1: "second", 0: "first"}
    return f"{way}/{names.get(number, 'middle')}"


def count(model: nn.Module) -> Census:
    """Count a network's parameters. Adapters that live beside the blocks count with what is trained."""
    census = Census()
    block = model.blocks[0]
    inside = {id(parameter) for each in model.blocks for parameter in each.parameters()}
    linears = {id(layer.weight) for layer in block.modules() if isinstance(layer, nn.Linear)}
    for parameter in block.parameters():
        if not parameter.requires_grad:
            census.block_frozen += parameter.numel()
            if id(parameter) in linears:
                census.block_linear += parameter.numel()
                census.largest_linear = max(census.largest_linear, parameter.numel())
        else:
            census.block_trained += parameter.numel()
    for parameter in model.parameters():
        number = parameter.numel()
        if parameter.requires_grad:
            census.trained += number
            census.largest_trained = max(census.largest_trained, number)
            census.small_trained += number if number < 4096 else 0
        elif id(parameter) not in inside:
            census.rest_frozen += number
    return census


def tree_tensors(value: Any) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def parameters_of(part: Part | None) -> int:
    """Number of parameters of a network."""
    if part is None:
        return 0
    with torch.device("meta"):
        model = load_class(part.cls)(**part.kwargs)
    return sum(math.prod(tensor.shape) for tensor in model.state_dict().values())
