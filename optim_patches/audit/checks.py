"""The registry: 62 checks in nine groups, shared by the static and the live audit.

A check answers three questions about a run: does it apply, is it on, should it be. The static audit asks them of
:class:`~optim_patches.audit.facts.Facts` and gets one of four states; the live audit reads the same row's evidence off
the running objects and has a fifth, ``inert``: asked for and without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from importlib import import_module

from optim_patches.audit.edits import Edit
from optim_patches.audit.facts import Facts
from optim_patches.audit.text import Text


class State(str, Enum):
    """What a row says."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    RECOMMENDED = "recommended"
    NOT_APPLICABLE = "not applicable"
    INERT = "inert"


STATE_TEXT: dict[State, Text] = {
    State.ENABLED: Text("enabled", "已启用"),
    State.DISABLED: Text("disabled", "未启用"),
    State.RECOMMENDED: Text("recommended", "建议启用"),
    State.NOT_APPLICABLE: Text("not applicable", "不适用"),
    State.INERT: Text("inert", "未生效"),
}

CATEGORIES: dict[str, Text] = {
    "A": Text("A. Mixed precision and quantization", "A. 混合精度与量化"),
    "B": Text("B. Activation recomputation", "B. 激活重计算"),
    "C": Text("C. Offloading and low memory", "C. 模型卸载与低显存"),
    "D": Text("D. Distributed memory", "D. 分布式显存优化"),
    "E": Text("E. LoRA", "E. LoRA 配置"),
    "F": Text("F. Attention", "F. 注意力优化"),
    "G": Text("G. Data pipeline", "G. 数据管道"),
    "H": Text("H. Training strategy", "H. 训练策略"),
    "I": Text("I. Deep optimizations", "I. 深度优化机会"),
}
#: Rows per category.
DENOMINATORS = {"A": 6, "B": 3, "C": 3, "D": 5, "E": 5, "F": 6, "G": 11, "H": 10, "I": 13}
PRIORITIES = ("P0", "P1", "P2")


@dataclass(frozen=True)
class Advice:
    """Why a check should be on, and how to turn it on."""

    reason: Text
    edits: tuple[Edit, ...] = ()
    priority: str = ""


Question = Callable[[Facts], "Text | None"]


def _always(facts: Facts) -> Text | None:
    return None


@dataclass(frozen=True)
class Check:
    """One row of the audit.

    Attributes:
        id: ``A1`` ... ``I13``.
        flags: flags that drive it, without dashes.
        live: what the live audit reads, never the flag itself.
        effect: what turning it on brings, and ``source`` where that is said.
        enabled: what shows that it is on, or None.
        recommend: advice when it should be on, or None.
        blocked: why it does not apply, or None.
        priority: of the advice, unless the advice names one.
        impact: order within a priority, larger first.
        kinds: launches it is asked of: ``train``, ``infer``, ``config``.
        off: the reason shown when it is merely off.
        follows: the row whose change turns this one on too.
    """

    id: str
    title: Text
    flags: tuple[str, ...]
    live: Text
    effect: Text
    source: str
    enabled: Question
    recommend: Callable[[Facts], Advice | None]
    blocked: Question = _always
    priority: str = "P1"
    impact: int = 50
    kinds: tuple[str, ...] = ("train",)
    off: Text = field(default_factory=lambda: Text("not set", "未设置"))
    follows: str = ""

    @property
    def category(self) -> str:
        return self.id[0]

    @property
    def source_text(self) -> Text:
        return Text(self.source, self.source.replace("checklist", "优化清单"))


@dataclass(frozen=True)
class Row:
    """A check and its answer for one launch."""

    check: Check
    state: State
    reason: Text
    priority: str = ""
    edits: tuple[Edit, ...] = ()
    requested: bool = False

    @property
    def id(self) -> str:
        return self.check.id


@lru_cache(maxsize=1)
def registry() -> tuple[Check, ...]:
    """All 62 checks in order."""
    checks: list[Check] = []
    for letter in CATEGORIES:
        checks.extend(import_module(f"optim_patches.audit.rows.{letter.lower()}").ROWS)
    return tuple(checks)


def get_check(check_id: str) -> Check:
    """One check by its id."""
    for check in registry():
        if check.id == check_id:
            return check
    raise ValueError(f"No check is named {check_id!r}; there are A1 to I13.")


_OTHER_KIND = {
    "infer": Text("inference only run", "推理任务，训练项不适用"),
    "config": Text("no launch command in this input", "输入中没有启动命令"),
    "train": Text("for inference only", "仅用于推理"),
}
_HIDDEN = Text("set; the value is known to the shell only", "已设置，其值只有 shell 知道")


def evaluate_check(check: Check, facts: Facts) -> Row:
    """The state of one row from static facts."""
    requested = facts.options.given(*check.flags)
    kind = facts.launch.kind if facts.launch.kind in _OTHER_KIND else "train"
    reason = _OTHER_KIND[kind] if kind not in check.kinds else check.blocked(facts)
    if reason is not None:
        return Row(check, State.NOT_APPLICABLE, reason, requested=requested)
    shown = check.enabled(facts)
    if shown is not None:
        return Row(check, State.ENABLED, shown, requested=requested)
    if any(facts.options.hidden(name) for name in check.flags) and check.flags != ("mixed_precision",):
        return Row(check, State.ENABLED, _HIDDEN, requested=requested)
    advice = check.recommend(facts)
    if advice is not None:
        edits = tuple(edit for edit in advice.edits if _possible(edit, facts))
        return Row(check, State.RECOMMENDED, advice.reason, advice.priority or check.priority, edits, requested)
    return Row(check, State.DISABLED, check.off, requested=requested)


def _possible(edit: Edit, facts: Facts) -> bool:
    """Whether the script that will run takes the flag; on a project's own parser an unknown flag would stop the run."""
    return edit.where != "script" or edit.remove or facts.accepts(edit.name)


def evaluate(facts: Facts) -> list[Row]:
    """All rows for one launch."""
    return [evaluate_check(check, facts) for check in registry()]


def scores(rows: Iterable[Row]) -> dict[str, int]:
    """Enabled rows per category."""
    counts = dict.fromkeys(CATEGORIES, 0)
    for row in rows:
        counts[row.check.category] += row.state is State.ENABLED
    return counts


def advice(rows: Iterable[Row]) -> list[Row]:
    """Recommended rows, most urgent and most effective first; rows that come with another one are left out."""
    wanted = [row for row in rows if row.state is State.RECOMMENDED and not row.check.follows]
    return sorted(wanted, key=lambda row: (row.priority, -row.check.impact, row.id))
