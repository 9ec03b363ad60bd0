"""The outputs shown in docs/audit.md and docs/audit_zh.md are what the tools print.

``VIDEOX_RECORD_REPORTS=1`` writes them anew. The live table, the look back and the doctor's report are rendered from a
recorded run and a recorded machine (``tests/data/audit/demo_run.json``, ``doctor.json``).
"""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from optim_patches.audit import advise, cli, live_report
from optim_patches.audit.checks import registry
from optim_patches.audit.live import AuditReport
from optim_patches.audit.live_view import LiveRow
from optim_patches.audit.report import DETAILS, OVERVIEW
from optim_patches.audit.second_look import SecondLook
from optim_patches.audit.text import Text
from optim_patches.doctor.findings import Finding, to_terminal
from optim_patches.doctor.packages import KNOWN
from tests.unit.audit_kit import PACKAGES, write
from tests.unit.test_audit_report import DEEPSPEED, MACHINES

DOCS = {"en": "audit.md", "zh": "audit_zh.md"}
BLOCK = re.compile(r"(<!-- output: ([\w ]+) -->\n)(.*?)(<!-- end of output -->)", re.DOTALL)
ADVICE = {"1 slow": ["--run", "run"], "2 quality": [], "3 oom": [], "4 oom 2": [], "5 slow": []}


@pytest.fixture
def folder(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scenario scripts, their DeepSpeed files, and a run that waited for data."""
    for name, data in DEEPSPEED.items():
        write(tmp_path / name, json.dumps(data))
    for number in MACHINES:
        name = f"scenario_{number}.sh"
        write(tmp_path / name, (data_dir / "audit" / name).read_text(encoding="utf-8"))
    steps = [{"event": "step", "step": step, "loss": 0.5, "grad_norm": 1.0, "step_time": 4.0, "data_wait": 1.5,
              "memory_gib": 19.2} for step in range(1, 201)]  # fmt: skip
    write(tmp_path / "run/events.jsonl", "\n".join(map(json.dumps, steps)) + "\n")
    look = {"shares": {"data": 0.38, "vae": 0.21, "text": 0.06, "forward": 0.11, "backward": 0.24}, "mfu": 0.17}
    write(tmp_path / "run/audit.json", json.dumps({"rows": [], "look": look}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "detect_gpus", lambda: [])
    return tmp_path


def machine(number: int) -> list[str]:
    gpu, gpus = MACHINES[number]
    return ["--gpu", gpu, "--gpus", str(gpus), "--packages", PACKAGES.replace(" ", ",")]


def printed(main: Any, args: list[str]) -> str:
    stream = io.StringIO()
    with redirect_stdout(stream):
        assert main(args) == 0
    return stream.getvalue()


def report(number: int, lang: str) -> str:
    """A report's scores, advice and diff, its headings one level deeper."""
    args = [f"scenario_{number}.sh", *machine(number), "--format", "md", "--lang", lang]
    text = printed(cli.main, args)
    text = text[text.index(f"## {OVERVIEW[lang]}") : text.index(f"## {DETAILS[lang]}")].strip()
    return re.sub(r"^(##+ )", r"##\1", text, flags=re.MULTILINE)


def advice(words: list[str], lang: str) -> str:
    number, trouble, *again = words
    extra = ADVICE[" ".join(words)] + ["--again"] * int(again[0] if again else 0)
    args = [f"scenario_{number}.sh", f"--{trouble}", *machine(int(number)), *extra, "--lang", lang]
    text = printed(advise.main, args).rstrip()
    steps, _, diff = text.partition("\n\n---")
    return f"```text\n{steps}\n```" + (f"\n\n```diff\n---{diff}\n```" if diff else "")


def recorded_run(data_dir: Path) -> AuditReport:
    data = json.loads((data_dir / "audit/demo_run.json").read_text(encoding="utf-8"))
    rows = [LiveRow(row["id"], row["state"], Text(**row["evidence"]), Text(**row["requested"]), row["sites"],
                    row["exercised"], row["facts"]) for row in data["rows"]]  # fmt: skip
    texts = {key: Text(**value) for key, value in data["look"].items() if isinstance(value, dict) and "zh" in value}
    look = SecondLook(**data["look"] | texts)
    return AuditReport(rows, step=data["step"], mode=data["mode"], look=look)


def live(run: AuditReport, lang: str) -> str:
    stream = io.StringIO()
    with redirect_stdout(stream):
        live_report.show(run, lang=lang)
    return f"```text\n{stream.getvalue().rstrip()}\n```"


def look(run: AuditReport, lang: str) -> str:
    stream = io.StringIO()
    with redirect_stdout(stream):
        live_report.show_look(run, lang=lang)
    return f"```text\n{stream.getvalue().rstrip()}\n```"


def doctor(data_dir: Path, lang: str) -> str:
    data = json.loads((data_dir / "audit/doctor.json").read_text(encoding="utf-8"))
    findings = [Finding(**{**row, **{key: Text(**row[key]) for key in ("title", "value", "fix")}})
                for row in data["findings"]]  # fmt: skip
    stream = io.StringIO()
    to_terminal(findings, lang=lang, stream=stream)
    return f"```text\n{stream.getvalue().rstrip()}\n```"


def known(lang: str) -> str:
    rows = []
    for fault in KNOWN:
        where = f" ([source]({fault.source}))" if fault.source.startswith("http") else f" ({fault.source})"
        rows.append(f"| {fault.title[lang]} | {fault.value[lang]}{where} | {fault.fix[lang] or '-'} |")
    return "\n".join(rows)


def produce(name: str, lang: str, data_dir: Path) -> str:
    kind, *words = name.split()
    if kind == "report":
        return report(int(words[0]), lang)
    if kind == "advise":
        return advice(words, lang)
    if kind == "template":
        script = printed(advise.main, ["--template", words[0], "--model", "models/my-1.3B-InP", "--lang", lang])
        return f"```bash\n{script.rstrip()}\n```"
    run = recorded_run(data_dir)
    return {"live": lambda: live(run, lang), "look": lambda: look(run, lang), "doctor": lambda: doctor(data_dir, lang),
            "known": lambda: known(lang)}[kind]()  # fmt: skip


@pytest.mark.parametrize("lang", DOCS)
def test_the_shown_outputs_are_current(lang: str, folder: Path, data_dir: Path, repo_root: Path) -> None:
    path = repo_root / "docs" / DOCS[lang]
    text = path.read_text(encoding="utf-8")
    names = [match[2] for match in BLOCK.finditer(text)]
    assert {name.partition(" ")[2] for name in names if name.startswith("advise")} == set(ADVICE)
    assert [name for name in names if name.startswith("report")] == [f"report {number}" for number in MACHINES]
    current = BLOCK.sub(lambda match: f"{match[1]}{produce(match[2], lang, data_dir)}\n{match[4]}", text)
    if os.environ.get("VIDEOX_RECORD_REPORTS"):
        path.write_text(current, encoding="utf-8")
        text = current
    assert text == current


def test_both_languages_show_the_same(repo_root: Path) -> None:
    texts = {lang: (repo_root / "docs" / name).read_text(encoding="utf-8") for lang, name in DOCS.items()}
    assert len({tuple(match[2] for match in BLOCK.finditer(text)) for text in texts.values()}) == 1
    assert len({text.count("\n#") for text in texts.values()}) == 1
    english = BLOCK.sub("", texts["en"])
    assert not re.search(r"[\u4e00-\u9fff]", english)


def test_the_recorded_run_and_machine_are_of_this_code(data_dir: Path) -> None:
    run = recorded_run(data_dir)
    assert {row.id for row in run.rows} == {check.id for check in registry()}
    assert run.look is not None and sum(run.look.shares.values()) == pytest.approx(1)
    text = (data_dir / "audit/demo_run.json").read_text(encoding="utf-8")
    text += (data_dir / "audit/doctor.json").read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work)/", text)
