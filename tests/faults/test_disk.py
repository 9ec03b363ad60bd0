"""A full disk leaves the old state and a clear sentence."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from tests.faults.kit import Run, make_args
from videox_fun.training.checkpoint import CheckpointError
from videox_fun.training.checkpoint_scan import Kind, scan


@pytest.fixture
def tiny_disk(tmp_path):
    """A 256 KiB file system, where mounting is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True,
                              check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def file_limit():
    """Files may not grow beyond a few KiB (a quota, in miniature)."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def fill(folder: Path, *, leave: int) -> None:
    free = os.statvfs(folder)
    (folder / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_frsize - leave))


def check_old_state_survives(folder: Path, run: Run, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        run.manager.save(4)
    assert "checkpoint-2 is untouched" in str(caught.value)
    assert [entry.path.name for entry in scan(folder) if entry.kind is Kind.STATE] == ["checkpoint-2"]
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("leave", [0, 4096, 8192, 20480])
def test_full_disk(tiny_disk, leave):
    """Whichever file is the one that no longer fits; limit 1 must not have removed the old state before."""
    run = Run(make_args(tiny_disk, checkpoints_total_limit=1), kind="lora")
    run.manager.save(2)
    fill(tiny_disk, leave=leave)
    check_old_state_survives(tiny_disk, run, "No space left on device")
    (tiny_disk / "ballast").unlink()
    run.manager.save(6)
    assert [entry.path.name for entry in scan(tiny_disk)] == ["checkpoint-6"]


@pytest.mark.parametrize("size", [100, 600, 2000])
def test_quota(tmp_path, file_limit, size):
    run = Run(make_args(tmp_path, checkpoints_total_limit=1), kind="lora")
    run.manager.save(2)
    file_limit(size)
    check_old_state_survives(tmp_path, run, "File too large|PytorchStreamWriter")


def test_quota_on_a_bare_file(tmp_path, file_limit):
    run = Run(make_args(tmp_path, checkpoints_total_limit=1, save_state=False), kind="peft")
    run.manager.save(2)
    file_limit(50)
    with pytest.raises(CheckpointError, match="checkpoint-2[^ ]* is untouched"):
        run.manager.save(4)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-2.safetensors",
                                                    "checkpoint-2-compatible_with_comfyui.safetensors"}
