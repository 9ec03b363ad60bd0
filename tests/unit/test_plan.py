"""The memory planner: traces, sums, what fits, and its cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import planner as benchmark
from optim_patches.plan import store
from optim_patches.plan.denoiser import Census, trace_blocks, trace_step
from optim_patches.plan.encoders import trace_vae
from optim_patches.plan.fit import candidates, fit, fits, slowdown
from optim_patches.plan.phases import COMPONENTS, make_plan
from optim_patches.plan.report import draw, fit_lines, table
from optim_patches.plan.runs import published
from optim_patches.plan.spec import Adapters, Part, RunSpec, Sample
from optim_patches.plan.static import static, swapped_blocks
from optim_patches.plan.traces import Traces
from videox_fun.training.planning import adapt

NETWORK, VAE = benchmark.NETWORK, benchmark.VAE
LORA = Adapters(64, 32, "q,k,v,ffn.0,ffn.2")
CLIP = Sample(5, 64, 64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plan-cache"))


def tiny(blocks: int = 3, **changes) -> RunSpec:
    return replace(RunSpec(benchmark.network(64, blocks), (CLIP,), text_tokens=20), **changes)


def big(sample: Sample, **changes) -> RunSpec:
    """Wan2.1-Fun-14B-InP with every network in its published size, as a LoRA."""
    network = Part(NETWORK, published("Wan2.1-Fun-14B-InP", conditioned=True))
    text = Part(benchmark.TEXT, {"vocab": 256384, "dim": 4096, "dim_attn": 4096, "dim_ffn": 10240, "num_heads": 64,
                                 "num_layers": 24, "num_buckets": 32, "shared_pos": False, "dropout": 0.0})
    run = RunSpec(network, (sample,), vae=Part(VAE), text=text, adapters=LORA, conditioned=True,
                  image=Part("videox_fun.models.wan_image_encoder:CLIPModel"))
    return replace(run, **changes)


@pytest.mark.parametrize("changes", [{}, {"adapters": LORA, "checkpointing": True}])
def test_few_blocks_continue_to_any_number_exactly(changes) -> None:
    run = tiny(7, **changes)
    continued, whole = trace_step(run, CLIP, adapt=adapt), trace_blocks(run, CLIP, blocks=7, adapt=adapt)
    assert continued.segments.keys() == whole.segments.keys() - {"forward/middle", "backward/middle"}
    for name, segment in continued.segments.items():
        assert segment == whole.segments[name], name
    assert continued.census == whole.census
    largest = max(segment.total for segment in whole.segments.values())
    assert largest == max(segment.total for segment in continued.segments.values())


@pytest.mark.parametrize("changes", [{"precision": "no"}, {"adapters": LORA, "precision": "no", "checkpointing": True},
                                     {"adapters": replace(LORA, peft=True)}])
def test_the_prediction_is_what_the_cpu_allocator_reports(changes) -> None:
    run = tiny(2, device="cpu", **changes)
    predicted, measured = benchmark.predict("step", run), benchmark.measure_step(run)
    assert abs(predicted / measured - 1) < 0.05, (predicted, measured)


@pytest.mark.parametrize("name", ["vae encode fp32", "vae encode bf16", "vae decode fp32"])
def test_kernels_of_convolutions_are_counted_as_they_allocate(name) -> None:
    assert abs(benchmark.compare(name).error) < 0.02


def test_checkpointing_keeps_one_input_per_block() -> None:
    run = tiny(4, checkpointing=True)
    trace = trace_step(run, CLIP)
    first, second = (trace.segments[f"forward/{name}"].parts["activations"] for name in ("first", "second"))
    tokens = 2 * (64 // 16) ** 2
    assert second - first == trace.block_input == tokens * 64 * 2
    assert trace.tokens == tokens


def test_offloading_swapping_and_quantizing_take_what_they_say() -> None:
    census = Census(block_linear=1000, block_frozen=1100, rest_frozen=500, trained=300)
    run = tiny(10, adapters=LORA)
    plain = static(run, census)
    assert plain.weights == (10 * 1100 + 500 + 300) * 2
    assert plain.optimizer == 2 * 2 * 300 and plain.gradients == 600
    swap = static(replace(run, block_swap=6), census)
    assert swap.weights == plain.weights - (6 - 2) * 2200 and swap.host == 6 * 2200
    assert static(replace(run, fp8_base=True), census).weights == plain.weights - 10 * 1000
    assert static(replace(run, qlora=True), census).weights == pytest.approx(
        plain.weights - 10 * 1000 * (2 - 0.5625), abs=10)
    assert swapped_blocks(replace(run, block_swap_gb=8 * 2200 / 1e9), 2200) == 4
    assert static(replace(run, ema=True, master_fp32=True), census).averages == 1200
    assert static(replace(run, master_fp32=True), census).optimizer == 2400


def test_sharding_divides_what_its_stage_says() -> None:
    census = Census(block_frozen=0, rest_frozen=0, trained=8_000_000_000, block_trained=100_000_000)
    full = tiny(10, world=8, local=8, sharding="deepspeed")
    two, three = static(replace(full, stage=2), census), static(replace(full, stage=3), census)
    assert two.weights == 16e9 and two.gradients == 2e9 and two.optimizer == 12e9
    assert three.weights == 2e9 and three.communication == 2 * 2 * 500_000_000 + 2_000_000_000
    host = static(replace(full, stage=3, offload_optimizer=True, offload_weights=True), census)
    assert host.optimizer == 0 and host.weights == 0 and host.host == 12e9 + 2e9 + 2e9
    fsdp = static(replace(full, stage=3, sharding="fsdp"), census)
    assert fsdp.weights == 4e9 and fsdp.optimizer == 8e9


def test_flags_move_the_parts_that_they_are_for() -> None:
    traces = Traces(adapt)
    run = tiny(5, checkpointing=True, adapters=Adapters(1, 1, "ffn.0"), samples=(Sample(9, 128, 128),))

    def parts(**changes) -> dict[str, int]:
        return dict(next(p for p in make_plan(replace(run, **changes), traces).peaks if p.phase == "denoiser").parts)

    plain = parts()
    assert parts(activation_offload=True)["activations"] < plain["activations"]
    assert parts(recomputed=0.5)["activations"] > plain["activations"]
    assert parts(keep_attention=True)["activations"] > plain["activations"]
    assert parts(sequence_parallel=2)["recomputed"] * 2 == pytest.approx(plain["recomputed"], rel=0.01)
    assert parts(checkpointing=False)["activations"] > 2 * plain["activations"]
    assert parts(accumulation=2)["gradients"] > plain.get("gradients", 0)


def test_tiling_the_vae_lowers_its_workspace() -> None:
    run = tiny(vae=Part(VAE, {"dim": 8}), vae_overlap=32)
    whole = trace_vae(run, Sample(5, 256, 256)).workspace
    assert trace_vae(replace(run, vae_tile=128), Sample(5, 256, 256)).workspace < 0.5 * whole


@pytest.mark.parametrize("sample", [Sample(81, 480, 832), Sample(49, 512, 512)])
def test_changes_for_14b_fit_by_their_own_plan(sample) -> None:
    traces = Traces(adapt)
    run = big(sample)
    assert make_plan(run, traces).device_bytes > 80e9
    costs = []
    for gigabytes in (80, 48, 24):
        found = fit(run, traces, device_gb=gigabytes)
        assert found.fits, fit_lines(found, device_gb=gigabytes)
        changed = replace(run, **{k: v for change in found.changes for k, v in change.spec.items()})
        assert make_plan(changed, traces).device_bytes <= gigabytes * 1e9
        assert found.slowdown == slowdown(found.changes)
        costs.append(found.slowdown)
    assert costs == sorted(costs), "less memory cannot be cheaper"


def test_what_cannot_fit_names_what_would_make_another_run() -> None:
    run = tiny(2, precision="no")
    found = fit(run, Traces(adapt), device_gb=0.001)
    assert not found.fits and any("LoRA" in hint for hint in found.hints)
    assert not fits(found.plan, device_gb=0.001) and fits(found.plan, device_gb=10)
    assert not fits(found.plan, device_gb=10, host_gb=0.1)


def test_changes_that_are_taken_or_cannot_be_had_are_not_offered() -> None:
    names = {change.name for change in candidates(tiny(8, adapters=LORA), packages=frozenset())}
    assert "qlora" not in names and "use_8bit_adam" not in names and "fp8_base" in names
    assert not any(n.startswith(("block_swap", "qlora")) for n in {c.name for c in candidates(tiny(8))})
    assert "gradient_checkpointing" not in {c.name for c in candidates(tiny(8, checkpointing=True))}


def test_a_trace_is_kept_on_disk_and_a_broken_one_made_anew() -> None:
    calls = []

    def compute() -> dict:
        calls.append(1)
        return {"bytes": 7}

    assert store.remembered("x", [1], compute) == store.remembered("x", [1], compute) == {"bytes": 7}
    assert len(calls) == 1
    for file in store.cache_folder().glob("*.json"):
        file.write_text("{")
    assert store.remembered("x", [1], compute) == {"bytes": 7} and len(calls) == 2


def test_table_picture_and_file(tmp_path) -> None:
    plan = make_plan(tiny(2, workers=1), Traces(adapt))
    text = "\n".join(table(plan))
    assert "denoiser" in text and "optimizer" in text and "host" in text
    assert draw(plan, tmp_path / "plan.png", device_gb=24).stat().st_size > 5000
    data = plan.as_dict()
    assert data["device_peak_bytes"] == plan.peak("device").allocated > 0
    assert all(set(row["parts"]) <= set(COMPONENTS) for row in data["peaks"])


def test_unknown_models_are_told_apart() -> None:
    assert published("models/Wan2.1-Fun-V1.1-1.3B-InP", conditioned=True)["dim"] == 1536
    with pytest.raises(ValueError, match="tells no size"):
        published("my-model", conditioned=False)
