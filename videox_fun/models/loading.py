"""Reading denoiser checkpoints: native, sharded, ``.pth``/``.bin`` and diffusers folders.

The model is built on the meta device and the tensors of the file become its parameters, so the weights exist once in
memory (files in the safetensors format are mapped, not read, until they are used). Every load makes a
:class:`LoadReport` of what did not fit. ``strict`` turns a non-empty report, and config keys that the class does not
know, into an error: silently ignored weights or settings are the most expensive kind of mistake.

Inside :func:`tensors_go_to` a sink takes the weights it wants, one at a time as they are read, and keeps them in a form
of its own (four bits, for example). The whole model is then never in memory in the file's type.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from videox_fun.models import keymaps
from videox_fun.models.file_tensors import FileTensor, index_safetensors

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
V = TypeVar("V")

WEIGHTS_NAME = "diffusion_pytorch_model"
_PATCH_WEIGHT = "patch_embedding.weight"
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "module.")
_BOOKKEEPING_KEYS = frozenset({"_class_name", "_diffusers_version", "_name_or_path", "_use_default_values", "__name__"})
_YAML_KEYS = frozenset(
    {
        "transformer_subpath", "transformer_low_noise_model_subpath", "transformer_high_noise_model_subpath",
        "transformer_combination_type", "boundary", "dict_mapping",
    }
)  # fmt: skip
_SHOWN_NAMES = 16


def _some(names: list[str]) -> str:
    """The names in one line, equal ones of different blocks counted together."""
    folded = Counter(re.sub(r"\bblocks\.\d+\.", "blocks.*.", name) for name in names)
    shown = [f"{name} (x{count})" if count > 1 else name for name, count in folded.items()]
    rest = len(shown) - _SHOWN_NAMES
    return ", ".join(shown[:_SHOWN_NAMES]) + (f" and {rest} more kinds" if rest > 0 else "")


@dataclass
class LoadReport:
    """What a load found, name by name."""

    source: str
    layout: str = "native"
    files: list[str] = field(default_factory=list)
    loaded: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    ignored_config: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every tensor of the file and of the model found its partner."""
        return not (self.missing or self.unexpected or self.mismatched)

    def lines(self) -> list[str]:
        """The report for people."""
        out = [f"{self.source}: {self.loaded} tensors loaded ({self.layout} layout, {len(self.files)} file(s))"]
        for title, names in (
            ("not in the file", self.missing),
            ("in the file but not in the model", self.unexpected),
            ("of another shape", self.mismatched),
            ("adapted", self.adapted),
            ("config keys ignored", self.ignored_config),
        ):
            if names:
                out.append(f"  {len(names)} {title}: {_some(names)}")
        return out

    def log(self) -> None:
        """Write the report to the log, as a warning when something did not fit."""
        level = logging.INFO if self.complete and not self.ignored_config else logging.WARNING
        for line in self.lines():
            logger.log(level, line)

    def require_complete(self, *, allow_partial: bool = False) -> None:
        """Raise ``ValueError`` naming what did not fit."""
        if self.complete or allow_partial:
            return
        details = "; ".join(line.strip() for line in self.lines()[1:])
        raise ValueError(
            f"the weights of {self.source} do not fit the model: {details}. Check that the checkpoint belongs to this "
            "script and train mode, or pass --allow_partial_load to train from the part that fits"
        )


# ---- sinks -----------------------------------------------------------------------------------------------------------


class TensorSink(Protocol):
    """Takes weights of a denoiser while they are read."""

    def wants(self, model: nn.Module) -> Mapping[str, torch.Size]:
        """Parameters that the sink keeps itself, with their shapes in files. The model may be on the meta device."""

    def store(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Keep one of these parameters."""


_SINK: ContextVar[TensorSink | None] = ContextVar("tensor_sink", default=None)


@contextmanager
def tensors_go_to(sink: TensorSink) -> Iterator[None]:
    """Hand weights that are read inside the block to ``sink``."""
    token = _SINK.set(sink)
    try:
        yield
    finally:
        _SINK.reset(token)


def _file_shapes(model: nn.Module, kept: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Names and shapes that a file of this model has; what a sink keeps may look otherwise in the model's state."""
    parts = tuple(f"{name}." for name in kept)
    shapes = {name: value.shape for name, value in model.state_dict().items() if not name.startswith(parts)}
    return {name: kept.get(name, shape) for name, shape in shapes.items()}


# ---- files -----------------------------------------------------------------------------------------------------------


def find_weight_files(folder: str | Path) -> list[Path]:
    """Weight files of a model folder: one file, the shards of an index, or every safetensors file."""
    folder = Path(folder)
    for suffix in (".bin", ".safetensors"):
        if (single := folder / f"{WEIGHTS_NAME}{suffix}").is_file():
            return [single]
    indexes = sorted(folder.glob(f"{WEIGHTS_NAME}*.index.json")) or sorted(folder.glob("*.index.json"))
    for index in indexes[:1]:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{index} names files that do not exist: {_some(absent)}; the download is incomplete")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("diffusion_pytorch_model*.pth"))
    if not files:
        raise ValueError(f"no transformer weights in {folder}: expected {WEIGHTS_NAME}.safetensors or its shards")
    return files


def _torch_load(path: Path) -> Mapping[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the old format cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Tensors of one ``.safetensors``, ``.pth``, ``.pt`` or ``.bin`` file, or of a folder; never runs code from it."""
    path = Path(path)
    if path.is_dir():
        state: dict[str, Tensor] = {}
        for file in find_weight_files(path):
            state.update(read_state_dict(file))
        return state
    if not path.is_file():
        raise ValueError(f"there is no weight file {path}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    loaded = _torch_load(path)
    for wrapper in ("state_dict", "module"):
        if isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    return {key: value for key, value in loaded.items() if isinstance(value, Tensor)}


def _open_state_dict(path: Path) -> Mapping[str, Tensor | FileTensor]:
    """As :func:`read_state_dict`, but with a sink active tensors of safetensors files stay unread."""
    if _SINK.get() is None:
        return read_state_dict(path)
    files = find_weight_files(path) if path.is_dir() else [path]
    state: dict[str, Tensor | FileTensor] = {}
    for file in files:
        known = file.suffix == ".safetensors" and file.is_file()
        state.update(index_safetensors(file) if known else read_state_dict(file))
    return state


def _read(tensor: Tensor | FileTensor) -> Tensor:
    return tensor.read() if isinstance(tensor, FileTensor) else tensor


def _without_prefix(state: Mapping[str, V]) -> Mapping[str, V]:
    for prefix in _PREFIXES:
        if state and all(key.startswith(prefix) for key in state):
            return {key[len(prefix) :]: value for key, value in state.items()}
    return state


def read_config(path: str | Path) -> dict[str, Any]:
    """``config.json`` of a model folder."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; a transformer folder needs its config.json beside the weights")
    return json.loads(file.read_text(encoding="utf-8"))


# ---- config ----------------------------------------------------------------------------------------------------------


def _constructor_names(cls: type) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters) - {"self", "args", "kwargs"}


def _native_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if keymaps.is_diffusers_config(config):
        return keymaps.diffusers_config_to_native(config), "diffusers"
    if keymaps.is_diffsynth_config(config):
        return keymaps.diffsynth_config_to_native(config), "native"
    return dict(config), "native"


def constructor_kwargs(
    cls: type, config: Mapping[str, Any], *, additional_kwargs: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Constructor arguments for a config and the yaml's extra arguments, and the keys that the class does not know."""
    extra = dict(additional_kwargs or {})
    for source, target in dict(extra.get("dict_mapping") or {}).items():
        if source not in config:
            raise ValueError(f"dict_mapping maps {source!r} to {target!r}, but config.json has no {source!r}")
        extra[target] = config[source]
    known = _constructor_names(cls)
    ignored = [key for key in extra if key not in known and key not in _YAML_KEYS]
    for key, value in config.items():
        fixed_by_class = key == "cross_attn_type" and value == "cross_attn"
        if key not in known and key not in _BOOKKEEPING_KEYS and not fixed_by_class:
            ignored.append(key)
    merged = {**config, **extra}
    return {key: value for key, value in merged.items() if key in known}, sorted(set(ignored))


# ---- weights ---------------------------------------------------------------------------------------------------------


def _fit_patch_embedding(weight: Tensor, shape: torch.Size) -> Tensor | None:
    """Input channels in common, zeros for the others; ``None`` when more than the input channels differ."""
    if weight.dim() != len(shape) or weight.shape[0] != shape[0] or weight.shape[2:] != shape[2:]:
        return None
    fitted = weight.new_zeros(shape)
    channels = min(weight.shape[1], shape[1])
    fitted[:, :channels] = weight[:, :channels]
    return fitted


def match_state(
    model_shapes: Mapping[str, torch.Size], state: Mapping[str, Tensor | FileTensor], report: LoadReport
) -> Iterator[tuple[str, Tensor | FileTensor]]:
    """Tensors of the file that fit the model, one at a time; what does not fit goes to the report."""
    report.unexpected = sorted(key for key in state if key not in model_shapes)
    for name, shape in model_shapes.items():
        tensor = state.get(name)
        if tensor is None:
            report.missing.append(name)
            continue
        if tensor.shape != shape:
            fitted = _fit_patch_embedding(_read(tensor), shape) if name == _PATCH_WEIGHT else None
            note = f"{name} (file {list(tensor.shape)}, model {list(shape)})"
            if fitted is None:
                report.mismatched.append(note)
                continue
            report.adapted.append(note)
            tensor = fitted
        report.loaded += 1
        yield name, tensor


@torch.no_grad()
def init_missing_by_name(name: str, tensor: Tensor) -> None:
    """Values of a tensor that the checkpoint lacks, chosen by its name (the rule of ``low_cpu_mem_usage``)."""
    if "running_var" in name:
        tensor.fill_(1)
    elif "weight" not in name:
        tensor.zero_()
    elif "norm" in name:
        tensor.fill_(1)
    elif "embed" in name:
        tensor.normal_(std=0.02)
    elif any(part in name for part in ("head", "output", "proj_out")):
        tensor.zero_()
    elif tensor.dim() >= 2:
        nn.init.xavier_uniform_(tensor)
    else:
        tensor.normal_(std=0.02)


def assign_weights(
    model: nn.Module,
    state: Mapping[str, Tensor | FileTensor],
    report: LoadReport,
    *,
    dtype: torch.dtype | None,
    by_name: bool = False,
    strict: bool = False,
    allow_partial: bool = False,
) -> None:
    """Make the file's tensors the parameters of a model on the meta device; what is missing gets initial values."""
    sink = _SINK.get()
    kept = dict(sink.wants(model)) if sink is not None else {}
    shapes = _file_shapes(model, kept)
    fitting = dict(match_state(shapes, state, report))
    if strict:
        report.require_complete(allow_partial=allow_partial)
    initialise = init_missing_by_name if by_name else getattr(model, "init_parameter", init_missing_by_name)
    values: dict[str, Tensor] = {}
    for name in [*fitting, *(name for name in shapes if name not in fitting)]:
        if name in fitting:
            tensor = _read(fitting[name])
        else:
            tensor = torch.empty(shapes[name], dtype=torch.float32)
            initialise(name, tensor)
        tensor = tensor.to(dtype or tensor.dtype)
        if sink is not None and name in kept:
            sink.store(model, name, tensor)
        else:
            values[name] = tensor
    model.load_state_dict(values, strict=not kept, assign=True)


def load_transformer(
    cls: type[M],
    path: str | Path,
    *,
    subfolder: str | None = None,
    additional_kwargs: Mapping[str, Any] | None = None,
    low_cpu_mem_usage: bool = False,
    torch_dtype: torch.dtype | None = torch.bfloat16,
    strict: bool = False,
    allow_partial: bool = False,
) -> M:
    """Build ``cls`` from a folder with ``config.json`` and weights (or a weight file beside its ``config.json``).

    ``strict`` refuses unknown config keys and weights that do not fit (``allow_partial`` permits the latter). The
    report is kept as ``model.load_report``. ``low_cpu_mem_usage`` only chooses the rule for missing tensors.
    """
    location = Path(os.path.join(path, subfolder) if subfolder else path)
    folder = location if location.is_dir() else location.parent
    config, layout = _native_config(read_config(folder))
    kwargs, ignored = constructor_kwargs(cls, config, additional_kwargs=additional_kwargs)
    if ignored and strict:
        raise ValueError(
            f"{folder / 'config.json'} (or transformer_additional_kwargs) has keys that {cls.__name__} does not know: "
            f"{', '.join(ignored)}. They may change the model, so training on it would be wrong; use the class and "
            "script that the checkpoint was made for, or remove the keys if they are known to be harmless"
        )
    files = [location] if location.is_file() else find_weight_files(location)
    report = LoadReport(str(location), layout, [file.name for file in files], ignored_config=ignored)
    with torch.device("meta"):
        model = cls(**kwargs)
    state = keymaps.to_native_state(_without_prefix(_open_state_dict(location)))
    assign_weights(
        model, state, report, dtype=torch_dtype, by_name=low_cpu_mem_usage, strict=strict, allow_partial=allow_partial
    )
    report.log()
    model.load_report = report
    return model.eval()


@torch.no_grad()
def load_weights(
    model: nn.Module, path: str | Path, *, strict: bool = False, allow_partial: bool = False
) -> LoadReport:
    """Copy the weights of a file or folder into a live model (``--transformer_path``), in the model's own types.

    ``strict`` refuses a file that does not cover the model or holds more than it (unless ``allow_partial``). A file of
    which nothing fits is always refused.
    """
    sink = _SINK.get()
    kept = dict(sink.wants(model)) if sink is not None else {}
    state = keymaps.to_native_state(_without_prefix(_open_state_dict(Path(path))))
    report = LoadReport(str(path), files=[Path(path).name])
    own = model.state_dict()
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    fitting = dict(match_state(_file_shapes(model, kept), state, report))
    if not fitting:
        raise ValueError(f"{path}: none of its {len(state)} tensors belongs to the model")
    if strict:
        report.require_complete(allow_partial=allow_partial)
    for name, tensor in fitting.items():
        if sink is not None and name in kept:
            sink.store(model, name, _read(tensor).to(dtype))
        else:
            own[name].copy_(_read(tensor))
    report.log()
    return report
