"""Write a tiny Wan checkpoint with random weights, in the on-disk layout of the published ones.

    python scripts/make_tiny_checkpoint.py --family wan2.1_fun_inp --output tiny

The folder is for --pretrained_model_name_or_path, the wan.yaml in it for --config_path.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from videox_fun.utils.tiny import FAMILIES, TinySizes, make_tiny_checkpoint  # noqa: E402

logger = logging.getLogger("make_tiny_checkpoint")

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, write the folder, say where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True, choices=sorted(FAMILIES), help="which denoiser and which parts")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32", help="dtype of the weights on disk")
    for field in fields(TinySizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help=f"(default {field.default})")
    args = parser.parse_args(argv)

    import torch

    sizes = {field.name: getattr(args, field.name) for field in fields(TinySizes)}
    try:
        made = make_tiny_checkpoint(args.output, family=args.family, seed=args.seed,
                                    dtype=getattr(torch, _DTYPES[args.dtype]), **sizes)
    except ValueError as error:
        parser.error(str(error))
    logger.info("--pretrained_model_name_or_path %s --config_path %s", made.folder, made.config_path)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
