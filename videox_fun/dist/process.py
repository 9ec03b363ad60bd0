"""The end of one process of a distributed run.

Gloo's worker threads may still hold the tensors of the last collectives when the interpreter is torn down; freeing them
then asks for an interpreter lock that no longer exists, and the process aborts (SIGABRT or SIGSEGV, about one exit in
twenty) although everything was trained and saved. Destroying the process group is not enough while anything, DDP's
reducer for one, still refers to it. So a rank that is done leaves without tearing the interpreter down.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

import torch.distributed as dist


def leave_group() -> None:
    """Destroy the default process group if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def end_rank(code: int) -> None:
    """Leave the process with ``code`` if it was one of several ranks; otherwise do nothing.

    What was registered with ``atexit`` (trackers, worker processes) still runs, and the standard streams are flushed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    leave_group()
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
