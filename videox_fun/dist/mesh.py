"""How the processes of a run are arranged: a grid of ``data x sequence``.

The processes of one row work on the same batch and share its tokens; they have neighbouring ranks, because those are
connected best. The processes of one column see different batches. With a sequence size of 1 this is plain data
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """The place of process ``rank`` among ``world``, of which ``sequence`` neighbours share the tokens of a sample."""

    rank: int = 0
    world: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.world % self.sequence:
            raise ValueError(f"{self.world} processes cannot be divided into sequence groups of {self.sequence}")

    @property
    def data_rank(self) -> int:
        """Which batches this process gets; equal inside a sequence group."""
        return self.rank // self.sequence

    @property
    def data_world(self) -> int:
        """How many different batches one step has."""
        return self.world // self.sequence


def legal_sizes(*, heads: int, world: int) -> list[int]:
    """The sequence sizes that divide both the attention heads and the processes."""
    return [size for size in range(1, min(heads, world) + 1) if not heads % size and not world % size]


def make_mesh(layout: Layout, *, device: str) -> DeviceMesh:
    """The mesh with the dimensions ``data`` and ``sequence``. Every process has to call this."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (layout.data_world, layout.sequence)
    return init_device_mesh(device, shape, mesh_dim_names=("data", "sequence"))
