"""Edits of a launch command, made in the text it came from.

An edit names a flag of the script or of the launcher, or a shell action that precedes the launch. Applying edits keeps
everything else in the file as it is: values are replaced in place, new flags are added in the command's own style (one
per line or not, ``--flag=value`` or ``--flag value``), removed ones take their line with them. What came out of a
variable is overridden at the end of the command, because argparse takes the last occurrence.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optim_patches.audit.launch import Launch, Option, Options
from optim_patches.audit.text import Text
from optim_patches.audit.words import Word

SCRIPT, LAUNCHER, SHELL, CONFIG, PATH = "script", "launcher", "shell", "config", "path"


@dataclass(frozen=True)
class Edit:
    """One change.

    Attributes:
        where: ``script`` or ``launcher`` flag, ``shell`` command to run before, ``config`` key of the DeepSpeed file,
            ``path``: another script.
        name: flag without dashes, dotted key, the shell command, or the script's file name.
        value: new value; None for a switch.
        remove: take the flag out instead.
    """

    where: str
    name: str
    value: str | None = None
    remove: bool = False

    def __str__(self) -> str:
        if self.where in (SHELL, PATH):
            return self.name
        if self.where == CONFIG:
            return f"{self.name}: {self.value}"
        if self.remove:
            return f"--{self.name}"
        return f"--{self.name}" if self.value is None else f"--{self.name}={_quote(self.value)}"

    @property
    def text(self) -> Text:
        """For a report: removals say so."""
        shown = f"`{self}`"
        return Text(f"remove {shown}", f"删除 {shown}") if self.remove else Text(shown, shown)

    def as_dict(self) -> dict[str, object]:
        return {"where": self.where, "name": self.name, "value": self.value, "remove": self.remove}


def put(name: str, value: object = None) -> Edit:
    """Set a flag of the script."""
    return Edit(SCRIPT, name, None if value is None else str(value))


def drop(name: str) -> Edit:
    """Take a flag of the script out."""
    return Edit(SCRIPT, name, remove=True)


def launcher(name: str, value: object = None) -> Edit:
    """Set a flag of the launcher."""
    return Edit(LAUNCHER, name, None if value is None else str(value))


def undo_launcher(name: str) -> Edit:
    """Take a flag of the launcher out."""
    return Edit(LAUNCHER, name, remove=True)


def script_file(name: str) -> Edit:
    """Start another script of the same folder."""
    return Edit(PATH, name)


def run(command: str) -> Edit:
    """A command to run before the launch."""
    return Edit(SHELL, command)


def config(key: str, value: object) -> Edit:
    """Set a key of the DeepSpeed file."""
    return Edit(CONFIG, key, str(value))


@dataclass
class Applied:
    """The result of applying edits: the new text, and what could not be done in it."""

    text: str
    notes: list[Text]


def merge_edits(edits: Iterable[Edit]) -> list[Edit]:
    """Edits without repetitions; the first edit of a flag wins."""
    seen: dict[tuple[str, str], Edit] = {}
    for edit in edits:
        seen.setdefault((edit.where, edit.name), edit)
    return list(seen.values())


def apply_edits(text: str, changes: Sequence[tuple[Launch, Sequence[Edit]]]) -> Applied:
    """The text of one file with the edits of its launches made."""
    spans: list[tuple[int, int, str]] = []
    notes: list[Text] = []
    for launch, edits in changes:
        editor = _Editor(launch)
        for edit in merge_edits(edits):
            if edit.where == PATH:
                editor.change_script(edit.name)
            elif edit.where in (SCRIPT, LAUNCHER):
                editor.apply(edit)
        spans.extend(editor.finish())
        notes.extend(editor.notes)
    for start, end, new in sorted(spans, key=lambda span: (span[0], span[1]), reverse=True):
        text = text[:start] + new + text[end:]
    return Applied(text, notes)


class _Editor:
    def __init__(self, launch: Launch) -> None:
        self.launch, self.text, self.words = launch, launch.text, launch.words
        self.spans: list[tuple[int, int, str]] = []
        self.added: dict[str, list[str]] = {SCRIPT: [], LAUNCHER: []}
        self.notes: list[Text] = []
        inline = sum(option.inline for option in launch.options.items)
        valued = sum(bool(option.values) for option in launch.options.items)
        self.equals = inline * 2 > valued

    def apply(self, edit: Edit) -> None:
        options = self.launch.options if edit.where == SCRIPT else self.launch.launcher_options
        if edit.where == LAUNCHER and self.launch.launcher != "accelerate":
            self.notes.append(NOT_ACCELERATE.format(edit))
            return
        option = options.get(edit.name)
        if edit.remove:
            for found in _all(options, edit.name):
                self.remove(found)
        elif option is None:
            self.added[edit.where].append(self.spell(edit))
        elif edit.value is None and not option.values:
            return
        elif any(word.derived for word in option.words) or len(option.values) != 1 or edit.value is None:
            self.replace_whole(edit, option)
        else:
            self.replace_value(edit.value, option)

    def change_script(self, name: str) -> None:
        word = self.words[self.launch.script_at]
        raw = self.text[word.start : word.end]
        file = word.text.replace("\\", "/").rsplit("/", 1)[-1]
        if word.derived or file not in raw:
            self.notes.append(DERIVED_SCRIPT.format(name))
            return
        at = word.start + raw.rindex(file)
        self.spans.append((at, at + len(file), name))

    def spell(self, edit: Edit) -> str:
        if edit.value is None:
            return f"--{edit.name}"
        glue = "=" if self.equals and edit.where == SCRIPT else " "
        return f"--{edit.name}{glue}{_quote(edit.value)}"

    def remove(self, option: Option) -> None:
        if any(word.derived for word in option.words):
            self.notes.append(DERIVED.format(option.typed))
            return
        first = self.words.index(option.words[0])
        start = self.words[first - 1].end if first else option.words[0].start
        self.spans.append((start, option.words[-1].end, ""))

    def replace_whole(self, edit: Edit, option: Option) -> None:
        if any(word.derived for word in option.words):
            self.added[edit.where].append(self.spell(edit))
        else:
            self.spans.append((option.words[0].start, option.words[-1].end, self.spell(edit)))

    def replace_value(self, value: str, option: Option) -> None:
        word = option.words[-1]
        raw = self.text[word.start : word.end]
        start = raw.index("=") + 1 if option.inline and "=" in raw else 0
        old = raw[start:]
        quoted = len(old) > 1 and old[0] == old[-1] and old[0] in "'\""
        new = old[0] + value + old[0] if quoted else _quote(value)
        self.spans.append((word.start + start, word.end, new))

    def finish(self) -> list[tuple[int, int, str]]:
        launch, words = self.launch, self.words
        if self.added[LAUNCHER] and words:
            anchor = words[max(launch.script_at - 1, launch.launcher_at - 1)]
            broken = launch.script_at < len(words) and "\n" in self.gap(anchor, words[launch.script_at])
            glue = self.gap(anchor, words[launch.script_at]) if broken else " "
            self.insert(anchor.end, glue, self.added[LAUNCHER])
        if self.added[SCRIPT] and words:
            self.insert(words[-1].end, self.separator(), self.added[SCRIPT])
        return self.spans

    def insert(self, at: int, glue: str, flags: list[str]) -> None:
        new = "".join(glue + flag for flag in flags)
        for number, (start, end, text) in enumerate(self.spans):
            if end == at:  # the word before was replaced or removed: stay behind it
                self.spans[number] = (start, end, text + new)
                return
        self.spans.append((at, at, new))

    def separator(self) -> str:
        """How the command parts its arguments: the last gap with a line break, else a blank."""
        for first, second in zip(reversed(self.words[:-1]), reversed(self.words[1:]), strict=True):
            gap = self.gap(first, second)
            if "\n" in gap:
                return gap
        return " "

    def gap(self, first: Word, second: Word) -> str:
        text = self.text[first.end : second.start]
        return text if text.strip("\\^` \t\r\n") == "" and text else " "


NOT_ACCELERATE = Text(
    "{0} is an option of accelerate launch; start the script with it",
    "{0} 是 accelerate launch 的参数；请改用 accelerate launch 启动",
)
DERIVED_SCRIPT = Text("the script comes out of a variable; let it name {0}", "脚本来自变量，请把它改为 {0}")
DERIVED = Text("{0} comes out of a variable; take it out there", "{0} 来自变量，请在变量定义处删除")


def _all(options: Options, name: str) -> list[Option]:
    return [option for option in options.items if option.name == name]


def _quote(value: str) -> str:
    return value if re.fullmatch(r"[\w@%+=:,./${}-]+", value) else shlex.quote(value)


def unified_diff(old: str, new: str, *, name: str) -> str:
    """A unified diff; a command on one line is shown with one flag per line."""
    if "\n" not in old.strip():
        old, new = spread(old), spread(new)
    old_lines, new_lines = _lines(old), _lines(new)
    lines = difflib.unified_diff(old_lines, new_lines, name, f"{name} (improved)", lineterm="", n=2)
    return "\n".join(lines)


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").rstrip("\n").split("\n")


def spread(command: str) -> str:
    """A command on one line with a line break before each flag."""
    return re.sub(r"[ \t]+(?=--?[A-Za-z])", " \\\\\n  ", command.strip())
