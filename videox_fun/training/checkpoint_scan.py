"""What lies in an output folder: which entries are checkpoints, which of them can be resumed, which may be pruned.

Only exact names count: ``checkpoint-<integer>`` folders and ``checkpoint-<integer>[-<player>]
[-compatible_with_comfyui].safetensors`` files. A folder of ours is complete when its marker lists files that all have
their recorded sizes; a folder without marker (upstream's) when weights, optimizer and schedule are there and whole.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from videox_fun.training.checkpoint_io import (
    MARKER,
    CheckpointError,
    read_marker,
    remove,
    safetensors_problem,
    torch_file_problem,
)

logger = logging.getLogger(__name__)

LORA_FILE = "lora_diffusion_pytorch_model.safetensors"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.(checkpoint-\d+[A-Za-z0-9_.\-]*)\.(tmp|old|trash)-(\d+)")
_SHARDED_ENTRIES = ("pytorch_model", "pytorch_model_fsdp_0", "optimizer_0")


class Kind(Enum):
    STATE = "state"            # can be resumed
    WEIGHTS = "weights"        # folder with weights only
    LORA_FILE = "LoRA file"    # bare export
    BROKEN = "broken"
    FOREIGN = "not a checkpoint"


@dataclass(frozen=True)
class Entry:
    """One checkpoint-like thing in an output folder."""

    step: int
    path: Path
    kind: Kind
    problem: str = ""
    upstream: bool = False

    def describe(self) -> str:
        suffix = f": {self.problem}" if self.problem else ""
        return f"{self.path.name} ({self.kind.value}{suffix})"


def file_pattern(player_names: Sequence[str]) -> re.Pattern[str]:
    """Names of bare LoRA files; every player but the first has its name in them."""
    infix = "".join(f"|-{re.escape(name)}" for name in player_names[1:])
    return re.compile(rf"checkpoint-(\d+)(?:{infix})(?:-compatible_with_comfyui)?\.safetensors")


def parse_step(name: str) -> int | None:
    """Step in the name of a checkpoint folder or of any bare file that starts like one."""
    match = re.match(r"checkpoint-(\d+)(?:$|[-.])", name)
    return int(match.group(1)) if match else None


def _weights(folder: Path) -> list[Path]:
    found = [folder / LORA_FILE] if (folder / LORA_FILE).is_file() else []
    found += sorted((folder / "transformer").glob("*.safetensors"))
    if (folder / "diffusion_pytorch_model.safetensors").is_file():
        found.append(folder / "diffusion_pytorch_model.safetensors")
    return found


def _inspect_marked(folder: Path, marker: dict) -> str:
    for name, size in marker["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return ""


def inspect_folder(folder: Path, step: int) -> Entry:
    """Judge a folder by its marker or, without one, by its files."""
    try:
        marker = read_marker(folder)
    except CheckpointError as error:
        return Entry(step, folder, Kind.BROKEN, str(error))
    if marker is not None:
        problem = _inspect_marked(folder, marker)
        return Entry(step, folder, Kind.BROKEN if problem else Kind.STATE, problem)
    weights = _weights(folder)
    for path in weights:
        problem = safetensors_problem(path)
        if problem:
            return Entry(step, folder, Kind.BROKEN, problem, upstream=True)
    if any((folder / name).is_dir() for name in _SHARDED_ENTRIES):
        return Entry(step, folder, Kind.STATE, upstream=True)
    if not weights:
        return Entry(step, folder, Kind.FOREIGN, f"holds no weights and no {MARKER}", upstream=True)
    missing = []
    for stem in ("optimizer", "scheduler"):
        path = next((folder / f"{stem}.{end}" for end in ("bin", "pt") if (folder / f"{stem}.{end}").is_file()), None)
        if path is None:
            missing.append(f"{stem}.bin")
        elif problem := torch_file_problem(path):
            return Entry(step, folder, Kind.BROKEN, problem, upstream=True)
    if missing:
        return Entry(step, folder, Kind.WEIGHTS, f"no {' and no '.join(missing)}", upstream=True)
    return Entry(step, folder, Kind.STATE, upstream=True)


def inspect_file(path: Path, step: int) -> Entry:
    problem = safetensors_problem(path)
    return Entry(step, path, Kind.BROKEN if problem else Kind.LORA_FILE, problem or "")


def scan(output_dir: Path, *, player_names: Sequence[str] = ("transformer",)) -> list[Entry]:
    """All checkpoints of a folder, by step. Other names are not ours and are left out."""
    if not output_dir.is_dir():
        return []
    files = file_pattern(player_names)
    entries = []
    for path in output_dir.iterdir():
        if path.is_dir() and (match := _FOLDER.fullmatch(path.name)):
            entries.append(inspect_folder(path, int(match.group(1))))
        elif path.is_file() and (match := files.fullmatch(path.name)):
            entries.append(inspect_file(path, int(match.group(1))))
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


def stray_names(output_dir: Path, entries: Iterable[Entry]) -> list[str]:
    """Names that look like checkpoints but are none (``checkpoint-final``, ``checkpoint-11.tmp``)."""
    known = {entry.path.name for entry in entries}
    if not output_dir.is_dir():
        return []
    return sorted(p.name for p in output_dir.iterdir() if p.name.startswith("checkpoint") and p.name not in known)


def latest_state(entries: Sequence[Entry]) -> Entry | None:
    """The resumable state with the largest step; newer ones that cannot be used are named in the log."""
    for entry in reversed(entries):
        if entry.kind is Kind.STATE:
            return entry
        if entry.kind in (Kind.BROKEN, Kind.FOREIGN):
            logger.warning("%s is not usable (%s); looking for an earlier checkpoint.", entry.path.name, entry.problem)
    return None


def to_prune(entries: Sequence[Entry], *, limit: int, keep_step: int) -> list[Path]:
    """What to delete so that at most ``limit`` saved steps remain.

    The step just saved always stays, and so does the newest resumable state when the new save is a bare file. Broken
    entries go first and do not count against whole ones; the other steps go from the oldest. Files of one step (LoRA,
    its ComfyUI form, a second player's) count once and go together. Folders without weights are not ours to delete.
    """
    steps: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry.kind is not Kind.FOREIGN:
            steps.setdefault(entry.step, []).append(entry)
    whole = {step for step, rows in steps.items() if any(row.kind is not Kind.BROKEN for row in rows)}
    states = [step for step, rows in steps.items() if any(row.kind is Kind.STATE for row in rows)]
    kept = {keep_step} if keep_step in states else {keep_step, *sorted(states)[-1:]}
    others = sorted((step for step in steps if step not in kept), key=lambda step: (step in whole, step))
    excess = max(len(steps) - max(limit, 1), 0)
    return [entry.path for step in others[:excess] for entry in steps[step]]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def recover(output_dir: Path) -> None:
    """Finish or clear what a killed process left under hidden names.

    A hidden ``tmp`` (or replaced ``old``) folder whose marker is valid is a complete checkpoint; it gets its name when
    nothing usable has it. Everything else of dead processes is deleted. Call on one process only.
    """
    if not output_dir.is_dir():
        return
    found = [(p, m) for p in output_dir.iterdir() if (m := _HIDDEN.fullmatch(p.name))]
    for path, match in sorted(found, key=lambda item: item[1].group(2) != "tmp"):
        pid = int(match.group(3))
        if pid != os.getpid() and _alive(pid):
            continue
        final = output_dir / match.group(1)
        step = parse_step(match.group(1))
        complete = (
            match.group(2) != "trash" and step is not None and path.is_dir() and (path / MARKER).is_file()
            and inspect_folder(path, step).kind is Kind.STATE
        )
        if complete and step is not None:
            if final.is_dir() and inspect_folder(final, step).kind is Kind.BROKEN:
                remove(final)
            if not final.exists():
                os.rename(path, final)
                logger.warning("Recovered %s, whose saving was interrupted just before it got its name.", final.name)
                continue
        remove(path)
