"""``--train_teacache``: steps without gradient are skipped, those with one are computed, and gradients stay right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim_patches.registry import PatchManager, PatchRefused
from tests.patches.wan import SHAPES, add_native_lora, make_inputs, make_model, manage, twins
from tests.unit.real_runs import LORA, refusal, same_tensors
from videox_fun.utils.tiny import make_tiny_checkpoint

STEPS = 8
REWARD: dict[str, Any] = {
    "reward_fn": "HPSReward", "pretrained_model_name_or_path": "models/Wan2.1-Fun-1.3B-InP",
    "num_inference_steps": STEPS, "train_teacache": True, "train_teacache_start": 2,
}
#: The estimate is the change itself.
PLAIN = {"train_teacache_coefficients": "1,0", "train_teacache_threshold": 1e9}


def prepared() -> nn.Module:
    model = make_model(layers=2)
    add_native_lora(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_up" in name:
                parameter.normal_(std=0.1)
    return model


def cached(model: nn.Module, **flags: Any) -> PatchManager:
    return manage(model, **{**REWARD, **PLAIN, **flags})[0]


def rollout(
    model: nn.Module, *, backprop: tuple[int, ...] = (STEPS - 1,), shape: tuple[int, ...] = SHAPES[0]
) -> Tensor:
    """Denoising as reward training does it: steps outside of ``backprop`` run without gradient."""
    inputs = make_inputs(shape)
    latents = inputs["x"]
    for step in range(STEPS):
        t = torch.full_like(inputs["t"], 1000.0 - 100 * step)
        with torch.set_grad_enabled(step in backprop):
            velocity = model(x=latents.detach(), t=t, context=inputs["context"])
        latents = latents + 0.1 * velocity
    return latents


def gradients(model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    rollout(model, **kwargs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_steps_without_gradient_are_skipped_and_those_with_one_computed():
    model = prepared()
    manager = cached(model)
    found = gradients(model, backprop=(4, STEPS - 1))
    assert found and all(torch.isfinite(value).all() for value in found.values())
    facts = manager.outcome("train_teacache").evidence.facts
    # 0 and 1 at the start, 4 and 7 with gradient; 2, 3, 5, 6 are estimated
    assert facts == {"skipped": 4, "computed": 4}
    rollout(model)
    assert manager.outcome("train_teacache").evidence.facts == {"skipped": 4 + 5, "computed": 4 + 3}
    assert manager.outcome("train_teacache").state == "exercised"


def test_gradients_of_the_computed_steps_are_exact_for_their_inputs():
    """With a threshold that skips nothing, all numbers are those without the cache."""
    plain, other = twins(prepared())
    manager = cached(other, train_teacache_threshold=1e-30)
    assert same_tensors(gradients(other), gradients(plain)) == []
    outcome = manager.outcome("train_teacache")
    assert outcome.state == "inert" and outcome.evidence.facts == {"skipped": 0, "computed": STEPS}
    manager.undo_all()
    assert other.teacache is None and "cached" not in other.__dict__
    assert same_tensors(gradients(other), gradients(plain)) == []


def test_an_estimate_holds_what_the_last_computed_step_added():
    plain, other = twins(prepared())
    cached(other)
    exact, close = rollout(plain).detach(), rollout(other).detach()
    assert not torch.equal(exact, close)
    assert float((exact - close).norm() / exact.norm()) < 0.2
    assert all(not residual.requires_grad for residual in other.teacache.residuals.values())
    assert not other.teacache.previous.requires_grad


def test_a_new_size_starts_over():
    model = prepared()
    cached(model)
    with torch.no_grad():
        model(**make_inputs((2, 4, 4)))
    rollout(model, shape=(3, 4, 4))
    assert model.teacache.computed == 1 + 3


def test_validation_computes_every_step():
    plain, other = twins(prepared().eval())
    cached(other)
    assert torch.equal(rollout(other, backprop=()), rollout(plain, backprop=()))


def test_off_changes_nothing():
    model = prepared()
    manage(model, reward_fn="HPSReward")
    assert model.teacache is None and "cached" not in model.__dict__


def test_published_models_bring_their_polynomial():
    model = prepared()
    manager = manage(model, **REWARD)[0]
    assert len(model.teacache.rescale.coeffs) == 5
    assert "8 sampling steps, the first 2 always computed" in manager.outcome("train_teacache").applied.detail


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"pretrained_model_name_or_path": "models/Other"}, "no polynomial is known for 'Other'"),
        ({"train_teacache_coefficients": "1,x"}, "is no list of numbers"),
        ({**PLAIN, "train_teacache_start": 8}, "leaves none to skip"),
        ({**PLAIN, "train_teacache_threshold": 0.0}, "must be above 0"),
    ],
)
def test_refusals(flags, text):
    with pytest.raises(PatchRefused, match=text):
        manage(prepared(), **{**REWARD, **flags})


def test_other_objectives_are_refused_before_weights_load(tmp_path, monkeypatch):
    monkeypatch.setattr("videox_fun.recipes.wan.WanRecipe.load", lambda *_: pytest.fail("weights were loaded"))
    model = tmp_path / "model"
    make_tiny_checkpoint(model, family="wan2.1_t2v")
    text = refusal(model, tmp_path / "out", script=LORA, train_teacache=True, audit="default")
    assert "once per training step, for its gradient" in text and "a reward script" in text
