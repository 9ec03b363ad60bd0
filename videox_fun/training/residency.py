"""Where the frozen encoders live.

Normally every part stays on the training device. With ``--low_vram`` a part is there only while it is used and on the
host otherwise, so that the denoiser's step has the device to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Residency:
    """Moves frozen modules between host and device."""

    def __init__(self, device: torch.device, *, low_vram: bool) -> None:
        self.device = device
        self.low_vram = low_vram
        self.pinned_to_host: set[int] = set()

    def keep_on_host(self, module: nn.Module) -> None:
        """Leave ``module`` on the host for the whole run (an encoder that the data loader calls)."""
        self.pinned_to_host.add(id(module))
        module.to("cpu")

    def place(self, *modules: nn.Module | None) -> None:
        """Put modules where they wait between uses."""
        for module in modules:
            if module is not None:
                waits_on_host = self.low_vram or id(module) in self.pinned_to_host
                module.to("cpu" if waits_on_host else self.device)

    @contextmanager
    def use(self, *modules: nn.Module | None) -> Iterator[None]:
        """Have modules on the device inside the block; afterwards they wait where :meth:`place` puts them."""
        present = [module for module in modules if module is not None and id(module) not in self.pinned_to_host]
        if self.low_vram:
            for module in present:
                module.to(self.device)
        try:
            yield
        finally:
            if self.low_vram:
                for module in present:
                    module.to("cpu")
                if present and self.device.type == "cuda":
                    torch.cuda.empty_cache()
