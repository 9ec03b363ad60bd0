"""Batches planned for a whole epoch: every row once, and ranks that finish together.

``--bucket_mode upstream`` (``bucket_sampler``) emits a bucket when it is full and keeps what is left over for the next
epoch. The two modes here sort the epoch's permutation into the same buckets, but close them at its end:

* ``complete``: full batches in the order in which they fill up, then the short ones. When their number does not divide
  by the ranks, the largest batches are halved until it does, so that nothing is seen twice; only when all hold one row
  are rows repeated (fewer than there are ranks). All ranks make the same number of steps.
* ``balanced``: in addition, clips of different lengths do not share a batch (it would be cut to the shortest), and the
  batches that the ranks work on at the same time are neighbours in cost. Rounds are shuffled. Random sizes are drawn
  alike on all ranks of a round (see ``loader``).

The cost of a batch is that of its tokens: a part that grows with them, and attention, which grows with their square;
``9 x width`` tokens is where both are equal in a DiT block (36 d² against 4 d n per token).

A plan follows from the permutation alone. The state is the number of batches handed out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from videox_fun.data.bucket_sampler import ResumableBatchSampler
from videox_fun.data.decode import DecodeError
from videox_fun.data.metadata import is_video, to_rate, to_size
from videox_fun.data.probe import probe_media

if TYPE_CHECKING:
    from videox_fun.data.module import DataOptions

logger = logging.getLogger(__name__)

BUCKET_MODES = ("upstream", "complete", "balanced")

Batches = list[list[int]]


def split_evenly(batches: Batches, *, world: int, cost: Callable[[Sequence[int]], float]) -> Batches:
    """``batches`` in a number that ``world`` divides: the costliest are halved; single rows are repeated at need."""
    found = [list(batch) for batch in batches]
    first = len(found)
    for _ in range(-first % world):
        place = max((position for position, batch in enumerate(found) if len(batch) > 1), default=None,
                    key=lambda position: (cost(found[position]), len(found[position]), -position))  # fmt: skip
        if place is None:
            found.append(list(found[len(found) % first]))
        else:
            half = (len(found[place]) + 1) // 2
            found[place], rest = found[place][:half], found[place][half:]
            found.append(rest)
    return found


def in_rounds(
    batches: Batches, *, world: int, cost: Callable[[Sequence[int]], float], generator: torch.Generator
) -> Batches:
    """Neighbours in cost side by side, ``world`` at a time; rounds, and places within them, in random order."""
    tie = torch.randperm(len(batches), generator=generator).tolist()
    order = sorted(range(len(batches)), key=lambda place: (cost(batches[place]), tie[place]))
    rounds = [order[start : start + world] for start in range(0, len(order), world)]
    found: Batches = []
    for number in torch.randperm(len(rounds), generator=generator).tolist():
        places = torch.randperm(len(rounds[number]), generator=generator).tolist()
        found += [batches[rounds[number][place]] for place in places]
    return found


class PlannedBatchSampler(ResumableBatchSampler):
    """The modes ``complete`` and, with ``row_cost``, ``balanced``.

    Args:
        inner: says in ``bucket_of`` where an index belongs.
        world: number of ranks that the batches are dealt to in turn.
        row_cost: cost of a row, and what besides its bucket it must share with the rows of its batch.
    """

    def __init__(
        self, inner: ResumableBatchSampler, *, world: int,
        row_cost: Callable[[int], tuple[float, Any]] | None = None,
    ) -> None:
        super().__init__(inner.sampler, inner.batch_size, drop_last=False)
        self.inner = inner
        self.world = world
        self.row_cost = row_cost
        self._places: dict[int, tuple[Any, float] | None] = {}
        self._done = 0
        self._rows_done = 0

    def bucket_of(self, index: int) -> str | None:
        return self.inner.bucket_of(index)

    def place_of(self, index: int) -> tuple[Any, float] | None:
        """Bucket and cost of an index, ``None`` for one that cannot be used. Found out once."""
        if index not in self._places:
            name = self.bucket_of(index)
            cost, apart = self.row_cost(index) if self.row_cost is not None and name is not None else (1.0, None)
            self._places[index] = None if name is None or cost <= 0 else ((name, apart), cost)
        return self._places[index]

    def cost_of(self, batch: Sequence[int]) -> float:
        return sum(self._places[index][1] for index in batch)

    def plan(self, order: Sequence[int], *, generator: torch.Generator | None = None) -> Batches:
        """The batches of an epoch whose rows come in ``order``; rank ``r`` of ``n`` gets each ``n``-th from ``r``."""
        full: Batches = []
        open_buckets: dict[Any, list[int]] = {}
        for index in order:
            place = self.place_of(index)
            if place is None:
                continue
            bucket = open_buckets.setdefault(place[0], [])
            bucket.append(index)
            if len(bucket) == self.batch_size:
                full.append(open_buckets.pop(place[0]))
        batches = split_evenly([*full, *open_buckets.values()], world=self.world, cost=self.cost_of)
        if self.row_cost is None:
            return batches
        return in_rounds(batches, world=self.world, cost=self.cost_of, generator=generator or torch.Generator())

    def __iter__(self) -> Iterator[list[int]]:
        start, self._done, self._rows_done = self._done, 0, 0
        if hasattr(self.sampler, "_pos_start"):
            self.sampler._pos_start = 0
        batches = self.plan(list(self.sampler), generator=getattr(self.sampler, "generator", None))
        for number, batch in enumerate(batches):
            self._done, self._rows_done = number + 1, self._rows_done + len(batch)
            if number >= start:
                yield list(batch)
        self._done = self._rows_done = 0

    def __len__(self) -> int:
        """Batches of an epoch. All rows are looked at, once."""
        sizes = self.bucket_sizes().values()
        batches = sum(-(-size // self.batch_size) for size in sizes)
        return -(-batches // self.world) * self.world

    def bucket_sizes(self) -> Counter[Any]:
        """Rows of each bucket."""
        places = (self.place_of(index) for index in range(len(self.sampler.data_source)))
        return Counter(place[0] for place in places if place is not None)

    # -- state -------------------------------------------------------------------------------------------------------
    @property
    def leftovers(self) -> dict[str, list[int]]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._rows_done, "buckets": {}, "batches": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind ``batches``; a state of the mode ``upstream`` has none and starts the epoch over."""
        if int(state.get("position", 0)) and "batches" not in state:
            logger.warning("The saved position is one of --bucket_mode upstream: this epoch starts over.")
        self._done = int(state.get("batches", 0))

    # -- telling -----------------------------------------------------------------------------------------------------
    def lines(self) -> list[str]:
        """What an epoch looks like, for the summary before a run."""
        sizes = self.bucket_sizes()
        rows, size = sum(sizes.values()), self.batch_size
        before = sum(-(-count // size) for count in sizes.values())
        after = len(self)
        short = sum(count % size > 0 for count in sizes.values())
        unusable = len(self.sampler.data_source) - rows
        text = [f"every row once per epoch: {rows} rows in {after} batches, {after // self.world} steps on each of "
                f"{self.world} rank(s); {short} short batch(es)" + (f", {unusable} rows left out" if unusable else "")]
        if after > before:
            repeated = max(after - rows, 0)
            text.append(f"{after - before - repeated} batch(es) are split and {repeated} row(s) repeated so that all "
                        "ranks make as many steps")  # fmt: skip
        return text


class RowCost:
    """Cost of a row by its tokens, from the size and length that the flags give it (their mean if several)."""

    def __init__(self, rows: Sequence[dict[str, Any]], options: DataOptions, *, sizes: Callable, width: int) -> None:
        self.rows = rows
        self.options = options
        self.sizes = sizes
        self.equal_at = 9.0 * width
        self._known: dict[tuple, float] = {}

    def __call__(self, index: int) -> tuple[float, Any]:
        """``(cost, length)``; a cost of 0 for a clip that is too short or cannot be opened."""
        row = self.rows[index]
        kind = "video" if is_video(row) else "image"
        size = self.sizes(index, row)
        frames = self._frames(row) if kind == "video" else 1
        if size is None or frames == 0:
            return 0.0, None
        key = (kind, *size, frames)
        if key not in self._known:
            self._known[key] = self._cost(*key)
        return self._known[key], frames

    def _frames(self, row: dict[str, Any]) -> int:
        """Frames read of a clip; the file is opened when the row does not say how many it has."""
        from videox_fun.data.bucket_sampler import resolve
        from videox_fun.data.summary import frames_read

        options, length, fps = self.options, to_size(row.get("frames")), to_rate(row.get("fps"))
        if length is None or (fps is None and options.video_sample_fps is not None):
            path = resolve(row["file_path"], options.train_data_dir)
            try:
                info = probe_media(path, kind="video", upstream_compat=options.upstream_compat)
            except (DecodeError, OSError):
                return 0
            length, fps = info.frames, info.fps
        return frames_read(length, fps or 0.0, options)

    def _cost(self, kind: str, height: int, width: int, frames: int) -> float:
        from videox_fun.data.summary import outcomes

        found = [self.of_tokens(self.tokens(outcome.height, outcome.width, outcome.frames))
                 for outcome in outcomes(kind, height, width, frames, self.options)]
        return sum(found) / max(len(found), 1)

    def tokens(self, height: int, width: int, frames: int) -> float:
        """Tokens of a clip: latent frames times squares of ``size_quantum``."""
        ratio = self.options.temporal_ratio
        return ((frames - 1) // ratio + 1) * height * width / self.options.size_quantum**2

    def of_tokens(self, tokens: float) -> float:
        return tokens * (1.0 + tokens / self.equal_at)
