"""Processes that may crash or hang, and what is left of them.

``ask`` starts this module as a program, with the name of a trial. The trial prints one line of JSON; a signal, a
non-zero exit or silence is an answer as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MARK = "videox-doctor:"


@dataclass(frozen=True)
class Answer:
    """What became of a trial: its data, or why there is none."""

    ok: bool
    data: dict[str, Any]
    problem: str = ""


def ask(name: str, *words: str, timeout: float, environment: dict[str, str] | None = None) -> Answer:
    """Run one trial in a process of its own. Never raises for what happens there."""
    command = [sys.executable, "-m", "optim_patches.doctor.child", name, *words]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, **(environment or {})}
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, env=env, check=False)
    except subprocess.TimeoutExpired:
        return Answer(False, {}, f"no answer within {timeout:g} s")
    except OSError as error:
        return Answer(False, {}, f"could not be started: {error.strerror}")
    for line in reversed(done.stdout.decode("utf-8", "replace").splitlines()):
        if line.startswith(_MARK):
            return _answer(line[len(_MARK) :])
    if done.returncode < 0:
        return Answer(False, {}, f"crashed with {_signal(-done.returncode)}")
    last = next((x for x in reversed(done.stderr.decode("utf-8", "replace").splitlines()) if x.strip()), "")
    return Answer(False, {}, last.strip()[:200] or f"ended with exit code {done.returncode}")


def _answer(text: str) -> Answer:
    try:
        data = json.loads(text)
    except ValueError:
        return Answer(False, {}, "gave no readable answer")
    problem = str(data.pop("problem", ""))
    return Answer(not problem, data, problem)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(argv: list[str]) -> int:
    """Run the trial named first and print its answer."""
    from optim_patches.doctor.trials import TRIALS

    try:
        data = TRIALS[argv[0]](*argv[1:])
    except Exception as error:
        reason = str(error).strip().splitlines()
        data = {"problem": f"{type(error).__name__}: {reason[0][:200] if reason else ''}"}
    sys.stdout.write(f"\n{_MARK}{json.dumps(data)}\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
