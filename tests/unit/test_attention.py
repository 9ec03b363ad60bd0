"""Attention dispatch: choice of backend, padding, refusals, counters."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from videox_fun.models import attention_utils as au

BATCH, LENGTH, HEADS, WIDTH = 2, 7, 2, 8


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(au.ENV_NAME, raising=False)
    au.reset_backend_cache()
    au.reset_attention_counts()


def qkv(dtype: torch.dtype = torch.float32, *, grad: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(BATCH, LENGTH, HEADS, WIDTH, generator=generator).to(dtype).requires_grad_(grad) for _ in range(3)
    )


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v)


class FakeFlash:
    """Stands for a FlashAttention package: the same calling conventions over plain attention."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self, name: str, function: str) -> object:
        return {"flash_attn_func": self.dense, "flash_attn_varlen_func": self.packed}[function]

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, **_: object) -> Tensor:
        self.calls.append("dense")
        return plain(q, k, v)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
               max_seqlen_q: int, max_seqlen_k: int, **_: object) -> Tensor:  # fmt: skip
        self.calls.append("packed")
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q[-1] == q.shape[0] and cu_seqlens_k[-1] == k.shape[0]
        out = torch.zeros_like(q)
        starts = zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], cu_seqlens_k.tolist(),
                     cu_seqlens_k.tolist()[1:], strict=False)  # fmt: skip
        for q0, q1, k0, k1 in starts:
            assert q1 - q0 <= max_seqlen_q and k1 - k0 <= max_seqlen_k
            if k1 > k0:
                out[q0:q1] = plain(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])[0]
        return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    """Every call goes to a stand-in for FlashAttention 2."""
    fake = FakeFlash()
    monkeypatch.setattr(au, "_load", fake.load)
    monkeypatch.setattr(au, "select_backend", lambda name, *_: au.FLASH2 if name == au.FLASH else name)
    return fake


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [au.SDPA, au.FLASH])
def test_padding_is_masked_and_a_batch_equals_its_samples(backend: str, flash: FakeFlash) -> None:
    q, k, v = qkv()
    lens = torch.tensor([4, 7])
    out = au.attention(q, k, v, q_lens=lens, k_lens=lens, attention_type=backend)
    for sample, length in enumerate(lens.tolist()):
        cut = [t[sample : sample + 1, :length] for t in (q, k, v)]
        torch.testing.assert_close(out[sample : sample + 1, :length], plain(*cut), atol=1e-6, rtol=1e-5)
    dense = au.attention(q, k, v, attention_type=backend)
    singles = [au.attention(*(t[i : i + 1] for t in (q, k, v)), attention_type=backend) for i in range(BATCH)]
    torch.testing.assert_close(dense, torch.cat(singles), atol=1e-6, rtol=1e-5)
    assert flash.calls == ([] if backend == au.SDPA else ["packed", "dense", "dense", "dense"])


def test_only_key_lengths_given(flash: FakeFlash) -> None:
    q, k, v = qkv()
    lens = torch.tensor([3, 7])
    masked = au.attention(q, k, v, k_lens=lens, attention_type=au.SDPA)
    torch.testing.assert_close(masked[:1], plain(q[:1], k[:1, :3], v[:1, :3]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(au.attention(q, k, v, k_lens=lens, attention_type=au.FLASH)[:, :LENGTH], masked,
                               atol=1e-6, rtol=1e-5)  # fmt: skip
    assert au.pack_lengths(lens, LENGTH).tolist() == [0, 3, 7, 14, 14]


def test_masks_scales_and_types() -> None:
    q, k, v = qkv()
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = au.attention(q, k, v, causal=True)
    torch.testing.assert_close(au.attention(q, k, v, attn_mask=mask), expected)
    both = au.attention(q, k, v, attn_mask=torch.zeros(1, 1, LENGTH, LENGTH), k_lens=torch.tensor([3, 7]))
    torch.testing.assert_close(both, au.attention(q, k, v, k_lens=torch.tensor([3, 7])))
    torch.testing.assert_close(au.attention(q, k, v, q_scale=2.0), au.attention(q * 2, k, v))
    torch.testing.assert_close(au.attention(q, k, v, softmax_scale=0.5),
                               F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=0.5)
                               .transpose(1, 2))  # fmt: skip
    assert au.attention(q, k, v.bfloat16()).dtype == torch.float32
    assert au.attention(q, k, v, dtype=torch.bfloat16).dtype == torch.float32
    assert [t.dtype for t in au.convert_qkv_dtype(q, k, v.half())] == [torch.float16] * 3
    with pytest.raises(ValueError, match="sliding window"):
        au.attention(q, k, v, window_size=(4, 4))
    with pytest.raises(ValueError, match="causal"):
        au.attention(q, k, v, causal=True, k_lens=torch.tensor([3, 7]))


# ---- choice ----------------------------------------------------------------------------------------------------------


def test_unknown_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(au.ENV_NAME, "XFORMERS")
    with pytest.raises(ValueError, match="XFORMERS.*FLASH_ATTENTION.*SDPA"):
        au.attention(*qkv())
    with pytest.raises(ValueError, match="FLASH_ATTENTION_9"):
        au.attention(*qkv(), fa_version=9, attention_type=au.FLASH)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "usable", "chosen", "notice"),
    [
        (au.FLASH, torch.bfloat16, 128, (au.FLASH4, au.FLASH3, au.FLASH2), au.FLASH4, None),
        (au.FLASH, torch.float16, 256, (au.FLASH4, au.FLASH3, au.FLASH2), au.FLASH3, None),
        (au.FLASH, torch.bfloat16, 72, (au.FLASH2,), au.FLASH2, None),
        (au.FLASH, torch.bfloat16, 40, (au.FLASH2,), au.FLASH2, None),
        (au.FLASH, torch.bfloat16, 260, (au.FLASH2,), au.SDPA, "head size 260"),
        (au.FLASH, torch.bfloat16, 20, (au.FLASH3, au.FLASH2), au.SDPA, "head size 20"),
        (au.FLASH, torch.float32, 128, (au.FLASH2,), au.SDPA, "torch.float32"),
        (au.FLASH3, torch.bfloat16, 128, (au.FLASH2,), au.SDPA, "not usable"),
        (au.FLASH, torch.bfloat16, 128, (), au.SDPA, "not usable"),
        (au.SAGE, torch.bfloat16, 128, (au.SAGE,), au.SAGE, None),
        (au.SDPA, torch.bfloat16, 128, (au.FLASH2,), au.SDPA, None),
    ],
)  # fmt: skip
def test_what_a_gpu_call_gets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, dtype: torch.dtype, head_dim: int, usable: tuple[str, ...], chosen: str, notice: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(au, "available_backends", lambda device: [*usable, au.SDPA])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert au.select_backend(name, "cuda", 0, dtype, head_dim) == chosen
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (1 if notice else 0)
    assert notice is None or notice in messages[0]


def test_cpu_runs_on_sdpa_and_says_so_only_when_asked_for_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        au.attention(*qkv())
        assert not caplog.records
        au.reset_backend_cache()
        monkeypatch.setenv(au.ENV_NAME, "flash_attention")
        for dtype in (torch.float32, torch.float32):
            au.attention(*qkv(dtype))
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cpu runs on SDPA: FLASH_ATTENTION needs a CUDA GPU"
    ]
    assert au.available_backends("cpu") == [au.SDPA]


def test_sage_is_refused_with_gradients_and_allowed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(au.ENV_NAME, au.SAGE)
    with pytest.raises(ValueError, match="SAGE_ATTENTION has no backward.*VIDEOX_ATTENTION_TYPE"):
        au.attention(*qkv(grad=True))
    with pytest.raises(ValueError, match="SAGE_ATTENTION has no backward"):
        au.check_training_backend()
    with torch.no_grad():
        torch.testing.assert_close(au.attention(*qkv(grad=True)), plain(*qkv()), atol=1e-6, rtol=1e-5)
    monkeypatch.setenv(au.ENV_NAME, "sdpa")
    assert au.check_training_backend() == au.SDPA
    monkeypatch.delenv(au.ENV_NAME)
    assert au.check_training_backend() == au.FLASH


# ---- counters --------------------------------------------------------------------------------------------------------


def test_calls_are_counted(flash: FakeFlash) -> None:
    for name, count in ((au.SDPA, 2), (au.FLASH, 3)):
        for _ in range(count):
            au.attention(*qkv(), attention_type=name)
    assert au.attention_counts() == {
        au.FLASH2: {"eager": 3, "traced": 0},
        au.SDPA: {"eager": 2, "traced": 0},
    }
    au.reset_attention_counts()
    assert au.attention_counts() == {}


def test_counting_does_not_disturb_compilation() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v: au.attention(q, k, v) + au.attention(v, k, q), backend=backend,
                             fullgraph=True)  # fmt: skip
    for _ in range(3):
        q, k, v = qkv()
        torch.testing.assert_close(compiled(q, k, v), plain(q, k, v) + plain(v, k, q), atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1
    assert au.attention_counts() == {au.SDPA: {"eager": 0, "traced": 2}}
