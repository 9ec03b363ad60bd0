"""DeepSpeed configurations are looked through before anything loads: slips are named with the right key."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from videox_fun.training import launch
from videox_fun.training.deepspeed_config import check_deepspeed, check_deepspeed_file, settle_deepspeed

ZERO3 = {"stage": 3, "overlap_comm": True}


def test_every_configuration_that_is_shipped_passes(repo_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = sorted((repo_root / "config").glob("zero_*.json"))
    assert {file.name for file in files} >= {"zero_stage3_config_zeropp.json", "zero_stage3_config_nvme_offload.json"}
    for file in files:
        check_deepspeed_file(file)
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"zero_optimisation": ZERO3}, "'zero_optimisation' at the top level: did you mean 'zero_optimization'?"),
        ({"zero_optimization": {**ZERO3, "overlap_com": True}}, "'overlap_com' in zero_optimization: did you mean "
                                                                 "'overlap_comm'?"),
        ({"zero_optimization": {**ZERO3, "gradient_clipping": 1.0}}, "it belongs to the top level"),
        ({"stage": 3}, "'stage' at the top level: it belongs into zero_optimization."),
        ({"offload_optimizer": {"device": "cpu"}}, "it belongs into zero_optimization."),
        ({"zero_quantised_weights": True, "zero_optimization": ZERO3}, "'zero_quantized_weights' in zero_optimization"),
        ({"zero_optimization": {**ZERO3, "offload_param": {"device": "cpu", "pin_memry": True}}},
         "'pin_memry' in zero_optimization.offload_param: did you mean 'pin_memory'?"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "zero_optimization.stage 3, not 2"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}, "is ZeRO++"),
        ({"zero_optimization": {**ZERO3, "offload_param": {"device": "nvme"}}}, "needs nvme_path"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "below it weights are not split"),
    ],
)
def test_slips_are_named(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="DeepSpeed's configuration zero.json: ") as caught:
        check_deepspeed(config, name="zero.json")
    assert text in str(caught.value)


def test_what_is_new_or_somebody_elses_passes(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = {"type": "Adam", "params": {"anything": 1}}
    config = {"optimizer": optimizer, "wandb": {"team": "x"}, "_comment": "ours", "zero_optimization": ZERO3}
    check_deepspeed(config, name="zero.json")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_deepspeed({"hyperspace_drive": True}, name="zero.json")
    assert "'hyperspace_drive' at the top level is no key that is known here" in caplog.text


def test_all_slips_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="train_batch_sise.*gradient_cliping"):
        check_deepspeed({"train_batch_sise": 1, "gradient_cliping": 1.0}, name="zero.json")


@pytest.mark.parametrize(("text", "match"), [("{", "is no JSON"), ("[]", "must be a JSON object")])
def test_files_that_are_none(text: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        check_deepspeed_file(file)
    with pytest.raises(ValueError, match=r"does not exist.*zero.json"):
        check_deepspeed_file(tmp_path / "zerro.json")


def test_a_run_stops_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_sise": 1}}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    monkeypatch.setattr("accelerate.Accelerator.__init__", lambda *_, **__: pytest.fail("the accelerator was made"))
    args = argparse.Namespace(mixed_precision="bf16", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="did you mean 'reduce_bucket_size'"):
        launch.make_accelerator(args)


def script(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 0.05,
                                 **changes})


def test_open_numbers_become_the_scripts(caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1, "gradient_clipping": "auto"}
    settle_deepspeed(config, script())
    assert config == {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.05}
    assert not caplog.records


def test_numbers_that_contradict_the_script_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0}
    settle_deepspeed(config, script())
    assert config["gradient_accumulation_steps"] == 4 and config["gradient_clipping"] == 1.0
    steps, clipping = (record.getMessage() for record in caplog.records)
    assert steps.endswith("says gradient_accumulation_steps 8, the script 4: the script's is used.")
    assert clipping.endswith("clips gradients at 1.0, so --max_grad_norm 0.05 does nothing.")


def test_a_configuration_without_clipping_says_so(caplog: pytest.LogCaptureFixture) -> None:
    settle_deepspeed({}, script())
    assert "--max_grad_norm 0.05 does nothing. Add \"gradient_clipping\": \"auto\"." in caplog.text
