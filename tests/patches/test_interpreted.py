"""Runs the kernel tests in a process where Triton interprets its kernels on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["test_kernels.py", "test_liger.py"])
def test_kernels_in_the_interpreter(name: str) -> None:
    if name == "test_liger.py" and importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted" / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
