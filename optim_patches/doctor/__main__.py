"""``python -m optim_patches.doctor`` is ``videox-doctor``."""

from __future__ import annotations

import sys

from optim_patches.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
