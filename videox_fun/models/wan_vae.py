"""The VAE of Wan 2.1: 16 latent channels, 4x in time, 8x in space.

The network is the one of diffusers. Around it: the published key names, and the normalisation that Wan's denoisers
expect. ``encode`` gives a Gaussian whose mean is ``(mean - m) / s`` with fixed statistics per channel, while its
log-variance stays that of the network; ``decode`` undoes the normalisation and clamps to [-1, 1].

Videos are encoded in chunks of 1, 4, 4, ... frames with cached causal convolutions, sample by sample, so memory does
not grow with length or batch. ``encode_moments`` and ``decode_latents`` are the only callers of the network: what wants
to change how it runs (spatial tiles, for example) replaces these two on an instance.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan as _Network
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from videox_fun.models import vae_keys
from videox_fun.models.encoder_files import NativeWeights, adopt, read_tensors, shape_of, strip_prefix
from videox_fun.utils.latent_statistics import WAN21_MEAN, WAN21_STD


class AutoencoderKLWan_(_Network):
    """The network without normalisation, under the argument names of the original."""

    def __init__(
        self, dim: int = 128, z_dim: int = 4, dim_mult: Sequence[int] = (1, 2, 4, 4), num_res_blocks: int = 2,
        attn_scales: Sequence[float] = (), temperal_downsample: Sequence[bool] = (True, True, False),
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            base_dim=dim, z_dim=z_dim, dim_mult=list(dim_mult), num_res_blocks=num_res_blocks,
            attn_scales=list(attn_scales), temperal_downsample=list(temperal_downsample), dropout=dropout,
        )


class NormalizedVAE(NativeWeights, ModelMixin, ConfigMixin):
    """What both Wan VAEs share: loading, saving, and the border between pixels and normalised latents."""

    model: _Network
    nested_keys = False
    statistics: tuple[Sequence[float], Sequence[float]]

    def _wrap(self, model: _Network, *, latent_channels: int, temporal: int, spatial: int) -> None:
        mean, std = self.statistics
        if latent_channels != len(mean):
            raise ValueError(f"{type(self).__name__} has latent statistics for {len(mean)} channels, not for "
                             f"{latent_channels}. Is this the file of the other Wan VAE?")
        self.model = model
        # One sample at a time: the peak stays that of a single video, and a batch gives the numbers of its samples.
        self.model.use_slicing = True
        self.latent_channels = latent_channels
        self.temporal_compression_ratio = temporal
        self.spatial_compression_ratio = spatial
        self._set_statistics(mean, std)

    def _set_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        shape = (1, -1, 1, 1, 1)
        # The device is given so that building on the meta device leaves real values here.
        scale = 1.0 / torch.tensor(std, device="cpu")
        self.register_buffer("latents_mean", torch.tensor(mean, device="cpu").view(shape), persistent=False)
        self.register_buffer("latents_scale", scale.view(shape), persistent=False)

    # ---- pixels and latents ---------------------------------------------------------------------------------------

    def encode_moments(self, pixels_BCFHW: Tensor) -> Tensor:
        """Mean and log-variance of the network, not normalised: ``[B, 2C, T, h, w]``."""
        return self.model.encode(pixels_BCFHW, return_dict=False)[0].parameters

    def decode_latents(self, latents_BCTHW: Tensor) -> Tensor:
        """Pixels in [-1, 1] of latents that are not normalised."""
        return self.model.decode(latents_BCTHW, return_dict=False)[0]

    def encode(
        self, x: Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Posterior of ``[B, 3, F, H, W]`` in [-1, 1]; ``result[0]`` is the distribution of normalised latents."""
        mean, logvar = self.encode_moments(x.to(self._weight_dtype())).chunk(2, dim=1)
        posterior = DiagonalGaussianDistribution(torch.cat([self.normalize(mean), logvar], dim=1))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Pixels in [-1, 1] of normalised latents ``[B, C, T, h, w]``."""
        sample = self.decode_latents(self.denormalize(z.to(self._weight_dtype())))
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(self, sample: Tensor, generator: torch.Generator | None = None) -> DecoderOutput:
        """Encode, draw, decode."""
        return self.decode(self.encode(sample)[0].sample(generator))

    def normalize(self, latents: Tensor) -> Tensor:
        """Network latents to those of the denoiser."""
        return (latents - self.latents_mean.to(latents)) * self.latents_scale.to(latents)

    def denormalize(self, latents: Tensor) -> Tensor:
        """Latents of the denoiser to those of the network."""
        return latents / self.latents_scale.to(latents) + self.latents_mean.to(latents)

    def _weight_dtype(self) -> torch.dtype:
        return self.model.quant_conv.weight.dtype

    # ---- files ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, pretrained_model_path: str | os.PathLike, additional_kwargs: Mapping[str, Any] | None = None, *,
        torch_dtype: torch.dtype | None = torch.float32,
    ) -> NormalizedVAE:
        """Load a published file, or a file or folder in the diffusers layout.

        Args:
            pretrained_model_path: ``.pth``, ``.safetensors`` or folder.
            additional_kwargs: ``vae_kwargs`` of the configuration file; keys that the constructor lacks are ignored.
                Sizes come from the weights.
            torch_dtype: dtype of the parameters; None keeps that of the file.
        """
        tensors = strip_prefix(read_tensors(pretrained_model_path), "model.")
        if not vae_keys.is_diffusers(tensors):
            tensors = {vae_keys.to_diffusers(key): value for key, value in tensors.items()}
        accepted = set(inspect.signature(cls.__init__).parameters) - {"self", "vae_pth"}
        kwargs = {key: value for key, value in (additional_kwargs or {}).items() if key in accepted}
        with torch.device("meta"):
            vae = cls(**{**kwargs, **cls._sizes(tensors, source=str(pretrained_model_path))})
        adopt(vae.model, tensors, source=str(pretrained_model_path), dtype=torch_dtype)
        statistics = _folder_statistics(Path(pretrained_model_path))
        if statistics:
            vae._set_statistics(*statistics)
        return vae.eval()

    @classmethod
    def _sizes(cls, tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Any]:
        """Constructor arguments that the weights decide, from diffusers keys."""
        if vae_keys.is_nested(tensors) != cls.nested_keys:
            other = "AutoencoderKLWan" if cls.nested_keys else "AutoencoderKLWan3_8"
            if "encoder.conv_in.weight" in tensors:
                raise ValueError(f"'{source}' holds the weights of {other}, not of {cls.__name__}. Set vae_kwargs."
                                 f"vae_type to {other} in the configuration file, or use the other VAE file.")
        what = f"a file for {cls.__name__}"
        return {
            "latent_channels": shape_of(tensors, "post_quant_conv.weight", what=what, source=source)[0],
            cls._width: shape_of(tensors, "encoder.conv_in.weight", what=what, source=source)[0],
        }

    _width = "dim"

    def native_state_dict(self) -> dict[str, Tensor]:
        return {
            vae_keys.to_native(key, nested=self.nested_keys, residual_blocks=self.model.config.num_res_blocks): value
            for key, value in self.model.state_dict().items()
        }


def _folder_statistics(path: Path) -> tuple[Sequence[float], Sequence[float]] | None:
    """Latent mean and standard deviation that a diffusers folder states."""
    config = path / "config.json"
    if not config.is_file():
        return None
    stated = json.loads(config.read_text(encoding="utf-8"))
    if not stated.get("latents_mean") or not stated.get("latents_std"):
        return None
    return stated["latents_mean"], stated["latents_std"]


class AutoencoderKLWan(NormalizedVAE):
    """The VAE of Wan 2.1, also used by the A14B models of Wan 2.2.

    Args:
        latent_channels: channels of the latents.
        temporal_compression_ratio, spatial_compression_ratio: pixels per latent; stated for the trainer.
        dim: width of the first level (96 in the published file).
    """

    statistics = (WAN21_MEAN, WAN21_STD)

    @register_to_config
    def __init__(
        self, latent_channels: int = 16, temporal_compression_ratio: int = 4, spatial_compression_ratio: int = 8, *,
        dim: int = 96,
    ) -> None:
        super().__init__()
        network = AutoencoderKLWan_(dim=dim, z_dim=latent_channels, temperal_downsample=(False, True, True))
        self._wrap(network, latent_channels=latent_channels, temporal=temporal_compression_ratio,
                   spatial=spatial_compression_ratio)


@torch.no_grad()
def encode_videos(
    vae: NormalizedVAE, pixels_BCFHW: Tensor, *, mini_batch: int, generator: torch.Generator | None = None
) -> Tensor:
    """Latents drawn from the posterior, ``mini_batch`` samples at a time.

    Each chunk is drawn right after it is encoded, from ``generator`` or the global stream.
    """
    if mini_batch < 1:
        raise ValueError(f"--vae_mini_batch must be at least 1, not {mini_batch}.")
    return torch.cat([vae.encode(chunk)[0].sample(generator) for chunk in pixels_BCFHW.split(mini_batch)])
