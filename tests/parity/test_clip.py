"""The image encoder against recorded outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from videox_fun.models.wan_image_encoder import CLIPModel
from videox_fun.utils import tiny_shapes
from videox_fun.utils.tiny_weights import reference_weights

ATOL = 2e-5
FILE = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
HEADS = {"vision_heads": 2}


def weights() -> dict[str, Tensor]:
    return reference_weights(
        tiny_shapes.image_encoder(vision_layers=3, vision_dim=32, vision_mlp_dim=128, image_size=28), seed=80
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / FILE
    torch.save(weights(), path)
    return path


@pytest.fixture(scope="module")
def encoder(path: Path) -> CLIPModel:
    return CLIPModel.from_pretrained(str(path), transformer_additional_kwargs=HEADS)


@pytest.fixture(scope="module")
def io(data_dir: Path) -> dict[str, Tensor]:
    return load_file(data_dir / "encoders" / "clip.io.safetensors")


@torch.no_grad()
def test_outputs_equal_the_recorded_ones(encoder: CLIPModel, io: dict[str, Tensor]) -> None:
    found = encoder([io["video.0"], io["video.1"]])
    torch.testing.assert_close(found, io["out"], atol=ATOL, rtol=0)


@torch.no_grad()
def test_frames_of_a_video_are_separate_pictures(encoder: CLIPModel, io: dict[str, Tensor]) -> None:
    video = torch.cat([io["video.0"], io["video.1"]], dim=1)
    torch.testing.assert_close(encoder([video]), io["out"], atol=ATOL, rtol=0)


def test_weights_by_formula_are_the_recorded_weights(goldens: Path, golden_utils: ModuleType) -> None:
    expected = golden_utils.load_weights(goldens / "clip" / "clip.weights.safetensors")
    found = weights()
    assert {f"model.{key}" for key in found} == set(expected)
    assert all(torch.equal(value, expected[f"model.{key}"]) for key, value in found.items())


def test_keys_and_shapes_at_real_size(manifest: Callable[[str], dict]) -> None:
    with torch.device("meta"):
        model = CLIPModel()
    expected = {key: shape for key, shape in manifest(FILE).items() if not key.startswith("textual.")}
    assert {key: tuple(value.shape) for key, value in model.native_state_dict().items()} == expected


def test_text_weights_are_dropped_or_kept(tmp_path: Path, path: Path, encoder: CLIPModel) -> None:
    image_only = {key: value for key, value in weights().items() if not key.startswith("textual.")}
    encoder.save_native(tmp_path / "image.safetensors")
    stored = load_file(tmp_path / "image.safetensors")
    assert stored.keys() == image_only.keys()
    assert all(torch.equal(stored[key], value) for key, value in image_only.items())
    CLIPModel.from_pretrained(path, HEADS, keep_textual=True).save_native(tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth", weights_only=True)
    assert whole.keys() == weights().keys()
    assert all(torch.equal(whole[key], value) for key, value in weights().items())
    again = CLIPModel.from_pretrained(tmp_path / "whole.pth", HEADS)
    assert torch.equal(again.model.visual.head, stored["visual.head"]) and not again.textual_weights


def test_heads_are_those_of_the_published_width_or_asked_for(path: Path, encoder: CLIPModel) -> None:
    with pytest.raises(ValueError, match="vision_heads"):
        CLIPModel.from_pretrained(path)
    assert encoder.config.vision_heads == 2 and encoder.config.image_size == 28
    tensors = reference_weights(tiny_shapes.image_encoder(vision_layers=1, vision_dim=160, image_size=28), seed=0)
    assert CLIPModel._sizes(tensors, source="x", heads=None)["vision_heads"] == 2


@torch.no_grad()
def test_half_precision_stays_near(path: Path, io: dict[str, Tensor]) -> None:
    model = CLIPModel.from_pretrained(path, HEADS).to(torch.bfloat16)
    found = model([io["video.0"].bfloat16(), io["video.1"].bfloat16()])
    assert found.dtype == torch.bfloat16
    assert (found.float() - io["out"]).abs().mean() < 0.02
