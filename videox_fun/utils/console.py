"""What a run prints: log lines beside progress bars, and no notices that say nothing about the run.

A log line that is written while a bar is drawn would continue the bar's line; ``tqdm.write`` takes the bar away first.
The notices are those that torchao, bitsandbytes and their users give on import, whether or not the run needs them.
"""

from __future__ import annotations

import logging
import sys

#: Loggers, and how the messages begin that are left out (as they are written in the code, before values are put in).
NOTICES = {
    "torchao": "Failed to load ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
    "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
}
#: Seconds between two states of a bar that is not drawn on a terminal, where each is a line of its own.
BAR_SECONDS = 10.0


class BesideBars(logging.Handler):
    """Writes to standard error without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            from tqdm import tqdm

            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def configure_logging(*, level: int) -> None:
    """Log lines of ``level`` and above go to standard error."""
    logging.basicConfig(level=level, force=True, handlers=[BesideBars()], datefmt="%H:%M:%S",
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name, start in NOTICES.items():
        chosen = logging.getLogger(name)
        if not any(isinstance(each, _Without) for each in chosen.filters):
            chosen.addFilter(_Without(start))


class _Without(logging.Filter):
    """Lets everything pass but messages with one beginning."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.start)


def bar_interval() -> float:
    """``mininterval`` of a progress bar."""
    return 0.1 if sys.stderr.isatty() else BAR_SECONDS
