"""A row of the doctor's report, and how the report is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from optim_patches.audit.text import Text, same

OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"
STATES = {
    OK: Text("ok", "正常"),
    INFO: Text("info", "提示"),
    WARNING: Text("warning", "警告"),
    ERROR: Text("error", "错误"),
}
STYLES = {OK: "green", INFO: "cyan", WARNING: "yellow", ERROR: "bold red"}
GROUPS = {
    "machine": Text("Machine", "机器"),
    "packages": Text("Packages", "软件包"),
    "kernels": Text("Kernels", "内核"),
    "storage": Text("Storage", "存储"),
    "inputs": Text("Model and data", "模型与数据"),
}
NO_FIX = same("")
DO = Text("do", "建议")
TITLE = Text(
    "videox-doctor: {0} ok, {1} info, {2} warnings, {3} errors", "videox-doctor：正常 {0}，提示 {1}，警告 {2}，错误 {3}"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        group: key of ``GROUPS``.
        id: short stable name.
        value: what was found; ``fix``: what to do about it, empty when nothing.
        source: where a claim about a version is from.
    """

    group: str
    id: str
    state: str
    title: Text
    value: Text
    fix: Text = NO_FIX
    source: str = ""

    def as_dict(self) -> dict[str, object]:
        return {
            "group": self.group,
            "id": self.id,
            "state": self.state,
            "title": self.title.as_dict(),
            "value": self.value.as_dict(),
            "fix": self.fix.as_dict(),
            "source": self.source,
        }


def worst(findings: Sequence[Finding]) -> str:
    """The most severe state."""
    order = (OK, INFO, WARNING, ERROR)
    return max((finding.state for finding in findings), key=order.index, default=OK)


def to_json(findings: Sequence[Finding]) -> str:
    """The report as JSON."""
    data = {"version": 1, "worst": worst(findings), "findings": [finding.as_dict() for finding in findings]}
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


def to_terminal(findings: Sequence[Finding], *, lang: str, stream: IO[str] | None = None) -> None:
    """The report as text, coloured on a terminal."""
    stream = stream or sys.stdout
    styled = _console(stream)
    counts = [sum(finding.state == state for finding in findings) for state in (OK, INFO, WARNING, ERROR)]
    for group, title in GROUPS.items():
        rows = [finding for finding in findings if finding.group == group]
        if rows:
            _say(stream, styled, title[lang], "bold")
        for finding in rows:
            mark = STATES[finding.state][lang]
            _say(stream, styled, f"  [{mark}] {finding.title[lang]}: {finding.value[lang]}", STYLES[finding.state])
            if finding.fix[lang]:
                _say(stream, styled, f"      {DO[lang]}: {finding.fix[lang]}", "")
            if finding.source:
                _say(stream, styled, f"      {finding.source}", "dim")
    _say(stream, styled, TITLE.format(*counts)[lang], STYLES[worst(findings)])


def _console(stream: IO[str]):
    """A rich console on a terminal, else ``None``."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(file=stream, highlight=False)


def _say(stream: IO[str], console, text: str, style: str) -> None:
    if console is None:
        stream.write(text + "\n")
        return
    from rich.text import Text as Styled

    console.print(Styled(text, style=style))
