"""``--sequence_parallel_size``: loss and every gradient equal those of one process, on gloo processes."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from optim_patches import ulysses
from optim_patches.base import Target
from optim_patches.registry import PatchManager, PatchRefused
from tests.patches import sequence_ranks
from tests.patches.wan import make_args, make_inputs, make_model, manage
from tests.unit.real_runs import checkpoint, train
from videox_fun.dist.mesh import Layout, legal_sizes
from videox_fun.utils.discrete_sampler import DiscreteSampling

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")

#: float32 rounding (6e-8) over sums of a few hundred terms; a forgotten or doubled reduction is off by a factor of two.
GRADIENT_TOLERANCE = 1e-5
CASES = ("lora, checkpointing, accumulation", "full", "peft", "every input")
FLAGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_train_steps": 2, "learning_rate": 1e-4,
}  # fmt: skip


def launch(function: Callable[..., dict], *arguments: Any, world: int) -> list[dict]:
    """``function(rank, world, *arguments)`` in ``world`` processes that were forked from one with the imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([sequence_ranks.__name__])
    with ProcessPoolExecutor(world, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = [pool.submit(function, rank, world, *arguments) for rank in range(world)]
        return [future.result(timeout=240) for future in running]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, Any]:
    return launch(sequence_ranks.compare, str(tmp_path_factory.mktemp("two")), world=2)[0]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(two, case):
    found = two[case]
    assert found["tensors"][0] == found["tensors"][1] > 20
    assert found["gradient"] <= GRADIENT_TOLERANCE, found["name"]
    assert found["loss"] <= 1e-6
    assert found["undone"]


def test_evidence_counts_what_ran(two):
    facts = two["lora, checkpointing, accumulation"]["facts"]
    assert two["full"]["state"] == "exercised"
    assert facts["mesh"] == {"data": 1, "sequence": 2}
    assert facts["tokens_per_rank"] == {27: 14}
    # two blocks, before and behind attention, two micro-steps, and all of it again in the backward
    assert facts["all_to_all"] == 2 * 2 * 2 * 2 and two["full"]["facts"]["all_to_all"] == 2 * 2 * 2
    assert "27 tokens, 14 per rank" in two["lora, checkpointing, accumulation"]["summary"]


def test_evaluation_is_not_split(two):
    assert two["evaluation"]


def test_compiles_without_a_break(two):
    assert two["compiled"]["breaks"] == 0 and two["compiled"]["traced"] > 0
    assert two["compiled"]["loss"] <= 1e-6


def test_two_data_ranks_of_two(tmp_path):
    """Gradients are the mean over batches of the sum over slices, not of their mean."""
    report = launch(sequence_ranks.compare, str(tmp_path), world=4)[0]
    found = report["lora, checkpointing, accumulation"]
    assert found["facts"]["mesh"] == {"data": 2, "sequence": 2}
    assert found["gradient"] <= GRADIENT_TOLERANCE, found["name"]
    instead = "Use instead: --sequence_parallel_size 1 or 2"
    assert f"does not divide the 2 attention heads. {instead}" in report["refusals"][4]
    assert "does not divide the 4 processes" in report["refusals"][3]


def test_one_process_is_told_what_to_run(two):
    with pytest.raises(PatchRefused, match="this run has one.*torchrun --nproc_per_node 2"):
        manage(make_model(), sequence_parallel_size=2)
    assert "is not a number of processes" in two["refusals"][-1]


def test_heads_are_checked_before_weights_load(monkeypatch):
    monkeypatch.setattr(ulysses, "_world", lambda: 8)
    args = make_args(sequence_parallel_size=8)
    target = Target(args, extras={"denoiser_config": {"num_heads": 12}})
    with pytest.raises(PatchRefused, match="does not divide the 12 attention heads.*1 or 2 or 4"):
        PatchManager(args).preflight(target)


def test_off_changes_nothing():
    model, inputs = make_model(), make_inputs()
    expected = model(**inputs)
    manager, _ = manage(model, sequence_parallel_size=1)
    assert manager.requested == []
    assert torch.equal(model(**inputs), expected)


def test_layout():
    places = [Layout(rank=rank, world=6, sequence=2) for rank in range(6)]
    assert [place.data_rank for place in places] == [0, 0, 1, 1, 2, 2]
    assert {place.data_world for place in places} == {3}
    assert legal_sizes(heads=12, world=8) == [1, 2, 4]
    with pytest.raises(ValueError, match="6 processes cannot be divided"):
        Layout(world=6, sequence=4)


def test_whole_run_repeats_that_of_one_process(tmp_path, tmp_path_factory):
    """LoRA, accumulation and checkpointing through the trainer: same batches, noise levels, losses and adapters."""
    model = checkpoint(tmp_path_factory)
    alone = train(model, tmp_path / "alone", **FLAGS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = {**FLAGS, "sequence_parallel_size": 2}
    ranks = launch(sequence_ranks.train_whole, str(tmp_path), str(model), port, flags, world=2)
    for found in ranks:
        assert found["code"] == 0 and found["state"] == "exercised"
        assert found["encoded"] == [4, 4]  # of two clips and two prompts per step, one of each pair on each process
        assert found["rows"] == alone.rows and found["timesteps"] == alone.timesteps
        assert found["losses"] == pytest.approx(alone.losses, rel=1e-5)
    assert ranks[0]["trained"] == ranks[1]["trained"]
    expected = alone.trained()
    assert ranks[0]["trained"].keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam divides by the root of the second moment: where a gradient is all rounding, a step may differ entirely.
        apart = (torch.tensor(ranks[0]["trained"][name]) - tensor).abs()
        assert float(apart.mean()) <= 0.02 * FLAGS["learning_rate"], name


def test_noise_intervals_never_cut_a_group():
    sampling = DiscreteSampling(1000, sp_size=4)
    intervals = [sampling.interval(rank, 12) for rank in range(12)]
    assert all(len(set(intervals[start : start + 4])) == 1 for start in (0, 4, 8))
    assert DiscreteSampling(1000, sp_size=2).interval(5, 8) == (500, 750)
