"""What a resume can be refused for is said before any weights are read."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.unit.real_runs import LORA, checkpoint, command, refusal
from videox_fun.recipes.wan import WanRecipe
from videox_fun.training import flags
from videox_fun.training.checkpoint_io import write_json, write_marker
from videox_fun.training.checkpoint_settings import run_settings
from videox_fun.training.specs import get_spec


@pytest.fixture(autouse=True)
def no_weights():
    with mock.patch.object(WanRecipe, "load", side_effect=AssertionError("weights were read")):
        yield


def saved_state(model: Path, output: Path, *, rank: int) -> Path:
    """A state folder with nothing in it but what says which run wrote it."""
    spec = get_spec(LORA)
    args = flags.parse_args(spec, command(LORA, model, output, rank=rank, save_state=True, mixed_precision="no"))
    folder = output / "checkpoint-2"
    folder.mkdir(parents=True)
    (folder / "random_states_0.pkl").touch()
    write_json(folder / "videox_rank_0.json", {})
    write_marker(folder, {"step": 2, "epoch": 0, "world": 1, "settings": run_settings(args, script=spec.id, world=1),
                          "players": {}})
    return folder


def test_other_settings(tmp_path, tmp_path_factory) -> None:
    model = checkpoint(tmp_path_factory)
    saved_state(model, tmp_path / "out", rank=8)
    text = refusal(model, tmp_path / "out", save_state=True, resume_from_checkpoint="latest")
    assert "checkpoint-2 was saved by a run with other settings: --rank: saved 8, asked 4. Give" in text


def test_nothing_there(tmp_path, tmp_path_factory) -> None:
    text = refusal(checkpoint(tmp_path_factory), tmp_path / "out", resume_from_checkpoint="checkpoint-7")
    assert "--resume_from_checkpoint checkpoint-7: no resumable state" in text


def test_text_encoder(tmp_path, tmp_path_factory, capsys) -> None:
    words = command(LORA, checkpoint(tmp_path_factory), tmp_path / "out", train_text_encoder=True)
    with pytest.raises(SystemExit):
        flags.parse_args(get_spec(LORA), words)
    assert "--train_text_encoder would train nothing" in capsys.readouterr().err
    assert flags.parse_args(get_spec(LORA), [*words, "--upstream_compat"]).train_text_encoder
