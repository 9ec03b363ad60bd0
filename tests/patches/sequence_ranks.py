"""What gloo processes that share tokens compute, for test_ulysses.py: relative errors and facts.

Each case compares with one process that has no patch and computes the mean loss over the batches of all data ranks.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optim_patches.registry import PatchRefused
from tests.patches.wan import add_native_lora, add_peft_lora, make_inputs, make_model, manage
from tests.unit.real_runs import train
from videox_fun.dist.mesh import Layout
from videox_fun.models.wan_transformer3d import WanTransformer3DModel

SIZE = 2
CONDITIONED = {
    "model_type": "i2v", "in_dim": 8, "out_dim": 4, "dim": 24, "ffn_dim": 48, "freq_dim": 32, "text_dim": 16,
    "text_len": 8, "num_heads": 2, "num_layers": 2, "cross_attn_norm": True, "add_control_adapter": True,
    "add_ref_conv": True, "in_dim_ref_conv": 4, "in_dim_control_adapter": 4, "downscale_factor_control_adapter": 8,
}  # fmt: skip


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return (model(**inputs).float() - 1).pow(2).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def errors(model: nn.Module, batches: list[list[dict[str, Tensor]]], *, prepare: Any = None) -> dict[str, Any]:
    """``batches[data rank][micro-step]`` on one process against the split, wrapped model."""
    world = dist.get_world_size()
    layout = Layout(rank=dist.get_rank(), world=world, sequence=SIZE)
    if prepare is not None:
        prepare(model)
    model.train()
    flat = [inputs for row in batches for inputs in row]
    expected_loss = [float(loss_of(model, inputs).detach()) for inputs in flat]
    model.zero_grad(set_to_none=True)
    for inputs in flat:
        (loss_of(model, inputs) / len(flat)).backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)

    manager, _ = manage(model, sequence_parallel_size=SIZE)
    wrapped = DistributedDataParallel(model)
    mine = batches[layout.data_rank]
    losses = []
    for number, inputs in enumerate(mine):
        wrapped.require_backward_grad_sync = number == len(mine) - 1
        loss = loss_of(wrapped, inputs)
        (loss / len(mine)).backward()
        losses.append(float(loss.detach()))
    actual = gradients(model)
    outcome = manager.outcomes()[0]
    state, evidence = outcome.state, outcome.evidence
    manager.undo_all()
    model.zero_grad(set_to_none=True)
    after = float(loss_of(model, flat[0]).detach())

    start = layout.data_rank * len(mine)
    worst = max((float((actual[n] - g).norm() / g.norm().clamp_min(1e-12)), n) for n, g in expected.items())
    mine_report = {
        "loss": max(abs(a - b) / b for a, b in zip(losses, expected_loss[start:], strict=False)),
        "gradient": worst[0], "name": worst[1], "tensors": [len(actual), len(expected)],
        "state": state, "facts": evidence.facts, "summary": evidence.summary,
        "undone": after == expected_loss[0] and "embed" not in model.__dict__,
    }  # fmt: skip
    reports: list[Any] = [None] * world
    dist.all_gather_object(reports, mine_report)
    return {**reports[0], "loss": max(r["loss"] for r in reports), "gradient": max(r["gradient"] for r in reports),
            "undone": all(r["undone"] for r in reports)}  # fmt: skip


def rows(shape: tuple[int, int, int], *, micro: int = 1, **extra: Any) -> list[list[dict[str, Tensor]]]:
    """Inputs of every data rank, equal on all processes."""
    data = dist.get_world_size() // SIZE
    return [[{**make_inputs(shape, seed=10 * row + m), **extra} for m in range(micro)] for row in range(data)]


def conditioned() -> tuple[nn.Module, list[list[dict[str, Tensor]]]]:
    """Every input of the model at once, with one timestep per token; 3 x 3 tokens per frame give an odd length."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(**CONDITIONED)
    with torch.no_grad():
        nn.init.normal_(model.head.head.weight, std=0.1)
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {
        "x": noise(2, 4, 2, 6, 6), "y": noise(2, 4, 2, 6, 6), "t": torch.rand(2, 18, generator=generator) * 1000,
        "context": noise(2, 6, 16), "clip_fea": noise(2, 257, 1280), "full_ref": noise(2, 4, 6, 6),
        "y_camera": noise(2, 4, 2, 48, 48), "seq_len": 18,
    }  # fmt: skip
    return model, [[inputs]] * (dist.get_world_size() // SIZE)


def checkpointed(model: nn.Module) -> None:
    add_native_lora(model)
    nn.init.normal_(next(iter(model.network.unet_loras)).lora_up.weight, std=0.1)
    model.enable_gradient_checkpointing()


def compare(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All cases that ``world`` processes have; the same on every rank."""
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=rank, world_size=world)
    report: dict[str, Any] = {
        "lora, checkpointing, accumulation": errors(make_model(), rows((3, 6, 6), micro=2), prepare=checkpointed)
    }
    if world == 2:
        report["full"] = errors(make_model(), rows((2, 6, 6), micro=2))
        report["peft"] = errors(make_model(), rows((2, 4, 4)), prepare=add_peft_lora)
        report["every input"] = errors(*conditioned())
        report["evaluation"] = evaluation()
        report["compiled"] = compiled()
    report["refusals"] = {size: refusal(size) for size in (-1, 3, 4)}
    dist.destroy_process_group()
    return report


def evaluation() -> bool:
    """Nothing is split in evaluation mode: one process samples alone, and gets the very same numbers."""
    model, inputs = make_model().eval(), make_inputs()
    with torch.no_grad():
        expected = model(**inputs)
        manage(model, sequence_parallel_size=SIZE)
        return dist.get_rank() != 0 or torch.equal(model(**inputs), expected)


def compiled() -> dict[str, Any]:
    """Traced without a break: the exchange is part of the compiled block."""
    model = make_model()
    expected = float(loss_of(model, make_inputs((3, 6, 6))).detach())
    manager, _ = manage(
        model, sequence_parallel_size=SIZE, compile=True, compile_backend="aot_eager", compile_fullgraph=True
    )
    loss = loss_of(model, make_inputs((3, 6, 6)))
    loss.backward()
    facts = {o.patch.name: o.evidence.facts for o in manager.outcomes()}
    manager.undo_all()
    return {
        "loss": abs(float(loss.detach()) - expected) / expected, "breaks": facts["compile"]["graph_breaks"],
        "traced": facts["ulysses"]["all_to_all_in_compiled_graphs"],
    }  # fmt: skip


def refusal(size: int) -> str:
    try:
        manage(make_model(), sequence_parallel_size=size)
    except PatchRefused as error:
        return str(error)
    return "accepted"


def train_whole(rank: int, world: int, folder: str, model: str, port: str, flags: dict[str, Any]) -> dict[str, Any]:
    """One process of a training run from its command line: what it saw and what came out."""
    variables = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, ACCELERATE_USE_CPU="true")
    run = train(Path(model), Path(folder) / "out", **flags)
    state, shared = run.trainer.ctx.patches.outcome("ulysses").state, run.trainer.ctx.shared_work
    return {"code": run.code, "state": state, "encoded": [shared.done, shared.received],
            "losses": run.losses, "timesteps": run.timesteps, "rows": run.rows,
            "trained": {name: tensor.tolist() for name, tensor in run.trained().items()}}  # fmt: skip
