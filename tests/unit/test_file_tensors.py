"""Tensors read one at a time from a safetensors file: same values, own memory, clear words for broken files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from videox_fun.models.file_tensors import index_safetensors

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {str(dtype): (torch.randn(3, 5) * 4).to(dtype) for dtype in TYPES}
    tensors.update(scalar=torch.tensor(3.5), empty=torch.zeros(0, 4), vector=torch.arange(7))
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    return tmp_path / "x.safetensors"


def test_values_are_those_of_the_library(file: Path) -> None:
    index, expected = index_safetensors(file), load_file(file)
    assert index.keys() == expected.keys()
    for name, value in expected.items():
        found = index[name].read()
        assert index[name].shape == found.shape == value.shape and found.dtype == value.dtype
        assert torch.equal(found.view(-1).view(torch.uint8) if found.numel() else found,
                           value.view(-1).view(torch.uint8) if value.numel() else value)


def test_a_tensor_has_memory_of_its_own(file: Path) -> None:
    stored = index_safetensors(file)["vector"]
    stored.read().add_(1)
    assert torch.equal(stored.read(), torch.arange(7))
    assert stored.read().untyped_storage().nbytes() == 7 * 8


def test_broken_files_are_named(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-20])
    index = index_safetensors(tmp_path / "cut.safetensors")
    with pytest.raises(ValueError, match=r"cut.safetensors ends early"):
        for stored in index.values():
            stored.read()
    (tmp_path / "text.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"text.safetensors is not a safetensors file"):
        index_safetensors(tmp_path / "text.safetensors")
    odd = whole.replace(b'"dtype":"I64"', b'"dtype":"X64"')
    (tmp_path / "odd.safetensors").write_bytes(odd)
    with pytest.raises(ValueError, match="has the type X64"):
        index_safetensors(tmp_path / "odd.safetensors")
