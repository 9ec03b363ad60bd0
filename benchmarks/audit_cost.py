"""What the live audit costs a run of 200 steps: seconds spent in its own code, by part, over the run's whole time.

The parts are timed from inside one run, since two runs on a shared machine differ by more than the audit takes. The
counters on the blocks are timed as the difference between a watched and an unwatched call, times the calls.

    python benchmarks/audit_cost.py --size 256x4x512 --steps 200
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.step_overhead import GivenRecipe  # noqa: E402
from benchmarks.step_time import Size  # noqa: E402
from optim_patches.audit.live_probe import Watched  # noqa: E402
from videox_fun.training.flags import parse_args  # noqa: E402
from videox_fun.training.launch import make_context  # noqa: E402
from videox_fun.training.specs import get_spec  # noqa: E402
from videox_fun.training.trainer import Trainer  # noqa: E402

LIMIT = 0.01


def timed(owner: Any, name: str, spent: dict[str, float]) -> None:
    """Add the time of ``owner.name`` to ``spent``."""
    call = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

    setattr(owner, name, wrapper)


def watched_call(calls: int = 20_000) -> float:
    """Seconds that a counter adds to one call of a module."""
    plain, watched, value = nn.Identity(), nn.Identity(), torch.zeros(1)
    watched._compiled_call_impl = Watched(watched, lambda args, kwargs: None)

    def best(module: Callable[[torch.Tensor], Any]) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(calls):
                module(value)
            times.append(time.perf_counter() - started)
        return min(times) / calls

    return max(0.0, best(watched) - best(plain))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="256x4x512")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec, spent = get_spec("wan2.1_fun/train_lora"), {}
    with tempfile.TemporaryDirectory() as folder:
        args = parse_args(spec, [
            "--pretrained_model_name_or_path", "none", "--output_dir", folder, "--max_train_steps", str(options.steps),
            "--train_batch_size", "1", "--rank", "16", "--network_alpha", "8", "--target_name", "q,k,v,ffn.0,ffn.2",
            "--uniform_sampling", "--seed", "0", "--mixed_precision", options.mixed_precision,
            "--checkpointing_steps", "1000000",
        ], check_paths=False)  # fmt: skip
        trainer = Trainer(make_context(spec, args), GivenRecipe(Size.parse(options.size)))
        trainer.setup()
        timed(trainer.audit, "report", spent)
        timed(trainer.audit, "finish", spent)
        timed(trainer.clock, "switch", spent)
        started = time.perf_counter()
        trainer.run()
        whole = time.perf_counter() - started
        calls = trainer.audit.probe.counts.block_calls
    spent["counters"] = calls * watched_call()
    share = sum(spent.values()) / whole
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"{name:10s} {seconds:8.4f} s  {seconds / whole:.3%}\n")
    sys.stdout.write(f"{options.steps} steps in {whole:.1f} s, {trainer.clock.switches} phase changes; "
                     f"the audit took {share:.2%} (limit {LIMIT:.0%})\n")  # fmt: skip
    if options.json:
        row = {"size": options.size, "steps": options.steps, "seconds": whole, "spent": spent, "share": share}
        options.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return 0 if share < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
