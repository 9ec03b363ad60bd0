"""The reports on a terminal: coloured tables where there is one, the same text without colour elsewhere."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO

from optim_patches.audit import report as parts
from optim_patches.audit.checks import PRIORITIES
from optim_patches.audit.report import Report
from optim_patches.audit.rules import SEVERITY_TEXT
from optim_patches.audit.text import Text

_SEVERITY = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_PRIORITY = {"P0": "bold red", "P1": "yellow", "P2": "cyan"}


def to_terminal(
    reports: Sequence[Report],
    *,
    lang: str = "en",
    problems: Sequence[tuple[str, Text]] = (),
    stream: IO[str] | None = None,
    width: int | None = None,
) -> str:
    """Render reports. With a ``stream`` the text goes there (in colour on a terminal); it is returned as well."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        text = parts.to_markdown(reports, lang, problems)
        if stream is not None:
            stream.write(text)
        return text
    plain = io.StringIO()
    wide = width or (None if stream is not None and stream.isatty() else 120)
    consoles = [Console(file=plain, width=width or 120, highlight=False)]
    if stream is not None:
        consoles.append(Console(file=stream, width=wide, highlight=False))
    for console in consoles:
        for report in reports:
            _one(console, report, lang)
        for name, text in problems:
            _say(console, f"{name}: {text[lang]}", "yellow")
    return plain.getvalue()


def _say(console, text: str, style: str = "") -> None:
    from rich.text import Text as Styled

    console.print(Styled(text, style=style))


def _one(console, report: Report, lang: str) -> None:
    from rich.rule import Rule

    console.print(Rule(f"{parts.TITLE[lang]} - {report.source}".replace("[", "(")))
    for label, value in parts.basic_information(report.facts, report.triggers):
        _say(console, f"{label[lang]}: {value[lang]}")
    console.print(_scores(report, lang))
    if report.findings:
        _say(console, f"\n{parts.FINDINGS[lang]}", "bold")
    for finding in report.findings:
        changes = "; ".join(edit.text[lang].replace("`", "") for edit in finding.edits)
        tail = f"  -> {changes}" if changes else ""
        line = f"{SEVERITY_TEXT[finding.severity][lang]} {finding.rule.id}: {finding.text[lang]}{tail}"
        _say(console, line, _SEVERITY[finding.severity])
    _advice(console, report, lang)
    _say(console, f"\n{parts.CHANGES[lang]}", "bold")
    for edit in report.actions:
        _say(console, f"$ {edit.name}" if edit.where == "shell" else str(edit), "cyan")
    for line in report.diff.splitlines():
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else ""
        _say(console, line, style)
    for note in report.notes:
        _say(console, note[lang], "yellow")
    if not (report.diff or report.actions or report.notes):
        _say(console, Text("Nothing to change.", "无需修改。")[lang], "green")
    _say(console, "")


def _scores(report: Report, lang: str):
    from rich.table import Table

    table = Table(title=parts.OVERVIEW[lang], title_justify="left", expand=False)
    for head in parts.HEAD:
        table.add_column(head[lang], overflow="fold")
    for name, score, on, wanted in parts.overview(report.rows):
        table.add_row(name[lang], score, on[lang], wanted[lang])
    got, total = report.total
    table.add_row(parts.TOTAL[lang], f"{got}/{total}", "", "")
    return table


def _advice(console, report: Report, lang: str) -> None:
    _say(console, f"\n{parts.ADVICE[lang]}", "bold")
    for priority in PRIORITIES:
        rows = [row for row in report.advice if row.priority == priority]
        _say(console, parts.PRIORITY_TEXT[priority][lang], _PRIORITY[priority])
        for row in rows:
            _say(console, "  " + parts.advice_line(row, lang).replace("**", "").replace("`", ""))
        if not rows:
            _say(console, "  " + parts.NONE[lang], "dim")
