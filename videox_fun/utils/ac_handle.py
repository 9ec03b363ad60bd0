"""Selective activation checkpointing under the import path that training scripts use."""

from __future__ import annotations

from functools import partial

from videox_fun.utils.checkpointing import apply_checkpointing

__all__ = ["apply_checkpointing", "partial"]
