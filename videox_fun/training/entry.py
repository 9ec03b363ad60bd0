"""From a command line to a finished run.

The command line is parsed before anything heavy is imported, so ``--help`` and a misspelt flag answer at once. Whatever
can be refused is refused in the order of its cost: flags, configuration, model folder, dataset, weights.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

from videox_fun.training.flags import parse_args
from videox_fun.training.specs import ScriptSpec, get_spec

logger = logging.getLogger(__name__)

#: Exit code after a user's mistake, as argparse uses it.
EXIT_USAGE = 2
#: Exit code after a run that stopped itself: a strict audit, a save that failed, weights that diverged,
#: data that cannot be read.
EXIT_FAILED = 1


def main(script_id: str, argv: Sequence[str] | None = None) -> int:
    """Run one training script. Returns the process's exit code; a script's own rank (no ``argv``) ends with it."""
    code = train(script_id, argv)
    if argv is None and os.environ.get("WORLD_SIZE"):
        from videox_fun.dist.process import end_rank

        end_rank(code)
    return code


def train(script_id: str, argv: Sequence[str] | None = None) -> int:
    """:func:`main` for a process that goes on afterwards."""
    spec = get_spec(script_id)
    args = parse_args(spec, argv)
    _configure_logging()
    from videox_fun.training.planning import PlanShown, change_flags

    try:
        change_flags(spec, args)
        trainer = build_trainer(spec, args)
        trainer.setup()
    except PlanShown:
        _leave_group()
        return 0
    except ValueError as error:
        if os.environ.get("VIDEOX_TRACEBACK"):
            raise
        logger.error("%s", error)
        logger.info("Set VIDEOX_TRACEBACK=1 to see where this was found.")
        _leave_group()
        return EXIT_USAGE
    return _run(trainer)


def _run(trainer) -> int:
    """Run, and report as one sentence what the run itself decided to stop for."""
    from optim_patches.audit.live import AuditFailed
    from videox_fun.data.bad_rows import DataError
    from videox_fun.training.checkpoint import CheckpointError
    from videox_fun.training.clipping import NonFiniteError

    try:
        return trainer.run()
    except (AuditFailed, CheckpointError, DataError, NonFiniteError) as error:
        if os.environ.get("VIDEOX_TRACEBACK"):
            raise
        logger.error("%s", error)
        _leave_group()
        return EXIT_FAILED


def prepare_cache(script_id: str, argv: Sequence[str] | None = None) -> int:
    """Encode everything that a training command line will ask for. Returns the process's exit code."""
    spec = get_spec(script_id)
    args = parse_args(spec, argv)
    if not (args.cache_latents or args.cache_text):
        args.cache_latents = args.cache_text = True
    _configure_logging()
    from videox_fun.training.launch import make_context
    from videox_fun.training.precompute import precompute

    try:
        filled = precompute(make_context(spec, args), _recipe(spec))
    except ValueError as error:
        if os.environ.get("VIDEOX_TRACEBACK"):
            raise
        logger.error("%s", error)
        _leave_group()
        return EXIT_USAGE
    logger.info("cache filled: encoded %s, found %s, failed %d", filled.encoded, filled.found, len(filled.failed))
    _leave_group()
    return EXIT_FAILED if filled.failed else 0


def build_trainer(spec: ScriptSpec, args: argparse.Namespace):
    """The trainer of a parsed command line, with nothing loaded yet."""
    from videox_fun.training.launch import make_context
    from videox_fun.training.trainer import Trainer

    return Trainer(make_context(spec, args), _recipe(spec))


def _recipe(spec: ScriptSpec):
    import importlib

    module, _, name = spec.recipe.partition(":")
    return getattr(importlib.import_module(f"videox_fun.recipes.{module}"), name)()


def _configure_logging() -> None:
    from videox_fun.utils.console import configure_logging

    configure_logging(level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


def _leave_group() -> None:
    from videox_fun.dist.process import leave_group

    leave_group()
