"""The planner against the CPU allocator: predicted and measured peak of real steps, configuration by configuration.

What is measured is independent of what predicts: the profiler's memory events, which the CPU allocator itself reports,
summed up over a real step of a real model with real values. Weights and optimizer state exist before the profiler
starts, so their bytes are added from the live tensors. The prediction is the plan's peak over the same phases.

    python benchmarks/planner.py                 # all configurations, a few minutes on one idle core
    python benchmarks/planner.py --only lora     # those whose name contains a word
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from optim_patches.plan import denoiser  # noqa: E402
from optim_patches.plan.encoders import trace_text, trace_vae  # noqa: E402
from optim_patches.plan.phases import make_plan  # noqa: E402
from optim_patches.plan.spec import Adapters, Part, RunSpec, Sample  # noqa: E402
from optim_patches.plan.traces import Traces  # noqa: E402
from videox_fun.training.planning import adapt  # noqa: E402

NETWORK = "videox_fun.models.wan_transformer3d:WanTransformer3DModel"
VAE = "videox_fun.models.wan_vae:AutoencoderKLWan"
TEXT = "videox_fun.models.wan_text_encoder:WanT5EncoderModel"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


def network(dim: int, blocks: int, *, conditioned: bool = False, heads: int = 4) -> Part:
    return Part(NETWORK, {"model_type": "i2v" if conditioned else "t2v", "in_dim": 36 if conditioned else 16,
                          "out_dim": 16, "dim": dim, "ffn_dim": 4 * dim, "num_heads": heads, "num_layers": blocks,
                          "text_dim": 64, "text_len": 128, "cross_attn_norm": True})  # fmt: skip


LORA = Adapters(16, 16, "q,k,v,ffn.0,ffn.2")
_SMALL, _LONG, _WIDE = Sample(9, 128, 128), Sample(33, 128, 128), Sample(9, 192, 256)


def configurations() -> dict[str, tuple[str, RunSpec]]:
    """Name to kind of measurement (``step``, ``encode``, ``decode``, ``text``) and run."""
    base = RunSpec(network(256, 4), (_SMALL,), device="cpu", precision="no", text_tokens=100)
    steps = {
        "full fp32": base,
        "full fp32 checkpointing": replace(base, checkpointing=True),
        "full bf16": replace(base, precision="bf16"),
        "full bf16 checkpointing": replace(base, precision="bf16", checkpointing=True),
        "full fp32 fused": replace(base, fused=True, checkpointing=True),
        "full fp32 accumulation": replace(base, accumulation=2),
        "full bf16 accumulation checkpointing": replace(base, precision="bf16", accumulation=2, checkpointing=True),
        "full fp32 batch 2": replace(base, samples=(replace(_SMALL, batch=2),), checkpointing=True),
        "full fp32 attention only": replace(base, words=("attn",), checkpointing=True),
        "full fp32 dim 512": replace(base, denoiser=network(512, 3, heads=8), samples=(_WIDE,)),
        "full bf16 12 blocks": replace(base, denoiser=network(192, 12), precision="bf16", checkpointing=True),
        "full fp32 image conditioned": replace(base, denoiser=network(256, 4, conditioned=True), conditioned=True),
        "lora fp32": replace(base, adapters=LORA),
        "lora fp32 checkpointing": replace(base, adapters=LORA, checkpointing=True),
        "lora bf16": replace(base, adapters=LORA, precision="bf16"),
        "lora bf16 checkpointing": replace(base, adapters=LORA, precision="bf16", checkpointing=True),
        "lora bf16 long": replace(base, adapters=LORA, precision="bf16", samples=(_LONG,), checkpointing=True),
        "lora fp32 peft": replace(base, adapters=replace(LORA, peft=True), checkpointing=True),
        "lora fp32 rank 64 batch 2": replace(base, adapters=replace(LORA, rank=64),
                                             samples=(replace(_SMALL, batch=2),)),
        "lora bf16 image conditioned": replace(base, denoiser=network(256, 4, conditioned=True), conditioned=True,
                                               adapters=LORA, precision="bf16", checkpointing=True),
        "lora fp32 selective 0.5": replace(base, adapters=LORA, checkpointing=True, recomputed=0.5),
    }  # fmt: skip
    vae = replace(base, vae=Part(VAE, {"dim": 32}))
    text = replace(base, text=Part(TEXT, {"vocab": 2000, "dim": 256, "dim_attn": 256, "dim_ffn": 640, "num_heads": 8,
                                          "num_layers": 6, "num_buckets": 32, "shared_pos": False, "dropout": 0.0}))
    return {
        **{name: ("step", run) for name, run in steps.items()},
        "vae encode fp32": ("encode", vae), "vae encode bf16": ("encode", replace(vae, precision="bf16")),
        "vae decode fp32": ("decode", vae),
        "text encoder fp32": ("text", replace(text, text_tokens=512)),
        "text encoder bf16": ("text", replace(text, text_tokens=512, precision="bf16")),
    }  # fmt: skip


# ---- measuring ---------------------------------------------------------------------------------------------------


def allocator_peak(call: Callable[[], Any]) -> int:
    """The largest rise of the CPU allocator's live bytes during a call, from the profiler's trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((event["ts"], number, event["args"]["Bytes"]) for number, event in enumerate(events)
                    if event.get("name") == "[memory]")
    live = peak = 0
    for _, _, size in memory:
        live += size
        peak = max(peak, live)
    return peak


def real(part: Part, precision: str) -> nn.Module:
    """A network with values."""
    model = denoiser.load_class(part.cls)(**part.kwargs)
    return model.to(DTYPES[precision])


def measure_step(run: RunSpec) -> int:
    """Two steps are made so that the optimizer has its state; the third is measured."""
    torch.manual_seed(0)
    model = real(run.denoiser, run.precision)
    denoiser.choose_trained(model, run, adapt)
    model.train()
    if run.checkpointing and run.recomputed == 1:
        model.enable_gradient_checkpointing()
    elif run.checkpointing:
        from videox_fun.utils.ac_handle import apply_checkpointing

        apply_checkpointing(model, type(model.blocks[0]), run.recomputed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, **({"fused": True} if run.fused else {}))
    ledger = denoiser.Ledger()  # only its segments' names are used by the step
    sample = run.samples[0]

    def micro() -> None:
        inputs = denoiser.step_inputs(model, run, sample, torch.device("cpu"))
        for tensor in denoiser.tree_tensors(inputs):
            tensor.normal_()
        pixels = torch.zeros(sample.batch, sample.frames, 6 if run.conditioned else 3, sample.height, sample.width)
        denoiser._step(model, inputs, ledger)
        del pixels

    def step() -> None:
        for _ in range(run.accumulation):
            micro()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    held = [*model.parameters(), *model.buffers()]
    held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    standing = sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())
    return standing + allocator_peak(step)


def measure_call(kind: str, run: RunSpec) -> int:
    sample = run.samples[0]
    part = run.text if kind == "text" else run.vae
    model = real(part, run.precision).eval()
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    dtype = DTYPES[run.precision]

    def call() -> None:
        with torch.no_grad():
            if kind == "text":
                ids = torch.zeros(1, run.text_tokens, dtype=torch.long)
                model(ids, torch.ones_like(ids))
            elif kind == "encode":
                pixels = torch.zeros(1, sample.frames, 3, sample.height, sample.width)
                model.encode(pixels.to(dtype).transpose(1, 2))[0].sample()
            else:
                shape = denoiser.latent_shape(sample, channels=16)
                model.decode(torch.zeros(shape, dtype=dtype))

    call()
    return weights + allocator_peak(call)


def predict(kind: str, run: RunSpec) -> int:
    sample = run.samples[0]
    if kind != "step":
        trace = trace_text(run) if kind == "text" else trace_vae(run, sample, decode=kind == "decode")
        return trace.weights + trace.inputs + trace.workspace
    plan = make_plan(run, Traces(adapt))
    peaks = [peak for peak in plan.peaks if peak.phase in ("denoiser", "optimizer")]
    return max(peak.total - peak.parts.get("process", 0) for peak in peaks)


@dataclass(frozen=True)
class Row:
    name: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare(name: str) -> Row:
    """Predict and measure one configuration."""
    kind, run = configurations()[name]
    predicted = predict(kind, run)
    measured = measure_step(run) if kind == "step" else measure_call(kind, run)
    return Row(name, predicted, measured)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    sys.stdout.write("| configuration | predicted MB | measured MB | error |\n|---|---|---|---|\n")
    for name in configurations():
        if args.only in name:
            row = compare(name)
            rows.append(row)
            sys.stdout.write(f"| {name} | {row.predicted / 1e6:.2f} | {row.measured / 1e6:.2f} | "
                             f"{100 * row.error:+.1f} % |\n")
            sys.stdout.flush()
    errors = [abs(row.error) for row in rows]
    sys.stdout.write(f"\n{len(rows)} configurations: median error {100 * statistics.median(errors):.1f} %, worst "
                     f"{100 * max(errors):.1f} %\n")
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
