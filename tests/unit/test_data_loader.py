"""The training loader: dealing to ranks, one batch ahead, resume at any position, workers."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data_kit import Streams, make_clip, open_loader, write_rows
from videox_fun.data.bucket_sampler import AspectRatioBatchImageVideoSampler, RandomSampler
from videox_fun.data.loader import TrainLoader
from videox_fun.data.module import DataOptions, build_data

E2E = Path(__file__).resolve().parents[1] / "data" / "e2e_data"


def options(**over: Any) -> DataOptions:
    base = {
        "train_data_meta": str(E2E / "metadata_video.json"),
        "train_data_dir": str(E2E),
        "video_sample_size": 64,
        "image_sample_size": 64,
        "token_sample_size": 64,
        "video_sample_stride": 2,
        "video_sample_n_frames": 9,
        "enable_bucket": True,
        "random_hw_adapt": True,
        "training_with_video_token_length": True,
        "inpaint": True,
        "seed": 42,
    }
    return DataOptions(**{**base, **over})


def steps(loader: TrainLoader, streams: Streams, *, start: int = 0, epochs: int = 3):
    """``(state, batch signature)`` after each step; a step draws from every stream, as training does."""
    for epoch in range(start, epochs):
        for batch, is_last in loader.epoch(epoch):
            draws = (np.random.rand(), torch.rand(1).item(), streams.numpy.random())
            signature = (
                tuple(batch["idx"]),
                tuple(batch["text"]),
                batch["pixel_values"].double().sum().item(),
                batch["mask"].sum().item(),
                is_last,
                draws,
            )
            yield loader.state_dict(), streams.snapshot(), signature


def _resume(opts: DataOptions, state: dict, rng: Any, *, epochs: int, **place: int) -> list:
    streams = Streams(999)
    loader, _, _ = open_loader(opts, streams=streams, **place)
    streams.restore(rng)
    loader.load_state_dict(state)
    found = [signature for _, _, signature in steps(loader, streams, epochs=epochs, start=max(state["epoch"] - 1, 0))]
    loader.close()
    return found


@pytest.mark.parametrize(("batch_size", "epochs"), [(1, 2), (2, 3)])
def test_resume_is_exact_at_every_position(batch_size, epochs) -> None:
    opts = options(train_batch_size=batch_size, train_data_meta=str(E2E / "metadata.json"))
    loader, _, streams = open_loader(opts)
    whole = list(steps(loader, streams, epochs=epochs))
    assert len(whole) > 8
    for position, (state, rng, _) in enumerate(whole[:-1]):
        if state["epoch"] and state["number"] == 0:
            assert whole[position][2][4]  # the last batch of an epoch
        resumed = _resume(opts, state, rng, epochs=epochs)
        assert resumed == [signature for _, _, signature in whole[position + 1 :]], position


def test_resume_is_exact_with_workers() -> None:
    opts = options(dataloader_num_workers=2)
    loader, _, streams = open_loader(opts)
    whole = list(steps(loader, streams, epochs=2))
    loader.close()
    assert len(whole) == 12
    for position in (0, 4, 5, 8):
        state, rng, _ = whole[position]
        json.dumps(state)
        resumed = _resume(opts, state, rng, epochs=2)
        assert resumed == [signature for _, _, signature in whole[position + 1 :]], position


def test_state_is_plain_except_for_the_streams() -> None:
    loader, _, streams = open_loader(options(train_batch_size=2))
    for state, _, _ in steps(loader, streams, epochs=1):
        json.dumps({key: value for key, value in state.items() if key != "pending_rng"})
        assert set(state) == {"epoch", "number", "head", "sampler", "pending_rng"}


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    found = []
    for workers in (1, 2):
        loader, _, streams = open_loader(options(dataloader_num_workers=workers, random_ratio_crop=True))
        found.append([signature for _, _, signature in steps(loader, streams, epochs=1)])
        loader.close()
    assert found[0] == found[1]


def test_epochs_and_ranks_draw_differently_with_workers() -> None:
    seen = []
    for rank in (0, 1):
        loader, _, streams = open_loader(options(dataloader_num_workers=1), rank=rank, world=2)
        seen += [signature[:4] for _, _, signature in steps(loader, streams, epochs=2)]
        loader.close()
    assert len(set(seen)) == len(seen) == 12


def test_workers_leave_the_streams_of_the_step_alone() -> None:
    loader, _, streams = open_loader(options(dataloader_num_workers=1))
    before = torch.get_rng_state()
    next(iter(loader.epoch(0)))
    assert torch.equal(torch.get_rng_state(), before)
    loader.close()


def test_one_batch_is_fetched_ahead(monkeypatch) -> None:
    loader, module, _ = open_loader(options())
    reads: list[int] = []
    read = module.dataset.read_item
    monkeypatch.setattr(module.dataset, "read_item", lambda row, idx: (reads.append(idx), read(row, idx))[1])
    counts = [(len(reads), is_last) for _, is_last in loader.epoch(0)]
    assert counts == [(2, False), (3, False), (4, False), (5, False), (6, False), (6, True)]


def test_order_follows_seed_plus_epoch() -> None:
    loader, _, streams = open_loader(options())
    rows = [signature[0][0] for _, _, signature in steps(loader, streams, epochs=2)]
    assert rows == [0, 3, 2, 4, 1, 5, 4, 0, 5, 1, 2, 3]


def test_wait_time_and_device() -> None:
    loader, _, _ = open_loader(options())
    batch, _ = next(loader.epoch(0))
    assert loader.wait_s > 0
    assert batch["pixel_values"].device.type == "cpu" and isinstance(batch["text"], list)


def test_a_state_of_another_epoch_is_refused_or_skipped() -> None:
    loader, _, streams = open_loader(options())
    state, rng, _ = list(steps(loader, streams, epochs=2))[7]
    assert state["epoch"] == 1
    fresh, _, other = open_loader(options())
    other.restore(rng)
    fresh.load_state_dict(state)
    assert list(fresh.epoch(0)) == []  # finished in the state
    with pytest.raises(ValueError, match="in epoch 1, but epoch 2"):
        list(fresh.epoch(2))
    assert len(list(fresh.epoch(1))) == 4


def test_positions_that_upstream_saved() -> None:
    loader, _, streams = open_loader(options())
    positions = []
    for _ in steps(loader, streams, epochs=1):
        positions.append(loader.sampler_position)
    assert positions == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (0, 1)]
    fresh, _, streams = open_loader(options())
    fresh.start_at(0, 2)
    assert [signature[0][0] for _, _, signature in steps(fresh, streams, epochs=1)] == [2, 4, 1, 5]


def test_a_dead_worker_is_explained(monkeypatch) -> None:
    loader, module, _ = open_loader(options(dataloader_num_workers=1))
    monkeypatch.setattr(module.dataset, "read_item", lambda row, idx: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"worker died while the batch with \['train/00000001\.mp4'\] was due"):
        list(loader.epoch(0))
    loader.close()


def test_options_from_flags() -> None:
    from argparse import Namespace

    args = Namespace(train_data_meta="m.json", train_batch_size=3, fix_sample_size=["96", "160"], enable_bucket=True,
                     video_sample_size=64, image_sample_size=64, random_hw_adapt=True, seed=7, unrelated=1,
                     training_with_video_token_length=True, text_drop_ratio=None)  # fmt: skip
    opts = DataOptions.from_args(args, inpaint=True, temporal_ratio=8)
    assert (opts.train_batch_size, opts.seed, opts.inpaint, opts.temporal_ratio) == (3, 7, True, 8)
    assert (opts.fix_sample_size, opts.text_drop_ratio) == ((96, 160), 0.1)
    fixed = opts.effective()
    assert (fixed.video_sample_size, fixed.image_sample_size) == (160, 160)
    assert not fixed.random_hw_adapt and not fixed.training_with_video_token_length
    with pytest.raises(ValueError, match="--train_batch_size must be at least 1"):
        DataOptions(train_batch_size=0)
    with pytest.raises(ValueError, match="kind must be one of"):
        DataOptions(kind="images")


def test_sizes_and_repeats(tmp_path) -> None:
    make_clip(tmp_path / "a.mp4", 9)
    rows = [{"file_path": "a.mp4", "text": "x", "type": "video"}] * 2
    meta = write_rows(tmp_path / "m.json", rows)
    base = {"train_data_meta": str(meta), "train_data_dir": str(tmp_path), "video_sample_stride": 1,
            "video_sample_n_frames": 9, "enable_bucket": True, "random_hw_adapt": False}  # fmt: skip
    fixed = options(**base, fix_sample_size=(48, 80), inpaint=False)
    batch, _ = next(open_loader(fixed)[0].epoch(0))
    assert batch["pixel_values"].shape == (1, 9, 3, 48, 80)
    loader, module, _ = open_loader(options(**base, video_repeat=3))
    assert (len(module.dataset), loader.steps_per_epoch, module.summary().rows) == (6, 6, 2)
    plain = options(**{**base, "enable_bucket": False}, train_batch_size=2)
    batch, _ = next(open_loader(plain)[0].epoch(0))
    assert batch["pixel_values"].shape == (2, 9, 3, 64, 64) and batch["mask"].shape == (2, 9, 1, 64, 64)


# ---- dealing, without decoding ---------------------------------------------------------------------------------------
def _plan(sizes: list[tuple[int, int]], *, world: int, batch: int, epochs: int, compat: bool, tmp: Path) -> list[list]:
    """Per rank, the batches of each epoch."""
    rows = [{"file_path": f"{n}.mp4", "text": "", "type": "video", "width": w, "height": h}
            for n, (h, w) in enumerate(sizes)]  # fmt: skip
    meta = write_rows(tmp / "plan.json", rows)
    opts = options(train_data_meta=str(meta), train_batch_size=batch, upstream_compat=compat, inpaint=False)
    ranks = []
    for rank in range(world):
        loader, module, _ = open_loader(opts, rank=rank, world=world)
        per_epoch = []
        for epoch in range(epochs):
            loader._epoch = epoch
            loader._enter(None)
            per_epoch.append([request.indices for request in loader._requests()])
        ranks.append(per_epoch)
    return ranks


def test_case_38_all_ranks_take_the_same_number_of_steps(tmp_path) -> None:
    sizes = [(32, 64)] * 3 + [(64, 32)] * 2 + [(48, 48)] * 2
    ranks = _plan(sizes, world=2, batch=2, epochs=6, compat=False, tmp=tmp_path)
    for epoch in range(6):
        assert len(ranks[0][epoch]) == len(ranks[1][epoch])
    upstream = _plan(sizes, world=2, batch=2, epochs=6, compat=True, tmp=tmp_path)
    assert all(len(upstream[0][epoch]) == len(upstream[1][epoch]) for epoch in range(6))
    assert sum(map(len, upstream[0])) <= sum(map(len, ranks[0]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([(32, 64), (64, 32), (48, 48), (30, 100)]), min_size=1, max_size=14),
    world=st.integers(1, 3),
    batch=st.integers(1, 3),
)
def test_dealing_invariants(tmp_path, sizes, world, batch) -> None:
    epochs = 4
    ranks = _plan(sizes, world=world, batch=batch, epochs=epochs, compat=False, tmp=tmp_path)
    assert len({tuple(len(epoch) for epoch in rank) for rank in ranks}) == 1  # equal steps
    single = _plan(sizes, world=1, batch=batch, epochs=epochs, compat=False, tmp=tmp_path)[0]
    for epoch in range(epochs):
        dealt = [ranks[rank][epoch][step] for step in range(len(ranks[0][epoch])) for rank in range(world)]
        expected = single[epoch]
        assert dealt[: len(expected)] == expected  # round robin over the order of one process
        extra = dealt[len(expected) :]
        assert extra == [expected[index % len(expected)] for index in range(len(extra))]
        for indices in dealt:
            assert len(indices) == batch and len({sizes[index] for index in indices}) == 1
    served = Counter(index for epoch in single for indices in epoch for index in indices)
    waiting = batch - 1
    assert all(served[index] >= epochs - waiting for index in range(len(sizes)))  # nobody is starved
    assert max(served.values(), default=0) <= epochs


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([(32, 64), (64, 32), (48, 48)]), min_size=2, max_size=12),
    world=st.integers(1, 2),
    batch=st.integers(1, 2),
    data=st.data(),
)
def test_plan_resumes_at_any_position(tmp_path, sizes, world, batch, data) -> None:
    rows = [{"file_path": f"{n}.mp4", "text": "", "type": "video", "width": w, "height": h}
            for n, (h, w) in enumerate(sizes)]  # fmt: skip
    meta = write_rows(tmp_path / "plan.json", rows)
    opts = options(train_data_meta=str(meta), train_batch_size=batch, inpaint=False)

    def requests(state: dict | None, epochs: range) -> list:
        loader, _, _ = open_loader(opts, rank=world - 1, world=world)
        found = []
        for epoch in epochs:
            loader._epoch = epoch
            loader._enter(state)
            state = None
            found += [(epoch, request) for request in loader._requests()]
        return found

    whole = requests(None, range(3))
    inside = [place for place in range(len(whole) - 1) if whole[place][0] == whole[place + 1][0]]
    if not inside:
        return
    cut = data.draw(st.sampled_from(inside))  # after the last batch of an epoch the loader's state is the next epoch
    epoch, request = whole[cut]
    resumed = requests(request.after, range(epoch, 3))
    assert [(e, r.number, r.indices) for e, r in resumed] == [(e, r.number, r.indices) for e, r in whole[cut + 1 :]]


def test_rows_without_readable_size_are_left_out(tmp_path, caplog) -> None:
    make_clip(tmp_path / "a.mp4", 9)
    (tmp_path / "b.mp4").write_text("broken")
    rows = [{"file_path": name, "type": "video"} for name in ("a.mp4", "b.mp4")]
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(0))
    batches = AspectRatioBatchImageVideoSampler(sampler, rows, 1, train_folder=str(tmp_path))
    assert list(batches) == [[0]] and list(batches) == [[0]]
    assert sum("row 2 is left out" in record.getMessage() for record in caplog.records) == 1


def test_module_needs_an_annotation() -> None:
    with pytest.raises(ValueError, match="--train_data_meta is not given"):
        build_data(DataOptions())


@pytest.mark.parametrize(("device", "pinned"), [("cuda", True), ("cpu", False)])
def test_batches_for_a_gpu_are_pinned_and_do_not_block(monkeypatch, device: str, pinned: bool) -> None:
    """``pin_memory`` is asked for in both cases; on a CPU it would only copy once more."""
    seen: dict[str, Any] = {}

    def remember(*args: Any, **kwargs: Any) -> None:
        seen.update(kwargs)

    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moves.append((args, kwargs))
        return tensor

    streams, moves = Streams(1), []
    loader = TrainLoader(
        build_data(options(dataloader_num_workers=1), rng=streams.numpy), rank=0, world=1, device=device, seed=1,
        snapshot_rng=streams.snapshot, restore_rng=streams.restore, prefetch_factor=3, pin_memory=True,
    )  # fmt: skip
    monkeypatch.setattr("videox_fun.data.loader.DataLoader", remember)
    loader._make_torch_loader()
    assert seen["pin_memory"] is pinned and seen["prefetch_factor"] == 3 and seen["num_workers"] == 1
    batch = {"pixel_values": torch.zeros(1), "mask": torch.zeros(1), "text": ["a dog"], "clips": [torch.zeros(1)]}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", move)
        assert loader._to_device(batch) == batch
    assert moves == [((torch.device(device),), {"non_blocking": pinned})] * 2  # masks are worked on where they are
