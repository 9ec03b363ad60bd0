"""One rank of a two-rank run: the real script, with notes of what this rank saw.

Started by the tests through ``torchrun``; the first argument is the folder for the notes, the rest is the script's
command line. The notes are written when the trainer's ``run`` ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.unit.real_runs import LORA, RealRun
from videox_fun.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


def fingerprint(run: RealRun) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(run.trained().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def noted(folder: Path) -> None:
    """Let every run of the trainer in this process leave ``rank-<number>.json``."""
    original = Trainer.run

    def run(self: Trainer) -> int:
        spy = RealRun(self)
        spy.record()
        code = original(self)
        notes: dict[str, Any] = {
            "code": code, "steps": spy.steps, "losses": spy.losses, "norms": spy.logs("grad_norm"), "rows": spy.rows,
            "timesteps": spy.timesteps, "pixels": [float(pixels.mean()) for pixels in spy.pixels],
            "shapes": [list(pixels.shape) for pixels in spy.pixels], "trained": fingerprint(spy),
            "world": self.ctx.world, "device": self.ctx.device.type,
        }
        (folder / f"rank-{self.ctx.rank}.json").write_text(json.dumps(notes))
        return code

    Trainer.run = run


def main() -> None:
    noted(Path(sys.argv[1]))
    script = ROOT / "scripts" / f"{LORA}.py"
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    main()
