"""What each combination of patches does on a tiny model: it trains with all of them on, or the preflight refuses.

The patches and their flags come from the registry. A process of this module (``python -m tests.patches.composition``)
runs one list of cells and prints JSON; Triton interprets its kernels, ordinary memory stands for a device's, and a
recorder stands for CUDA graphs. Cells with sequence parallelism run on two gloo processes under DDP.

A *cell* trains a LoRA on latents that the VAE encodes. What it must equal is the same work with one patch less: the
difference may be as large as what the missing patch changes when it is alone, and nothing more.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optim_patches.base import Stage, Target
from optim_patches.registry import PATCHES, PatchManager, PatchRefused, load_patch
from tests.patches.wan import make_args
from videox_fun.models.wan_transformer3d import WanTransformer3DModel
from videox_fun.models.wan_vae import AutoencoderKLWan, encode_videos

#: What a patch needs beside its first flag to have something to do in a model this small. No row: the flag alone.
SETTINGS: dict[str, dict[str, Any]] = {
    "vae_tiling": {"vae_tile_size": 32, "vae_tile_overlap": 16},
    "fp8": {"fp8_emulate": True, "fp8_min_dim": 16},
    "ulysses": {"sequence_parallel_size": 2},
    "compile": {"compile_backend": "eager"},
    "liger": {"liger_kernels": "layer_norm,gate"},
    "block_swap": {"block_swap": 3, "gradient_checkpointing": True},
    "activation_offload": {"activation_offload_min_mb": 1e-5, "gradient_checkpointing": True},
    "checkpointing": {"checkpointing_keep": "attention", "gradient_checkpointing": True},
    "train_teacache": {
        "reward_fn": "HPSReward", "num_inference_steps": 4, "train_teacache_start": 1,
        "train_teacache_threshold": 1e9, "train_teacache_coefficients": "1,0",
    },
}  # fmt: skip
#: Combinations of more than two, or of another kind than native LoRA.
EXTRA: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("compile",), {"gradient_checkpointing": True}),
    (("qlora", "liger"), {"gradient_checkpointing": True}),
    (("qlora", "compile"), {"gradient_checkpointing": True}),
    (("fp8", "compile"), {"gradient_checkpointing": True}),
    (("fp8_base", "block_swap", "activation_offload"), {"gradient_checkpointing": True}),
    (("qlora", "block_swap", "checkpointing"), {"gradient_checkpointing": True}),
    (("vae_tiling", "qlora", "activation_offload"), {"gradient_checkpointing": True}),
    (("ulysses", "compile"), {"gradient_checkpointing": True}),
    (("ulysses", "qlora", "checkpointing"), {"gradient_checkpointing": True}),
    (("compile",), {"gradient_checkpointing": True, "adapter": "peft"}),
    (("qlora", "liger"), {"gradient_checkpointing": True, "adapter": "peft"}),
    (("fp8", "compile"), {"adapter": "peft"}),
    (("liger", "compile"), {"gradient_checkpointing": True, "adapter": "full"}),
    (("fp8", "compile"), {"adapter": "full"}),
    (("ulysses", "compile"), {"adapter": "full"}),
    (("qlora",), {"adapter": "full"}),
    (("fp8_base",), {"adapter": "full"}),
    (("block_swap",), {"adapter": "full"}),
)
#: Interpreted kernels cannot be traced: only a GPU can try these together.
UNTRACEABLE = frozenset({"compile", "liger"})
CONFIG: dict[str, Any] = {
    "model_type": "t2v", "in_dim": 16, "out_dim": 16, "dim": 32, "ffn_dim": 64, "freq_dim": 32, "text_dim": 16,
    "text_len": 8, "num_heads": 2, "num_layers": 3, "cross_attn_norm": True,
}  # fmt: skip
CLIP = (1, 32, 48)  # frames and pixels: six tokens
STEPS = 2
TARGETS = ("self_attn.q", "ffn.0")
#: Patches whose cells take seconds here: tracing, and kernels in an interpreter.
SLOW = frozenset({"compile", "liger"})
#: Each process rounds its own part: FP8 takes one scale per tensor, here per part of a tensor.
SPLITTING = frozenset({"ulysses"})
#: Those that are trained always; the others when the table is recorded.
ALWAYS = (("compile",), ("qlora", "liger"))
ROUNDING = 2e-4  # float32 through three blocks, backward, and the steps


@dataclass(frozen=True)
class Cell:
    """Patches, and what else the run is: adapter, gradient checkpointing."""

    patches: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def flags(self) -> dict[str, Any]:
        flags: dict[str, Any] = {}
        for name in self.patches:
            first = load_patch(name).flags[0]
            flags |= {**({first.dest: True} if first.action == "store_true" else {}), **SETTINGS.get(name, {})}
        flags |= {key: value for key, value in self.options if key != "adapter"}
        if {"compile", "cuda_graph"} <= set(self.patches):
            flags["compile_backend"] = "inductor"  # graphs beside the compiler are the compiler's own
        if self.adapter == "full":
            flags["trainable_modules"] = ["."]
        return flags

    @property
    def adapter(self) -> str:
        return dict(self.options).get("adapter", "lora")

    @property
    def processes(self) -> int:
        return int(self.flags.get("sequence_parallel_size", 1))

    def without(self, name: str) -> Cell:
        """The same work with one patch less."""
        return self.only(tuple(other for other in self.patches if other != name))

    def only(self, names: tuple[str, ...]) -> Cell:
        kept = dict(self.options)
        if self.flags.get("gradient_checkpointing"):
            kept["gradient_checkpointing"] = True
        if "reward_fn" in self.flags:
            kept |= {key: SETTINGS["train_teacache"][key] for key in ("reward_fn", "num_inference_steps")}
        return Cell(names, tuple(sorted(kept.items())))


@dataclass
class Outcome:
    """What became of a cell."""

    patches: tuple[str, ...]
    options: dict[str, Any]
    refused: str = ""
    trained: bool = True  # False: accepted by the preflight, and left to the recording
    states: dict[str, str] = field(default_factory=dict)
    error: float = 0.0  # how far from the work with one patch less, the worst of them
    allowed: float = 0.0
    tensors: int = 0


@dataclass
class Trained:
    """Losses, first gradients and final weights of a run, and what its patches say."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    states: dict[str, str]


def all_cells() -> list[Cell]:
    """Every patch alone, every pair, and the extra combinations whose patches exist."""
    names = list(PATCHES)
    cells = [Cell((name,)) for name in names] + [Cell(pair) for pair in itertools.combinations(names, 2)]
    cells += [Cell(patches, tuple(sorted(options.items()))) for patches, options in EXTRA if {*patches} <= {*names}]
    return cells


@contextmanager
def stand_ins() -> Iterator[None]:
    """The CPU as a device with memory of its own and with graphs."""
    from optim_patches import compile as compiling
    from optim_patches import graph_cache, transfers
    from tests.patches.fake_device import FakeTransfers
    from tests.patches.fake_graphs import FakeCapture

    backend = compiling._backend

    def cheap(name: str, **options: Any) -> Any:
        return backend("eager", **{**options, "mode": "default"})

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(transfers.BACKENDS, cpu=FakeTransfers))
        stack.enter_context(mock.patch.dict(graph_cache.CAPTURES, cpu=FakeCapture))
        stack.enter_context(mock.patch.object(compiling, "_backend", cheap))
        yield


@cache
def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(dim=8).eval().requires_grad_(False)


def make_model() -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(**CONFIG)
    with torch.no_grad():
        nn.init.normal_(model.head.head.weight, std=0.1)
    return model


def attach(model: nn.Module, adapter: str) -> None:
    if adapter == "full":
        return
    torch.manual_seed(1)
    model.requires_grad_(False)
    if adapter == "peft":
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=list(TARGETS)), model)
    else:
        from videox_fun.utils.lora_utils import create_network

        network = create_network(1.0, 4, 4, None, model, target_name=",".join(TARGETS))
        network.apply_to(None, model, False, True)
        model.network = network.requires_grad_(True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # zero up-projections would hide the others' gradients
            if "lora_up" in name or "lora_B" in name:
                parameter.normal_(std=0.1)


def preflight(cell: Cell) -> tuple[Target, PatchManager]:
    """What happens before weights load."""
    args = make_args(**cell.flags)
    facts = {"weight_dtype": torch.float32, "sharding": 0, "denoiser_config": CONFIG}
    target, manager = Target(args, extras=facts), PatchManager(args)
    manager.preflight(target)
    return target, manager


def prepare(cell: Cell, target: Target, manager: PatchManager) -> nn.Module:
    """The stages in the trainer's order. A refusal here would come too late, and is an error."""
    model = make_model()
    with manager.loading(target):
        target.models |= {"transformer": model, "vae": vae()}
    for stage in (Stage.POST_LOAD, Stage.PRE_ADAPTER):
        manager.run_stage(stage, target)
    attach(model, cell.adapter)
    model.train()
    manager.run_stage(Stage.POST_ADAPTER, target)
    if cell.flags.get("gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    manager.run_stage(Stage.PRE_SHARD, target)
    if dist.is_initialized():
        target.models["transformer"] = DistributedDataParallel(model)
    for stage in (Stage.POST_SHARD, Stage.LOADER, Stage.STEP):
        manager.run_stage(stage, target)
    return target.models["transformer"]


def loss_of(model: nn.Module, *, number: int, rollout: int) -> Tensor:
    """Encode a clip and compare the prediction with one; ``rollout`` steps of sampling where a reward is trained."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.rand(1, 3, *CLIP, generator=generator) * 2 - 1
    latents = encode_videos(vae(), pixels, mini_batch=1, generator=generator)
    context = torch.randn(1, 6, 16, generator=generator)
    for step in range(rollout):
        t = torch.tensor([900.0 - 200 * step])
        with torch.set_grad_enabled(step == rollout - 1):
            latents = latents.detach() + 0.1 * model(x=latents.detach(), t=t, context=context)
    if not rollout:
        t = torch.rand(1, generator=generator) * 1000
        latents = model(x=latents, t=t, context=context)
    return (latents - 1).square().mean()


@cache
def run(cell: Cell) -> Trained:
    """Some steps of SGD with momentum."""
    torch._dynamo.reset()
    target, manager = preflight(cell)
    model = prepare(cell, target, manager)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=1e-2, momentum=0.9)
    losses, gradients = [], {}
    for number in range(STEPS):
        loss = loss_of(model, number=number, rollout=cell.flags.get("num_inference_steps", 0))
        loss.backward()
        gradients = gradients or {_bare(n): p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    states = {outcome.patch.name: outcome.state for outcome in manager.outcomes()}
    weights = {_bare(name): p.detach().clone() for name, p in parameters.items()}
    manager.undo_all()
    return Trained(losses, gradients, weights, states)


def _bare(name: str) -> str:
    return name.removeprefix("module.")


def distance(a: Trained, b: Trained) -> float:
    """The worst relative difference of a loss, a gradient or a final weight."""
    assert a.gradients.keys() == b.gradients.keys() and a.gradients, "not the same tensors get a gradient"
    worst = max(abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True))
    for found, expected in ((a.gradients, b.gradients), (a.weights, b.weights)):
        mean = (sum(float(value.norm()) ** 2 for value in expected.values()) / len(expected)) ** 0.5
        for name, value in expected.items():
            worst = max(worst, float((found[name] - value).norm()) / max(float(value.norm()), 0.1 * mean))
    return worst


def examine(cell: Cell, *, everything: bool = True) -> Outcome:
    """Run a cell and compare it with the same work without each of its patches."""
    outcome = Outcome(cell.patches, dict(cell.options))
    try:
        preflight(cell)
    except PatchRefused as error:
        outcome.refused = str(error)
        return outcome
    if {*cell.patches} >= UNTRACEABLE:
        outcome.trained = False
        return outcome
    if not everything and SLOW & {*cell.patches} and not (cell.patches in ALWAYS and cell.adapter == "lora"):
        outcome.trained = False
        return outcome
    trained = run(cell)
    base, outcome.states, outcome.tensors = run(cell.only(())), trained.states, len(trained.gradients)
    for name in cell.patches:
        changes = distance(run(cell.only((name,))), base)
        # Another patch that rounds draws its errors anew for other inputs; for nearly equal ones a few tip over.
        others = sum(distance(run(cell.only((other,))), base) for other in cell.patches if other != name)
        redrawn = 1.5 if changes > ROUNDING or name in SPLITTING else 0.1
        error, allowed = distance(trained, run(cell.without(name))), ROUNDING + 2 * changes + redrawn * others
        if not outcome.allowed or error / allowed > outcome.error / outcome.allowed:
            outcome.error, outcome.allowed = error, allowed
    return outcome


def of_processes(number: int, *, everything: bool) -> list[dict[str, Any]]:
    """The cells that take ``number`` processes, of which this is one."""
    with stand_ins():
        cells = [cell for cell in all_cells() if cell.processes == number]
        outcomes = []
        for cell in cells:
            outcomes.append(asdict(examine(cell, everything=everything)))
            sys.stderr.write(f"{cell}: {outcomes[-1]}\n")
        return outcomes


def main() -> None:
    """``all|some`` examines the cells of one process, ``all|some RANK FILE`` those of two, of which this is one."""
    from tests.patches.interpreted import liger_shim

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    liger_shim.install()
    everything, place = sys.argv[1] == "all", sys.argv[2:]
    if place:
        dist.init_process_group("gloo", init_method=f"file://{place[1]}", rank=int(place[0]), world_size=2)
    outcomes = of_processes(2 if place else 1, everything=everything)
    if place:
        dist.destroy_process_group()
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main()
