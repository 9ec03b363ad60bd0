"""Where the time of a run goes, without waiting for the device.

The run is always in exactly one phase. ``switch`` ends the current phase and begins the next, so the shares add up to
the whole. On the host that is one reading of the clock. On CUDA an event is put on the stream as well: the stretch
between two neighbouring events is the device's time of that phase, and where the device had nothing to do while the
host waited for data, that stretch is the stall. Events are read one micro-step late, and only those that have passed
already, so no step ever waits for them; ``stop`` waits once, at the end of the run.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

DATA, PREPARE, VAE, TEXT, IMAGE = "data", "prepare", "vae", "text", "image"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
SAVING, VALIDATION, AUDIT, OTHER = "saving", "validation", "audit", "other"
PHASES = (DATA, VAE, TEXT, IMAGE, PREPARE, FORWARD, BACKWARD, OPTIMIZER, SAVING, VALIDATION, AUDIT, OTHER)
#: Phases that are no part of training steps.
BETWEEN_STEPS = (SAVING, VALIDATION, AUDIT)
ENCODERS = {"vae": VAE, "text_encoder": TEXT, "image_encoder": IMAGE}


class PhaseClock:
    """Adds up the time of each phase.

    Args:
        make_event: makes a timing event of the device (``record``, ``query``, ``elapsed_time``, ``synchronize``);
            ``None`` reads the host's clock only.
        enabled: a clock that is off does nothing.

    Attributes:
        host: seconds per phase on the host; ``device``: on the device, empty without events.
        switches: how often the phase changed.
    """

    def __init__(
        self, *, make_event: Callable[[], Any] | None = None, enabled: bool = True,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled = enabled
        self.host: dict[str, float] = {}
        self.device: dict[str, float] = {}
        self.switches = 0
        self._make_event = make_event
        self._now = now
        self._phase = OTHER
        self._since: float | None = None
        self._marks: deque[tuple[Any, str]] = deque()
        self._spare: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def on(cls, device: str, *, enabled: bool = True) -> PhaseClock:
        """The clock for a kind of device."""
        if device != "cuda":
            return cls(enabled=enabled)
        import torch

        return cls(make_event=functools.partial(torch.cuda.Event, enable_timing=True), enabled=enabled)

    def switch(self, phase: str) -> str:
        """Begin a phase. Returns the one that ended."""
        before = self._phase
        if not self.enabled or (phase == before and self._since is not None):
            return before
        now = self._now()
        if self._since is not None:
            self.host[before] = self.host.get(before, 0.0) + now - self._since
        self._since, self._phase = now, phase
        self.switches += 1
        if self._make_event is not None:
            event = self._spare.pop() if self._spare else self._make_event()
            event.record()
            self._marks.append((event, phase))
            if phase == DATA:
                self._read_passed()
        return before

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Be in a phase inside the block, and in the former one after it."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def watch(self, models: Mapping[str, Any]) -> None:
        """Give the encoders phases of their own while a batch is prepared."""
        if not self.enabled:
            return
        for role, model in models.items():
            phase = ENCODERS.get(role)
            if phase is None:
                continue
            for method in ("encode", "decode", "forward"):
                own = getattr(model, method, None)
                if own is not None:
                    self._replace(model, method, self._timed(own, phase))

    def read(self) -> dict[str, dict[str, float]]:
        """Seconds per phase so far, as far as they can be read without waiting."""
        return {"host": dict(self.host), "device": dict(self.device)}

    def stop(self) -> dict[str, dict[str, float]]:
        """End the current phase, wait for the device, and stop timing the encoders. Returns what ``read`` does."""
        if self._since is not None:
            self.switch(OTHER if self._phase != OTHER else SAVING)
            self._since = None
        if self._marks:
            self._marks[-1][0].synchronize()
            self._read_passed()
            self._marks.clear()
        while self._undo:
            self._undo.pop()()
        return self.read()

    def _read_passed(self) -> None:
        """Add up the stretches whose end has passed on the device."""
        while len(self._marks) > 1 and self._marks[1][0].query():
            event, phase = self._marks.popleft()
            self.device[phase] = self.device.get(phase, 0.0) + event.elapsed_time(self._marks[0][0]) / 1000
            self._spare.append(event)

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._phase != PREPARE:  # nested, or while sampling
                return method(*args, **kwargs)
            with self.span(phase):
                return method(*args, **kwargs)

        return call

    def _replace(self, model: Any, name: str, call: Callable[..., Any]) -> None:
        earlier = {key: value for key, value in vars(model).items() if key == name}
        vars(model)[name] = call

        def undo() -> None:
            if vars(model).get(name) is call:
                del vars(model)[name]
                vars(model).update(earlier)

        self._undo.append(undo)
