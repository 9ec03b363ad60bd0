"""Tiny checkpoints: layout, loading through the real classes, trainability, and the recorded reference weights."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from videox_fun.models.wan_image_encoder import CLIPModel
from videox_fun.models.wan_text_encoder import WanT5EncoderModel
from videox_fun.models.wan_transformer3d import Wan2_2Transformer3DModel, WanTransformer3DModel
from videox_fun.models.wan_vae import AutoencoderKLWan
from videox_fun.models.wan_vae3_8 import AutoencoderKLWan3_8
from videox_fun.utils import tiny

FOLDERS = {family: kind.folders for family, kind in tiny.FAMILIES.items()}


def config_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / tiny.CONFIG_FILE).read_text())


def load_vae(folder: Path) -> Any:
    kwargs = config_of(folder)["vae_kwargs"]
    cls = {"AutoencoderKLWan": AutoencoderKLWan, "AutoencoderKLWan3_8": AutoencoderKLWan3_8}[
        kwargs.get("vae_type", "AutoencoderKLWan")]
    return cls.from_pretrained(str(folder / kwargs["vae_subpath"]), additional_kwargs=kwargs)


def build_transformer(folder: Path, cls: type) -> Any:
    config = json.loads((folder / "config.json").read_text())
    return cls.from_config({**config, "in_channels": config["in_dim"], "hidden_size": config["dim"]})


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_denoisers_have_the_keys_of_their_class(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    root = tiny_checkpoint(family)
    cls = Wan2_2Transformer3DModel if family.startswith("wan2.2") else WanTransformer3DModel
    paths = config_of(root)["transformer_additional_kwargs"]
    named = [value for key, value in paths.items() if key.endswith("subpath")]
    assert len(named) == len(FOLDERS[family])
    states = []
    for subpath in named:
        with torch.device("meta"):
            model = build_transformer(root / subpath, cls)
        states.append(load_file(root / subpath / tiny.WEIGHTS_FILE))
        expected = {key: value.shape for key, value in model.state_dict().items()}
        assert {key: value.shape for key, value in states[-1].items()} == expected
    if len(states) == 2:
        assert not torch.equal(states[0]["head.head.weight"], states[1]["head.head.weight"])


@pytest.mark.parametrize("family", ["wan2.1_fun_inp", "wan2.2_ti2v_5b"])
@torch.no_grad()
def test_parts_load_as_the_configuration_says(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    from transformers import AutoTokenizer

    root = tiny_checkpoint(family)
    config, kind = config_of(root), tiny.FAMILIES[family]
    vae = load_vae(root)
    ratio = config["vae_kwargs"]["spatial_compression_ratio"]
    latents = vae.encode(torch.zeros(1, 3, 5, 32, 32))[0].mode()
    assert latents.shape == (1, kind.out_dim, 2, 32 // ratio, 32 // ratio)
    assert vae.decode(latents).sample.shape == (1, 3, 5, 32, 32)

    text = config["text_encoder_kwargs"]
    tokenizer = AutoTokenizer.from_pretrained(root / text["tokenizer_subpath"], local_files_only=True)
    encoder = WanT5EncoderModel.from_pretrained(root / text["text_encoder_subpath"], text, torch_dtype=torch.float32)
    tokens = tokenizer(["a red ball moves", "…"], padding="max_length", max_length=8, return_tensors="pt")
    states = encoder(tokens.input_ids, tokens.attention_mask)[0]
    assert states.shape == (2, 8, 32) and 0.5 < states.std() < 2

    image = root / config["image_encoder_kwargs"]["image_encoder_subpath"]
    assert image.exists() == kind.clip
    if kind.clip:
        features = CLIPModel.from_pretrained(image)([torch.zeros(3, 1, 64, 48)])
        assert features.shape == (1, 257, 1280) and features.isfinite().all()


def test_tokenizer_covers_any_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    size = tiny.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert len(tokenizer) == size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    words = tokenizer("a red ball").input_ids
    assert len(words) == 4 and words[-1] == 1
    spelled = tokenizer("Qwxz 7!").input_ids
    assert 2 not in spelled and tokenizer.decode(spelled, skip_special_tokens=True) == "Qwxz 7!"
    assert tokenizer("画面").input_ids[-2:] == [2, 1]
    assert tokenizer("").input_ids == [1]
    padded = tokenizer(["a", "a red ball"], padding="max_length", max_length=512, truncation=True)
    assert len(padded.input_ids[0]) == 512 and padded.input_ids[0][-1] == 0
    assert max(tokenizer(" ".join(["video"] * 600), truncation=True, max_length=512).input_ids) < size


def natural(frames: int = 5, size: int = 64) -> Tensor:
    """A smooth moving pattern in [-1, 1], as ``[1, 3, F, H, W]``."""
    t, y, x = torch.meshgrid(torch.arange(frames), torch.arange(size), torch.arange(size), indexing="ij")
    return torch.stack([torch.sin(y / (4 + c) + x / 7 + t * (c + 1) / 3) for c in range(3)])[None] * 0.8


@pytest.mark.parametrize("family", ["wan2.1_t2v", "wan2.2_ti2v_5b"])
@torch.no_grad()
def test_latents_have_the_size_of_noise(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    posterior = load_vae(tiny_checkpoint(family)).encode(natural())[0]
    assert posterior.mean.mean().abs() < 0.4 and 0.4 < posterior.mean.std() < 1.6
    assert (posterior.std < 0.1).all()


def test_training_the_blocks_lowers_the_loss(tiny_checkpoint: Callable[..., Path]) -> None:
    root = tiny_checkpoint("wan2.1_t2v")
    with torch.no_grad():
        latents = load_vae(root).encode(natural())[0].mode()
    model = build_transformer(root, WanTransformer3DModel)
    model.load_state_dict(load_file(root / tiny.WEIGHTS_FILE))
    model.requires_grad_(False)
    trained = [parameter.requires_grad_() for name, parameter in model.named_parameters()
               if name.startswith("blocks.") and parameter.ndim == 2]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(40):
        noise = torch.randn(latents.shape, generator=generator)
        sigma = torch.rand(1, generator=generator)
        predicted = model(x=(1 - sigma) * latents + sigma * noise, t=sigma * 1000, context=[torch.zeros(4, 32)],
                          seq_len=latents[0, 0].numel() // 4)
        loss = (predicted - (noise - latents)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def test_seed_dtype_and_sizes(tmp_path: Path) -> None:
    def head(folder: str, **kwargs: Any) -> Tensor:
        made = tiny.make_tiny_checkpoint(tmp_path / folder, family="wan2.1-t2v", **kwargs)
        assert made.config_path == made.folder / "wan.yaml"
        return load_file(made.folder / tiny.WEIGHTS_FILE)["head.head.weight"]

    first = head("a", dim=48, num_heads=2)
    assert torch.equal(first, head("b", dim=48, num_heads=2))
    assert not torch.equal(first, head("c", dim=48, num_heads=2, seed=1))
    half = head("d", dim=48, num_heads=2, dtype=torch.bfloat16, vae_dim=8)
    assert torch.equal(half, first.bfloat16())
    vae = AutoencoderKLWan.from_pretrained(tmp_path / "d" / tiny.VAE21_FILE, torch_dtype=None)
    assert vae.config.dim == 8 and vae.dtype == torch.bfloat16


@pytest.mark.parametrize(("family", "sizes", "message"), [
    ("wan3", {}, "Unknown --family 'wan3'. Known: wan2.1_t2v"),
    ("wan2.1_t2v", {"dim": 50, "num_heads": 4}, "multiple of 2 x --num_heads"),
    ("wan2.1_t2v", {"text_dim": 30}, "multiple of --text_heads"),
    ("wan2.1_t2v", {"num_layers": 0}, "num_layers must be at least 1"),
])
def test_impossible_requests_are_explained(tmp_path: Path, family: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        tiny.make_tiny_checkpoint(tmp_path, family=family, **sizes)


def test_script(tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("make_tiny", repo_root / "scripts" / "make_tiny_checkpoint.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    arguments = ["--family", "wan2.1_t2v", "--output", str(tmp_path / "out"), "--num_heads", "2"]
    assert script.main([*arguments, "--dim", "32", "--dtype", "bf16"]) == 0
    head = load_file(tmp_path / "out" / tiny.WEIGHTS_FILE)["head.head.weight"]
    assert head.shape == (64, 32) and head.dtype == torch.bfloat16
    with pytest.raises(SystemExit):
        script.main([*arguments, "--dim", "31"])
    assert "multiple of 2 x --num_heads" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- recorded reference runs


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def build(name: str) -> Path:
        if name not in built:
            folder = tmp_path_factory.mktemp(name)
            built[name] = tiny.make_reference_checkpoint(folder, name=name, tokenizer=data_dir / "umt5-xxl").folder
        return built[name]

    return build


def weight_files(root: Path) -> dict[str, dict[str, Tensor]]:
    files = [path for path in sorted(root.rglob("*")) if path.suffix in (".pth", ".safetensors")]
    return {str(path.relative_to(root)):
            load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
            for path in files}


def digest(tensors: dict[str, Tensor]) -> list[float]:
    """Number of values, their sum and the sum of their sizes: the same on processors that round differently."""
    values = [value.double() for value in tensors.values()]
    return [sum(value.numel() for value in values), float(sum(value.sum() for value in values)),
            float(sum(value.abs().sum() for value in values))]


@pytest.mark.parametrize("name", tiny.REFERENCE_CHECKPOINTS)
def test_reference_weights(references: Callable[[str], Path], data_dir: Path, name: str) -> None:
    expected = json.loads((data_dir / "reference_checkpoints.json").read_text())[name]
    found = {file: digest(tensors) for file, tensors in weight_files(references(name)).items()}
    assert found.keys() == expected.keys()
    for file, numbers in found.items():
        assert numbers == pytest.approx(expected[file], rel=1e-5), file


@pytest.mark.parametrize("name", tiny.REFERENCE_CHECKPOINTS)
def test_reference_weights_are_the_recorded_ones(references: Callable[[str], Path], golden_checkpoints: Path,
                                                 name: str) -> None:
    found, expected = weight_files(references(name)), weight_files(golden_checkpoints / name)
    assert found.keys() == expected.keys()
    for file, tensors in expected.items():
        assert list(tensors) == list(found[file]) or file.endswith(".safetensors")
        assert all(torch.equal(found[file][key], value) for key, value in tensors.items()), file
    for config in (golden_checkpoints / name).rglob("config.json"):
        own = references(name) / config.relative_to(golden_checkpoints / name)
        assert json.loads(own.read_text()) == json.loads(config.read_text())


@pytest.mark.parametrize(("name", "file"), [
    ("ckpt_t2v", "wan_tiny.yaml"), ("ckpt_inp", "wan_tiny.yaml"), ("ckpt_a14b", "wan22_t2v.yaml"),
    ("ckpt_a14b_inp", "wan22_i2v.yaml"), ("ckpt_5b", "wan22_5b.yaml"),
])
def test_reference_configuration(references: Callable[[str], Path], goldens: Path, name: str, file: str) -> None:
    assert config_of(references(name)) == yaml.safe_load((goldens / "e2e" / file).read_text())
