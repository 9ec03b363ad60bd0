"""Entry point; the row ``wan2.1_fun/train_lora`` of videox_fun/training/specs.py describes it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from videox_fun.training.entry import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main("wan2.1_fun/train_lora"))
