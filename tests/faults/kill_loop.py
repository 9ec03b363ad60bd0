"""Saves in a loop until it is killed; run by test_kill.py.

One process imports torch, then forks a child per trial: the child resumes from ``latest`` and saves without end, the
parent kills it with SIGKILL at a random moment and checks that ``latest`` can be used and holds weights that belong to
its step. Prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.faults.kit import Run, make_args
from videox_fun.training.checkpoint_scan import Kind, scan


def make_run(output_dir: Path) -> Run:
    return Run(make_args(output_dir, checkpoints_total_limit=1, max_train_steps=10**9, lr_scheduler="constant",
                         use_ema=True), kind="named")


def child(output_dir: Path, ready: int) -> None:
    run = make_run(output_dir)
    point = run.resume()
    step = point.step if point is not None else 0
    os.write(ready, b"x")
    while True:
        # Every other save overwrites the folder of its own step, the most delicate case.
        step += step % 2 == 0 or random.random() < 0.5
        with torch.no_grad():
            run.player.model.head.weight.fill_(float(step))
        run.ctx.global_step = step
        run.manager.save(step)


def trial(output_dir: Path, generator: random.Random) -> str | None:
    """Error text of one kill, or ``None``."""
    had = any(entry.kind is Kind.STATE for entry in scan(output_dir))
    listen, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(output_dir, ready)
        finally:
            os._exit(1)
    os.close(ready)
    os.read(listen, 1)
    os.close(listen)
    time.sleep(generator.uniform(0.0, 0.3))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        return f"the child ended by itself ({status})"
    run = make_run(output_dir)
    point = run.resume()
    if point is None:
        return "a state was there before, none is now" if had else None
    if point.kind != "exact":
        return f"{point.source.name} resumed as {point.kind}"
    value = run.player.model.head.weight[0, 0].item()
    if value != point.step:
        return f"{point.source.name} holds the weights of step {value}"
    hidden = [p.name for p in output_dir.iterdir() if p.name.startswith(".")]
    return f"left behind: {hidden}" if hidden else None


def main() -> None:
    output_dir, trials = Path(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    generator = random.Random(5)
    make_run(output_dir)  # imports once, what every child would import
    problems = [text for text in (trial(output_dir, generator) for _ in range(trials)) if text]
    states = [entry.step for entry in scan(output_dir) if entry.kind is Kind.STATE]
    sys.stdout.write(json.dumps({"problems": problems, "steps": states}) + "\n")


if __name__ == "__main__":
    main()
