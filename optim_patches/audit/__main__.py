"""``python -m optim_patches.audit`` is ``videox-audit``."""

from __future__ import annotations

import sys

from optim_patches.audit.cli import main

if __name__ == "__main__":
    sys.exit(main())
