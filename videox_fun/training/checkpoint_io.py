"""Files of a checkpoint: written so that a crash leaves either the old or the new, and read without running code.

Writing. Everything goes to a hidden name beside the target (``.checkpoint-20.tmp-<pid>``), every file is flushed to
the disk, the marker ``videox_state.json`` with the size of every file is written last, and one rename makes it
visible. A hidden folder that has a valid marker is therefore a complete checkpoint whose rename did not happen.

Reading. Tensors come from safetensors or ``torch.load(weights_only=True)``; upstream's tiny ``sampler_pos_start.pkl``
goes through an unpickler that refuses every class and function.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

MARKER = "videox_state.json"
MARKER_VERSION = 1
SAMPLER_FILE = "sampler_pos_start.pkl"
_SMALL_PICKLE_BYTES = 65536
_ST_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says what to do."""


# ------------------------------------------------------------------------------------------------------------ writing


def fsync_path(path: Path) -> None:
    """Flush a file or folder entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def durable(path: Path) -> Iterator[Any]:
    """Open for writing and flush to the disk on success."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as handle:
        yield handle
        handle.flush()
        os.fsync(handle.fileno())


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    with durable(path) as handle:
        handle.write((json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode("utf-8"))


def require_jsonable(value: Any, *, where: str) -> None:
    """Raise ``TypeError`` for a value that JSON would change on the way (other key types, arrays, tensors)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; only text keys survive JSON.")
            require_jsonable(item, where=f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            require_jsonable(item, where=where)
    elif not isinstance(value, str | int | float | bool | type(None)) or isinstance(value, np.generic):
        raise TypeError(f"{where} holds a {type(value).__name__}, which JSON cannot keep exactly.")


def write_torch(path: Path, value: Any) -> None:
    with durable(path) as handle:
        torch.save(value, handle)


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file one tensor at a time, so that host memory grows by the largest tensor only."""
    if not tensors:
        raise CheckpointError(f"Refusing to write {path.name}: there is not a single tensor to save.")
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _ST_TYPES:
            raise CheckpointError(f"Cannot save '{name}' of type {tensor.dtype} as safetensors.")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _ST_TYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with durable(path) as handle:
        handle.write(struct.pack("<Q", len(text)))
        handle.write(text)
        for _, tensor in ordered:
            if tensor.numel():
                flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
                handle.write(memoryview(flat.numpy()))


def file_sizes(folder: Path) -> dict[str, int]:
    """Sizes of all files below a folder, the marker left out."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }


def write_marker(folder: Path, content: Mapping[str, Any]) -> None:
    """Declare a folder complete."""
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_path(path)
    write_json(folder / MARKER, {"format": MARKER_VERSION, **content, "files": file_sizes(folder)})
    fsync_path(folder)


def hidden_name(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{kind}-{os.getpid()}")


def publish(temporary: Path, final: Path) -> None:
    """Give a finished file or folder its name; what had the name before disappears only afterwards."""
    if final.is_dir():
        old = hidden_name(final, "old")
        remove(old)
        os.rename(final, old)
        os.rename(temporary, final)
        fsync_path(final.parent)
        remove(old)
    else:
        os.replace(temporary, final)
        fsync_path(final.parent)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint so that no half of it can be mistaken for a whole one."""
    trash = hidden_name(path, "trash")
    os.rename(path, trash)
    remove(trash)


def is_write_error(error: BaseException) -> bool:
    """Whether the disk refused; torch's archive writer reports that as a RuntimeError of its own."""
    return isinstance(error, OSError) or (isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error))


def explain_write_error(reason: str, target: Path, *, kept: str | None) -> CheckpointError:
    """Say in one sentence why a save failed and what is still there."""
    free = shutil.disk_usage(target.parent).free / 2**20
    still = f"{kept} is untouched" if kept else "there is no earlier checkpoint"
    return CheckpointError(
        f"Could not save {target.name}: {reason} ({free:,.0f} MiB free at {target.parent}). The unfinished files were "
        f"removed and {still}. Free some space (or lower --checkpoints_total_limit) and resume."
    )


# ------------------------------------------------------------------------------------------------------------ reading


class _IntListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"'{module}.{name}' is not allowed")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent references are not allowed")


def read_sampler_position(path: Path) -> tuple[int, int]:
    """Read upstream's ``[position, epoch]`` pickle; anything but two integers is refused and nothing is executed."""
    if path.stat().st_size > _SMALL_PICKLE_BYTES:
        raise CheckpointError(f"{path} is too large for a sampler position; refusing to read it.")
    try:
        value = _IntListUnpickler(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a sampler position ({error}); refusing to read it.") from error
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(v) is int for v in value)):
        raise CheckpointError(f"{path} does not hold two integers; refusing to read it.")
    return value[0], value[1]


def write_sampler_position(path: Path, position: int, epoch: int) -> None:
    with durable(path) as handle:
        pickle.dump([position, epoch], handle)


def _numpy_globals() -> list[Any]:
    """What numpy's own RNG state needs, under the names numpy 1 and 2 give it."""
    reconstruct = np.empty(0).__reduce__()[0]
    return [
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        np.ndarray, np.dtype, type(np.dtype(np.uint32)),
    ]


def read_torch(path: Path) -> Any:
    """``torch.load`` that admits tensors, plain values and numpy arrays of RNG states, and nothing else."""
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read safely or is damaged: {first}") from error


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a folder, ``None`` without one; raises ``CheckpointError`` when it is damaged."""
    path = folder / MARKER
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MARKER} is damaged ({error})") from error
    if not isinstance(value, dict) or "files" not in value or "step" not in value:
        raise CheckpointError(f"{MARKER} is incomplete")
    if value.get("format", 0) > MARKER_VERSION:
        raise CheckpointError(f"{MARKER} has format {value['format']}, newer than this program's {MARKER_VERSION}")
    return value


def safetensors_problem(path: Path) -> str | None:
    """Why a safetensors file is not whole, judged by its header and size; ``None`` when it is."""
    size = path.stat().st_size
    if size < 8:
        return f"{path.name} has {size} bytes"
    with open(path, "rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > size - 8:
            return f"{path.name} is cut off"
        try:
            header = json.loads(handle.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            return f"{path.name} has a damaged header"
    ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        return f"{path.name} is cut off"
    return None


def torch_file_problem(path: Path) -> str | None:
    """Why a ``torch.save`` file is not whole; an archive that was cut off has no directory at its end."""
    size = path.stat().st_size
    if size == 0:
        return f"{path.name} has 0 bytes"
    return None if zipfile.is_zipfile(path) else f"{path.name} is cut off or not an archive"
