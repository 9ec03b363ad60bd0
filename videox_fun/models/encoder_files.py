"""Weight files of the frozen encoders: read without running code, matched key for key, written natively.

A file is read with safetensors or ``torch.load(weights_only=True)``, memory-mapped where its format allows. The module
is built on the meta device and the tensors of the file become its parameters, so the weights are in memory once.
Every key of the file and every parameter of the module must find its partner; what does not is an error.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_SHOWN = 4


def read_tensors(path: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` or torch file, or of a folder in the diffusers layout."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise ValueError(f"'{path}' does not exist. Check the model folder and the *_subpath entries of the yaml file.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return _read_torch(path)


def _read_folder(folder: Path) -> dict[str, Tensor]:
    whole = folder / "diffusion_pytorch_model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    files = files or [*sorted(folder.glob("*.pth")), *sorted(folder.glob("*.bin"))][:1]
    if not files:
        raise ValueError(f"'{folder}' holds no .safetensors, .pth or .bin file.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(read_tensors(file))
    return tensors


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        # Only the zip format of torch >= 1.6 can be memory-mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"'{path}' holds more than tensors, or is damaged; nothing of it was executed. Convert it to .safetensors "
            f"in an environment you trust, or download it again. ({str(error).splitlines()[0]})"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"'{path}' is not a mapping from names to tensors.")
    return dict(content)


def strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """``tensors`` with ``prefix`` removed from the keys that have it."""
    return {key.removeprefix(prefix): value for key, value in tensors.items()}


def shape_of(tensors: Mapping[str, Tensor], key: str, *, what: str, source: str) -> torch.Size:
    """Shape of one tensor that sizes are read from."""
    if key not in tensors:
        raise ValueError(f"'{source}' is not {what}: it has no '{key}'. It holds: {_some(tensors)}.")
    return tensors[key].shape


def count_blocks(keys: Iterable[str], prefix: str) -> int:
    """Number of entries ``{prefix}0.``, ``{prefix}1.``, ... among ``keys``."""
    indices = {key[len(prefix):].split(".", 1)[0] for key in keys if key.startswith(prefix)}
    return 1 + max((int(index) for index in indices if index.isdigit()), default=-1)


def adopt(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str, dtype: torch.dtype | None = None) -> None:
    """Make ``tensors`` the parameters of ``module``; raise unless keys and shapes agree exactly."""
    expected = module.state_dict()
    missing = [key for key in expected if key not in tensors]
    unknown = [key for key in tensors if key not in expected]
    shapes = [
        f"{key}: file {tuple(tensors[key].shape)}, model {tuple(expected[key].shape)}"
        for key in expected if key in tensors and tensors[key].shape != expected[key].shape
    ]
    if missing or unknown or shapes:
        problems = [
            f"{len(found)} {label} ({_some(found)})"
            for found, label in ((missing, "keys missing"), (unknown, "keys unknown"), (shapes, "shapes different"))
            if found
        ]
        raise ValueError(
            f"'{source}' does not fit {type(module).__name__} with its {len(expected)} keys: {'; '.join(problems)}. "
            "Is it the file of another model, or do the sizes in the configuration file differ from the weights?"
        )
    ready = {
        key: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for key, value in tensors.items()
    }
    module.load_state_dict(ready, strict=True, assign=True)


def _some(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, Tensor]) -> None:
    """Write a ``.safetensors`` or torch file; a rename puts it in place, since the old one may be memory-mapped."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    ready = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(ready, hidden, metadata={"format": "pt"})
    else:
        torch.save(ready, hidden)
    os.replace(hidden, path)


class NativeWeights:
    """Mixin, placed before ``ModelMixin``, of models whose weights have a published layout of their own."""

    def native_state_dict(self) -> dict[str, Tensor]:
        """Weights under the keys of the published files."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.to``; diffusers warns at every cast of float32 parts that these models do not have."""
        return nn.Module.to(self, *args, **kwargs)  # type: ignore[arg-type]

    def save_native(self, path: str | os.PathLike) -> None:
        """Write the published layout to a ``.safetensors`` or ``.pth`` file."""
        write_tensors(path, self.native_state_dict())
