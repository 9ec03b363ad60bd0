"""GPUs: what a name like ``A100 80GB`` says, and what this machine has.

The static audit often runs on another machine than the training, so the card is usually given (``--gpu``). Without
that, ``nvidia-smi`` is asked when it exists; nothing depends on it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from dataclasses import dataclass

# name pattern, compute capability, memory in GB when the name gives none; the first match wins
_CARDS: tuple[tuple[str, tuple[int, int], int], ...] = (
    (r"RTX\s*PRO\s*6000", (12, 0), 96),
    (r"RTX\s*5090|\b5090\b", (12, 0), 32),
    (r"RTX\s*50[5678]0|\b50[678]0\b", (12, 0), 16),
    (r"G?B300", (10, 3), 288),
    (r"G?B200", (10, 0), 192),
    (r"GH200|H200", (9, 0), 141),
    (r"H100|H800", (9, 0), 80),
    (r"\bH20\b", (9, 0), 96),
    (r"RTX\s*6000\s*ADA|L40S?\b", (8, 9), 48),
    (r"\bL4\b", (8, 9), 24),
    (r"4090", (8, 9), 24),
    (r"RTX\s*40[5678]0|\b40[678]0\b", (8, 9), 16),
    (r"A100|A800", (8, 0), 80),
    (r"\bA30\b", (8, 0), 24),
    (r"A6000|\bA40\b", (8, 6), 48),
    (r"\bA10G?\b|3090|A5000", (8, 6), 24),
    (r"RTX\s*30[5678]0|\b30[678]0\b", (8, 6), 12),
    (r"V100", (7, 0), 32),
    (r"\bT4\b", (7, 5), 16),
    (r"RTX\s*20\d0|2080|TITAN\s*RTX|QUADRO\s*RTX", (7, 5), 11),
    (r"P100", (6, 0), 16),
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A card: its name, memory in GB, compute capability (None when unknown)."""

    name: str
    memory: float | None = None
    capability: tuple[int, int] | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name == "CPU"


CPU = Gpu("CPU")


def parse_gpu(text: str) -> Gpu:
    """A card from text: ``A100 80GB``, ``RTX 4090``, ``cpu``, ``Foo 48GB``."""
    words = text.strip()
    if words.lower() in ("cpu", "none"):
        return CPU
    memory = re.search(r"(\d+(?:\.\d+)?)\s*(GB|GiB|G)\b", words, re.IGNORECASE)
    gigabytes = float(memory.group(1)) if memory else None
    for pattern, capability, usual in _CARDS:
        if re.search(pattern, words, re.IGNORECASE):
            return Gpu(words, gigabytes or float(usual), capability)
    return Gpu(words, gigabytes, None)


def gpu_argument(text: str) -> str:
    """``type`` of a ``--gpu`` flag: a card whose memory is known or given."""
    card = parse_gpu(text)
    if not card.is_cpu and card.memory is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a known card; give its memory with it: '{text} 24GB'")
    return text


def detect_gpus(*, timeout: float = 5.0) -> list[Gpu]:
    """The cards of this machine as ``nvidia-smi`` reports them; an empty list when there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_smi(answer.stdout) if answer.returncode == 0 else []


def parse_smi(text: str) -> list[Gpu]:
    """Cards from the csv lines of ``nvidia-smi --query-gpu=name,memory.total,compute_cap``."""
    cards = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            continue
        try:
            major, _, minor = fields[2].partition(".")
            cards.append(Gpu(fields[0], float(round(float(fields[1]) / 1024)), (int(major), int(minor or 0))))
        except ValueError:
            known = parse_gpu(fields[0])
            cards.append(known)
    return cards
