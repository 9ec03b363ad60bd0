"""From a script's row to parsed arguments.

``flag_table`` declares the flags; this module turns the groups of one script into a parser. Three things differ from a
plain ``argparse`` parser. An abbreviation is resolved among the original interface's flags first, so an addition can
never make an abbreviation ambiguous that used to work. A flag nobody knows is refused with the nearest name, or with
the scripts that do have it. And the namespace remembers in ``args.explicit`` which flags were really on the command
line, which is found by parsing a second time with every default suppressed.

The group names that ``ScriptSpec.flag_groups`` may use are the keys of ``flag_table.GROUP_TITLES``: model, data,
optim, schedule, checkpoint, validation, logging, runtime, lora, full, selective_ac, ignored. The ``own*`` groups and
the optimization layer's flags are added to every script. Nothing heavy is imported, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from videox_fun.training import flag_checks
from videox_fun.training.flag_table import GROUP_TITLES, IGNORED_WITH, Flag, own_groups, select
from videox_fun.training.specs import SCRIPTS, ScriptSpec
from videox_fun.utils.suggest import nearest

logger = logging.getLogger(__name__)

_LAUNCHER_PREFIXES = ("--deepspeed_", "--fsdp_", "--zero_stage", "--zero3_", "--num_", "--main_process", "--machine_",
                      "--dynamo_", "--rdzv_", "--gpu_ids", "--config_file", "--multi_gpu", "--offload_")


class FlagParser(argparse.ArgumentParser):
    """Parser for one script; see the module's description for what it adds."""

    def __init__(self, spec: ScriptSpec, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.spec = spec
        self.flags: dict[str, Flag] = {}

    def error(self, message: str) -> NoReturn:
        """Print the one sentence that matters instead of a usage block of a hundred flags."""
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help for all flags.\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Expand abbreviations, then parse; unknown flags are an error already here."""
        words = list(sys.argv[1:] if args is None else args)
        namespace, rest = super().parse_known_args([self._expand(word) for word in words], namespace)
        if rest:
            self.error(f"unexpected value '{rest[0]}': no flag takes it. Switches such as --enable_bucket have no "
                       "value, and a text with blanks needs quotes.")
        return namespace, rest

    def _expand(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name == "--" or name == "--help" or name in self.flags:
            return word
        for own in (False, True):
            matches = [flag for flag in self.flags if flag.startswith(name) and self.flags[flag].own is own]
            if len(matches) == 1:
                return matches[0] + equals + value
            if matches:
                self.error(f"{name} is short for {len(matches)} flags: {', '.join(matches)}. Write more of the name.")
        if "--help".startswith(name) and len(name) > 2:
            return "--help"
        self.error(self._unknown(name))

    def _unknown(self, name: str) -> str:
        others = [spec.path for spec in SCRIPTS.values() if name in {flag.name for flag in _flags_of(spec)}]
        if others:
            return f"{self.spec.path} has no flag {name}; it belongs to {', '.join(others)}."
        if name.startswith(_LAUNCHER_PREFIXES):
            return (f"unknown flag {name}. If it is meant for accelerate launch, write it before the path of the "
                    "script.")
        match = nearest(name, self.flags)
        return f"unknown flag {name}" + (f"; did you mean {match}?" if match else ".")


def _patch_flags() -> list[Flag]:
    from optim_patches.registry import all_flags

    rows = []
    for flag in all_flags():
        action = getattr(flag, "action", None)
        keys = ("default", "choices", "nargs", "action") if action else ("type", "default", "choices", "nargs")
        kwargs = {key: getattr(flag, key, None) for key in keys if getattr(flag, key, None) is not None}
        rows.append(Flag(flag.name, flag.help, kwargs, "patches", own=True))
    return rows


def _flags_of(spec: ScriptSpec) -> list[Flag]:
    flags = select((*spec.flag_groups, *own_groups(spec.trainable)))
    known = {flag.name for flag in flags}
    return flags + [flag for flag in _patch_flags() if flag.name not in known]


def is_ignored(flag: Flag, spec: ScriptSpec) -> bool:
    """True for a flag that this script accepts without acting on it."""
    return flag.group == "ignored" or flag.name in IGNORED_WITH.get(spec.trainable, frozenset())


def _help_text(flag: Flag, default: Any, ignored: bool) -> str:
    text = flag.help
    if ignored and flag.group != "ignored":
        text += " No effect in this script."
    if flag.takes_value and default not in (None, []):
        text += f" (default: {default})"
    return text.replace("%", "%%")


def build_parser(spec: ScriptSpec, *, suppress_defaults: bool = False) -> FlagParser:
    """The parser of one script.

    Args:
        spec: the script's row.
        suppress_defaults: leave flags that were not given out of the namespace.
    """
    parser = FlagParser(spec, prog=spec.path, description=f"Train with the {spec.id} script.")
    defaults = dict(spec.defaults)
    groups: dict[str, Any] = {}
    for flag in _flags_of(spec):
        kwargs = dict(flag.kwargs)
        if flag.dest in defaults:
            kwargs["default"] = defaults.pop(flag.dest)
        if isinstance(kwargs.get("default"), list):
            kwargs["default"] = list(kwargs["default"])
        help_text = _help_text(flag, kwargs.get("default"), is_ignored(flag, spec))
        if suppress_defaults:
            kwargs["default"] = argparse.SUPPRESS
        group = groups.get(flag.group)
        if group is None:
            group = groups[flag.group] = parser.add_argument_group(GROUP_TITLES[flag.group])
        group.add_argument(flag.name, dest=flag.dest, help=help_text, **kwargs)
        parser.flags[flag.name] = flag
    if defaults:
        raise ValueError(f"ScriptSpec {spec.id} sets defaults for flags it does not have: {', '.join(defaults)}.")
    return parser


def parse_args(spec: ScriptSpec, argv: Sequence[str] | None = None, *, check_paths: bool = True) -> argparse.Namespace:
    """Parse a command line and refuse what cannot work, before anything is loaded.

    Args:
        spec: the script's row.
        argv: words after the script's name; the process's own when None.
        check_paths: also refuse paths that do not exist and a missing annotation file.

    Returns:
        The namespace, with ``explicit``: the names that were given on the command line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(spec)
    args = parser.parse_args(words)
    args.explicit = frozenset(vars(build_parser(spec, suppress_defaults=True).parse_args(words)))
    try:
        flag_checks.check_values(args, spec)
        if check_paths:
            flag_checks.check_paths(args)
    except ValueError as error:
        parser.error(str(error))
    if getattr(args, "id_token", None) and getattr(args, "validation_prompts", None):
        args.validation_prompts = [f"{args.id_token} {prompt}".strip() for prompt in args.validation_prompts]
    if os.environ.get("RANK", "0") == "0":
        _warn(args, spec, parser)
    return args


def _warn(args: argparse.Namespace, spec: ScriptSpec, parser: FlagParser) -> None:
    ignored = [name for name, flag in parser.flags.items() if flag.dest in args.explicit and is_ignored(flag, spec)]
    if ignored:
        logger.warning("These flags are accepted but have no effect in %s: %s.", spec.path, ", ".join(ignored))
    for line in flag_checks.without_effect(args):
        logger.warning(line)
