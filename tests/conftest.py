"""Shared fixtures.

Thread counts and offline switches are set here, before anything imports torch or transformers, so that every test
runs the same way alone and in the whole suite. Fixtures that need the recorded reference numbers look for them in
``$VIDEOX_GOLDENS``, then in ``shared/goldens`` beside the repository or inside it; without them those tests skip.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
for _name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).resolve().parent / "data"


def _goldens_path() -> Path | None:
    candidates = [ROOT.parent / "shared" / "goldens", ROOT / "shared" / "goldens"]
    if os.environ.get("VIDEOX_GOLDENS"):
        candidates.insert(0, Path(os.environ["VIDEOX_GOLDENS"]))
    return next((path for path in candidates if (path / "REPORT.md").is_file()), None)


def _load_module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where CUDA is absent; torch is imported only when such tests were collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Small files kept with the tests."""
    return DATA


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Folder of recorded reference numbers, or skip."""
    path = _goldens_path()
    if path is None:
        pytest.skip("recorded reference numbers (shared/goldens) are not beside this checkout")
    return path


@pytest.fixture(scope="session")
def golden_utils(goldens: Path) -> ModuleType:
    """The goldens' own helper module."""
    return _load_module(goldens / "golden_utils.py", "golden_utils")


@pytest.fixture(scope="session")
def golden_checkpoints(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root folder of the tiny checkpoints that the recorded end-to-end runs used; rebuilt once per session."""
    out = tmp_path_factory.mktemp("golden_checkpoints")
    _load_module(goldens / "e2e" / "make_ckpts.py", "golden_make_ckpts").build(str(out))
    return out


@pytest.fixture(scope="session")
def golden_data(goldens: Path) -> Path:
    """The small data set of the recorded end-to-end runs (``metadata*.json`` and ``train/``)."""
    return goldens / "e2e" / "data"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory: ``tiny_checkpoint("wan2.1_fun_inp", dim=48)`` builds (once per argument set) and returns the folder.

    The folder is for ``--pretrained_model_name_or_path``; ``wan.yaml`` in it is the file for ``--config_path``.
    """
    built: dict[tuple[Any, ...], Path] = {}

    def factory(family: str, **sizes: Any) -> Path:
        key = (family, *sorted((name, repr(value)) for name, value in sizes.items()))
        if key not in built:
            from videox_fun.utils.tiny import make_tiny_checkpoint

            out = tmp_path_factory.mktemp("tiny_" + "".join(c if c.isalnum() else "_" for c in family))
            make_tiny_checkpoint(out, family=family, **sizes)
            built[key] = out
        return built[key]

    return factory


@pytest.fixture
def seeded() -> Iterator[None]:
    """Seed python, numpy and torch with 0 for the test and put the previous states back afterwards."""
    import numpy
    import torch

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
