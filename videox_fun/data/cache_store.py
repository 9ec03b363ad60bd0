"""A folder of encoded tensors that many processes may fill and read at the same time.

An entry is one safetensors file named by the hash of its key, a JSON-able dictionary of everything that decides the
tensors. The key itself and a hash of the tensors lie in the file's header, so a file can never be taken for another
one. Files are written under another name and renamed: a reader sees a whole file or none, and of two writers the last
one wins with equal content. A file that is cut off, or belongs to another key, counts as absent; a warning names it,
and the entry that replaces it takes its place. Nothing here deletes an entry.

Keys of one origin (a clip and the frames read from it) share a folder: ``holds_origin`` tells whether that origin was
ever encoded, whatever its size.

Facts about source files (size, modification time, hash of the content, frames, sides) are kept in the same way, one
small file per path, so that a start with a filled cache reads no media.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from videox_fun.data.storage import is_url, media_stat, open_media

logger = logging.getLogger(__name__)

#: Part of every key. Raised when the meaning of an entry changes; entries of other versions are left alone.
VERSION = 1
SUFFIX = ".safetensors"
_BLOCK = 1 << 22

Key = Mapping[str, Any]


def canonical(value: Any) -> str:
    """The one spelling of a JSON-able value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file's content."""
    found = hashlib.sha256()
    with open_media(path) as handle:
        while block := handle.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write aside and rename, so that ``path`` is always whole; ``durable`` also when the power fails.

    Raises ``OSError``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(aside, "wb") as handle:
            handle.write(content)
            if durable:
                handle.flush()
                os.fsync(handle.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


class Damaged(ValueError):
    """An entry that cannot be used; the text says why."""


@dataclass
class CacheStore:
    """The entries below ``root``. ``problems`` counts damaged files met and writes that failed.

    ``room`` is how many bytes this process may still write; ``None`` is any number.
    """

    root: Path
    room: float | None = None
    problems: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.root = Path(self.root)

    def path(self, kind: str, key: Key, *, origin: Key | None = None) -> Path:
        name = digest({"version": VERSION, "kind": kind, **({} if origin is None else {"origin": origin}), **key})
        if origin is None:
            return self.root / kind / name[:2] / f"{name}{SUFFIX}"
        return self.origin_folder(kind, origin) / f"{name}{SUFFIX}"

    def origin_folder(self, kind: str, origin: Key) -> Path:
        name = digest(origin)
        return self.root / kind / name[:2] / name

    def holds_origin(self, kind: str, origin: Key) -> bool:
        return self.origin_folder(kind, origin).is_dir()

    def intact(self, kind: str, key: Key, *, origin: Key | None = None) -> bool:
        """Whether the entry exists with all its bytes; the values are not read."""
        try:
            read_header(self.path(kind, key, origin=origin))
        except FileNotFoundError:
            return False
        except (Damaged, OSError) as error:
            self._warn("damaged", "%s; it counts as absent and will be written again", error)
            return False
        return True

    def read(self, kind: str, key: Key, *, origin: Key | None = None) -> dict[str, torch.Tensor] | None:
        """The tensors of an entry, or ``None``."""
        path = self.path(kind, key, origin=origin)
        try:
            return read_entry(path, expected=_full(kind, key, origin))
        except FileNotFoundError:
            return None
        except (Damaged, OSError) as error:
            self._warn("damaged", "%s; it counts as absent and will be written again", error)
            return None

    def write(self, kind: str, key: Key, tensors: Mapping[str, torch.Tensor], *, origin: Key | None = None) -> bool:
        """Store an entry. A folder that cannot be written to is said once and costs only the time saved later."""
        from safetensors.torch import save

        found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        header = {"key": canonical(_full(kind, key, origin)), "sha256": hash_tensors(found)}
        content = save(found, metadata=header)
        if self.room is not None and len(content) > self.room:
            self.full()
            return False
        try:
            replace_file(self.path(kind, key, origin=origin), content, durable=True)
        except OSError as error:
            self._warn("unwritten", "%s: an entry cannot be written (%s); training goes on without it. This is said "
                       "once.", self.root, error, once=True)
            return False
        if self.room is not None:
            self.room -= len(content)
        return True

    def full(self) -> None:
        """Say once that there is no room left."""
        self._warn("over budget", "%s is as large as --cache_budget_gb allows: what is not in it is encoded at each "
                   "use. This is said once.", self.root, once=True)

    def _warn(self, what: str, text: str, *values: Any, once: bool = False) -> None:
        self.problems[what] += 1
        if not once or self.problems[what] == 1:
            logger.warning(text, *values)

    def entries(self) -> Iterator[Path]:
        """All entries, in the order of their paths."""
        return iter(sorted(self.root.rglob(f"*{SUFFIX}")))


def _full(kind: str, key: Key, origin: Key | None) -> dict[str, Any]:
    return {"version": VERSION, "kind": kind, **({} if origin is None else {"origin": dict(origin)}), **key}


def read_header(path: Path) -> dict[str, str]:
    """The key and hash of an entry. Raises ``Damaged`` when bytes are missing."""
    return _open(path, tensors=False)[0]


_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip


def _open(path: Path, *, tensors: bool) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """A safetensors file in one read: faster than mapping it for values that are all needed at once, and a file that
    is cut off meanwhile is an error, not a signal that ends the process."""
    with open(path, "rb", buffering=0) as handle:
        size = os.fstat(handle.fileno()).st_size
        content = np.empty(size if tensors else 0, dtype=np.uint8)
        if tensors and handle.readinto(content) != size:
            raise Damaged(f"{path} is damaged or cut off (it became shorter)")
        start = content[:8].tobytes() if tensors else handle.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 0 < length <= size - 8:
            raise Damaged(f"{path} is damaged or cut off ({size} bytes)")
        text = content[8 : 8 + length].tobytes() if tensors else handle.read(length)
    try:
        layout = json.loads(text)
        header = layout.pop("__metadata__", {})
        ends = [value["data_offsets"][1] for value in layout.values()]
        if 8 + length + max(ends, default=0) != size:
            raise Damaged(f"{path} is damaged or cut off ({size} bytes)")
        values = torch.from_numpy(content[8 + length :])
        found = {name: _tensor(values, value) for name, value in layout.items()} if tensors else {}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"{path} is damaged ({error})") from error
    if "key" not in header:
        raise Damaged(f"{path} is not a cache entry (it has no key)")
    return header, found


def _tensor(values: torch.Tensor, layout: dict[str, Any]) -> torch.Tensor:
    start, end = layout["data_offsets"]
    return values[start:end].view(_TYPES[layout["dtype"]]).view(layout["shape"])


def read_entry(path: Path, *, expected: Key | None = None, check_values: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a file. Raises ``Damaged`` for missing bytes, a key that is not ``expected``, or, with
    ``check_values``, values that are not those written."""
    header, tensors = _open(path, tensors=True)
    if expected is not None and header["key"] != canonical(expected):
        raise Damaged(f"{path} holds an entry of another key")
    if check_values and hash_tensors(tensors) != header.get("sha256"):
        raise Damaged(f"{path}: its values are not those that were written")
    return tensors


class FileFacts:
    """What is known about files, by path; a file whose size or modification time changed is looked at again."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root) / "files"
        self._known: dict[str, dict[str, Any]] = {}
        self._unwritable = False

    def of(self, path: str | Path, look: Any = None) -> dict[str, Any]:
        """Size, modification time, ``sha256`` and, with ``look(path)``, what it returns as ``media``."""
        absolute = str(path) if is_url(path) else os.path.abspath(str(path))
        stamp = list(media_stat(absolute))
        facts = self._known.get(absolute) or self._load(absolute)
        if facts.get("path") != absolute or facts.get("stamp") != stamp:
            facts = {"path": absolute, "stamp": stamp, "sha256": hash_file(absolute)}
        if look is not None and "media" not in facts:
            facts = {**facts, "media": look(absolute)}
        if self._known.get(absolute) != facts:
            self._known[absolute] = facts
            self._save(absolute, facts)
        return facts

    def fingerprint(self, path: str | Path) -> str:
        """Hash of a file, or of all files of a folder with their names."""
        if Path(path).is_file():
            return self.of(path)["sha256"]
        files = sorted(entry for entry in Path(path).rglob("*") if entry.is_file() and not entry.name.startswith("."))
        return digest([[str(entry.relative_to(path)), self.of(entry)["sha256"]] for entry in files])

    def _file(self, absolute: str) -> Path:
        name = hashlib.sha256(absolute.encode("utf-8", "surrogateescape")).hexdigest()
        return self.root / name[:2] / f"{name}.json"

    def _load(self, absolute: str) -> dict[str, Any]:
        try:
            facts = json.loads(self._file(absolute).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def _save(self, absolute: str, facts: dict[str, Any]) -> None:
        if self._load(absolute) == facts:
            return
        try:
            replace_file(self._file(absolute), json.dumps(facts).encode("utf-8", "surrogateescape"))
        except OSError as error:
            if not self._unwritable:
                logger.warning("%s cannot be written to (%s): files are hashed again at the next start.", self.root,
                               error)
            self._unwritable = True


def total_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
