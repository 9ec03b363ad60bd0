"""``--train_teacache``: skip denoiser work inside the sampling of reward training.

A training step of reward LoRA denoises a video over many steps and lets gradients flow through a few of them. The
others run without gradient, as in sampling, and TeaCache may estimate their result from the last computed one where the
time modulation changes little. A step with gradient is always computed, and counts as one: what is cached stays in
time, and the next estimate starts from it. An objective with one denoiser call per training step has nothing to skip,
so only the reward objective takes this flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import PurePath
from types import MethodType
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict

if TYPE_CHECKING:
    from torch import Tensor

SAMPLING_STEPS = 50


class TrainTeaCachePatch(PatchBase):
    """Row I13 of the audit."""

    name = "train_teacache"
    row = "I13"
    stage = Stage.POST_ADAPTER
    composable = frozenset({"*"})
    flags = (
        PatchFlag(
            "--train_teacache", "Skip denoiser calls without gradient whose result changes little (reward training).",
            action="store_true", default=False,
        ),
        PatchFlag("--train_teacache_threshold", "Estimated change up to which calls are skipped.", type=float,
                  default=0.1),
        PatchFlag("--train_teacache_start", "First sampling steps, always computed.", type=int, default=5),
        PatchFlag(
            "--train_teacache_coefficients", "Polynomial of the model, highest power first, comma separated; known for "
            "the published Wan models.", type=str, default=None,
        ),
    )  # fmt: skip

    def __init__(self) -> None:
        self.caches: dict[str, Any] = {}

    def check(self, target: Target) -> Verdict:
        args = target.args
        if not hasattr(args, "reward_fn"):
            reason = "--train_teacache skips denoising steps without gradient, and this objective has none: it calls "
            reason += "the denoiser once per training step, for its gradient."
            return Verdict(False, reason, "a reward script; for sampling, scripts/generate.py --teacache")
        try:
            found = _coefficients(args)
        except ValueError as error:
            return Verdict(False, str(error), "numbers like 5.2e4,-9.2e3,5.3e2,-1.4e1,0.05")
        if found is None:
            name = PurePath(str(getattr(args, "pretrained_model_name_or_path", ""))).name
            reason = f"--train_teacache: no polynomial is known for '{name}', which is judged by the folder's name."
            return Verdict(False, reason, "--train_teacache_coefficients")
        steps, start = _steps(args), _option(args, "train_teacache_start")
        if not 0 <= start < steps or _option(args, "train_teacache_threshold") <= 0:
            reason = f"--train_teacache_start {start} of {steps} sampling steps leaves none to skip."
            if 0 <= start < steps:
                reason = "--train_teacache_threshold must be above 0."
            return Verdict(False, reason, f"a start below {steps} and a threshold above 0")
        for role, model in target.denoisers().items():
            if not hasattr(model, "enable_teacache"):
                return Verdict(False, f"{role} ({type(model).__name__}) has no TeaCache.", "the run without it")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(target.denoisers())

    def apply(self, target: Target) -> Applied:
        args = target.args
        models = target.denoisers()
        before = {role: model.__dict__.get("teacache") for role, model in models.items()}
        first = None
        for model in models.values():
            if first is None:
                model.enable_teacache(
                    _coefficients(args), _steps(args), _option(args, "train_teacache_threshold"),
                    _option(args, "train_teacache_start"), offload=False,
                )  # fmt: skip
                first = model
            else:  # two experts share one run
                model.share_teacache(first)
            model.__dict__["cached"] = MethodType(_cached, model)
        self.caches = {role: model.teacache for role, model in models.items()}

        def undo() -> None:
            for role, model in models.items():
                del model.__dict__["cached"]
                model.__dict__.pop("teacache", None)
                if before[role] is not None:
                    model.teacache = before[role]

        detail = f"{_steps(args)} sampling steps, the first {_option(args, 'train_teacache_start')} always computed"
        return Applied(tuple(models), undo, detail)

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        caches = {id(cache): cache for cache in self.caches.values()}.values()
        skipped, computed = sum(c.skipped for c in caches), sum(c.computed for c in caches)
        facts = {"skipped": skipped, "computed": computed}
        text = f"{skipped} denoiser calls skipped, {computed} computed; {applied.detail}"
        return Evidence(skipped > 0, text, facts)


def _cached(self: Any, tokens: Tensor, signal: Tensor, blocks: Callable[[], Tensor], *, prompted: bool) -> Tensor:
    """``CachedSampling.cached`` in training: with a gradient the blocks run, and the cache takes note."""
    import torch

    cache = self.teacache
    if cache is None or not self.training:  # validation shows what the weights do, without estimates
        return blocks()
    known = cache.residuals.get(prompted)
    if known is not None and known.shape != tokens.shape:  # another size: a run that nobody announced
        cache.reset()
    return cache.run(tokens, signal, blocks, prompted=prompted, must_compute=torch.is_grad_enabled())


def _coefficients(args: argparse.Namespace) -> Sequence[float] | None:
    given = _option(args, "train_teacache_coefficients")
    if given:
        try:
            return [float(value) for value in given.split(",")]
        except ValueError:
            raise ValueError(f"--train_teacache_coefficients {given} is no list of numbers.") from None
    from videox_fun.models.cache_utils import get_teacache_coefficients

    return get_teacache_coefficients(PurePath(str(getattr(args, "pretrained_model_name_or_path", ""))).name)


def _steps(args: argparse.Namespace) -> int:
    return int(getattr(args, "num_inference_steps", None) or SAMPLING_STEPS)


def _option(args: argparse.Namespace, dest: str) -> Any:
    default = next(flag.default for flag in TrainTeaCachePatch.flags if flag.dest == dest)
    return getattr(args, dest, default)
