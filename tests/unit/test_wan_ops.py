"""The hand-written element-wise operations: gradients, precision, compilation, batches, checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from videox_fun.models import wan_ops
from videox_fun.models.wan_blocks import WanAttentionBlock
from videox_fun.models.wan_rope import RopeTable
from videox_fun.models.wan_transformer3d import Wan2_2Transformer3DModel, WanTransformer3DModel
from videox_fun.utils.ac_handle import apply_checkpointing
from videox_fun.utils.checkpointing import parse_fraction, selected_blocks

EPS = 1e-6
TINY = {
    "in_dim": 4, "out_dim": 4, "dim": 24, "ffn_dim": 48, "freq_dim": 32, "text_dim": 16, "text_len": 8, "num_heads": 2,
    "num_layers": 3,
}  # fmt: skip


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def tiny_model(cls: type = WanTransformer3DModel, **changes: object) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = cls(**{**TINY, **changes})
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    return model


def tiny_inputs(batch: int = 2, frames: int = 2) -> dict[str, Tensor]:
    x, t, context = tensors((batch, 4, frames, 4, 4), (batch,), (batch, 6, 16), dtype=torch.float32)
    return {"x": x.detach(), "t": t.detach().abs() * 500, "context": context.detach()}


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_the_norms(batch: int) -> None:
    x, weight, bias = tensors((batch, 5, 8), (8,), (8,))
    assert torch.autograd.gradcheck(lambda *a: wan_ops.rms_norm(*a, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda *a: wan_ops.layer_norm(*a, EPS), (x, weight, bias))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_modulation_and_gate(batch: int, per_token: bool) -> None:
    x, shift, scale = tensors((batch, 5, 8), *[(batch, 5 if per_token else 1, 8)] * 2)
    assert torch.autograd.gradcheck(lambda *a: wan_ops.modulated_norm(*a, EPS), (x, shift, scale))
    assert torch.autograd.gradcheck(wan_ops.gated_residual, (x, *tensors((batch, 5, 8), seed=1), scale))


def test_gradients_of_the_rotation() -> None:
    freqs = RopeTable(8).grid((2, 1, 2), torch.device("cpu"))
    (x,) = tensors((2, 4, 3, 8))
    assert torch.autograd.gradcheck(lambda a: wan_ops.apply_rope(a, freqs), (x,), atol=1e-5, rtol=1e-3)
    (y,) = tensors((2, 3, 4, 8))  # heads first, as attention's backward hands its gradients over
    assert torch.autograd.gradcheck(lambda a: wan_ops.apply_rope(a.transpose(1, 2), freqs), (y,), atol=1e-5, rtol=1e-3)


# ---- precision -------------------------------------------------------------------------------------------------------


def reference(name: str, *args: Tensor) -> Tensor:
    if name == "rms_norm":
        return F.rms_norm(args[0], args[0].shape[-1:], args[1], EPS)
    if name == "layer_norm":
        return F.layer_norm(args[0], args[0].shape[-1:], args[1], args[2], EPS)
    if name == "modulated_norm":
        return F.layer_norm(args[0], args[0].shape[-1:], None, None, EPS) * (1 + args[2]) + args[1]
    return args[0] + args[1] * args[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("rms_norm", [(1, 2000, 32), (32,)]),
        ("layer_norm", [(1, 2000, 32), (32,), (32,)]),
        ("modulated_norm", [(2, 1000, 32), (2, 1, 32), (2, 1, 32)]),
        ("modulated_norm", [(2, 300, 32), (2, 300, 32), (2, 300, 32)]),
        ("gated_residual", [(2, 300, 32), (2, 300, 32), (2, 1, 32)]),
    ],
)
def test_low_precision_is_as_exact_as_its_type(dtype: torch.dtype, name: str, shapes: list) -> None:
    """Outputs and gradients within a few roundings of float64; in particular sums over many rows stay exact."""
    low = tensors(*shapes, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in low]
    args = (EPS,) if name != "gated_residual" else ()
    out, expected = getattr(wan_ops, name)(*low, *args), reference(name, *exact)
    assert out.dtype == dtype
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(grad), expected.backward(grad.double())
    bound = 4 * torch.finfo(dtype).eps
    assert (out.double() - expected).norm() < bound * expected.norm()
    for own, right in zip(low, exact, strict=True):
        assert (own.grad.double() - right.grad).norm() < bound * right.grad.norm()


def test_rotation_in_bfloat16_keeps_float32_angles() -> None:
    freqs = RopeTable(32).grid((4, 16, 16), torch.device("cpu"))
    (x,) = tensors((1, 1024, 2, 32), dtype=torch.bfloat16)
    exact = wan_ops.apply_rope(x.detach().double(), freqs)
    out = wan_ops.apply_rope(x, freqs)
    assert (out.double() - exact).norm() < 2**-8 * exact.norm()
    out.backward(out.detach())
    torch.testing.assert_close(x.grad.float(), x.detach().float(), atol=0.05, rtol=0.02)  # a rotation undoes itself


def test_gelu_forms_agree() -> None:
    x = torch.linspace(-12, 12, 4001)
    compiled = torch.compile(wan_ops.gelu_tanh, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), F.gelu(x, approximate="tanh"), atol=1e-6, rtol=1e-6)


def test_table_padding_and_limits() -> None:
    table = RopeTable(24).grid((1, 2, 2), torch.device("cpu"), padding=3)
    assert table.shape == (7, 12, 2)
    assert (table[4:, :, 0] == 1).all() and (table[4:, :, 1] == 0).all()
    with pytest.raises(ValueError, match="1024 positions"):
        RopeTable(24).grid((1025, 1, 1), torch.device("cpu"))
    rope = RopeTable(24)
    with torch.inference_mode():
        rope.grid((1, 2, 2), torch.device("cpu"))
    (x,) = tensors((1, 4, 2, 24))
    wan_ops.apply_rope(x, rope.grid((1, 2, 2), torch.device("cpu"))).sum().backward()
    assert x.grad is not None


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [WanTransformer3DModel, Wan2_2Transformer3DModel])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_batch_equals_its_samples(dtype: torch.dtype, cls: type, per_token: bool) -> None:
    model, inputs = tiny_model(cls).to(dtype), tiny_inputs()
    inputs = {key: value.to(dtype) if key != "t" else value for key, value in inputs.items()}
    if per_token:
        inputs["t"] = torch.rand(2, 8, generator=torch.Generator().manual_seed(3)) * 1000
    together = model(**inputs)
    singles = torch.cat([model(**{key: value[i : i + 1] for key, value in inputs.items()}) for i in range(2)])
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.02}
    torch.testing.assert_close(together, singles, **tolerance)
    torch.testing.assert_close(model(**{**inputs, "context": list(inputs["context"])}), together)


def test_batch_gradient_is_the_mean_of_sample_gradients() -> None:
    model, inputs = tiny_model(), tiny_inputs(batch=4)
    model(**inputs).square().mean().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for i in range(4):
        (model(**{key: value[i : i + 1] for key, value in inputs.items()}).square().mean() / 4).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, together[name], atol=1e-6, rtol=1e-4, msg=name)


def test_block_compiles_whole_with_static_and_dynamic_lengths() -> None:
    model = tiny_model()
    block = model.blocks[0]
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list) -> object:
        graphs.append(graph)
        return graph.forward

    for dynamic in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
        for frames in ((3, 4, 5) if dynamic else (3, 4)):
            embedded = model.embed(**tiny_inputs(frames=frames))
            arguments = (embedded.tokens, embedded.e0, None, None, embedded.freqs, embedded.context)
            torch.testing.assert_close(compiled(*arguments), block(*arguments), atol=1e-5, rtol=1e-5)
        assert len(graphs) == (1 if dynamic else 2)


def test_compiled_gradients_equal_eager_ones() -> None:
    torch._dynamo.reset()
    model, inputs = tiny_model(num_layers=2), tiny_inputs()
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for each in (model, twin):
        each(**inputs).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_whole_model_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    model, inputs = tiny_model(num_layers=1), tiny_inputs()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs), model(**inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [None, "1/2", 1])
def test_checkpointing_gives_the_same_gradients(share: str | None) -> None:
    model, inputs = tiny_model(), tiny_inputs()
    twin = copy.deepcopy(model)
    calls = []
    hook = WanAttentionBlock.forward

    def counting(self: WanAttentionBlock, *args: object, **kwargs: object) -> Tensor:
        calls.append(self)
        return hook(self, *args, **kwargs)

    if share is None:
        twin.enable_gradient_checkpointing()
    else:
        assert apply_checkpointing(twin, WanAttentionBlock, share) == (2 if share == "1/2" else 3)
    assert list(twin.state_dict()) == list(model.state_dict())
    model(**inputs).square().mean().backward()
    WanAttentionBlock.forward = counting
    try:
        twin(**inputs).square().mean().backward()
    finally:
        WanAttentionBlock.forward = hook
    assert len(calls) == 3 + (2 if share == "1/2" else 3)  # recomputed blocks run twice
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_which_blocks_a_share_selects() -> None:
    assert selected_blocks(7, "1/2") == [1, 3, 5, 7]
    assert selected_blocks(9, 1 / 3) == selected_blocks(9, "1/3") == [2, 5, 8]
    assert selected_blocks(8, "2/3") == [1, 3, 4, 6, 7]
    assert selected_blocks(3, 0) == [] and selected_blocks(3, 1.0) == [1, 2, 3]
    for bad in ("__import__('os').getcwd()", "1/0", "2", "-0.5", "half"):
        with pytest.raises(ValueError):
            parse_fraction(bad)


def test_autocast_over_float32_weights() -> None:
    model, inputs = tiny_model(), tiny_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**inputs)
        out.float().square().mean().backward()
    torch.testing.assert_close(out.float(), model(**inputs), atol=0.1, rtol=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_mistakes_are_named() -> None:
    model, inputs = tiny_model(), tiny_inputs()
    with pytest.raises(ValueError, match="4 input channels"):
        model(**{**inputs, "y": inputs["x"]})
    with pytest.raises(ValueError, match="seq_len=3"):
        model(**inputs, seq_len=3)
    with pytest.raises(ValueError, match="9 tokens"):
        model(**{**inputs, "context": torch.zeros(2, 9, 16)})
    for argument, module in (("clip_fea", "img_emb"), ("full_ref", "ref_conv"), ("y_camera", "control_adapter")):
        with pytest.raises(ValueError, match=f"{argument}.*{module}"):
            model(**inputs, **{argument: torch.zeros(2, 4, 4, 4)})
    with pytest.raises(ValueError, match="needs clip_fea"):
        tiny_model(model_type="i2v")(**inputs)
    with pytest.raises(ValueError, match="cross_attn_type='x'"):
        tiny_model(cross_attn_type="x")


def test_flops_are_those_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, inputs = tiny_model(model_type="i2v"), tiny_inputs()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, clip_fea=torch.zeros(2, 257, 1280))
    tokens = model.count_tokens(inputs["x"].shape)
    assert tokens == 8
    flops = model.flops(tokens, batch=2, image_tokens=257)
    by_op = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for op, count in by_op.items() if "attention" in op)
    time = 2 * 2 * (32 * 24 + 24 * 24 + 24 * 144)
    linear = sum(count for op, count in by_op.items() if "attention" not in op) - time
    assert flops.linear == linear
    assert attention in (0, flops.attention)  # not every version of PyTorch counts attention on a CPU
    assert flops.total == flops.linear + flops.attention
