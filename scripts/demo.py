"""The whole path once, small enough for two CPU cores: ``make demo``.

A Wan2.1-Fun-InP checkpoint with tiny random weights is written in the layout of the published ones, real clips are cut
into a data set, and the LoRA script is run on both through ``accelerate launch`` with the flags a user would give.
What the machine cannot do (Liger without CUDA, say) becomes a row of the audit table, because of ``--audit log``.
Then one clip is sampled with and without the LoRA, from the same noise and first frame. The VAE's weights are random
too, so the pictures show that the LoRA acts, not what a trained model would draw.
Exits with 1 when the loss does not fall or a result is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SCRIPT = "scripts/wan2.1_fun/train_lora.py"
SAMPLER = "scripts/generate.py"


def build_inputs(folder: Path) -> tuple[Path, Path, Path]:
    """Checkpoint folder, its configuration file and the annotation file."""
    from videox_fun.data.demo import build_demo_dataset
    from videox_fun.utils.tiny import make_tiny_checkpoint

    checkpoint = make_tiny_checkpoint(folder / "Wan2.1-Fun-tiny-InP", family="wan2.1_fun_inp")
    return checkpoint.folder, checkpoint.config_path, build_demo_dataset(folder / "clips")


def training_command(checkpoint: Path, config: Path, metadata: Path, output: Path, *, steps: int,
                     precision: str) -> list[str]:
    """The command a user would type, with the flags of the optimization layer at the end."""
    return [
        "accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no",
        "--mixed_precision", precision,
        SCRIPT,
        "--config_path", str(config),
        "--pretrained_model_name_or_path", str(checkpoint),
        "--train_data_dir", str(metadata.parent),
        "--train_data_meta", str(metadata),
        "--train_mode", "inpaint",
        "--image_sample_size", "64", "--video_sample_size", "64", "--token_sample_size", "64",
        "--video_sample_stride", "2", "--video_sample_n_frames", "9",
        "--enable_bucket", "--uniform_sampling", "--random_hw_adapt", "--training_with_video_token_length",
        "--train_batch_size", "1", "--gradient_accumulation_steps", "1", "--dataloader_num_workers", "0",
        "--max_train_steps", str(steps), "--checkpointing_steps", str(steps),
        "--learning_rate", "1e-3", "--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", "5",
        "--rank", "16", "--network_alpha", "16",
        "--seed", "42", "--mixed_precision", precision, "--low_vram", "--gradient_checkpointing",
        "--output_dir", str(output),
        "--compile", "--liger", "--audit", "log",
    ]


def first_frame(metadata: Path, path: Path) -> str:
    """Write the first frame of the first clip to ``path`` and return the clip's caption."""
    from PIL import Image

    from videox_fun.data.decode import VideoReader

    row = json.loads(metadata.read_text(encoding="utf-8"))[0]
    with VideoReader(metadata.parent / row["file_path"]) as reader:
        Image.fromarray(reader.read([0])[0]).save(path)
    return row["text"]


def sampling_command(checkpoint: Path, config: Path, output: Path, *, caption: str, image: Path,
                     steps: int) -> list[str]:
    """The command that draws a clip with and without the LoRA."""
    return [
        "python", SAMPLER,
        "--model", str(checkpoint),
        "--config_path", str(config),
        "--lora_path", str(output / f"checkpoint-{steps}.safetensors"),
        "--prompt", caption,
        "--start_image", str(image),
        "--height", "64", "--width", "64", "--num_frames", "9",
        "--num_inference_steps", "10", "--guidance_scale", "3", "--seed", "42",
        "--compare",
        "--output", str(output / "samples"),
    ]


def shown(command: list[str]) -> str:
    """The command over several lines, as it can be pasted into a shell."""
    lines, words = [], []
    for word in command:
        if (word.startswith("--") or word in (SCRIPT, SAMPLER)) and words:
            lines.append(" ".join(words))
            words = []
        words.append(shlex.quote(word))
    return " \\\n    ".join([*lines, " ".join(words)])


def losses(output: Path) -> list[float]:
    """The loss of every step, from the run's event file."""
    rows = map(json.loads, (output / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [float(row["loss"]) for row in rows if row.get("event") == "step" and "loss" in row]


def report(output: Path, *, seconds: float) -> int:
    """Say what came out and where it is. Returns the exit code."""
    values = losses(output)
    tenth = max(1, len(values) // 10)
    first, last = sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth
    results = {
        "audit table": output / "audit.md",
        "audit data": output / "audit.json",
        "loss curve": output / "training_curves.png",
        "LoRA file": output / f"checkpoint-{len(values)}.safetensors",
        "comparison": output / "samples" / "comparison.png",
    }
    print(f"\nDemo finished: {len(values)} steps in {seconds:.0f} s; mean loss of the first {tenth} steps "
          f"{first:.3f}, of the last {tenth} steps {last:.3f}.")
    for name, path in results.items():
        print(f"  {name:12} {os.path.relpath(path)}")
    missing = [name for name, path in results.items() if not path.is_file()]
    if missing:
        print(f"Missing: {', '.join(missing)}.", file=sys.stderr)
    if not last < first:
        print("The loss did not fall.", file=sys.stderr)
    return int(bool(missing) or not last < first)


def finished(command: list[str], environment: dict[str, str]) -> bool:
    """Run a command at the repository's root and say so when it fails."""
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code:
        print(f"{command[1]} ended with exit code {code}.", file=sys.stderr)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "demo_output", help="where inputs and results go")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    args = parser.parse_args()
    import torch

    cuda = torch.cuda.is_available()
    print("Building a tiny checkpoint and a data set of real clips ...", flush=True)
    checkpoint, config, metadata = build_inputs(args.folder)
    output = args.folder / "lora"
    shutil.rmtree(output, ignore_errors=True)
    relative = [Path(os.path.relpath(path, ROOT)) for path in (checkpoint, config, metadata, output)]
    command = training_command(*relative, steps=args.steps, precision="bf16" if cuda else "no")
    print(f"\n{shown(command)}\n", flush=True)
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if not cuda:
        # The tensors are too small to share: a second thread would mostly wait for the first.
        environment.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    start = time.perf_counter()
    if not finished([str(Path(sys.executable).parent / "accelerate"), *command[1:]], environment):
        return 1
    image = args.folder / "first_frame.png"
    caption = first_frame(metadata, image)
    sampling = sampling_command(relative[0], relative[1], relative[3], caption=caption,
                                image=Path(os.path.relpath(image, ROOT)), steps=args.steps)
    print(f"\n{shown(sampling)}\n", flush=True)
    if not finished([sys.executable, *sampling[1:]], environment):
        return 1
    return report(output, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
