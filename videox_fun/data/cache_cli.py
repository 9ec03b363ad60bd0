"""``videox-cache``: look at a cache of encodings, check it, and remove what nothing refers to any more.

``ls`` counts entries and bytes by kind and encoder. ``verify`` reads every entry and compares it with the hash written
with it; it exits with 1 when one is damaged. ``gc`` lists what could go, and removes it only with ``--delete``: damaged
entries, clips whose source file is gone or has changed, entries of encoders named by ``--encoder``, and what killed
processes left half written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HALF_WRITTEN_S = 3600.0  # a writer that is still at work is younger


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``videox-cache``."""
    parser = argparse.ArgumentParser(prog="videox-cache", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("ls", "Count entries and bytes."), ("verify", "Read and check every entry."),
                       ("gc", "List or remove entries that nothing refers to.")):  # fmt: skip
        command = commands.add_parser(name, help=text)
        command.add_argument("folder", type=Path, help="The cache: --cache_dir_latents of the runs.")
        if name == "gc":
            command.add_argument("--delete", action="store_true", help="Remove what is listed.")
            command.add_argument("--encoder", nargs="+", default=[], metavar="START",
                                 help="Also entries of encoders whose fingerprint (see ls) starts so.")  # fmt: skip
    return parser


def list_entries(folder: Path) -> list[str]:
    from videox_fun.data.cache_store import CacheStore, Damaged, read_header

    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for path in CacheStore(folder).entries():
        try:
            key = json.loads(read_header(path)["key"])
            groups[(key["kind"], key["encoder"][:12])].append(path.stat().st_size)
        except (Damaged, ValueError, KeyError, OSError):
            groups[("damaged", "-")].append(0)
    lines = [f"{kind:9} {encoder:12} {len(sizes):8} entries {sum(sizes) / 2**20:10.1f} MiB"
             for (kind, encoder), sizes in sorted(groups.items())]  # fmt: skip
    return lines or [f"{folder}: no entries"]


def problem_of(path: Path) -> str | None:
    """What is wrong with an entry, or ``None``."""
    from videox_fun.data.cache_store import Damaged, digest, read_entry, read_header

    try:
        read_entry(path, check_values=True)
        if digest(json.loads(read_header(path)["key"])) != path.stem:
            return f"{path} has another name than its key says"
    except (Damaged, OSError) as error:
        return str(error)
    return None


def removable(folder: Path, *, encoders: Sequence[str] = ()) -> Iterator[tuple[Path, str]]:
    """``(file, reason)`` of what nothing refers to."""
    from videox_fun.data.cache_sources import NO_CONTROL
    from videox_fun.data.cache_store import CacheStore, Damaged, read_header

    current = {NO_CONTROL, *_current_sources(folder)}
    for path in CacheStore(folder).entries():
        try:
            key: dict[str, Any] = json.loads(read_header(path)["key"])
        except (Damaged, ValueError) as error:
            yield path, str(error)
            continue
        source = key.get("origin", {}).get("sha256")
        if source is not None and source not in current:
            yield path, "its source file is gone or has changed"
        elif any(key.get("encoder", "").startswith(start) for start in encoders):
            yield path, f"encoder {key['encoder'][:12]}"
    for path in sorted(folder.rglob(".*.tmp")):
        if time.time() - path.stat().st_mtime > _HALF_WRITTEN_S:
            yield path, "half written"


def _current_sources(folder: Path) -> Iterator[str]:
    from videox_fun.data.storage import media_stat

    for path in sorted((folder / "files").rglob("*.json")):
        try:
            facts = json.loads(path.read_text("utf-8"))
            if list(media_stat(facts["path"])) == facts["stamp"]:
                yield facts["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            continue


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    args = build_parser().parse_args(argv)
    if not args.folder.is_dir():
        sys.stderr.write(f"videox-cache: {args.folder} is not a folder\n")
        return 2
    if args.command == "ls":
        sys.stdout.write("\n".join(list_entries(args.folder)) + "\n")
        return 0
    if args.command == "verify":
        return _verify(args.folder)
    count = size = 0
    for path, reason in removable(args.folder, encoders=args.encoder):
        count, size = count + 1, size + path.stat().st_size
        sys.stdout.write(f"{'removed' if args.delete else 'would remove'} {path}: {reason}\n")
        if args.delete:
            path.unlink(missing_ok=True)
    hint = "" if args.delete or not count else "; --delete removes them"
    sys.stdout.write(f"{count} file(s), {size / 2**20:.1f} MiB{hint}\n")
    return 0


def _verify(folder: Path) -> int:
    from videox_fun.data.cache_store import CacheStore

    problems, count = [], 0
    for path in CacheStore(folder).entries():
        count += 1
        problem = problem_of(path)
        if problem is not None:
            problems.append(problem)
            sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{count} entries, {len(problems)} damaged\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
