"""One rank of two under the audit, in which rank 1 does something else. Started by the tests as ``RANK FOLDER``.

The network is two linear layers: nothing here trains, and importing no model keeps the start short.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch.distributed as dist
from torch import nn

from optim_patches.audit.live import AuditFailed, LiveAudit
from optim_patches.audit.live_view import RunFacts
from optim_patches.base import Target
from optim_patches.registry import PatchManager, all_flags


def observe(folder: Path, mode: str, rank: int) -> None:
    """A run's start-up audit in one mode; what this rank learned goes to a file."""
    defaults = {flag.dest: flag.default for flag in all_flags()}
    args = Namespace(**defaults | {"audit": mode, "gradient_checkpointing": True, "explicit": frozenset()})
    target = Target(args, models={"transformer": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    audit = LiveAudit(args=args, explicit=frozenset({"gradient_checkpointing"}), manager=PatchManager(args),
                      output_dir=folder, mode=mode)  # fmt: skip
    audit.install(target)
    audit.probe.counts.blocks = 2
    audit.probe.counts.recomputed_blocks |= set() if rank else {"0", "1"}
    facts = RunFacts(steps=2, micro_steps=2, tokens=100 * (rank + 1), seconds=10.0, data_wait_s=6.0 * rank)
    outcome = "ran"
    try:
        report = audit.report(target, facts)
    except AuditFailed as error:
        outcome, report = str(error), audit.last
    notes = {"outcome": outcome, "differences": [text.as_dict() for text in report.differences],
             "state": report.row("B1").state}  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(notes), encoding="utf-8")


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for mode in ("default", "strict"):
        observe(folder / mode, mode, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
