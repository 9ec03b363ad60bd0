"""Two gloo processes that save, prune, fail and resume; run by test_two_ranks.py. Rank 0 prints one JSON object."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.faults.kit import Run, differences, make_args
from videox_fun.dist.process import end_rank
from videox_fun.training import checkpoint_io
from videox_fun.training.checkpoint_scan import scan
from videox_fun.training.signals import SignalSaver


def make_run(folder: Path, **changes) -> Run:
    return Run(make_args(folder, **changes), kind="named", rank=dist.get_rank(), world=dist.get_world_size(),
               wrap=DistributedDataParallel)


def gathered(value):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(os.environ["RANK"]), world_size=2)
    rank, report = dist.get_rank(), {}

    unbroken = make_run(folder / "a")
    unbroken.train(8)
    run = make_run(folder / "b", checkpoints_total_limit=2)
    run.train(6, save_at=(2, 4, 6))
    report["kept"] = sorted(p.name for p in (folder / "b").iterdir())
    report["files"] = sorted(p.name for p in (folder / "b" / "checkpoint-6").iterdir())
    again = make_run(folder / "b", checkpoints_total_limit=2)
    point = again.resume()
    again.train(8)
    report["resumed"] = gathered([point.step, point.kind])
    report["differences"] = gathered(differences(unbroken.everything(), again.everything()))
    report["streams differ"] = len({json.dumps(value["stream_numpy"]) for value in gathered(again.rng.snapshot())})

    # Only rank 1 cannot write: both must hear of it, none may hang, the old state must stay.
    original = checkpoint_io.write_json

    def fail(path, value, **kwargs):
        if rank == 1:
            raise OSError(28, "No space left on device")
        original(path, value, **kwargs)

    checkpoint_io.write_json = fail
    try:
        again.manager.save(10)
        told = "saved"
    except checkpoint_io.CheckpointError as error:
        told = str(error)
    checkpoint_io.write_json = original
    report["told"] = gathered(told)
    report["after failure"] = [entry.step for entry in scan(folder / "b")]
    report["hidden"] = [p.name for p in (folder / "b").iterdir() if p.name.startswith(".")]

    try:
        make_run(folder / "b").resume("checkpoint-99")
        refused = "no"
    except ValueError as error:
        refused = str(error)
    report["refused"] = gathered("checkpoint-99" in refused)

    saver = SignalSaver()
    if rank == 1:
        saver.received = "SIGTERM"
    report["signal"] = gathered([saver.agreed(world=2), saver.exit_code])
    if rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    end_rank(0)


if __name__ == "__main__":
    main()
