"""``videox-doctor``: is this machine ready for training, and what would make it better.

    videox-doctor
    videox-doctor --model models/Wan2.1-Fun-1.3B-InP --config config/wan2.1/wan_civitai.yaml --data clips/metadata.json
    videox-doctor --format json --lang zh

The exit status is 0; 1 when there is an error, or a warning with ``--strict``; 2 when the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from optim_patches.audit.text import LANGUAGES, Text, same
from optim_patches.doctor import inputs, kernels, machine, packages
from optim_patches.doctor.findings import ERROR, WARNING, Finding, to_json, to_terminal, worst


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``videox-doctor``."""
    parser = argparse.ArgumentParser(
        prog="videox-doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="model folder (--pretrained_model_name_or_path)")
    parser.add_argument("--config", type=Path, help="the YAML of --config_path: are the parts it names there")
    parser.add_argument("--data", type=Path, help="metadata file (--train_data_meta)")
    parser.add_argument("--data_dir", type=Path, help="where its relative paths start (--train_data_dir)")
    parser.add_argument("--output_dir", default=".", help="folder whose space and speed count (.)")
    parser.add_argument("--cache_dir", help="folder of the cache of latents and prompts")
    parser.add_argument("--quick", action="store_true", help="leave out what takes long (torch.compile)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a trial may take (120)")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    parser.add_argument("--format", choices=("term", "json"), default="term")
    parser.add_argument("--lang", choices=LANGUAGES, default="en")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    args = build_parser().parse_args(argv)
    findings = examine(args)
    if args.format == "json":
        sys.stdout.write(to_json(findings))
    else:
        to_terminal(findings, lang=args.lang)
    bad = (ERROR, WARNING) if args.strict else (ERROR,)
    return 1 if worst(findings) in bad else 0


def examine(args: argparse.Namespace) -> list[Finding]:
    """Everything the flags ask for."""
    torch = machine.ask_torch(timeout=args.timeout)
    folders = {"--output_dir": args.output_dir, "--cache_dir": args.cache_dir}
    steps: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("machine", lambda: machine.look_at_machine(torch, timeout=args.timeout)),
        (
            "packages",
            lambda: packages.look_at_packages(
                packages.installed_versions(), cudnn=torch.data.get("cudnn"), cuda=bool(torch.devices)
            ),
        ),
        ("kernels", lambda: kernels.try_kernels(torch, quick=args.quick, timeout=args.timeout)),
        ("storage", lambda: machine.look_at_storage({flag: name for flag, name in folders.items() if name})),
    ]
    if args.model is not None:
        steps.append(("inputs", lambda: inputs.look_at_model(args.model, args.config)))
    if args.data is not None:
        steps.append(("inputs", lambda: inputs.look_at_data(args.data, args.data_dir)))
    return [finding for group, step in steps for finding in _safely(group, step)]


def _safely(group: str, step: Callable[[], list[Finding]]) -> list[Finding]:
    """A step's findings; what it stumbles over is a finding too."""
    try:
        return step()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return [Finding(group, "unreadable", WARNING, Text("could not be examined", "无法检查"), same(text))]


if __name__ == "__main__":
    sys.exit(main())
