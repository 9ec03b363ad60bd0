"""A cache of encodings on a bad day: cut files, a full or read-only disk, a killed writer, several writers, odd clocks.

The control model in miniature of ``test_cache_parts`` trains through it; its losses must be those of live encoding.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.faults.test_disk import fill, tiny_disk  # noqa: F401 (a fixture)
from tests.unit.data_kit import open_loader
from tests.unit.test_cache_parts import ToyRecipe, control_options, control_set, losses, make_cache
from videox_fun.data import cache_cli, cache_sources, cache_store
from videox_fun.data.cache import LATENTS
from videox_fun.training.precompute import Filled, _fill_clips


@pytest.fixture
def clips(tmp_path: Path) -> Any:
    """Options of a small control set, and its losses without a cache."""
    folder = tmp_path / "clips"
    folder.mkdir()
    control_set(folder)
    options = control_options(folder)
    return SimpleNamespace(options=options, live=losses(options, None)[0], cache=tmp_path / "cache")


def precompute(options: Any, root: Path, *, slow: float = 0.0) -> tuple[Filled, ToyRecipe]:
    cache = make_cache(root)
    _, module, _ = open_loader(options)
    cache.skip_decoding = True
    cache_sources.attach(cache, module)
    recipe, filled = ToyRecipe(cache), Filled()
    fast = recipe._encode
    recipe._encode = lambda pixels: (time.sleep(slow), fast(pixels))[1]  # type: ignore[method-assign]
    _fill_clips(SimpleNamespace(cache=cache, rank=0, world=1, device=torch.device("cpu")), recipe, None, module, filled)
    return filled, recipe


def entries(root: Path) -> list[Path]:
    return sorted((root / LATENTS).rglob("*.safetensors"))


def same(found: list[float], live: list[float]) -> None:
    np.testing.assert_allclose(found, live, rtol=0, atol=1e-6)


def test_cut_and_emptied_entries_are_encoded_again(clips: Any, caplog: pytest.LogCaptureFixture) -> None:
    precompute(clips.options, clips.cache)
    for number, path in enumerate(entries(clips.cache)[::3]):
        size = path.stat().st_size
        os.truncate(path, (0, size // 2, size - 1)[number % 3])
        if number % 3 == 0:
            os.truncate(path, size)  # the name is there, its blocks were never written
    found, _, recipe = losses(clips.options, make_cache(clips.cache))
    same(found, clips.live)
    assert recipe.encoded > 0 and "damaged or cut off" in caplog.text
    precompute(clips.options, clips.cache)
    assert all(cache_cli.problem_of(path) is None for path in entries(clips.cache))


@pytest.mark.parametrize("how", ["real", "simulated"])
def test_a_full_disk_costs_one_warning_and_no_half_entry(
    clips: Any, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    root = clips.cache
    if how == "real":
        root = request.getfixturevalue("tiny_disk") / "cache"
        root.mkdir()
        fill(root.parent, leave=60_000)
    else:
        monkeypatch.setattr(os, "fsync", _full_after(20))
    found, _, _ = losses(clips.options, make_cache(root))
    same(found, clips.live)
    assert caplog.text.count("an entry cannot be written") == 1 and "No space left" in caplog.text
    held = entries(root)
    assert held and all(cache_cli.problem_of(path) is None for path in held) and not list(root.rglob("*.tmp"))


def _full_after(count: int) -> Any:
    calls = iter(range(10**6))

    def fsync(_: int) -> None:
        if next(calls) >= count:
            raise OSError(errno.ENOSPC, "No space left on device")

    return fsync


@pytest.mark.parametrize(("how", "complete"), [("real", True), ("real", False), ("simulated", False)])
def test_a_read_only_cache_is_read(
    clips: Any, how: str, complete: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    precompute(clips.options, clips.cache)
    if not complete:
        for path in entries(clips.cache)[::2]:
            path.unlink()
    if how == "real":
        for command in (["mount", "--bind"], ["mount", "-o", "remount,ro,bind"]):
            if subprocess.run([*command, clips.cache, clips.cache], capture_output=True, check=False).returncode:
                pytest.skip("mounting a file system is not allowed here")
    else:
        monkeypatch.setattr(cache_store, "replace_file", _read_only)
    try:
        before = {path: path.stat().st_mtime_ns for path in entries(clips.cache)}
        found, _, recipe = losses(clips.options, make_cache(clips.cache))
    finally:
        if how == "real":
            subprocess.run(["umount", "--lazy", str(clips.cache)], check=True)  # entries are still mapped
    same(found, clips.live)
    assert {path: path.stat().st_mtime_ns for path in entries(clips.cache)} == before
    assert (recipe.encoded == 0) is complete and caplog.text.count("an entry cannot be written") == (not complete)


def _read_only(path: Path, *_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system", str(path))


def test_a_killed_precompute_goes_on_where_it_was(clips: Any) -> None:
    context = multiprocessing.get_context("fork")
    child = context.Process(target=precompute, args=(clips.options, clips.cache), kwargs={"slow": 0.05})
    child.start()
    while len(entries(clips.cache)) < 8 and child.is_alive():
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    done = {path: path.stat().st_mtime_ns for path in entries(clips.cache)}
    _, recipe = precompute(clips.options, clips.cache)
    total = entries(clips.cache)
    assert {path: path.stat().st_mtime_ns for path in done} == done  # nothing that was stored is made again
    assert recipe.encoded == len(total) - len(done) > 0
    same(losses(clips.options, make_cache(clips.cache))[0], clips.live)


def test_two_precomputes_and_a_training_run_share_a_folder(clips: Any) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=precompute, args=(clips.options, clips.cache)) for _ in range(2)]
    for writer in writers:
        writer.start()
    same(losses(clips.options, make_cache(clips.cache))[0], clips.live)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert all(cache_cli.problem_of(path) is None for path in entries(clips.cache))
    assert precompute(clips.options, clips.cache)[1].encoded == 0


def test_a_clock_that_goes_back_changes_nothing(clips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    precompute(clips.options, clips.cache)
    now, shift = time.time(), 10 * 365 * 86400
    for path in [*clips.cache.rglob("*"), *Path(clips.options.train_data_dir).iterdir()]:
        os.utime(path, (now + shift, now + shift))
    monkeypatch.setattr(time, "time", lambda: now - shift)
    cache = make_cache(clips.cache)
    found, keys, recipe = losses(clips.options, cache)
    same(found, clips.live)
    assert recipe.encoded == 0 and all("pixel_values" not in own for own in keys)
    assert not list(cache_cli.removable(clips.cache))
