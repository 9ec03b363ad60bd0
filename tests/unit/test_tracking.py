"""Trackers, events, the bar and the picture."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from videox_fun.training import tracking
from videox_fun.training.clipping import ClipResult
from videox_fun.training.curves import plot_curves, read_events, series, smooth
from videox_fun.training.media import send_clip
from videox_fun.training.tracking import RunLogger, check_report_to, own_command, tracker_config
from videox_fun.utils.utils import save_videos_grid


class Tracker:
    """accelerate's surface, remembering what it was told."""

    def __init__(self, *, fail: bool = False):
        self.device = torch.device("cpu")
        self.is_local_main_process = True
        self.fail = fail
        self.config, self.logged, self.attempts = None, [], 0

    def init_trackers(self, name, config, init_kwargs):
        self.attempts += 1
        if self.fail:
            raise RuntimeError("no server")
        self.name, self.config, self.init_kwargs = name, config, init_kwargs

    def log(self, values, step):
        self.logged.append((step, values))


def make_logger(output_dir: Path, *, accelerator=None, compat=False, is_main=True, total=10, **more) -> RunLogger:
    args = Namespace(output_dir=str(output_dir), logging_dir="logs", report_to=more.pop("report_to", "tensorboard"),
                     tracker_project_name="proj", explicit=frozenset())
    ctx = SimpleNamespace(args=args, accelerator=accelerator or Tracker(), compat=compat, is_main=is_main, world=1,
                          device=torch.device("cpu"), spec=SimpleNamespace(id="tiny/train"))
    return RunLogger(ctx, total_steps=total, **more)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


SETTINGS = {"validation_prompts": ["a", "b"], "fix_sample_size": [512, 512], "seed": None, "learning_rate": 1e-4,
            "use_ema": False, "explicit": frozenset({"b", "a"}), "hub_token": "secret", "path": Path("x"), "empty": []}


def test_settings_become_types_every_tracker_takes():
    assert tracker_config(SETTINGS) == {
        "validation_prompts": '["a", "b"]', "fix_sample_size": "[512, 512]", "learning_rate": 1e-4, "use_ema": False,
        "path": "x", "empty": "[]"}


@pytest.fixture
def clean_accelerate():
    """Leave no accelerator state behind that was not there."""
    from accelerate.state import AcceleratorState, PartialState

    fresh = not PartialState._shared_state
    yield
    if fresh:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_tensorboard_takes_lists_and_numbers(tmp_path, clean_accelerate):
    pytest.importorskip("tensorboard")
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=ProjectConfiguration(
        project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs")))
    logger = make_logger(tmp_path, accelerator=accelerator)
    logger.start(SETTINGS)
    for step in (1, 2):
        logger.log({"train_loss": 1.0 / step, "lr": 1e-4, "grad_norm": math.nan}, step)
    logger.finish()
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "logs" / "proj")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train_loss")] == [(1, 1.0), (2, 0.5)]
    hparams = next((tmp_path / "logs").rglob("hparams.yml")).read_text()
    assert 'validation_prompts: \'["a", "b"]\'' in hparams and "secret" not in hparams and "seed" not in hparams


def test_wandb_logs_offline(tmp_path, monkeypatch, clean_accelerate):
    pytest.importorskip("wandb")
    from accelerate import Accelerator

    monkeypatch.setenv("WANDB_MODE", "offline")
    accelerator = Accelerator(cpu=True, log_with="wandb")
    logger = make_logger(tmp_path, accelerator=accelerator, report_to="wandb")
    logger.start(SETTINGS)
    logger.log({"train_loss": 1.0}, 1)
    clip = torch.rand(1, 3, 5, 16, 16)
    save_videos_grid(clip, tmp_path / "clip.mp4", fps=8)
    send_clip(accelerator, "sample/0", clip, tmp_path / "clip.mp4", caption="a red door", step=1)
    logger.finish()
    accelerator.end_training()
    (run,) = (tmp_path / "logs" / "wandb").glob("offline-run-*")
    (uploaded,) = run.rglob("*.mp4")
    assert uploaded.read_bytes() == (tmp_path / "clip.mp4").read_bytes()


def test_events_hold_one_line_per_step(tmp_path):
    tracker = Tracker()
    logger = make_logger(tmp_path, accelerator=tracker)
    logger.start({})
    logger.log({"train_loss": torch.tensor(2.5), "lr": 1e-4, "grad_norm": math.inf, "tokens_per_s": 10.0,
                "data_wait": 0.1}, 1)
    logger.note("save", 1, path="checkpoint-1")
    start, step, save = lines(logger.events_path)
    assert (start["event"], start["step"], start["total_steps"]) == ("start", 0, 10)
    assert (step["step"], step["loss"], step["lr"], step["grad_norm"]) == (1, 2.5, 1e-4, "inf")
    assert step["tokens_per_s"] == 10.0 and step["data_wait"] == 0.1 and step["step_time"] >= 0
    assert step["memory_gib"] > 0.01 and "train_loss" not in step
    assert save["event"] == "save" and save["path"] == "checkpoint-1"
    at, values = tracker.logged[0]
    assert at == 1 and values["train_loss"] == 2.5 and "loss" not in values and "grad_norm" not in values


def test_compat_tracks_upstreams_names_only(tmp_path):
    tracker = Tracker()
    logger = make_logger(tmp_path, accelerator=tracker, compat=True)
    logger.start({})
    logger.log({"train_loss": 2.5, "lr": 1e-4}, 1)
    assert tracker.logged == [(1, {"train_loss": 2.5})]


def test_other_ranks_write_nothing(tmp_path):
    logger = make_logger(tmp_path, is_main=False)
    logger.start({})
    logger.log({"train_loss": 1.0}, 1)
    assert logger.finish() == [] and not logger.events_path.exists()


def test_tracker_that_does_not_start_is_named_and_survived(tmp_path, caplog):
    logger = make_logger(tmp_path, accelerator=Tracker(fail=True))
    logger.start({})
    logger.log({"train_loss": 1.0}, 1)
    assert "tensorboard did not start (no server)" in caplog.text
    assert logger.finish()[0] == logger.events_path


def test_wandb_falls_back_to_offline(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "online")
    tracker = Tracker(fail=True)
    make_logger(tmp_path, accelerator=tracker, report_to="wandb").start({})
    assert tracker.attempts == 2 and os.environ["WANDB_MODE"] == "offline" and "logging offline" in caplog.text


def test_tracker_that_breaks_later_does_not_stop_the_run(tmp_path, caplog):
    tracker = Tracker()
    logger = make_logger(tmp_path, accelerator=tracker)
    logger.start({})
    tracker.log = lambda values, step: 1 / 0
    for step in (1, 2):
        logger.log({"train_loss": 1.0}, step)
    assert caplog.text.count("tracker failed") == 1 and len(lines(logger.events_path)) == 3


def test_unknown_or_missing_tracker_is_refused(monkeypatch, caplog):
    with pytest.raises(ValueError, match="--report_to tensorbord is not known"):
        check_report_to(Namespace(report_to="tensorbord", explicit=frozenset()))
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_report_to(Namespace(report_to="wandb", explicit=frozenset({"report_to"})))
    check_report_to(Namespace(report_to="tensorboard", explicit=frozenset()))  # only the default: a warning will do
    assert "pip install tensorboard" in caplog.text


@pytest.mark.parametrize(("warm", "total", "initial"), [(False, 10, 4), (True, 6, 0)])
def test_bar_counts_what_is_left(tmp_path, warm, total, initial):
    logger = make_logger(tmp_path, start_step=4, warm=warm)
    logger.start({})
    assert (logger.bar.total, logger.bar.n, logger.bar.desc) == (total, initial, "Steps")
    logger.log({"train_loss": 0.123456, "lr": 1e-4}, 5)
    assert logger.bar.n == initial + 1 and logger.bar.postfix == "step_loss=0.1235, lr=0.0001"
    logger.finish()


def test_model_info_scalars_have_upstreams_names(tmp_path):
    tracker = Tracker()
    logger = make_logger(tmp_path, accelerator=tracker)
    logger.start({})
    logger.log_model_info(ClipResult(norm=3.0, limit=0.5, clipped=True, abnormal=True, finite=True, skip=False,
                                     parameter_norms={"blocks.0.q": 2.0}), 7)
    assert tracker.logged == [(7, {"gradients/before_clip_norm/blocks.0.q": 2.0, "gradients/norm_sum": 3.0,
                                   "gradients/actual_max_grad_norm": 0.5})]


def test_resumed_run_continues_the_file_and_later_rows_count(tmp_path):
    first = make_logger(tmp_path)
    first.start({})
    for step in range(1, 6):
        first.log({"train_loss": 1.0}, step)
    with open(first.events_path, "a") as handle:
        handle.write('{"event": "step", "step": 6, "lo')  # the crash
    second = make_logger(tmp_path, start_step=3)
    second.start({})
    for step in range(4, 8):
        second.log({"train_loss": 2.0}, step)
    second.log_validation({"validation_loss": 0.5}, 7)
    rows, resumed = read_events(second.events_path)
    assert resumed == [3] and list(rows) == [1, 2, 3, 4, 5, 6, 7]
    assert series(rows, "loss") == ([1, 2, 3, 4, 5, 6, 7], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    assert series(rows, "validation_loss") == ([7], [0.5])
    fresh = make_logger(tmp_path)
    fresh.start({})
    fresh.log({"train_loss": 5.0}, 1)
    assert list(read_events(fresh.events_path)[0]) == [1]


def test_smoothing_starts_unbiased_and_keeps_constants():
    assert smooth([2.0] * 10, span=5) == pytest.approx([2.0] * 10)
    assert smooth([1.0, 0.0, 0.0], span=3)[0] == 1.0


def test_picture_is_drawn_from_the_events(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    logger = make_logger(tmp_path, total=60)
    logger.start({})
    for step in range(1, 61):
        logger.log({"train_loss": 3 / step + (step % 5) / 50, "lr": 1e-4 * min(1, step / 10), "grad_norm": 1 / step,
                    "grad_limit": 0.3, "step_time": 0.5 + (step == 1) * 9, "data_wait": 0.05}, step)
    written = logger.finish()
    assert written == [tmp_path / "events.jsonl", tmp_path / "training_curves.png"]
    picture = Image.open(written[1]).convert("RGB")
    assert picture.size == (1440, 840)
    colours = {colour for _, colour in picture.getcolors(1 << 24)}
    assert (37, 99, 235) in colours and (124, 58, 237) in colours  # smoothed loss and gradient norm


def test_without_matplotlib_the_numbers_remain(tmp_path, monkeypatch, caplog):
    logger = make_logger(tmp_path)
    logger.start({})
    logger.log({"train_loss": 1.0}, 1)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert logger.finish() == [logger.events_path] and "pip install matplotlib" in caplog.text


def test_run_without_steps_has_no_picture(tmp_path):
    logger = make_logger(tmp_path)
    logger.start({})
    assert logger.finish() == [logger.events_path]
    assert plot_curves(logger.events_path, tmp_path / "x.png") is None


@pytest.mark.parametrize(
    ("argv", "processes", "expected"),
    [
        (["/at/scripts/wan2.1/train.py", "--seed", "1"], 1, "accelerate launch scripts/wan2.1/train.py --seed 1"),
        (["scripts/wan2.1/train.py", "--hub_token", "secret", "--a", "x y"], 2,
         "accelerate launch --num_processes 2 scripts/wan2.1/train.py --a 'x y'"),
        (["scripts/wan2.1/train.py", "--hub_token=secret"], 1, "accelerate launch scripts/wan2.1/train.py"),
        (["/usr/bin/pytest", "tests"], 1, None),
        ([], 1, None),
    ],
)  # fmt: skip
def test_the_start_of_a_run_holds_its_command_without_secrets(argv, processes, expected) -> None:
    assert own_command("wan2.1/train", argv, processes=processes) == expected
