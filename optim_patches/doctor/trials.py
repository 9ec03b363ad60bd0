"""What the doctor tries out, each in a process of its own. A trial returns plain values or raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LENGTH, _HEADS, _HEAD_DIM = 64, 2, 64


def torch_facts() -> dict[str, Any]:
    """torch's version, what it was built with, and the devices it sees."""
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "available": torch.cuda.is_available(),
        "threads": torch.get_num_threads(),
    }
    cudnn = torch.backends.cudnn.version()
    facts["cudnn"] = cudnn
    devices = []
    for index in range(torch.cuda.device_count() if facts["available"] else 0):
        found = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        devices.append(
            {"name": found.name, "capability": [found.major, found.minor], "bytes": found.total_memory, "free": free}
        )
    return {**facts, "devices": devices, "bf16": bool(devices) and torch.cuda.is_bf16_supported()}


def attention(backend: str) -> dict[str, Any]:
    """Forward, and backward where the kernel has one, of the backend through the dispatcher that training uses."""
    import torch

    from videox_fun.models.attention_utils import SAGE, SDPA, attention, attention_counts

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and backend != SDPA:
        raise RuntimeError("needs a CUDA device")
    trains = backend != SAGE
    shape = (1, _LENGTH, _HEADS, _HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=trains) for _ in range(3))
    with torch.set_grad_enabled(trains):
        out = attention(q, k, v, attention_type=backend)
        if trains:
            out.float().square().sum().backward()
    ran = next(iter(attention_counts()), "")
    if ran != backend:
        raise RuntimeError(f"fell back to {ran}")
    with torch.no_grad():
        exact = attention(q.float(), k.float(), v.float(), attention_type=SDPA)
    error = float((out.float() - exact).abs().max())
    if not error < 0.05:
        raise RuntimeError(f"differs from the exact result by {error:.3g}")
    return {"device": device, "error": error, "backward": trains}


def compiled() -> dict[str, Any]:
    """``torch.compile`` of a small network, forward and backward."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
    start = time.perf_counter()
    torch.compile(network)(torch.randn(2, 16, device=device)).sum().backward()
    return {"device": device, "seconds": round(time.perf_counter() - start, 1)}


def adam_8bit() -> dict[str, Any]:
    """One step of bitsandbytes' 8-bit AdamW."""
    import bitsandbytes
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.nn.Parameter(torch.ones(4096, device=device))
    optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=0.1)
    weight.square().sum().backward()
    optimizer.step()
    if not bool((weight < 1).all()):
        raise RuntimeError("the step moved no weight")
    narrow = any(value.dtype == torch.uint8 for value in optimizer.state[weight].values() if torch.is_tensor(value))
    return {"device": device, "narrow": narrow}


def nf4() -> dict[str, Any]:
    """A 4-bit linear layer of bitsandbytes, forward and backward."""
    import bitsandbytes
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).to(device)
    inputs = torch.randn(2, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer(inputs).float().sum().backward()
    if inputs.grad is None or not bool(inputs.grad.isfinite().all()):
        raise RuntimeError("no usable gradient came back")
    return {"device": device}


def liger() -> dict[str, Any]:
    """Liger's RMSNorm, forward and backward, against PyTorch."""
    import torch
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if not torch.cuda.is_available():
        raise RuntimeError("needs a CUDA device")
    inputs = torch.randn(8, 64, device="cuda", requires_grad=True)
    weight = torch.ones(64, device="cuda", requires_grad=True)
    out = LigerRMSNormFunction.apply(inputs, weight, 1e-6)
    out.sum().backward()
    error = float((out - torch.nn.functional.rms_norm(inputs, (64,), eps=1e-6)).abs().max())
    if not error < 1e-3:
        raise RuntimeError(f"differs from PyTorch by {error:.3g}")
    return {"device": "cuda", "error": error}


def fp8() -> dict[str, Any]:
    """One scaled FP8 matrix product."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.randn(16, 32, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(32, 16, device=device).t().contiguous().t().to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    out = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    exact = left.float() @ right.float()
    error = float((out.float() - exact).abs().max() / exact.abs().max())
    if not error < 0.05:
        raise RuntimeError(f"differs from the exact product by {error:.3g}")
    return {"device": device, "error": error}


def came() -> dict[str, Any]:
    """One step of CAME."""
    import torch
    from came_pytorch import CAME

    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = CAME([weight], lr=0.01, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16))
    weight.square().sum().backward()
    optimizer.step()
    return {"device": "cpu"}


def pinned(megabytes: str = "256") -> dict[str, Any]:
    """Page-locked host memory, and how fast it reaches the device."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("needs a CUDA device")
    size = int(megabytes) << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    device.copy_(host)
    torch.cuda.synchronize()
    start = time.perf_counter()
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return {"gb_per_s": size / (time.perf_counter() - start) / 1e9}


TRIALS: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_facts,
    "attention": attention,
    "compile": compiled,
    "adam_8bit": adam_8bit,
    "nf4": nf4,
    "liger": liger,
    "fp8": fp8,
    "came": came,
    "pinned": pinned,
}
