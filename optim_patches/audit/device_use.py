"""How busy the device was: NVML's utilization, asked every few seconds by a thread of its own.

One question takes well under a millisecond and does not touch the training's stream. Where NVML cannot be read (no
``nvidia-ml-py``, no NVIDIA device) there is nothing to sample, and nothing is claimed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

INTERVAL_S = 2.0


class DeviceUse:
    """Samples a device's utilization in per cent while the run goes on."""

    def __init__(self, read: Callable[[], float] | None, *, interval_s: float = INTERVAL_S) -> None:
        self.samples: list[float] = []
        self._read = read
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, device: str) -> DeviceUse:
        """The sampler of a kind of device; without NVML it samples nothing."""
        return cls(_nvml_reader() if device == "cuda" else None)

    def start(self) -> None:
        if self._read is None or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._sample, name="device-use", daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """Share of idle time over all samples, ``None`` without any."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=self._interval_s)
        return 1 - sum(self.samples) / (100 * len(self.samples)) if self.samples else None

    def _sample(self) -> None:
        while not self._end.wait(self._interval_s):
            try:
                self.samples.append(float(self._read()))
            except Exception:  # a driver that stops answering must not be heard in the training
                return


def _nvml_reader() -> Callable[[], float] | None:
    """torch's own question to NVML, if it is answered once."""
    import torch

    device = torch.cuda.current_device()
    try:
        torch.cuda.utilization(device)
    except Exception:
        return None
    return lambda: torch.cuda.utilization(device)
