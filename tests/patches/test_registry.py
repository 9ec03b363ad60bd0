"""The patch layer's rules, with small example patches: stages, requirements, conflicts by site, refusals, undo.

``ExamplePatch`` is also the proof that adding a patch takes one class and one row: nothing else is edited here.
"""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, PatchRefused, Stage, Target, Verdict, iter_sites
from optim_patches.registry import PATCHES, PatchManager, all_flags, load_patch, register, registered
from tests.patches.wan import make_args


class ExamplePatch(PatchBase):
    """Doubles the output of every linear layer, and counts."""

    name = "example"
    stage = Stage.POST_ADAPTER
    flags = (
        PatchFlag("--example", "Double linear layers.", action="store_true"),
        PatchFlag("--example_factor", "By how much.", type=float, default=2.0),
    )

    def __init__(self) -> None:
        self.calls = 0

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(site for site, _ in iter_sites(target.models, where=lambda _, m: isinstance(m, nn.Linear)))

    def apply(self, target: Target) -> Applied:
        found = list(iter_sites(target.models, where=lambda _, m: isinstance(m, nn.Linear)))
        factor = target.args.example_factor

        def scaled(*values: object) -> torch.Tensor:
            self.calls += 1
            return values[-1] * factor

        handles = [module.register_forward_hook(scaled) for _, module in found]
        return Applied(tuple(s for s, _ in found), lambda: [h.remove() for h in handles], f"{len(found)} layers")

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        return Evidence(self.calls > 0, f"{self.calls} calls", {"calls": self.calls})


def example(name: str, **attributes: object) -> type[ExamplePatch]:
    """A variant of the example under another name and flag."""
    flags = (PatchFlag(f"--{name}", "Example.", action="store_true"),)
    return type(name.title(), (ExamplePatch,), {"name": name, "flags": flags, **attributes})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def run_all(manager: PatchManager, target: Target) -> None:
    manager.preflight(target)
    for stage in Stage:
        manager.run_stage(stage, target)


def test_a_patch_is_one_class_and_one_row() -> None:
    before = {flag.name for flag in all_flags()}
    with registered("example", ExamplePatch):
        added = {flag.name for flag in all_flags()} - before
        assert added == {"--example", "--example_factor"}
        net, inputs = model(), torch.randn(3, 4)
        plain = net(inputs)
        target = Target(make_args(example=True, example_factor=3.0), models={"transformer": net})
        manager = PatchManager(target.args)
        run_all(manager, target)
        (outcome,) = manager.outcomes()
        assert outcome.applied.sites == ("transformer.0", "transformer.2") and outcome.state == "inert"
        assert not torch.allclose(net(inputs), plain)
        assert manager.outcome("example").state == "exercised"
        manager.undo_all()
        assert torch.equal(net(inputs), plain)
    assert "example" not in PATCHES


def test_off_leaves_the_model_untouched() -> None:
    with registered("example", ExamplePatch):
        net, inputs = model(), torch.randn(3, 4)
        plain = net(inputs)
        target = Target(make_args(), models={"transformer": net})
        manager = PatchManager(target.args)
        run_all(manager, target)
        assert manager.requested == [] and manager.outcomes() == []
        assert torch.equal(net(inputs), plain)


def test_a_name_is_registered_once_and_flags_are_unique() -> None:
    with registered("example", ExamplePatch):
        with pytest.raises(ValueError, match="registered already"):
            register("example", ExamplePatch)
        clash = type("Clash", (ExamplePatch,), {"name": "clash"})
        with registered("clash", clash), pytest.raises(ValueError, match="Two patches define the flag --example"):
            all_flags()
    with pytest.raises(ValueError, match="No patch is named 'nope'"):
        load_patch("nope")


def test_every_flag_fits_a_parser() -> None:
    parser = argparse.ArgumentParser()
    for flag in all_flags():
        flag.add_to(parser)
    args = parser.parse_args(["--compile", "--compile_dynamic", "true", "--audit", "log"])
    assert args.compile is True and args.liger is False and args.audit == "log" and args.compile_mode == "default"
    with pytest.raises(SystemExit):
        parser.parse_args(["--compile_dynamic", "maybe"])


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_what_cannot_be_had_stops_the_run_before_weights(mode: str) -> None:
    refusing = example("refusing", check=lambda self, target: Verdict(False, "No such device.", "--compile"))
    with registered("refusing", refusing):
        args = make_args(refusing=True, audit=mode)
        with pytest.raises(PatchRefused, match=r"--refusing is refused: No such device. Use instead: --compile"):
            PatchManager(args).preflight(Target(args))


@pytest.mark.parametrize("mode", ["log", "off"])
def test_a_logged_refusal_becomes_a_row_and_names_the_live_sites(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    def check(self: ExamplePatch, target: Target) -> Verdict:
        return Verdict(False, f"{len(self.planned_sites(target))} layers stay as they are.")

    with registered("refusing", example("refusing", check=check)):
        target = Target(make_args(refusing=True, audit=mode))
        manager = PatchManager(target.args)
        manager.preflight(target)
        assert "refused" in caplog.text
        target.models["transformer"] = net = model()
        for stage in Stage:
            manager.run_stage(stage, target)
        outcome = manager.outcome("refusing")
        assert outcome.state == "refused" and outcome.verdict.reason == "2 layers stay as they are."
        assert not net[0]._forward_hooks


def test_two_patches_on_one_site_conflict_unless_declared_composable() -> None:
    for composable, state in ((frozenset(), "refused"), (frozenset({"first"}), "inert"), (frozenset("*"), "inert")):
        second = example("second", composable=composable)
        with registered("first", example("first")), registered("second", second):
            first_only = Target(make_args(first=True, second=True, audit="log", example_factor=2.0))
            first_only.models["transformer"] = model()
            manager = PatchManager(first_only.args)
            run_all(manager, first_only)
            assert manager.outcome("first").state == "inert"
            outcome = manager.outcome("second")
            assert outcome.state == state, composable
            if state == "refused":
                assert "--second and --first both want 2 sites (transformer.0, transformer.2)" in outcome.verdict.reason


def test_patches_on_different_sites_do_not_conflict() -> None:
    def last(self: ExamplePatch, target: Target) -> tuple[str, ...]:
        return ("transformer.9",)

    quiet = example("quiet", planned_sites=last, apply=lambda self, target: Applied(("transformer.9",), lambda: None))
    with registered("first", example("first")), registered("quiet", quiet):
        target = Target(make_args(first=True, quiet=True, example_factor=2.0), models={"transformer": model()})
        run_all(PatchManager(target.args), target)


def test_declared_conflicts_and_requirements_are_seen_before_weights() -> None:
    with (
        registered("first", example("first")),
        registered("rival", example("rival", conflicts=frozenset({"first"}))),
        registered("needy", example("needy", requires=frozenset({"first"}))),
    ):
        args = make_args(first=True, rival=True)
        with pytest.raises(PatchRefused, match="--first and --rival cannot run together"):
            PatchManager(args).preflight(Target(args))
        args = make_args(needy=True)
        with pytest.raises(PatchRefused, match="--needy needs --first.*Use instead: --needy --first"):
            PatchManager(args).preflight(Target(args))


def test_a_refused_requirement_refuses_what_needs_it() -> None:
    refusing = example("first", check=lambda self, target: Verdict(False, "No."))
    with registered("first", refusing), registered("needy", example("needy", requires=frozenset({"first"}))):
        target = Target(make_args(first=True, needy=True, audit="log"))
        manager = PatchManager(target.args)
        manager.preflight(target)
        assert "needs --first, which cannot be had here: No." in manager.outcome("needy").verdict.reason


def test_order_is_stage_then_requirement_then_registry() -> None:
    early = example("early", stage=Stage.POST_LOAD)
    needy = example("needy", requires=frozenset({"late"}))
    with registered("needy", needy), registered("late", example("late")), registered("early", early):
        manager = PatchManager(make_args(needy=True, late=True, early=True))
        assert [patch.name for patch in manager.requested] == ["early", "late", "needy"]
    backwards = example("needy", stage=Stage.POST_LOAD, requires=frozenset({"late"}))
    with registered("late", example("late")), registered("needy", backwards):
        with pytest.raises(ValueError, match="only runs at a later stage"):
            PatchManager(make_args(needy=True, late=True))


def test_patches_that_require_each_other_are_an_error() -> None:
    one, two = example("one", requires=frozenset({"two"})), example("two", requires=frozenset({"one"}))
    with registered("one", one), registered("two", two), pytest.raises(ValueError, match="in a circle: one, two"):
        PatchManager(make_args(one=True, two=True))


def test_options_without_their_patch_are_not_ignored() -> None:
    args = make_args(compile_mode="max-autotune")
    with pytest.raises(PatchRefused, match="--compile_mode does nothing without --compile"):
        PatchManager(args).preflight(Target(args))
    args = make_args(compile_mode="max-autotune", audit="log")
    PatchManager(args).preflight(Target(args))


def test_undo_runs_backwards() -> None:
    order: list[str] = []

    def tracked(name: str) -> type[ExamplePatch]:
        applied = Applied((f"site.{name}",), lambda: order.append(name))
        return example(name, planned_sites=lambda self, t: (), apply=lambda self, t: applied)

    with registered("one", tracked("one")), registered("two", tracked("two")):
        target = Target(make_args(one=True, two=True))
        manager = PatchManager(target.args)
        run_all(manager, target)
        manager.undo_all()
    assert order == ["two", "one"]


def test_a_patch_whose_stage_never_came_is_pending() -> None:
    with registered("late", example("late", stage=Stage.STEP)):
        target = Target(make_args(late=True))
        manager = PatchManager(target.args)
        manager.preflight(target)
        manager.run_stage(Stage.POST_LOAD, target)
        assert manager.outcome("late").state == "pending"
