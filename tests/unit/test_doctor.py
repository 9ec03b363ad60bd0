"""The doctor: what crashes elsewhere is a row here, and whatever it is given it answers with a report."""

from __future__ import annotations

import ast
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optim_patches.doctor import child, cli, inputs, kernels, machine, packages
from optim_patches.doctor.child import Answer, ask
from optim_patches.doctor.findings import ERROR, INFO, OK, WARNING, Finding
from optim_patches.doctor.machine import Torch
from tests.unit.audit_kit import write

H100 = {
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "cudnn": 91500,
    "available": True,
    "bf16": True,
    "devices": [{"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "bytes": 80 << 30, "free": 79 << 30}],
}
CPU = {"torch": "2.13.0+cpu", "cuda": None, "cudnn": None, "available": False, "bf16": False, "devices": []}


def by_id(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What trials answer, by their first two words; all others succeed. Nothing is started."""
    given: dict[str, Answer] = {"torch": Answer(True, dict(CPU))}

    def fake(name: str, *words: str, timeout: float, environment: Any = None) -> Answer:
        return given.get(" ".join([name, *words]), given.get(name, Answer(True, {"device": "cuda", "gb_per_s": 25.0})))

    monkeypatch.setattr(machine, "ask", fake)
    monkeypatch.setattr(kernels, "ask", fake)
    monkeypatch.setattr(machine, "driver_version", lambda: None)
    return given


# -- processes that die ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "timeout", "problem"),
    [
        ("import os; os.abort()", 60, "crashed with SIGABRT"),
        ("import time; time.sleep(60)", 1, "no answer within 1 s"),
        ("raise ImportError('undefined symbol: _ZN3c10')", 60, "ImportError: undefined symbol: _ZN3c10"),
        ("import sys; sys.exit(3)", 60, "ended with exit code 3"),
        ("import os; os.write(1, b'\\xff\\xfe noise'); raise ValueError", 60, "ValueError: "),
    ],
)
def test_whatever_happens_to_a_trial_is_an_answer(body: str, timeout: float, problem: str, tmp_path: Path) -> None:
    write(tmp_path / "torch/__init__.py", body)  # stands for a torch that was built for another machine
    answer = ask("torch", timeout=timeout, environment={"PYTHONPATH": f"{tmp_path}{os.pathsep}{child.ROOT}"})
    assert not answer.ok and answer.problem == problem


def test_attention_really_runs() -> None:
    answer = ask("attention", "SDPA", timeout=120)
    assert answer.ok, answer.problem
    assert answer.data["backward"] and 0 < answer.data["error"] < 0.05


def test_attention_that_falls_back_is_no_success() -> None:
    from optim_patches.doctor import trials

    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        trials.attention("FLASH_ATTENTION_2")


# -- kernels --------------------------------------------------------------------------------------------------------
def test_a_kernel_that_crashes_says_what_is_lost(answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "installed", lambda module: module != "sageattention")
    answers["attention FLASH_ATTENTION_2"] = Answer(False, {}, "crashed with SIGSEGV")
    found = by_id(kernels.try_kernels(Torch(True, data=H100), quick=False, timeout=1))
    broken = found["flash_attn_2"]
    assert broken.state == WARNING and "SIGSEGV" in broken.value.en and "2 to 3 times" in broken.fix.en
    assert "2.13.0+cu130" in broken.fix.en and "pip install flash-attn" in broken.fix.en
    assert found["flash_attn_3"].state == OK and found["flash_attn_4"].state == INFO
    assert found["sage"].state == INFO and "pip install sageattention" in found["sage"].fix.en
    assert found["compile"].state == OK
    assert "compile" not in by_id(kernels.try_kernels(Torch(True, data=H100), quick=True, timeout=1))


def test_a_cpu_tries_what_a_cpu_can(answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "installed", lambda module: True)
    found = by_id(kernels.try_kernels(Torch(True, data=CPU), quick=True, timeout=1))
    assert {name for name, finding in found.items() if finding.state == OK} == {"sdpa", "adam_8bit", "nf4", "came"}
    assert "CUDA" in found["flash_attn_2"].value.en
    answers["attention SDPA"] = Answer(False, {}, "ImportError: x")
    assert by_id(kernels.try_kernels(Torch(True, data=CPU), quick=True, timeout=1))["sdpa"].state == ERROR


# -- versions -------------------------------------------------------------------------------------------------------
def test_the_needed_versions_are_those_of_the_package(repo_root: Path) -> None:
    module = ast.parse((repo_root / "setup.py").read_text(encoding="utf-8"))
    base = next(ast.literal_eval(node.value) for node in module.body
                if isinstance(node, ast.Assign) and node.targets[0].id == "BASE")  # fmt: skip
    assert dict(item.split(">=") for item in base).items() <= packages.NEEDED.items()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": (2, 9, 0), "cudnn": (9, 10)}, {"conv3d-memory"}),
        ({"torch": (2, 9, 1), "cudnn": (9, 15)}, set()),
        ({"torch": (2, 13, 0), "cudnn": (9, 10)}, set()),
        ({"torch": (2, 8, 0), "cudnn": (9, 10)}, {"conv3d-wrong"}),
        ({"torch": (2, 9, 0)}, set()),  # no CUDA, no cuDNN
        ({"peft": (0, 17, 1), "transformers": (5, 2)}, {"peft-transformers"}),
        ({"peft": (0, 18), "transformers": (5, 2)}, set()),
        ({"torchao": (0, 18, 0), "diffusers": (0, 42, 1)}, {"torchao-diffusers"}),
        ({}, set()),
    ],
)
def test_versions_known_to_be_bad(versions: dict[str, tuple[int, ...]], expected: set[str]) -> None:
    assert {known.id for known in packages.KNOWN if known.bad(versions)} == expected
    assert all(known.source and known.value.zh for known in packages.KNOWN)


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {name: lowest for name, lowest in packages.NEEDED.items() if name != "av"}
    installed |= {"torch": "2.8.0+cu128", "wandb": "0.20"}
    found = by_id(packages.look_at_packages(installed, cudnn=91002, cuda=True))
    assert found["av"].state == ERROR and found["av"].fix.en == "pip install 'av>=15'"
    assert found["torch"].state == ERROR and found["conv3d-wrong"].source.endswith("/163539")
    assert found["wandb"].state == OK and "ZeRO" in found["deepspeed"].value.en
    assert "flash-attn" in found and "flash-attn" not in by_id(packages.look_at_packages({}, cudnn=None, cuda=False))
    assert packages.parse("2.13.0a0+git12") == (2, 13, 0) and packages.parse("?") == ()


# -- the machine ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("driver", "data", "state", "text"),
    [
        ("470.82.01", {**H100, "cuda": "12.8", "devices": []}, ERROR, "needs driver 525"),
        ("560.1", H100, ERROR, "needs driver 580"),
        ("580.95.05", H100, OK, ""),
        ("580.95.05", {**H100, "devices": []}, ERROR, "torch sees no device"),
        ("580.95.05", CPU, ERROR, "built without CUDA"),
        (None, CPU, INFO, ""),
    ],
)
def test_driver(driver: str | None, data: dict, state: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: driver)
    (found,) = machine._driver(Torch(True, data=data))
    assert found.state == state and text in found.fix.en and (found.fix.zh or not found.fix.en)


def test_driver_version_is_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write(tmp_path / "nvidia-smi", "#!/bin/sh\necho 575.57.08\necho 575.57.08\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.driver_version() == "575.57.08"
    write(program, "#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert machine.driver_version() is None


def test_devices_memory_and_shared_memory(answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"name": "Tesla V100", "capability": [7, 0], "bytes": 32 << 30, "free": 10 << 30}
    data = {**H100, "devices": [*H100["devices"], old]}
    monkeypatch.setattr(machine, "_SHM_NEEDED", 1 << 60)
    found = by_id(machine.look_at_machine(Torch(True, data=data), timeout=1))
    assert found["gpu0"].state == OK and found["gpu1"].state == WARNING
    assert "22.0 GiB are in use" in found["gpu1"].fix.en and "fp16" in found["gpu1"].fix.en
    assert found["mixed_gpus"].state == WARNING and found["pinned"].state == OK
    assert "--shm-size" in found["shm"].fix.en
    answers["pinned"] = Answer(False, {}, "RuntimeError: no memory")
    assert by_id(machine.look_at_machine(Torch(True, data=data), timeout=1))["pinned"].state == WARNING
    broken = by_id(machine.look_at_machine(Torch(False, "crashed with SIGILL"), timeout=1))
    assert broken["torch"].state == ERROR and "SIGILL" in broken["torch"].value.en and "gpu" not in broken


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine._compiler().state == WARNING and machine.driver_version() is None


def test_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = machine.look_at_storage({"--output_dir": str(tmp_path / "not" / "yet")})
    assert "MB/s" in found.value.en and list(tmp_path.iterdir()) == []
    (found,) = machine.look_at_storage({"--output_dir": str(write(tmp_path / "file", "x"))})
    assert found.state == ERROR and "is no folder" in found.value.en
    assert isinstance(machine.disk_speed(tmp_path / "gone", room=1 << 40), str)
    assert machine.disk_speed(tmp_path, room=0) is None
    monkeypatch.setattr(machine, "disk_speed", lambda folder, room: "No space left on device")
    (found,) = machine.look_at_storage({"--cache_dir": str(tmp_path)})
    assert found.state == ERROR and "No space left" in found.value.en


# -- model and data -------------------------------------------------------------------------------------------------
def safetensors(values: int, *, claimed: int | None = None) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [values], "data_offsets": [0, claimed or 4 * values]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * (4 * values)


def test_a_whole_model_and_its_faults(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write(model / "diffusion_pytorch_model.safetensors", safetensors(8))
    write(model / "config.json", "{}")
    (found,) = inputs.look_at_model(model)
    assert found.state == OK and "1 weight files" in found.value.en
    config = write(tmp_path / "wan.yaml", "vae_kwargs:\n  vae_subpath: Wan2.1_VAE.pth\n")
    (found,) = inputs.look_at_model(model, config)
    assert found.state == ERROR and found.title.en == "vae_kwargs.vae_subpath" and "does not exist" in found.value.en
    write(model / "Wan2.1_VAE.pth", b"")
    write(model / "cut.safetensors", safetensors(8, claimed=400))
    write(model / "lfs.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    write(model / "html.safetensors", "<html>404</html>")
    write(model / "t/config.json", "{broken")
    write(
        model / "t/m.safetensors.index.json",
        json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}),
    )
    write(model / "t/m-1.safetensors", safetensors(1))
    texts = {finding.title.en: finding.value.en for finding in inputs.look_at_model(model, config)}
    assert "is empty" in texts["Wan2.1_VAE.pth"] and "is cut off: 103 B of 471 B" in texts["cut.safetensors"]
    assert "git lfs pull" in texts["lfs.safetensors"] and "no safetensors file" in texts["html.safetensors"]
    assert "1 shards are missing: m-2.safetensors" in texts["t/m.safetensors.index.json"]
    assert "JSON" in texts["t/config.json"] and len(texts) == 6


def test_a_model_that_is_not_there_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "Wan2.1-Fun-1.3B-InP").mkdir()
    (found,) = inputs.look_at_model(tmp_path / "Wan2.1-Fun-1.3B-Inp")
    assert found.state == ERROR and "Wan2.1-Fun-1.3B-InP" in found.fix.en
    (empty,) = inputs.look_at_model(tmp_path / "Wan2.1-Fun-1.3B-InP")
    assert "holds no weights" in empty.value.en


def test_data(tmp_path: Path, data_dir: Path) -> None:
    (found,) = inputs.look_at_data(data_dir / "e2e_data/metadata_video.json", data_dir / "e2e_data")
    assert found.state == OK and "6 videos" in found.value.en
    rows = [{"file_path": "a.mp4", "text": ""}, {"path": "b.mp4", "text": ""}, {"file_path": "c.mp4", "text": ""}]
    meta = write(tmp_path / "m.json", json.dumps(rows))
    write(tmp_path / "a.mp4", b"")
    found = by_id(inputs.look_at_data(meta))
    assert found["missing"].value.en == "c.mp4" and "is empty" in found["broken"].value.en
    assert found["keys"].value.en == "has no 'file_path', but 'path'" and found["data"].state == INFO
    (folder,) = inputs.look_at_data(tmp_path)
    assert folder.state == ERROR and "m.json" in folder.fix.en


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b"nonsense", b"[[1], null]"])
def test_hostile_metadata_is_a_row(content: bytes, tmp_path: Path) -> None:
    findings = inputs.look_at_data(write(tmp_path / "m.json", content))
    assert any(finding.state in (ERROR, WARNING) for finding in findings)
    assert all(finding.value.en and finding.value.zh for finding in findings)


# -- the command line -----------------------------------------------------------------------------------------------
def test_reports_and_exit_codes(answers: dict[str, Answer], tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "disk_speed", lambda folder, room: 1e9)
    monkeypatch.setattr(machine, "_DISK_NEEDED", 0)
    monkeypatch.setattr(machine, "_DISK_LEAST", 0)
    monkeypatch.setattr(packages, "installed_versions", lambda: dict(packages.NEEDED))
    args = ["--output_dir", str(tmp_path), "--quick"]
    assert cli.main(args) == 0
    english = capsys.readouterr().out
    assert "Machine\n" in english and "videox-doctor: " in english and "\x1b[" not in english
    assert not re.search(r"[\u4e00-\u9fff]", english)
    assert cli.main([*args, "--lang", "zh"]) == 0
    chinese = capsys.readouterr().out
    assert "[正常]" in chinese and len(chinese.splitlines()) == len(english.splitlines())
    assert cli.main([*args, "--format", "json", "--model", str(tmp_path / "none")]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["worst"] == "error" and {"group", "id", "state", "title", "value", "fix", "source"} == set(
        data["findings"][0]
    )
    answers["adam_8bit"] = Answer(False, {}, "x")
    monkeypatch.setattr(kernels, "installed", lambda module: True)
    assert cli.main(args) == 0 and cli.main([*args, "--strict"]) == 1


def test_what_a_check_stumbles_over_is_a_row(answers: dict[str, Answer], tmp_path: Path, capsys, monkeypatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> list[Finding]:
        raise KeyError("gone")

    monkeypatch.setattr(packages, "look_at_packages", broken)
    assert cli.main(["--output_dir", str(tmp_path), "--quick"]) == 0
    out = capsys.readouterr().out
    assert "could not be examined: KeyError: 'gone'" in out and "Traceback" not in out


def test_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from optim_patches.doctor.findings import to_terminal

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    to_terminal([machine._python()], lang="en", stream=stream)
    assert "\x1b[" in stream.getvalue() and "[ok] Python" in stream.getvalue()


def test_without_a_working_torch_the_whole_program_still_reports(tmp_path: Path, repo_root: Path) -> None:
    write(tmp_path / "fake/torch/__init__.py", "raise ImportError('libtorch_cuda.so: cannot open shared object file')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{repo_root}"}
    command = [sys.executable, "-m", "optim_patches.doctor", "--output_dir", str(tmp_path), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    found = {row["id"]: row for row in json.loads(done.stdout)["findings"]}
    assert "libtorch_cuda.so" in found["torch"]["value"]["en"] and found["torch"]["state"] == "error"
    assert found["sdpa"]["state"] == "error" and found["adam_8bit"]["state"] == "info"
