"""``videox-audit``: reads launch scripts, command lines, projects and configuration files, and says what to change.

Nothing that is read is executed. The exit status is 0; 1 when ``--fail-on`` matches; 2 when nothing could be audited
or an output file is in the way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from optim_patches.audit.checks import PRIORITIES
from optim_patches.audit.facts import GOALS, Surroundings, facts_from_config, facts_from_launch, installed_packages
from optim_patches.audit.hardware import detect_gpus, gpu_argument, parse_gpu
from optim_patches.audit.project import Project, load_project
from optim_patches.audit.report import Report, combined_fix, make_report, to_json, to_markdown
from optim_patches.audit.terminal import to_terminal
from optim_patches.audit.text import LANGUAGES

FAIL = ("error", *PRIORITIES)


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``videox-audit``."""
    parser = argparse.ArgumentParser(prog="videox-audit", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH",
                        help="shell script, project folder, accelerate or DeepSpeed file, or a quoted command line; "
                        "- reads a command from standard input")  # fmt: skip
    parser.add_argument("--command", action="append", default=[], help="a launch command")
    add_machine_flags(parser)
    parser.add_argument("--lang", choices=LANGUAGES, default="en", help="language of the report")
    parser.add_argument("--format", choices=("term", "md", "json"), default=None,
                        help="term on standard output, else by the suffix of --output")  # fmt: skip
    parser.add_argument("--output", help="write the report to this file")
    parser.add_argument("--include", default="P0,P1", help="priorities whose changes go into the diff")
    parser.add_argument("--fail-on", dest="fail_on", choices=FAIL,
                        help="exit with 1 when there is an error, or advice of this priority or above")  # fmt: skip
    parser.add_argument("--fix", nargs="?", const="", metavar="FILE",
                        help="write the improved command to a new file (default: NAME.improved.sh)")  # fmt: skip
    return parser


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that describe the training machine; shared with the advisor."""
    parser.add_argument("--gpu", type=gpu_argument,
                        help='card of the training machine, for example "A100 80GB", or cpu')
    parser.add_argument("--gpus", type=int, help="number of cards per node")
    parser.add_argument("--host_ram", type=float, help="host memory in GB")
    parser.add_argument("--packages", help="comma list of optional packages on the training machine, or none")
    parser.add_argument("--target", choices=("auto", "own", "upstream"), default="auto",
                        help="whose scripts will run: this project's, or VideoX-Fun's own")  # fmt: skip
    parser.add_argument("--goal", choices=GOALS, default="balanced", help="what matters most")


def surroundings(args: argparse.Namespace) -> Surroundings:
    """The training machine as given, completed by what is detected here when no card is named."""
    if args.gpu:
        gpu, count, local = parse_gpu(args.gpu), args.gpus, False
    else:
        cards = detect_gpus()
        gpu = cards[0] if cards else None
        count = args.gpus or (len(cards) or None)
        local = bool(cards)
    packages = installed_packages() if local else None
    if args.packages is not None:
        names = (name.strip().replace("-", "_") for name in args.packages.split(","))
        packages = frozenset(name for name in names if name and name != "none")
    return Surroundings(gpu, count, packages, args.target, args.goal, args.host_ram)


def audit(project: Project, around: Surroundings, *, include: Sequence[str] = ("P0", "P1")) -> list[Report]:
    """Reports of all launches of a project, or of its configuration files when there is no launch."""
    reports = [make_report(facts_from_launch(launch, project, around), project, include=include)
               for launch in project.launches]  # fmt: skip
    if not project.launches:
        for config in project.configs:
            if config.kind != "model":
                reports.append(make_report(facts_from_config(config, around), project, include=include))
    return reports


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    args = build_parser().parse_args(argv)
    include = tuple(part.strip() for part in args.include.split(",") if part.strip())
    commands = list(args.command)
    if "-" in args.paths:
        commands.append(sys.stdin.read())
    paths = [path for path in args.paths if path != "-"]
    if not paths and not commands:
        return _fail("Name a launch script, a project folder, a configuration file or a command.")
    if set(include) - set(PRIORITIES):
        return _fail(f"--include takes {', '.join(PRIORITIES)}, got {args.include}.")
    project = load_project(paths, commands=commands)
    reports = audit(project, surroundings(args), include=include)
    status = 0 if reports else 2
    if reports and args.fail_on and any(failing(report, args.fail_on) for report in reports):
        status = 1
    problem = _write(args, reports, project)
    if problem is None and args.fix is not None:
        problem = _fix(args, reports)
    return status if problem is None else _fail(problem)


def failing(report: Report, limit: str) -> bool:
    """Whether a report is as bad as ``limit`` or worse; errors fail every limit."""
    worst = report.worst()
    return worst != "" and FAIL.index(worst) <= FAIL.index(limit)


def _write(args: argparse.Namespace, reports: list[Report], project: Project) -> str | None:
    form = args.format
    if form is None:
        form = {".json": "json", ".md": "md"}.get(Path(args.output).suffix, "term") if args.output else "term"
    if form == "term" and not args.output:
        to_terminal(reports, lang=args.lang, problems=project.problems, stream=sys.stdout)
        return None
    if form == "json":
        text = json.dumps(to_json(reports, project.problems), ensure_ascii=False, indent=1) + "\n"
    elif form == "md":
        text = to_markdown(reports, args.lang, project.problems)
    else:
        text = to_terminal(reports, lang=args.lang, problems=project.problems)
    if not args.output:
        sys.stdout.write(text)
        return None
    if _is_input(args.output, reports):
        return f"{args.output} is an input of this audit; choose another --output."
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{args.output} cannot be written: {error.strerror}."
    return None


def _is_input(output: str, reports: list[Report]) -> bool:
    target = Path(output).resolve()
    return any(report.launch.path and Path(report.launch.path).resolve() == target for report in reports)


def _fix(args: argparse.Namespace, reports: list[Report]) -> str | None:
    """Write the improved commands. An existing file is never touched."""
    texts = combined_fix(reports)
    if not texts:
        return "There is no launch command to improve."
    if args.fix and len(texts) > 1:
        return f"--fix {args.fix} is one file, but {len(texts)} inputs hold commands; leave the name out."
    for path, text in texts.items():
        target = Path(args.fix) if args.fix else improved_path(path)
        if target.exists():
            return f"{target} exists and is left as it is; name a new file with --fix FILE."
        try:
            with target.open("x", encoding="utf-8", newline="") as file:
                file.write(text if text.endswith("\n") else text + "\n")
        except OSError as error:
            return f"{target} cannot be written: {error.strerror}."
        sys.stderr.write(f"{target}\n")
    return None


def improved_path(path: str) -> Path:
    """``run.sh`` as ``run.improved.sh``; commands without a file go to ``launch.improved.sh``."""
    source = Path(path or "launch.sh")
    return source.with_name(f"{source.stem}.improved{source.suffix or '.sh'}")


def _fail(message: str) -> int:
    sys.stderr.write(f"videox-audit: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
