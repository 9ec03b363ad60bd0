"""A training launch: launcher, its options, the script, the script's options, each with its place in the text.

Options follow argparse: ``--flag value`` and ``--flag=value``, unambiguous prefixes, the last occurrence wins. Values
that only a shell would know are opaque: they count as given, and numbers asked of them are None.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from optim_patches.audit.flagtable import Flag, known_flags, script_ids
from optim_patches.audit.shell import Command, ShellProblem, parse_shell
from optim_patches.audit.words import Word

#: Options of ``accelerate launch`` that take no value.
_LAUNCHER_SWITCHES = frozenset(
    "cpu multi_gpu tpu use_xpu use_deepspeed use_fsdp use_megatron_lm same_network no_python module quiet debug "
    "downcast_bf16 enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation "
    "use_parallelism_config ipex no_local_rank standalone".split()
)
_SPOKEN = frozenset({"echo", "printf", "pip", "pip3", "conda", "apt", "apt-get", "cat", "grep", "sed", "which"})
_TRAINING_FLAGS = ("pretrained_model_name_or_path", "train_data_meta", "train_data_dir", "train_batch_size")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?(\.exe)?")
_TORCH_RUN = ("torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class Option:
    """One flag of a command line.

    Attributes:
        name: full name without dashes; what was typed when no known flag matches.
        typed: the flag as typed, with dashes.
        values: its values.
        words: flag word and value words, for edits in place.
        known: whether the command accepts it.
    """

    name: str
    typed: str
    values: tuple[str, ...] = ()
    words: tuple[Word, ...] = ()
    opaque: bool = False
    known: bool = True

    @property
    def inline(self) -> bool:
        """``--flag=value`` in one word."""
        return bool(self.values) and len(self.words) == 1


class Options:
    """The options of one command, with the defaults of its flags."""

    def __init__(self, items: Iterable[Option] = (), *, flags: Mapping[str, Flag] | None = None) -> None:
        self.items = list(items)
        self.flags = flags or {}
        self._last = {option.name: option for option in self.items}

    @classmethod
    def from_namespace(cls, args: argparse.Namespace, *, flags: Mapping[str, Flag], explicit: Iterable[str]) -> Options:
        """Options of a parsed command line; only the ``explicit`` ones count as given."""
        items = []
        for name in sorted(explicit):
            value = getattr(args, name, None)
            if value is None or value is False:
                continue
            values = value if isinstance(value, (list, tuple)) else () if value is True else (value,)
            items.append(Option(name, f"--{name}", tuple(map(str, values))))
        return cls(items, flags=flags)

    def get(self, name: str) -> Option | None:
        return self._last.get(name)

    def given(self, *names: str) -> bool:
        """Whether any of the flags was typed."""
        return any(name in self._last for name in names)

    def hidden(self, name: str) -> bool:
        """Whether a flag was typed with a value that only the shell knows."""
        option = self._last.get(name)
        return option is not None and option.opaque and bool(option.values)

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        option = self._last.get(name)
        return option is not None and option.values[:1] not in (("false",), ("False",), ("no",), ("0",))

    def text(self, name: str, default: str | None = None) -> str | None:
        """The value as typed, else the flag's default, else ``default``; None for an opaque value."""
        option = self._last.get(name)
        if option is not None and option.values:
            return None if option.opaque else option.values[-1]
        flag = self.flags.get(name)
        return flag.default if flag is not None and flag.default is not None else default

    def number(self, name: str, default: float | None = None) -> float | None:
        """The value as a number; None when it is opaque or no number."""
        text = self.text(name)
        if text is None:
            return None if self.given(name) else default
        try:
            value = float(text)
        except ValueError:
            return None
        return value if value == value and abs(value) != float("inf") else None

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self.number(name, default)
        return int(value) if value is not None and value == int(value) else None

    def values(self, name: str) -> tuple[str, ...]:
        option = self._last.get(name)
        return option.values if option is not None else ()


@dataclass
class Launch:
    """One launch found in a text.

    Attributes:
        launcher: ``accelerate``, ``torchrun``, ``deepspeed``, ``python``, or ``""`` for a configuration file alone.
        script: path of the script as typed, ``""`` when it could not be told.
        script_id: ``wan2.1_fun/train_lora`` or a best guess of the same form.
        text: the whole text the command stands in; spans of words refer to it.
    """

    launcher: str = ""
    launcher_options: Options = field(default_factory=Options)
    script: str = ""
    script_id: str = ""
    options: Options = field(default_factory=Options)
    environment: dict[str, str] = field(default_factory=dict)
    words: tuple[Word, ...] = ()
    script_at: int = 0
    launcher_at: int = 0
    line: int = 1
    text: str = ""
    path: str = ""
    strays: tuple[Word, ...] = ()

    @property
    def kind(self) -> str:
        """``train``, ``infer``, ``config`` (no command at all) or ``other``."""
        if not self.launcher:
            return "config"
        name = self.script_id.rsplit("/", 1)[-1]
        if "train" in name or (not name and self.launcher != "python"):
            return "train"
        if "predict" in name or "generate" in name or "infer" in name:
            return "infer"
        return "train" if self.options.given(*_TRAINING_FLAGS) else "other"


def find_launches(
    text: str, *, path: str = "", source: Callable[[str], str | None] | None = None
) -> tuple[list[Launch], list[ShellProblem], dict[str, int]]:
    """The launches in shell text, what a shell would stumble over, and the variables that are never set."""
    script = parse_shell(text, wanted=lambda words: locate(words) is not None, source=source)
    launches = [read_launch(command, text=text, path=path) for command in script.commands]
    return [launch for launch in launches if launch.kind != "other"], script.problems, script.unset


def locate(words: Sequence[str]) -> tuple[str, int] | None:
    """The launcher of a command and the index of its first argument, or None for another command."""
    if not words or words[0] in _SPOKEN:
        return None
    for index, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        after = words[index + 1 : index + 3]
        if name == "accelerate" and after[:1] == ["launch"]:
            return "accelerate", index + 2
        if name == "accelerate-launch":
            return "accelerate", index + 1
        if name in ("torchrun", "deepspeed") and len(words) > index + 1:
            return name, index + 1
        if _PYTHON.fullmatch(name):
            if len(after) == 2 and after[0] == "-m":
                if after[1] == "accelerate.commands.launch":
                    return "accelerate", index + 3
                if after[1] in _TORCH_RUN:
                    return "torchrun", index + 3
            if _script_index(words, index + 1) is not None:
                return "python", index + 1
            return None
    return None


def _script_index(words: Sequence[str], start: int) -> int | None:
    """Index of the Python file (or of the module after ``-m``) among a launcher's arguments."""
    for index in range(start, len(words)):
        word = words[index]
        if word.endswith(".py") and not word.startswith("-"):
            return index
        if word in ("-m", "--module") and index + 1 < len(words) and "." in words[index + 1]:
            return index + 1
    return None


def read_launch(command: Command, *, text: str, path: str = "") -> Launch:
    """Split a launch command into launcher options, script and script options."""
    words = command.words
    texts = [word.text for word in words]
    located = locate(texts)
    assert located is not None
    launcher, start = located
    at = _script_index(texts, start)
    if at is None:  # the script is behind a variable: the first argument that is no option
        at = next((i for i in range(start, len(words)) if words[i].opaque and not texts[i].startswith("-")), len(words))
    script = texts[at] if at < len(words) else ""
    script_id = normalize_script(script, path) if script and not words[at].opaque else ""
    launcher_options, _ = parse_options(words[start:at], _launcher_flag)
    flags = known_flags(script_id)
    options, strays = parse_options(words[at + 1 :], _resolver(flags))
    return Launch(
        launcher=launcher,
        launcher_options=Options(launcher_options),
        script=script,
        script_id=script_id,
        options=Options(options, flags=flags),
        environment=dict(command.environment),
        words=words,
        script_at=at,
        launcher_at=start,
        line=command.line,
        text=text,
        path=path,
        strays=tuple(strays),
    )


def normalize_script(script: str, path: str = "") -> str:
    """``/x/scripts/wan2.1_fun/train_lora.py`` as ``wan2.1_fun/train_lora``.

    A bare file name takes its family from the folder of the shell script it was found in.
    """
    clean = script.replace("\\", "/")
    if not clean.endswith(".py"):
        clean = clean.replace(".", "/") if "/" not in clean else clean
    clean = clean.removesuffix(".py")
    parts = [part for part in PurePosixPath(clean).parts if part not in ("/", ".", "..")]
    if "scripts" in parts:
        parts = parts[len(parts) - parts[::-1].index("scripts") :]
    parts = parts[-2:]
    if len(parts) == 1 and path:
        folder = PurePosixPath(path.replace("\\", "/")).parent.name
        if f"{folder}/{parts[0]}" in script_ids():
            parts.insert(0, folder)
    return "/".join(parts)


def _launcher_flag(name: str) -> Flag:
    return Flag(name, "b" if name in _LAUNCHER_SWITCHES else "s")


def _resolver(flags: Mapping[str, Flag]) -> Callable[[str], Flag | None]:
    """argparse's rule: the exact name, else the only flag that begins so."""

    def resolve(name: str) -> Flag | None:
        if name in flags:
            return flags[name]
        matches = [flag for key, flag in flags.items() if key.startswith(name)]
        if len(matches) == 1:
            return matches[0]
        return None

    return resolve


def parse_options(
    words: Sequence[Word], resolve: Callable[[str], Flag | None]
) -> tuple[list[Option], list[Word]]:
    """Options of a list of words, and the words that belong to none.

    Args:
        words: arguments after the program or script.
        resolve: a flag from its name without dashes, or None when the command has no such flag.
    """
    options: list[Option] = []
    strays: list[Word] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_flag(word.text):
            strays.append(word)
            continue
        typed, equals, inline = word.text.partition("=")
        name = typed.lstrip("-").replace("-", "_")
        flag = resolve(name)
        arity = flag.arity if flag is not None else 1
        values: list[Word] = []
        if not equals:
            limit = len(words) if arity < 0 else index + arity
            while index < min(limit, len(words)) and not _is_flag(words[index].text):
                values.append(words[index])
                index += 1
        texts = (inline,) if equals else tuple(value.text for value in values)
        options.append(
            Option(
                flag.name if flag is not None else name,
                typed,
                texts,
                (word, *values),
                any(value.opaque for value in (word, *values)),
                flag is not None,
            )
        )
    return options, strays


def _is_flag(text: str) -> bool:
    return len(text) > 1 and text[0] == "-" and not re.fullmatch(r"-\d*\.?\d+(e-?\d+)?", text)
