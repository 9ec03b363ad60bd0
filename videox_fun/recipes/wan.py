"""Wan 2.1: text-to-video, image-to-video and the Fun inpaint models.

``--train_mode normal`` trains text-to-video. Every other mode conditions on a mask, the masked video and CLIP features
of the first frame. All parts are files below the model folder; their names come from the configuration file.
"""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from videox_fun.conditioning import cached, encoders, inpaint, shared, text
from videox_fun.data.cache import IMAGE, LATENTS, TEXT, EncodingCache, LatentLayout
from videox_fun.data.module import DataModule, DataOptions, build_data
from videox_fun.models.attention_utils import check_training_backend
from videox_fun.recipes.base import Recipe
from videox_fun.training.context import Components, Conditioning, NoiseSchedule, RunContext

logger = logging.getLogger(__name__)

MASK_CHANNELS = 4
_LATENT_CHANNELS = 16


def section(config: Any, name: str) -> dict[str, Any]:
    """A mapping of the configuration file as plain values, empty when absent."""
    from omegaconf import OmegaConf

    part = config.get(name)
    return OmegaConf.to_container(part) if part is not None else {}


def flow_schedule(config: Any) -> NoiseSchedule:
    """The shifted linear table that training draws from: index 0 is pure noise, there is no trailing zero."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from videox_fun.utils.utils import filter_kwargs

    scheduler = FlowMatchEulerDiscreteScheduler(
        **filter_kwargs(FlowMatchEulerDiscreteScheduler, section(config, "scheduler_kwargs"))
    )
    return NoiseSchedule(scheduler.timesteps.clone(), scheduler.sigmas[: len(scheduler.timesteps)].clone())


def existing(path: Path, *, key: str) -> Path:
    """``path``, or ``ValueError`` naming the configuration key and what lies beside it."""
    if path.exists():
        return path
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    nearby = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) if folder else "nothing"
    raise ValueError(f"'{path}' ({key} of the configuration file) does not exist; {folder} holds: {nearby}.")


class WanRecipe(Recipe):
    """Wan 2.1 and its Fun variants, for the plain and the LoRA scripts."""

    def root(self, ctx: RunContext) -> Path:
        return Path(ctx.args.pretrained_model_name_or_path)

    def transformer_folder(self, ctx: RunContext) -> Path:
        subpath = section(ctx.config, "transformer_additional_kwargs").get("transformer_subpath", "transformer")
        return self.root(ctx) / subpath

    def conditioned(self, ctx: RunContext) -> bool:
        """Whether the denoiser sees an image or a masked video."""
        return ctx.args.train_mode != "normal"

    # ---- before weights -------------------------------------------------------------------------------------------

    def check(self, ctx: RunContext) -> None:
        check_training_backend()
        folder = existing(self.transformer_folder(ctx), key="transformer_additional_kwargs.transformer_subpath")
        for group, key in (("vae_kwargs", "vae_subpath"), ("text_encoder_kwargs", "text_encoder_subpath"),
                           ("text_encoder_kwargs", "tokenizer_subpath")):
            self._part(ctx, group, key)
        if self.conditioned(ctx):
            self._part(ctx, "image_encoder_kwargs", "image_encoder_subpath")
        config_file, config = folder / "config.json", self.denoiser_config(ctx)
        found = config.get("in_dim", config.get("in_channels"))
        wanted = _LATENT_CHANNELS + (MASK_CHANNELS + _LATENT_CHANNELS if self.conditioned(ctx) else 0)
        if found is not None and found != wanted:
            other = "--train_mode normal" if found == _LATENT_CHANNELS else "--train_mode inpaint"
            if found not in (_LATENT_CHANNELS, 2 * _LATENT_CHANNELS + MASK_CHANNELS):
                other = "the control training script"
            raise ValueError(
                f"{config_file}: the model takes {found} input channels, but --train_mode {ctx.args.train_mode} "
                f"feeds {wanted}. Use {other}, or other weights."
            )

    def denoiser_config(self, ctx: RunContext) -> dict[str, Any]:
        file = existing(self.transformer_folder(ctx) / "config.json", key="the transformer's config.json")
        return json.loads(file.read_text(encoding="utf-8"))

    def _part(self, ctx: RunContext, group: str, key: str) -> Path:
        subpath = section(ctx.config, group).get(key, key.removesuffix("_subpath"))
        return existing(self.root(ctx) / subpath, key=f"{group}.{key}")

    def data(self, ctx: RunContext) -> DataModule:
        options, vae = ctx.spec.options, section(ctx.config, "vae_kwargs")
        data = build_data(
            DataOptions.from_args(
                ctx.args, inpaint=self.conditioned(ctx), temporal_ratio=vae.get("temporal_compression_ratio", 4),
                mask_image_start_only=options["mask_image_start_only"],
                first_ratio_prob=options["first_ratio_prob"], ratio_draw_from_rng=options["ratio_draw_from_rng"],
                worker_seeding=options["worker_seeding"], model_width=self.denoiser_config(ctx).get("dim"),
            ),
            rank=ctx.layout.data_rank, world=ctx.layout.data_world, rng=ctx.rng.numpy,
        )
        layout = LatentLayout(2 * _LATENT_CHANNELS, spatial=vae.get("spatial_compression_ratio", 8),
                              temporal=data.options.temporal_ratio, itemsize=ctx.weight_dtype.itemsize)  # fmt: skip
        ctx.cache = encoders.open_cache(ctx, data, self._fingerprints(ctx), layout=layout)
        ctx.spared = encoders.spared(ctx, ctx.cache, data)
        return data

    def _fingerprints(self, ctx: RunContext) -> dict[str, dict[str, Any]]:
        """What decides the values of cached encodings, by kind."""
        text_kwargs = section(ctx.config, "text_encoder_kwargs")
        found = {
            LATENTS: {"weights": self._vae_path(ctx), "options": section(ctx.config, "vae_kwargs"),
                      "tiling": ctx.args.vae_tiling and [ctx.args.vae_tile_size, ctx.args.vae_tile_overlap]},
            TEXT: {"weights": self._part(ctx, "text_encoder_kwargs", "text_encoder_subpath"), "options": text_kwargs,
                   "tokenizer": self._part(ctx, "text_encoder_kwargs", "tokenizer_subpath"),
                   "tokens": ctx.args.tokenizer_max_length},
        }
        if self.conditioned(ctx):
            found[IMAGE] = {"weights": self._part(ctx, "image_encoder_kwargs", "image_encoder_subpath")}
        return found

    # ---- weights --------------------------------------------------------------------------------------------------

    def load(self, ctx: RunContext) -> Components:
        components = self.encoders(ctx, skip=ctx.spared)
        components.denoiser = self._transformer(ctx)
        components.denoiser.requires_grad_(False)
        return components

    def encoders(self, ctx: RunContext, *, skip: frozenset[str] = frozenset()) -> Components:
        from transformers import AutoTokenizer

        components = Components(
            tokenizer=AutoTokenizer.from_pretrained(
                self._part(ctx, "text_encoder_kwargs", "tokenizer_subpath"), local_files_only=True
            ),
            text_encoder=None if "text_encoder" in skip else self._text_encoder(ctx),
            vae=None if "vae" in skip else self._vae(ctx),
            image_encoder=self._image_encoder(ctx) if self.conditioned(ctx) and "image_encoder" not in skip else None,
            denoiser=nn.Identity(),
            schedule=flow_schedule(ctx.config),
        )
        if "text_encoder" in skip and self._cache(ctx, TEXT) is not None:
            components.extras["text_encoder_shape"] = self._text_encoder_shape(ctx)
        for module in components.frozen().values():
            module.requires_grad_(False)
        return components

    def _transformer(self, ctx: RunContext) -> nn.Module:
        from videox_fun.models.loading import load_weights
        from videox_fun.models.wan_transformer3d import WanTransformer3DModel

        # Upstream always passes the weights through bfloat16; a float32 run then starts from rounded weights.
        dtype = torch.bfloat16 if ctx.compat else ctx.weight_dtype
        model = WanTransformer3DModel.from_pretrained(
            str(self.transformer_folder(ctx)),
            transformer_additional_kwargs=section(ctx.config, "transformer_additional_kwargs"), torch_dtype=dtype,
            strict=True, allow_partial=ctx.args.allow_partial_load,
        ).to(ctx.weight_dtype)
        if ctx.args.transformer_path:
            load_weights(model, ctx.args.transformer_path, strict=True, allow_partial=ctx.args.allow_partial_load)
        return model

    def _vae_path(self, ctx: RunContext) -> Path:
        return Path(ctx.args.vae_path) if ctx.args.vae_path else self._part(ctx, "vae_kwargs", "vae_subpath")

    def _vae(self, ctx: RunContext) -> nn.Module:
        from videox_fun.models.wan_vae import AutoencoderKLWan

        vae = AutoencoderKLWan.from_pretrained(
            str(self._vae_path(ctx)), additional_kwargs=section(ctx.config, "vae_kwargs"), torch_dtype=ctx.weight_dtype
        )
        return vae.eval()

    def _text_encoder(self, ctx: RunContext) -> nn.Module:
        from videox_fun.models.wan_text_encoder import WanT5EncoderModel

        path = self._part(ctx, "text_encoder_kwargs", "text_encoder_subpath")
        encoder = WanT5EncoderModel.from_pretrained(
            str(path), additional_kwargs=section(ctx.config, "text_encoder_kwargs"), low_cpu_mem_usage=True,
            torch_dtype=ctx.weight_dtype,
        )
        if self._cache(ctx, TEXT) is not None:
            encoders.write_text_config(ctx.cache, encoder.config)
        return encoder.eval()

    def _text_encoder_shape(self, ctx: RunContext) -> nn.Module:
        """The text encoder without weights, for what only counts its layers."""
        from videox_fun.models.wan_text_encoder import WanT5EncoderModel

        with torch.device("meta"):
            return WanT5EncoderModel(**encoders.read_text_config(ctx.cache))

    def _image_encoder(self, ctx: RunContext) -> nn.Module:
        from videox_fun.models.wan_image_encoder import CLIPModel

        path = self._part(ctx, "image_encoder_kwargs", "image_encoder_subpath")
        return CLIPModel.from_pretrained(str(path), torch_dtype=ctx.weight_dtype).eval()

    # ---- the step -------------------------------------------------------------------------------------------------

    def loader(self, ctx: RunContext, components: Components, data: DataModule):
        if ctx.args.enable_text_encoder_in_dataloader:
            ctx.residency.keep_on_host(components.text_encoder)
            data.collate_fn = text.EncodingCollate(
                data.collate_fn, tokenizer=components.tokenizer, text_encoder=components.text_encoder,
                max_length=ctx.args.tokenizer_max_length, untrimmed=ctx.compat,
            )
        return super().loader(ctx, components, data)

    @torch.no_grad()
    def condition(self, ctx: RunContext, components: Components, batch: dict) -> Conditioning:
        """Draw order: text-only flags (numpy), VAE posteriors of clip and condition (torch), CLIP drops (``rng``)."""
        masked = {"masked_moments": "mask_pixel_values"} if self.conditioned(ctx) else {}
        batch = shared.encode(ctx, batch, clips={"moments": "pixel_values", **masked},
                              moments=partial(self._moments, ctx, components),
                              embed=partial(self._embed, ctx, components))
        latents, inputs = self._clips(ctx, components, batch)
        return Conditioning(latents, self._prompts(ctx, components, batch), inputs)

    @torch.no_grad()
    def fill(self, ctx: RunContext, components: Components, batch: dict) -> None:
        if batch.get("text"):
            self._prompts(ctx, components, batch)
        if "source" in batch:
            self._clips(ctx, components, batch)

    def _clips(self, ctx: RunContext, components: Components, batch: dict) -> tuple[torch.Tensor, dict[str, Any]]:
        """Latents, and the denoiser's inputs made of pixels."""
        conditioned = self.conditioned(ctx)
        live = self._cache(ctx, LATENTS) is None and (conditioned or "moments" not in batch)
        keep = inpaint.drop_fully_masked(batch["mask"]) if conditioned else []
        inputs: dict[str, Any] = {}
        with ctx.residency.use(components.vae, components.image_encoder) if live else nullcontext():
            latents = self._latents(ctx, components, batch)
            if conditioned:
                inputs["y"] = inpaint.inpaint_channels(
                    batch["mask"], keep, latents=latents, encode=partial(self._masked_latents, ctx, components, batch),
                )
                inputs["clip_fea"] = inpaint.clip_context(
                    self._image_features(ctx, components, batch), drop=ctx.spec.options["clip_drop"], rng=ctx.rng.numpy
                )
        return latents, inputs

    def _cache(self, ctx: RunContext, kind: str) -> EncodingCache | None:
        return ctx.cache if ctx.cache is not None and ctx.cache.caches(kind) else None

    def _latents(self, ctx: RunContext, components: Components, batch: dict) -> torch.Tensor:
        cache = self._cache(ctx, LATENTS)
        if cache is None:
            return self._encode(ctx, components, batch, "pixel_values", ready="moments")
        moments = cached.batch_moments(
            cache, batch, encode=partial(self._moments, ctx, components), device=ctx.device
        )
        return cached.sample_posterior(moments, mini_batch=ctx.args.vae_mini_batch).to(ctx.weight_dtype)

    def _masked_latents(self, ctx: RunContext, components: Components, batch: dict) -> torch.Tensor:
        cache = self._cache(ctx, LATENTS)
        if cache is None:
            return self._encode(ctx, components, batch, "mask_pixel_values", ready="masked_moments")
        moments = cached.batch_moments(
            cache, batch, encode=partial(self._moments, ctx, components), device=ctx.device, ready="masked_moments",
            pixels="mask_pixel_values", parts=cached.masked_parts(cache, batch),
        )
        return cached.sample_posterior(moments, mini_batch=ctx.args.vae_mini_batch).to(ctx.weight_dtype)

    def _image_features(self, ctx: RunContext, components: Components, batch: dict) -> list[torch.Tensor]:
        def encode(picture: torch.Tensor) -> torch.Tensor:
            if components.image_encoder is None:
                logger.warning("A picture is not in the cache: the image encoder is loaded after all.")
                components.image_encoder = self._image_encoder(ctx).requires_grad_(False)
                ctx.residency.place(components.image_encoder)
            with ctx.residency.use(components.image_encoder):
                return inpaint.picture_features(picture, encoder=components.image_encoder, dtype=ctx.weight_dtype)

        cache = self._cache(ctx, IMAGE)
        if cache is None:
            return [inpaint.picture_features(picture, encoder=components.image_encoder, dtype=ctx.weight_dtype)
                    for picture in batch["clip_pixel_values"]]
        return cached.picture_features(cache, batch, encode=encode, device=ctx.device)

    def _encode(self, ctx: RunContext, components: Components, batch: dict, pixels: str, *, ready: str) -> torch.Tensor:
        from videox_fun.models.wan_vae import encode_videos

        if ready in batch:
            return cached.sample_posterior(batch[ready], mini_batch=ctx.args.vae_mini_batch).to(ctx.weight_dtype)
        pixels_BCFHW = batch[pixels].to(ctx.weight_dtype).transpose(1, 2)
        return encode_videos(components.vae, pixels_BCFHW, mini_batch=ctx.args.vae_mini_batch).to(ctx.weight_dtype)

    def _moments(self, ctx: RunContext, components: Components, pixels_BFCHW: torch.Tensor) -> torch.Tensor:
        """Posteriors ``[B, 2C, T, h, w]`` for the cache."""
        if components.vae is None:
            logger.warning("A clip is not in the cache: the VAE is loaded after all.")
            components.vae = self._vae(ctx).requires_grad_(False)
            ctx.residency.place(components.vae)
        pixels_BCFHW = pixels_BFCHW.to(ctx.weight_dtype).transpose(1, 2)
        with ctx.residency.use(components.vae):
            return torch.cat([components.vae.encode(chunk)[0].parameters
                              for chunk in pixels_BCFHW.split(ctx.args.vae_mini_batch)])

    def _prompts(self, ctx: RunContext, components: Components, batch: dict) -> Any:
        if "embeddings" in batch:
            return batch["embeddings"]
        cache = self._cache(ctx, TEXT)
        if cache is not None:
            embed = partial(self._embed, ctx, components)
            return cached.prompts(cache, batch["text"], encode=lambda prompt: embed([prompt])[0], device=ctx.device)
        ready = text.batch_prompts(batch, device=ctx.device, dtype=ctx.weight_dtype, untrimmed=ctx.compat)
        return ready if ready is not None else self._embed(ctx, components, batch["text"])

    def _embed(self, ctx: RunContext, components: Components, prompts: list[str]) -> list[torch.Tensor]:
        if components.text_encoder is None:
            logger.warning("A caption is not in the cache: the text encoder is loaded after all.")
            components.text_encoder = self._text_encoder(ctx).requires_grad_(False)
            ctx.residency.place(components.text_encoder)
        with ctx.residency.use(components.text_encoder):
            return text.encode_prompts(
                prompts, tokenizer=components.tokenizer, text_encoder=components.text_encoder,
                max_length=ctx.args.tokenizer_max_length, device=ctx.device,
            )

    def predict(
        self, ctx: RunContext, model: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor,
        conditioning: Conditioning,
    ) -> torch.Tensor:
        _, _, frames, height, width = noisy.shape
        with ctx.autocast():
            return model(
                x=noisy, context=conditioning.text, t=timesteps, seq_len=-(-frames * height * width // 4),
                **conditioning.inputs,
            )

    def validate(self, ctx: RunContext, components: Components, model: nn.Module, save: Any) -> None:
        from videox_fun.recipes.wan_sampling import sample_prompts

        sample_prompts(ctx, components, model, save, conditioned=self.conditioned(ctx))
