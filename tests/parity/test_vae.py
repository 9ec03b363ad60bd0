"""Both VAEs against recorded outputs, with weights that are rebuilt by formula."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from videox_fun.models.wan_vae import AutoencoderKLWan, NormalizedVAE, encode_videos
from videox_fun.models.wan_vae3_8 import AutoencoderKLWan3_8
from videox_fun.utils import tiny_shapes
from videox_fun.utils.tiny_weights import reference_weights

ATOL = 5e-5
CLASSES: dict[str, type[NormalizedVAE]] = {"wan21_vae": AutoencoderKLWan, "wan22_vae": AutoencoderKLWan3_8}
MANIFESTS = {"wan21_vae": "Wan2.1_VAE.pth", "wan22_vae": "Wan2.2_VAE.pth"}


def tiny_weights(name: str) -> dict[str, Tensor]:
    if name == "wan21_vae":
        return reference_weights(tiny_shapes.vae21(dim=4), seed=41)
    return reference_weights(tiny_shapes.vae22(dim=4, dec_dim=4), seed=42)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vae")
    for name in CLASSES:
        torch.save(tiny_weights(name), folder / f"{name}.pth")
    return {name: folder / f"{name}.pth" for name in CLASSES}


@pytest.fixture(scope="module")
def vaes(files: dict[str, Path]) -> dict[str, NormalizedVAE]:
    return {name: cls.from_pretrained(files[name]) for name, cls in CLASSES.items()}


def recorded(data_dir: Path, name: str, case: str) -> dict[str, Tensor]:
    return load_file(data_dir / "encoders" / f"{name}.{case}.io.safetensors")


@pytest.mark.parametrize("case", ["f1", "f5", "f9"])
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_outputs_equal_the_recorded_ones(data_dir: Path, vaes: dict[str, NormalizedVAE], name: str, case: str) -> None:
    vae, io = vaes[name], recorded(data_dir, name, case)
    posterior = vae.encode(io["x"])[0]
    torch.testing.assert_close(posterior.mean, io["mean"], atol=ATOL, rtol=0)
    torch.testing.assert_close(posterior.mode(), io["mean"], atol=ATOL, rtol=0)
    torch.testing.assert_close(posterior.logvar, io["logvar"], atol=ATOL, rtol=0)
    if "decoded" in io:
        sample = posterior.sample(generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(sample, io["sample_seed5_generator"], atol=ATOL, rtol=0)
        decoded = vae.decode(io["mean"]).sample
        torch.testing.assert_close(decoded, io["decoded"], atol=ATOL, rtol=0)
        assert decoded.abs().max() <= 1


@pytest.mark.parametrize("name", CLASSES)
def test_weights_by_formula_are_the_recorded_weights(goldens: Path, golden_utils: ModuleType, name: str) -> None:
    expected = golden_utils.load_weights(goldens / "vae" / f"{name}.weights.safetensors")
    found = tiny_weights(name)
    assert {f"model.{key}" for key in found} == set(expected)
    assert all(torch.equal(value, expected[f"model.{key}"]) for key, value in found.items())


@pytest.mark.parametrize("name", CLASSES)
def test_keys_and_shapes_at_real_size(data_dir: Path, manifest: Any, name: str) -> None:
    with torch.device("meta"):
        vae = CLASSES[name]()
    found = {key: tuple(value.shape) for key, value in vae.native_state_dict().items()}
    assert found == manifest(MANIFESTS[name])


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("name", CLASSES)
def test_native_files_survive_a_round_trip(tmp_path: Path, vaes: dict[str, NormalizedVAE], name: str,
                                           suffix: str) -> None:
    path = tmp_path / f"saved{suffix}"
    vaes[name].save_native(path)
    stored = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert stored.keys() == tiny_weights(name).keys()
    again = CLASSES[name].from_pretrained(path).native_state_dict()
    assert all(torch.equal(again[key], value) for key, value in tiny_weights(name).items())


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_diffusers_layout_loads(tmp_path: Path, data_dir: Path, vaes: dict[str, NormalizedVAE], name: str,
                                prefix: str) -> None:
    state = {prefix + key: value for key, value in vaes[name].model.state_dict().items()}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    x = recorded(data_dir, name, "f1")["x"]
    from_folder, from_file = (CLASSES[name].from_pretrained(path)
                              for path in (tmp_path, tmp_path / "diffusion_pytorch_model.safetensors"))
    expected = vaes[name].encode(x)[0].mean
    assert torch.equal(from_folder.encode(x)[0].mean, expected)
    assert torch.equal(from_file.encode(x)[0].mean, expected)


@torch.no_grad()
def test_latent_statistics_of_a_diffusers_folder_are_used(tmp_path: Path, vaes: dict[str, NormalizedVAE]) -> None:
    vae = vaes["wan21_vae"]
    save_file(vae.model.state_dict(), tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}))
    x = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 1, 16, 16)
    plain = AutoencoderKLWan.from_pretrained(tmp_path)
    assert torch.equal(plain.encode(x)[0].mean, vae.encode_moments(x)[:, :16])


def test_configuration(files: dict[str, Path]) -> None:
    kwargs = {"vae_subpath": "x.pth", "vae_type": "AutoencoderKLWan3_8", "temporal_compression_ratio": 4,
              "spatial_compression_ratio": 16}
    vae = AutoencoderKLWan3_8.from_pretrained(str(files["wan22_vae"]), additional_kwargs=kwargs)
    assert (vae.config.latent_channels, vae.config.c_dim, vae.config.dec_dim) == (48, 4, 4)
    assert (vae.config.temporal_compression_ratio, vae.config.spatial_compression_ratio) == (4, 16)
    assert vae.spatial_compression_ratio == 16 and not vae.training
    vae = AutoencoderKLWan.from_pretrained(str(files["wan21_vae"]))
    assert (vae.config.latent_channels, vae.config.spatial_compression_ratio, vae.config.dim) == (16, 8, 4)


def test_class_with_weights_at_construction(files: dict[str, Path]) -> None:
    vae = AutoencoderKLWan3_8(c_dim=4, dec_dim=4, vae_pth=str(files["wan22_vae"]))
    assert torch.equal(vae.native_state_dict()["conv1.weight"], tiny_weights("wan22_vae")["conv1.weight"])


def test_the_other_vae_is_named(files: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"weights of AutoencoderKLWan3_8, not of AutoencoderKLWan\. Set vae_kwargs"):
        AutoencoderKLWan.from_pretrained(files["wan22_vae"])
    with pytest.raises(ValueError, match=r"weights of AutoencoderKLWan, not of AutoencoderKLWan3_8"):
        AutoencoderKLWan3_8.from_pretrained(files["wan21_vae"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_float_pixels_meet_half_weights(files: dict[str, Path], dtype: torch.dtype) -> None:
    """Field case 91: the input is cast at the border, whatever the weights are."""
    vae = AutoencoderKLWan.from_pretrained(files["wan21_vae"]).to(dtype)
    x = torch.linspace(-1, 1, 3 * 5 * 16 * 16).view(1, 3, 5, 16, 16)
    latents = vae.encode(x)[0].sample()
    assert latents.dtype == dtype and latents.shape == (1, 16, 2, 2, 2)
    assert vae.decode(latents.float()).sample.dtype == dtype
    exact = AutoencoderKLWan.from_pretrained(files["wan21_vae"]).encode(x)[0].mean
    assert (vae.encode(x)[0].mean - exact).abs().mean() < 0.02


@torch.no_grad()
def test_a_batch_is_encoded_sample_by_sample(data_dir: Path, vaes: dict[str, NormalizedVAE],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a batch is that of one video, and its numbers are those of the single videos."""
    vae, x = vaes["wan21_vae"], recorded(data_dir, "wan21_vae", "f5")["x"]
    sizes: list[int] = []
    encode = vae.model.encoder.forward
    monkeypatch.setattr(vae.model.encoder, "forward",
                        lambda part, **kwargs: sizes.append(part.shape[0]) or encode(part, **kwargs))
    together = vae.encode(x)[0].mean
    assert sizes and set(sizes) == {1}
    assert torch.equal(together, torch.cat([vae.encode(single)[0].mean for single in x.split(1)]))


@torch.no_grad()
def test_videos_are_drawn_chunk_by_chunk(vaes: dict[str, NormalizedVAE]) -> None:
    vae = vaes["wan21_vae"]
    x = torch.rand(3, 3, 1, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    torch.manual_seed(7)
    found = encode_videos(vae, x, mini_batch=2)
    torch.manual_seed(7)
    expected = torch.cat([vae.encode(part)[0].sample() for part in (x[:2], x[2:])])
    assert torch.equal(found, expected)
    own = encode_videos(vae, x, mini_batch=3, generator=torch.Generator().manual_seed(7))
    assert torch.equal(own, vae.encode(x)[0].sample(torch.Generator().manual_seed(7)))
    assert not torch.equal(own[:2], vae.encode(x)[0].mode()[:2])
    with pytest.raises(ValueError, match="--vae_mini_batch"):
        encode_videos(vae, x, mini_batch=0)


@torch.no_grad()
def test_the_network_can_be_replaced_on_an_instance(vaes: dict[str, NormalizedVAE],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes how the network runs does so below the normalisation."""
    vae = vaes["wan21_vae"]
    monkeypatch.setattr(vae, "encode_moments", lambda pixels: torch.zeros(1, 32, 1, 2, 2))
    monkeypatch.setattr(vae, "decode_latents", lambda latents: latents)
    mean = vae.encode(torch.zeros(1, 3, 1, 16, 16))[0].mean
    assert torch.equal(mean, vae.normalize(torch.zeros(1, 16, 1, 2, 2)))
    torch.testing.assert_close(vae.decode(mean).sample, torch.zeros(1, 16, 1, 2, 2), atol=1e-6, rtol=0)


def test_gradients_reach_the_latents(vaes: dict[str, NormalizedVAE]) -> None:
    """Reward training back-propagates through ``decode``."""
    latents = torch.zeros(1, 16, 1, 2, 2, requires_grad=True)
    vaes["wan21_vae"].decode(latents).sample.mean().backward()
    assert latents.grad is not None and latents.grad.abs().sum() > 0
