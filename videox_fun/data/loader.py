"""Batches in the order a run needs them, resumable at any step.

**Order.** The batches of an epoch are dealt to the ranks in turn. One batch is always fetched ahead of the one that is
handed out, so the draws of batch n+1 come before the draws of step n. When the last round is short, the ranks left
over take the first batches of the epoch again: all ranks make the same number of steps.

**Randomness.** Without workers, items and collate draw from the process's own streams; the snapshot taken before the
pending fetch is part of the state, so that a resumed run fetches that batch again and gets the same one. With workers,
each batch has its own seeds from (seed, rank, epoch, number), whatever the number of workers; with ``upstream_compat``
each worker is seeded once, as upstream does, and such runs resume in order but not draw by draw. In the bucket mode
"balanced", sizes are drawn from (seed, epoch, number), alike on all ranks.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from videox_fun.data.module import DataModule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One batch of this rank: its number in the epoch, its rows, and its seeds (none: draw from what is there).

    ``shared`` seeds the draw of sizes alike on all ranks, where sizes are agreed upon.
    """

    number: int
    indices: tuple[int, ...]
    seeds: tuple[int, ...] | None
    shared: tuple[int, ...] | None = None
    after: dict[str, Any] = field(compare=False, repr=False, default_factory=dict)


class BatchDataset(Dataset):
    """Whole batches by request, so that a worker knows which batch it makes."""

    def __init__(self, module: DataModule) -> None:
        self.items = module.dataset
        self.collate = module.collate_fn
        self.drawing = self.collate  # the collate that holds a generator, inside whatever wraps it
        while self.drawing is not None and not hasattr(self.drawing, "rng"):
            self.drawing = getattr(self.drawing, "collate", None)

    def __getitem__(self, request: Request) -> dict[str, Any]:
        if request.seeds is not None:
            self._seed(request.seeds)
        if self.drawing is not None:
            self.drawing.size_rng = None if request.shared is None else np.random.default_rng(request.shared)
        return self.collate([self.items[index] for index in request.indices])

    def _seed(self, seeds: tuple[int, ...]) -> None:
        words = np.random.SeedSequence(seeds).generate_state(4)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        torch.default_generator.manual_seed(int(words[2]))  # not CUDA's: this may be a forked worker
        if self.drawing is not None:
            self.drawing.rng = np.random.Generator(np.random.PCG64(int(words[3])))


class _Requests(Sampler):
    """The requests of the current epoch, for a ``DataLoader`` that lives for the whole run."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Request]:
        return self.loader._requests()


class _SeedWorker:
    """Upstream's seeding of a worker: once, by rank and worker number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, worker_id: int) -> None:
        seed = self.seed * 256 + worker_id
        np.random.seed(seed)
        random.seed(seed)


def _as_is(batch: Any) -> Any:
    return batch


# Read on the host (is anything known at all? how long are the prompts?); fetching them back would wait for the device.
_HOST_KEYS = frozenset({"mask", "encoder_attention_mask"})


class TrainLoader:
    """The training batches of one rank. See the module's text for order and randomness."""

    def __init__(
        self,
        module: DataModule,
        *,
        rank: int,
        world: int,
        device: str | torch.device,
        seed: int,
        snapshot_rng: Callable[[], Any],
        restore_rng: Callable[[Any], None],
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self.module = module
        self.rank, self.world = rank, world
        self.device = torch.device(device)
        self.seed = seed
        self.wait_s = 0.0
        self._snapshot_rng, self._restore_rng = snapshot_rng, restore_rng
        self._workers = module.options.dataloader_num_workers
        self._pin = pin_memory and self.device.type == "cuda"
        self._prefetch_factor = prefetch_factor
        self._source = BatchDataset(module)
        self._torch_loader: DataLoader | None = None
        self._sent: deque[Request] = deque()
        self._epoch = 0
        self._state = self._fresh_state(0)
        self._entry: dict[str, Any] | None = None

    # -- sizes -------------------------------------------------------------------------------------------------------
    @property
    def steps_per_epoch(self) -> int:
        """Batches per rank and epoch when every batch is full. Leftovers of buckets make single epochs differ."""
        batches = len(self.module.batch_sampler)
        return max(batches // self.world if self._drops_short_round else -(-batches // self.world), 1)

    @property
    def _drops_short_round(self) -> bool:
        return self.module.options.upstream_compat and self.module.batch_sampler.drop_last

    # -- iteration ---------------------------------------------------------------------------------------------------
    def epoch(self, epoch: int) -> Iterator[tuple[dict[str, Any], bool]]:
        """The batches of an epoch as ``(batch, is_last)``; continues in the middle after ``load_state_dict``.

        An epoch that the loaded state has already finished gives nothing.
        """
        entry = self._entry
        if entry is not None and entry["epoch"] > epoch:
            return
        if entry is not None and entry["epoch"] < epoch:
            raise ValueError(f"the loader's state is in epoch {entry['epoch']}, but epoch {epoch} was asked for")
        self._epoch, self._entry = epoch, None
        self._enter(entry)
        fetches = self._fetch_with_workers() if self._workers else self._fetch_here(entry)
        try:
            yield from self._one_ahead(fetches)
        finally:
            fetches.close()

    def _one_ahead(self, fetches: Iterator[tuple[Request, Any, Any]]) -> Iterator[tuple[dict[str, Any], bool]]:
        started = time.perf_counter()
        pending = next(fetches, None)
        if pending is None:
            self._state = self._fresh_state(self._epoch + 1)
        while pending is not None:
            (request, batch, _), pending = pending, next(fetches, None)
            self.wait_s = time.perf_counter() - started
            self._state = self._fresh_state(self._epoch + 1) if pending is None else self._state_after(request, pending)
            yield self._to_device(batch), pending is None
            started = time.perf_counter()

    def _fetch_here(self, entry: dict[str, Any] | None) -> Iterator[tuple[Request, Any, Any]]:
        pending_rng = entry["pending_rng"] if entry is not None else None
        for request in self._requests():
            now = self._snapshot_rng()
            before = now if pending_rng is None else pending_rng
            if pending_rng is not None:
                self._restore_rng(pending_rng)
            batch = self._source[request]
            if pending_rng is not None:
                self._restore_rng(now)
                pending_rng = None
            yield request, batch, before

    def _fetch_with_workers(self) -> Iterator[tuple[Request, Any, Any]]:
        self._sent.clear()
        batches = iter(self._make_torch_loader())
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "exited unexpectedly" not in str(error) and "is killed by signal" not in str(error):
                    raise
                raise RuntimeError(self._crash_text(error)) from error
            yield self._sent.popleft(), batch, None

    def _crash_text(self, error: RuntimeError) -> str:
        rows = self.module.dataset.dataset
        asked = self._sent[0].indices if self._sent else ()
        files = [str(rows[index].get("file_path", index)) for index in asked]
        return (
            f"a data worker died while the batch with {files} was due ({error}). Usual reasons: no memory left, "
            "/dev/shm too small, or a file that crashes the decoder. --dataloader_num_workers 0 shows which one."
        )

    def _make_torch_loader(self) -> DataLoader:
        if self._torch_loader is None:
            options = self.module.options
            compat_seed = options.upstream_compat and options.worker_seeding
            self._torch_loader = DataLoader(
                self._source,
                sampler=_Requests(self),
                batch_size=None,
                collate_fn=_as_is,
                num_workers=self._workers,
                persistent_workers=True,
                prefetch_factor=self._prefetch_factor,
                pin_memory=self._pin,
                worker_init_fn=_SeedWorker(self.seed + self.rank) if compat_seed else None,
                # A generator of its own: the loader must not draw from the stream that the step draws from.
                generator=None if options.upstream_compat else torch.Generator().manual_seed(self.seed),
            )
        return self._torch_loader

    def _to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value if key in _HOST_KEYS else _move(value, self.device, non_blocking=self._pin)
            for key, value in batch.items()
        }

    # -- dealing -----------------------------------------------------------------------------------------------------
    def _enter(self, entry: dict[str, Any] | None) -> None:
        """Set the samplers to the start of the epoch, or to where ``entry`` says."""
        self.module.set_epoch(self._epoch, seed=self.seed)
        if entry is not None:
            self.module.batch_sampler.load_state_dict(entry["sampler"])
        self._head = [list(batch) for batch in entry["head"]] if entry is not None else []
        self._number = int(entry["number"]) if entry is not None else 0

    def _requests(self) -> Iterator[Request]:
        """This rank's share. ``after`` of a request is the state of the samplers once its round is dealt."""
        dealt: list[list[int]] = []
        for batch in self.module.batch_sampler:
            if len(self._head) < self.world:
                self._head.append(batch)
            dealt.append(batch)
            if len(dealt) == self.world:
                yield self._request(dealt)
                dealt = []
        if dealt and not self._drops_short_round:
            missing = self.world - len(dealt)
            dealt += [self._head[position % len(self._head)] for position in range(missing)]
            yield self._request(dealt)

    def _request(self, dealt: list[list[int]]) -> Request:
        options = self.module.options
        own_seeds = self._workers > 0 and not options.upstream_compat
        seeds = (self.seed, self.rank, self._epoch, self._number) if own_seeds else None
        after = {
            "epoch": self._epoch,
            "number": self._number + 1,
            "head": [list(batch) for batch in self._head],
            "sampler": self.module.batch_sampler.state_dict(),
        }
        shared = (self.seed, self._epoch, self._number) if options.bucket_mode == "balanced" else None
        request = Request(self._number, tuple(dealt[self.rank]), seeds, shared, after)
        self._number += 1
        if self._workers:
            self._sent.append(request)
        return request

    # -- state -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Where to continue: with the batch after the last one handed out.

        Plain values, except ``pending_rng``, which is whatever ``snapshot_rng`` returned before the pending batch was
        fetched (``None`` at the start of an epoch and with workers).
        """
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``: the next ``epoch(state["epoch"])`` starts there.

        The process's random streams must be restored before that ``epoch`` call begins to iterate.
        """
        self._state = dict(state)
        self._entry = dict(state)

    @property
    def sampler_position(self) -> tuple[int, int]:
        """``(rows handed out, epoch)``: the state in the two numbers that upstream saves."""
        return int(self._state["sampler"]["position"]), int(self._state["epoch"])

    def start_at(self, epoch: int, position: int) -> None:
        """Continue behind the first ``position`` rows of an epoch (a state that upstream saved)."""
        number = position // (self.module.options.train_batch_size * self.world)
        state = {**self._fresh_state(epoch), "number": number, "sampler": {"position": position, "buckets": {}}}
        self.load_state_dict(state)

    def _fresh_state(self, epoch: int) -> dict[str, Any]:
        sampler = {"position": 0, "buckets": self.module.batch_sampler.leftovers}
        return {"epoch": epoch, "number": 0, "head": [], "sampler": sampler, "pending_rng": None}

    def _state_after(self, request: Request, pending: tuple[Request, Any, Any]) -> dict[str, Any]:
        return {**request.after, "pending_rng": pending[2]}

    def close(self) -> None:
        """Stop the workers. Left to the garbage collector, they would each be waited for."""
        iterator, self._torch_loader = getattr(self._torch_loader, "_iterator", None), None
        if iterator is not None:
            iterator._shutdown_workers()


def _move(value: Any, device: torch.device, *, non_blocking: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, list) and value and all(isinstance(item, torch.Tensor) for item in value):
        return [item.to(device, non_blocking=non_blocking) for item in value]
    return value
