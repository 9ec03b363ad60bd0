"""A few steps of a small run under the live audit, as the trainer would make them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optim_patches.audit.live import AuditReport, LiveAudit
from optim_patches.audit.live_view import CHECKS, LiveRow, RunFacts, View
from tests.patches.wan import ADAPTERS, make_inputs, make_model, manage

UPSTREAM = {
    "mixed_precision": "no", "allow_tf32": False, "use_8bit_adam": False, "use_came": False,
    "gradient_checkpointing": False, "gradient_accumulation_steps": 1, "low_vram": False, "vae_mini_batch": 32,
    "multi_stream": False, "train_mode": "normal", "rank": 4, "network_alpha": 4, "target_name": "q,k,v,ffn.0,ffn.2",
    "use_peft_lora": False, "rank_drop_out": None, "module_drop_out": None, "dataloader_num_workers": 0,
    "enable_bucket": False, "random_hw_adapt": False, "training_with_video_token_length": False,
    "auto_tile_batch_size": False, "keep_all_node_same_token_length": False, "video_sample_stride": 1,
    "random_frame_crop": False, "fix_sample_size": None, "text_drop_ratio": 0.1, "lr_scheduler": "constant",
    "lr_warmup_steps": 500, "max_grad_norm": 1.0, "abnormal_norm_clip_start": None, "use_ema": False,
    "uniform_sampling": False, "motion_sub_loss": False, "motion_sub_loss_ratio": 0.25, "weighting_scheme": "none",
    "use_deepspeed": False, "use_fsdp": False,
}  # fmt: skip


class TinyVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Run:
    """A few steps of a small run, as the trainer would make them."""

    def __init__(self, folder: Path, *, model: nn.Module | None = None, lora: str | None = "lora", steps: int = 3,
                 mode: str = "default", lang: str = "en", **flags: Any) -> None:
        self.model = model or make_model(layers=2)
        self.lora = lora
        if lora:
            ADAPTERS[lora](self.model)
        if flags.get("gradient_checkpointing"):
            self.model.enable_gradient_checkpointing()
        self.manager, self.target = manage(self.model, **{**UPSTREAM, **flags, "audit": mode})
        self.args = self.target.args
        self.vae, self.text = TinyVae(), nn.Linear(2, 2)
        self.target.models |= {"vae": self.vae, "text_encoder": self.text}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters or [torch.zeros(1)], lr=1e-3)
        self.target.optimizers.append(self.optimizer)
        self.audit = LiveAudit(args=self.args, explicit=frozenset(flags), manager=self.manager, output_dir=folder,
                               mode=mode, lang=lang)  # fmt: skip
        self.facts = RunFacts(total_steps=10)
        self.audit.install(self.target)
        self.steps(steps)

    def steps(self, number: int) -> None:
        accumulate = self.args.gradient_accumulation_steps
        for step in range(number):
            for micro in range(accumulate):
                inputs = make_inputs(seed=step * accumulate + micro)
                inputs["x"] = self.vae.encode(inputs["x"])
                self.text(torch.zeros(1, 2))
                self.model(**inputs).pow(2).mean().backward()
                shape = tuple(inputs["x"].shape)
                self.facts.shapes = {**self.facts.shapes, shape: self.facts.shapes.get(shape, 0) + 1}
                self.facts.micro_steps += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.facts.steps += 1

    def report(self) -> AuditReport:
        parameters = list(self.model.parameters())
        self.facts.trainable = {"transformer": {
            "kind": self.lora or "named", "rank": 4, "alpha": 4,
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "total_parameters": sum(p.numel() for p in parameters),
        }}  # fmt: skip
        return self.audit.report(self.target, self.facts)


def ask(run: Run, row_id: str, *, facts: dict[str, Any] | None = None, device: str = "cpu", **flags: Any) -> LiveRow:
    """What one check says of a finished run if it had had these flags and facts."""
    args = Namespace(**{**vars(run.args), **flags})
    target = replace(run.target, args=args, device=device)
    view = View(args=args, explicit=frozenset(flags), target=target, facts=replace(run.facts, **(facts or {})),
                probe=run.audit.probe)  # fmt: skip
    return CHECKS[row_id](view)
