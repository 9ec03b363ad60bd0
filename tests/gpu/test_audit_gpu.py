"""The audit on a GPU: the clock never waits for the device in a step, and the doctor's trials run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from optim_patches.audit import clock, flops
from optim_patches.audit.clock import PhaseClock
from optim_patches.audit.device_use import DeviceUse
from optim_patches.doctor import kernels, machine
from optim_patches.doctor.findings import OK

pytestmark = pytest.mark.gpu


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    """torch raises on every operation of its own that waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_clock_waits_for_nothing_and_sees_the_devices_own_time(waiting_is_an_error: None) -> None:
    left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    watch = PhaseClock.on("cuda")
    start = time.perf_counter()
    for _ in range(20):
        watch.switch(clock.DATA)
        watch.switch(clock.OTHER)
        with watch.span(clock.FORWARD):
            for _ in range(10):
                left @ right
    launched = time.perf_counter() - start
    torch.cuda.set_sync_debug_mode("default")
    times = watch.stop()
    whole = time.perf_counter() - start
    assert times["device"]["forward"] > 0.5 * sum(times["device"].values())
    assert sum(times["device"].values()) == pytest.approx(whole, rel=0.2)
    assert times["host"]["forward"] <= launched  # the host only launched


def test_a_large_product_stays_below_the_listed_peak() -> None:
    peak = flops.device_peak("cuda", torch.bfloat16)
    if peak is None:
        pytest.skip("this card is not in the table")
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    left @ right
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        left @ right
    torch.cuda.synchronize()
    rate = 10 * 2 * 8192**3 / (time.perf_counter() - start)
    assert 0.3 < rate / peak[0] < 1.0


def test_what_is_installed_runs() -> None:
    torch_facts = machine.ask_torch(timeout=120)
    assert torch_facts.works and torch_facts.capability == torch.cuda.get_device_capability()
    found = {finding.id: finding for finding in kernels.try_kernels(torch_facts, quick=True, timeout=120)}
    assert found["sdpa"].state == OK
    assert machine._pinned(timeout=120).value.en.endswith("GB/s to the device")


def test_idle_time_is_a_share_where_nvml_answers() -> None:
    use = DeviceUse.of("cuda")
    use.start()
    idle = use.stop()
    assert idle is None or 0 <= idle <= 1
