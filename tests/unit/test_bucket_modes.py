"""Batches planned per epoch: each row once, ranks in step, ranks that finish together, resume anywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.buckets import simulate
from tests.unit import real_runs
from tests.unit.data_kit import Streams, open_loader, write_rows
from tests.unit.test_data_loader import E2E, options, steps
from videox_fun.data.batch_plan import split_evenly
from videox_fun.data.geometry import get_closest_ratio
from videox_fun.data.summary import DataSummary, batching

QUIET = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.lists(st.tuples(st.sampled_from([(32, 64), (64, 32), (48, 48)]), st.sampled_from([3, 9, 20])), min_size=1,
                 max_size=14)
MODES = st.sampled_from(["complete", "balanced"])


def rows_file(folder: Path, sizes: list) -> Path:
    return write_rows(folder / "plan.json", [
        {"file_path": f"{n}.mp4", "text": "", "type": "video", "width": w, "height": h, "frames": frames}
        for n, ((h, w), frames) in enumerate(sizes)
    ])


def requests(opts: Any, *, rank: int, world: int, epochs: range, state: dict | None = None) -> list:
    loader, _, _ = open_loader(opts, rank=rank, world=world)
    found = []
    for epoch in epochs:
        loader._epoch = epoch
        loader._enter(state)
        state = None
        found += [(epoch, request) for request in loader._requests()]
    return found


@QUIET
@given(sizes=SIZES, world=st.integers(1, 4), batch=st.integers(1, 3), mode=MODES)
def test_every_row_once_and_equal_steps(tmp_path, sizes, world, batch, mode) -> None:
    opts = options(train_data_meta=str(rows_file(tmp_path, sizes)), train_batch_size=batch, bucket_mode=mode,
                   video_sample_stride=1)
    ranks = [requests(opts, rank=rank, world=world, epochs=range(2)) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    assert len(ranks[0]) == 2 * open_loader(opts, world=world)[0].steps_per_epoch
    for epoch in range(2):
        batches = [request.indices for rank in ranks for number, request in rank if number == epoch]
        seen = Counter(index for indices in batches for index in indices)
        assert set(seen) == set(range(len(sizes)))
        repeated = sum(seen.values()) - len(sizes)
        assert repeated < world and (not repeated or max(map(len, batches)) == 1)
        for indices in batches:
            assert len(indices) <= batch
            shared = {sizes[index] if mode == "balanced" else sizes[index][0] for index in indices}
            assert len({key if mode == "complete" else (key[0], min(key[1], 9)) for key in shared}) == 1


@QUIET
@given(sizes=SIZES, world=st.integers(1, 3), batch=st.integers(1, 3), mode=MODES, data=st.data())
def test_any_position_resumes_to_the_uninterrupted_order(tmp_path, sizes, world, batch, mode, data) -> None:
    opts = options(train_data_meta=str(rows_file(tmp_path, sizes)), train_batch_size=batch, bucket_mode=mode)
    whole = requests(opts, rank=world - 1, world=world, epochs=range(3))
    inside = [place for place in range(len(whole) - 1) if whole[place][0] == whole[place + 1][0]]
    if not inside:
        return
    cut = data.draw(st.sampled_from(inside))
    epoch, request = whole[cut]
    resumed = requests(opts, rank=world - 1, world=world, epochs=range(epoch, 3), state=request.after)
    assert [(e, r.number, r.indices) for e, r in resumed] == [(e, r.number, r.indices) for e, r in whole[cut + 1 :]]


@pytest.mark.parametrize("mode", ["complete", "balanced"])
def test_real_batches_resume_exactly(mode: str) -> None:
    opts = options(train_batch_size=4, train_data_meta=str(E2E / "metadata.json"), bucket_mode=mode)
    loader, _, streams = open_loader(opts)
    whole = list(steps(loader, streams, epochs=2))
    assert any(len(signature[0]) < 4 for _, _, signature in whole)
    for position in range(0, len(whole) - 1, 2):
        state, rng, _ = whole[position]
        other = Streams(999)
        fresh, _, _ = open_loader(opts, streams=other)
        other.restore(rng)
        fresh.load_state_dict(state)
        rest = [signature for _, _, signature in steps(fresh, other, epochs=2, start=state["epoch"])]
        assert rest == [signature for _, _, signature in whole[position + 1 :]], position


def test_balanced_ranks_draw_the_same_sizes() -> None:
    shapes = []
    for rank in range(2):
        opts = options(train_data_meta=str(E2E / "metadata_video.json"), bucket_mode="balanced", video_sample_size=64,
                       image_sample_size=448, token_sample_size=320)
        loader, _, _ = open_loader(opts, rank=rank, world=2)
        shapes.append([batch["pixel_values"].numel() for epoch in range(3) for batch, _ in loader.epoch(epoch)])
    assert shapes[0] == shapes[1] and len(set(shapes[0])) > 1


def test_case_33_a_larger_global_batch_loses_no_clip(tmp_path: Path) -> None:
    """81 clips of 20 aspect ratios, batches of 4 on 2 ranks."""
    sizes = [((int(512 * (0.4 + 0.15 * (n % 20))) // 16 * 16, 512), 9) for n in range(81)]
    meta = {"train_data_meta": str(rows_file(tmp_path, sizes)), "train_batch_size": 4}
    seen = {mode: Counter(index for rank in range(2) for _, request in requests(options(**meta, bucket_mode=mode),
                          rank=rank, world=2, epochs=range(1)) for index in request.indices)
            for mode in ("upstream", "complete")}
    assert seen["complete"] == Counter(range(81)) and len(seen["upstream"]) < 81
    plain = open_loader(options(**meta), world=2)[1]
    assert any("row(s) in" in line and "wait for the next" in line for line in batching(plain, plain_summary(sizes)))


def plain_summary(sizes: list) -> DataSummary:
    """The summary's bucket counts, without files to open."""
    buckets = Counter(f"video {get_closest_ratio(*size)[1]:g}" for size, _ in sizes)
    return DataSummary("rows", len(sizes), {"video": len(sizes)}, buckets=dict(buckets))


def test_halving_takes_the_costliest_batch() -> None:
    batches = split_evenly([[1, 2, 3], [4], [5, 6]], world=5, cost=sum)
    assert batches == [[1, 2], [4], [5], [6], [3]]
    assert split_evenly([[1], [2]], world=5, cost=sum) == [[1], [2], [1], [2], [1]]


def test_a_run_sees_every_row_each_epoch_and_says_so(tmp_path, tmp_path_factory) -> None:
    model = real_runs.checkpoint(tmp_path_factory)
    options_of_run = {"bucket_mode": "complete", "train_batch_size": 4, "num_train_epochs": 2, "max_train_steps": None}
    run = real_runs.train(model, tmp_path / "out", **options_of_run)
    half = len(run.rows) // 2
    assert sorted(sum(run.rows[:half], [])) == sorted(sum(run.rows[half:], [])) == list(range(6))
    assert any("every row once per epoch: 6 rows" in line for line in run.trainer.data.summary().lines())
    plain = open_loader(options(train_batch_size=4))[1].summary()
    assert any("--bucket_mode complete sees every row once" in line for line in plain.lines())


def test_a_mode_that_is_not_upstreams_is_refused_with_upstream_compat() -> None:
    with pytest.raises(ValueError, match="leave out it or --upstream_compat"):
        options(bucket_mode="balanced", upstream_compat=True)
    with pytest.raises(ValueError, match="--bucket_mode must be one of"):
        options(bucket_mode="best")


def test_balanced_ranks_wait_less(tmp_path) -> None:
    idle = simulate(rows=400, ranks=8, batch=2, epochs=1, seed=0, folder=tmp_path)
    assert idle["balanced"] < 0.8 * idle["upstream"] and idle["balanced"] < 0.1
