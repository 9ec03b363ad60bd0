"""Differences between processes. All should do the same work in the same way; where they do not, one waits for another.

Each process evaluates its own rows. Their states and a few numbers are gathered once per report, and what differs
becomes a finding of the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from optim_patches.audit.live_view import INERT, STATES, LiveRow, RunFacts
from optim_patches.audit.text import Text, join, same

#: Tokens of the busiest process over those of the idlest, from which on it is said.
_TOKENS_APART = 1.1
#: Share of time waiting for data, largest minus smallest.
_WAIT_APART = 0.1


@dataclass(frozen=True)
class RankNote:
    """What one process saw."""

    states: dict[str, str]
    sites: dict[str, int]
    evidence: dict[str, dict[str, str]]
    tokens: int
    micro_steps: int
    wait: float

    @classmethod
    def of(cls, rows: Sequence[LiveRow], facts: RunFacts) -> RankNote:
        return cls(
            states={row.id: row.state for row in rows},
            sites={row.id: row.sites for row in rows if row.sites is not None},
            evidence={row.id: row.evidence.as_dict() for row in rows if row.state == INERT},
            tokens=facts.tokens, micro_steps=facts.micro_steps,
            wait=facts.data_wait_s / facts.seconds if facts.seconds else 0.0,
        )  # fmt: skip


def gather(note: RankNote) -> list[RankNote]:
    """The notes of all processes, in the order of their ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [note]
    notes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, note)
    return notes


def differences(notes: Sequence[RankNote]) -> list[Text]:
    """One sentence per thing that is not the same on all processes."""
    if len(notes) < 2:
        return []
    found = []
    for row_id in notes[0].states:
        states = [note.states.get(row_id, "") for note in notes]
        sites = [note.sites.get(row_id) for note in notes]
        if len(set(states)) > 1:
            parts = _by_value(states)
            text = join(STATES[state] + _on(ranks) for state, ranks in parts.items() if state)
            told = [note.evidence[row_id] for note in notes if row_id in note.evidence]
            reasons = {text["en"]: text["zh"] for text in told}
            found.append(same(f"{row_id}: ") + text + join(Text(f" ({en})", f"（{zh}）") for en, zh in reasons.items()))
        elif len(set(sites)) > 1:
            counts = ", ".join(map(str, sites))
            found.append(Text(f"{row_id}: places changed per rank: {counts}", f"{row_id}：各 rank 的位置数：{counts}"))
    return found + _load(notes)


def _load(notes: Sequence[RankNote]) -> list[Text]:
    """Unequal work."""
    found = []
    tokens = [note.tokens / max(note.micro_steps, 1) for note in notes]
    if min(tokens) > 0 and max(tokens) > _TOKENS_APART * min(tokens):
        listing = ", ".join(f"{number:.0f}" for number in tokens)
        found.append(Text(f"G7: tokens per micro-step on ranks 0 to {len(notes) - 1}: {listing}; the others wait for "
                          f"rank {tokens.index(max(tokens))}",
                          f"G7：rank 0 至 {len(notes) - 1} 每微步 token 数：{listing}；其他进程等待 rank "
                          f"{tokens.index(max(tokens))}"))  # fmt: skip
    waits = [note.wait for note in notes]
    if max(waits) - min(waits) > _WAIT_APART:
        listing = ", ".join(f"{100 * wait:.0f} %" for wait in waits)
        found.append(Text(f"G1: time waiting for data per rank: {listing}", f"G1：各 rank 等待数据的时间：{listing}"))
    return found


def _by_value(values: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _on(ranks: list[int]) -> Text:
    listing = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return Text(f" on rank {listing}", f"（rank {listing}）")
