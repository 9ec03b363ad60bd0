"""The Wan transformers against recorded outputs, losses and gradients, and against the published key lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from videox_fun.models import wan_transformer3d

OUT_ATOL, LOSS_ATOL, GRAD_RTOL = 2e-5, 1e-5, 1e-4
KEPT = [("wan21_t2v", "basic"), ("wan21_t2v", "padded_seq"), ("wan21_fun_inp", "basic")]
RECORDED = [
    *KEPT, ("wan21_t2v", "subject_ref"), ("wan21_fun_control_ref", "ref"), ("wan21_fun_control_ref", "noref"),
    ("wan21_fun_camera", "camera"), ("wan22_ti2v", "t2d"), ("wan22_ti2v", "t1d"), ("wan22_i2v_a14b", "basic"),
]  # fmt: skip


def read_weights(path: Path) -> dict[str, Tensor]:
    """A big matrix is stored as diagonal plus low rank."""
    raw = load_file(path)
    state = {key: value for key, value in raw.items() if "__" not in key}
    for key in raw:
        if key.endswith(".__D"):
            base = key.removesuffix(".__D")
            state[base] = torch.diag(raw[key]) + raw[f"{base}.__U"] @ raw[f"{base}.__V"]
    return state


def clip_features(batch: int) -> Tensor:
    b, i, j = (torch.arange(n, dtype=torch.float64) for n in (batch, 257, 1280))
    return torch.sin(0.37 * b[:, None, None] + 0.11 * i[:, None] + 0.013 * j * (i[:, None] % 7 + 1)).float()


def build(folder: Path, name: str) -> torch.nn.Module:
    entry = json.loads((folder / "index.json").read_text())[name]
    model = getattr(wan_transformer3d, entry["cls"])(**entry["init_kwargs"])
    model.load_state_dict(read_weights(folder / f"{name}.weights.safetensors"))
    return model


def read_case(folder: Path, name: str, case: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    tensors = load_file(folder / f"{name}.{case}.io.safetensors")
    expected = json.loads((folder / "index.json").read_text())[name]["cases"][case]
    inputs: dict[str, Any] = {
        key.removeprefix("in."): value
        for key, value in tensors.items()
        if key.startswith("in.") and not key.startswith("in.context")
    }
    inputs["context"] = [tensors["in.context.0"], tensors["in.context.1"]]
    inputs["seq_len"] = expected["scalars"]["seq_len"]
    if "clip_fea" in expected["scalars"]:
        inputs["clip_fea"] = clip_features(2)
    return inputs, tensors, expected


def check_case(folder: Path, name: str, case: str) -> None:
    model = build(folder, name)
    model.attend_padding = case == "padded_seq"
    inputs, tensors, expected = read_case(folder, name, case)
    inputs["x"].requires_grad_()
    out = model(**inputs)
    loss = (out - tensors["target"]).square().mean()
    loss.backward()
    torch.testing.assert_close(out, tensors["out"], atol=OUT_ATOL, rtol=0)
    assert abs(loss.item() - expected["loss"]) < LOSS_ATOL
    norms = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
    recorded = {key: norm for key, norm in expected["grad_norms"].items() if norm is not None}
    assert norms.keys() == recorded.keys()
    for key, norm in recorded.items():
        assert norms[key] == pytest.approx(norm, rel=GRAD_RTOL), key
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        if key.startswith("grad."):
            own = inputs["x"].grad if key == "grad.x" else parameters[key.removeprefix("grad.")].grad
            torch.testing.assert_close(own, value, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "case"), KEPT)
def test_recorded_case_kept_here(data_dir: Path, name: str, case: str) -> None:
    check_case(data_dir / "wan", name, case)


@pytest.mark.parametrize(("name", "case"), [c for c in RECORDED if c not in KEPT])
def test_recorded_case(goldens: Path, name: str, case: str) -> None:
    check_case(goldens / "wan", name, case)


@pytest.mark.parametrize("name", sorted({name for name, _ in KEPT}))
def test_registered_config_and_key_order(data_dir: Path, name: str) -> None:
    entry = json.loads((data_dir / "wan" / "index.json").read_text())[name]
    model = build(data_dir / "wan", name)
    recorded = {key: value for key, value in entry["registered_config"].items() if key != "_use_default_values"}
    own = json.loads(json.dumps({key: value for key, value in model.config.items() if key != "_use_default_values"}))
    assert own == recorded
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == entry["keys"]
    assert list(model.state_dict()) == list(entry["keys"])


def test_wan22_registers_its_fixed_cross_attention(goldens: Path) -> None:
    entry = json.loads((goldens / "wan" / "index.json").read_text())["wan22_ti2v"]
    model = build(goldens / "wan", "wan22_ti2v")
    assert json.loads(json.dumps(dict(model.config))) == entry["registered_config"]


def test_saved_config_equals_upstreams(goldens: Path, tmp_path: Path) -> None:
    recorded = json.loads((goldens / "e2e" / "runs" / "f_normal.saved_config.json").read_text())
    arguments = {key: value for key, value in recorded.items() if not key.startswith("_")}
    wan_transformer3d.WanTransformer3DModel(**arguments).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    recorded.pop("_diffusers_version"), saved.pop("_diffusers_version")
    assert saved == recorded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]


def test_padding_is_masked_by_default(data_dir: Path) -> None:
    model = build(data_dir / "wan", "wan21_t2v")
    inputs, tensors, _ = read_case(data_dir / "wan", "wan21_t2v", "padded_seq")
    with torch.no_grad():
        masked = model(**inputs)
        unpadded = model(**{**inputs, "seq_len": None})
    assert torch.equal(masked, unpadded)
    assert (masked - tensors["out"]).abs().max() > 1e-3  # the recorded one attends to the padding


def test_reference_frames_with_a_time_per_token(goldens: Path) -> None:
    """Added tokens get the last time value, so a constant per-token time equals one time per sample."""
    model = build(goldens / "wan", "wan21_fun_control_ref")
    inputs, _, _ = read_case(goldens / "wan", "wan21_fun_control_ref", "ref")
    with torch.no_grad():
        scalar = model(**inputs)
        per_token = model(**{**inputs, "t": inputs["t"][:, None].expand(2, 18)})
        short = model(**{**inputs, "t": inputs["t"][:, None].expand(2, 3)})
    torch.testing.assert_close(per_token, scalar, atol=1e-5, rtol=0)
    torch.testing.assert_close(short, scalar, atol=1e-5, rtol=0)


MANIFESTS = [
    "Wan2.1-Fun-1.3B-Control", "Wan2.1-Fun-14B-Control", "Wan2.1-Fun-V1.1-1.3B-Control-Camera",
    "Wan2.1-Fun-V1.1-1.3B-Control", "Wan2.1-Fun-V1.1-1.3B-InP", "Wan2.1-Fun-V1.1-14B-Control-Camera",
    "Wan2.1-Fun-V1.1-14B-Control", "Wan2.1-Fun-V1.1-14B-InP", "Wan2.1-I2V-14B", "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B",
    "Wan2.2-Fun-5B-Control-Camera", "Wan2.2-Fun-5B-Control", "Wan2.2-Fun-5B-InP", "Wan2.2-Fun-A14B-Control-Camera",
    "Wan2.2-Fun-A14B-Control", "Wan2.2-Fun-A14B-InP", "Wan2.2-I2V-A14B", "Wan2.2-T2V-A14B", "Wan2.2-TI2V-5B",
]  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_published_keys_and_shapes(
    data_dir: Path, manifest: Callable[[str], dict[str, tuple[int, ...]]], name: str
) -> None:
    entry = json.loads((data_dir / "manifests" / f"{name}.json").read_text())
    with torch.device("meta"):
        model = getattr(wan_transformer3d, entry["_class"])(**entry["init_kwargs"])
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == manifest(name)


def test_riflex_changes_only_the_named_frequency() -> None:
    model = wan_transformer3d.WanTransformer3DModel(dim=72, num_heads=1, ffn_dim=8, text_dim=8, num_layers=1)
    before = model.freqs
    model.enable_riflex(k=6, L_test=66, L_test_scale=4.886)
    changed = (model.freqs != before).any(0).nonzero().flatten().tolist()
    assert changed == [5]
    step = 0.9 * 2 * torch.pi / 66 / 4.886
    torch.testing.assert_close(model.freqs[:4, 5].angle(), torch.arange(4, dtype=torch.float64) * step)
    model.disable_riflex()
    assert torch.equal(model.freqs, before)


def test_rope_helpers_agree_with_the_model_table() -> None:
    """The per-sample helpers and the table of the model describe the same rotation."""
    from videox_fun.models.wan_ops import apply_rope
    from videox_fun.models.wan_rope import RopeTable

    table = RopeTable(24)
    x = torch.randn(2, 12, 3, 24, generator=torch.Generator().manual_seed(0))
    grids = torch.tensor([[2, 2, 3], [3, 2, 2]])
    q, k = wan_transformer3d.rope_apply_qk(x, x * 2, grids, table.freqs())
    for sample, grid in enumerate(grids.tolist()):
        own = apply_rope(x[sample : sample + 1], table.grid(grid, x.device))
        torch.testing.assert_close(q[sample : sample + 1], own)
    torch.testing.assert_close(k, q * 2)
