"""Fill the cache before training: ``precompute.py SCRIPT_ID`` followed by the flags of that training script.

    python scripts/precompute.py wan2.1/train_lora --config_path ... --train_data_meta ... --cache_dir_latents cache

Without ``--cache_latents`` and ``--cache_text`` both are filled. It can be stopped and started again at any time, and
run with ``accelerate launch`` on several processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    from videox_fun.training.entry import prepare_cache
    from videox_fun.training.specs import SCRIPTS

    if not words or words[0] not in SCRIPTS:
        known = "\n  ".join(sorted(SCRIPTS))
        sys.stderr.write(f"usage: precompute.py SCRIPT_ID [flags of that script]\nscripts:\n  {known}\n")
        return 0 if words[:1] in (["--help"], ["-h"]) else 2
    return prepare_cache(words[0], words[1:])


if __name__ == "__main__":
    from videox_fun.dist.process import end_rank

    code = main()
    end_rank(code)
    sys.exit(code)
