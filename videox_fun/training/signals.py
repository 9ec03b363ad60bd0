"""Stopping on request: SIGTERM and SIGUSR1 ask for a save at the next optimizer step, then the run ends.

Batch systems send one of them shortly before they take a machine away. The handler only raises a flag; the loop polls
it between optimizer steps, saves a state and leaves with exit code 85 (the code that HTCondor reads as "checkpointed,
start me again"). A second signal ends the process at once.

``accelerate launch`` of one process passes nothing on: the signal ends the launcher, and the training process would go
on alone. So on Linux a launched process asks the kernel for SIGTERM when its launcher dies. That one is not counted as
a second signal, because a signal to the whole process group sends both.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch

logger = logging.getLogger(__name__)

EXIT_SAVED = 85
_SIGNALS = ("SIGTERM", "SIGUSR1")
#: Set by accelerate's launchers in the processes they start.
_LAUNCHED = "ACCELERATE_MIXED_PRECISION"
_PR_SET_PDEATHSIG = 1


class SignalSaver:
    """Remembers that a stop was asked for. Use as a context manager around the training loop."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._launcher: int | None = None

    @property
    def requested(self) -> bool:
        """Whether this process got a signal."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """What the process should end with: 0, or 85 after a signal's save."""
        return EXIT_SAVED if self.requested else 0

    def install(self) -> None:
        """Take over the signals; only the main thread may, elsewhere nothing is installed."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Not in the main thread: SIGTERM and SIGUSR1 will not save before the run ends.")
            return
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None:
                self._previous[number] = signal.signal(number, self._handle)
        if sys.platform == "linux" and _LAUNCHED in os.environ:
            self._launcher = os.getppid()
            _signal_on_death_of_parent(signal.SIGTERM)

    def uninstall(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()
        if self._launcher is not None:
            self._launcher = None
            _signal_on_death_of_parent(0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        launcher_gone = self._launcher is not None and os.getppid() != self._launcher
        if launcher_gone:
            self._launcher = None
        if self.received is not None:
            if launcher_gone:
                return
            raise SystemExit(128 + number)
        self.received = name
        logger.warning("%s received: saving after the current optimizer step, then leaving with exit code %d.",
                       name, EXIT_SAVED)

    def agreed(self, *, world: int = 1, device: torch.device | str = "cpu") -> bool:
        """Whether any rank got a signal; every rank must call this at the same optimizer step."""
        if world <= 1 or not torch.distributed.is_initialized():
            return self.requested
        flag = torch.tensor(float(self.requested), device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        if flag.item() and self.received is None:
            self.received = "a signal on another rank"
        return self.requested

    def __enter__(self) -> SignalSaver:
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        self.uninstall()


def _signal_on_death_of_parent(number: int) -> None:
    """Ask Linux for a signal when the parent dies; 0 takes that back. Where it is refused, nothing changes."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    except (OSError, AttributeError):
        logger.debug("prctl is not available")
