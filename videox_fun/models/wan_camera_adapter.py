"""Turns camera rays (Plücker coordinates) into a bias on the video tokens.

The rays of ``downscale_factor`` by ``downscale_factor`` pixels are folded into channels, one strided convolution brings
them to the token grid and the model's width, and residual convolution blocks mix neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a ReLU between them, added to their input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.relu(self.conv1(x)))


class SimpleAdapter(nn.Module):
    """``[B, C, T, H, W]`` rays to ``[B, out_dim, T, h, w]`` features, each frame on its own."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        downscale_factor: int = 8,
        num_residual_blocks: int = 1,
    ) -> None:
        super().__init__()
        self.pixel_unshuffle = nn.PixelUnshuffle(downscale_factor)
        self.conv = nn.Conv2d(in_dim * downscale_factor**2, out_dim, kernel_size=kernel_size, stride=stride)
        self.residual_blocks = nn.Sequential(*(ResidualBlock(out_dim) for _ in range(num_residual_blocks)))

    def forward(self, rays_BCTHW: Tensor) -> Tensor:
        batch = rays_BCTHW.shape[0]
        frames = rays_BCTHW.transpose(1, 2).flatten(0, 1)
        features = self.residual_blocks(self.conv(self.pixel_unshuffle(frames)))
        return features.unflatten(0, (batch, -1)).transpose(1, 2)
