"""Prompt embeddings.

Prompts are padded to a fixed token count, encoded with their mask, and trimmed back to their own length; the denoiser
pads them again with zeros. Encoding can happen in the step, or in the loader's collate on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def tokenize(tokenizer: Any, prompts: Sequence[str], *, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, both ``[B, max_length]``; longer prompts are cut."""
    tokens = tokenizer(
        list(prompts), padding="max_length", max_length=max_length, truncation=True, add_special_tokens=True,
        return_tensors="pt",
    )
    return tokens.input_ids, tokens.attention_mask


@torch.no_grad()
def encode_prompts(
    prompts: Sequence[str], *, tokenizer: Any, text_encoder: nn.Module, max_length: int, device: torch.device
) -> list[torch.Tensor]:
    """Embeddings of each prompt, trimmed to its own token count: a list of ``[L_i, D]``."""
    ids, mask = tokenize(tokenizer, prompts, max_length=max_length)
    lengths = mask.sum(dim=1).tolist()  # host tensors: no device sync
    embeddings = text_encoder(ids.to(device), attention_mask=mask.to(device))[0]
    return [row[:length] for row, length in zip(embeddings, lengths, strict=True)]


class EncodingCollate:
    """Collate that also encodes the prompts, on the host (``--enable_text_encoder_in_dataloader``).

    With ``untrimmed`` the encoder gets no mask and padding embeddings are kept, as upstream does; otherwise the batch
    holds the same embeddings as encoding in the step.
    """

    def __init__(
        self, collate: Callable[[list], dict], *, tokenizer: Any, text_encoder: nn.Module, max_length: int,
        untrimmed: bool = False,
    ) -> None:
        self.collate = collate
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.max_length = max_length
        self.untrimmed = untrimmed

    def __call__(self, examples: list) -> dict:
        batch = self.collate(examples)
        ids, mask = tokenize(self.tokenizer, batch["text"], max_length=self.max_length)
        with torch.no_grad():
            embeddings = self.text_encoder(ids, attention_mask=None if self.untrimmed else mask)[0]
        batch["encoder_attention_mask"] = mask
        batch["encoder_hidden_states"] = embeddings
        return batch


def batch_prompts(batch: dict, *, device: torch.device, dtype: torch.dtype, untrimmed: bool = False) -> Any:
    """Embeddings that :class:`EncodingCollate` put into the batch, or ``None``."""
    if "encoder_hidden_states" not in batch:
        return None
    embeddings = batch["encoder_hidden_states"].to(device=device, dtype=dtype)
    if untrimmed:
        return embeddings
    lengths = batch["encoder_attention_mask"].sum(dim=1).tolist()
    return [row[:length] for row, length in zip(embeddings, lengths, strict=True)]
