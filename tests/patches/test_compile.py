"""``--compile``: same training as eager, one graph for all blocks and shapes, honest evidence, clean undo.

Where only tracing matters the dynamo backends ``eager`` and ``aot_eager`` stand in for inductor, which is slow to
compile; the training run and the recompilation count use inductor itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from optim_patches.base import PatchRefused, Target
from optim_patches.compile import CompilePatch, find_blocks, mark_sequence_dynamic
from optim_patches.registry import PatchManager
from tests.patches.wan import (
    ADAPTERS,
    SHAPES,
    assert_close,
    gradients,
    make_args,
    make_inputs,
    make_model,
    manage,
    train,
    trained,
    twins,
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_training_with_inductor_equals_eager_and_never_recompiles() -> None:
    plain, compiled = twins(make_model(layers=2))
    manager, _ = manage(compiled, compile=True)
    inputs = make_inputs()
    assert_close(gradients(compiled, inputs), gradients(plain, inputs), dtype=torch.float32, factor=64)
    for model in (plain, compiled):
        model.zero_grad(set_to_none=True)
    expected, losses = train(plain, steps=3), train(compiled, steps=3)
    manager.requested[0].mark_warm()
    expected += train(plain, steps=50)
    losses += train(compiled, steps=50)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(trained(compiled), trained(plain), dtype=torch.float32, factor=256)
    outcome = manager.outcome("compile")
    facts = outcome.evidence.facts
    assert outcome.state == "exercised" and outcome.applied.sites == ("transformer.blocks.0", "transformer.blocks.1")
    assert facts["recompiles_after_warmup"] == 0 and facts["graphs"] == 1 and facts["graph_breaks"] == 0
    assert facts["graph_launches"] == facts["block_calls"] == 2 * 54
    assert compiled.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(("kind", "backend", "layers"), [("lora", "aot_eager", 1), ("peft", "eager", 2)])
def test_adapters_checkpointing_and_accumulation_compose(kind: str, backend: str, layers: int) -> None:
    model = make_model(layers=layers)
    ADAPTERS[kind](model)
    model.enable_gradient_checkpointing()
    plain, compiled = twins(model)
    manager, _ = manage(compiled, compile=True, compile_backend=backend)
    inputs = make_inputs()
    assert_close(gradients(compiled, inputs), gradients(plain, inputs), dtype=torch.float32, factor=64)
    expected, losses = train(plain, accumulate=2, steps=20), train(compiled, accumulate=2, steps=20)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(trained(compiled), trained(plain), dtype=torch.float32, factor=256)
    facts = manager.outcome("compile").evidence.facts
    assert facts["graphs"] == layers and facts["graph_breaks"] == 0
    assert facts["graph_launches"] == facts["block_calls"] == 2 * layers * 41
    assert not [key for key in compiled.state_dict() if "_orig_mod" in key]


def test_drop_outs_do_not_break_the_graph() -> None:
    model = make_model(layers=2)
    ADAPTERS["lora"](model, rank_dropout=0.2, module_dropout=0.2)
    model.train()
    manager, _ = manage(model, compile=True, compile_backend="eager", compile_fullgraph=True)
    train(model, steps=3)
    facts = manager.outcome("compile").evidence.facts
    assert facts["graph_breaks"] == 0 and facts["graphs"] <= 2


def test_bfloat16_stays_within_its_own_rounding() -> None:
    reference = make_model(layers=1)
    plain, compiled = twins(make_model(layers=1, dtype=torch.bfloat16))
    manage(compiled, compile=True, compile_backend="eager")
    inputs = make_inputs()
    low = {key: value.bfloat16() if key != "t" else value for key, value in inputs.items()}
    exact = reference(**inputs)
    eager_error = float((plain(**low).float() - exact).abs().max().detach())
    compiled_error = float((compiled(**low).float() - exact).abs().max().detach())
    assert compiled_error <= 1.5 * eager_error + torch.finfo(torch.bfloat16).eps


def test_off_is_bit_identical_and_undo_restores() -> None:
    plain, compiled = twins(make_model(layers=1))
    limit, cache = torch._dynamo.config.recompile_limit, os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    manage(compiled)
    inputs = make_inputs()
    assert torch.equal(compiled(**inputs), plain(**inputs))
    manager, _ = manage(compiled, compile=True, compile_backend="eager")
    assert compiled.blocks[0]._compiled_call_impl is not None
    manager.undo_all()
    assert all(block._compiled_call_impl is None for block in compiled.blocks)
    assert torch._dynamo.config.recompile_limit == limit
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == cache
    assert torch.equal(compiled(**inputs), plain(**inputs))


def test_the_whole_network_can_be_compiled() -> None:
    plain, compiled = twins(make_model(layers=1))
    manager, _ = manage(compiled, compile=True, compile_scope="whole", compile_backend="eager")
    inputs = make_inputs()
    assert torch.allclose(compiled(**inputs), plain(**inputs), atol=1e-6)
    outcome = manager.outcome("compile")
    assert outcome.applied.sites == ("transformer",) and outcome.state == "exercised"


def test_works_inside_ddp(tmp_path: Path) -> None:
    plain, compiled = twins(make_model(layers=1))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        manager, _ = manage(compiled, compile=True, compile_backend="eager")
        wrapped = nn.parallel.DistributedDataParallel(compiled)
        inputs = make_inputs()
        wrapped(**inputs).pow(2).mean().backward()
        found = {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}
        assert_close(found, gradients(plain, inputs), dtype=torch.float32, factor=64)
        assert manager.outcome("compile").state == "exercised"
    finally:
        torch.distributed.destroy_process_group()


def test_static_shapes_make_a_graph_each() -> None:
    model = make_model(layers=1)
    manager, _ = manage(model, compile=True, compile_dynamic="false", compile_backend="eager")
    for shape in SHAPES[1:]:
        model(**make_inputs(shape))
    assert manager.outcome("compile").evidence.facts["graphs"] == 2


def test_blocks_that_ran_eagerly_are_inert() -> None:
    model = make_model(layers=1)
    manager, _ = manage(model, compile=True, compile_backend="eager")
    assert "never called" in manager.outcome("compile").evidence.summary
    with torch.compiler.set_stance("force_eager"):
        model(**make_inputs())
    outcome = manager.outcome("compile")
    assert outcome.state == "inert" and "without compiling" in outcome.evidence.summary


def test_a_model_without_blocks_is_inert_and_says_what_to_do() -> None:
    manager, _ = manage(nn.Linear(3, 3), compile=True)
    outcome = manager.outcome("compile")
    assert outcome.state == "inert"
    assert "no repeated block found in Linear" in outcome.evidence.summary
    assert "--compile_scope whole" in outcome.evidence.summary


def test_graph_breaks_are_counted() -> None:
    class WanAttentionBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            torch._dynamo.graph_break()
            return x + 1

    model = nn.Sequential(WanAttentionBlock(), WanAttentionBlock())
    manager, _ = manage(model, compile=True, compile_backend="eager")
    model(torch.randn(2, 5, 4))
    facts = manager.outcome("compile").evidence.facts
    assert facts["graph_breaks"] >= 1 and facts["graph_break_reasons"]


def refusal(**flags: object) -> str:
    args = make_args(compile=True, **flags)
    with pytest.raises(PatchRefused) as caught:
        PatchManager(args).preflight(Target(args))
    return str(caught.value)


def test_a_missing_compiler_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = refusal()
    assert "needs a C++ compiler, and 'no-such-compiler' is not on the PATH" in text and "install g++" in text


def test_missing_python_headers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("optim_patches.compile.sysconfig.get_path", lambda name: str(tmp_path))
    assert "Python's C headers" in refusal()


def test_other_backends_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert CompilePatch().check(Target(make_args(compile=True, compile_backend="eager"))).ok


def test_unknown_backends_and_impossible_modes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--compile_backend inducto does not exist" in refusal(compile_backend="inducto")
    assert "needs --compile_backend inductor" in refusal(compile_backend="eager", compile_mode="max-autotune")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert "switched off by the environment" in refusal()


def test_the_cache_folder_is_made_and_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    manager, _ = manage(make_model(layers=1), compile=True, compile_backend="eager", compile_cache_dir=str(folder))
    assert folder.is_dir() and os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    manager.undo_all()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(folder)


def test_blocks_are_found_by_name_by_attribute_or_by_size() -> None:
    assert [name for name, _ in find_blocks(make_model(layers=2))] == ["blocks.0", "blocks.1"]

    class Layer(nn.Linear):
        pass

    class Listed(nn.Module):
        _no_split_modules = ("Layer",)

        def __init__(self) -> None:
            super().__init__()
            self.only = Layer(2, 2)

    assert [name for name, _ in find_blocks(Listed())] == ["only"]
    unnamed = nn.Module()
    unnamed.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    unnamed.big = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
    assert [name for name, _ in find_blocks(unnamed)] == ["big.0", "big.1"]
    assert find_blocks(nn.Linear(2, 2)) == []


def test_only_the_token_dimension_is_marked() -> None:
    x, times = torch.randn(2, 6, 4), torch.randn(2, 6, 6, 4)
    table, text, lens = torch.randn(6, 2, 2), torch.randn(2, 7, 4), torch.tensor([6, 6])
    mark_sequence_dynamic((x, times, None), {"table": table, "text": text, "lens": lens})
    marks = [getattr(t, "_dynamo_weak_dynamic_indices", set()) for t in (x, times, table, text, lens)]
    assert marks == [{1}, {1}, {0}, set(), set()]
