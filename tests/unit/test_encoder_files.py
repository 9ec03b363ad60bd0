"""Weight files of the encoders: no code is run, nothing is skipped, nothing is copied."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from videox_fun.models.encoder_files import adopt, count_blocks, read_tensors, write_tensors
from videox_fun.models.wan_image_encoder import CLIPModel
from videox_fun.models.wan_text_encoder import WanT5EncoderModel
from videox_fun.models.wan_vae import AutoencoderKLWan
from videox_fun.models.wan_vae3_8 import AutoencoderKLWan3_8


class _Payload:
    """Unpickling this runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("cls", [AutoencoderKLWan, AutoencoderKLWan3_8, WanT5EncoderModel, CLIPModel])
def test_a_pickle_with_code_is_refused(tmp_path: Path, cls: type, zipped: bool) -> None:
    marker, path = tmp_path / "ran", tmp_path / "weights.pth"
    torch.save({"a": torch.zeros(1), "b": _Payload(marker)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"nothing of it was executed.*Convert it to \.safetensors"):
        cls.from_pretrained(str(path))
    assert not marker.exists()


@pytest.mark.parametrize("cls", [AutoencoderKLWan, AutoencoderKLWan3_8, WanT5EncoderModel, CLIPModel])
def test_foreign_weights_are_refused_by_name(tmp_path: Path, cls: type) -> None:
    path = tmp_path / "other.pth"
    torch.save({"layer.weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"other\.pth' is not a.*It holds: layer\.weight"):
        cls.from_pretrained(path)


def test_every_mismatch_is_counted_with_examples() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    tensors = {"0.weight": torch.zeros(2, 2), "1.weight": torch.zeros(4, 2), "1.bias": torch.zeros(3),
               "9.a": torch.zeros(1), "9.b": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        adopt(module, tensors, source="file.pth")
    text = str(error.value)
    assert "'file.pth' does not fit Sequential with its 4 keys" in text
    assert "1 keys missing (0.bias)" in text and "2 keys unknown (9.a, 9.b)" in text
    assert "1 shapes different (1.weight: file (4, 2), model (3, 2))" in text


def test_parameters_are_the_tensors_of_the_file() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2, bias=False)
    tensor, other = torch.ones(2, 2), torch.ones(2, 2)
    adopt(module, {"weight": tensor}, source="a", dtype=torch.float32)
    assert module.weight.data_ptr() == tensor.data_ptr() and module.weight.requires_grad
    adopt(module, {"weight": other}, source="a", dtype=torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16 and other.dtype == torch.float32


@pytest.mark.parametrize("zipped", [True, False])
def test_both_torch_formats_and_nested_states_load(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "a.pth"
    torch.save({"state_dict": {"w": torch.arange(3)}}, path, _use_new_zipfile_serialization=zipped)
    assert torch.equal(read_tensors(path)["w"], torch.arange(3))


def test_folders_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.safetensors"):
        read_tensors(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        read_tensors(tmp_path / "none.pth")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="not a mapping"):
        read_tensors(tmp_path / "list.pth")
    write_tensors(tmp_path / "model-1.safetensors", {"a": torch.zeros(1)})
    write_tensors(tmp_path / "model-2.safetensors", {"b": torch.ones(1)})
    assert sorted(read_tensors(tmp_path)) == ["a", "b"]
    write_tensors(tmp_path / "diffusion_pytorch_model.safetensors", {"c": torch.ones(1)})
    assert list(read_tensors(tmp_path)) == ["c"]


def test_writing_over_a_mapped_file_keeps_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.ones(1000)})
    read = read_tensors(path)
    write_tensors(path, {"w": torch.zeros(1000)})
    assert torch.equal(read["w"], torch.ones(1000))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_blocks_are_counted_by_the_highest_number() -> None:
    assert count_blocks(["b.0.x", "b.10.x", "b.9.y", "c.11.x"], "b.") == 11
    assert count_blocks(["c.1"], "b.") == 0


def test_casting_an_encoder_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    model = CLIPModel(image_size=28, vision_dim=32, vision_heads=2, vision_layers=2, embed_dim=8)
    library = logging.getLogger("diffusers")
    library.addHandler(caplog.handler)
    try:
        assert model.to(dtype=torch.bfloat16).dtype == torch.bfloat16
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records
