"""The table of ``docs/composition.md``: each combination of patches trains, or is refused before weights load.

Every refusal and every acceptance is checked in every run. Combinations that are slow to try (with compilation or
interpreted kernels) are trained when the table is recorded::

    VIDEOX_RECORD=1 python -m pytest tests/patches/test_composition.py
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from optim_patches.registry import PATCHES, load_patch, registered
from tests.patches.composition import UNTRACEABLE, all_cells, examine, stand_ins
from tests.patches.test_registry import ExamplePatch

ROOT = Path(__file__).resolve().parents[2]
RECORD = os.environ.get("VIDEOX_RECORD") == "1"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
LACKING = [name for name in ("bitsandbytes", "torchao", "triton", "liger_kernel", "peft")
           if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}"),
]


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.patches.composition", "all" if RECORD else "some", *words]
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def answer(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, error = process.communicate(timeout=3000 if RECORD else 600)
    assert process.returncode == 0, error[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of every cell; those of two processes as both saw it."""
    meeting = str(tmp_path_factory.mktemp("two") / "rendezvous")
    processes = [start(), start("0", meeting), start("1", meeting)]
    try:
        alone, first, second = (answer(process) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [o["refused"] for o in first] == [o["refused"] for o in second]
    return [*alone, *first, *second]


def label(outcome: dict[str, Any]) -> str:
    options = outcome["options"]
    adapter = {"lora": "LoRA", "peft": "PEFT LoRA", "full": "full fine-tuning"}[options.get("adapter", "lora")]
    names = [*outcome["patches"], *(["gradient checkpointing"] if "gradient_checkpointing" in options else [])]
    return " + ".join([*names, adapter])


def test_each_combination_trains_or_is_refused(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        if outcome["refused"]:
            assert "Use instead: " in outcome["refused"], label(outcome)
        elif outcome["trained"]:
            expected = dict.fromkeys(outcome["patches"], "exercised")
            if {"compile", "cuda_graph"} <= set(outcome["patches"]):
                expected["cuda_graph"] = "inert"  # the compiler records graphs on a GPU only
            assert outcome["states"] == expected, label(outcome)
            assert outcome["tensors"] >= 6, label(outcome)
            assert outcome["error"] <= outcome["allowed"] < 1.5, label(outcome)
    trained = [outcome for outcome in outcomes if outcome["trained"] and not outcome["refused"]]
    assert len(trained) > (60 if RECORD else 30)


def test_every_pair_of_the_registry_is_there(outcomes: list[dict[str, Any]]) -> None:
    found = {tuple(outcome["patches"]) for outcome in outcomes if not outcome["options"]}
    assert found == {(name,) for name in PATCHES} | set(itertools.combinations(PATCHES, 2))


def test_a_new_patch_enters_the_table_by_its_registry_row() -> None:
    """Nothing here knows the patch; its flags, its own cell and its pairs follow from the row."""
    with registered("example", ExamplePatch), stand_ins():
        cells = [cell for cell in all_cells() if "example" in cell.patches]
        assert len(cells) == len(PATCHES)
        outcome = examine(next(cell for cell in cells if cell.patches == ("checkpointing", "example")))
        assert outcome.states == {"checkpointing": "exercised", "example": "exercised"}
        refused = examine(next(cell for cell in cells if cell.patches == ("train_teacache", "example")))
        assert not refused.refused


def flag(name: str) -> str:
    return f"`{load_patch(name).flags[0].name.removeprefix('--')}`"


def reason(text: str) -> str:
    """A refusal without what precedes and follows it in the terminal."""
    return text.partition(" is refused: ")[2].removesuffix(" (--audit log goes on without it.)")


def works(patches: Sequence[str]) -> str:
    return "accepted²" if {*patches} >= UNTRACEABLE else "works"


def render(outcomes: Sequence[dict[str, Any]]) -> str:
    """The document's tables."""
    pairs = {frozenset(o["patches"]): o for o in outcomes if not o["options"]}
    reasons: list[str] = []

    def cell(one: str, two: str) -> str:
        refused = pairs[frozenset((one, two))]["refused"]
        if not refused:
            return "works¹" if {one, two} == {"compile", "cuda_graph"} else works((one, two))
        if reason(refused) not in reasons:
            reasons.append(reason(refused))
        return f"refused ({reasons.index(reason(refused)) + 1})"

    names = list(PATCHES)
    lines = [f"| | {' | '.join(flag(name) for name in names[:-1])} |", "|---" * len(names) + "|"]
    for row, name in enumerate(names[1:], start=1):
        cells = [cell(name, other) for other in names[:row]] + [""] * (len(names) - 1 - row)
        lines.append(f"| {flag(name)} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    lines += ["", "¹ The compiler records graphs on a GPU only; here the numbers are compared.", "",
              "² Not refused, and not tried on a CPU: interpreted kernels cannot be traced. `tests/gpu` trains them.",
              "", "Refusals:", ""]
    lines += [f"{number}. {text}" for number, text in enumerate(reasons, start=1)]
    lines += ["", "| more than two, or another kind of training | |", "|---|---|"]
    seen: set[str] = set()
    for outcome in outcomes:
        if outcome["options"] and label(outcome) not in seen:
            seen.add(label(outcome))
            refused = reason(outcome["refused"])
            lines.append(f"| {label(outcome)} | {f'refused: {refused}' if refused else works(outcome['patches'])} |")
    return "\n".join(lines)


def test_the_document_holds_this_table(outcomes: list[dict[str, Any]]) -> None:
    path = ROOT / "docs" / "composition.md"
    head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    written, _, tail = rest.partition(END)
    if RECORD:
        path.write_text(f"{head}{BEGIN}\n{render(outcomes)}\n{END}{tail}", encoding="utf-8")
        return
    assert written.strip() == render(outcomes), "VIDEOX_RECORD=1 writes it anew"
