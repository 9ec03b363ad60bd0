"""What FSDP is asked for before and after accelerate makes its plugin.

The trainer runs FSDP's second version. The first one packs parameters into flat ones: the gradients of a LoRA may all
lie on one rank, so that each rank would clip by a norm of its own, and what a process can save of them is its piece. As
the first version is still what ``accelerate launch`` picks unless told, the same sharding of the second one takes its
place.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin

logger = logging.getLogger(__name__)

#: Strategies of the first version, by name and by number, and whether weights are given up between uses.
_RESHARD = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
_INSTEAD = {"NO_SHARD": "a launch without --use_fsdp", "3": "a launch without --use_fsdp"}


def settle_fsdp(environ: MutableMapping[str, str] = os.environ) -> None:
    """Turn a launch with FSDP's first version into the same sharding with the second.

    Accelerate's loading on one rank only is turned off in both: every rank reads the weights from the files anyway, and
    it cannot hand on buffers, which adapters have.

    Raises:
        ValueError: the sharding strategy has no counterpart.
    """
    if environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if environ.get("FSDP_VERSION", "1") == "2":
        return
    strategy = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    if strategy not in _RESHARD:
        instead = _INSTEAD.get(strategy, "FULL_SHARD, or --fsdp_version 2 with --parallelism_config_dp_replicate_size")
        raise ValueError(f"--fsdp_sharding_strategy {strategy} is not supported. Use {instead}.")
    environ["FSDP_VERSION"] = "2"
    environ["FSDP_RESHARD_AFTER_FORWARD"] = str(_RESHARD[strategy]).lower()
    if environ.get("FSDP_STATE_DICT_TYPE") == "LOCAL_STATE_DICT":
        environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    for name in ("FSDP_SHARDING_STRATEGY", "FSDP_BACKWARD_PREFETCH", "FSDP_FORWARD_PREFETCH", "FSDP_USE_ORIG_PARAMS",
                 "FSDP_SYNC_MODULE_STATES"):
        environ.pop(name, None)
    logger.info("FSDP version 2 is used in place of version 1, with the sharding of %s.", strategy)


def keep_input_types(plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Have FSDP cast parameters only.

    By default it also casts what a wrapped module is called with, and so would round timesteps, the modulation derived
    from them and the rotary table to 16 bits, which the model keeps in float32 on purpose.
    """
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, cast_forward_inputs=False)
