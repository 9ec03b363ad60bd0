"""The look back at a run: time per phase, operations, memory against plan; and what it costs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optim_patches.audit import clock, flops, second_look
from optim_patches.audit.clock import PhaseClock
from optim_patches.audit.device_use import DeviceUse
from optim_patches.audit.flops import ForwardFlops, count_forward, shapes_of, step_flops
from optim_patches.audit.second_look import Mark, look_back, planned_peak
from optim_patches.audit.text import Text
from tests.patches.live_kit import Run
from tests.patches.wan import make_inputs, make_model
from tests.unit.real_runs import checkpoint, train


class Ticks:
    """A clock that is moved by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A device that works off its queue later than the host fills it; counts how often anybody waits for it."""

    def __init__(self, ticks: Ticks) -> None:
        self.ticks = ticks
        self.busy_until = 0.0
        self.made = self.waits = 0

    def run(self, seconds: float) -> None:
        """Queue work."""
        self.busy_until = max(self.busy_until, self.ticks.now) + seconds

    def event(self) -> Device.Event:
        self.made += 1
        return Device.Event(self)

    class Event:
        def __init__(self, device: Device) -> None:
            self.device = device
            self.at = 0.0

        def record(self) -> None:
            self.at = max(self.device.busy_until, self.device.ticks.now)

        def query(self) -> bool:
            return self.at <= self.device.ticks.now

        def synchronize(self) -> None:
            self.device.waits += 1
            self.device.ticks.now = max(self.device.ticks.now, self.at)

        def elapsed_time(self, end: Device.Event) -> float:
            return 1000 * (end.at - self.at)


# -- the clock ------------------------------------------------------------------------------------------------------
def test_phases_add_up_to_the_whole() -> None:
    ticks = Ticks()
    watch = PhaseClock(now=ticks)
    vae = nn.Linear(1, 1)
    vae.encode = lambda x: setattr(ticks, "now", ticks.now + 3)
    watch.watch({"vae": vae, "transformer": nn.Identity()})
    watch.switch(clock.DATA)
    ticks.now += 1
    watch.switch(clock.OTHER)
    with watch.span(clock.PREPARE):
        ticks.now += 0.5
        vae.encode(None)
    with pytest.raises(KeyError), watch.span(clock.FORWARD):
        ticks.now += 2
        raise KeyError
    with watch.span(clock.VALIDATION):
        vae.encode(None)  # sampling decodes too; that is its own time
    assert watch.stop()["host"] == {"data": 1, "prepare": 0.5, "vae": 3, "forward": 2, "validation": 3, "other": 0}
    assert sum(watch.host.values()) == ticks.now
    before = watch.switches
    vae.encode(None)
    assert watch.switches == before and vars(vae)["encode"].__name__ == "<lambda>"


def test_a_clock_that_is_off_does_nothing() -> None:
    watch = PhaseClock(enabled=False)
    vae = nn.Linear(1, 1)
    watch.watch({"vae": vae})
    with watch.span(clock.FORWARD):
        pass
    assert watch.stop() == {"host": {}, "device": {}} and watch.switches == 0 and "forward" not in vars(vae)


def test_the_device_is_read_late_and_never_waited_for_in_a_step() -> None:
    ticks = Ticks()
    device = Device(ticks)
    watch = PhaseClock(now=ticks, make_event=device.event)
    for _ in range(50):
        watch.switch(clock.DATA)
        ticks.now += 0.1  # decoding
        watch.switch(clock.OTHER)
        for phase, work in ((clock.FORWARD, 0.3), (clock.BACKWARD, 0.6), (clock.OPTIMIZER, 0.05)):
            with watch.span(phase):
                ticks.now += 0.01  # launching
                device.run(work)
        if device.busy_until - ticks.now > 2:  # the loss is read: the host may run two steps ahead
            ticks.now += 1
    assert device.waits == 0
    assert device.made < 50  # events are used again
    read = watch.stop()
    assert device.waits == 1
    assert read["device"]["forward"] == pytest.approx(50 * 0.3, rel=0.01)
    assert read["device"]["backward"] == pytest.approx(50 * 0.6, rel=0.01)
    assert read["device"]["data"] < 0.02 * 50 * 0.95  # decoding is hidden behind the device's work
    assert read["host"]["data"] == pytest.approx(5.0)
    assert sum(read["device"].values()) == pytest.approx(ticks.now, rel=0.01)


def test_a_starving_device_shows_as_waiting_for_data() -> None:
    ticks = Ticks()
    device = Device(ticks)
    watch = PhaseClock(now=ticks, make_event=device.event)
    for _ in range(10):
        watch.switch(clock.DATA)
        ticks.now += 1.0
        with watch.span(clock.FORWARD):
            device.run(0.25)
    times = watch.stop()["device"]
    assert times["data"] == pytest.approx(10 - 9 * 0.25, rel=0.05)


def test_a_phase_costs_microseconds() -> None:
    watch = PhaseClock()

    def block() -> float:
        start = time.perf_counter()
        for _ in range(2000):
            with watch.span(clock.FORWARD):
                pass
        return (time.perf_counter() - start) / 2000

    # a step has about a dozen spans: 200 steps of 100 ms lose 0.05 % at this bound
    assert min(block() for _ in range(5)) < 20e-6


# -- operations -----------------------------------------------------------------------------------------------------
def hand_count(batch: int, tokens: int) -> tuple[int, int]:
    """Operations of the tiny transformer's forward, written down from its dimensions: linear, attention."""
    layers, width, ffn, text = 2, 24, 48, 8
    many, words = batch * tokens, batch * text
    block = 2 * width * width * (6 * many + 2 * words) + 4 * many * width * ffn
    ends = 2 * words * (16 * width + width * width) + 2 * batch * width * (32 + width + 6 * width)
    ends += 2 * many * (16 * width + width * 16)  # patches in and out
    return layers * block + ends, layers * 4 * batch * tokens * (tokens + text) * width


@pytest.mark.parametrize(("shape", "batch"), [((2, 4, 4), 2), ((3, 4, 8), 1)])
def test_forward_is_counted_as_by_hand(shape: tuple[int, int, int], batch: int) -> None:
    model, inputs = make_model(layers=2), make_inputs(shape, batch=batch)
    latents = tuple(inputs["x"].shape)
    found = count_forward(model, (), shapes_of(inputs), latents=latents)
    tokens = shape[0] * shape[1] * shape[2] // 4
    assert (found.linear, found.attention) == hand_count(batch, tokens)
    assert (found.batch, found.tokens) == (batch, tokens)
    model.__class__ = type("FSDPWanTransformer3DModel", (type(model),), {})  # as fully_shard does
    assert count_forward(model, (), shapes_of(inputs), latents=latents) == found


def test_other_shapes_follow_from_one() -> None:
    one = ForwardFlops(linear=100.0, attention=10.0, batch=1, tokens=10)
    assert one.at(2, 30) == ForwardFlops(600.0, 180.0, 2, 30)
    shapes = {(1, 16, 1, 4, 10): 3, (2, 16, 3, 4, 10): 1}  # 10 tokens three times, two samples of 30 once
    full = step_flops(one, shapes, trained_share=1.0, adapter_parameters=0, recomputed_share=1.0)
    assert full.forward == 3 * 110 + 780 and full.model == 3 * full.forward and full.hardware == 4 * full.forward
    lora = step_flops(one, shapes, trained_share=0.0, adapter_parameters=2, recomputed_share=0.5)
    assert lora.model == 2 * (300 + 600) + 3 * (30 + 180) + 6 * 2 * (30 + 60)
    assert lora.hardware == lora.model + 0.5 * full.forward
    halves = step_flops(one, shapes, trained_share=0.0, adapter_parameters=2, recomputed_share=None, ranks_per_sample=2)
    assert halves.model == lora.model / 2 and halves.hardware is None
    both = step_flops(one, shapes, trained_share=1.0, adapter_parameters=0, recomputed_share=1.0, calls=2.0)
    assert both.model == 2 * full.model and both.hardware == 2 * full.hardware


def test_a_network_of_another_make_is_not_counted() -> None:
    assert count_forward(nn.Linear(2, 2), (torch.zeros(1, 2, device="meta"),), {}, latents=(1, 1, 1, 4, 4)) is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H20", 148),
     ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
     ("NVIDIA B200", 2250), ("Tesla T4", 65), ("Unheard of", None)],
)  # fmt: skip
def test_peak_table(name: str, teraflops: float | None) -> None:
    assert flops.listed_peak(name) == (None if teraflops is None else teraflops * 1e12)


def test_the_cpu_peak_is_a_measured_matrix_product() -> None:
    assert 1e8 < flops.measured_peak(torch.float32, size=128) < 1e14


# -- the look -------------------------------------------------------------------------------------------------------
def phases(scale: float = 1.0) -> dict[str, dict[str, float]]:
    return {"host": {"data": 1 * scale, "forward": 3 * scale, "backward": 5 * scale, "saving": 1 * scale}, "device": {}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("run"), gradient_checkpointing=True, steps=3)
    run.facts.tokens = 3 * 2 * 8
    run.report()
    return run


def view_of(run: Run, **facts: Any) -> SimpleNamespace:
    from optim_patches.audit.live_view import View

    return View(args=run.args, explicit=frozenset(), target=run.target, facts=replace(run.facts, **facts),
                probe=run.audit.probe)  # fmt: skip


def test_rates_are_work_over_time(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = (1e6, Text("a test", "测试"))
    monkeypatch.setattr(second_look.flops, "device_peak", lambda device, dtype: peak if dtype.itemsize == 4 else None)
    look = look_back(view_of(finished, phases=phases()), folder=tmp_path)
    linear, attention = hand_count(2, 8)
    adapters = sum(p.numel() for p in finished.model.parameters() if p.requires_grad)
    model = 2 * linear + 3 * attention + 6 * adapters * 16
    assert look.step_flops == pytest.approx(model)
    assert look.mfu == pytest.approx(3 * model / (9 * 1e6))  # saving is no part of a step
    assert look.hfu == pytest.approx(3 * (model + linear + attention) / (9 * 1e6))
    assert look.step_s == 3 and look.tokens_per_s == pytest.approx(48 / 9)
    assert look.shares == {"data": 0.1, "forward": 0.3, "backward": 0.5, "saving": 0.1}
    assert look.peak_source.en == "a test" and "(a test)" in look.lines()[2].en


def test_speed_leaves_out_the_first_steps(finished: Run, tmp_path: Path) -> None:
    warm = Mark(1, 3, 16, {(2, 4, 2, 4, 4): 1}, {"forward": 100.0}, {})
    now = {"host": {"forward": 102.0, "data": 1.0}, "device": {}}
    look = look_back(view_of(finished, phases=now, steps=3), folder=tmp_path, warm=warm)
    assert look.steady_steps == 2 and look.step_s == pytest.approx(1.5) and look.seconds == 103
    short = look_back(view_of(finished, phases=now, steps=1), folder=tmp_path, warm=warm)
    assert short.steady_steps == 1


def test_the_devices_own_times_come_first(finished: Run, tmp_path: Path) -> None:
    times = {"host": {"data": 5.0, "forward": 5.0}, "device": {"data": 1.0, "forward": 9.0}}
    look = look_back(view_of(finished, phases=times), folder=tmp_path)
    assert look.clock == "device" and look.shares == {"data": 0.1, "forward": 0.9}
    assert look.idle == 0.1 and look.idle_source.en == "waiting for data only"
    sampled = look_back(view_of(finished, phases=times), folder=tmp_path, idle=0.25)
    assert sampled.idle == 0.25 and "25.0 %" in "\n".join(line.en for line in sampled.lines())


@pytest.mark.parametrize(
    ("content", "planned"),
    [('{"device_peak_bytes": 2048, "host_peak_bytes": 4096}', 2048),
     ('{"plan": {"peak_bytes": 4096.0}}', 4096), ('{"peak_bytes": "many"}', None),
     ('{"peak_bytes": true}', None), ("[1]", None), ("{broken", None), ("[" * 100_000, None), ('{"plan": 3}', None)],
)  # fmt: skip
def test_a_plan_is_compared_when_it_can_be_read(
    content: str, planned: int | None, finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned_peak(tmp_path, "device") is None
    (tmp_path / "plan.json").write_text(content)
    assert planned_peak(tmp_path, "device") == planned
    monkeypatch.setattr(second_look, "peak_memory", lambda device: (3072, "device"))
    text = "\n".join(line.en for line in look_back(view_of(finished, phases=phases()), folder=tmp_path).lines())
    assert ("planned 2.0 KiB (+50 %)" in text) == (planned == 2048) and "3.0 KiB" in text


def test_on_a_cpu_the_plan_of_the_host_counts(finished: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"device_peak_bytes": 2048, "host_peak_bytes": 4096}')
    look = look_back(view_of(finished, phases=phases()), folder=tmp_path)
    assert look.peak_of == "process" and look.planned_bytes == 4096


def test_idle_time_is_sampled_where_it_can_be_read() -> None:
    use = DeviceUse(lambda: 75.0, interval_s=0.005)
    use.start()
    deadline = time.monotonic() + 5
    while len(use.samples) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert use.stop() == 0.25

    def gone() -> float:
        raise RuntimeError("driver")

    broken = DeviceUse(gone, interval_s=0.001)
    broken.start()
    time.sleep(0.02)
    assert broken.stop() is None and DeviceUse.of("cpu").stop() is None


def test_a_look_that_fails_costs_no_run(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr("optim_patches.audit.live.look_back", lambda *a, **k: 1 / 0)
    run = Run(tmp_path, steps=1, lora=None)
    run.report()
    report = run.audit.finish(run.target, run.facts)
    assert report.look is None and "look back at the run failed" in caplog.text
    assert json.loads((tmp_path / "audit.json").read_text())["look"] is None


# -- a real run -----------------------------------------------------------------------------------------------------
def test_a_real_run_ends_with_the_look(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys) -> None:
    tracked: list[dict[str, float]] = []

    def spy(run: Any) -> None:
        run.trainer.run_logger.track = lambda values, step: tracked.append(dict(values))

    run = train(checkpoint(tmp_path_factory), tmp_path, audit="default", max_train_steps=6, gradient_checkpointing=True,
                audit_after_steps=2, checkpointing_steps=3, before=spy)  # fmt: skip
    assert run.code == 0
    screen = capsys.readouterr().out
    assert screen.index("Optimization audit after 2 steps") < screen.index("Look back at the run")
    look = json.loads((tmp_path / "audit.json").read_text())["look"]
    assert look["steps"] == 6 and look["steady_steps"] == 4 and look["clock"] == "host"
    named = {"data", "vae", "text", "forward", "backward", "optimizer", "saving", "audit", "other"}
    assert set(look["shares"]) >= named
    assert sum(look["shares"].values()) == pytest.approx(1)
    assert 0 < look["mfu"] < look["hfu"] < 1 and look["tokens_per_s"] > 0 and look["peak_bytes"] > 1 << 20
    assert "## Look back at the run" in (tmp_path / "audit.md").read_text()
    first, last = tracked
    assert first["audit/rows_enabled"] > 0 and "audit/mfu" not in first
    assert last["audit/mfu"] == look["mfu"] and last["audit/share_vae"] == look["shares"]["vae"]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "summary" and events[-1]["audit/step_s"] == look["step_s"]
    # what timing costs: readings of a clock per step, and no wait for a device in any of them
    assert run.trainer.clock.switches < 30 * 6
    assert all("encode" not in vars(module) for module in run.trainer.components.frozen().values())


def test_chinese_lines_are_complete(finished: Run, tmp_path: Path) -> None:
    look = look_back(view_of(finished, phases=phases()), folder=tmp_path, recompiles=2, idle=0.5)
    for line in look.lines():
        assert not re.search(r"[\u4e00-\u9fff]", line.en) and re.search(r"[\u4e00-\u9fff]|MFU", line.zh)
    assert set(second_look.NAMES) == set(clock.PHASES)
