"""The start-up audit of a run: what was asked for, what was done, and what really took part in the first steps.

``install`` puts small counters on the models before the first step. ``report``, called after a few optimizer steps,
takes them off again, evaluates one check per audit row on the live objects, prints the rows that say something and
writes all of them to ``audit.json`` and ``audit.md``. ``finish`` rewrites both at the end of the run with what later
steps added, and with a second look: time per phase, speed, memory (``second_look.py``). What differs between processes
is a finding of its own (``ranks.py``).

A row that was asked for and had no effect is *inert* and says why; with ``--audit strict`` it stops the run.
The checks live in ``live_memory.py`` (A to E), ``live_run.py`` (F, G) and ``live_train.py`` (H, I); their numbers come
from the live objects, from the probe (``live_probe.py``) and from the engine (:class:`RunFacts`).
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from optim_patches.audit import live_deep, live_memory, live_report, live_run, live_train, ranks
from optim_patches.audit.device_use import DeviceUse
from optim_patches.audit.live_probe import Probe
from optim_patches.audit.live_view import CHECKS, DISABLED, INERT, REFUSED, STATES, LiveRow, RunFacts, View, row
from optim_patches.audit.second_look import Mark, SecondLook, look_back
from optim_patches.audit.text import Text
from optim_patches.base import OptimPatch, Target
from optim_patches.registry import Outcome, PatchManager

logger = logging.getLogger(__name__)

#: The modules whose import registered the checks.
CHECK_MODULES = (live_memory, live_run, live_train, live_deep)


class AuditFailed(ValueError):
    """``--audit strict`` found something that was asked for and had no effect."""


@dataclass
class AuditReport:
    """All rows of one evaluation.

    Attributes:
        differences: what is not the same on all processes.
        look: the look back, at the end of a run.
    """

    rows: list[LiveRow]
    step: int
    mode: str
    final: bool = False
    files: list[Path] = field(default_factory=list)
    differences: list[Text] = field(default_factory=list)
    look: SecondLook | None = None

    def in_state(self, state: str) -> list[LiveRow]:
        return [row for row in self.rows if row.state == state]

    def row(self, row_id: str) -> LiveRow:
        return next(row for row in self.rows if row.id == row_id)

    def totals(self) -> dict[str, int]:
        return dict(Counter(row.state for row in self.rows))

    def scalars(self) -> dict[str, float]:
        """Numbers for the tracker: rows per state, differences between processes, and the look back."""
        totals = self.totals()
        values = {f"audit/rows_{state.replace(' ', '_')}": float(totals.get(state, 0)) for state in STATES}
        values["audit/rank_differences"] = float(len(self.differences))
        return values | (self.look.scalars() if self.look is not None else {})


class LiveAudit:
    """One run's audit. See the module's text for the order of calls."""

    def __init__(
        self,
        *,
        args: argparse.Namespace,
        explicit: frozenset[str],
        manager: PatchManager,
        output_dir: Path,
        mode: str,
        lang: str = "en",
    ) -> None:
        self.args = args
        self.explicit = explicit
        self.manager = manager
        self.output_dir = Path(output_dir)
        self.mode = mode
        self.lang = lang
        self.probe = Probe()
        self.last: AuditReport | None = None
        self._warm: Mark | None = None
        self._use = DeviceUse(None)
        self._inert_elsewhere = False

    def install(self, target: Target) -> None:
        """Start counting, after models are wrapped and compiled and before the first step."""
        self.probe.install(target)
        self._use = DeviceUse.of(target.device)
        self._use.start()

    def report(self, target: Target, facts: RunFacts | Mapping[str, Any]) -> AuditReport:
        """Evaluate, print, write; raises :class:`AuditFailed` in strict mode when a row is inert."""
        self.probe.remove()
        report = self._evaluate(target, RunFacts.of(facts), final=False)
        for outcome in self.manager.outcomes():
            mark_warm = getattr(outcome.patch, "mark_warm", None)
            if mark_warm is not None:
                mark_warm()
        if is_main():
            live_report.show(report, lang=self.lang)
            report.files = live_report.write(report, self.output_dir, lang=self.lang)
        self._warn(report)
        if self.mode == "strict" and self._inert_elsewhere:  # all processes stop, or none
            listing = "; ".join(f"{row.id} {row.requested.en}: {row.evidence.en}" for row in report.in_state(INERT))
            listing = listing or "on another rank: " + "; ".join(text.en for text in report.differences)
            raise AuditFailed(f"--audit strict: asked for, but without effect: {listing}")
        return report

    def finish(self, target: Target, facts: RunFacts | Mapping[str, Any]) -> AuditReport:
        """Rewrite the files with the numbers of the whole run, and look back at it."""
        facts = RunFacts.of(facts)
        if self.last is None:
            self.report(target, facts)
        report = self._evaluate(target, facts, final=True)
        report.look = self._look_back(target, facts)
        if is_main():
            live_report.show_look(report, lang=self.lang)
            report.files = live_report.write(report, self.output_dir, lang=self.lang)
        return report

    def _evaluate(self, target: Target, facts: RunFacts, *, final: bool) -> AuditReport:
        view = View(args=self.args, explicit=self.explicit, target=target, facts=facts, probe=self.probe)
        outcomes = {patch_id(o.patch): o for o in self.manager.outcomes()}
        rows = [self._patch_row(outcomes[i]) if i in outcomes else _ask(i, view) for i in CHECKS]
        rows += [self._patch_row(outcome) for row_id, outcome in outcomes.items() if row_id not in CHECKS]
        notes = ranks.gather(ranks.RankNote.of(rows, facts))
        report = AuditReport(sorted(rows, key=_order), step=facts.steps, mode=self.mode, final=final,
                             differences=ranks.differences(notes))  # fmt: skip
        if self._warm is None:
            self._warm = Mark.of(view)
        self._inert_elsewhere = any(INERT in note.states.values() for note in notes)
        self.last = report
        return report

    def _look_back(self, target: Target, facts: RunFacts) -> SecondLook | None:
        """The second look; what goes wrong in it costs the look, not the run."""
        view = View(args=self.args, explicit=self.explicit, target=target, facts=facts, probe=self.probe)
        compiled = [o.evidence.facts.get("recompiles_after_warmup") for o in self.manager.outcomes() if o.evidence]
        try:
            return look_back(view, folder=self.output_dir, warm=self._warm, idle=self._use.stop(),
                             recompiles=next((n for n in compiled if n is not None), None))  # fmt: skip
        except Exception:
            logger.warning("audit: the look back at the run failed", exc_info=True)
            return None

    def _patch_row(self, outcome: Outcome) -> LiveRow:
        options = [flag for flag in outcome.patch.flags[1:] if flag.dest in self.explicit]
        parts = [outcome.patch.flags[0].name]
        parts += [f"{flag.name} {getattr(self.args, flag.dest, '')}" for flag in options]
        given = outcome.patch.flags[0].dest in self.explicit
        text = " ".join(parts)
        requested = Text(f"{text} ({'given' if given else 'default'})", f"{text}（{'给出' if given else '默认'}）")
        return live_train.patch_row(outcome, row_id=patch_id(outcome.patch), requested=requested)

    def _warn(self, report: AuditReport) -> None:
        for state in (REFUSED, INERT):
            for found in report.in_state(state):
                logger.warning("audit: %s %s is %s: %s", found.id, found.requested[self.lang], state,
                               found.evidence[self.lang])  # fmt: skip
        if is_main():
            for text in report.differences:
                logger.warning("audit: ranks differ: %s", text[self.lang])


def _ask(row_id: str, view: View) -> LiveRow:
    """A check's row. What a check cannot read becomes its evidence: a run that trains is never stopped by the audit."""
    try:
        return CHECKS[row_id](view)
    except Exception as error:
        logger.warning("audit: %s could not be read", row_id, exc_info=True)
        text = f"{type(error).__name__}: {error}"
        return row(row_id, DISABLED, Text(f"could not be read: {text}", f"无法读取：{text}"))


def patch_id(patch: OptimPatch) -> str:
    """The audit row that a patch answers for: its own id, or its name."""
    return getattr(patch, "row", "") or patch.name


def is_main() -> bool:
    """Whether this process writes files."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _order(row: LiveRow) -> tuple[str, int, str]:
    letter, number = row.id[:1], row.id[1:]
    return (letter, int(number), "") if number.isdigit() and letter.isupper() else ("~", 0, row.id)
