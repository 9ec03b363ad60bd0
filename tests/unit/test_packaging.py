"""Installation files: ranges, pins, extras, configuration files, the two commands."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_arguments() -> dict[str, object]:
    """What setup.py hands to setuptools."""
    code = ("import json, sys, setuptools\n"
            "setuptools.setup = lambda **kw: print(json.dumps(kw, default=str))\n"
            "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py', '__name__': 'x'})\n")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if "No module named 'setuptools'" in result.stderr:
        pytest.skip("setuptools is not installed")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_console_scripts_answer(setup_arguments: dict[str, object]) -> None:
    rows = dict(row.split(" = ") for row in setup_arguments["entry_points"]["console_scripts"])
    assert {"videox-audit", "videox-lora"} <= set(rows)
    for name, target in rows.items():
        module, function = target.split(":")
        code = f"import sys; from {module} import {function}; sys.argv = [{name!r}, '--help']; sys.exit({function}())"
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0 and f"usage: {name}" in result.stdout, result.stderr


def pins() -> dict[str, str]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)(; python_version >= \"3\.\d+\")?", line)
            assert match, f"constraints.txt: '{line}' is not an exact pin"
            found[match.group(1).lower()] = match.group(2)
    return found


def test_packages_are_the_two_trees(setup_arguments: dict[str, object]) -> None:
    packages = set(setup_arguments["packages"])
    on_disk = {".".join(path.parent.relative_to(ROOT).parts) for top in ("videox_fun", "optim_patches")
               for path in (ROOT / top).rglob("__init__.py")}
    assert packages == on_disk
    assert setup_arguments["python_requires"] == ">=3.10"
    from videox_fun import __version__

    assert setup_arguments["version"] == __version__


def test_every_requirement_is_a_range_with_a_pin(setup_arguments: dict[str, object]) -> None:
    extras = setup_arguments["extras_require"]
    assert {"gpu", "deepspeed", "demo", "dev"} <= set(extras)
    rows = [*setup_arguments["install_requires"], *extras["gpu"], *extras["demo"], *extras["dev"]]
    pinned = pins()
    for row in rows:
        name = re.match(r"[\w.-]+", row).group().lower()
        assert ">=" in row and "==" not in row.split(";")[0], row
        assert name in pinned, f"constraints.txt has no pin for {name}"
        low = re.search(r">=([\d.]+)", row).group(1)
        assert tuple(map(int, pinned[name].split(".")[:2])) >= tuple(map(int, low.split(".")[:2])), row


def test_torch_is_pinned_without_a_build_tag_and_torchvision_is_not_needed(setup_arguments: dict[str, object]) -> None:
    assert re.fullmatch(r"2\.\d+\.\d+", pins()["torch"])
    asked = json.dumps([setup_arguments["install_requires"], setup_arguments["extras_require"]])
    assert "torchvision" not in asked and "torchvision" not in pins()


def test_what_the_packages_import_is_declared(setup_arguments: dict[str, object]) -> None:
    declared = json.dumps([setup_arguments["install_requires"], setup_arguments["extras_require"]]).lower()
    spelled = {"PIL": "pillow", "yaml": "omegaconf", "skvideo": "scikit-video", "tokenizers": "transformers",
               "huggingface_hub": "diffusers"}
    # Found when present and never required: other attention back ends, launchers and trackers.
    free = {"flash_attn", "flash_attn_interface", "sageattention", "xfuser", "wandb", "psutil", "torchao", "apex"}
    missing = set()
    for path in (*(ROOT / "videox_fun").rglob("*.py"), *(ROOT / "optim_patches").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
            for top in {name.split(".")[0] for name in names}:
                if top in sys.stdlib_module_names or top in ("videox_fun", "optim_patches", "__future__", *free):
                    continue
                if spelled.get(top, top).replace("_", "-") not in declared:
                    missing.add(f"{top} ({path.relative_to(ROOT)})")
    assert not missing


def test_installed_set_is_the_pinned_set_when_it_claims_to_be() -> None:
    if os.environ.get("CI") != "true":
        pytest.skip("only an environment made by the Makefile has to hold the pins")
    wrong = {}
    for name, version in pins().items():
        try:
            installed = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
        if installed != version:
            wrong[name] = (version, installed)
    assert not wrong or sys.version_info < (3, 11)


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert script.startswith("#!/usr/bin/env bash") and "set -euo pipefail" in script
    assert stat.S_IMODE((ROOT / ".ci/run").stat().st_mode) & 0o100
    assert re.search(r"^make test$", script, re.MULTILINE)
    for name in ("README.md", "README_zh.md"):
        commands = re.findall(r"^make \w+", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert commands[:2] == ["make demo", "make test"], name


def test_make_targets_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint", "bench", "clean"):
        assert re.search(rf"^{target}:", text, re.MULTILINE), target


def test_licence_is_the_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and len(text) > 10_000


@pytest.mark.parametrize(("name", "stage", "clips", "offload"), [
    ("zero_stage2_config.json", 2, False, False),
    ("zero_stage3_config.json", 3, True, False),
    ("zero_stage3_config_cpu_offload.json", 3, True, True),
])
def test_deepspeed_files(name: str, stage: int, clips: bool, offload: bool) -> None:
    config = json.loads((ROOT / "config" / name).read_text())
    zero = config["zero_optimization"]
    assert zero["stage"] == stage and config["bf16"]["enabled"] and config["train_micro_batch_size_per_gpu"] == 1
    assert (config.get("gradient_clipping") == "auto") is clips
    devices = {zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")}
    assert devices == ({"cpu"} if offload else {None})


def test_wan21_yaml_has_the_published_values() -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(ROOT / "config/wan2.1/wan_civitai.yaml"))
    assert config["scheduler_kwargs"]["shift"] == 5.0 and config["scheduler_kwargs"]["num_train_timesteps"] == 1000
    text = config["text_encoder_kwargs"]
    assert (text["vocab"], text["dim"], text["dim_ffn"], text["num_layers"]) == (256384, 4096, 10240, 24)
    assert config["vae_kwargs"]["vae_subpath"] == "Wan2.1_VAE.pth"
    assert config["transformer_additional_kwargs"]["dict_mapping"] == {"in_dim": "in_channels", "dim": "hidden_size"}
