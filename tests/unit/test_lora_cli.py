"""``videox-lora``: inspect, convert, merge and extract on small files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.lora_toys import TARGETS, randomize, toy, toy_inputs
from videox_fun.utils.lora_cli import build_parser, main
from videox_fun.utils.lora_codec import FORMATS, read_tensors
from videox_fun.utils.lora_utils import create_network, merge_lora


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    model = toy()
    network = create_network(1.0, 4, 2, None, model, target_name=TARGETS)
    network.apply_to(None, model)
    randomize(network)
    network.save_weights(tmp_path / "lora.safetensors", None, None)
    return tmp_path / "lora.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint folder of two shards and a config, with a wrapper's prefix on every key."""
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {f"model.diffusion_model.{key}": value for key, value in toy().state_dict().items()}
    keys = sorted(tensors)
    for number, part in enumerate((keys[:20], keys[20:])):
        save_file({key: tensors[key] for key in part}, str(folder / f"part-{number}.safetensors"))
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def _all(folder: Path) -> dict[str, torch.Tensor]:
    return {key.removeprefix("model.diffusion_model."): value
            for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def test_help_needs_no_torch() -> None:
    code = ("import sys; from videox_fun.utils.lora_cli import build_parser; build_parser().format_help(); "
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    formats = next(a for a in build_parser()._subparsers._group_actions[0].choices["convert"]._actions
                   if a.dest == "to").choices
    assert tuple(formats) == FORMATS


def test_inspect(lora: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(lora), "--base", str(base), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["matched"], facts["total"]) == ("kohya", 20, 20)
    assert (facts["rank"], facts["alpha"]) == ([4], [2.0])
    layer = facts["layers"]["blocks.0.self_attn.q"]
    tensors = load_file(lora)
    stem = "lora_unet__blocks_0_self_attn_q"
    change = 0.5 * tensors[f"{stem}.lora_up.weight"] @ tensors[f"{stem}.lora_down.weight"]
    assert layer["norm of change"] == pytest.approx(change.norm().item(), rel=1e-3)
    assert main(["inspect", str(lora)]) == 0
    assert "layers: 20 of 20 matched" in capsys.readouterr().out


def test_convert_never_writes_over_what_it_reads(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = lora.read_bytes()
    assert main(["convert", str(lora), str(lora), "--to", "peft"]) == 2
    assert lora.read_bytes() == before and "write to another name" in capsys.readouterr().err


def test_convert_there_and_back(lora: Path, tmp_path: Path) -> None:
    source = lora
    for number, format in enumerate((*FORMATS, "kohya")):
        target = tmp_path / f"{number}.safetensors"
        assert main(["convert", str(source), str(target), "--to", format]) == 0
        source = target
    first, last = load_file(lora), load_file(source)
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key].float(), last[key].float()) for key in first)
    assert set(read_tensors(source)[1]) == {"sshs_model_hash", "sshs_legacy_hash"}
    assert main(["convert", str(lora), str(tmp_path / "h.safetensors"), "--to", "peft", "--dtype", "bfloat16"]) == 0
    assert {value.dtype for value in load_file(tmp_path / "h.safetensors").values()} == {torch.bfloat16}


def test_merge_equals_merge_lora(lora: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merged"
    assert main(["merge", "--base", str(base), "--lora", str(lora), str(lora), "--weight", "0.5", "0.25",
                 "--output", str(out)]) == 0
    assert "20 weights changed by 2 LoRA" in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in base.iterdir())
    pipeline = SimpleNamespace(transformer=toy())
    merge_lora(pipeline, lora, 0.75)
    merged = _all(out)
    for key, value in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(merged[key], value)


def test_extract_recovers_a_low_rank_difference(lora: Path, base: Path, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    merged, out = tmp_path / "merged", tmp_path / "extracted.safetensors"
    main(["merge", "--base", str(base), "--lora", str(lora), "--output", str(merged)])
    assert main(["extract", "--base", str(base), "--tuned", str(merged), "--output", str(out), "--rank", "4"]) == 0
    text = capsys.readouterr().out
    assert "20 layers, rank up to 4, 100.00 %" in text and "other tensors" not in text
    model, wanted = SimpleNamespace(transformer=toy()), SimpleNamespace(transformer=toy())
    merge_lora(model, out, 1.0)
    merge_lora(wanted, lora, 1.0)
    torch.testing.assert_close(model.transformer(*toy_inputs()), wanted.transformer(*toy_inputs()), atol=1e-4, rtol=0)
    assert main(["extract", "--base", str(base), "--tuned", str(merged), "--output", str(out), "--rank", "1"]) == 0
    kept = float(capsys.readouterr().out.split("rank up to 1, ")[1].split(" %")[0])
    assert 20 < kept < 90


def test_extract_by_subspace_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights take another path; it must find the same change and leave the random state alone."""
    monkeypatch.setattr("videox_fun.utils.lora_cli._EXACT_SVD_SIZE", 8)
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(60, 48, generator=generator)
    change = torch.randn(60, 3, generator=generator) @ torch.randn(3, 48, generator=generator)
    save_file({"blocks.0.ffn.0.weight": before, "blocks.0.ffn.0.bias": torch.zeros(2)}, str(tmp_path / "a.safetensors"))
    save_file({"blocks.0.ffn.0.weight": before + change, "blocks.0.ffn.0.bias": torch.ones(2)},
              str(tmp_path / "b.safetensors"))
    state = torch.get_rng_state()
    assert main(["extract", "--base", str(tmp_path / "a.safetensors"), "--tuned", str(tmp_path / "b.safetensors"),
                 "--output", str(tmp_path / "l.safetensors"), "--rank", "3", "--to", "peft"]) == 0
    assert torch.equal(state, torch.get_rng_state())
    tensors = load_file(tmp_path / "l.safetensors")
    product = tensors["blocks.0.ffn.0.lora_B.weight"] @ tensors["blocks.0.ffn.0.lora_A.weight"]
    torch.testing.assert_close(product, change, atol=1e-3, rtol=1e-3)


def test_extract_counts_what_a_lora_cannot_hold(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = {key: value.clone() for key, value in toy().state_dict().items()}
    tuned["head.head.bias"] += 1
    tuned["head.head.weight"] += 1
    save_file({f"model.diffusion_model.{key}": value for key, value in tuned.items()}, str(tmp_path / "t.safetensors"))
    assert main(["extract", "--base", str(base), "--tuned", str(tmp_path / "t.safetensors"),
                 "--output", str(tmp_path / "x.safetensors"), "--rank", "1"]) == 0
    text = capsys.readouterr().out
    assert "1 layers" in text and "1 other tensors differ" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["inspect", "nowhere.safetensors"], "does not exist"),
        (["convert", "{lora}", "x.pt", "--to", "peft"], ".safetensors"),
        (["merge", "--base", "{base}", "--lora", "{lora}", "--weight", "1", "2", "--output", "x"], "files but 2"),
        (["merge", "--base", "nowhere", "--lora", "{lora}", "--output", "x"], "neither a weight file nor a folder"),
        (["extract", "--base", "{base}", "--tuned", "{base}", "--output", "x.safetensors"], "No linear weight differs"),
        (["extract", "--base", "{base}", "--tuned", "{base}", "--output", "x.safetensors", "--rank", "0"], "--rank 0"),
    ],
)
def test_mistakes(lora: Path, base: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument.format(lora=lora, base=base) for argument in arguments]) == 2
    assert text in capsys.readouterr().err
