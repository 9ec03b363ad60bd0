"""The VAE of Wan 2.2 TI2V-5B: 48 latent channels, 4x in time, 16x in space.

Pixels are folded 2x2 into channels first; levels have parameter-free shortcuts. Everything around the network is as in
:mod:`videox_fun.models.wan_vae`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan as _Network
from torch import Tensor

from videox_fun.models import vae_keys
from videox_fun.models.encoder_files import adopt, read_tensors, shape_of, strip_prefix
from videox_fun.models.wan_vae import NormalizedVAE
from videox_fun.utils.latent_statistics import WAN22_MEAN, WAN22_STD

_FOLD = 2
_PIXELS_PER_LATENT = 16


class AutoencoderKLWan2_2_(_Network):
    """The network without normalisation, under the argument names of the original."""

    def __init__(
        self, dim: int = 160, dec_dim: int = 256, z_dim: int = 16, dim_mult: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2, attn_scales: Sequence[float] = (),
        temperal_downsample: Sequence[bool] = (True, True, False), dropout: float = 0.0,
    ) -> None:
        super().__init__(
            base_dim=dim, decoder_base_dim=dec_dim, z_dim=z_dim, dim_mult=list(dim_mult),
            num_res_blocks=num_res_blocks, attn_scales=list(attn_scales),
            temperal_downsample=list(temperal_downsample), dropout=dropout, is_residual=True,
            in_channels=3 * _FOLD**2, out_channels=3 * _FOLD**2, patch_size=_FOLD,
            scale_factor_spatial=_PIXELS_PER_LATENT,
        )


class AutoencoderKLWan3_8(NormalizedVAE):
    """The VAE of Wan 2.2 TI2V-5B.

    Args:
        latent_channels: channels of the latents.
        c_dim: width of the encoder's first level (160 in the published file).
        vae_pth: weights to load at once; ``from_pretrained`` also reads the sizes off the file.
        dim_mult, temperal_downsample: widths and time reduction of the levels.
        temporal_compression_ratio, spatial_compression_ratio: pixels per latent; stated for the trainer. The
            configuration file sets 16 for space; the default is the original's.
        dec_dim: width of the decoder's last level (256 in the published file).
    """

    statistics = (WAN22_MEAN, WAN22_STD)
    nested_keys = True
    _width = "c_dim"

    @register_to_config
    def __init__(
        self, latent_channels: int = 48, c_dim: int = 160, vae_pth: str | None = None,
        dim_mult: Sequence[int] = (1, 2, 4, 4), temperal_downsample: Sequence[bool] = (False, True, True),
        temporal_compression_ratio: int = 4, spatial_compression_ratio: int = 8, *, dec_dim: int = 256,
    ) -> None:
        super().__init__()
        network = AutoencoderKLWan2_2_(
            dim=c_dim, dec_dim=dec_dim, z_dim=latent_channels, dim_mult=dim_mult,
            temperal_downsample=temperal_downsample,
        )
        self._wrap(network, latent_channels=latent_channels, temporal=temporal_compression_ratio,
                   spatial=spatial_compression_ratio)
        if vae_pth is not None:
            tensors = strip_prefix(read_tensors(vae_pth), "model.")
            adopt(self.model, {vae_keys.to_diffusers(key): value for key, value in tensors.items()},
                  source=str(vae_pth), dtype=torch.float32)

    @classmethod
    def _sizes(cls, tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Any]:
        sizes = super()._sizes(tensors, source=source)
        out = shape_of(tensors, "decoder.conv_out.weight", what=f"a file for {cls.__name__}", source=source)
        return {**sizes, "dec_dim": out[1]}
