"""One rank of a run that FSDP2 or DeepSpeed shards, on CPUs; started by the tests through ``torchrun``.

accelerate turns a sharded launch without an accelerator into plain data parallelism. Its state is therefore made first,
for gloo, and then told that the processes have devices; from there on everything is accelerate's own way.

The first argument is ``ddp``, ``fsdp``, ``fsdp1`` (version 1) or a DeepSpeed configuration file, the second the script, the rest its words.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "WanAttentionBlock", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
VERSIONS = {
    "fsdp": {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
    "fsdp1": {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
              "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_USE_ORIG_PARAMS": "true"},
}  # fmt: skip


def pretend_devices() -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    del os.environ["ACCELERATE_USE_CPU"]


def main() -> None:
    kind, script = sys.argv[1], ROOT / "scripts" / f"{sys.argv[2]}.py"
    if kind in VERSIONS:
        os.environ |= {**FSDP, **VERSIONS[kind]}
        pretend_devices()
    elif kind != "ddp":
        os.environ["DS_ACCELERATOR"] = "cpu"
        pretend_devices()
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": kind}
    sys.argv = [str(script), *sys.argv[3:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
