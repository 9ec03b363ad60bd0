"""Files that carry code are refused, and nothing in them is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.faults.kit import Run, make_args
from videox_fun.training import checkpoint_io as io
from videox_fun.training.checkpoint import CheckpointError


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def foreign_state(folder: Path) -> Path:
    run = Run(make_args(folder))
    run.train(2, save_at=(2,))
    state = folder / "checkpoint-2"
    for name in ("videox_state.json", "videox_rank_0.json"):
        (state / name).unlink()
    return state


def test_the_bomb_works_where_it_is_not_refused(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "executed")))
    assert (tmp_path / "executed").is_dir()


@pytest.mark.parametrize("name", ["sampler_pos_start.pkl", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_hostile_file_is_refused(tmp_path, name, form):
    state = foreign_state(tmp_path)
    target = tmp_path / "executed"
    if form == "pickle":
        (state / name).write_bytes(pickle.dumps([Bomb(target), 1]))
    else:
        torch.save({"state": Bomb(target)}, state / name)
    run = Run(make_args(tmp_path))
    with pytest.raises((CheckpointError, ValueError)) as caught:
        run.resume("checkpoint-2")
    assert name in str(caught.value) and not target.exists()


@pytest.mark.parametrize("content", [
    pickle.dumps([1, 2, 3]), pickle.dumps([1, "2"]), pickle.dumps([True, 1]), pickle.dumps(7), b"", b"\x80\x04",
    pickle.dumps([np.int64(1), 2]), b"x" * 70000,
])
def test_only_two_integers_are_a_sampler_position(tmp_path, content):
    path = tmp_path / "sampler_pos_start.pkl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="sampler_pos_start.pkl"):
        io.read_sampler_position(path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_upstreams_sampler_positions_are_read(tmp_path, protocol):
    path = tmp_path / "sampler_pos_start.pkl"
    path.write_bytes(pickle.dumps([12345678901, 3], protocol=protocol))
    assert io.read_sampler_position(path) == (12345678901, 3)


def test_random_states_of_older_numpy_are_read(tmp_path):
    """numpy 1 pickles arrays under ``numpy.core``; the file must not need that module."""
    state = np.random.get_state()
    path = tmp_path / "random_states_0.pkl"
    torch.save({"numpy_random_seed": state}, path)
    old, new = b"numpy.core.multiarray", b"numpy._core.multiarray"
    import zipfile

    other = tmp_path / "other.pkl"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for item in source.namelist():
            content = source.read(item)
            target.writestr(item, content.replace(new, old) if item.endswith("data.pkl") else content)
    for file in (path, other):
        loaded = io.read_torch(file)["numpy_random_seed"]
        assert loaded[0] == state[0] and np.array_equal(loaded[1], state[1]) and loaded[2:] == state[2:]
