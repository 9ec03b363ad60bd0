"""``videox-plan``: the memory of a training run, told from its launch script or command alone.

    videox-plan train.sh --gpu "RTX 4090"
    videox-plan train.sh --gpu "A100 80GB" --gpus 8 --png plan.png --json plan.json
    videox-plan --command "accelerate launch scripts/.../train_lora.py ..." --fit 24

No weights, no data and no GPU are needed. A model folder that is not here is taken to be the published model that it is
named after; the size is the one the flags name (a run's own ``--plan`` knows the sizes of its clips).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optim_patches.audit.facts import Facts, Surroundings, facts_from_launch
from optim_patches.audit.hardware import detect_gpus, gpu_argument, parse_gpu
from optim_patches.audit.project import load_project
from optim_patches.plan.runs import Machines


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``videox-plan``."""
    parser = argparse.ArgumentParser(prog="videox-plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("launch", nargs="?", help="launch script")
    parser.add_argument("--command", help="a launch command instead")
    parser.add_argument("--gpu", type=gpu_argument,
                        help="the card, for example 'A100 80GB' or 'cpu'; this machine's when not given")
    parser.add_argument("--gpus", type=int, help="number of cards")
    parser.add_argument("--fit", type=float, metavar="GB", help="also find the cheapest changes that fit into this")
    parser.add_argument("--png", help="draw the plan into this file")
    parser.add_argument("--json", help="write the plan into this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. 0: fits (or nothing was said about the card); 1: does not fit; 2: cannot be planned."""
    args = build_parser().parse_args(argv)
    try:
        return _plan(args)
    except ValueError as error:
        sys.stderr.write(f"videox-plan: {error}\n")
        return 2


def _plan(args: argparse.Namespace) -> int:
    facts = read_launch(args)
    from optim_patches.plan.fit import fit, fits
    from optim_patches.plan.phases import make_plan
    from optim_patches.plan.report import draw, fit_lines, summary, table, write_json
    from optim_patches.plan.traces import Traces
    from videox_fun.training.planning import adapt

    run = describe_launch(facts)
    device_gb = args.fit or facts.memory
    traces = Traces(adapt)
    plan = make_plan(run, traces)
    lines = [*table(plan), "", *summary(plan, device_gb=facts.memory)]
    good = fits(plan, device_gb=device_gb)
    if args.fit is not None or not good:
        lines += ["", *fit_lines(fit(run, traces, device_gb=device_gb), device_gb=device_gb)]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        write_json(plan, Path(args.json))
    if args.png:
        draw(plan, Path(args.png), device_gb=facts.memory)
    return 0 if good else 1


def read_launch(args: argparse.Namespace) -> Facts:
    """The first training launch of a script or command."""
    if not (args.launch or args.command):
        raise ValueError("name a launch script, or give a command with --command.")
    project = load_project([args.launch] if args.launch else [], commands=[args.command] if args.command else [])
    launches = [launch for launch in project.launches if launch.kind == "train"]
    if not launches:
        problems = "; ".join(f"{name}: {text.en}" for name, text in project.problems)
        raise ValueError(f"no training launch was found. {problems}".strip())
    cards = [parse_gpu(args.gpu)] if args.gpu else detect_gpus()
    around = Surroundings(cards[0] if cards else None, args.gpus or len(cards) or None)
    return facts_from_launch(launches[0], project, around)


def describe_launch(facts: Facts) -> Any:
    """The planner's view of a launch."""
    from videox_fun.training.flags import parse_args
    from videox_fun.training.planning import describe
    from videox_fun.training.specs import get_spec

    launch = facts.launch
    spec = get_spec(launch.script_id)
    words = [word.text for word in launch.words[launch.script_at + 1 :]]
    try:
        parsed = parse_args(spec, words, check_paths=False)
    except SystemExit as error:
        raise ValueError("the command line is not one of this script (see above).") from error
    parsed.mixed_precision = facts.precision or "no"
    if parsed.config_path and not Path(parsed.config_path).is_file():
        beside = Path(os.path.dirname(launch.path) or ".") / parsed.config_path
        parsed.config_path = str(beside) if beside.is_file() else None
    device = "cpu" if facts.cpu else "cuda"
    return describe(spec, parsed, device=device, machines=machines_of(facts))


def machines_of(facts: Facts) -> Machines:
    """How a launch spreads its run."""
    spread, world = facts.distribution, facts.world or 1
    local = max(world // max(spread.machines, 1), 1)
    if facts.fsdp:
        stage = {"SHARD_GRAD_OP": 2, "NO_SHARD": 0}.get(str(spread.fsdp_strategy).upper(), 3)
        return Machines(world, local, "fsdp", stage)
    if spread.kind == "deepspeed":
        kept = ("", "none")
        return Machines(world, local, "deepspeed", spread.stage or 0, spread.offload_optimizer not in kept,
                        spread.offload_param not in kept)  # fmt: skip
    return Machines(world, local)


if __name__ == "__main__":
    sys.exit(main())
