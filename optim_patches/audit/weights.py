"""What a checkpoint folder says about itself: config.json and the names of its tensors, without loading any."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from optim_patches.audit.project import Project, read_text

_MAX_HEADER = 32 << 20
_FOLDERS = (".", "transformer", "low_noise_model", "high_noise_model", "dit")


def read_model(project: Project, name: str, near: str) -> tuple[dict[str, Any] | None, frozenset[str] | None]:
    """The transformer's configuration and tensor names, each None when not within reach."""
    root = project.find(name, near=near)
    if root is None or not root.is_dir():
        return None, None
    for folder in _FOLDERS:
        text, _ = read_text(root / folder / "config.json")
        if text is None:
            continue
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(config, dict):
            return config, _tensor_names(root / folder)
    return None, None


def _tensor_names(folder: Path) -> frozenset[str] | None:
    names: set[str] = set()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        header = read_header(file)
        if header is None:
            return None
        names.update(key for key in header if key != "__metadata__")
    return frozenset(names) if files else None


def read_header(path: Path) -> dict[str, Any] | None:
    """The header of a safetensors file, None when it is not one."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                return None
            length = struct.unpack("<Q", head)[0]
            if length > min(_MAX_HEADER, path.stat().st_size):
                return None
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None
