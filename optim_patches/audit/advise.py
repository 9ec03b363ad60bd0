"""``videox-advise``: the decision tree as questions, ending in a diff of the launch command; and scenario templates.

    videox-advise run.sh --oom --gpu "RTX 4090"
    videox-advise output_dir          (a finished run's folder knows its command, and answers most questions itself)
    videox-advise run.sh --slow --run output_dir
    videox-advise run.sh --quality
    videox-advise --template 1 --model models/... --data_dir clips/ --meta clips/metadata.json --write train.sh

Without ``--oom``, ``--slow`` or ``--quality`` the questions are asked on the terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optim_patches.audit.cli import add_machine_flags, improved_path, surroundings
from optim_patches.audit.edits import CONFIG, SHELL, Edit, apply_edits, merge_edits, unified_diff
from optim_patches.audit.facts import Facts, facts_from_launch
from optim_patches.audit.project import Project, load_project
from optim_patches.audit.templates import SCENARIOS, get_scenario, render
from optim_patches.audit.text import LANGUAGES, Text
from optim_patches.audit.tree import Measured, Step, out_of_memory, quality, slow

T = Text
TROUBLES = ("oom", "slow", "quality")
QUESTIONS = {
    "oom": T("Out of memory?", "显存不足（OOM）？"),
    "slow": T("Training slow?", "训练速度慢？"),
    "quality": T("Results bad?", "训练效果差？"),
}
LAUNCH = T("Launch script, command, or folder of a finished run?", "启动脚本、命令或已完成训练的目录？")
NOTHING = T("Every step of this branch is taken already.", "该分支的所有步骤都已采用。")
_MAX_EVENTS = 256 << 20


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``videox-advise``."""
    parser = argparse.ArgumentParser(prog="videox-advise", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("paths", nargs="*", metavar="LAUNCH", help="launch script, quoted command, or a run's folder")
    parser.add_argument("--command", action="append", default=[], help="a launch command")
    for name in TROUBLES:
        parser.add_argument(f"--{name}", action="store_true", help=QUESTIONS[name].en)
    parser.add_argument("--again", action="count", default=0,
                        help="out of memory again after the last advice; repeat for harder measures")  # fmt: skip
    parser.add_argument("--run", help="folder of a finished run (events.jsonl, audit.json)")
    add_machine_flags(parser)
    parser.add_argument("--template", type=int, choices=[s.number for s in SCENARIOS], help="a ready command instead")
    for name in ("model", "data_dir", "meta", "output_dir"):
        parser.add_argument(f"--{name}", help="path for --template")
    parser.add_argument("--write", metavar="FILE", help="write the command to a new file")
    parser.add_argument("--lang", choices=LANGUAGES, default="en")
    parser.add_argument("--json", action="store_true", help="steps, edits and diff as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, or 2 when there is nothing to advise on."""
    args = build_parser().parse_args(argv)
    if args.template is not None:
        return _template(args)
    if not (args.paths or args.command or args.run) and (text := _ask_launch(args.lang)):
        (args.paths if os.path.exists(text) else args.command).append(text)
    runs = [path for path in args.paths if _is_run(Path(path))]
    folder = args.run or next(iter(runs), None)
    measured = read_run(Path(folder)) if folder else None
    paths = [path for path in args.paths if path not in runs]
    commands = list(args.command)
    if not paths and not commands and measured is not None and measured.command:
        commands = [measured.command]
    project = load_project(paths, commands=commands)
    if not project.launches:
        for name, text in project.problems:
            sys.stderr.write(f"videox-advise: {name}: {text[args.lang]}\n")
        return _fail("Name the launch script (or its command) that is to be improved.")
    troubles = [name for name in TROUBLES if getattr(args, name)] or _ask(args.lang, measured)
    if not troubles:
        return _fail("Say what is wrong: --oom, --slow or --quality.")
    facts = facts_from_launch(project.launches[0], project, surroundings(args))
    steps = list(walk(facts, troubles, again=args.again, measured=measured))
    return _answer(args, facts, project, steps, measured)


def walk(
    facts: Facts, troubles: Sequence[str], *, again: int = 0, measured: Measured | None = None
) -> Iterator[tuple[str, Step]]:
    """The steps of each trouble's branch."""
    for name in troubles:
        branch = {
            "oom": lambda: out_of_memory(facts, again),
            "slow": lambda: slow(facts, measured),
            "quality": lambda: quality(facts, measured),
        }[name]
        for step in branch():
            yield name, step


def edits_of(steps: Sequence[tuple[str, Step]], facts: Facts) -> list[Edit]:
    """The changes of all steps that the script accepts, without repetitions."""
    edits = [edit for _, step in steps for edit in step.edits]
    script = any(edit.where == "path" for edit in edits)  # another script takes other flags
    return merge_edits(e for e in edits if script or e.where != "script" or e.remove or facts.accepts(e.name))


def _answer(
    args: argparse.Namespace, facts: Facts, project: Project, steps: list[tuple[str, Step]], measured: Measured | None
) -> int:
    lang, launch = args.lang, facts.launch
    edits = edits_of(steps, facts)
    applied = apply_edits(launch.text, [(launch, edits)])
    diff = ""
    if applied.text != launch.text:
        diff = unified_diff(launch.text, applied.text, name=launch.path or "command")
    actions = [edit for edit in edits if edit.where in (SHELL, CONFIG)]
    if args.json:
        data = _as_data(steps, edits, diff, applied.notes, measured)
        sys.stdout.write(json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    else:
        seen = measured.lines() if measured is not None else []
        sys.stdout.write("".join(f"{line[lang]}\n" for line in seen))
        sys.stdout.write(_as_text(steps, actions, diff, applied.notes, lang))
    if args.write is not None:
        target = Path(args.write) if args.write else improved_path(launch.path)
        return _write_new(target, applied.text)
    return 0


def _as_text(
    steps: list[tuple[str, Step]], actions: list[Edit], diff: str, notes: list[Text], lang: str
) -> str:
    lines: list[str] = []
    last = ""
    for name, step in steps:
        if name != last:
            lines.append(f"{QUESTIONS[name][lang]}")
            last = name
        changes = ", ".join(edit.text[lang].replace("`", "") for edit in step.edits)
        lines.append(f"  - {step.question[lang]} {step.answer[lang]}" + (f" -> {changes}" if changes else ""))
    if not any(step.edits for _, step in steps):
        lines.append(NOTHING[lang])
    lines += [f"$ {edit}" if edit.where == SHELL else f"DeepSpeed: {edit}" for edit in actions]
    lines += [note[lang] for note in notes]
    return "\n".join([*lines, *(["", diff] if diff else [])]) + "\n"


def _as_data(
    steps: list[tuple[str, Step]], edits: list[Edit], diff: str, notes: list[Text], measured: Measured | None
) -> dict[str, Any]:
    return {
        "version": 1,
        "steps": [
            {
                "trouble": name,
                "question": step.question.as_dict(),
                "answer": step.answer.as_dict(),
                "changes": [edit.as_dict() for edit in step.edits],
            }
            for name, step in steps
        ],
        "changes": [edit.as_dict() for edit in edits],
        "measured": None if measured is None else vars(measured),
        "notes": [note.as_dict() for note in notes],
        "diff": diff,
    }


# -- a finished run -------------------------------------------------------------------------------------------------
def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("events.jsonl", "audit.json"))


def read_run(folder: Path) -> Measured:
    """What the files of a run say. Missing or torn files say nothing."""
    measured = Measured()
    _read_events(folder / "events.jsonl", measured)
    _read_audit(folder / "audit.json", measured)
    return measured


def _read_events(path: Path, measured: Measured) -> None:
    waits, times, norms = [], [], []
    for row in _json_lines(path):
        if row.get("event") == "start" and isinstance(row.get("command"), str):
            measured.command = row["command"]
        if row.get("event") != "step":
            continue
        measured.steps += 1
        loss = row.get("loss", row.get("train_loss"))
        if isinstance(loss, str) or (isinstance(loss, float) and not math.isfinite(loss)):
            measured.bad_losses += 1
        norm = row.get("grad_norm", row.get("total_norm"))
        if isinstance(norm, (int, float)):
            norms.append(float(norm))
        wait, time = row.get("data_wait", row.get("data_wait_s")), row.get("step_time")
        if isinstance(wait, (int, float)) and isinstance(time, (int, float)) and time > 0:
            waits.append(wait)
            times.append(time)
        memory = row.get("memory_gib")
        if isinstance(memory, (int, float)):
            measured.peak_gib = max(measured.peak_gib or 0.0, float(memory))
    if times:
        measured.data_wait = min(1.0, sum(waits) / sum(times))
    if len(norms) >= 10:
        usual = statistics.median(norms)
        measured.spikes = sum(norm > 10 * usual for norm in norms) if usual > 0 else 0


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.stat().st_size > _MAX_EVENTS:
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def _read_audit(path: Path, measured: Measured) -> None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    rows = data.get("rows") if isinstance(data, dict) else None
    _read_look(data.get("look") if isinstance(data, dict) else None, measured)
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict):
            continue
        if row.get("state") == "inert":
            measured.inert.append(str(row.get("id")))
        facts = row.get("facts")
        share = facts.get("share") if isinstance(facts, dict) else None
        if row.get("id") == "G1" and isinstance(share, (int, float)):
            measured.data_wait = float(share)
        if row.get("id") == "G10" and isinstance(share, (int, float)):
            measured.vae_share = float(share)


def _read_look(look: Any, measured: Measured) -> None:
    """The look back at the end of the run."""
    if not isinstance(look, dict):
        return
    shares = look.get("shares")
    for phase, field in (("data", "data_wait"), ("vae", "vae_share"), ("text", "text_share")):
        share = shares.get(phase, 0.0) if isinstance(shares, dict) else None
        if isinstance(share, (int, float)) and shares:
            setattr(measured, field, float(share))
    for key in ("mfu", "idle", "recompiles"):
        if isinstance(look.get(key), (int, float)):
            setattr(measured, key, look[key])


# -- dialogue and templates -----------------------------------------------------------------------------------------
def _ask_launch(lang: str) -> str:
    """Ask for the launch script on a terminal."""
    if not sys.stdin.isatty():
        return ""
    sys.stdout.write(f"{LAUNCH[lang]} ")
    sys.stdout.flush()
    return sys.stdin.readline().strip()


def _ask(lang: str, measured: Measured | None) -> list[str]:
    """Ask the three questions on a terminal; a run with an obvious fault answers by itself."""
    if measured is not None:
        if measured.bad_losses or measured.spikes:
            return ["quality"]
        if measured.data_wait is not None and measured.data_wait > 0.1:
            return ["slow"]
    if not sys.stdin.isatty():
        return []
    chosen = []
    for name in TROUBLES:
        sys.stdout.write(f"{QUESTIONS[name][lang]} [y/N] ")
        sys.stdout.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes", "是"):
            chosen.append(name)
    return chosen


def _template(args: argparse.Namespace) -> int:
    scenario = get_scenario(args.template)
    given = {name: getattr(args, name) for name in ("model", "data_dir", "meta", "output_dir") if getattr(args, name)}
    text = f"#!/bin/bash\n# {scenario.title[args.lang]}\n{render(scenario, **given)}"
    if args.write is None:
        sys.stdout.write(text)
        return 0
    return _write_new(Path(args.write), text)


def _write_new(target: Path, text: str) -> int:
    try:
        with target.open("x", encoding="utf-8", newline="") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        return _fail(f"{target} exists and is left as it is; name a new file.")
    except OSError as error:
        return _fail(f"{target} cannot be written: {error.strerror}.")
    sys.stderr.write(f"{target}\n")
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"videox-advise: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
