"""What the flags do to a batch before it is encoded: tiling first, then cutting the clips, in upstream's draw order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from videox_fun.data import step_ops

if TYPE_CHECKING:
    from videox_fun.training.context import RunContext


def reshape(ctx: RunContext, batch: dict, *, temporal_ratio: int, tile: bool) -> dict:
    """Apply ``--auto_tile_batch_size``, ``--random_frame_crop`` and ``--keep_all_node_same_token_length``.

    Args:
        ctx: the run.
        batch: of the collate; batches without pixels (prompts only) pass unchanged.
        temporal_ratio: pixel frames per latent frame.
        tile: whether tiling is possible (ZeRO-3 needs equal shapes on all ranks).
    """
    args = ctx.args
    if "pixel_values" not in batch:
        return batch
    if args.auto_tile_batch_size and args.training_with_video_token_length and tile:
        batch = step_ops.auto_tile_batch(
            batch, n_frames=args.video_sample_n_frames, token_sample_size=args.token_sample_size
        )
    if args.random_frame_crop:
        batch = step_ops.random_frame_crop(
            batch, rng=ctx.rng.numpy, n_frames=args.video_sample_n_frames, temporal_ratio=temporal_ratio,
            upstream_compat=ctx.compat,
        )
    if args.keep_all_node_same_token_length:
        batch = step_ops.keep_all_node_same_token_length(
            batch, index_rng=ctx.rng.index, n_frames=args.video_sample_n_frames,
            token_sample_size=args.token_sample_size, temporal_ratio=temporal_ratio, upstream_compat=ctx.compat,
        )
    return batch
