"""The sampling script: what it writes, what it refuses, and the comparison."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.unit.real_runs import LORA, checkpoint, train
from videox_fun.utils import utils
from videox_fun.utils.contact_sheet import filmstrip, make_comparison_sheet, pick_frames
from videox_fun.utils.utils import read_video, save_videos_grid

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--height", "32", "--width", "48", "--num_frames", "5", "--num_inference_steps", "2", "--seed", "3"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_script", ROOT / "scripts/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "ckpt_t2v")


@pytest.fixture(scope="module")
def inp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "ckpt_inp")


@pytest.fixture(scope="module")
def lora(t2v: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(t2v, folder / "out", script=LORA, max_train_steps=1, video_sample_size=32, learning_rate=0.5)
    return folder / "out/checkpoint-1.safetensors"


def picture(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (60, 40)) -> Path:
    Image.new("RGB", size, color).save(path)
    return path


@pytest.fixture(autouse=True)
def kept_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the frames beside each clip: the encoder's losses may differ between two writings of the same frames."""
    write = utils.save_videos_grid

    def save(videos: torch.Tensor, path: Path, **options) -> None:
        write(videos, path, **options)
        np.save(Path(path).with_suffix(".npy"), videos.numpy())

    monkeypatch.setattr(utils, "save_videos_grid", save)


def frames_of(folder: Path) -> dict[str, np.ndarray]:
    """Frames of the written clips, before they were encoded."""
    return {path.name: np.load(path.with_suffix(".npy")) for path in sorted(folder.glob("*.mp4"))}


def test_one_clip_per_prompt_and_seed_under_safe_names(script, t2v, tmp_path, capsys) -> None:
    words = ["--model", str(t2v), "--prompt", "A cat: over/under?", "..", "--num_videos", "2", "--output",
             str(tmp_path), *QUICK]
    assert script.main(words) == 0
    clips = frames_of(tmp_path)
    assert list(clips) == ["00-a-cat-over-under-seed3.mp4", "00-a-cat-over-under-seed4.mp4", "01-clip-seed3.mp4",
                           "01-clip-seed4.mp4"]
    assert all(read_video(tmp_path / name).shape == (5, 32, 48, 3) for name in clips)
    first, second = list(clips.values())[:2]
    assert not np.array_equal(first, second)
    out = capsys.readouterr()
    assert "00-a-cat-over-under-seed3.mp4" in out.out and "prompt 1, seed 4" in out.err
    again = tmp_path / "again"
    assert script.main(["--model", str(t2v), "--prompt", "A cat: over/under?", "--output", str(again), *QUICK]) == 0
    assert np.array_equal(frames_of(again)["00-a-cat-over-under-seed3.mp4"], first)


def test_comparison_shows_what_the_lora_changes(script, t2v, lora, tmp_path, capsys) -> None:
    words = ["--model", str(t2v), "--prompt", "A cat", "--output", str(tmp_path), *QUICK]
    assert script.main([*words, "--lora_path", str(lora), "--compare"]) == 0
    clips = frames_of(tmp_path)
    assert set(clips) == {"00-a-cat-seed3.mp4", "00-a-cat-seed3-without-lora.mp4"}
    assert not np.array_equal(*clips.values())
    sheet = np.asarray(Image.open(tmp_path / "comparison.png"))
    assert sheet.shape[2] == 3 and sheet.shape[1] > 5 * 160
    text = capsys.readouterr().out
    changed = float(text.split("by the LoRA: ")[1].split(" %")[0])
    assert changed > 0.1 and "comparison.png" in text
    plain = tmp_path / "plain"
    assert script.main([*words[:-1 - len(QUICK)], str(plain), *QUICK]) == 0
    assert np.array_equal(frames_of(plain)["00-a-cat-seed3.mp4"], clips["00-a-cat-seed3-without-lora.mp4"])
    silent = tmp_path / "silent"
    assert script.main([*words[:-1 - len(QUICK)], str(silent), *QUICK, "--lora_path", str(lora), "--lora_weight",
                        "0"]) == 0
    assert np.array_equal(frames_of(silent)["00-a-cat-seed3.mp4"], clips["00-a-cat-seed3-without-lora.mp4"])


def test_start_end_and_mask_images_reach_the_model(script, inp, tmp_path) -> None:
    red, blue = picture(tmp_path / "red.png", (250, 0, 0)), picture(tmp_path / "blue.png", (0, 0, 250))
    base = ["--model", str(inp), "--prompt", "a", *QUICK]
    clip, mask = tmp_path / "clip.mp4", picture(tmp_path / "mask.png", (255, 255, 255))
    mask_half = Image.open(mask)
    mask_half.paste((0, 0, 0), (0, 0, 30, 40))
    mask_half.save(mask)
    save_videos_grid(torch.rand(1, 3, 7, 40, 60), clip)
    found = []
    for name, extra in {"none": [], "start": ["--start_image", str(red)],
                        "both": ["--start_image", str(red), "--end_image", str(blue)],
                        "video": ["--video", str(clip), "--mask_image", str(mask)]}.items():
        assert script.main([*base, "--output", str(tmp_path / name), *extra]) == 0
        found.append(frames_of(tmp_path / name)["00-a-seed3.mp4"])
    assert all(not np.array_equal(a, b) for i, a in enumerate(found) for b in found[i + 1:])


def test_size_follows_the_start_image(script, tmp_path) -> None:
    parse = script.build_parser().parse_args
    pipeline = type("Pipeline", (), {"size_step": 16})()
    tall = picture(tmp_path / "tall.png", (1, 2, 3), size=(100, 200))
    args = parse(["--model", "m", "--prompt", "a", "--start_image", str(tall)])
    height, width = script.size_of(args, pipeline)
    assert height % 16 == width % 16 == 0 and height / width == pytest.approx(2, rel=0.05)
    assert script.size_of(parse(["--model", "m", "--prompt", "a"]), pipeline) == (480, 832)


def test_switches_that_save_work(script, t2v, tmp_path) -> None:
    named = tmp_path / "Wan2.1-T2V-14B"
    named.symlink_to(t2v, target_is_directory=True)
    args = script.build_parser().parse_args(
        ["--model", str(named), "--prompt", "a", "--teacache", "0.1", "--cfg_skip", "0.25", "--riflex_k", "2",
         "--sampler", "Flow_DPM++", "--num_frames", "13", "--num_inference_steps", "4"])
    pipeline = script.load(args)
    transformer = pipeline.transformer
    assert transformer.teacache.num_skip_start_steps == 4 and transformer.teacache.num_steps == 4
    assert transformer.cfg_skip_ratio == 0.25 and type(pipeline.scheduler).__name__ == "FlowDPMSolverMultistepScheduler"
    stretched = transformer.freqs
    transformer.disable_riflex()
    assert not torch.equal(transformer.freqs[:, 1], stretched[:, 1])
    assert torch.equal(transformer.freqs[:, 2:], stretched[:, 2:])


@pytest.mark.parametrize(("words", "message"), [
    (["--height", "40", "--width", "48"], "multiples of 16, not 40x48"),
    (["--height", "32"], "--height and --width together"),
    (["--end_image", "{picture}"], "--end_image needs --start_image"),
    (["--start_image", "nothing.png"], "--start_image: nothing.png does not exist"),
    (["--start_image", "{picture}"], "text-to-video model and takes no --start_image"),
    (["--compare"], "--compare needs --lora_path"),
    (["--lora_path", "nothing.safetensors"], "nothing.safetensors is not a file"),
    (["--lora_path", "{lora}", "--lora_weight", "1", "2"], "--lora_weight has 2 and --lora_path 1 entries"),
    (["--lora_path", "{foreign}"], "foreign.safetensors"),
    (["--lora_path", "{foreign}", "--compare"], "foreign.safetensors"),
    (["--lora_path", "{lora}", "--compare", "--offload", "model"], "use it without --offload"),
    (["--num_frames", "0"], "--num_frames must be 1 or more"),
    (["--video", "{picture}"], "--video and --mask_image belong together"),
    (["--riflex_k", "9"], "--riflex_k must lie between 1 and 4"),
    (["--cfg_skip", "2"], "must lie between 0 and 1"),
    (["--teacache", "0.1"], "--teacache: no fit is known for"),
    (["--offload", "model", "--device", "cpu"], "--offload model keeps parts away from a GPU"),
    (["--config_path", "{picture}"], "is not a readable yaml file"),
])
def test_mistakes_are_explained(script, t2v, lora, tmp_path, capsys, words, message) -> None:
    foreign = tmp_path / "foreign.safetensors"
    save_file({"other.lora_down.weight": torch.zeros(2, 3), "other.lora_up.weight": torch.zeros(3, 2)}, foreign)
    places = {"picture": picture(tmp_path / "p.png", (1, 2, 3)), "lora": lora, "foreign": foreign}
    line = ["--model", str(t2v), "--prompt", "a", "--output", str(tmp_path / "out"), "--num_inference_steps", "1",
            "--num_frames", "5", *(word.format(**places) for word in words)]
    assert script.main(line) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_model_are_explained(script, t2v, tmp_path, capsys) -> None:
    line = ["--prompt", "a", "--output", str(tmp_path / "out")]
    assert script.main(["--model", str(tmp_path / "none"), *line]) == 2
    assert "none does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert script.main(["--model", str(tmp_path / "empty"), *line]) == 2
    assert "Give --config_path" in capsys.readouterr().err
    assert script.main(["--model", str(tmp_path / "empty"), "--config_path", str(t2v / "wan.yaml"), *line]) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_full_fine_tuning_is_loaded_over_the_base(script, t2v, tmp_path) -> None:
    weights = load_file(t2v / "diffusion_pytorch_model.safetensors")
    changed = {key: value * 1.5 for key, value in weights.items()}
    save_file(changed, tmp_path / "tuned.safetensors")
    args = script.build_parser().parse_args(["--model", str(t2v), "--prompt", "a", "--transformer_path",
                                             str(tmp_path / "tuned.safetensors")])
    loaded = script.load(args).transformer.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in changed.items())


def test_out_of_memory_says_what_to_do(script, t2v, monkeypatch, capsys) -> None:
    def fail(args) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(script, "run", fail)
    assert script.main(["--model", str(t2v), "--prompt", "a"]) == 1
    assert "--offload model" in capsys.readouterr().err


def test_frames_of_a_strip_are_spread_over_the_clip() -> None:
    clip = torch.linspace(0, 1, 9).view(1, 9, 1, 1).expand(3, 9, 4, 6)
    strip = filmstrip(clip, frames=3)
    assert strip.shape == (4, 18, 3) and strip.dtype == np.uint8
    assert [int(strip[0, column, 0]) for column in (0, 6, 12)] == [0, 128, 255]
    assert len(pick_frames(clip, 20)) == 9


def test_sheet_takes_long_captions_and_refuses_nothing(tmp_path) -> None:
    clip = torch.rand(1, 3, 3, 8, 8)
    path = make_comparison_sheet([("word " * 200, [("a", clip), ("b", clip[0])]), ("short", [("a", clip)])],
                                 tmp_path / "deep/sheet.png", title="t" * 500)
    sheet = np.asarray(Image.open(path))
    assert sheet.shape[0] > 3 * 160 and (sheet[:, -1] == 255).all()
    with pytest.raises(ValueError, match="at least one video"):
        make_comparison_sheet([], path)
