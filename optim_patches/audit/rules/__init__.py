"""Contradictions in a launch: settings that exclude each other, do nothing, or stop the run.

Each rule looks at the facts of one launch and yields what it found, with an edit where one change puts it right.
``findings`` runs all of them. An ``error`` stops the run or spoils it, a ``warning`` costs something, ``info`` is worth
knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from optim_patches.audit.edits import Edit
from optim_patches.audit.facts import Facts
from optim_patches.audit.project import Project
from optim_patches.audit.text import Text

SEVERITIES = ("error", "warning", "info")
SEVERITY_TEXT = {
    "error": Text("error", "错误"),
    "warning": Text("warning", "警告"),
    "info": Text("note", "提示"),
}


@dataclass(frozen=True)
class Hit:
    """One occurrence: what is wrong, and the edits that put it right."""

    text: Text
    edits: tuple[Edit, ...] = ()
    severity: str = ""


Detector = Callable[[Facts, Project], Iterable[Hit]]


@dataclass(frozen=True)
class Rule:
    """One kind of contradiction.

    Attributes:
        id: stable name, for CI and for silencing.
        title: the kind in a few words.
        detect: yields the occurrences.
        kinds: launches it is asked of.
    """

    id: str
    severity: str
    title: Text
    detect: Detector
    kinds: tuple[str, ...] = ("train",)


@dataclass(frozen=True)
class Finding:
    """An occurrence with its rule."""

    rule: Rule
    text: Text
    severity: str
    edits: tuple[Edit, ...] = ()


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    """All rules in the order of the report."""
    found: list[Rule] = []
    for name in ("flags", "precision", "distributed", "model", "data"):
        found.extend(import_module(f"optim_patches.audit.rules.{name}").RULES)
    return tuple(found)


def findings(facts: Facts, project: Project) -> list[Finding]:
    """Everything that contradicts itself in one launch, errors first."""
    found = list(_run(facts, project))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _run(facts: Facts, project: Project) -> Iterator[Finding]:
    for rule in rules():
        if facts.launch.kind not in rule.kinds:
            continue
        for hit in rule.detect(facts, project):
            edits = tuple(e for e in hit.edits if e.where != "script" or e.remove or facts.accepts(e.name))
            yield Finding(rule, hit.text, hit.severity or rule.severity, edits)
