"""Two published memory tables beside the planner's predictions, written into docs/planner.md.

    python benchmarks/planner_tables.py            # print the two tables
    python benchmarks/planner_tables.py --write    # put them into docs/planner.md
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from optim_patches.plan.formula import Network, lora_bytes  # noqa: E402
from optim_patches.plan.phases import make_plan  # noqa: E402
from optim_patches.plan.spec import Adapters, Part, RunSpec, Sample  # noqa: E402
from optim_patches.plan.traces import Traces  # noqa: E402
from videox_fun.training.planning import adapt  # noqa: E402

DOCUMENT = ROOT / "docs/planner.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
_MODULE = "videox_fun.models.wan_transformer3d"
_SIZES = {"1.3B": (1536, 8960, 12, 30), "5B": (3072, 14336, 24, 30), "14B": (5120, 13824, 40, 40)}
_PUBLISHED = {
    "full (BF16 + GC)": ("~24", "~60", "~160"),
    "LoRA rank 64 (BF16 + GC + low_vram)": ("~12", "~24", "~48"),
    "LoRA rank 64 + ZeRO-2, 2 cards": ("~10", "~18", "~35"),
    "full + FSDP FULL_SHARD, 8 cards": ("~8", "~16", "~40"),
    "full + ZeRO-3 + CPU offload, 2 cards": ("~16", "~40", "~48"),
}
#: name: parameters, width, blocks, tokens (latent frames x patches + text), published GB.
_COG = {
    "cogvideox-t2v-2b, 49x480x720": (Network(1.69e9, 1920, 30, 13 * 30 * 45 + 226, 128), 16),
    "cogvideox-t2v-5b, 49x480x720": (Network(5.57e9, 3072, 42, 13 * 30 * 45 + 226, 128), 24),
    "cogvideox-i2v-5b, 49x480x720": (Network(5.58e9, 3072, 42, 13 * 30 * 45 + 226, 128), 24),
    "cogvideox1.5-t2v-5b, 81x768x1360": (Network(5.57e9, 3072, 42, 11 * 48 * 85 + 226, 128), 35),
    "cogvideox1.5-i2v-5b, 81x768x1360": (Network(5.58e9, 3072, 42, 11 * 48 * 85 + 226, 128), 35),
}


def run_of(size: str) -> RunSpec:
    """49 frames of 512 pixels, one sample, the models' own conditions."""
    dim, ffn, heads, blocks = _SIZES[size]
    wide = size == "5B"  # the model of Wan 2.2 with 48 latent channels and 16 pixels per latent
    kwargs = {"model_type": "ti2v" if wide else "i2v", "in_dim": 48 if wide else 36, "out_dim": 48 if wide else 16,
              "dim": dim, "ffn_dim": ffn, "num_heads": heads, "num_layers": blocks, "text_dim": 4096,
              "cross_attn_norm": True}  # fmt: skip
    name = "Wan2_2Transformer3DModel" if wide else "WanTransformer3DModel"
    vae = Part("videox_fun.models.wan_vae3_8:AutoencoderKLWan3_8" if wide else
               "videox_fun.models.wan_vae:AutoencoderKLWan")  # fmt: skip
    return RunSpec(Part(f"{_MODULE}:{name}", kwargs), (Sample(49, 512, 512),), vae=vae, checkpointing=True,
                   low_vram=True, conditioned=not wide, spatial=16 if wide else 8)  # fmt: skip


def variants(size: str) -> dict[str, RunSpec]:
    """The document's rows. Prompts are encoded beforehand or on the host: the text encoder is not in the table."""
    full = run_of(size)
    lora = replace(full, adapters=Adapters(64, 32, "q,k,v,ffn.0,ffn.2"))
    runs = (
        full, lora, replace(lora, world=2, sharding="deepspeed", stage=2),
        replace(full, world=8, local=8, sharding="fsdp", stage=3),
        replace(full, world=2, local=2, sharding="deepspeed", stage=3, offload_optimizer=True, offload_weights=True),
    )
    return dict(zip(_PUBLISHED, runs, strict=True))


def predicted(size: str, traces: Traces) -> list[str]:
    """One column: GB that the run needs, and the phase."""
    cells = []
    for run in variants(size).values():
        peak = make_plan(run, traces).peak("device")
        cells.append(f"{peak.total / 1e9:.0f} ({peak.phase})")
    return cells


def wan_rows(columns: dict[str, list[str]]) -> list[str]:
    head = "| method | " + " | ".join(f"{size}: table | plan" for size in columns) + " |"
    lines = [head, "|---" * (1 + 2 * len(columns)) + "|"]
    for number, (name, published) in enumerate(_PUBLISHED.items()):
        cells = [f"{said} | {columns[size][number]}" for size, said in zip(_SIZES, published, strict=True)
                 if size in columns]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def cog_rows() -> list[str]:
    lines = ["| model, frames x height x width | table | formula |", "|---|---|---|"]
    return lines + [f"| {name} | {said} | {lora_bytes(network) / 1e9:.1f} |" for name, (network, said) in _COG.items()]


def render() -> str:
    traces = Traces(adapt)
    wan = wan_rows({size: predicted(size, traces) for size in _SIZES})
    return "\n".join([*wan, "", *cog_rows()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/planner.md")
    args = parser.parse_args()
    text = render()
    sys.stdout.write(text + "\n")
    if args.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
