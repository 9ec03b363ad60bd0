"""Traces kept on disk, so that the next run with the same sizes is planned at once.

An entry's name is a hash of what was asked, of the torch version and of the sources that were traced. The folder is
``videox-plan`` below the user's cache folder (``XDG_CACHE_HOME``); without a writable one nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where traces are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "videox-plan"


@cache
def _sources() -> str:
    """Hash of the code that traces run through."""
    import torch

    import videox_fun.models as models

    digest = hashlib.sha256(torch.__version__.encode())
    for folder in (Path(models.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def remembered(what: str, question: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer kept for a question, or a new one. Both are plain values."""
    text = json.dumps([what, question, _sources()], sort_keys=True, default=str)
    file = cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        answer = compute()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        hidden = file.with_name(f".{file.name}.{os.getpid()}")
        hidden.write_text(json.dumps(answer), encoding="utf-8")
        os.replace(hidden, file)
    except OSError as error:
        logger.debug("The trace is not kept: %s", error)
    return answer
