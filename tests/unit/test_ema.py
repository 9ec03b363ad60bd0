"""The moving average: equal to diffusers' rule, never standing still, and compared by name when it is restored."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from videox_fun.training.ema import CONFIG_NAME, EMA, WEIGHTS_NAME


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    return model


def run(model: nn.Module, ema: EMA, steps: int, *, rate: float = 0.5, also=None) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        with torch.no_grad():
            for p in model[1].parameters():
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=rate)
        ema.step()
        if also is not None:
            also()


def test_equals_the_reference_rule_bit_for_bit():
    from diffusers.training_utils import EMAModel

    model = make_model()
    reference = EMAModel(model.parameters())
    ema = EMA(model.named_parameters())
    assert ema.names == ["1.weight", "1.bias"]
    run(model, ema, 12, also=lambda: reference.step(model.parameters()))
    theirs = dict(zip((n for n, _ in model.named_parameters()), reference.shadow_params, strict=True))
    for name, value in ema.shadow.items():
        assert torch.equal(value, theirs[name]), name
    assert ema.optimization_step == reference.optimization_step and ema.current_decay == reference.cur_decay_value


@pytest.mark.parametrize(("step", "decay"), [(1, 0.0), (2, 2 / 11), (3, 3 / 12), (100, 100 / 109), (10**6, 0.9999)])
def test_decay(step, decay):
    assert EMA(make_model().named_parameters()).decay_at(step) == pytest.approx(decay)


def test_average_lies_between_first_and_last_weights():
    model = make_model()
    with torch.no_grad():
        model[1].weight.fill_(0.0)
    ema = EMA(model.named_parameters())
    for step in range(1, 6):
        with torch.no_grad():
            model[1].weight.fill_(float(step))
        ema.step()
    shadow = ema.shadow["1.weight"]
    assert (shadow > 0).all() and (shadow < 5).all()


def test_bf16_weights_are_averaged_in_fp32():
    """An update of 1e-4 relative is lost in a bf16 shadow; upstream's stands still there."""
    def far_shadow(dtype):
        model = make_model().bfloat16()
        with torch.no_grad():
            model[1].weight.fill_(1.0)
        ema = EMA(model.named_parameters(), dtype=dtype)
        ema.optimization_step = 10**6
        with torch.no_grad():
            model[1].weight.fill_(1.5)
        ema.step()
        return ema.shadow["1.weight"][0, 0].item()

    assert far_shadow(torch.float32) == pytest.approx(1 + 0.5e-4)
    assert far_shadow(None) == 1.0


def test_store_copy_restore():
    model = make_model()
    ema = EMA(model.named_parameters())
    run(model, ema, 3)
    live = {n: p.detach().clone() for n, p in model.named_parameters()}
    ema.store()
    ema.copy_to()
    assert torch.equal(model[1].weight, ema.shadow["1.weight"]) and not torch.equal(model[1].weight, live["1.weight"])
    ema.restore()
    assert all(torch.equal(p, live[n]) for n, p in model.named_parameters())
    with pytest.raises(RuntimeError):
        ema.restore()


def test_state_dict_round_trip_continues():
    model, ema = make_model(), None
    ema = EMA(model.named_parameters())
    run(model, ema, 4)
    state = {k: ({n: t.clone() for n, t in v.items()} if k == "shadow" else v) for k, v in ema.state_dict().items()}
    other = make_model()
    other.load_state_dict(model.state_dict())
    again = EMA(other.named_parameters())
    again.load_state_dict(state)
    run(model, ema, 2)
    run(other, again, 2)
    assert all(torch.equal(ema.shadow[n], again.shadow[n]) for n in ema.names)


def test_other_trained_set_is_reported_by_name():
    model = make_model()
    state = EMA(model.named_parameters()).state_dict()
    model[0].requires_grad_(True)
    model[1].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"only in the saved state: 1\.bias; only in this run: 0\.bias, 0\.weight"):
        EMA(model.named_parameters()).load_state_dict(state)


def test_folder_holds_the_whole_model_and_diffusers_reads_its_numbers(tmp_path):
    from diffusers.training_utils import EMAModel

    model = make_model()
    ema = EMA(model.named_parameters())
    run(model, ema, 3)
    tensors, config = ema.folder_content(model.state_dict(), {"_class_name": "Tiny", "dim": 6})
    assert list(tensors) == list(model.state_dict())
    assert torch.equal(tensors["1.weight"], ema.shadow["1.weight"])
    assert torch.equal(tensors["0.weight"], model[0].weight)
    reader = EMAModel(model.parameters())
    reader.load_state_dict({k: v for k, v in config.items() if k not in ("_class_name", "dim")})
    assert reader.optimization_step == 3 and config["dim"] == 6

    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / WEIGHTS_NAME)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config))
    again = EMA(make_model().named_parameters())
    again.load_folder(tmp_path)
    assert again.optimization_step == 3 and torch.equal(again.shadow["1.bias"], ema.shadow["1.bias"])


def test_missing_place_in_the_model_is_named():
    ema = EMA(make_model().named_parameters())
    with pytest.raises(ValueError, match=r"'1\.weight'"):
        ema.folder_content({"0.weight": torch.zeros(1)}, {})


def test_nothing_trainable_is_refused():
    with pytest.raises(ValueError, match="nothing to average"):
        EMA(make_model()[0].named_parameters())
