"""The frozen networks without weights: one call each, as a training step and a validation make it.

The VAE is traced at the real size, tile by tile where it is tiled: every chunk of frames and every cached convolution
is its own code. The text encoder is traced with one prompt; its batch is the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from optim_patches.plan.denoiser import MORE, build, latent_shape, parameters_of, step_inputs, tree_tensors
from optim_patches.plan.ledger import CUDA_GRANULE, INPUTS, WEIGHTS, WORKSPACE, Ledger, empty_tensors
from optim_patches.plan.spec import Part, RunSpec, Sample

#: Blocks of the text encoder that are traced; the others reuse their memory, for nothing is kept.
_TEXT_BLOCKS = 2
#: With fewer channels oneDNN reads the input as it lies.
_ONEDNN_CHANNELS = 8
_FRAMES = 9  # of the trace of a long clip; what further frames add is their share of input and output


@dataclass(frozen=True)
class CallTrace:
    """Bytes of one call: the network's weights, and what the call needs beside them at its peak.

    ``largest_convolution`` is the largest result of a convolution, for what an accelerator's kernel needs besides; what
    a CPU's needs is known and part of ``workspace``.
    """

    weights: int = 0
    inputs: int = 0
    workspace: int = 0
    largest_convolution: int = 0


def trace_vae(spec: RunSpec, sample: Sample, *, decode: bool = False) -> CallTrace:
    """Encoding or decoding one clip."""
    if spec.vae is None:
        return CallTrace()
    height, width = tile_size(spec, sample)
    frames = min(sample.frames, _FRAMES)

    def call(model: nn.Module, device: torch.device) -> tuple[list[Tensor], Callable[[], object]]:
        dtype = next(model.parameters()).dtype
        tile = Sample(frames, height, width)
        if decode:
            shape = latent_shape(tile, channels=model.latent_channels, temporal=model.temporal_compression_ratio,
                                 spatial=model.spatial_compression_ratio)  # fmt: skip
            latents = torch.empty(shape, device=device, dtype=dtype)
            return [latents], lambda: model.decode(latents)[0]
        pixels = torch.empty([1, 3, frames, height, width], device=device, dtype=dtype)
        return [pixels], lambda: model.encode(pixels)[0].sample()

    trace = _trace(spec, spec.vae, call)
    more = (sample.frames - frames) * height * width * 3 * spec.width
    outside = sample.frames * sample.height * sample.width * 3
    # The batch comes as float32 and is cast; results of all tiles are summed in float32.
    tiled = outside * 4 if decode and (height, width) != (sample.height, sample.width) else 0
    inputs = 0 if decode else outside * sample.batch * (4 + spec.width) * (2 if spec.conditioned else 1)
    grown = more * 2 if decode else 0
    return CallTrace(trace.weights, inputs, trace.workspace + grown + tiled, trace.largest_convolution)


def tile_size(spec: RunSpec, sample: Sample) -> tuple[int, int]:
    """Height and width that the VAE sees at once."""
    if not spec.vae_tile:
        return sample.height, sample.width
    from optim_patches.vae_tiling import COARSEST_RATIO, spans

    def side(length: int) -> int:
        ratio = COARSEST_RATIO
        first = spans(length // ratio, size=spec.vae_tile // ratio, overlap=spec.vae_overlap // ratio)[0]
        return (first.stop - first.start) * ratio

    return side(sample.height), side(sample.width)


def trace_text(spec: RunSpec, *, batch: int = 1) -> CallTrace:
    """Encoding the prompts of one batch."""
    if spec.text is None:
        return CallTrace()
    kwargs = dict(spec.text.kwargs)
    part = replace(spec.text, kwargs={**kwargs, "num_layers": min(_TEXT_BLOCKS, kwargs["num_layers"])})

    def call(model: nn.Module, device: torch.device) -> tuple[list[Tensor], Callable[[], object]]:
        ids = torch.empty([batch, spec.text_tokens], device=device, dtype=torch.long)
        mask = torch.empty_like(ids)
        return [ids, mask], lambda: model(ids, mask)

    trace = _trace(spec, part, call)
    return CallTrace(parameters_of(spec.text) * spec.width, trace.inputs, trace.workspace)


def trace_image(spec: RunSpec) -> CallTrace:
    """Features of one condition frame."""
    if spec.image is None:
        return CallTrace()

    def call(model: nn.Module, device: torch.device) -> tuple[list[Tensor], Callable[[], object]]:
        picture = torch.empty([3, 1, 224, 224], device=device, dtype=next(model.parameters()).dtype)
        return [picture], lambda: model([picture])

    return _trace(spec, spec.image, call)


def convolution_scratch(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int, *, out: Tensor,
) -> int:
    """Bytes that a CPU convolution holds beside its input and its result.

    PyTorch's own kernel unfolds the input into columns; oneDNN copies input and weight into a layout of its own, lets
    them go, and then holds the result twice. The choice between them is PyTorch's.
    """
    backend = torch._C._select_conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding,
                                            groups, None if bias is None else list(bias.shape))  # fmt: skip
    if "Mkldnn" in str(backend):
        copied = x.nbytes if x.shape[1] >= _ONEDNN_CHANNELS else 0
        return max(copied + weight.nbytes, out.nbytes)
    size = weight[0, 0].numel()
    return 0 if size == 1 else x.shape[1] * size * out[:, 0].numel() * x.element_size()


def _trace(
    spec: RunSpec, part: Part, call: Callable[[nn.Module, torch.device], tuple[list[Tensor], Callable[[], object]]]
) -> CallTrace:
    ledger = Ledger(granule=1 if spec.device == "cpu" else CUDA_GRANULE)
    largest = 0

    def convolution(func: object, args: tuple, out: object) -> None:
        nonlocal largest
        if func is not torch.ops.aten.convolution.default:
            return
        if spec.device == "cpu":
            ledger.pass_through(convolution_scratch(*args, out=out))
        else:
            largest = max(largest, out.nbytes)

    with empty_tensors(spec.device) as device, torch.no_grad():
        model = build(part, device=device, precision=spec.precision).eval()
        ledger.own([*model.parameters(), *model.buffers()], WEIGHTS)
        tensors, run = call(model, device)
        ledger.enter("call")
        ledger.own(tensors, INPUTS)
        ledger.observer = convolution
        with ledger:
            run()
    parts = ledger.segments["call"].parts
    return CallTrace(parts.get(WEIGHTS, 0), parts.get(INPUTS, 0), parts.get(WORKSPACE, 0), largest)


def trace_sampling(spec: RunSpec, sample: Sample) -> int:
    """Workspace of one guided denoising call of a validation: two halves in one batch, no gradients."""
    part = replace(spec.denoiser, kwargs={**spec.denoiser.kwargs, "num_layers": min(MORE, spec.blocks)})
    ledger = Ledger(granule=1 if spec.device == "cpu" else CUDA_GRANULE)
    with empty_tensors(spec.device) as device, torch.no_grad():
        model = build(part, device=device, precision=spec.precision).eval()
        inputs = step_inputs(model, spec, replace(sample, batch=2), device)
        ledger.own([*model.parameters(), *model.buffers()], WEIGHTS)
        ledger.enter("call")
        ledger.own(tree_tensors(inputs), INPUTS)
        with ledger:
            model(x=inputs["latents"], context=inputs["text"], t=torch.empty(2, device=device),
                  **{name: inputs[name] for name in ("y", "clip_fea") if name in inputs})  # fmt: skip
    parts = ledger.segments["call"].parts
    return parts.get(INPUTS, 0) + parts.get(WORKSPACE, 0)
