"""The random streams of a run.

Upstream draws from six streams whose order decides the numbers: python's, numpy's and torch's global generators, a
numpy generator and a torch generator seeded ``seed + rank``, and a numpy generator seeded with a constant so that all
ranks agree. They are kept together here, so that a checkpoint saves and restores every one of them.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

_GOLDEN_RATIO = 2654435761  # Knuth's multiplier: neighbouring seeds end up far apart
_INDEX_SEED = 43  # shared by all ranks: draws that must agree without communication


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class RngStreams:
    """All generators of one process.

    Attributes:
        numpy: per-rank generator of the step's coin flips, ``PCG64(seed + rank)``.
        torch: per-rank generator of noise and uniform timestep indices, on the training device.
        index: generator with the same state on every rank.
    """

    def __init__(self, seed: int, *, rank: int = 0, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.rank = rank
        self.numpy = np.random.Generator(np.random.PCG64(seed + rank))
        self.torch = torch.Generator(device).manual_seed(seed + rank)
        self.index = np.random.Generator(np.random.PCG64(_INDEX_SEED))

    def seed_globals(self) -> None:
        """Seed the global generators, equal on all ranks (model construction then agrees between ranks)."""
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)

    def separate(self) -> None:
        """Move torch's global generators away from the seed that :attr:`torch` starts from.

        Both start from the same number, and building a model on the meta device draws nothing in between: the noise of
        the first VAE posterior would be the very noise the denoiser is trained on. Equal on all ranks.
        """
        torch.manual_seed((self.seed * _GOLDEN_RATIO + 1) % 2**32)

    def snapshot(self) -> dict[str, Any]:
        """State of every stream as JSON-able values."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()
        state: dict[str, Any] = {
            "python": [version, list(words), gauss],
            "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached)],
            "torch": _encode(torch.get_rng_state()),
            "stream_numpy": self.numpy.bit_generator.state,
            "stream_index": self.index.bit_generator.state,
            "stream_torch": _encode(self.torch.get_state()),
        }
        if torch.cuda.is_available():
            state["cuda"] = _encode(torch.cuda.get_rng_state())
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Set every stream to a state made by :meth:`snapshot`."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(state["torch"]))
        self.numpy.bit_generator.state = state["stream_numpy"]
        self.index.bit_generator.state = state["stream_index"]
        self.torch.set_state(_decode(state["stream_torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode(state["cuda"]))
