"""Attention dispatch for every denoiser: FlashAttention 4, 3, 2, SageAttention (inference) and PyTorch's SDPA.

Tensors are ``[batch, length, heads, head_dim]``. The backend is asked for with the environment variable
``VIDEOX_ATTENTION_TYPE`` (default ``FLASH_ATTENTION`` = the newest installed FlashAttention that fits the GPU). What a
call cannot give to the backend asked for - CPU tensors, float32, a head size the kernel lacks - goes to SDPA, and the
log says so once per reason. Padding (``q_lens``/``k_lens``) is masked by every backend.

FlashAttention gets padded batches as packed sequences without unpacking anything: each sample becomes two sequences,
its tokens and its padding, so no length has to be read back from the GPU.

``attention_counts()`` tells how many calls each backend got, which is the evidence the start-up audit reads. Calls in a
compiled graph are counted once, when the graph is traced.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

ENV_NAME = "VIDEOX_ATTENTION_TYPE"
FLASH, FLASH2, FLASH3, FLASH4 = "FLASH_ATTENTION", "FLASH_ATTENTION_2", "FLASH_ATTENTION_3", "FLASH_ATTENTION_4"
SAGE, SDPA = "SAGE_ATTENTION", "SDPA"
BACKENDS = (FLASH, FLASH2, FLASH3, FLASH4, SAGE, SDPA)

_MODULES = {FLASH4: "flash_attn.cute", FLASH3: "flash_attn_interface", FLASH2: "flash_attn", SAGE: "sageattention"}
_CAPABILITIES = {FLASH4: (9, 10), FLASH3: (9,), FLASH2: range(8, 100), SAGE: range(8, 100)}
_MAX_HEAD_DIM = {FLASH4: 128, FLASH3: 256, FLASH2: 256, SAGE: 128}

_NO_BACKWARD = (
    f"{SAGE} has no backward pass and would train on wrong gradients: unset {ENV_NAME} or set it to {FLASH} or {SDPA} "
    "for training; it may be set for sampling"
)

_eager_calls: Counter[str] = Counter()
_traced_calls: Counter[str] = Counter()


def attention_counts() -> dict[str, dict[str, int]]:
    """Calls per backend: ``eager`` ones, and ``traced`` ones that are part of a compiled graph."""
    names = sorted({*_eager_calls, *_traced_calls})
    return {name: {"eager": _eager_calls[name], "traced": _traced_calls[name]} for name in names}


def reset_attention_counts() -> None:
    """Start counting anew."""
    _eager_calls.clear()
    _traced_calls.clear()


@torch.compiler.assume_constant_result
def _count_traced(name: str) -> int:
    _traced_calls[name] += 1
    return 0


@torch.compiler.assume_constant_result
def requested_backend() -> str:
    """The backend named by ``VIDEOX_ATTENTION_TYPE``; an unknown name is an error."""
    return _checked_name(os.environ.get(ENV_NAME) or FLASH)


def _checked_name(name: str) -> str:
    upper = name.upper()
    if upper not in BACKENDS:
        raise ValueError(f"{ENV_NAME}={name!r} is not an attention backend; use one of {', '.join(BACKENDS)}")
    return upper


def check_training_backend() -> str:
    """Name of the backend asked for; an error if it has no backward. To be called before a training run starts."""
    name = requested_backend()
    if name == SAGE:
        raise ValueError(_NO_BACKWARD)
    return name


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(_MODULES[name]) is not None
    except ModuleNotFoundError:
        return False


def available_backends(device: torch.device | str = "cuda") -> list[str]:
    """Backends that are installed and fit the device, best first. SDPA always works."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return [SDPA]
    capability = torch.cuda.get_device_capability(device)[0]
    kernels = (FLASH4, FLASH3, FLASH2, SAGE)
    return [name for name in kernels if capability in _CAPABILITIES[name] and _is_installed(name)] + [SDPA]


@lru_cache(maxsize=256)
def _select(name: str, device_type: str, device_index: int, dtype: torch.dtype, head_dim: int) -> str:
    if device_type != "cuda":
        if os.environ.get(ENV_NAME):
            logger.warning("attention on %s runs on SDPA: %s needs a CUDA GPU", device_type, name)
        return SDPA
    if dtype not in (torch.float16, torch.bfloat16):
        logger.warning("attention in %s runs on SDPA: %s takes float16 and bfloat16 only", dtype, name)
        return SDPA
    candidates = (FLASH4, FLASH3, FLASH2) if name == FLASH else (name,)
    usable = [c for c in available_backends(torch.device(device_type, device_index)) if c in candidates]
    if not usable:
        wanted = ", ".join(_MODULES[c] for c in candidates)
        logger.warning("attention runs on SDPA: %s is not usable on this GPU (looked for %s)", name, wanted)
        return SDPA
    for candidate in usable:
        if head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM[candidate]:
            return candidate
    largest = max(_MAX_HEAD_DIM[c] for c in usable)
    logger.warning("attention of head size %d runs on SDPA: %s takes multiples of 8 to %d", head_dim, name, largest)
    return SDPA


@torch.compiler.assume_constant_result
def select_backend(name: str, device_type: str, device_index: int, dtype: torch.dtype, head_dim: int) -> str:
    """The backend that will run a call: what ``name`` asks for, or SDPA with one notice that says why."""
    return SDPA if name == SDPA else _select(name, device_type, device_index, dtype, head_dim)


def reset_backend_cache() -> None:
    """Forget earlier choices (after a package was installed or the environment changed), so notices come again."""
    _select.cache_clear()


def convert_qkv_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give the three tensors the type of ``v`` (queries and keys may come wider out of norms and rotations)."""
    return q.to(v.dtype), k.to(v.dtype), v


def key_mask(k_lens: Tensor, length: int) -> Tensor:
    """Mask ``[B, 1, 1, length]`` that is true for the first ``k_lens`` keys of each sample."""
    positions = torch.arange(length, device=k_lens.device)
    return (positions < k_lens.unsqueeze(-1)).unflatten(0, (-1, 1, 1))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, k_lens: Tensor | None, dropout_p: float, scale: float | None,
          causal: bool, attn_mask: Tensor | None) -> Tensor:  # fmt: skip
    if k_lens is not None:
        mask = key_mask(k_lens.to(q.device), k.shape[1])
        if attn_mask is None:
            attn_mask = mask
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & mask
        else:
            attn_mask = attn_mask.masked_fill(~mask, float("-inf"))
    if causal and attn_mask is not None:
        raise ValueError("causal attention together with a mask or key lengths is not supported")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=causal,
                                         scale=scale)  # fmt: skip
    return out.transpose(1, 2)


def pack_lengths(lens: Tensor, length: int) -> Tensor:
    """Cumulative lengths of the 2B sequences (tokens, padding) of a padded batch, starting with 0."""
    pairs = torch.stack([lens, length - lens], dim=1).flatten()
    return F.pad(pairs.cumsum(0), (1, 0)).to(torch.int32)


def _load(name: str, function: str) -> Callable:
    return getattr(importlib.import_module(_MODULES[name]), function)


def _flash(name: str, q: Tensor, k: Tensor, v: Tensor, *, q_lens: Tensor | None, k_lens: Tensor | None,
           dropout_p: float, scale: float | None, causal: bool, window: tuple[int, int],
           deterministic: bool) -> Tensor:  # fmt: skip
    kwargs: dict = {"softmax_scale": scale, "causal": causal}
    if window != (-1, -1):
        kwargs["window_size"] = window
    if name in (FLASH2, FLASH3):
        kwargs["deterministic"] = deterministic
    if name == FLASH2:
        kwargs["dropout_p"] = dropout_p
    elif dropout_p:
        raise ValueError(f"{name} has no dropout; set {ENV_NAME}={FLASH2} or {SDPA}")
    if q_lens is None and k_lens is None:
        out = _load(name, "flash_attn_func")(q, k, v, **kwargs)
    else:
        batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
        q_lens = q.new_full((batch,), len_q, dtype=torch.int32) if q_lens is None else q_lens.to(q.device)
        k_lens = q.new_full((batch,), len_k, dtype=torch.int32) if k_lens is None else k_lens.to(q.device)
        out = _load(name, "flash_attn_varlen_func")(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
            cu_seqlens_q=pack_lengths(q_lens, len_q), cu_seqlens_k=pack_lengths(k_lens, len_k),
            max_seqlen_q=len_q, max_seqlen_k=len_k, **kwargs,
        )  # fmt: skip
        out = (out[0] if isinstance(out, tuple) else out).unflatten(0, (batch, len_q))
    return out[0] if isinstance(out, tuple) else out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Tensor | None = None,
    k_lens: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    q_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    dtype: torch.dtype | None = None,
    fa_version: int | None = None,
    attention_type: str | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Attention over ``q, k, v [B, L, heads, E]``; returns ``[B, Lq, heads, E]`` in the type of ``q``.

    ``q_lens``/``k_lens [B]`` give the number of real tokens of each sample; rows of padding queries are undefined.
    ``dtype`` casts the inputs first. ``fa_version`` and ``attention_type`` override the environment.
    """
    name = requested_backend() if attention_type is None else _checked_name(attention_type)
    if fa_version is not None and name.startswith(FLASH):
        name = _checked_name(f"{FLASH}_{fa_version}")
    if name == SAGE and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(_NO_BACKWARD)
    out_dtype = q.dtype
    if dtype is not None:
        v = v.to(dtype)
    q, k, v = convert_qkv_dtype(q, k, v)
    if q_scale is not None:
        q = q * q_scale
    window_size = tuple(window_size)
    backend = select_backend(name, q.device.type, q.device.index or 0, q.dtype, q.shape[-1])
    if attn_mask is not None or (backend == SAGE and (k_lens is not None or dropout_p)):
        backend = SDPA
    if torch.compiler.is_compiling():
        _count_traced(backend)
    else:
        _eager_calls[backend] += 1
    if backend == SDPA:
        if window_size != (-1, -1):
            raise ValueError(f"window_size={window_size} needs FlashAttention; SDPA has no sliding window")
        out = _sdpa(q, k, v, k_lens=k_lens, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
                    attn_mask=attn_mask)  # fmt: skip
    elif backend == SAGE:
        sage = _load(SAGE, "sageattn")
        out = sage(q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=softmax_scale)
    else:
        out = _flash(backend, q, k, v, q_lens=q_lens, k_lens=k_lens, dropout_p=dropout_p, scale=softmax_scale,
                     causal=causal, window=window_size, deterministic=deterministic)  # fmt: skip
    return out.to(out_dtype)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> Tensor:
    """:func:`attention` with FlashAttention asked for, whatever the environment says."""
    return attention(q, k, v, *args, **{"attention_type": FLASH, **kwargs})
