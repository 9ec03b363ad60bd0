"""Native (Kohya-style) LoRA: the adapter of a layer and the network of all adapters.

How an adapter is attached. Upstream stores a bound method in the adapted layer (``layer.forward = lora.forward``).
Here the layer keeps its place in the model, its parameter names and all of its state, and only changes its class to a
subclass made on the fly: ``Linear`` -> ``LoRALinear(_Adapted, Linear)``. What that buys:

* Base keys are unchanged: ``blocks.0.self_attn.q.weight`` stays, and the layer has no new child.
* The subclass calls ``super().forward``, so any ``nn.Linear`` subclass (4-bit, FP8) is adapted without knowing it.
* ``isinstance(layer, nn.Linear)`` stays true, and taking the adapter off restores the very class.
* torch.compile sees plain method calls: a block with adapters compiles as one graph, and all blocks share it.

The adapter's own parameters live in :class:`LoRANetwork`, a separate module. The engine registers it as the denoiser's
child ``network``, so that one ``prepare()`` (DDP, FSDP) sees them, while moving or offloading a block of the base model
does not move its adapters: they are small and stay on the device.

A layer whose ``forward`` was replaced on the instance before the adapter came keeps that function: it is moved to
``_base_forward`` and called for the base result. Code that wants to replace the base computation of an adapted layer
later must set ``layer._base_forward`` (not ``layer.forward``, which contains the adapter).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from videox_fun.utils.lora_codec import LoadReport, LoraPair, LoraWeights, decode, read_tensors
from videox_fun.utils.lora_names import ModuleIndex, flatten

logger = logging.getLogger(__name__)

# Blocks of the text encoders inside which adapters are made (T5 of Wan, T5 and UMT5 of transformers, BERT).
TEXT_ENCODER_TARGETS = (
    "T5LayerSelfAttention", "T5LayerFF", "BertEncoder", "T5SelfAttention", "T5CrossAttention", "UMT5LayerSelfAttention",
    "UMT5LayerFF",
)
UNET_PREFIX = "lora_unet"
TEXT_PREFIX = "lora_te"


class _Adapted:
    """Mixed in before the class of an adapted layer; adds the adapter's result to the layer's own."""

    _lora: LoRAModule
    _base_forward = None

    def forward(self, x: Tensor) -> Tensor:
        base = super().forward(x) if self._base_forward is None else self._base_forward(x)
        return self._lora.add_delta(base, x)


@cache
def _adapted_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"LoRA{base.__name__}", (_Adapted, base), {"__module__": base.__module__})


class LoRAModule(nn.Module):
    """The adapter of one ``Linear`` or 1x1 ``Conv2d``: ``base(x) + up(down(x)) * multiplier * alpha / rank``.

    Args:
        lora_name: name in files.
        org_module: the layer to adapt. It is referenced, not registered.
        dropout: dropout on the adapter's output while training.
        rank_dropout: share of rank channels zeroed per sample while training; the rest is scaled up by 1/(1-p).
        module_dropout: probability of leaving the whole adapter out of a training step.
    """

    def __init__(
        self, lora_name: str, org_module: nn.Module, multiplier: float = 1.0, lora_dim: int = 4, alpha: Any = 1,
        dropout: float | None = None, rank_dropout: float | None = None, module_dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.lora_name = lora_name
        self.lora_dim = lora_dim
        if isinstance(org_module, nn.Conv2d):
            self.lora_down: nn.Module = nn.Conv2d(
                org_module.in_channels, lora_dim, org_module.kernel_size, org_module.stride, org_module.padding,
                bias=False)
            self.lora_up: nn.Module = nn.Conv2d(lora_dim, org_module.out_channels, 1, bias=False)
        else:
            self.lora_down = nn.Linear(org_module.in_features, lora_dim, bias=False)
            self.lora_up = nn.Linear(lora_dim, org_module.out_features, bias=False)
        if isinstance(alpha, Tensor):
            alpha = alpha.detach().float().item()
        alpha = lora_dim if alpha is None or alpha == 0 else alpha
        self.scale = alpha / lora_dim
        self.register_buffer("alpha", torch.tensor(alpha))
        nn.init.kaiming_uniform_(self.lora_down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_up.weight)
        self.multiplier = multiplier
        self.dropout = dropout
        self.rank_dropout = rank_dropout
        self.module_dropout = module_dropout
        object.__setattr__(self, "org_module", org_module)

    def apply_to(self) -> None:
        """Attach to the layer: from now on calling the layer includes the adapter."""
        layer = self.org_module
        if isinstance(layer, _Adapted):
            raise ValueError(f"Layer of '{self.lora_name}' already carries a LoRA. Merge or remove that one first.")
        own_forward = layer.__dict__.pop("forward", None)
        if own_forward is not None:
            object.__setattr__(layer, "_base_forward", own_forward)
        object.__setattr__(layer, "_lora", self)
        layer.__class__ = _adapted_class(type(layer))

    def remove(self) -> None:
        """Detach from the layer and leave it exactly as it was."""
        layer = self.org_module
        layer.__class__ = type(layer).__mro__[2]
        del layer.__dict__["_lora"]
        own_forward = layer.__dict__.pop("_base_forward", None)
        if own_forward is not None:
            object.__setattr__(layer, "forward", own_forward)

    def add_delta(self, base: Tensor, x: Tensor) -> Tensor:
        """The adapter's result for input ``x``, added to the layer's own result."""
        # Scaling the rank-wide tensor, not the full-width one, spares a pass over the activations in both directions.
        hidden = self._project(self.lora_down, x) * (self.multiplier * self.scale)
        if self.training and self.rank_dropout:
            hidden = self._drop_ranks(hidden)
        delta = self._project(self.lora_up, hidden)
        if self.training and self.dropout:
            delta = F.dropout(delta, self.dropout)
        if self.training and self.module_dropout:
            # A factor instead of a branch: the draw stays on the device and the graph stays whole.
            keep = torch.rand((), device=delta.device) >= self.module_dropout
            delta = delta * keep.to(delta.dtype)
        return base + delta.to(base.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The layer with the adapter, whether or not :meth:`apply_to` was called."""
        layer = self.org_module
        return layer(x) if isinstance(layer, _Adapted) else self.add_delta(layer(x), x)

    def pair(self) -> LoraPair:
        """The adapter's tensors, as the codec handles them."""
        return LoraPair(self.lora_down.weight, self.lora_up.weight, self.alpha)

    @staticmethod
    def _project(layer: nn.Module, x: Tensor) -> Tensor:
        # Adapters may be kept in fp32 under a bf16 model. Casting the small weight, not the activation, keeps the
        # saved activations narrow; under autocast the operator casts by itself.
        weight = layer.weight
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            weight = weight.to(x.dtype)
        if isinstance(layer, nn.Conv2d):
            return F.conv2d(x, weight, None, layer.stride, layer.padding)
        return F.linear(x, weight)

    def _drop_ranks(self, hidden: Tensor) -> Tensor:
        keep = torch.rand(hidden.shape[0], self.lora_dim, device=hidden.device) >= self.rank_dropout
        if isinstance(self.lora_down, nn.Conv2d):
            shape = (hidden.shape[0], self.lora_dim, 1, 1)
        else:
            shape = (hidden.shape[0], *[1] * (hidden.dim() - 2), self.lora_dim)
        return hidden * keep.view(shape).to(hidden.dtype) * (1.0 / (1.0 - self.rank_dropout))


def split_names(names: str | Sequence[str] | None) -> list[str]:
    """A comma list (or a sequence) as a list of stripped, non-empty entries."""
    entries = names.split(",") if isinstance(names, str) else list(names or ())
    return [entry.strip() for entry in entries if entry.strip()]


def _selected(path: str, targets: Sequence[str], skips: Sequence[str], exact: bool) -> bool:
    if any(skip in path for skip in skips):
        return False
    if exact:
        return not targets or any(path == target or path.endswith("." + target) for target in targets)
    return not targets or any(target in path for target in targets)


def is_adaptable(module: nn.Module) -> bool:
    """Whether a layer can carry an adapter."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1)
    # The output projection of nn.MultiheadAttention is never called as a layer, so an adapter there would do nothing.
    return isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear"


class LoRANetwork(nn.Module):
    """All adapters of a denoiser (and, if wanted, of its text encoders).

    ``target_name`` and ``skip_name`` are comma lists matched as **substrings of the module path**, as upstream does:
    ``k`` also matches every path that contains ``blocks``. ``exact_target`` matches whole dotted ends instead, as PEFT.

    Text-encoder adapters are created first even when they are not applied: the initial values of the others depend
    on the random numbers they draw.
    """

    def __init__(
        self, text_encoder: nn.Module | Sequence[nn.Module] | None, unet: nn.Module | None, multiplier: float = 1.0,
        lora_dim: int = 4, alpha: Any = 1, dropout: float | None = None, module_class: type[LoRAModule] = LoRAModule,
        skip_name: str | None = None, target_name: str | None = None, varbose: bool = False, *,
        rank_dropout: float | None = None, module_dropout: float | None = None, exact_target: bool = False,
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.lora_dim = lora_dim
        self.alpha = alpha
        self._targets, self._skips = split_names(target_name), split_names(skip_name)
        self._exact = exact_target

        def make(name: str, layer: nn.Module) -> LoRAModule:
            if varbose:
                logger.info("LoRA on %s", name)
            return module_class(name, layer, multiplier, lora_dim, alpha, dropout=dropout, rank_dropout=rank_dropout,
                                module_dropout=module_dropout)

        encoders = list(text_encoder) if isinstance(text_encoder, (list, tuple)) else [text_encoder]
        numbered = len(encoders) > 1
        self.text_encoder_loras: list[LoRAModule] = []
        for number, encoder in enumerate(encoders, start=1):
            prefix = f"{TEXT_PREFIX}{number}" if numbered else TEXT_PREFIX
            if encoder is not None:
                self.text_encoder_loras += [make(name, layer) for name, layer in self._find_text(encoder, prefix)]
        self.unet_modules: dict[str, LoRAModule] = {}
        if unet is not None:
            for path, layer in self._find(unet):
                self.unet_modules[path] = make(f"{UNET_PREFIX}__{flatten(path)}", layer)
        self.unet_loras: list[LoRAModule] = list(self.unet_modules.values())
        self._check_names()

    def _find(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(path, module) for path, module in root.named_modules()
                if is_adaptable(module) and _selected(path, self._targets, self._skips, self._exact)]

    def _find_text(self, encoder: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
        found = []
        for root_name, root in encoder.named_modules():
            if type(root).__name__ in TEXT_ENCODER_TARGETS:
                found += [(flatten(f"{prefix}.{root_name}.{path}"), module) for path, module in self._find(root)]
        return found

    def _check_names(self) -> None:
        seen: set[str] = set()
        for lora in self.text_encoder_loras + self.unet_loras:
            if lora.lora_name in seen:
                raise ValueError(f"Two modules would share the LoRA name '{lora.lora_name}'. Use --use_peft_lora, "
                                 "whose names keep their dots.")
            seen.add(lora.lora_name)

    def apply_to(self, text_encoder: Any, unet: Any, apply_text_encoder: bool = True, apply_unet: bool = True) -> None:
        """Attach the adapters to their layers and drop those that are not wanted."""
        if not apply_text_encoder:
            self.text_encoder_loras = []
        if not apply_unet:
            self.unet_loras, self.unet_modules = [], {}
        for lora in self.text_encoder_loras + self.unet_loras:
            lora.apply_to()
            self.add_module(lora.lora_name, lora)

    def remove(self) -> None:
        """Detach every adapter and leave the model as it was."""
        for lora in self.text_encoder_loras + self.unet_loras:
            if isinstance(lora.org_module, _Adapted):
                lora.remove()

    def set_multiplier(self, multiplier: float) -> None:
        """Set the strength of every adapter."""
        self.multiplier = multiplier
        for lora in self.text_encoder_loras + self.unet_loras:
            lora.multiplier = multiplier

    def weights(self) -> LoraWeights:
        """The denoiser's adapters by real module name, ready for any format."""
        return LoraWeights({path: lora.pair() for path, lora in self.unet_modules.items()})

    def load_weights(self, file: str | Path, *, allow_partial: bool = False,
                     index: ModuleIndex | None = None) -> LoadReport:
        """Load a LoRA file of any format. Rank and alpha must be those of this network.

        ``index`` names the layers of the whole model; without it only the adapted ones are known.
        """
        tensors, metadata = read_tensors(file)
        source, own = Path(file).name, self.state_dict()
        if set(tensors) == set(own) and all(tensors[key].shape == own[key].shape for key in own):
            return self._load_own(tensors, source)
        decoded = decode(tensors, index=index or ModuleIndex(self.unet_modules), metadata=metadata, skip_text=True,
                         allow_partial=allow_partial, source=f"LoRA '{source}'")
        return self.load_pairs(decoded, source=source, allow_partial=allow_partial)

    def _load_own(self, tensors: Mapping[str, Tensor], source: str) -> LoadReport:
        self._check_same({name: LoraPair(tensors[f"{lora.lora_name}.lora_down.weight"],
                                         tensors[f"{lora.lora_name}.lora_up.weight"],
                                         tensors[f"{lora.lora_name}.alpha"])
                          for name, lora in self.unet_modules.items()}, source)
        self.load_state_dict(tensors)
        loras = len(self.text_encoder_loras) + len(self.unet_loras)
        return LoadReport(loras, (), (), loras)

    def load_pairs(self, weights: LoraWeights, *, source: str, allow_partial: bool = False) -> LoadReport:
        """Copy decoded adapters into this network."""
        sizes = {name: (lora.lora_up.weight.shape[0], lora.lora_down.weight.shape[1])
                 for name, lora in self.unet_modules.items()}
        report = compare_layers(weights, sizes, source=source, allow_partial=allow_partial)
        self._check_same(weights.transformer, source)
        with torch.no_grad():
            for name in self.unet_modules.keys() & weights.transformer.keys():
                self.unet_modules[name].lora_down.weight.copy_(weights.transformer[name].down)
                self.unet_modules[name].lora_up.weight.copy_(weights.transformer[name].up)
        return report

    def _check_same(self, pairs: Mapping[str, LoraPair], source: str) -> None:
        if pairs:
            alpha = float(next(iter(self.unet_modules.values())).alpha)
            check_rank_alpha(pairs, rank=self.lora_dim, alpha=alpha, source=source)

    def prepare_optimizer_params(
        self, text_encoder_lr: float | None, unet_lr: float | None, default_lr: float | None,
    ) -> list[dict[str, Any]]:
        """Optimizer groups: text-encoder adapters first, then the denoiser's. Marks everything trainable."""
        self.requires_grad_(True)
        groups = []
        for loras, rate in ((self.text_encoder_loras, text_encoder_lr), (self.unet_loras, unet_lr)):
            if loras:
                rate = default_lr if rate is None else rate
                group: dict[str, Any] = {"params": [p for lora in loras for p in lora.parameters()]}
                groups.append(group if rate is None else {**group, "lr": rate})
        return groups

    def enable_gradient_checkpointing(self) -> None:
        """Nothing to do: the adapters are recomputed with the blocks they sit in."""

    def get_trainable_params(self) -> Iterable[nn.Parameter]:
        """Parameters of all adapters."""
        return self.parameters()

    def save_weights(self, file: str | Path, dtype: torch.dtype | None, metadata: dict[str, str] | None) -> None:
        """Write a Kohya file; everything, alpha included, is cast to ``dtype``."""
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"LoRA files are written as .safetensors; '{file}' ends otherwise.")
        from safetensors.torch import save_file

        tensors = {key: value.detach().to("cpu", dtype or value.dtype).clone().contiguous()
                   for key, value in self.state_dict().items()}
        save_file(tensors, str(file), {**(metadata or {}), **hash_metadata(tensors, metadata)})


def compare_layers(weights: LoraWeights, sizes: Mapping[str, tuple[int, int]], *, source: str,
                   allow_partial: bool = False) -> LoadReport:
    """Compare the layers of a file with those adapted in this run; raises when they differ.

    Args:
        sizes: output and input channels of each adapted layer, by name.
    """
    adapted, saved = set(sizes), set(weights.transformer)
    for name in sorted(adapted & saved):
        pair = weights.transformer[name]
        found = (pair.up.shape[0], pair.down.shape[1])
        if found != sizes[name]:
            raise ValueError(f"LoRA '{source}' does not fit this model: it changes a {found[0]} x {found[1]} weight, "
                             f"'{name}' has {sizes[name][0]} x {sizes[name][1]}. It belongs to another model size.")
    missing, unknown = tuple(sorted(adapted - saved)), tuple(sorted(saved - adapted))
    if (missing or unknown) and not allow_partial:
        parts = [f"{len(names)} layers are {what} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
                 for what, names in (("adapted here but not in the file", missing),
                                     ("in the file but not adapted here", unknown)) if names]
        raise ValueError(f"LoRA '{source}' does not fit this run: {' and '.join(parts)}. Compare --target_name and "
                         "--lora_skip_name.")
    outside = weights.report.unexpected if weights.report else ()
    return LoadReport(len(adapted & saved), missing, unknown + outside, len(saved) + len(outside))


def check_rank_alpha(pairs: Mapping[str, LoraPair], *, rank: int, alpha: float, source: str) -> None:
    """Refuse a file of another rank or alpha, showing saved and asked values side by side."""
    ranks = sorted({pair.rank for pair in pairs.values()})
    alphas = sorted({float(pair.alpha) for pair in pairs.values() if pair.alpha is not None})
    if not alphas:
        logger.warning("LoRA '%s' states no alpha; taking this run's (%g).", source, alpha)
    # Saved alphas went through the file's dtype.
    same_alpha = all(math.isclose(value, alpha, rel_tol=1e-2) for value in alphas)
    if ranks != [rank] or not same_alpha:
        raise ValueError(
            f"LoRA '{source}' does not fit this run: saved rank {_join(ranks)}, asked --rank {rank}; "
            f"saved alpha {_join(alphas) or 'unknown'}, asked --network_alpha {alpha:g}. Use the saved values.")


def _join(values: Sequence[float]) -> str:
    return "/".join(f"{value:g}" for value in values)


def create_network(
    multiplier: float, network_dim: int | None, network_alpha: float | None, text_encoder: Any,
    transformer: nn.Module | None, neuron_dropout: float | None = None, skip_name: str | None = None,
    target_name: str | None = None, **kwargs: Any,
) -> LoRANetwork:
    """Build the adapters of a model.

    Beside upstream's arguments: ``rank_dropout``, ``module_dropout``, ``exact_target``; other keywords are ignored.
    """
    own = {name: kwargs[name] for name in ("rank_dropout", "module_dropout", "exact_target") if name in kwargs}
    return LoRANetwork(
        text_encoder, transformer, multiplier=multiplier, lora_dim=4 if network_dim is None else network_dim,
        alpha=1 if network_alpha is None else network_alpha, dropout=neuron_dropout, skip_name=skip_name,
        target_name=target_name, varbose=bool(kwargs.get("verbose", False)), **own)


def addnet_hash_legacy(b: BytesIO) -> str:
    """First eight hex digits of the SHA-256 of 64 KiB at offset 1 MiB."""
    b.seek(0x100000)
    return hashlib.sha256(b.read(0x10000)).hexdigest()[:8]


def addnet_hash_safetensors(b: BytesIO) -> str:
    """SHA-256 of everything after the header of a safetensors file."""
    b.seek(0)
    header_size = int.from_bytes(b.read(8), "little")
    b.seek(8 + header_size)
    digest = hashlib.sha256()
    for chunk in iter(lambda: b.read(1 << 20), b""):
        digest.update(chunk)
    return digest.hexdigest()


def precalculate_safetensors_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[str, str]:
    """Model hash and legacy hash of tensors as they would be written; only ``ss_`` metadata counts."""
    from safetensors.torch import save

    kept = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    buffer = BytesIO(save(dict(tensors), kept))
    return addnet_hash_safetensors(buffer), addnet_hash_legacy(buffer)


def hash_metadata(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> dict[str, str]:
    """The two hash entries that upstream writes into the metadata of native LoRA files."""
    model_hash, legacy_hash = precalculate_safetensors_hashes(tensors, metadata or {})
    return {"sshs_model_hash": model_hash, "sshs_legacy_hash": legacy_hash}
