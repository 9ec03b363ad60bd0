"""Camera paths as Plücker ray maps.

A pose file holds one line per frame after its first line: time stamp, ``fx fy cx cy`` relative to the picture, two
unused numbers, and the 3x4 world-to-camera matrix. Each frame becomes six channels per pixel: ``origin x direction``
and ``direction`` of the pixel's ray, with the first frame's camera as the origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from videox_fun.data.decode import fs_path

POSE_NUMBERS = 19


class Camera:
    """One row of a pose file."""

    def __init__(self, entry: Sequence[float]) -> None:
        self.fx, self.fy, self.cx, self.cy = entry[1:5]
        world_to_camera = np.eye(4)
        world_to_camera[:3] = np.asarray(entry[7:], dtype=np.float64).reshape(3, 4)
        self.w2c_mat = world_to_camera
        self.c2w_mat = np.linalg.inv(world_to_camera)


def custom_meshgrid(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.meshgrid(*args, indexing="ij")


def get_relative_pose(cam_params: Sequence[Camera]) -> np.ndarray:
    """Camera-to-world matrices ``[F, 4, 4]`` (float32) relative to the first camera."""
    first = cam_params[0].w2c_mat
    poses = [np.eye(4)] + [first @ camera.c2w_mat for camera in cam_params[1:]]
    return np.asarray(poses, dtype=np.float32)


def ray_condition(K: torch.Tensor, c2w: torch.Tensor, H: int, W: int, device: str | torch.device) -> torch.Tensor:
    """Plücker maps ``[B, V, H, W, 6]`` of intrinsics ``K [B, V, 4]`` (fx, fy, cx, cy) and poses ``[B, V, 4, 4]``."""
    rows, columns = custom_meshgrid(
        torch.arange(H, device=device, dtype=c2w.dtype), torch.arange(W, device=device, dtype=c2w.dtype)
    )
    fx, fy, cx, cy = K[..., None, None].unbind(dim=2)
    x = (columns + 0.5 - cx) / fx
    y = (rows + 0.5 - cy) / fy
    directions = torch.stack([x, y, torch.ones_like(x)], dim=-1)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    rays = torch.einsum("bvij,bvhwj->bvhwi", c2w[..., :3, :3], directions)
    origins = c2w[..., None, None, :3, 3].expand_as(rays)
    return torch.cat([torch.linalg.cross(origins, rays, dim=-1), rays], dim=-1)


def process_pose_params(
    cam_params: Sequence[Sequence[float]] | np.ndarray | torch.Tensor,
    width: int = 672,
    height: int = 384,
    original_pose_width: int = 1280,
    original_pose_height: int = 720,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Plücker maps ``[F, height, width, 6]`` of pose rows that were estimated on the original picture size."""
    rows = cam_params.tolist() if isinstance(cam_params, (np.ndarray, torch.Tensor)) else cam_params
    cameras = [Camera(row) for row in rows]
    pose_ratio = original_pose_width / original_pose_height
    wider = pose_ratio > width / height  # the target cuts the sides of the original, else its top and bottom
    for camera in cameras:
        if wider:
            camera.fx = height * pose_ratio * camera.fx / width
        else:
            camera.fy = width / pose_ratio * camera.fy / height
    intrinsics = [[c.fx * width, c.fy * height, c.cx * width, c.cy * height] for c in cameras]
    K = torch.as_tensor(np.asarray(intrinsics, dtype=np.float32), device=device)[None]
    c2w = torch.as_tensor(get_relative_pose(cameras), device=device)[None]
    return ray_condition(K, c2w, height, width, device)[0].contiguous()


def read_pose_file(pose_file_path: str | Path) -> list[list[float]]:
    """The pose rows of a file. Raises ``ValueError`` with the line that is not a pose."""
    with open(fs_path(pose_file_path), encoding="utf-8") as handle:
        lines = [line.split() for line in handle.read().splitlines()[1:]]
    rows: list[list[float]] = []
    for number, words in enumerate(lines, start=2):
        if not words:
            continue
        try:
            row = [float(word) for word in words]
        except ValueError as error:
            raise ValueError(f"{pose_file_path}: line {number} of the pose file: {error}") from error
        if len(row) != POSE_NUMBERS:
            raise ValueError(
                f"{pose_file_path}: line {number} of the pose file has {len(row)} numbers, expected {POSE_NUMBERS}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{pose_file_path}: the pose file has no poses (its first line is a title and is skipped)")
    return rows


def process_pose_file(
    pose_file_path: str | Path,
    width: int = 672,
    height: int = 384,
    original_pose_width: int = 1280,
    original_pose_height: int = 720,
    device: str | torch.device = "cpu",
    return_poses: bool = False,
) -> torch.Tensor | list[list[float]]:
    """Plücker maps ``[F, height, width, 6]`` of a pose file, or its raw rows with ``return_poses``."""
    rows = read_pose_file(pose_file_path)
    if return_poses:
        return rows
    return process_pose_params(rows, width, height, original_pose_width, original_pose_height, device)


def poses_at_frames(rows: Sequence[Sequence[float]], *, clip_frames: int, indices: np.ndarray) -> torch.Tensor:
    """Pose rows ``[F, 19]`` for frames of a clip; the path is stretched to the clip and interpolated entry-wise."""
    table = torch.tensor(rows, dtype=torch.float32)[None, None]
    stretched = F.interpolate(table, size=(clip_frames, table.shape[-1]), mode="bilinear", align_corners=True)[0, 0]
    return stretched[torch.as_tensor(np.asarray(indices), dtype=torch.long)]
