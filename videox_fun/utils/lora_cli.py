"""``videox-lora``: look at, convert, merge and extract LoRA files.

Weights are handled file by file, so merging a sharded checkpoint needs the memory of its largest shard.
Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from videox_fun.utils.lora_codec import LoraPair, LoraWeights
    from videox_fun.utils.lora_names import ModuleIndex

_DTYPES = ("float32", "float16", "bfloat16")
_FORMATS = ("kohya", "comfyui", "peft", "diffusers")
_EXACT_SVD_SIZE = 1024  # above this, the leading singular vectors are found by subspace iteration
_OVERSAMPLE = 16


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``videox-lora``."""
    parser = argparse.ArgumentParser(prog="videox-lora", description="Inspect, convert, merge and extract LoRA files.")
    commands = parser.add_subparsers(dest="command", required=True)
    base_help = "Checkpoint (file or folder) whose layer names the LoRA refers to; without it the Wan names are used."

    inspect = commands.add_parser("inspect", help="Show format, layers, rank, alpha and size of each layer's change.")
    inspect.add_argument("lora", help="LoRA file or PEFT adapter folder.")
    inspect.add_argument("--base", help=base_help)
    inspect.add_argument("--json", action="store_true", help="Write JSON.")

    convert = commands.add_parser("convert", help="Write a LoRA in another format.")
    convert.add_argument("lora", help="LoRA file or PEFT adapter folder.")
    convert.add_argument("output", help="File to write (.safetensors).")
    convert.add_argument("--to", required=True, choices=_FORMATS, help="Format to write.")
    convert.add_argument("--base", help=base_help)
    convert.add_argument("--dtype", choices=_DTYPES, help="Type to write; default: as in the file.")

    merge = commands.add_parser("merge", help="Add LoRA files to the weights of a checkpoint.")
    merge.add_argument("--base", required=True, help="Checkpoint: a weight file or a folder of them.")
    merge.add_argument("--lora", required=True, nargs="+", help="One or more LoRA files.")
    merge.add_argument("--weight", nargs="+", type=float, default=[1.0], help="Strength, one for all or one per file.")
    merge.add_argument("--output", required=True, help="File or folder to write, as --base is one.")

    extract = commands.add_parser("extract", help="Approximate the difference of two checkpoints by a LoRA (SVD).")
    extract.add_argument("--base", required=True, help="Checkpoint before training.")
    extract.add_argument("--tuned", required=True, help="Checkpoint after training.")
    extract.add_argument("--output", required=True, help="File to write (.safetensors).")
    extract.add_argument("--rank", type=int, default=64, help="Rank of the LoRA.")
    extract.add_argument("--to", choices=_FORMATS, default="kohya", help="Format to write.")
    extract.add_argument("--dtype", choices=_DTYPES, default="float32", help="Type to write.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 2 after a mistake the user can correct (its text goes to stderr)."""
    args = build_parser().parse_args(argv)
    command = {"inspect": _inspect, "convert": _convert, "merge": _merge, "extract": _extract}[args.command]
    try:
        command(args)
    except ValueError as error:
        sys.stderr.write(f"videox-lora: {error}\n")
        return 2
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _files(path: str) -> list[Path]:
    """The weight files of a checkpoint."""
    root = Path(path)
    if root.is_file():
        return [root]
    for pattern in ("*.safetensors", "*.pth", "*.bin"):
        files = sorted(root.glob(pattern))
        if files:
            return files
    raise ValueError(f"'{path}' is neither a weight file nor a folder with *.safetensors, *.pth or *.bin files.")


def _keys(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as handle:
            return list(handle.keys())
    return list(_load(path))


def _load(path: Path) -> dict[str, Tensor]:
    from videox_fun.utils.lora_codec import read_tensors

    return read_tensors(path)[0]


def _module_name(key: str) -> str | None:
    from videox_fun.utils.lora_names import unwrap

    return unwrap(key.removesuffix(".weight")) if key.endswith(".weight") else None


def _index(base: str | None) -> ModuleIndex:
    from videox_fun.utils.lora_names import ModuleIndex, wan_module_names

    if base is None:
        return ModuleIndex(wan_module_names())
    names = (_module_name(key) for file in _files(base) for key in _keys(file))
    return ModuleIndex(name for name in names if name is not None)


def _read(lora: str, base: str | None) -> LoraWeights:
    from videox_fun.utils.lora_codec import read_lora

    return read_lora(lora, index=_index(base))


def _torch_dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)


def _save(tensors: dict[str, Tensor], path: str | Path, metadata: dict[str, str] | None) -> None:
    from safetensors.torch import save_file

    if Path(path).suffix != ".safetensors":
        raise ValueError(f"Files are written as .safetensors; '{path}' ends otherwise.")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata or None)


def _inspect(args: argparse.Namespace) -> None:
    weights = _read(args.lora, args.base)
    layers = {name: _describe(pair) for name, pair in weights.transformer.items()}
    layers |= {f"text_encoder:{name}": _describe(pair) for name, pair in weights.text_encoder.items()}
    facts: dict[str, Any] = {
        "format": weights.format, "matched": weights.report.matched, "total": weights.report.total,
        "rank": sorted(weights.ranks), "alpha": sorted(weights.alphas, key=str),
        "parameters": sum(p.down.numel() + p.up.numel() for p in weights.transformer.values()),
        "metadata": weights.metadata, "layers": layers,
    }
    if args.json:
        _say(json.dumps(facts, indent=2))
        return
    for name in ("format", "rank", "alpha", "parameters", "metadata"):
        _say(f"{name}: {facts[name]}")
    _say(f"layers: {facts['matched']} of {facts['total']} matched")
    for name, facts_of_layer in layers.items():
        _say(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in facts_of_layer.items()))


def _describe(pair: LoraPair) -> dict[str, Any]:
    change = pair.scale * pair.delta().norm().item()
    return {"rank": pair.rank, "scale": pair.scale, "norm of change": float(f"{change:.4g}"),
            "type": str(pair.down.dtype).removeprefix("torch.")}


def _convert(args: argparse.Namespace) -> None:
    from videox_fun.utils.lora_codec import encode
    from videox_fun.utils.lora_network import hash_metadata

    if Path(args.output).resolve() == Path(args.lora).resolve():
        raise ValueError(f"{args.output} is the file that is read; write to another name.")
    weights = _read(args.lora, args.base)
    tensors, metadata = encode(weights, format=args.to, dtype=_torch_dtype(args.dtype))
    if args.to == "kohya":
        metadata |= hash_metadata(tensors)
    _save(tensors, args.output, metadata)
    _say(f"{args.lora} ({weights.format}) -> {args.output} ({args.to}), {weights.report.matched} of "
         f"{weights.report.total} layers")


def _merge(args: argparse.Namespace) -> None:
    if len(args.weight) not in (1, len(args.lora)):
        raise ValueError(f"{len(args.lora)} LoRA files but {len(args.weight)} weights; give one each, or one for all.")
    strengths = args.weight * len(args.lora) if len(args.weight) == 1 else args.weight
    index = _index(args.base)
    from videox_fun.utils.lora_codec import read_lora

    adapters = [(read_lora(path, index=index, skip_text=True), strength)
                for path, strength in zip(args.lora, strengths, strict=True)]
    changed: set[str] = set()
    for source, target in _targets(Path(args.base), Path(args.output)):
        tensors = _load(source)
        for key, weight in tensors.items():
            name = _module_name(key)
            for adapter, strength in adapters:
                if name in adapter.transformer:
                    tensors[key] = weight = _add(weight, adapter.transformer[name], strength, key)
                    changed.add(key)
        _save(tensors, target, {"format": "pt"})
    _say(f"{args.output}: {len(changed)} weights changed by {len(adapters)} LoRA file(s)")


def _add(weight: Tensor, pair: LoraPair, strength: float, key: str) -> Tensor:
    delta = pair.delta()
    if delta.shape != weight.shape:
        raise ValueError(f"The LoRA does not fit '{key}': change {list(delta.shape)}, weight {list(weight.shape)}.")
    return (weight.float() + strength * pair.scale * delta).to(weight.dtype)


def _targets(base: Path, output: Path) -> Iterator[tuple[Path, Path]]:
    """Pairs of input and output weight files; the small files of a folder are copied along."""
    if base.is_file():
        yield base, output
        return
    files = _files(str(base))
    output.mkdir(parents=True, exist_ok=True)
    for extra in sorted(base.glob("*.json")):
        if extra.resolve() != (output / extra.name).resolve():
            shutil.copy2(extra, output / extra.name)
    for file in files:
        yield file, output / (file.stem + ".safetensors")


def _extract(args: argparse.Namespace) -> None:
    from videox_fun.utils.lora_codec import LoraWeights, encode
    from videox_fun.utils.lora_network import hash_metadata

    if args.rank < 1:
        raise ValueError(f"--rank {args.rank}: at least 1.")
    tuned = {key: file for file in _files(args.tuned) for key in _keys(file)}
    pairs: dict[str, LoraPair] = {}
    total = kept = 0.0
    others = 0
    for file in _files(args.base):
        base = _load(file)
        for key, after in _matching(base, tuned).items():
            if not after.is_floating_point() or (delta := _difference(key, base[key], after)) is None:
                continue
            name = _module_name(key)
            if name is None or delta.dim() != 2:
                others += 1
                continue
            pairs[name], energy = _factor(delta, args.rank)
            total += delta.square().sum().item()
            kept += energy
    if not pairs:
        raise ValueError(f"No linear weight differs between '{args.base}' and '{args.tuned}'.")
    tensors, metadata = encode(LoraWeights(pairs), format=args.to, dtype=_torch_dtype(args.dtype))
    if args.to == "kohya":
        metadata |= hash_metadata(tensors)
    _save(tensors, args.output, metadata)
    _say(f"{args.output}: {len(pairs)} layers, rank up to {args.rank}, {100 * kept / total:.2f} % of the squared "
         "difference kept")
    if others:
        _say(f"{others} other tensors differ too (biases, norms, convolutions); a LoRA cannot hold them")


def _difference(key: str, before: Tensor, after: Tensor) -> Tensor | None:
    """What training added to a weight, or ``None`` if nothing."""
    if before.shape != after.shape:
        raise ValueError(f"'{key}' is {list(before.shape)} in --base but {list(after.shape)} in --tuned.")
    delta = after.float() - before.float()
    return delta if delta.any() else None


def _matching(base: dict[str, Tensor], tuned: dict[str, Path]) -> dict[str, Tensor]:
    """The tuned weights of the keys in ``base``."""
    from safetensors import safe_open

    wanted: dict[Path, list[str]] = {}
    for key in base:
        if key in tuned:
            wanted.setdefault(tuned[key], []).append(key)
    found: dict[str, Tensor] = {}
    for file, keys in wanted.items():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                found |= {key: handle.get_tensor(key) for key in keys}
        else:
            tensors = _load(file)
            found |= {key: tensors[key] for key in keys}
    return found


def _factor(delta: Tensor, rank: int) -> tuple[LoraPair, float]:
    """The best pair of a rank for a weight change, and the squared norm it keeps. Alpha equals the rank."""
    import torch

    from videox_fun.utils.lora_codec import LoraPair

    rank = min(rank, *delta.shape)
    if min(delta.shape) <= _EXACT_SVD_SIZE:
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(delta, q=min(rank + _OVERSAMPLE, *delta.shape), niter=4)
        vh = v.mT
    root = s[:rank].sqrt()
    pair = LoraPair((root[:, None] * vh[:rank]).contiguous(), (u[:, :rank] * root).contiguous(),
                    torch.tensor(float(rank)))
    return pair, s[:rank].square().sum().item()


if __name__ == "__main__":
    sys.exit(main())
