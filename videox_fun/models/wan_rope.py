"""Three-axis rotary tables of the Wan transformers.

The head dimension is split over time, height and width: ``d - 4*(d//6)``, ``2*(d//6)`` and ``2*(d//6)``. A token at
grid position (f, h, w) turns its pairs by the angles of the three axes. The angles are computed in float64 once; the
table of a grid, ``[tokens, d/2, 2]`` of cosine and sine in float32, is put together from the three short axis tables
and kept for the last few grids, so that a step costs no work and no transfer.

RIFLEx (longer videos than trained) replaces one frequency of the time axis, so that its period covers the whole clip.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_POSITIONS = 1024
_KEPT_GRIDS = 16  # a table of 32k tokens and head dimension 128 is 16 MiB


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Dimensions of the head given to time, height and width."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def rope_params(max_seq_len: int, dim: int, theta: float = 10000) -> Tensor:
    """Complex table ``[max_seq_len, dim/2]`` of ``exp(i * position * theta^(-2k/dim))``, complex128."""
    return get_1d_rotary_pos_embed_riflex(torch.arange(max_seq_len), dim, theta)


def get_1d_rotary_pos_embed_riflex(
    pos: Tensor | int,
    dim: int,
    theta: float = 10000.0,
    use_real: bool = False,
    k: int | None = None,
    L_test: int | None = None,
    L_test_scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotary table of one axis. With ``k`` and ``L_test`` the ``k``-th frequency spans ``L_test`` positions."""
    if dim % 2:
        raise ValueError(f"a rotary axis needs an even dimension, got {dim}")
    positions = torch.arange(pos) if isinstance(pos, int) else pos
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    if k is not None and L_test is not None:
        frequencies[k - 1] = 0.9 * 2 * math.pi / L_test
        if L_test_scale is not None:
            frequencies[k - 1] /= L_test_scale
    angles = torch.outer(positions.to(torch.float64), frequencies)
    if use_real:
        return (
            angles.cos().repeat_interleave(2, dim=1).float(),
            angles.sin().repeat_interleave(2, dim=1).float(),
        )
    return torch.polar(torch.ones_like(angles), angles)


def _over_grid(axes: Sequence[Tensor], grid: Sequence[int]) -> Tensor:
    """Put the tables of the three axes (position, frequency, ...) together, one row per token of the grid."""
    time, rows, columns = axes
    frames, height, width = grid
    shape = (frames, height, width, -1, *time.shape[2:])
    parts = time[:frames, None, None], rows[None, :height, None], columns[None, None, :width]
    return torch.cat([part.expand(shape) for part in parts], dim=3).flatten(0, 2)


class RopeTable:
    """Gives the cosine/sine table of a token grid; holds the axis tables and the last grids of each device."""

    def __init__(self, head_dim: int, riflex: tuple[int, int, float | None] | None = None) -> None:
        if head_dim % 2:
            raise ValueError(f"the head dimension must be even for rotary embedding, got {head_dim}")
        self.head_dim = head_dim
        self.riflex = riflex
        self._axes: dict[torch.device, tuple[Tensor, ...]] = {}
        self._grids: OrderedDict[tuple, Tensor] = OrderedDict()

    def freqs(self) -> Tensor:
        """The three axis tables side by side, ``[1024, head_dim/2]``, complex128."""
        k, length, scale = self.riflex or (None, None, None)
        time_dim, *spatial = axis_dims(self.head_dim)
        positions = torch.arange(MAX_POSITIONS, device="cpu")
        time = get_1d_rotary_pos_embed_riflex(positions, time_dim, k=k, L_test=length, L_test_scale=scale)
        return torch.cat([time, *(get_1d_rotary_pos_embed_riflex(positions, dim) for dim in spatial)], dim=1)

    def _axis_tables(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._axes:
            table = torch.view_as_real(self.freqs()).float().to(device)
            self._axes[device] = table.split([dim // 2 for dim in axis_dims(self.head_dim)], dim=1)
        return self._axes[device]

    def grid(self, grid: Sequence[int], device: torch.device, *, padding: int = 0) -> Tensor:
        """Table ``[f*h*w + padding, head_dim/2, 2]``; padding tokens are not turned."""
        frames, height, width = grid
        if max(grid) > MAX_POSITIONS:
            raise ValueError(f"the token grid {tuple(grid)} is longer than {MAX_POSITIONS} positions on one axis")
        if torch.compiler.is_compiling():
            return self._build(frames, height, width, device, padding)
        key = (frames, height, width, device, padding)
        if key in self._grids:
            self._grids.move_to_end(key)
        else:
            # Tables made in inference mode could not be used by a later training step.
            with torch.inference_mode(False), torch.no_grad():
                self._grids[key] = self._build(frames, height, width, device, padding)
            if len(self._grids) > _KEPT_GRIDS:
                self._grids.popitem(last=False)
        return self._grids[key]

    def _build(self, frames: int, height: int, width: int, device: torch.device, padding: int) -> Tensor:
        table = _over_grid(self._axis_tables(device), (frames, height, width))
        if padding:
            unturned = table.new_tensor([1.0, 0.0]).expand(padding, table.shape[1], 2)
            table = torch.cat([table, unturned])
        return table


def rope_apply(x: Tensor, grid_sizes: Tensor | Sequence[Sequence[int]], freqs: Tensor) -> Tensor:
    """Rotate ``x [B, L, heads, d]``, each sample by its own grid, with the complex axis tables ``freqs [1024, d/2]``.

    For callers that have one grid per sample. Tokens past a sample's grid are left as they are. The model itself uses
    :class:`RopeTable`.
    """
    grids = grid_sizes.tolist() if isinstance(grid_sizes, Tensor) else grid_sizes
    axes = freqs.to(x.device).split([dim // 2 for dim in axis_dims(x.shape[-1])], dim=1)
    outputs = []
    for sample, grid in zip(x, grids, strict=True):
        turn = _over_grid(axes, grid).unsqueeze(1)
        tokens = sample[: turn.shape[0]].to(torch.float64).unflatten(-1, (-1, 2)).contiguous()
        turned = torch.view_as_real(torch.view_as_complex(tokens) * turn).flatten(-2)
        outputs.append(torch.cat([turned.to(x.dtype), sample[turn.shape[0] :]]))
    return torch.stack(outputs)


def rope_apply_qk(
    q: Tensor, k: Tensor, grid_sizes: Tensor | Sequence[Sequence[int]], freqs: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`rope_apply` on queries and keys."""
    return rope_apply(q, grid_sizes, freqs), rope_apply(k, grid_sizes, freqs)
