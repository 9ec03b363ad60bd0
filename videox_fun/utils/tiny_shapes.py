"""Names and shapes of every tensor in the published Wan files, as functions of the sizes.

Each function lists ``(name, shape)`` in the order in which the original modules register their parameters. Random
weights drawn in that order are the same wherever they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]
Params = list[tuple[str, Shape]]

CLIP_DIM = 1280
_DIM_MULT = (1, 2, 4, 4)
_TIME_FREQUENCIES = 256
_CAMERA_CHANNELS = 24
_CAMERA_DOWNSCALE = 8


def _affine(name: str, shape: Shape) -> Params:
    return [(f"{name}.weight", shape), (f"{name}.bias", shape[:1])]


def transformer(
    *, dim: int, ffn_dim: int, num_layers: int, in_dim: int, out_dim: int, text_dim: int, clip: bool = False,
    ref_conv: bool = False, camera: bool = False,
) -> Params:
    """A denoiser; ``clip`` adds the image branch, ``ref_conv`` and ``camera`` the Fun-Control inputs."""
    params = [
        *_affine("patch_embedding", (dim, in_dim, 1, 2, 2)),
        *_affine("text_embedding.0", (dim, text_dim)), *_affine("text_embedding.2", (dim, dim)),
        *_affine("time_embedding.0", (dim, _TIME_FREQUENCIES)), *_affine("time_embedding.2", (dim, dim)),
        *_affine("time_projection.1", (6 * dim, dim)),
    ]
    for index in range(num_layers):
        params += _transformer_block(f"blocks.{index}", dim, ffn_dim, clip)
    params += [("head.modulation", (1, 2, dim)), *_affine("head.head", (4 * out_dim, dim))]
    if clip:
        params += [
            *_affine("img_emb.proj.0", (CLIP_DIM,)), *_affine("img_emb.proj.1", (CLIP_DIM, CLIP_DIM)),
            *_affine("img_emb.proj.3", (dim, CLIP_DIM)), *_affine("img_emb.proj.4", (dim,)),
        ]
    if ref_conv:
        params += _affine("ref_conv", (dim, 16, 2, 2))
    if camera:
        params += [
            *_affine("control_adapter.conv", (dim, _CAMERA_CHANNELS * _CAMERA_DOWNSCALE**2, 2, 2)),
            *_affine("control_adapter.residual_blocks.0.conv1", (dim, dim, 3, 3)),
            *_affine("control_adapter.residual_blocks.0.conv2", (dim, dim, 3, 3)),
        ]
    return params


def _transformer_block(name: str, dim: int, ffn_dim: int, clip: bool) -> Params:
    def attention(kind: str) -> Params:
        layers = [pair for layer in "qkvo" for pair in _affine(f"{name}.{kind}.{layer}", (dim, dim))]
        return layers + [(f"{name}.{kind}.{norm}.weight", (dim,)) for norm in ("norm_q", "norm_k")]

    image = [
        *_affine(f"{name}.cross_attn.k_img", (dim, dim)), *_affine(f"{name}.cross_attn.v_img", (dim, dim)),
        (f"{name}.cross_attn.norm_k_img.weight", (dim,)),
    ]
    return [
        (f"{name}.modulation", (1, 6, dim)), *attention("self_attn"), *_affine(f"{name}.norm3", (dim,)),
        *attention("cross_attn"), *(image if clip else []),
        *_affine(f"{name}.ffn.0", (ffn_dim, dim)), *_affine(f"{name}.ffn.2", (dim, ffn_dim)),
    ]


def text_encoder(*, vocab: int, dim: int, dim_attn: int, dim_ffn: int, num_heads: int, num_layers: int,
                 num_buckets: int) -> Params:
    """The UMT5 encoder with one position table per block."""
    params: Params = [("token_embedding.weight", (vocab, dim))]
    for index in range(num_layers):
        name = f"blocks.{index}"
        params += [
            (f"{name}.norm1.weight", (dim,)),
            *((f"{name}.attn.{layer}.weight", (dim_attn, dim)) for layer in "qkv"),
            (f"{name}.attn.o.weight", (dim, dim_attn)),
            (f"{name}.norm2.weight", (dim,)),
            (f"{name}.ffn.gate.0.weight", (dim_ffn, dim)), (f"{name}.ffn.fc1.weight", (dim_ffn, dim)),
            (f"{name}.ffn.fc2.weight", (dim, dim_ffn)),
            (f"{name}.pos_embedding.embedding.weight", (num_buckets, num_heads)),
        ]
    return [*params, ("norm.weight", (dim,))]


def image_encoder(
    *, vision_layers: int, vision_dim: int = CLIP_DIM, vision_mlp_dim: int = 128, image_size: int = 224,
    patch_size: int = 14, embed_dim: int = 16, vocab_size: int = 50, max_text_len: int = 20, text_dim: int = 16,
    text_layers: int = 1,
) -> Params:
    """Both halves of the CLIP model; Wan uses the image half."""
    tokens, dim = (image_size // patch_size) ** 2 + 1, vision_dim
    params: Params = [
        ("log_scale", ()), ("visual.cls_embedding", (1, 1, dim)), ("visual.pos_embedding", (1, tokens, dim)),
        ("visual.head", (dim, embed_dim)), ("visual.patch_embedding.weight", (dim, 3, patch_size, patch_size)),
        *_affine("visual.pre_norm", (dim,)),
    ]
    for index in range(vision_layers):
        name = f"visual.transformer.{index}"
        params += [
            *_affine(f"{name}.norm1", (dim,)), *_affine(f"{name}.attn.to_qkv", (3 * dim, dim)),
            *_affine(f"{name}.attn.proj", (dim, dim)), *_affine(f"{name}.norm2", (dim,)),
            *_affine(f"{name}.mlp.0", (vision_mlp_dim, dim)), *_affine(f"{name}.mlp.2", (dim, vision_mlp_dim)),
        ]
    return [*params, *_affine("visual.post_norm", (dim,)),
            *_clip_text(vocab_size, max_text_len, text_dim, embed_dim, text_layers)]


def _clip_text(vocab: int, length: int, dim: int, embed_dim: int, layers: int) -> Params:
    params: Params = [
        ("textual.token_embedding.weight", (vocab, dim)), ("textual.type_embedding.weight", (1, dim)),
        ("textual.pos_embedding.weight", (length, dim)),
    ]
    for index in range(layers):
        name = f"textual.blocks.{index}"
        params += [
            *(pair for layer in "qkvo" for pair in _affine(f"{name}.attn.{layer}", (dim, dim))),
            *_affine(f"{name}.norm1", (dim,)), *_affine(f"{name}.ffn.0", (4 * dim, dim)),
            *_affine(f"{name}.ffn.2", (dim, 4 * dim)), *_affine(f"{name}.norm2", (dim,)),
        ]
    middle = (dim + embed_dim) // 2
    return [*params, *_affine("textual.norm", (dim,)), ("textual.head.0.weight", (middle, dim)),
            ("textual.head.2.weight", (embed_dim, middle))]


# -------------------------------------------------------------------------------------------------------------- VAEs


def vae21(*, dim: int, z_dim: int = 16) -> Params:
    """The VAE of Wan 2.1: one flat list of layers per side."""
    return [
        *_affine("encoder.conv1", (dim, 3, 3, 3, 3)), *_flat(_encoder_layers(dim), "encoder.downsamples"),
        *_middle("encoder", 4 * dim), *_vae_head("encoder.head", 4 * dim, 2 * z_dim),
        *_affine("conv1", (2 * z_dim, 2 * z_dim, 1, 1, 1)), *_affine("conv2", (z_dim, z_dim, 1, 1, 1)),
        *_affine("decoder.conv1", (4 * dim, z_dim, 3, 3, 3)), *_middle("decoder", 4 * dim),
        *_flat(_decoder_layers(dim, halve=True), "decoder.upsamples"), *_vae_head("decoder.head", dim, 3),
    ]


def vae22(*, dim: int, dec_dim: int, z_dim: int = 48) -> Params:
    """The VAE of Wan 2.2: layers nested in levels, pixels folded 2x2 into 12 channels."""
    return [
        *_affine("encoder.conv1", (dim, 12, 3, 3, 3)), *_levels(_encoder_layers(dim), "encoder", "downsamples"),
        *_middle("encoder", 4 * dim), *_vae_head("encoder.head", 4 * dim, 2 * z_dim),
        *_affine("conv1", (2 * z_dim, 2 * z_dim, 1, 1, 1)), *_affine("conv2", (z_dim, z_dim, 1, 1, 1)),
        *_affine("decoder.conv1", (4 * dec_dim, z_dim, 3, 3, 3)), *_middle("decoder", 4 * dec_dim),
        *_levels(_decoder_layers(dec_dim, halve=False), "decoder", "upsamples"),
        *_vae_head("decoder.head", dec_dim, 12),
    ]


# A layer is its parameters with names relative to it; a level is a list of layers.
Level = list[Params]


def _encoder_layers(dim: int) -> Iterator[Level]:
    widths = [dim * factor for factor in (1, *_DIM_MULT)]
    times = (False, True, True, None)
    for cin, cout, time in zip(widths[:-1], widths[1:], times, strict=True):
        level = [_residual(cin, cout), _residual(cout, cout)]
        if time is not None:
            level.append(_resample(cout, cout) + (_affine("time_conv", (cout, cout, 3, 1, 1)) if time else []))
        yield level


def _decoder_layers(dim: int, *, halve: bool) -> Iterator[Level]:
    """``halve``: the up-sampler of a level halves the channels (2.1)."""
    widths = [dim * factor for factor in (_DIM_MULT[-1], *reversed(_DIM_MULT))]
    times = (True, True, False, None)
    for index, (cin, cout, time) in enumerate(zip(widths[:-1], widths[1:], times, strict=True)):
        if halve and index:
            cin //= 2
        level = [_residual(cin, cout), _residual(cout, cout), _residual(cout, cout)]
        if time is not None:
            temporal = _affine("time_conv", (2 * cout, cout, 3, 1, 1)) if time else []
            level.append(_resample(cout // 2 if halve else cout, cout) + temporal)
        yield level


def _residual(cin: int, cout: int) -> Params:
    shortcut = _affine("shortcut", (cout, cin, 1, 1, 1)) if cin != cout else []
    return [
        ("residual.0.gamma", (cin, 1, 1, 1)), *_affine("residual.2", (cout, cin, 3, 3, 3)),
        ("residual.3.gamma", (cout, 1, 1, 1)), *_affine("residual.6", (cout, cout, 3, 3, 3)), *shortcut,
    ]


def _resample(cout: int, cin: int) -> Params:
    return _affine("resample.1", (cout, cin, 3, 3))


def _middle(side: str, dim: int) -> Params:
    name = f"{side}.middle"
    return [
        *_named(f"{name}.0", _residual(dim, dim)),
        (f"{name}.1.norm.gamma", (dim, 1, 1)), *_affine(f"{name}.1.to_qkv", (3 * dim, dim, 1, 1)),
        *_affine(f"{name}.1.proj", (dim, dim, 1, 1)),
        *_named(f"{name}.2", _residual(dim, dim)),
    ]


def _vae_head(name: str, cin: int, cout: int) -> Params:
    return [(f"{name}.0.gamma", (cin, 1, 1, 1)), *_affine(f"{name}.2", (cout, cin, 3, 3, 3))]


def _named(prefix: str, params: Sequence[tuple[str, Shape]]) -> Params:
    return [(f"{prefix}.{name}", shape) for name, shape in params]


def _flat(levels: Iterator[Level], prefix: str) -> Params:
    layers = [layer for level in levels for layer in level]
    return [pair for index, layer in enumerate(layers) for pair in _named(f"{prefix}.{index}", layer)]


def _levels(levels: Iterator[Level], side: str, group: str) -> Params:
    return [
        pair
        for index, level in enumerate(levels)
        for position, layer in enumerate(level)
        for pair in _named(f"{side}.{group}.{index}.{group}.{position}", layer)
    ]
