"""The engine with toy recipes: one loop serves a flow-matching run, a generator/critic pair and a reward."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.unit import toys
from videox_fun.training import objectives
from videox_fun.training.flags import parse_args
from videox_fun.training.launch import make_context
from videox_fun.training.trainer import Trainer


@pytest.fixture(autouse=True)
def toy_objectives(monkeypatch):
    extra = {"toy_adversary": toys.ToyAdversary, "toy_reward": toys.ToyReward}
    monkeypatch.setattr("videox_fun.training.trainer.OBJECTIVES", {**objectives.OBJECTIVES, **extra})


def run_toy(tmp_path, objective="flow_match", recipe=None, flags="", name="out", execute=True):
    spec = toys.toy_spec(objective)
    argv = ["--pretrained_model_name_or_path", "none", "--output_dir", str(tmp_path / name), "--max_train_steps", "4",
            "--train_batch_size", "2", "--trainable_modules", ".", "--seed", "7", "--learning_rate", "1e-2",
            "--lr_warmup_steps", "0", "--report_to", "none", "--audit", "off", "--checkpointing_steps", "100",
            "--uniform_sampling", *flags.split()]
    trainer = Trainer(make_context(spec, parse_args(spec, argv, check_paths=False)), recipe or toys.ToyRecipe())
    trainer.setup()
    logged = []
    log = trainer.run_logger.log
    trainer.run_logger.log = lambda values, step: (logged.append((step, values)), log(values, step))[1]
    if execute:
        assert trainer.run() == 0
    return trainer, logged


def weights(trainer, player=0):
    return {k: v.clone() for k, v in trainer.players[player].unwrapped().state_dict().items()}


def test_flow_matching_trains_and_logs_each_optimizer_step(tmp_path):
    trainer, logged = run_toy(tmp_path, flags="--max_train_steps 40")
    losses = [values["train_loss"] for _, values in logged]
    assert [step for step, _ in logged] == list(range(1, 41))
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_two_runs_with_one_seed_are_equal(tmp_path):
    first, _ = run_toy(tmp_path, name="a")
    second, _ = run_toy(tmp_path, name="b")
    for key, value in weights(first).items():
        assert torch.equal(value, weights(second)[key])


def test_accumulation_equals_the_larger_batch(tmp_path):
    """Two micro-steps of one sample give the gradient of one step of two samples, for equal noise."""
    noise = torch.randn(6, 4, 2, 2, 2, generator=torch.Generator().manual_seed(3))

    class Fixed(objectives.FlowMatch):
        def prepare(self, batch):
            conditioning = super().prepare(batch)
            conditioning.inputs["rows"] = batch["idx"]
            return conditioning

        def compute(self, conditioning):
            rows = conditioning.inputs["rows"]
            indices = torch.tensor([100 * row + 50 for row in rows])
            return self.loss(conditioning, noise=noise[rows], indices=indices, scheme="none")

    import videox_fun.training.trainer as engine

    engine.OBJECTIVES["toy_fixed"] = Fixed
    large, _ = run_toy(tmp_path, "toy_fixed", name="large", flags="--max_train_steps 3")
    small, _ = run_toy(tmp_path, "toy_fixed", name="small",
                       flags="--max_train_steps 3 --train_batch_size 1 --gradient_accumulation_steps 2")
    for key, value in weights(large).items():
        torch.testing.assert_close(weights(small)[key], value, rtol=0, atol=1e-5)


def test_generator_and_critic_update_in_order_and_both_move(tmp_path):
    trainer, logged = run_toy(tmp_path, "toy_adversary")
    assert trainer.objective.events == [("generator", 0), ("critic", 0), ("critic", 1), ("generator", 2),
                                        ("critic", 2), ("critic", 3)]
    fresh = toys.ToyDenoiser().state_dict(), toys.ToyDenoiser(seed=1).state_dict()
    for number in range(2):
        assert any(not torch.equal(value, fresh[number][key]) for key, value in weights(trainer, number).items())
    assert "train_dmd_loss" in logged[0][1] and "train_dmd_loss" not in logged[1][1]
    assert all("train_denoising_loss" in values for _, values in logged)
    assert logged[0][1]["critic_score"] == pytest.approx(2 * logged[0][1]["train_dmd_loss"], rel=1e-5)


def test_reward_without_a_dataset_rises(tmp_path):
    _, logged = run_toy(tmp_path, "toy_reward", recipe=toys.NoDataRecipe(), flags="--max_train_steps 30")
    rewards = [values["train_reward"] for _, values in logged]
    assert rewards[-1] > rewards[0]


def test_an_objective_that_needs_data_says_so(tmp_path):
    with pytest.raises(ValueError, match="needs a dataset"):
        run_toy(tmp_path, recipe=toys.NoDataRecipe())


def test_ema_lies_between_start_and_end_and_is_what_the_final_save_holds(tmp_path):
    trainer, _ = run_toy(tmp_path, flags="--use_ema --max_train_steps 6", execute=False)
    key = "blocks.0.proj.weight"
    start = weights(trainer)[key]
    assert trainer.run() == 0
    shadow, end = trainer.players[0].ema.shadow[key], weights(trainer)[key]
    assert torch.dist(shadow, start) > 0 and torch.dist(shadow, end) > 0
    assert torch.dist(shadow, end) < torch.dist(start, end)
    saved = load_file(tmp_path / "out/checkpoint-6/transformer/diffusion_pytorch_model.safetensors")
    torch.testing.assert_close(saved[key], shadow)


def test_learning_rate_follows_optimizer_steps_under_accumulation(tmp_path):
    _, logged = run_toy(tmp_path, flags="--max_train_steps 8 --train_batch_size 1 --gradient_accumulation_steps 2 "
                                        "--lr_scheduler linear --lr_warmup_steps 2")
    rates = [values["lr"] for _, values in logged]
    assert max(range(8), key=rates.__getitem__) == 1 and rates[1] == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)


def test_missing_seed_is_drawn_and_logged(tmp_path, caplog):
    spec = toys.toy_spec("flow_match")
    argv = ["--pretrained_model_name_or_path", "none", "--output_dir", str(tmp_path), "--trainable_modules", "."]
    with caplog.at_level("INFO"):
        context = make_context(spec, parse_args(spec, argv, check_paths=False))
    assert isinstance(context.args.seed, int)
    assert f"--seed {context.args.seed}" in caplog.text
