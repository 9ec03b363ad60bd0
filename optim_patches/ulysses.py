"""``--sequence_parallel_size N``: the tokens of one sample over N processes (Ulysses), in training.

A forward in training mode is split right after the patch embedding and put together right after the output head:
tokens, rotary table and per-token timesteps are sliced, each process runs all blocks on its own tokens, and one
all-to-all before and one behind self-attention exchange tokens for heads. Cross-attention needs no exchange. Tokens
that fill up to a multiple of N stand at the end; attention never sees them, and they are cut off in the end.

Embedding, splitting and gathering are methods of the one model instance; a block tells its attention that the tokens
are a slice by handing it the number of real tokens in place of ``seq_lens``. In evaluation mode nothing is split.

The processes of a group need the same batch, noise and timestep; the trainer derives batches and seeds from the data
rank (``videox_fun.dist.mesh``). Why the gradients come out as those of one process is in ``videox_fun.dist.sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict

if TYPE_CHECKING:
    from torch import Tensor, nn

    from videox_fun.dist.sequence import SequenceGroup

#: What a model must offer to be split.
MODEL_METHODS = ("embed", "embed_time", "run_block", "decode", "unpatchify", "checkpointed")
ATTENTION_CLASSES = frozenset({"WanSelfAttention"})


def _size(target: Target) -> int:
    return int(getattr(target.args, "sequence_parallel_size", 1) or 1)


class UlyssesPatch(PatchBase):
    """Row I12 of the audit."""

    name = "ulysses"
    row = "I12"
    stage = Stage.POST_ADAPTER
    composable = frozenset({"*"})
    flags = (
        PatchFlag(
            "--sequence_parallel_size",
            "Processes that share the tokens of one sample (Ulysses). Divides the number of processes and of heads.",
            type=int,
            default=1,
        ),
    )

    def __init__(self) -> None:
        self.group: SequenceGroup | None = None
        self.mesh: Any = None

    def requested(self, args: Any) -> bool:
        return (getattr(args, "sequence_parallel_size", 1) or 1) != 1

    def check(self, target: Target) -> Verdict:
        from videox_fun.dist.mesh import legal_sizes

        size, world = _size(target), _world()
        asked = f"--sequence_parallel_size {size}"
        if size < 1:
            return Verdict(False, f"{asked} is not a number of processes.", "1 or more")
        heads = _heads(target)
        fitting = legal_sizes(heads=heads or world, world=world)
        instead = f"--sequence_parallel_size {' or '.join(map(str, fitting))}"
        if world == 1:
            reason = f"{asked} needs {size} processes and this run has one."
            return Verdict(False, reason, f"torchrun --nproc_per_node {size}")
        if world % size:
            return Verdict(False, f"{asked} does not divide the {world} processes of this run.", instead)
        if heads and heads % size:
            return Verdict(False, f"{asked} does not divide the {heads} attention heads.", instead)
        for role, model in target.denoisers().items():
            lacking = [name for name in MODEL_METHODS if not hasattr(model, name)]
            if lacking or not _attentions(model):
                return Verdict(False, f"{role} ({type(model).__name__}) cannot be split over processes.", "DDP or FSDP")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(
            f"{role}.{name}" for role, model in target.denoisers().items() for name in sorted(_attentions(model))
        )

    def apply(self, target: Target) -> Applied:
        import torch.distributed as dist

        from videox_fun.dist.mesh import Layout, make_mesh
        from videox_fun.dist.sequence import SequenceGroup

        layout = Layout(rank=dist.get_rank(), world=dist.get_world_size(), sequence=_size(target))
        self.mesh = make_mesh(layout, device=target.device)
        group = self.mesh.get_group("sequence")
        self.group = SequenceGroup(group, size=layout.sequence, rank=dist.get_rank(group))
        touched = [_split_model(model, self.group) for model in target.denoisers().values()]
        sites = self.planned_sites(target)

        def undo() -> None:
            for names_of in touched:
                for module, names in names_of:
                    for name in names:
                        del module.__dict__[name]

        heads, size = _heads(target), layout.sequence
        detail = f"mesh data {layout.data_world} x sequence {size}, {heads // size} of {heads} heads"
        return Applied(sites, undo, detail)

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        if self.group is None:
            return Evidence(False, "the model was never split")
        counts = self.group.counts
        tokens = max(counts.tokens, default=0)
        facts = {
            "mesh": dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True)),
            "sequence_rank": self.group.rank,
            "tokens_per_sample": dict(counts.tokens),
            "tokens_per_rank": {length: self.group.local_length(length) for length in counts.tokens},
            "all_to_all": counts.all_to_all,
            "all_to_all_in_compiled_graphs": counts.all_to_all_traced,
            "gathers": counts.gather,
        }
        calls = counts.all_to_all + counts.all_to_all_traced
        if not calls or not counts.gather:
            return Evidence(False, f"{applied.detail}; no forward in training mode was split", facts)
        summary = (
            f"{applied.detail}; {tokens} tokens, {self.group.local_length(tokens)} per rank; "
            f"{counts.all_to_all} all-to-all calls in {counts.gather} forwards"
        )
        return Evidence(True, summary, facts)


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _heads(target: Target) -> int:
    """Attention heads of the models, or of the configuration file before they are loaded; 0 when unknown."""
    for model in target.denoisers().values():
        for module in _attentions(model).values():
            return int(module.num_heads)
    config: Mapping[str, Any] = target.extras.get("denoiser_config") or {}
    return int(config.get("num_heads") or config.get("num_attention_heads") or 0)


def _attentions(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ in ATTENTION_CLASSES}


def _split_model(model: nn.Module, group: SequenceGroup) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Bind the split to one model; returns what was set, for the undo."""
    attention = _make_attention(group)
    touched: list[tuple[nn.Module, tuple[str, ...]]] = []
    for module in _attentions(model).values():
        module.__dict__["forward"] = MethodType(attention, module)
        touched.append((module, ("forward",)))
    methods = _make_methods(group)
    for name, function in methods.items():
        model.__dict__[name] = MethodType(function, model)
    touched.append((model, tuple(methods)))
    return touched


def _make_attention(group: SequenceGroup) -> Any:
    """A self-attention's forward that knows slices: ``seq_lens`` is then the number of real tokens of the sample."""
    import torch
    import torch.nn.functional as F

    from videox_fun.models.attention_utils import attention

    def forward(
        self: Any, x: Tensor, seq_lens: Tensor | int | None, grid_sizes: Tensor | None, freqs: Tensor,
        dtype: torch.dtype | None = None, t: Tensor | int = 0,
    ) -> Tensor:  # fmt: skip
        if seq_lens is None or isinstance(seq_lens, torch.Tensor):
            return type(self).forward(self, x, seq_lens, grid_sizes, freqs, dtype, t)
        q, k, v = self.project_qkv(x, freqs, grid_sizes)
        qkv = group.to_heads(torch.stack([q.to(v.dtype), k.to(v.dtype), v]))
        padding = qkv.shape[2] - seq_lens
        q, k, v = qkv[:, :, :seq_lens].unbind(0)
        out = attention(q, k, v, window_size=self.window_size, dtype=dtype)
        out = group.to_tokens(F.pad(out, (0, 0, 0, 0, 0, padding)))
        return self.o(out.flatten(2))

    return forward


def _make_methods(group: SequenceGroup) -> dict[str, Any]:
    """The model's methods around the split."""
    import torch

    from videox_fun.models.wan_transformer3d import Embedded

    @dataclass(frozen=True)
    class Slice(Embedded):
        """What one process works on. ``grid`` and ``skip`` are those of the whole sample."""

        length: int = 0  # tokens of the whole sample, without padding

    def embed(self: Any, *args: Any, **kwargs: Any) -> Embedded:
        whole = type(self).embed(self, *args, **kwargs)
        if not self.training:
            return whole
        length = whole.tokens.shape[1]
        group.counts.tokens[length] = group.counts.tokens.get(length, 0) + 1
        tokens, freqs = group.split(whole.tokens, dim=1), group.split(whole.freqs, dim=0)
        return Slice(
            tokens, whole.e, whole.e0, whole.context, freqs, whole.grid, whole.output_grid, whole.skip, length
        )

    def embed_time(self: Any, t: Tensor, *, own: int, before: int = 0, after: int = 0) -> tuple[Tensor, Tensor]:
        """One row per sample is left alone; one per token is sliced before it is embedded, which is the costly part."""
        if not self.training or t.dim() == 1:
            return type(self).embed_time(self, t, own=own, before=before, after=after)
        last = t[:, -1:]
        late = own - min(own, t.shape[1]) + after
        stretched = torch.cat([last.expand(-1, before), t[:, :own], last.expand(-1, late)], 1)
        local = group.split(stretched, dim=1)
        return type(self).embed_time(self, local, own=local.shape[1])

    def run_block(self: Any, block: nn.Module, tokens: Tensor, embedded: Embedded) -> Tensor:
        if not isinstance(embedded, Slice):
            return type(self).run_block(self, block, tokens, embedded)
        arguments = (tokens, embedded.e0, embedded.length, None, embedded.freqs, embedded.context)
        return self.checkpointed(block, *arguments)

    def decode(self: Any, tokens: Tensor, embedded: Embedded) -> Tensor:
        if not isinstance(embedded, Slice):
            return type(self).decode(self, tokens, embedded)
        patches = group.gather(self.checkpointed(self.head, tokens, embedded.e), dim=1)
        frames, height, width = embedded.output_grid
        patches = patches[:, embedded.skip : embedded.skip + frames * height * width]
        return self.unpatchify(patches, embedded.output_grid)

    return {"embed": embed, "embed_time": embed_time, "run_block": run_block, "decode": decode}
