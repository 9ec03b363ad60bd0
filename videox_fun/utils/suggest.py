"""Words for error messages: the nearest known name, and what lies near a path that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like ``word``, or None when nothing is near."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean X?`` with a leading blank, or an empty string."""
    match = nearest(word, known)
    return f" Did you mean {match}?" if match else ""


def near_paths(path: Path, *, limit: int = 5) -> list[str]:
    """Names beside a missing path that a typing slip could explain: similar names first, then the same stem."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return []
    similar = difflib.get_close_matches(path.name, names, n=limit, cutoff=0.6)
    same_stem = [name for name in names if Path(name).stem == path.stem and name not in similar]
    return (similar + same_stem)[:limit]


def describe_missing(path: str | Path) -> str:
    """One or two sentences on a path that does not exist: the full path tried and what is there instead."""
    full = Path(path).expanduser().absolute()
    if full.parent.is_dir():
        near = near_paths(full)
        if near:
            return f"{full} does not exist. Its folder has: {', '.join(near)}."
        return f"{full} does not exist, and nothing in its folder has a similar name."
    existing = next((parent for parent in full.parents if parent.is_dir()), None)
    return f"{full} does not exist; the path is right as far as {existing}."
