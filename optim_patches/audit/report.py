"""One report per launch, and its forms: Markdown, JSON, terminal.

The Markdown follows the checklist's layout: basic information, the score table by category, findings, advice by
priority, and the launch command as a diff. The JSON carries every text in both languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from optim_patches.audit.checks import (
    CATEGORIES,
    DENOMINATORS,
    PRIORITIES,
    STATE_TEXT,
    Row,
    State,
    advice,
    evaluate,
    scores,
)
from optim_patches.audit.edits import CONFIG, SHELL, Edit, apply_edits, merge_edits, unified_diff
from optim_patches.audit.facts import Facts
from optim_patches.audit.launch import Launch
from optim_patches.audit.project import Project
from optim_patches.audit.rules import SEVERITY_TEXT, Finding, findings
from optim_patches.audit.text import Text, join, same

T = Text
TITLE = T("VideoX-Fun Training Optimization Audit Report", "VideoX-Fun 训练优化审计报告")
BASIC = T("Basic information", "基本信息")
OVERVIEW = T("Audit overview", "审计结果总览")
FINDINGS = T("Contradictions and problems", "矛盾与问题")
ADVICE = T("Priority advice (by impact)", "优先优化建议（按影响排序）")
PRIORITY_TEXT = {
    "P0": T("P0 - do now (large gain, no risk)", "P0 - 立即执行（显著收益，零风险）"),
    "P1": T("P1 - strongly recommended (clear gain, low risk)", "P1 - 强烈推荐（明显收益，低风险）"),
    "P2": T("P2 - worth trying (medium gain, test it)", "P2 - 建议尝试（中等收益，需测试）"),
}
CHANGES = T("Recommended configuration changes", "推荐配置修改")
DETAILS = T("All rows", "检查明细")
NONE = T("none", "无")
TOTAL = T("Total", "总计")
HEAD = (T("Category", "类别"), T("Score", "得分"), T("Enabled", "已启用"), T("Recommended", "建议启用"))
UNKNOWN = T("unknown", "未知")


@dataclass
class Report:
    """The audit of one launch.

    Attributes:
        included: priorities whose changes went into the diff.
        diff: unified diff of the file or command, empty when nothing changes.
        fixed: the whole text with the changes made.
        actions: commands to run before the launch, and keys to set in the DeepSpeed file.
        notes: changes that could not be made in the text.
    """

    facts: Facts
    rows: list[Row]
    findings: list[Finding]
    included: tuple[str, ...] = ("P0", "P1")
    diff: str = ""
    fixed: str = ""
    actions: list[Edit] = field(default_factory=list)
    notes: list[Text] = field(default_factory=list)
    triggers: list[Text] = field(default_factory=list)

    @property
    def launch(self) -> Launch:
        return self.facts.launch

    @property
    def source(self) -> str:
        """``run.sh:12`` or ``command``."""
        if not self.launch.path:
            return "command"
        return f"{self.launch.path}:{self.launch.line}" if self.launch.launcher else self.launch.path

    @property
    def advice(self) -> list[Row]:
        return advice(self.rows)

    @property
    def scores(self) -> dict[str, int]:
        return scores(self.rows)

    @property
    def total(self) -> tuple[int, int]:
        """Enabled rows and all rows."""
        return sum(self.scores.values()), sum(DENOMINATORS.values())

    def worst(self) -> str:
        """``error``, ``P0``, ``P1``, ``P2`` or an empty string: the most urgent thing in the report."""
        if any(finding.severity == "error" for finding in self.findings):
            return "error"
        return next(iter(sorted(row.priority for row in self.advice)), "")


def make_report(facts: Facts, project: Project, *, include: Sequence[str] = ("P0", "P1")) -> Report:
    """Evaluate one launch and prepare its changes."""
    report = Report(facts, evaluate(facts), findings(facts, project), tuple(include), triggers=project.triggers)
    edits = wanted_edits(report)
    report.actions = [edit for edit in edits if edit.where in (SHELL, CONFIG)]
    if report.launch.launcher:
        applied = apply_edits(report.launch.text, [(report.launch, edits)])
        report.fixed, report.notes = applied.text, applied.notes
        if applied.text != report.launch.text:
            report.diff = unified_diff(report.launch.text, applied.text, name=report.launch.path or "command")
    return report


def wanted_edits(report: Report) -> list[Edit]:
    """Edits of findings first, then those of the included advice.

    That launcher and script shall agree comes last: another finding may say on which precision.
    """
    loud = [finding for finding in report.findings if finding.severity != "info"]
    agree = [edit for finding in loud if finding.rule.id == "precision-mismatch" for edit in finding.edits]
    edits = [edit for finding in loud if finding.rule.id != "precision-mismatch" for edit in finding.edits]
    edits += [edit for row in report.advice if row.priority in report.included for edit in row.edits]
    return merge_edits([*edits, *agree])


def combined_fix(reports: Iterable[Report]) -> dict[str, str]:
    """The improved text of each input: the changes of all its launches together, by path (``""``: a command)."""
    grouped: dict[str, list[Report]] = {}
    for report in reports:
        if report.launch.launcher:
            grouped.setdefault(report.launch.path, []).append(report)
    return {
        path: apply_edits(group[0].launch.text, [(r.launch, wanted_edits(r)) for r in group]).text
        for path, group in grouped.items()
    }


# -- the parts ------------------------------------------------------------------------------------------------------
MODES = {
    "normal": T("T2V", "T2V"),
    "inpaint": T("I2V", "I2V"),
    "i2v": T("I2V", "I2V"),
    "ti2v": T("T2V and I2V", "T2V 与 I2V"),
    "qwen_image_edit": T("image editing", "图像编辑"),
}
TASKS = {
    "control": T("control", "Control"),
    "reward": T("reward", "Reward"),
    "distill": T("distillation", "Distillation"),
    "s2v": T("speech to video", "S2V"),
    "animate": T("animation", "Animate"),
    "avatar": T("avatar", "Avatar"),
    "edit": T("editing", "编辑"),
}


def basic_information(facts: Facts, triggers: Sequence[Text] = ()) -> list[tuple[Text, Text]]:
    """Label and value of each line."""
    size = f"{facts.params:g}B" if facts.params else ""
    size_text = same(size) if facts.size_known or not size else T(f"{size}, assumed", f"{size}，推测")
    model = same(facts.model_name or "-") + (T(" (", "（") + size_text + T(")", "）") if size else same(""))
    family = same(facts.family.name) if facts.family else UNKNOWN
    lines = [
        (T("Model", "模型"), model),
        (T("Model family", "模型系列"), family),
        (T("Train mode", "训练模式"), _mode(facts)),
        (T("Method", "微调方式"), _method(facts)),
        (T("Hardware", "硬件"), _hardware(facts)),
        (T("Video", "视频参数"), _video(facts)),
        (T("Data", "数据规模"), _data(facts)),
        (T("Distribution", "分布式配置"), _distribution(facts)),
    ]
    if triggers:
        lines.append((T("Recognized by", "识别依据"), join(triggers, separator="; ")))
    return lines


def _mode(f: Facts) -> Text:
    if f.launch.kind == "config":
        return same("-")
    if f.still and f.mode == "normal":
        return T("normal (text to image)", "normal（文生图）")
    if f.mode.startswith("control") or f.task == "control":
        shown = f.mode if f.mode.startswith("control") else "control"
        return T(f"{shown} (control)", f"{shown}（控制生成）")
    meaning = TASKS.get(f.task) if f.task in ("s2v", "animate", "avatar") else MODES.get(f.mode)
    if meaning is None:
        return same(f.mode)
    return T(f"{f.mode} ({meaning.en})", f"{f.mode}（{meaning.zh}）")


def _method(f: Facts) -> Text:
    if f.launch.kind == "config":
        return T("configuration file only", "仅配置文件")
    if f.launch.kind == "infer":
        return T("inference", "推理")
    base = T("LoRA", "LoRA") if f.lora else T("full fine-tuning", "全参微调")
    task = TASKS.get(f.task)
    return base if task is None else task + same(" ") + base


def _hardware(f: Facts) -> Text:
    count = f.world
    if f.cpu:
        return same(f"CPU x {count or 1}")
    if f.gpu is None:
        return UNKNOWN if count is None else T(f"unknown x {count}", f"未知 x {count}")
    memory = T(f" ({f.gpu.memory:g} GB)", f"（{f.gpu.memory:g}GB）") if f.gpu.memory else same("")
    return same(f"{f.gpu.name} x {count or 1}") + memory


def _video(f: Facts) -> Text:
    if f.launch.kind == "config":
        return same("-")
    if f.still:
        return T(f"{f.size} pixels, still images", f"{f.size}P，图片")
    return T(f"{f.size} pixels, {f.frames} frames", f"{f.size}P，{f.frames} 帧")


def _data(f: Facts) -> Text:
    if f.data is None or f.data.error is not None:
        return T("not read", "未读取")
    text = T(f"{f.data.rows} rows: {f.data.videos} videos, {f.data.images} images",
             f"{f.data.rows} 行：视频 {f.data.videos}，图片 {f.data.images}")  # fmt: skip
    if f.data.sizes:
        shown = sorted({(w * h, f"{w}x{h}") for w, h, _ in f.data.sizes})
        text = text + same(f", {shown[0][1]}" + (f" - {shown[-1][1]}" if len(shown) > 1 else ""))
    if f.data.rates:
        text = text + same(f", {min(f.data.rates):g}-{max(f.data.rates):g} fps")
    return text


def _distribution(f: Facts) -> Text:
    d = f.distribution
    if d.kind == "deepspeed":
        offload = f" + {d.offload} offload" if d.offload else ""
        name = same(f"DeepSpeed ZeRO-{'?' if d.stage is None else d.stage}{offload}")
    elif d.kind == "fsdp":
        name = same(f"FSDP{'2' if d.fsdp_version == 2 else ''} {d.fsdp_strategy}".strip())
    else:
        name = same(f.launch.launcher or "-")
    if d.machines > 1:
        name = name + T(f", {d.machines} nodes", f"，{d.machines} 机")
    return name


def overview(rows: Sequence[Row]) -> list[tuple[Text, str, Text, Text]]:
    """Lines of the score table: category, score, enabled rows, recommended rows."""
    lines = []
    counts = scores(rows)
    for letter, name in CATEGORIES.items():
        mine = [row for row in rows if row.check.category == letter]
        on = join([row.check.title for row in mine if row.state is State.ENABLED])
        wanted = join([row.check.title for row in mine if row.state is State.RECOMMENDED])
        lines.append((name, f"{counts[letter]}/{DENOMINATORS[letter]}", on, wanted))
    return lines


def advice_line(row: Row, lang: str) -> str:
    """One entry of the advice: what, why, how, and what it brings."""
    stop = "。" if lang == "zh" else ". "
    colon = "：" if lang == "zh" else ": "
    effect = f"{row.check.effect[lang]} [{row.check.source_text[lang]}]"
    text = f"**{row.id} {row.check.title[lang]}**{colon}{row.reason[lang]}{stop}{effect}{stop}".rstrip()
    shown = "; ".join(edit.text[lang] for edit in row.edits)
    return f"{text} {shown}".rstrip()


# -- Markdown -------------------------------------------------------------------------------------------------------
def to_markdown(reports: Sequence[Report], lang: str = "en", problems: Sequence[tuple[str, Text]] = ()) -> str:
    """All reports as one Markdown text."""
    parts = [_one_markdown(report, lang, number, len(reports)) for number, report in enumerate(reports, 1)]
    if problems:
        heading = T("What could not be read", "未能读取的输入")[lang]
        parts.append("\n".join([f"## {heading}", "", *(f"- `{name}`: {text[lang]}" for name, text in problems)]))
    return "\n\n".join(parts).rstrip() + "\n"


def _one_markdown(report: Report, lang: str, number: int, count: int) -> str:
    lines = [f"# {TITLE[lang]}" + (f" ({number}/{count})" if count > 1 else ""), ""]
    lines += [f"`{report.source}` · `{report.launch.script or '-'}`", ""]
    colon = "：" if lang == "zh" else ": "
    lines += [f"## {BASIC[lang]}", ""]
    basics = basic_information(report.facts, report.triggers)
    lines += [f"- {label[lang]}{colon}{value[lang]}" for label, value in basics]
    lines += ["", f"## {OVERVIEW[lang]}", "", "| " + " | ".join(head[lang] for head in HEAD) + " |"]
    lines += ["|------|------|--------|----------|"]
    for name, score, on, wanted in overview(report.rows):
        lines.append(f"| {name[lang]} | {score} | {_cell(on[lang])} | {_cell(wanted[lang])} |")
    got, all_rows = report.total
    lines += [f"| **{TOTAL[lang]}** | **{got}/{all_rows}** | | |", "", f"## {FINDINGS[lang]}", ""]
    lines += [_finding_line(finding, lang) for finding in report.findings] or [NONE[lang]]
    lines += ["", f"## {ADVICE[lang]}", ""]
    for priority in PRIORITIES:
        rows = [row for row in report.advice if row.priority == priority]
        lines += [f"### {PRIORITY_TEXT[priority][lang]}", ""]
        lines += [f"{index}. {advice_line(row, lang)}" for index, row in enumerate(rows, 1)] or [NONE[lang]]
        lines.append("")
    lines += [f"## {CHANGES[lang]}", "", *_changes(report, lang), "", f"## {DETAILS[lang]}", ""]
    lines += ["| id | " + T("Check", "检查项")[lang] + " | " + T("State",
                                                                 "状态")[lang] + " | " + T("Why", "说明")[lang] + " |",
              "|---|---|---|---|"]  # fmt: skip
    for row in report.rows:
        state = STATE_TEXT[row.state][lang]
        lines.append(f"| {row.id} | {row.check.title[lang]} | {state} | {_cell(row.reason[lang])} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ") or "-"


def _finding_line(finding: Finding, lang: str) -> str:
    severity = SEVERITY_TEXT[finding.severity][lang]
    edits = "; ".join(edit.text[lang] for edit in finding.edits)
    return f"- **{severity}** `{finding.rule.id}`: {finding.text[lang]}" + (f" → {edits}" if edits else "")


def _changes(report: Report, lang: str) -> list[str]:
    lines: list[str] = []
    shell = [edit for edit in report.actions if edit.where == SHELL]
    settings = [edit for edit in report.actions if edit.where == CONFIG]
    if shell:
        lines += [T("Before the launch:",
                    "启动前执行：")[lang], "", "```bash", *(edit.name for edit in shell), "```", ""]
    if settings:
        lines += [T("In the DeepSpeed file:", "在 DeepSpeed 配置文件中：")[lang], ""]
        lines += [*(f"- `{edit}`" for edit in settings), ""]
    if report.diff:
        lines += ["```diff", report.diff, "```"]
    lines += [f"- {note[lang]}" for note in report.notes]
    return lines or [T("Nothing to change.", "无需修改。")[lang]]


# -- JSON -----------------------------------------------------------------------------------------------------------
def to_json(reports: Sequence[Report], problems: Sequence[tuple[str, Text]] = ()) -> dict[str, Any]:
    """All reports as plain data."""
    return {
        "version": 1,
        "reports": [report_data(report) for report in reports],
        "problems": [{"input": name, "text": text.as_dict()} for name, text in problems],
    }


def report_data(report: Report) -> dict[str, Any]:
    """One report as plain data."""
    f = report.facts
    return {
        "source": report.source,
        "script": report.launch.script,
        "script_id": f.script_id,
        "family": f.family.name if f.family else None,
        "params_b": f.params,
        "train_mode": f.mode,
        "method": "lora" if f.lora else "full" if f.full else f.launch.kind,
        "task": f.task,
        "target": f.target,
        "basic": [{"label": label.as_dict(), "value": value.as_dict()} for label, value in basic_information(f)],
        "score": {
            "categories": {letter: [report.scores[letter], DENOMINATORS[letter]] for letter in CATEGORIES},
            "total": list(report.total),
        },
        "rows": [row_data(row) for row in report.rows],
        "findings": [finding_data(finding) for finding in report.findings],
        "advice": [row.id for row in report.advice],
        "actions": [str(edit) for edit in report.actions],
        "notes": [note.as_dict() for note in report.notes],
        "diff": report.diff,
    }


def row_data(row: Row) -> dict[str, Any]:
    """One row as plain data."""
    return {
        "id": row.id,
        "title": row.check.title.as_dict(),
        "state": row.state.value,
        "requested": row.requested,
        "reason": row.reason.as_dict(),
        "priority": row.priority,
        "changes": [edit.as_dict() for edit in row.edits],
        "effect": row.check.effect.as_dict(),
        "source": row.check.source,
        "live": row.check.live.as_dict(),
    }


def finding_data(finding: Finding) -> dict[str, Any]:
    """One finding as plain data."""
    return {
        "rule": finding.rule.id,
        "severity": finding.severity,
        "title": finding.rule.title.as_dict(),
        "text": finding.text.as_dict(),
        "changes": [edit.as_dict() for edit in finding.edits],
    }
