"""``--cuda_graph``: places, shapes and order, with a recorder that runs on a CPU; tests/gpu records for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optim_patches.base import Target
from optim_patches.compile import _mode
from optim_patches.cuda_graph import RANDOM_SIZES, CudaGraphPatch
from optim_patches.registry import PatchManager, PatchRefused
from tests.patches import fake_graphs
from tests.patches.fake_graphs import FakeCapture
from tests.patches.wan import (
    ADAPTERS,
    SHAPES,
    gradients,
    make_args,
    make_inputs,
    make_model,
    manage,
    train,
    trained,
    twins,
)
from tests.unit import real_runs
from tests.unit.real_runs import same_tensors


@pytest.fixture(autouse=True)
def captures(monkeypatch) -> list[FakeCapture]:
    return fake_graphs.install(monkeypatch)


def prepared(kind: str = "lora", **dropouts: float) -> nn.Module:
    model = make_model(layers=2)
    if kind != "full":
        ADAPTERS[kind](model, **dropouts)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_up" in name or "lora_B" in name:
                    parameter.normal_(std=0.1)
    return model


def graphed(model: nn.Module, **flags: Any) -> PatchManager:
    return manage(model, cuda_graph=True, **flags)[0]


@pytest.mark.parametrize("kind", ["full", "lora", "peft"])
def test_numbers_are_those_without_it(kind):
    plain, other = twins(prepared(kind))
    manager = graphed(other)
    assert same_tensors(gradients(other, make_inputs()), gradients(plain, make_inputs())) == []
    assert train(other, steps=3) == train(plain, steps=3) and same_tensors(trained(other), trained(plain)) == []
    assert train(other, steps=2, accumulate=2) == train(plain, steps=2, accumulate=2)
    assert same_tensors(trained(other), trained(plain)) == []
    outcome = manager.outcome("cuda_graph")
    assert outcome.state == "exercised" and outcome.applied.sites == ("transformer",)
    assert outcome.evidence.facts["shapes"] == 3 == outcome.evidence.facts["captures"]
    assert outcome.evidence.facts["replays"] == 1 + 3 + 4 and not outcome.evidence.facts["without_graph"]
    manager.undo_all()
    assert "run_blocks" not in other.__dict__
    assert same_tensors(gradients(other, make_inputs()), gradients(plain, make_inputs())) == []


def test_drop_outs_draw_the_same_numbers():
    plain, other = twins(prepared(rank_dropout=0.3, dropout=0.1).train())
    graphed(other)
    found = []
    for model in (plain, other):
        torch.manual_seed(5)
        found.append(gradients(model, make_inputs()))
    assert same_tensors(*found) == []


def test_sampling_runs_the_blocks():
    plain, other = twins(prepared())
    manager = graphed(other)
    with torch.no_grad():
        assert torch.equal(other(**make_inputs()), plain(**make_inputs()))
    other.eval()
    gradients(other, make_inputs())
    outcome = manager.outcome("cuda_graph")
    assert outcome.state == "inert" and outcome.evidence.facts["captures"] == 0


def test_a_forward_before_the_backward_of_another_is_not_replayed():
    """As with a generator and a critic: the second forward must not run in the memory of the first."""
    plain, other = twins(prepared())
    manager = graphed(other)
    found = []
    for model in (plain, other):
        model.zero_grad(set_to_none=True)
        first, second = model(**make_inputs()), model(**make_inputs(SHAPES[2], seed=3))
        (first.square().mean() + second.square().mean()).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in found[0].items():  # the two contributions are added in another order
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-7)
    facts = manager.outcome("cuda_graph").evidence.facts
    assert facts["without_graph"] == {"another forward waited for its backward": 1} and facts["replays"] == 1
    gradients(other, make_inputs())
    assert manager.outcome("cuda_graph").evidence.facts["replays"] == 2


def test_a_forward_that_was_given_up_does_not_block():
    model = prepared()
    manager = graphed(model)
    out = model(**make_inputs())
    del out
    gradients(model, make_inputs())
    assert not manager.outcome("cuda_graph").evidence.facts["without_graph"]


def test_gradients_are_kept_when_the_next_step_replays():
    model = prepared()
    graphed(model)
    model(**make_inputs()).square().mean().backward()
    kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    before = {name: value.clone() for name, value in kept.items()}
    model.zero_grad(set_to_none=True)
    model(**make_inputs(seed=9)).square().mean().backward()
    assert same_tensors(kept, before) == []


def test_a_second_backward_is_an_error():
    model = prepared()
    graphed(model)
    loss = model(**make_inputs()).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be replayed once only"):
        loss.backward()


def test_weights_that_moved_are_recorded_anew():
    plain, other = twins(prepared())
    manager = graphed(other)
    gradients(other, make_inputs())
    for model in (plain, other):
        weight = model.blocks[0].ffn[0].weight
        weight.data = weight.data * 2
    assert same_tensors(gradients(other, make_inputs()), gradients(plain, make_inputs())) == []
    facts = manager.outcome("cuda_graph").evidence.facts
    assert facts["captures"] == 2 and facts["shapes"] == 1


def test_shapes_beyond_the_limit_run_without():
    plain, other = twins(prepared())
    manager = graphed(other, cuda_graph_limit=1)
    assert train(other, steps=3) == train(plain, steps=3)
    evidence = manager.outcome("cuda_graph").evidence
    assert evidence.facts["without_graph"] == {"more than 1 shapes": 2}
    assert "2 calls without a graph: more than 1 shapes" in evidence.summary


def test_failed_recording_is_reported_and_training_goes_on(monkeypatch):
    fake_graphs.install(monkeypatch, fails="operation not permitted when stream is capturing\n(more)")
    plain, other = twins(prepared())
    manager = graphed(other)
    assert train(other, steps=2) == train(plain, steps=2)
    outcome = manager.outcome("cuda_graph")
    assert outcome.state == "inert" and "operation not permitted" in outcome.evidence.summary


def test_off_changes_nothing(captures):
    model = prepared()
    manage(model)
    assert not captures and "run_blocks" not in model.__dict__


def test_with_compile_the_compiler_records(monkeypatch):
    """On a CPU its graph mode records nothing: then the row must say so."""
    args = make_args(compile=True, cuda_graph=True)
    assert _mode(args) == "reduce-overhead" and _mode(make_args(compile=True)) == "default"
    assert _mode(make_args(compile=True, cuda_graph=True, compile_mode="max-autotune")) == "max-autotune"
    model = prepared()
    steps: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    target = Target(args, models={"transformer": model})
    patch = CudaGraphPatch()
    assert patch.check(target).ok
    applied = patch.apply(target)
    assert applied.sites == ("transformer.blocks.0", "transformer.blocks.1")
    gradients(model, make_inputs())
    with torch.no_grad():
        model(**make_inputs())
    assert len(steps) == 1
    evidence = patch.evidence(target, applied)
    assert not evidence.exercised and "0 graphs recorded, 0 replays" in evidence.summary
    applied.undo()
    gradients(model, make_inputs())
    assert len(steps) == 1


@pytest.mark.parametrize("name", RANDOM_SIZES)
def test_sizes_drawn_anew_are_refused(name):
    with pytest.raises(PatchRefused, match=f"--{name} draws sizes anew.*--fix_sample_size"):
        graphed(prepared(), **{name: True})


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"gradient_checkpointing": True}, "would compute it again"),
        ({"compile": True, "compile_backend": "eager"}, "eager has none.*--compile_backend inductor"),
        ({"cuda_graph_limit": 0}, "at least 1"),
        ({"sequence_parallel_size": 2}, "cannot run together"),
    ],
)
def test_refusals(flags, text):
    with pytest.raises(PatchRefused, match=text):
        graphed(prepared(), **flags)


def test_other_networks_are_sent_to_the_compiler():
    with pytest.raises(PatchRefused, match=r"Linear.*no block stack.*--compile_mode reduce-overhead"):
        graphed(nn.Linear(3, 3))


def test_a_cpu_is_refused(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(PatchRefused, match="--cuda_graph needs CUDA and this run is on cpu"):
        graphed(prepared())


def test_with_the_main_command(tmp_path, tmp_path_factory):
    model = real_runs.checkpoint(tmp_path_factory)
    run = real_runs.train(model, tmp_path / "plain", max_train_steps=3)
    other = real_runs.train(model, tmp_path / "out", max_train_steps=3, cuda_graph=True, audit="strict")
    assert other.losses == run.losses and same_tensors(other.trained(), run.trained()) == []
    (outcome,) = other.trainer.ctx.patches.outcomes()
    assert outcome.state == "exercised" and outcome.evidence.facts["replays"] == 3
