"""Colour statistics carried from one picture to another.

In CIE L*a*b* lightness and the two colour axes are nearly independent, so shifting and scaling each channel to the
mean and spread of a reference changes the mood of a picture without changing what it shows (Reinhard et al., 2001).
"""

from __future__ import annotations

import numpy as np

# sRGB primaries to CIE XYZ, and the D65 white point.
_TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                    [0.0193339, 0.1191920, 0.9503041]])
_WHITE = _TO_XYZ.sum(axis=1)
_CUT = 6 / 29


def rgb_to_lab(pixels: np.ndarray) -> np.ndarray:
    """``[..., 3]`` uint8 sRGB to float L*a*b*."""
    value = pixels.astype(np.float64) / 255
    linear = np.where(value > 0.04045, ((value + 0.055) / 1.055) ** 2.4, value / 12.92)
    ratio = linear @ _TO_XYZ.T / _WHITE
    curve = np.where(ratio > _CUT**3, np.cbrt(ratio), ratio / (3 * _CUT**2) + 4 / 29)
    return np.stack([116 * curve[..., 1] - 16, 500 * (curve[..., 0] - curve[..., 1]),
                     200 * (curve[..., 1] - curve[..., 2])], axis=-1)


def lab_to_rgb(lab: np.ndarray) -> np.ndarray:
    """Float L*a*b* to the nearest uint8 sRGB."""
    middle = (lab[..., 0] + 16) / 116
    curve = np.stack([middle + lab[..., 1] / 500, middle, middle - lab[..., 2] / 200], axis=-1)
    ratio = np.where(curve > _CUT, curve**3, 3 * _CUT**2 * (curve - 4 / 29))
    linear = np.clip((ratio * _WHITE) @ np.linalg.inv(_TO_XYZ).T, 0, 1)
    value = np.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear)
    return np.rint(value * 255).astype(np.uint8)


def color_transfer(sc: np.ndarray, dc: np.ndarray) -> np.ndarray:
    """The picture ``sc`` with the mean and spread of ``dc`` in each L*a*b* channel; both ``[H, W, 3]`` uint8."""
    source, reference = rgb_to_lab(sc), rgb_to_lab(dc)
    spread = source.std(axis=(0, 1))
    scale = np.divide(reference.std(axis=(0, 1)), spread, out=np.ones(3), where=spread > 1e-6)
    return lab_to_rgb((source - source.mean(axis=(0, 1))) * scale + reference.mean(axis=(0, 1)))
