"""Tensors of a ``.safetensors`` file that are read one at a time.

Mapping a file of 30 GB fails on a host of 24 GB: the kernel counts a private mapping as memory that may be written to.
Here only the header is read at first; a tensor's bytes are read when it is asked for, into memory of its own that goes
when the tensor goes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class FileTensor:
    """A tensor that stays in its file."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def read(self) -> Tensor:
        """The values, in memory of their own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if tensor.numel() == 0:
            return tensor
        buffer = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        with open(self.file, "rb") as stream:
            stream.seek(self.offset)
            if stream.readinto(buffer) != len(buffer):
                raise ValueError(f"{self.file} ends early; the download is incomplete")
        return tensor


def index_safetensors(path: str | Path) -> dict[str, FileTensor]:
    """All tensors of a file, unread."""
    path = Path(path)
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise ValueError(f"{path} is not a safetensors file, or its download is incomplete")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: '{name}' has the type {entry['dtype']}, which cannot be loaded")
        found[name] = FileTensor(
            path, 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        )
    return found
