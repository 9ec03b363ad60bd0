"""The planner against ``torch.cuda.max_memory_allocated`` on a GPU: ten runs of a Wan transformer, under six minutes.

Each configuration builds a network of real width with few blocks, makes two full steps (the second has optimizer
state) and compares the allocator's peak with the plan's, margin left out.

    python benchmarks/planner_gpu.py --json planner_gpu.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.planner import DTYPES, LORA, NETWORK, Row  # noqa: E402
from optim_patches.plan import denoiser  # noqa: E402
from optim_patches.plan.phases import make_plan  # noqa: E402
from optim_patches.plan.spec import Part, RunSpec, Sample  # noqa: E402
from optim_patches.plan.traces import Traces  # noqa: E402
from videox_fun.training.planning import adapt  # noqa: E402

_LIMIT_S = 330


def network(dim: int, ffn: int, heads: int, blocks: int) -> Part:
    return Part(NETWORK, {"model_type": "t2v", "in_dim": 16, "out_dim": 16, "dim": dim, "ffn_dim": ffn,
                          "num_heads": heads, "num_layers": blocks, "text_dim": 4096, "cross_attn_norm": True})


def configurations() -> dict[str, RunSpec]:
    small = RunSpec(network(1536, 8960, 12, 30), (Sample(17, 480, 832),), checkpointing=True)
    large = RunSpec(network(5120, 13824, 40, 6), (Sample(49, 512, 512),), checkpointing=True)
    return {
        "1.3B full": small, "1.3B full fused": replace(small, fused=True),
        "1.3B full, kept": replace(small, checkpointing=False, samples=(Sample(9, 256, 256),)),
        "1.3B LoRA": replace(small, adapters=LORA),
        "1.3B LoRA 81 frames": replace(small, adapters=LORA, samples=(Sample(81, 480, 832),)),
        "1.3B LoRA batch 2": replace(small, adapters=LORA, samples=(Sample(17, 480, 832, 2),)),
        "1.3B LoRA accumulation": replace(small, adapters=LORA, accumulation=2),
        "14B width, 6 blocks, full": large, "14B width, 6 blocks, LoRA": replace(large, adapters=LORA),
        "14B width, 6 blocks, LoRA, kept": replace(large, adapters=LORA, checkpointing=False),
    }  # fmt: skip


def measure(run: RunSpec) -> int:
    """Peak of the allocator over two steps."""
    device, sample = torch.device("cuda"), run.samples[0]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device(device):
        torch.set_default_dtype(DTYPES[run.precision])
        model = denoiser.load_class(run.denoiser.cls)(**run.denoiser.kwargs)
        torch.set_default_dtype(torch.float32)
    denoiser.choose_trained(model, run, adapt)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.train()
    if run.checkpointing:
        model.enable_gradient_checkpointing()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, **({"fused": True} if run.fused else {}))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(run.accumulation):
            inputs = denoiser.step_inputs(model, run, sample, device)
            for tensor in denoiser.tree_tensors(inputs):
                tensor.normal_()
            pixels = torch.zeros(sample.batch, sample.frames, 3, sample.height, sample.width, device=device)
            denoiser._step(model, inputs, denoiser.Ledger())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del pixels, inputs
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("planner_gpu: there is no GPU here; benchmarks/planner.py measures on a CPU.\n")
        return 2
    started, rows = time.monotonic(), []
    for name, run in configurations().items():
        if time.monotonic() - started > _LIMIT_S:
            sys.stdout.write(f"{name}: left out, time is up\n")
            continue
        peaks = [peak.allocated for peak in make_plan(run, Traces(adapt)).peaks
                 if peak.place == "device" and peak.phase in ("denoiser", "optimizer")]  # fmt: skip
        row = Row(name, max(peaks), measure(run))
        rows.append(row)
        sys.stdout.write(f"{name}: predicted {row.predicted / 1e9:.2f} GB, measured {row.measured / 1e9:.2f} GB, "
                         f"{100 * row.error:+.1f} %\n")
        sys.stdout.flush()
    errors = [abs(row.error) for row in rows]
    sys.stdout.write(f"median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %\n")
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
