"""Settings of the patch tests: one compile thread, one inductor cache for the session, interpreter tests apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

#: Triton decides at import whether it interprets, so these tests run in a process of their own (test_interpreted.py).
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled code of one session is shared between its tests."""
    folder = tmp_path_factory.mktemp("inductor")
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    yield folder
    if before is None:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
