"""``--liger`` on a tiny Wan transformer, in Triton's interpreter: same training, honest counts, clean undo."""

from __future__ import annotations

import pytest
import torch

from optim_patches.liger import KERNELS
from tests.patches.interpreted import liger_shim
from tests.patches.wan import (
    add_native_lora,
    assert_close,
    gradients,
    make_inputs,
    make_model,
    manage,
    train,
    trained,
    twins,
)
from tests.unit import real_runs

SMALL = (1, 2, 4)


@pytest.fixture(scope="module", autouse=True)
def shim() -> None:
    liger_shim.install()


def test_every_gradient_equals_the_plain_models() -> None:
    plain, fused = twins(make_model(layers=1))
    manager, _ = manage(fused, liger=True, liger_kernels=",".join(KERNELS))
    inputs = make_inputs(SMALL, batch=2)
    assert_close(gradients(fused, inputs), gradients(plain, inputs), dtype=torch.float32, factor=64)
    outcome = manager.outcome("liger")
    assert outcome.state == "exercised"
    calls = outcome.evidence.facts["eager_calls"]
    assert calls == {"modulate": 3, "gate": 2, "rms_rope": 1, "rms_norm": 2, "layer_norm": 1, "gelu": 2}


def test_twenty_steps_of_lora_training_with_checkpointing_agree() -> None:
    model = make_model(layers=1)
    add_native_lora(model)
    model.enable_gradient_checkpointing()
    plain, fused = twins(model)
    manage(fused, liger=True)
    options = {"batch": 1, "shapes": (SMALL,), "steps": 20}
    expected, losses = train(plain, **options), train(fused, **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    assert_close(trained(fused), trained(plain), dtype=torch.float32, factor=256)


def test_undo_restores_the_forwards_and_the_numbers() -> None:
    plain, fused = twins(make_model(layers=1))
    manager, _ = manage(fused, liger=True)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    manager.undo_all()
    assert not any({"forward", "project_qkv"} & module.__dict__.keys() for module in fused.modules())
    inputs = make_inputs(SMALL)
    assert torch.equal(fused(**inputs), plain(**inputs))


def test_only_the_named_kernels_are_used() -> None:
    model = make_model(layers=1)
    manager, _ = manage(model, liger=True, liger_kernels="rms_norm")
    model(**make_inputs(SMALL, batch=1))
    outcome = manager.outcome("liger")
    assert outcome.evidence.facts["eager_calls"] == {"rms_norm": 4}
    assert all(site.split(".")[-1] in ("norm_q", "norm_k") for site in outcome.applied.sites)
    assert "not in this model: swiglu, geglu" in outcome.evidence.summary


def test_per_token_times_are_modulated_per_token() -> None:
    plain, fused = twins(make_model(layers=1))
    manage(fused, liger=True, liger_kernels="modulate,gate")
    inputs = make_inputs(SMALL, batch=1)
    inputs["t"] = torch.tensor([[10.0, 500.0]])
    assert_close(gradients(fused, inputs), gradients(plain, inputs), dtype=torch.float32, factor=64)


def test_the_interpreter_refuses_a_half_precision_run() -> None:
    from optim_patches.base import Target
    from optim_patches.liger import LigerPatch
    from tests.patches.wan import make_args

    target = Target(make_args(liger=True), extras={"weight_dtype": torch.bfloat16})
    verdict = LigerPatch().check(target)
    assert not verdict.ok and "float32 only" in verdict.reason and "--mixed_precision no" in verdict.instead


def test_with_the_main_command(tmp_path, tmp_path_factory) -> None:
    folder = real_runs.checkpoint(tmp_path_factory)
    flags = {"max_train_steps": 1, "video_sample_size": 32, "video_sample_n_frames": 1}
    plain = real_runs.train(folder, tmp_path / "plain", **flags)
    run = real_runs.train(folder, tmp_path / "out", **flags, liger=True, liger_kernels="layer_norm,gate")
    outcome = run.trainer.ctx.patches.outcome("liger")
    assert outcome.state == "exercised" and outcome.evidence.facts["eager_calls"].keys() == {"layer_norm", "gate"}
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
