"""Optimizers, schedules, clipping: values against closed forms and against torch's own, and exact restoring."""

from __future__ import annotations

import copy
import importlib.util
import io
import math
from argparse import Namespace

import pytest
import torch
from torch import nn

from videox_fun.training.clipping import GradientClipper, NonFiniteError
from videox_fun.training.context import ParamGroup
from videox_fun.training.optimizers import (
    build_lr_scheduler,
    build_optimizer,
    check_owned,
    load_optimizer_state,
    set_schedule_position,
)


def make_args(**changes) -> Namespace:
    values = {
        "learning_rate": 1e-2, "scale_lr": False, "gradient_accumulation_steps": 1, "train_batch_size": 1,
        "use_8bit_adam": False, "use_came": False, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_weight_decay": 0.1,
        "adam_epsilon": 1e-6, "lr_scheduler": "constant", "lr_warmup_steps": 0, "max_grad_norm": 1.0,
        "abnormal_norm_clip_start": None, "initial_grad_norm_ratio": 5,
    }
    return Namespace(**{**values, **changes})


def make_model(dtype=torch.float32, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)).to(dtype)


def make_groups(model: nn.Module, rate: float = 1e-2) -> list[ParamGroup]:
    named = list(model.named_parameters())
    return [ParamGroup([p for _, p in named], rate, [n for n, _ in named]), ParamGroup([], rate / 2, [])]


def train(model, optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(4, model[0].in_features, generator=generator).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


KINDS = [
    pytest.param({}, id="adamw"),
    pytest.param({"use_8bit_adam": True}, id="8bit", marks=pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")),
    pytest.param({"use_came": True}, id="came", marks=pytest.mark.skipif(
        importlib.util.find_spec("came_pytorch") is None, reason="came-pytorch is not installed")),
]


def test_adamw_takes_the_flags_and_keeps_the_empty_group():
    model = make_model()
    optimizer = build_optimizer(make_args(scale_lr=True, gradient_accumulation_steps=2, train_batch_size=3),
                                make_groups(model), world=4)
    assert type(optimizer) is torch.optim.AdamW
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 * 24, 5e-3 * 24]
    first = optimizer.param_groups[0]
    assert (first["betas"], first["eps"], first["weight_decay"]) == ((0.9, 0.95), 1e-6, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_moves_the_weights(kind):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(make_args(**kind), make_groups(model))
    train(model, optimizer, 2, seed=1)
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_optimizers_are_refused_by_name():
    with pytest.raises(ValueError, match="--use_8bit_adam and --use_came"):
        build_optimizer(make_args(use_8bit_adam=True, use_came=True), make_groups(make_model()))


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="No parameter is trainable"):
        build_optimizer(make_args(), [ParamGroup([], 1e-3, [])])


@pytest.mark.parametrize(("flag", "package"), [("use_8bit_adam", "bitsandbytes"), ("use_came", "came-pytorch")])
def test_missing_package_is_one_sentence(monkeypatch, flag, package):
    monkeypatch.setitem(__import__("sys").modules, {"use_8bit_adam": "bitsandbytes.optim",
                                                    "use_came": "came_pytorch"}[flag], None)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        build_optimizer(make_args(**{flag: True}), make_groups(make_model()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_restored_optimizer_continues_bit_for_bit(kind, dtype):
    # 80 x 80 weights: bitsandbytes keeps tensors below 4096 elements in 32 bits, so this one is really quantized.
    model = make_model(dtype, width=80)
    optimizer = build_optimizer(make_args(**kind), make_groups(model))
    train(model, optimizer, 3, seed=1)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3, seed=2)

    other = make_model(dtype, width=80)
    other.load_state_dict(weights)
    groups = make_groups(other)
    fresh = build_optimizer(make_args(**kind), groups)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    load_optimizer_state(fresh, state, names=[g.names for g in groups], saved_names=[g.names for g in groups])
    check_owned(fresh, groups)
    train(other, fresh, 3, seed=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    ours, theirs = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    flat = [(k, v) for row in ours.values() for k, v in row.items() if isinstance(v, torch.Tensor)]
    again = [v for row in theirs.values() for k, v in row.items() if isinstance(v, torch.Tensor)]
    for (key, a), b in zip(flat, again, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), key


def test_state_is_matched_by_name_when_the_order_changed():
    model = make_model()
    optimizer = build_optimizer(make_args(), make_groups(model))
    train(model, optimizer, 2, seed=1)
    saved = [[n for n, _ in model.named_parameters()], []]
    groups = make_groups(model)
    groups[0] = ParamGroup(groups[0].params[::-1], 1e-2, groups[0].names[::-1])
    fresh = build_optimizer(make_args(), groups)
    load_optimizer_state(fresh, optimizer.state_dict(), names=[g.names for g in groups], saved_names=saved)
    for p in model.parameters():
        assert torch.equal(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_other_parameters_are_named_and_refused_unless_allowed():
    model = make_model()
    optimizer = build_optimizer(make_args(), make_groups(model))
    train(model, optimizer, 2, seed=1)
    saved = [[n for n, _ in model.named_parameters()], []]
    named = list(model.named_parameters())[:2]
    groups = [ParamGroup([p for _, p in named], 1e-2, [n for n, _ in named])]
    fresh = build_optimizer(make_args(), groups)
    names = [g.names for g in groups]
    with pytest.raises(ValueError, match=r"only in the saved state: 2\.bias, 2\.weight"):
        load_optimizer_state(fresh, optimizer.state_dict(), names=names, saved_names=saved)
    load_optimizer_state(fresh, optimizer.state_dict(), names=names, saved_names=saved, allow_changes=True)
    assert torch.equal(fresh.state[named[0][1]]["exp_avg"], optimizer.state[named[0][1]]["exp_avg"])


def test_other_shapes_are_named():
    small, large = make_model(width=8), make_model(width=16)
    optimizer = build_optimizer(make_args(), make_groups(small))
    train(small, optimizer, 1, seed=1)
    fresh = build_optimizer(make_args(), make_groups(large))
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(8, 8\).*\(16, 16\)"):
        load_optimizer_state(fresh, optimizer.state_dict(), names=[g.names for g in make_groups(large)])


def test_stale_optimizer_is_noticed():
    optimizer = build_optimizer(make_args(), make_groups(make_model()))
    with pytest.raises(ValueError, match=r"does not hold 4 trainable parameters, for example '0\.weight'"):
        check_owned(optimizer, make_groups(make_model()))


# ---- schedules


def curve(args: Namespace, total: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(args, optimizer, total_steps=total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


def test_linear_schedule_counts_optimizer_steps():
    # Accumulation 4, 8 optimizer steps, warm-up 2: peak at step 2, zero at step 8.
    rates = curve(make_args(lr_scheduler="linear", lr_warmup_steps=2, gradient_accumulation_steps=4), 8)
    assert rates == pytest.approx([0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "constant_with_warmup", "constant"])
def test_schedule_equals_the_scaled_one_of_several_processes(name):
    """The recorded trainer stretches the schedule by the world size and steps it world times per optimizer step."""
    from diffusers.optimization import get_scheduler

    world, total, warmup = 2, 6, 2
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup * world, num_training_steps=total * world)
    stretched = []
    for _ in range(total):
        stretched.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(world):
            scheduler.step()
    assert curve(make_args(lr_scheduler=name, lr_warmup_steps=warmup), total)[:-1] == pytest.approx(stretched)


def test_cosine_ends_at_zero():
    assert curve(make_args(lr_scheduler="cosine"), 10)[-1] == pytest.approx(0, abs=1e-12)


def test_unknown_schedule_names_the_known():
    with pytest.raises(ValueError, match="--lr_scheduler 'cosin'.*cosine_with_restarts"):
        curve(make_args(lr_scheduler="cosin"), 2)


def test_schedule_position_equals_stepping_there():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(make_args(lr_scheduler="cosine", lr_warmup_steps=2), optimizer, total_steps=10)
    set_schedule_position(scheduler, step=5)
    optimizer.step()
    rates = [optimizer.param_groups[0]["lr"]]
    scheduler.step()
    rates.append(scheduler.get_last_lr()[0])
    assert rates == curve(make_args(lr_scheduler="cosine", lr_warmup_steps=2), 10)[5:7]


# ---- clipping


def with_gradient(norm: float) -> list[nn.Parameter]:
    """Two parameters whose gradients have this global norm."""
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    params[0].grad = torch.tensor([0.6, 0.0, 0.0]) * norm
    params[1].grad = torch.tensor([0.0, 0.8]) * norm
    return params


def norm_of(params) -> float:
    return torch.sqrt(sum(p.grad.square().sum() for p in params)).item()


def test_plain_clipping_equals_torch():
    ours, reference = with_gradient(4.0), with_gradient(4.0)
    result = GradientClipper(make_args()).clip(ours, step=0)
    total = torch.nn.utils.clip_grad_norm_(reference, 1.0)
    assert result.norm == total.item() and result.clipped and result.limit == 1.0
    for a, b in zip(ours, reference, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_small_gradients_are_left_alone():
    params = with_gradient(0.5)
    before = [p.grad.clone() for p in params]
    result = GradientClipper(make_args()).clip(params, step=0)
    assert not result.clipped and all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("step", "norm", "limit"),
    [
        (0, 100.0, 10.0),      # start: 5 times max_grad_norm
        (50, 100.0, 6.0),      # half way down
        (100, 100.0, 2.0),     # the rule needs step > start
        (101, 9.0, 2.0),       # 4.5 times the limit is ordinary
        (101, 12.0, 2.0 / 6),  # 6 times: limit / 6
        (101, 100.0, 0.2),     # at most tenfold
    ],
)
def test_abnormal_norm_rule(step, norm, limit):
    clipper = GradientClipper(make_args(max_grad_norm=2.0, abnormal_norm_clip_start=100))
    params = with_gradient(norm)
    result = clipper.clip(params, step=step)
    assert result.limit == pytest.approx(limit) and result.norm == pytest.approx(norm)
    assert norm_of(params) == pytest.approx(min(limit, norm), rel=1e-4)
    assert result.abnormal == (limit < 2.0)


def test_rule_is_off_without_the_flag_and_counts_are_kept():
    clipper = GradientClipper(make_args(max_grad_norm=2.0))
    for step in range(150, 160):
        assert clipper.clip(with_gradient(100.0), step=step).limit == 2.0
    assert (clipper.stats.steps, clipper.stats.clipped, clipper.stats.abnormal) == (10, 10, 0)
    assert clipper.stats.average_norm == pytest.approx(100.0)


def test_norms_per_parameter_follow_the_reporting_rule():
    clipper = GradientClipper(make_args(abnormal_norm_clip_start=10))
    names = ["a", "b"]
    assert clipper.clip(with_gradient(2.0), step=10, names=names).parameter_norms == {}
    assert clipper.clip(with_gradient(0.9), step=11, names=names).parameter_norms == {}
    report = clipper.clip(with_gradient(2.0), step=11, names=names).parameter_norms
    assert report == {"a": pytest.approx(1.2), "b": pytest.approx(1.6)}


def test_non_finite_steps_are_skipped_then_stop_the_run(caplog):
    clipper = GradientClipper(make_args())
    for step in (7, 8):
        params = with_gradient(1.0)
        params[0].grad[0] = math.nan
        result = clipper.clip(params, step=step, loss=torch.tensor(2.0), samples=["row 3"])
        assert result.skip and not result.finite and not result.clipped
    assert "step 8, samples row 3" in caplog.text
    clipper.clip(with_gradient(1.0), step=9)  # a good step starts the count again
    with pytest.raises(NonFiniteError, match="loss was non-finite 3 optimizer steps in a row, last at step 13"):
        for step in (10, 11, 12):
            clipper.clip(with_gradient(1.0), step=step, loss=torch.tensor(math.inf), samples=[step])
    assert clipper.stats.skipped == 5


def test_model_that_overflows_stops_with_finite_weights():
    """Activations around 1e30 in bf16: the squares overflow; no NaN may reach the weights."""
    model = make_model(torch.bfloat16)
    with torch.no_grad():
        model[0].weight.mul_(1e30)
        model[2].weight.mul_(1e30)
    optimizer = build_optimizer(make_args(), make_groups(model))
    clipper = GradientClipper(make_args())
    with pytest.raises(NonFiniteError):
        for step in range(5):
            loss = model(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            result = clipper.clip(model.parameters(), step=step, loss=loss, samples=[f"clip{step}.mp4"])
            if not result.skip:
                optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_fp16_overflow_is_the_scalers_business():
    class Scaling:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)

        def unscale_gradients(self, optimizer):
            self.scaler.unscale_(optimizer)

    scaling = Scaling()
    model = make_model()
    optimizer = build_optimizer(make_args(), make_groups(model))
    clipper = GradientClipper(make_args())
    before = copy.deepcopy(model.state_dict())
    for step, factor in enumerate((1e12, 1.0)):
        loss = model(torch.full((1, 8), factor)).square().mean()
        scaling.scaler.scale(loss).backward()
        result = clipper.clip(model.parameters(), step=step, loss=loss, accelerator=scaling, optimizer=optimizer)
        assert not result.skip
        scaling.scaler.step(optimizer)
        scaling.scaler.update()
        optimizer.zero_grad()
        if step == 0:
            assert not result.finite and scaling.scaler.get_scale() == 2.0**119
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert result.finite and any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_clipping_reads_the_device_once(monkeypatch):
    reads = []
    for name in ("item", "tolist", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name,
                            lambda self, *a, _o=original, _n=name: (reads.append(_n), _o(self, *a))[1])
    GradientClipper(make_args(abnormal_norm_clip_start=0)).clip(with_gradient(30.0), step=5, loss=torch.tensor(1.0))
    assert reads == ["tolist"]


def test_fused_adamw_updates_like_the_plain_one():
    def after(fused: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 16)
        group = ParamGroup(list(layer.parameters()), 1e-2, ["weight", "bias"])
        flags = {"use_8bit_adam": False, "use_came": False, "fused_optimizer": fused, "scale_lr": False,
                 "learning_rate": 1e-2, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_weight_decay": 1e-2,
                 "adam_epsilon": 1e-8}
        optimizer = build_optimizer(Namespace(**flags), [group])
        assert bool(optimizer.defaults["fused"]) is fused
        for _ in range(5):
            layer(torch.ones(2, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach()

    torch.testing.assert_close(after(True), after(False), rtol=0, atol=1e-6)
