"""The live audit on the screen and on disk.

The screen shows the rows that say something (enabled, recommended, inert, refused) and names the others by id; the
files hold all rows. Without a terminal the table is plain text.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optim_patches.audit.live_view import (
    DISABLED,
    ENABLED,
    INERT,
    NOT_APPLICABLE,
    RECOMMENDED,
    REFUSED,
    STATES,
    LiveRow,
)
from optim_patches.audit.text import Text, same

if TYPE_CHECKING:
    from optim_patches.audit.live import AuditReport

COLUMNS = (
    Text("id", "编号"),
    Text("check", "检查项"),
    Text("state", "状态"),
    Text("requested by", "来源"),
    Text("sites", "位置数"),
    Text("exercised", "已执行"),
    Text("evidence", "证据"),
)
LOOK = Text("Look back at the run", "训练回顾")
DIFFERENCES = Text("Ranks differ", "各 rank 存在差异")
TITLE = Text("Optimization audit after {step} steps", "第 {step} 步后的优化审计")
STYLES = {ENABLED: "green", RECOMMENDED: "yellow", INERT: "bold red", REFUSED: "bold red"}
SHOWN = (ENABLED, RECOMMENDED, INERT, REFUSED)
YES_NO = {True: Text("yes", "是"), False: Text("no", "否"), None: same("")}
EVIDENCE_WIDTH = 110


def title_of(row_id: str) -> Text:
    """The check's name in the static audit's registry; patches outside of it go by their own name."""
    from optim_patches.audit.checks import registry

    return next((check.title for check in registry() if check.id == row_id), same(row_id))


def cells(row: LiveRow, *, lang: str) -> list[str]:
    """A row as texts, in the order of ``COLUMNS``."""
    return [
        row.id,
        title_of(row.id)[lang],
        STATES[row.state][lang],
        row.requested[lang],
        "" if row.sites is None else str(row.sites),
        YES_NO[row.exercised][lang],
        row.evidence[lang],
    ]


def show(report: AuditReport, *, lang: str) -> None:
    """Print the table, in colour on a terminal."""
    title = TITLE.format(step=report.step)[lang]
    rows = [row for row in report.rows if row.state in SHOWN]
    tail = [_ids(report, state, lang=lang) for state in (DISABLED, NOT_APPLICABLE)]
    tail += [f"{DIFFERENCES[lang]}: {text[lang]}" for text in report.differences]
    with _no_bar():
        if sys.stdout.isatty():
            _show_rich(title, rows, tail, lang=lang)
        else:
            _write([title, *_plain(rows, lang=lang), *filter(None, tail)])


def show_look(report: AuditReport, *, lang: str) -> None:
    """Print the look back, and what differs between processes by now."""
    if report.look is None:
        return
    lines = [LOOK[lang], *(f"  {text[lang]}" for text in report.look.lines())]
    lines += [f"  {DIFFERENCES[lang]}: {text[lang]}" for text in report.differences]
    with _no_bar():
        _write(lines)


def _no_bar() -> AbstractContextManager[None]:
    """Takes progress bars away while something else is printed."""
    from tqdm import tqdm

    return tqdm.external_write_mode(file=sys.stdout)


def _write(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _ids(report: AuditReport, state: str, *, lang: str) -> str:
    ids = [row.id for row in report.rows if row.state == state]
    return f"{STATES[state][lang]}: {' '.join(ids)}" if ids else ""


def _show_rich(title: str, rows: list[LiveRow], tail: list[str], *, lang: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column[lang], overflow="fold", no_wrap=index == 0, ratio=3 if index == 6 else None)
    for row in rows:
        table.add_row(*cells(row, lang=lang), style=STYLES.get(row.state, ""))
    console = Console()
    console.print(table)
    for line in filter(None, tail):
        console.print(line, style="dim", highlight=False)


def _plain(rows: list[LiveRow], *, lang: str) -> list[str]:
    table = [[column[lang] for column in COLUMNS], *(cells(row, lang=lang) for row in rows)]
    for line in table:
        line[-1] = line[-1] if len(line[-1]) <= EVIDENCE_WIDTH else line[-1][: EVIDENCE_WIDTH - 3] + "..."
    widths = [max(_width(line[index]) for line in table) for index in range(len(COLUMNS) - 1)]
    return [
        "  ".join([*(text + " " * (width - _width(text)) for text, width in zip(line, widths, strict=False)), line[-1]])
        for line in table
    ]


def _width(text: str) -> int:
    """Columns on the screen: Chinese characters take two."""
    return sum(2 if ord(char) > 0x2E7F else 1 for char in text)


def write(report: AuditReport, folder: Path, *, lang: str) -> list[Path]:
    """Write ``audit.json`` and ``audit.md``, each in one move."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "audit.json": json.dumps(as_json(report), ensure_ascii=False, indent=2, default=str) + "\n",
        "audit.md": as_markdown(report, lang=lang),
    }
    paths = []
    for name, content in files.items():
        path, draft = folder / name, folder / f".{name}.part"
        draft.write_text(content, encoding="utf-8")
        draft.replace(path)
        paths.append(path)
    return paths


def as_json(report: AuditReport) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "step": report.step,
        "mode": report.mode,
        "final": report.final,
        "totals": report.totals(),
        "differences": [text.as_dict() for text in report.differences],
        "look": None if report.look is None else report.look.as_dict(),
        "rows": [row.as_dict(title_of(row.id)) for row in report.rows],
    }


def as_markdown(report: AuditReport, *, lang: str) -> str:
    """The report as a Markdown table."""
    lines = [f"# {TITLE.format(step=report.step)[lang]}", ""]
    lines += [f"* {STATES[state][lang]}: {number}" for state, number in sorted(report.totals().items())]
    lines += ["", "| " + " | ".join(column[lang] for column in COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in report.rows:
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells(row, lang=lang)) + " |")
    if report.differences:
        lines += ["", f"## {DIFFERENCES[lang]}", "", *(f"* {text[lang]}" for text in report.differences)]
    if report.look is not None:
        lines += ["", f"## {LOOK[lang]}", "", *(f"* {text[lang]}" for text in report.look.lines())]
    return "\n".join(lines) + "\n"
