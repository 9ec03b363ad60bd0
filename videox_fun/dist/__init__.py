"""Device meshes and the collectives that sequence parallelism needs."""

from __future__ import annotations

from videox_fun.dist.mesh import Layout, legal_sizes, make_mesh

__all__ = ["Layout", "legal_sizes", "make_mesh"]
