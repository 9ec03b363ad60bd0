"""What of a network is trained: parameters chosen by name, native (Kohya-style) LoRA, or PEFT LoRA.

A trainable freezes the network, marks or injects what is trained, and knows how to write and read it. The engine calls
``attach`` once, after the base weights are loaded and before the model is wrapped.

Types. Trained parameters are kept in the run's weight type, as upstream keeps them; with ``--master_weights_fp32``, and
always under fp16 (whose gradients cannot be unscaled in fp16), they are kept in fp32 and the engine runs the forward
under autocast. Nothing may cast the whole model after ``attach``: that would also cast the trained parameters.

Strength. A native file carries ``alpha`` tensors. A PEFT file carries the tensors upstream writes, and alpha and rank
in its metadata, where PEFT keeps them; the ComfyUI file written beside it carries alpha tensors. With these every
reader reproduces the training-time output at weight 1.0. Upstream writes no alpha for PEFT runs (too strong by
rank/alpha); ``--upstream_compat`` writes exactly its files.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from videox_fun.dist.gather import full_copies, whole_state
from videox_fun.training.context import ParamGroup, Player
from videox_fun.utils.lora_codec import (
    LoadReport,
    LoraPair,
    LoraWeights,
    adaptable_modules,
    decode,
    encode,
    module_index,
    read_tensors,
)
from videox_fun.utils.lora_names import strip_infixes
from videox_fun.utils.lora_network import (
    LoRANetwork,
    check_rank_alpha,
    compare_layers,
    create_network,
    hash_metadata,
    is_adaptable,
    split_names,
)
from videox_fun.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from videox_fun.training.context import RunContext
    from videox_fun.training.specs import ScriptSpec

logger = logging.getLogger(__name__)

LORA_STATE_NAME = "lora_diffusion_pytorch_model.safetensors"
COMFY_STATE_NAME = "lora_diffusion_pytorch_model_compatible_with_comfyui.safetensors"
WEIGHTS_NAME = "diffusion_pytorch_model"
ALL_LINEAR = "all-linear"
_LAYOUTS = ("bare", "folder")
_SHOWN = 5


@dataclass
class ExportFile:
    """One file of a checkpoint. ``{stem}`` in a bare name stands for ``checkpoint-N``."""

    name: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    config: dict[str, Any] | None = None


class Trainable(Protocol):
    """The interface the engine and the checkpoint manager use."""

    kind: str

    def attach(self, ctx: RunContext, player: Player) -> list[ParamGroup]:
        """Freeze the network, mark or inject what is trained, and return the optimizer groups."""

    def export(self, player: Player, *, layout: str, dtype: torch.dtype) -> list[ExportFile]:
        """The trained part as files, cast to ``dtype``. Collective: every rank must call it."""

    def load(self, player: Player, source: Path) -> LoadReport:
        """Read what ``export`` wrote; raises ``ValueError`` naming what does not match."""

    def clip_parameters(self, player: Player) -> list[nn.Parameter]:
        """The parameters whose gradient norm is clipped."""

    def facts(self, player: Player) -> dict[str, Any]:
        """What is trained, for the audit."""


def make_trainable(spec: ScriptSpec, args: argparse.Namespace) -> Trainable:
    """The trainable a script's row and flags ask for."""
    if spec.trainable == "named":
        return Named(args)
    if spec.trainable == "lora":
        return PeftLora(args) if args.use_peft_lora else NativeLora(args)
    raise ValueError(f"Script '{spec.id}' asks for the trainable '{spec.trainable}'; known are named and lora.")


def trainable_dtype(args: argparse.Namespace, weight_dtype: torch.dtype) -> torch.dtype:
    """The type trained parameters are kept in."""
    if weight_dtype == torch.float16 or getattr(args, "master_weights_fp32", False):
        return torch.float32
    return weight_dtype


class _Base:
    """What the three kinds share."""

    kind = ""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def clip_parameters(self, player: Player) -> list[nn.Parameter]:
        return [parameter for parameter in player.model.parameters() if parameter.requires_grad]

    def facts(self, player: Player) -> dict[str, Any]:
        parameters = list(player.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return {"kind": self.kind, "trainable_parameters": trained,
                "total_parameters": sum(p.numel() for p in parameters)}

    def _partial(self) -> bool:
        return bool(getattr(self.args, "allow_partial_load", False))


class Named(_Base):
    """Parameters whose qualified name contains one of the given words (``.`` takes all)."""

    kind = "named"

    def attach(self, ctx: RunContext, player: Player) -> list[ParamGroup]:
        args, model = self.args, player.unwrapped()
        main = list(args.trainable_modules or ())
        low = list(args.trainable_modules_low_learning_rate or ())
        if not main and not low:
            raise ValueError("Full fine-tuning needs --trainable_modules: words that the parameter names contain. "
                             "'--trainable_modules .' trains everything, '--trainable_modules attn' the attention.")
        low_rate = getattr(args, "learning_rate_low", None)
        groups = [ParamGroup([], args.learning_rate, []),
                  ParamGroup([], args.learning_rate / 2 if low_rate is None else low_rate, [])]
        model.requires_grad_(False)
        dtype = trainable_dtype(args, ctx.weight_dtype)
        for name, parameter in model.named_parameters():
            group = next((g for g, words in zip(groups, (main, low), strict=True) if any(w in name for w in words)),
                         None)
            if group is None:
                continue
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)
            group.params.append(parameter)
            group.names.append(name)
        self._check_words([*main, *low], [name for name, _ in model.named_parameters()], ctx.compat)
        for group in groups:
            logger.info("Training %d tensors (%.2fM parameters) of %s at learning rate %g", len(group.params),
                        sum(p.numel() for p in group.params) / 1e6, player.name, group.lr)
        return groups

    @staticmethod
    def _check_words(words: list[str], names: list[str], compat: bool) -> None:
        idle = [word for word in words if not any(word in name for name in names)]
        if not idle:
            return
        parts = {part for name in names for part in name.split(".") if not part.isdigit()}
        hints = "".join(did_you_mean(word, sorted(parts)) for word in idle)
        text = f"--trainable_modules: no parameter name contains {', '.join(map(repr, idle))}.{hints}"
        if not compat or len(idle) == len(words):
            raise ValueError(f"{text} Parameter names look like '{names[0]}'.")
        logger.warning(text)

    def export(self, player: Player, *, layout: str, dtype: torch.dtype) -> list[ExportFile]:
        _check_layout(layout)
        model = player.unwrapped()
        state = {strip_infixes(key): tensor for key, tensor in whole_state(model).items()}
        tensors = full_copies(state, dtype, everywhere=False)
        config = _model_config(model)
        if layout == "bare":
            return [ExportFile("{stem}.safetensors", tensors, {"format": "pt"}, config)]
        return [ExportFile(f"transformer/{WEIGHTS_NAME}.safetensors", tensors, {"format": "pt"}, config)]

    def load(self, player: Player, source: Path) -> LoadReport:
        saved = _read_weights(Path(source))
        model = player.unwrapped()
        wanted = {strip_infixes(key): key for key in model.state_dict()}
        state = model.state_dict()
        missing = tuple(name for name in wanted if name not in saved)
        unexpected = tuple(name for name in saved if name not in wanted)
        shapes = [f"{name}: saved {list(saved[name].shape)}, model {list(state[key].shape)}"
                  for name, key in wanted.items() if name in saved and saved[name].shape != state[key].shape]
        if shapes or ((missing or unexpected) and not self._partial()):
            raise ValueError(f"Weights in '{source}' do not fit {player.name}: {_list('missing', missing)}"
                             f"{_list('unexpected', unexpected)}{_list('other shape', shapes)}"
                             "They belong to another model or a damaged save.")
        found = {key: saved[name] for name, key in wanted.items() if name in saved}
        model.load_state_dict(found, strict=False)
        return LoadReport(len(found), missing, unexpected, len(saved))


class _Lora(_Base):
    """What native and PEFT LoRA share: choosing layers, groups, finding the file to load."""

    def _choose(self, ctx: RunContext, model: nn.Module, targets: list[str], exact: bool) -> list[str]:
        """Names of the layers to adapt; raises when a target matches none."""
        names = [name for name, module in adaptable_modules(model).items() if is_adaptable(module)]
        skips = split_names(self.args.lora_skip_name)

        def hit(target: str, name: str) -> bool:
            return name == target or name.endswith("." + target) if exact else target in name

        tolerated = set(ctx.spec.options.get("dead_targets", ()))
        idle = [target for target in targets if not any(hit(target, name) for name in names)]
        if idle:
            ends = {part for name in names for part in (name, name.split(".", 2)[-1], name.rsplit(".", 1)[-1])}
            hints = "".join(did_you_mean(target, sorted(ends)) for target in idle)
            text = f"--target_name: no linear layer of the model matches {', '.join(map(repr, idle))}.{hints}"
            if len(idle) == len(targets) or not (ctx.compat or set(idle) <= tolerated):
                raise ValueError(f"{text} Layers are named like '{names[-1] if names else 'none'}'.")
            logger.warning(text)
        chosen = [name for name in names if not any(skip in name for skip in skips)
                  and (not targets or any(hit(target, name) for target in targets))]
        if not chosen:
            raise ValueError(f"No layer is left to adapt: --target_name {self.args.target_name}, --lora_skip_name "
                             f"{self.args.lora_skip_name}.")
        return chosen

    def _groups(self, named: Iterable[tuple[str, nn.Parameter]], up_marks: tuple[str, ...]) -> list[ParamGroup]:
        """One group, or with ``--lora_plus_ratio`` a second one for the up matrices at a multiple of the rate."""
        rate = self.args.learning_rate
        ratio = self.args.lora_plus_ratio
        groups = [ParamGroup([], rate, []), ParamGroup([], rate * (ratio or 1.0), [])]
        for name, parameter in named:
            group = groups[1 if ratio and any(mark in name for mark in up_marks) else 0]
            group.params.append(parameter)
            group.names.append(name)
        return groups if ratio else groups[:1]

    def _log(self, player: Player, chosen: list[str]) -> None:
        facts = self.facts(player)
        share = 100 * facts["trainable_parameters"] / max(facts["total_parameters"], 1)
        ends = sorted({name.split(".", 2)[-1] if name.split(".")[0].endswith("blocks") else name for name in chosen})
        logger.info("LoRA on %d layers of %s: rank %d, alpha %g, %.2fM parameters (%.2f %%); layers: %s", len(chosen),
                    player.name, self.args.rank, self.args.network_alpha, facts["trainable_parameters"] / 1e6, share,
                    ", ".join(ends))

    def facts(self, player: Player) -> dict[str, Any]:
        args = self.args
        return {**super().facts(player), "rank": args.rank, "alpha": args.network_alpha,
                "layers": len(self._layer_names(player)), "rank_drop_out": getattr(args, "rank_drop_out", None),
                "module_drop_out": getattr(args, "module_drop_out", None),
                "neuron_drop_out": getattr(args, "neuron_drop_out", None)}

    def _layer_names(self, player: Player) -> list[str]:
        raise NotImplementedError


class NativeLora(_Lora):
    """Adapters of :mod:`videox_fun.utils.lora_network`, registered as the model's child ``network``.

    Set ``text_encoder`` before ``attach``: its adapters are never trained, but creating them draws random numbers, and
    the initial values of the denoiser's adapters follow those draws.
    """

    kind = "lora"
    text_encoder: nn.Module | None = None

    def attach(self, ctx: RunContext, player: Player) -> list[ParamGroup]:
        args, model = self.args, player.unwrapped()
        _refuse_second(model, player.name)
        keep_text = self._keep_text(ctx)
        exact = args.lora_exact_match
        targets = split_names(args.target_name)
        chosen = self._choose(ctx, model, targets, exact)
        model.requires_grad_(False)
        network = create_network(
            1.0, args.rank, args.network_alpha, self.text_encoder, model,
            neuron_dropout=getattr(args, "neuron_drop_out", None), skip_name=args.lora_skip_name,
            target_name=args.target_name, rank_dropout=getattr(args, "rank_drop_out", None),
            module_dropout=getattr(args, "module_drop_out", None), exact_target=exact)
        network.apply_to(self.text_encoder, model, keep_text, True)
        network.to(trainable_dtype(args, ctx.weight_dtype)).requires_grad_(True)
        model.network = network
        surprise = [] if exact else [n for n in chosen if targets and not any(n.endswith("." + t) for t in targets)]
        if surprise:
            logger.info("--target_name is matched as part of the path: %d layers are adapted that PEFT would leave, "
                        "for example %s.", len(surprise), ", ".join(surprise[:3]))
        self._log(player, chosen)
        text = [(name, p) for lora in network.text_encoder_loras for name, p in _parameters(lora)]
        own = [(name, p) for lora in network.unet_loras for name, p in _parameters(lora)]
        groups = self._groups(own, ("lora_up",))
        if text:
            groups.insert(0, ParamGroup([p for _, p in text], args.learning_rate / 2, [name for name, _ in text]))
        return groups

    def _keep_text(self, ctx: RunContext) -> bool:
        if not self.args.train_text_encoder:
            return False
        logger.warning("--train_text_encoder: text-encoder adapters are created and saved, but get no gradient.")
        return self.text_encoder is not None and not self.args.training_with_video_token_length

    def _network(self, player: Player) -> LoRANetwork:
        return player.unwrapped().network

    def _layer_names(self, player: Player) -> list[str]:
        return list(self._network(player).unet_modules)

    def export(self, player: Player, *, layout: str, dtype: torch.dtype) -> list[ExportFile]:
        _check_layout(layout)
        tensors = full_copies(whole_state(self._network(player)), dtype, integers=True)
        if layout == "bare":
            return [ExportFile("{stem}.safetensors", tensors, hash_metadata(tensors))]
        return [ExportFile(LORA_STATE_NAME, tensors, {"format": "pt"})]

    def load(self, player: Player, source: Path) -> LoadReport:
        index = module_index(player.unwrapped())
        return self._network(player).load_weights(_lora_file(Path(source)), allow_partial=self._partial(), index=index)


class PeftLora(_Lora):
    """Adapters of the PEFT library, injected into the model (its layers then hold their weight in ``base_layer``)."""

    kind = "peft"

    def attach(self, ctx: RunContext, player: Player) -> list[ParamGroup]:
        args, model = self.args, player.unwrapped()
        _refuse_second(model, player.name)
        for flag in ("rank_drop_out", "module_drop_out", "neuron_drop_out"):
            if getattr(args, flag, None):
                raise ValueError(f"--{flag} needs the native LoRA, PEFT has no such drop-out: leave out "
                                 "--use_peft_lora.")
        if not args.target_name:
            raise ValueError("--use_peft_lora needs --target_name, for example q,k,v,ffn.0,ffn.2; "
                             f"'--target_name {ALL_LINEAR}' adapts every linear layer.")
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ValueError("--use_peft_lora needs the peft package: pip install peft.") from error
        targets = [] if args.target_name.strip() == ALL_LINEAR else split_names(args.target_name)
        chosen = self._choose(ctx, model, targets, True)
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=args.rank, lora_alpha=args.network_alpha, target_modules=chosen,
                                           use_dora=args.use_dora), model)
        dtype = trainable_dtype(args, ctx.weight_dtype)
        named = [(name, p) for name, p in model.named_parameters() if ".lora_" in name]
        for _, parameter in named:
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)
        self._log(player, chosen)
        return self._groups(named, (".lora_B.",))

    def _layer_names(self, player: Player) -> list[str]:
        return list(_peft_layers(player.unwrapped()))

    def export(self, player: Player, *, layout: str, dtype: torch.dtype) -> list[ExportFile]:
        _check_layout(layout)
        from peft import get_peft_model_state_dict

        model = player.unwrapped()
        own = get_peft_model_state_dict(model, state_dict=whole_state(model), save_embedding_layers=False)
        tensors = full_copies({strip_infixes(key): tensor for key, tensor in own.items()}, dtype)
        compat = bool(getattr(self.args, "upstream_compat", False))
        strength = {} if compat else {"lora_alpha": f"{self.args.network_alpha}", "rank": f"{self.args.rank}"}
        names = ("{stem}.safetensors", "{stem}-compatible_with_comfyui.safetensors") if layout == "bare" else (
            LORA_STATE_NAME, COMFY_STATE_NAME)
        files = [ExportFile(names[0], tensors, {"format": "pt", **strength})]
        if self.args.use_dora:
            logger.warning("No ComfyUI file is written for DoRA; the PEFT file is complete.")
            return files
        return [*files, ExportFile(names[1], self._comfy(tensors, compat, dtype), {"format": "pt"})]

    def _comfy(self, tensors: Mapping[str, Tensor], compat: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        alpha = None if compat else torch.tensor(float(self.args.network_alpha))
        pairs = {name.removesuffix(".lora_A.weight"): LoraPair(
            down, tensors[name.replace(".lora_A.", ".lora_B.")], alpha)
            for name, down in tensors.items() if name.endswith(".lora_A.weight")}
        return encode(LoraWeights(pairs), format="kohya" if compat else "comfyui", dtype=dtype)[0]

    def load(self, player: Player, source: Path) -> LoadReport:
        file, model = _lora_file(Path(source)), player.unwrapped()
        tensors, metadata = read_tensors(file)
        if self.args.use_dora:
            return self._load_dora(model, tensors, file)
        layers = _peft_layers(model)
        weights = decode(tensors, index=module_index(model), metadata=metadata, allow_partial=self._partial(),
                         source=f"LoRA '{file.name}'")
        sizes = {name: (layer.lora_B["default"].weight.shape[0], layer.lora_A["default"].weight.shape[1])
                 for name, layer in layers.items()}
        report = compare_layers(weights, sizes, source=file.name, allow_partial=self._partial())
        check_rank_alpha(weights.transformer, rank=self.args.rank, alpha=self.args.network_alpha, source=file.name)
        with torch.no_grad():
            for name in layers.keys() & weights.transformer.keys():
                layers[name].lora_A["default"].weight.copy_(weights.transformer[name].down)
                layers[name].lora_B["default"].weight.copy_(weights.transformer[name].up)
        return report

    @staticmethod
    def _load_dora(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> LoadReport:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        missing = tuple(key for key in own if key not in tensors)
        unexpected = tuple(key for key in tensors if key not in own)
        if missing or unexpected:
            raise ValueError(f"LoRA '{file}' does not fit this DoRA run: {_list('missing', missing)}"
                             f"{_list('unexpected', unexpected)}Compare --use_dora and --target_name.")
        set_peft_model_state_dict(model, tensors)
        return LoadReport(len(own), (), (), len(tensors))


def _parameters(lora: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"network.{lora.lora_name}.{name}", parameter) for name, parameter in lora.named_parameters()]


def _peft_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {strip_infixes(name): module for name, module in model.named_modules()
            if "default" in (getattr(module, "lora_A", None) or ())}


def _refuse_second(model: nn.Module, name: str) -> None:
    if getattr(model, "network", None) is not None or getattr(model, "peft_config", None) is not None:
        raise ValueError(f"The {name} already carries a LoRA adapter; a second one would train beside it. Load the "
                         "saved adapter into the existing one, or merge it into the weights first.")


def _check_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        raise ValueError(f"Unknown checkpoint layout '{layout}'; known are {', '.join(_LAYOUTS)}.")


def _model_config(model: nn.Module) -> dict[str, Any] | None:
    if not hasattr(model, "to_json_string"):
        return None
    return json.loads(model.to_json_string())


def _lora_file(source: Path) -> Path:
    if source.is_file():
        return source
    if (source / LORA_STATE_NAME).is_file():
        return source / LORA_STATE_NAME
    if (source / "transformer").is_dir():
        raise ValueError(f"'{source}' is a checkpoint of full fine-tuning, not of a LoRA run.")
    raise ValueError(f"'{source}' holds no LoRA: {LORA_STATE_NAME} is missing. "
                     "A bare checkpoint-N.safetensors file can be given instead.")


def _read_weights(source: Path) -> dict[str, Tensor]:
    """All weights of a bare file, of a model folder, or of a state folder with a model folder inside."""
    if source.is_file():
        return read_tensors(source)[0]
    for folder in (source / "transformer", source):
        files = sorted(folder.glob(f"{WEIGHTS_NAME}*.safetensors"))
        if files:
            weights: dict[str, Tensor] = {}
            for file in files:
                weights |= read_tensors(file)[0]
            return weights
    if (source / LORA_STATE_NAME).is_file():
        raise ValueError(f"'{source}' is a checkpoint of a LoRA run, not of full fine-tuning.")
    raise ValueError(f"'{source}' holds no model weights: no {WEIGHTS_NAME}*.safetensors in it or in its folder "
                     "transformer.")


def _list(what: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return ""
    return f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}). "
