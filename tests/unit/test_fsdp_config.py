"""A launch with FSDP's first version gets the same sharding from the second, or a sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from videox_fun.training.fsdp_config import keep_input_types, settle_fsdp

ON = {"ACCELERATE_USE_FSDP": "true"}


@pytest.mark.parametrize(("strategy", "reshard"), [
    (None, "true"), ("FULL_SHARD", "true"), ("1", "true"), ("SHARD_GRAD_OP", "false"), ("2", "false"),
])
def test_the_same_sharding(strategy: str | None, reshard: str) -> None:
    environ = {**ON, "FSDP_VERSION": "1", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_USE_ORIG_PARAMS": "false",
               "FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT", "FSDP_OFFLOAD_PARAMS": "false"}
    environ |= {} if strategy is None else {"FSDP_SHARDING_STRATEGY": strategy}
    settle_fsdp(environ)
    assert environ == {**ON, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": reshard,
                       "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_OFFLOAD_PARAMS": "false",
                       "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}


def test_the_second_version_only_loses_loading_on_one_rank() -> None:
    environ = {**ON, "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    settle_fsdp(environ)
    assert environ == {**ON, "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}


@pytest.mark.parametrize("environ", [{}, {"FSDP_VERSION": "1"}])
def test_other_launches_are_left_alone(environ: dict[str, str]) -> None:
    before = dict(environ)
    settle_fsdp(environ)
    assert environ == before


@pytest.mark.parametrize(("strategy", "instead"), [
    ("NO_SHARD", "a launch without --use_fsdp"), ("HYBRID_SHARD", "--parallelism_config_dp_replicate_size"),
])
def test_what_has_no_counterpart_is_refused(strategy: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"--fsdp_sharding_strategy {strategy} is not supported. Use .*{instead}"):
        settle_fsdp({**ON, "FSDP_SHARDING_STRATEGY": strategy})


def test_inputs_keep_their_types() -> None:
    plugin = SimpleNamespace(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    keep_input_types(plugin)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    keep_input_types(SimpleNamespace(mixed_precision_policy=None))
    keep_input_types(None)
