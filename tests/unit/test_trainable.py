"""What is trained: selection, types, files, loading, and the mistakes that are refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.unit.lora_toys import ToyWan, context, lora_args, randomize, toy, toy_inputs
from videox_fun.training.context import Player
from videox_fun.training.specs import get_spec
from videox_fun.training.trainable import Named, NativeLora, PeftLora, Trainable, make_trainable, trainable_dtype
from videox_fun.utils.lora_codec import read_tensors

PEFT = {"use_peft_lora": True}


def _full_args(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {"learning_rate": 1e-4, "trainable_modules": ["."], "upstream_compat": False,
                              "trainable_modules_low_learning_rate": [], "learning_rate_low": None,
                              "allow_partial_load": False, "master_weights_fp32": False}
    return argparse.Namespace(**{**values, **changes})


def _attached(args: argparse.Namespace, model: nn.Module | None = None, *, script: str = "wan2.1_fun/train_lora",
              **facts: Any) -> tuple[Trainable, Player]:
    ctx = context(args, script=script, **facts)
    trainable = make_trainable(ctx.spec, args)
    player = Player("transformer", model or toy(), trainable)
    player.groups = trainable.attach(ctx, player)
    return trainable, player


def _full(model: nn.Module | None = None, **changes: Any) -> tuple[Trainable, Player]:
    return _attached(_full_args(**changes), model, script="wan2.1_fun/train")


def _written(trainable: Trainable, player: Player, folder: Path, *, layout: str = "bare",
             dtype: torch.dtype = torch.float32) -> dict[str, Path]:
    paths = {}
    for file in trainable.export(player, layout=layout, dtype=dtype):
        path = folder / file.name.format(stem="checkpoint-3")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(file.tensors, str(path), file.metadata)
        paths[path.relative_to(folder).as_posix()] = path
    return paths


def _equal_files(left: Path, right: Path) -> bool:
    (a, metadata_a), (b, metadata_b) = read_tensors(left), read_tensors(right)
    return metadata_a == metadata_b and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_make_trainable_follows_row_and_flag() -> None:
    assert isinstance(make_trainable(get_spec("wan2.1_fun/train"), _full_args()), Named)
    lora = get_spec("wan2.1_fun/train_lora")
    assert isinstance(make_trainable(lora, lora_args()), NativeLora)
    assert isinstance(make_trainable(lora, lora_args(**PEFT)), PeftLora)
    with pytest.raises(ValueError, match="asks for the trainable 'other'"):
        make_trainable(argparse.Namespace(id="x", trainable="other"), lora_args())


# ---- parameters chosen by name


def test_named_groups_by_substring_main_list_wins() -> None:
    _, player = _full(trainable_modules=["attn.q"], trainable_modules_low_learning_rate=["attn", "head"])
    main, low = player.groups
    assert (main.lr, low.lr) == (1e-4, 5e-5)
    assert main.names == [f"blocks.{i}.{kind}_attn.q.{part}" for i in range(2) for kind in ("self", "cross")
                          for part in ("weight", "bias")]
    assert not set(main.names) & set(low.names)
    assert "head.head.bias" in low.names and "blocks.0.self_attn.k.weight" in low.names
    chosen = {*main.names, *low.names}
    assert {name for name, p in player.model.named_parameters() if p.requires_grad} == chosen
    assert [id(p) for p in player.trainable.clip_parameters(player)] == [
        id(p) for name, p in player.model.named_parameters() if name in chosen]


def test_named_second_group_exists_even_when_empty_and_its_rate_can_be_given() -> None:
    _, player = _full(learning_rate_low=3e-6)
    assert [len(group.params) for group in player.groups] == [len(list(player.model.parameters())), 0]
    assert player.groups[1].lr == 3e-6
    torch.optim.AdamW([{"params": group.params, "lr": group.lr} for group in player.groups])


@pytest.mark.parametrize("missing", [None, []])
def test_named_without_words_is_an_error(missing: list[str] | None) -> None:
    with pytest.raises(ValueError, match="needs --trainable_modules"):
        _full(trainable_modules=missing)


def test_named_word_that_matches_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="'self_atn'.*Did you mean self_attn"):
        _full(trainable_modules=["self_atn", "head"])
    with caplog.at_level("WARNING"):
        _full(trainable_modules=["zzz", "head"], upstream_compat=True)
    assert "'zzz'" in caplog.text
    with pytest.raises(ValueError, match="'zzz'"):
        _full(trainable_modules=["zzz"], upstream_compat=True)


def test_named_files(tmp_path: Path) -> None:
    trainable, player = _full(trainable_modules=["ffn"])
    player.model.register_buffer("table", torch.arange(3))
    bare, = trainable.export(player, layout="bare", dtype=torch.bfloat16)
    folder, = trainable.export(player, layout="folder", dtype=torch.bfloat16)
    assert (bare.name, folder.name) == ("{stem}.safetensors", "transformer/diffusion_pytorch_model.safetensors")
    assert folder.metadata == {"format": "pt"}
    assert folder.tensors.keys() == player.model.state_dict().keys()
    assert {value.dtype for key, value in folder.tensors.items() if key != "table"} == {torch.bfloat16}
    assert folder.tensors["table"].dtype == torch.int64
    with pytest.raises(ValueError, match="layout 'tree'"):
        trainable.export(player, layout="tree", dtype=torch.float32)


def test_named_export_carries_the_model_config() -> None:
    class Configured(ToyWan):
        def to_json_string(self) -> str:
            return json.dumps({"_class_name": "Configured", "dim": 16})

    trainable, player = _full(Configured())
    file, = trainable.export(player, layout="folder", dtype=torch.float32)
    assert file.config == {"_class_name": "Configured", "dim": 16}


@pytest.mark.parametrize("layout", ["bare", "folder"])
def test_named_save_and_load(tmp_path: Path, layout: str) -> None:
    trainable, player = _full()
    randomize(player.model)
    paths = _written(trainable, player, tmp_path, layout=layout)
    source = tmp_path if layout == "folder" else next(iter(paths.values()))
    other, fresh = _full()
    report = other.load(fresh, source)
    assert (report.matched, report.missing, report.unexpected) == (len(_state(fresh.model)), (), ())
    assert all(torch.equal(a, b) for a, b in zip(_state(player.model).values(), _state(fresh.model).values(),
                                                 strict=True))


def test_named_load_of_shards_and_of_a_model_folder(tmp_path: Path) -> None:
    trainable, player = _full()
    tensors = _state(toy(seed=7))
    keys = list(tensors)
    for number, part in enumerate((keys[:9], keys[9:]), start=1):
        save_file({key: tensors[key] for key in part},
                  str(tmp_path / f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"))
    assert trainable.load(player, tmp_path).matched == len(keys)
    assert torch.equal(player.model.head["head"].weight, tensors["head.head.weight"])


def test_named_load_names_what_does_not_match(tmp_path: Path) -> None:
    trainable, player = _full()
    before = _state(player.model)
    tensors = _state(toy(seed=7))
    tensors["extra.weight"] = tensors.pop("head.head.bias")
    save_file(tensors, str(tmp_path / "w.safetensors"))
    with pytest.raises(ValueError, match=r"1 missing \(head.head.bias\). 1 unexpected \(extra.weight\)"):
        trainable.load(player, tmp_path / "w.safetensors")
    tensors["head.head.weight"] = torch.zeros(3, 3)
    save_file(tensors, str(tmp_path / "w.safetensors"))
    with pytest.raises(ValueError, match=r"head.head.weight: saved \[3, 3\], model \[16, 16\]"):
        trainable.load(player, tmp_path / "w.safetensors")
    assert all(torch.equal(before[key], value) for key, value in player.model.state_dict().items())
    tensors["head.head.weight"] = torch.zeros(16, 16)
    save_file(tensors, str(tmp_path / "w.safetensors"))
    partial, fresh = _full(allow_partial_load=True)
    report = partial.load(fresh, tmp_path / "w.safetensors")
    assert (report.missing, report.unexpected) == (("head.head.bias",), ("extra.weight",))
    with pytest.raises(ValueError, match="holds no model weights"):
        trainable.load(player, tmp_path / "nowhere")


# ---- types


@pytest.mark.parametrize(
    ("weight_dtype", "master", "expected"),
    [
        (torch.float32, False, torch.float32),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.bfloat16, True, torch.float32),
        (torch.float16, False, torch.float32),
    ],
)
@pytest.mark.parametrize("kind", ["named", "lora", "peft"])
def test_types(kind: str, weight_dtype: torch.dtype, master: bool, expected: torch.dtype) -> None:
    """Trained parameters follow the table; the frozen rest keeps the type it was loaded in."""
    model = toy().to(weight_dtype)
    if kind == "named":
        args, script = _full_args(trainable_modules=["ffn"], master_weights_fp32=master), "wan2.1_fun/train"
    else:
        args, script = lora_args(use_peft_lora=kind == "peft", master_weights_fp32=master), "wan2.1_fun/train_lora"
    _, player = _attached(args, model, script=script, weight_dtype=weight_dtype)
    assert trainable_dtype(args, weight_dtype) == expected
    assert {p.dtype for group in player.groups for p in group.params} == {expected}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {weight_dtype}


# ---- LoRA


@pytest.mark.parametrize(("flags", "layers"), [({}, 20), (PEFT, 16)])
def test_lora_attach_marks_only_adapters(flags: dict[str, Any], layers: int) -> None:
    trainable, player = _attached(lora_args(**flags))
    group, = player.groups
    trained = {name for name, p in player.model.named_parameters() if p.requires_grad}
    assert set(group.names) == trained
    assert len(group.params) == 2 * layers
    assert all("lora_" in name for name in trained)
    assert group.lr == 1e-4
    facts = trainable.facts(player)
    assert (facts["layers"], facts["rank"], facts["alpha"]) == (layers, 4, 2)
    assert facts["trainable_parameters"] == sum(p.numel() for p in group.params)
    assert {id(p) for p in trainable.clip_parameters(player)} == {id(p) for p in group.params}


@pytest.mark.parametrize("flags", [{}, PEFT])
def test_lora_skip_and_all_layers(flags: dict[str, Any]) -> None:
    target = "all-linear" if flags else None
    _, player = _attached(lora_args(target_name=target, lora_skip_name="ffn,text_embedding", **flags))
    names = player.trainable._layer_names(player)
    assert len(names) == 17
    assert not any("ffn" in name or "text_embedding" in name for name in names)
    with pytest.raises(ValueError, match="No layer is left"):
        _attached(lora_args(target_name="q", lora_skip_name="attn", **flags))


@pytest.mark.parametrize("flags", [{}, PEFT])
def test_target_that_matches_nothing(flags: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Case 85. A script whose own documented command has dead targets names them in its row."""
    with pytest.raises(ValueError, match="matches 'fnf.0'.*Did you mean ffn.0"):
        _attached(lora_args(target_name="q,fnf.0", **flags))
    with pytest.raises(ValueError, match="'to_q'"):
        _attached(lora_args(target_name="to_q", upstream_compat=True, **flags))
    with caplog.at_level("WARNING"):
        _attached(lora_args(target_name="q,ff.0", **flags), dead_targets=("ff.0",))
        _attached(lora_args(target_name="q,gone", upstream_compat=True, **flags))
    assert "'ff.0'" in caplog.text and "'gone'" in caplog.text


def test_native_matches_parts_of_the_path_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        _, substring = _attached(lora_args(target_name="k"))
    assert len(substring.model.network.unet_loras) == 20
    assert "18 layers are adapted that PEFT would leave" not in caplog.text
    assert "16 layers are adapted that PEFT would leave" in caplog.text
    _, exact = _attached(lora_args(target_name="k", lora_exact_match=True))
    assert list(exact.model.network.unet_modules) == [
        f"blocks.{i}.{kind}_attn.k" for i in range(2) for kind in ("self", "cross")]


def test_peft_needs_targets_and_has_no_drop_outs() -> None:
    with pytest.raises(ValueError, match="--use_peft_lora needs --target_name"):
        _attached(lora_args(target_name=None, **PEFT))
    with pytest.raises(ValueError, match="--rank_drop_out needs the native LoRA"):
        _attached(lora_args(rank_drop_out=0.1, **PEFT))


def test_native_drop_outs_reach_the_modules() -> None:
    trainable, player = _attached(lora_args(rank_drop_out=0.1, module_drop_out=0.2, neuron_drop_out=0.3))
    assert {(m.rank_dropout, m.module_dropout, m.dropout) for m in player.model.network.unet_loras} == {(0.1, 0.2, 0.3)}
    assert trainable.facts(player)["module_drop_out"] == 0.2


@pytest.mark.parametrize("flags", [{}, PEFT])
def test_second_attach_is_refused(flags: dict[str, Any]) -> None:
    """Case 51."""
    trainable, player = _attached(lora_args(**flags))
    keys = list(player.model.state_dict())
    with pytest.raises(ValueError, match="already carries a LoRA"):
        trainable.attach(context(lora_args(**flags)), player)
    assert list(player.model.state_dict()) == keys


@pytest.mark.parametrize("flags", [{}, PEFT])
def test_lora_plus_gives_the_up_matrices_their_own_rate(flags: dict[str, Any]) -> None:
    _, player = _attached(lora_args(lora_plus_ratio=16.0, **flags))
    down, up = player.groups
    assert (down.lr, up.lr) == (1e-4, 16e-4)
    assert len(down.params) == len(up.params)
    assert all("lora_up" in name or "lora_B" in name for name in up.names)


@pytest.mark.parametrize("flags", [{}, PEFT])
@pytest.mark.parametrize("layout", ["bare", "folder"])
def test_lora_save_load_save_is_stable(tmp_path: Path, flags: dict[str, Any], layout: str) -> None:
    """Cases 50 and 51: after loading, the trained objects are the optimizer's, and the file stays the same."""
    trainable, player = _attached(lora_args(**flags))
    randomize(player.model)
    want = player.model(*toy_inputs())
    paths = _written(trainable, player, tmp_path / "a", layout=layout)
    source = tmp_path / "a" if layout == "folder" else paths["checkpoint-3.safetensors"]
    other, fresh = _attached(lora_args(**flags))
    before = [id(p) for group in fresh.groups for p in group.params]
    for _ in range(2):
        report = other.load(fresh, source)
    assert report.matched == report.total and not report.missing
    assert [id(p) for p in fresh.model.parameters() if p.requires_grad] == before
    assert torch.equal(fresh.model(*toy_inputs()), want)
    again = _written(other, fresh, tmp_path / "b", layout=layout)
    assert again.keys() == paths.keys()
    assert all(_equal_files(again[name], paths[name]) for name in paths)
    optimizer = torch.optim.AdamW([{"params": group.params, "lr": group.lr} for group in fresh.groups])
    fresh.model(*toy_inputs()).square().mean().backward()
    optimizer.step()
    changed = _written(other, fresh, tmp_path / "c", layout=layout)
    assert not any(_equal_files(changed[name], paths[name]) for name in paths)
    assert all(changed[name].stat().st_size == paths[name].stat().st_size for name in paths)


@pytest.mark.parametrize("flags", [{}, PEFT])
@pytest.mark.parametrize(("rank", "alpha"), [(8, 2), (4, 8)])
def test_lora_of_another_rank_or_alpha(tmp_path: Path, flags: dict[str, Any], rank: int, alpha: int) -> None:
    """Case 80: saved and asked values side by side."""
    paths = _written(*_attached(lora_args(**flags)), tmp_path)
    other, fresh = _attached(lora_args(rank=rank, network_alpha=alpha, **flags))
    text = f"saved rank 4, asked --rank {rank}; saved alpha 2, asked --network_alpha {alpha}"
    with pytest.raises(ValueError, match=text):
        other.load(fresh, paths["checkpoint-3.safetensors"])


@pytest.mark.parametrize("flags", [{}, PEFT])
def test_lora_of_other_layers(tmp_path: Path, flags: dict[str, Any]) -> None:
    paths = _written(*_attached(lora_args(target_name="self_attn.q,self_attn.k", **flags)), tmp_path)
    other, fresh = _attached(lora_args(target_name="self_attn.q,self_attn.v", **flags))
    with pytest.raises(ValueError, match="not in the file.*self_attn.v.*not adapted here.*self_attn.k"):
        other.load(fresh, paths["checkpoint-3.safetensors"])


def test_peft_and_native_files_load_into_each_other(tmp_path: Path) -> None:
    """A warm start from the other kind of file; both kinds adapt the same layers here."""
    target = "self_attn.q,cross_attn.v"
    for saver, loader in (({}, PEFT), (PEFT, {})):
        trainable, player = _attached(lora_args(target_name=target, **saver))
        randomize(player.model)
        path = _written(trainable, player, tmp_path)["checkpoint-3.safetensors"]
        other, fresh = _attached(lora_args(target_name=target, **loader))
        assert other.load(fresh, path).matched == 4
        torch.testing.assert_close(fresh.model(*toy_inputs()), player.model(*toy_inputs()))


def test_load_finds_the_file_of_a_state_folder_and_explains_others(tmp_path: Path) -> None:
    """Cases 41 and 42."""
    trainable, player = _attached(lora_args())
    with pytest.raises(ValueError, match="lora_diffusion_pytorch_model.safetensors is missing"):
        trainable.load(player, tmp_path)
    (tmp_path / "transformer").mkdir()
    with pytest.raises(ValueError, match="full fine-tuning"):
        trainable.load(player, tmp_path)
    _written(trainable, player, tmp_path / "state", layout="folder")
    full, full_player = _full()
    with pytest.raises(ValueError, match="of a LoRA run"):
        full.load(full_player, tmp_path / "state")


def test_peft_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Upstream's names; strength beside the tensors by default, exactly upstream's files under compat (Q-21)."""
    trainable, player = _attached(lora_args(**PEFT))
    names = {"bare": ["{stem}.safetensors", "{stem}-compatible_with_comfyui.safetensors"],
             "folder": ["lora_diffusion_pytorch_model.safetensors",
                        "lora_diffusion_pytorch_model_compatible_with_comfyui.safetensors"]}
    for layout, expected in names.items():
        own, comfy = trainable.export(player, layout=layout, dtype=torch.float32)
        assert [own.name, comfy.name] == expected
        assert own.metadata == {"format": "pt", "lora_alpha": "2", "rank": "4"}
        assert (len(own.tensors), len(comfy.tensors), comfy.metadata) == (32, 48, {"format": "pt"})
        assert "blocks.0.self_attn.q.lora_A.weight" in own.tensors
        assert comfy.tensors["lora_unet__blocks_0_self_attn_q.alpha"].item() == 2
    compat, compat_player = _attached(lora_args(upstream_compat=True, **PEFT))
    own, comfy = compat.export(compat_player, layout="bare", dtype=torch.float32)
    assert (own.metadata, comfy.metadata) == ({"format": "pt"}, {"format": "pt"})
    assert (len(own.tensors), len(comfy.tensors)) == (32, 32)


def test_peft_dora_trains_saves_and_loads(tmp_path: Path) -> None:
    trainable, player = _attached(lora_args(target_name="self_attn.q", use_dora=True, **PEFT))
    assert sum("magnitude" in name for name in player.groups[0].names) == 2
    randomize(player.model)
    paths = _written(trainable, player, tmp_path)
    assert list(paths) == ["checkpoint-3.safetensors"]
    other, fresh = _attached(lora_args(target_name="self_attn.q", use_dora=True, **PEFT))
    other.load(fresh, paths["checkpoint-3.safetensors"])
    assert torch.equal(fresh.model(*toy_inputs()), player.model(*toy_inputs()))
    plain, plain_player = _attached(lora_args(target_name="self_attn.q", **PEFT))
    with pytest.raises(ValueError, match="DoRA"):
        plain.load(plain_player, paths["checkpoint-3.safetensors"])
    with pytest.raises(ValueError, match="missing"):
        other.load(fresh, _written(plain, plain_player, tmp_path / "p")["checkpoint-3.safetensors"])


class T5SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q": nn.Linear(4, 4), "o": nn.Linear(4, 4)})


def test_text_encoder_flag() -> None:
    """Q-25: under compat the adapters are created and saved as upstream does. (test_resume_early has the refusal.)"""
    encoder = nn.ModuleDict({"blocks": nn.ModuleList([T5SelfAttention()])})
    for token_length, groups, keys in ((False, [2, 40], 63), (True, [40], 60)):
        args = lora_args(train_text_encoder=True, upstream_compat=True, training_with_video_token_length=token_length)
        trainable, player = NativeLora(args), Player("transformer", toy(), None)
        trainable.text_encoder = encoder
        player.groups = trainable.attach(context(args), player)
        assert [len(group.params) for group in player.groups] == groups
        assert [group.lr for group in player.groups] == [5e-5, 1e-4][-len(groups):]
        file, = trainable.export(player, layout="bare", dtype=torch.float32)
        assert len(file.tensors) == keys
        player.model.network.remove()


def test_text_encoder_draws_come_first() -> None:
    """Q-67: adapters of the text encoder are dropped, yet the others' initial values depend on their draws."""
    encoder = nn.ModuleDict({"blocks": nn.ModuleList([T5SelfAttention()])})
    values = []
    for text in (None, encoder):
        args = lora_args()
        trainable, player = NativeLora(args), Player("transformer", toy(), None)
        trainable.text_encoder = text
        torch.manual_seed(42)
        trainable.attach(context(args), player)
        values.append(player.model.network.unet_loras[0].lora_down.weight.clone())
        assert not any(key.startswith("lora_te") for key in player.model.network.state_dict())
    assert not torch.equal(*values)
