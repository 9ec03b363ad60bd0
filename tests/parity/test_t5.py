"""The text encoder against recorded outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from videox_fun.models.wan_text_encoder import WanT5EncoderModel, fp16_clamp
from videox_fun.utils import tiny_shapes
from videox_fun.utils.tiny_weights import reference_weights

ATOL = 2e-5
FILE = "models_t5_umt5-xxl-enc-bf16.pth"
SIZES = {"vocab": 64, "dim": 32, "dim_attn": 48, "dim_ffn": 64, "num_heads": 4, "num_layers": 2, "num_buckets": 32}


def weights() -> dict[str, Tensor]:
    return reference_weights(tiny_shapes.text_encoder(**SIZES), seed=70)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5") / FILE
    torch.save(weights(), path)
    return path


@pytest.fixture(scope="module")
def encoder(path: Path) -> WanT5EncoderModel:
    return WanT5EncoderModel.from_pretrained(
        str(path), additional_kwargs={**SIZES, "shared_pos": False, "dropout": 0.0, "text_length": 512},
        low_cpu_mem_usage=True, torch_dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def io(data_dir: Path) -> dict[str, Tensor]:
    return load_file(data_dir / "encoders" / "umt5.io.safetensors")


@torch.no_grad()
def test_outputs_equal_the_recorded_ones(encoder: WanT5EncoderModel, io: dict[str, Tensor]) -> None:
    for found, expected in (
        (encoder(io["ids"])[0], io["out_nomask"]),
        (encoder(io["ids"], io["mask"])[0], io["out_masked"]),
        (encoder(io["ids"], attention_mask=io["mask"].bool())[0], io["out_masked"]),
        (encoder(io["ids_long"])[0], io["out_long_nomask"]),
    ):
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)


@torch.no_grad()
def test_padding_does_not_change_the_tokens(encoder: WanT5EncoderModel, io: dict[str, Tensor]) -> None:
    length = int(io["mask"][1].sum())
    alone = encoder(io["ids"][1:, :length])[0]
    torch.testing.assert_close(encoder(io["ids"], io["mask"])[0][1:, :length], alone, atol=ATOL, rtol=0)


def test_weights_by_formula_are_the_recorded_weights(goldens: Path, golden_utils: ModuleType) -> None:
    expected = golden_utils.load_weights(goldens / "t5" / "umt5.weights.safetensors")
    found = weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def test_keys_and_shapes_at_real_size(data_dir: Path, manifest: Callable[[str], dict]) -> None:
    kwargs = json.loads((data_dir / "manifests" / f"{FILE}.json").read_text())["init_kwargs"]
    with torch.device("meta"):
        model = WanT5EncoderModel(**kwargs)
    assert {key: tuple(value.shape) for key, value in model.native_state_dict().items()} == manifest(FILE)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_native_files_survive_a_round_trip(tmp_path: Path, encoder: WanT5EncoderModel, suffix: str) -> None:
    encoder.save_native(tmp_path / f"saved{suffix}")
    again = WanT5EncoderModel.from_pretrained(tmp_path / f"saved{suffix}", torch_dtype=torch.float32)
    assert again.native_state_dict().keys() == weights().keys()
    assert all(torch.equal(again.native_state_dict()[key], value) for key, value in weights().items())


def test_sizes_come_from_the_weights_and_dtype_from_the_caller(path: Path) -> None:
    model = WanT5EncoderModel.from_pretrained(path)
    assert {key: model.config[key] for key in SIZES} == SIZES
    assert model.config.shared_pos is False and not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_wrong_sizes_are_reported(path: Path) -> None:
    with pytest.raises(ValueError, match=r"6 shapes different \(blocks\.0\.ffn\.gate\.0\.weight"):
        WanT5EncoderModel.from_pretrained(path, {"dim_ffn": 80})
    with pytest.raises(ValueError, match=r"10 keys missing .*blocks\.2\."):
        WanT5EncoderModel.from_pretrained(path, {"num_layers": 3})


@torch.no_grad()
def test_a_shared_position_table_serves_every_block(io: dict[str, Tensor], tmp_path: Path) -> None:
    table = "pos_embedding.embedding.weight"
    state = weights()
    state["blocks.1." + table] = state["blocks.0." + table]
    torch.save(state, tmp_path / "separate.pth")
    shared = {key: value for key, value in state.items() if not key.endswith(table)}
    torch.save({**shared, table: state["blocks.0." + table]}, tmp_path / "shared.pth")
    one, other = (WanT5EncoderModel.from_pretrained(tmp_path / name, torch_dtype=torch.float32)
                  for name in ("separate.pth", "shared.pth"))
    assert other.config.shared_pos is True
    assert torch.equal(one(io["ids"], io["mask"])[0], other(io["ids"], io["mask"])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_stays_near(path: Path, io: dict[str, Tensor], dtype: torch.dtype) -> None:
    model = WanT5EncoderModel.from_pretrained(path, torch_dtype=dtype)
    found = model(io["ids"], io["mask"])[0]
    assert found.dtype == dtype
    assert (found.float() - io["out_masked"]).abs().mean() < 0.02


def test_activations_are_clamped_in_float16_only() -> None:
    large = torch.tensor([float("inf"), -float("inf"), 1.0])
    assert torch.equal(fp16_clamp(large), large)
    assert fp16_clamp(large.half()).isfinite().all()


def test_dropout_is_active_in_training_only(io: dict[str, Tensor]) -> None:
    model = WanT5EncoderModel(**SIZES, shared_pos=False, dropout=0.5)
    assert not torch.equal(model.train()(io["ids"])[0], model(io["ids"])[0])
    assert torch.equal(model.eval()(io["ids"])[0], model(io["ids"])[0])
