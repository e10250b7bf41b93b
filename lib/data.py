"""The batches that a model trains on, cut from token arrays.

torch is imported only where tensors are returned.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lib.token_array import Manifest, load_token_array, read_manifest, tokenize_file

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchSampler",
    "Manifest",
    "get_batch",
    "load_token_array",
    "random_tokens",
    "read_manifest",
    "read_windows",
    "take_windows",
    "tokenize_file",
]

ROUNDS = 8
# Steps whose windows are computed at once: the cost is in NumPy's calls, not in the numbers.
STEPS_AHEAD = 64


def get_batch(
    dataset: np.ndarray,
    batch_size: int,
    context_length: int,
    device: torch.device | str,
    *,
    generator: np.random.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows from random places of `dataset`, each place equally likely, and what follows.

    Args:
        dataset: token ids, (num_tokens,), any integer type; may be memory-mapped.
        generator: where the places come from; a fresh one, seeded by the system, by default.

    Returns:
        Inputs x and targets y, both (batch_size, context_length) int64 on `device`, where
        y[i, t] is the token that follows x[i, t] in `dataset`.

    Raises:
        ValueError: `dataset` is too short for one window.
    """
    _check_length(len(dataset), context_length)
    generator = generator or np.random.default_rng()
    starts = generator.integers(len(dataset) - context_length, size=batch_size)
    return take_windows(dataset, starts, context_length, device)


def take_windows(
    dataset: np.ndarray, starts: np.ndarray, context_length: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The windows of `dataset` that begin at `starts`, as `get_batch` returns them."""
    windows = read_windows(dataset, starts, context_length, device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def read_windows(
    dataset: np.ndarray, starts: np.ndarray, context_length: int, device: torch.device | str
) -> torch.Tensor:
    """Inputs and their last targets, (len(starts), context_length + 1) int64 on `device`."""
    import torch

    positions = starts[:, None] + np.arange(context_length + 1)
    windows = torch.from_numpy(dataset[positions].astype(np.int64))
    device = torch.device(device)
    if device.type == "cuda":
        # pinned memory lets the copy run beside what the GPU is doing
        return windows.pin_memory().to(device, non_blocking=True)
    return windows.to(device)


class BatchSampler:
    """Where the windows of each training step begin: every epoch each window once, shuffled.

    An epoch cuts the token array into windows of `context_length` that do not overlap (each
    target is the next window's first input, as it should be), from an offset of its own, and
    visits each exactly once in an order of its own. The windows form one endless sequence, epoch
    after epoch; a step takes the next `batch_size * world_size` of it, so that a step may span two
    epochs and none is left out. Rank r takes the r-th `batch_size` of these: the ranks share
    nothing, and see together what one process with the whole batch would see.

    The order comes from a keyed permutation that is computed where it is needed, so that no
    memory grows with the array, and a saved position is taken up at once, on any NumPy version
    and with any number of ranks.

    Args:
        num_tokens: length of the token array.
        context_length: inputs in a window; one token more is read for the last target.
        batch_size: windows per rank and step.
        seed: which orders and offsets.
        rank, world_size: which of how many processes this is.

    Raises:
        ValueError: an argument is out of range, the array is shorter than a window, or a step
            would need more windows than an epoch has.

    Example:
        >>> sampler = BatchSampler(num_tokens=1000, context_length=10, batch_size=4, seed=0)
        >>> sampler.next_starts().shape
        (4,)
    """

    def __init__(
        self,
        num_tokens: int,
        context_length: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_length(num_tokens, context_length)
        if batch_size < 1 or world_size < 1:
            raise ValueError(
                f"batch_size is {batch_size}, world_size is {world_size}; right: 1 or more"
            )
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank is {rank}; right with world_size {world_size}: 0 to {world_size - 1}"
            )
        # as many as there are after the largest offset, so that every epoch has the same number
        self.num_windows = max(1, (num_tokens - context_length) // context_length)
        last_offset = num_tokens - 1 - self.num_windows * context_length
        self.num_offsets = min(context_length, last_offset + 1)
        self.num_tokens, self.context_length, self.seed = num_tokens, context_length, seed
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.windows_seen = 0
        self._ahead = np.empty((0, batch_size), np.int64)
        if self.windows_per_step > self.num_windows:
            raise ValueError(
                f"batch_size {batch_size} * world_size {world_size} = {self.windows_per_step} "
                f"windows a step, but {num_tokens:,} tokens give only {self.num_windows:,} windows "
                f"of context_length {context_length}"
            )

    @property
    def windows_per_step(self) -> int:
        """Windows that all ranks take together in a step."""
        return self.batch_size * self.world_size

    @property
    def epoch(self) -> int:
        """The epoch that the next step begins in, from 0."""
        return self.windows_seen // self.num_windows

    def next_starts(self) -> np.ndarray:
        """Where this rank's windows of the next step begin: (batch_size,) int64."""
        if not len(self._ahead):
            first = self.windows_seen + self.rank * self.batch_size
            num_steps = min(STEPS_AHEAD, self.num_windows // self.windows_per_step)
            steps = first + self.windows_per_step * np.arange(num_steps)
            self._ahead = self._starts(steps[:, None] + np.arange(self.batch_size))
        starts, self._ahead = self._ahead[0], self._ahead[1:]
        self.windows_seen += self.windows_per_step
        return starts

    def _starts(self, places: np.ndarray) -> np.ndarray:
        """Where the windows at these places of the endless sequence begin, in the same shape."""
        epochs, places = places // self.num_windows, places % self.num_windows
        starts = np.empty(places.shape, np.int64)
        for epoch in np.unique(epochs):
            is_here = epochs == epoch
            *keys, offset_key = _keys(f"{self.seed} {epoch}", 2 * ROUNDS + 1)
            windows = _permute(places[is_here], self.num_windows, keys)
            starts[is_here] = int(offset_key) % self.num_offsets + windows * self.context_length
        return starts

    def state_dict(self) -> dict[str, int]:
        """The position, as plain JSON values; the same on every rank."""
        names = ("windows_seen", "num_tokens", "context_length", "seed")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave; batch_size and world_size may have changed.

        Raises:
            ValueError: it belongs to another array, context length or seed.
        """
        for name in ("num_tokens", "context_length", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved position has {name} {state[name]}, this sampler "
                    f"{getattr(self, name)}; right: the same data, context_length and seed"
                )
        self.windows_seen = state["windows_seen"]
        self._ahead = self._ahead[:0]


def random_tokens(num_tokens: int, vocab_size: int, seed: int) -> np.ndarray:
    """`num_tokens` ids, each of `vocab_size` about equally likely: uint16 or, if needed, uint32.

    For benchmarks, where the text does not matter. The same on every platform.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}; right: 1 or more")
    tokens = np.empty(num_tokens, np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    (key,) = _keys(f"{seed}", 1)
    block = 1 << 20
    for start in range(0, num_tokens, block):
        stop = min(start + block, num_tokens)
        tokens[start:stop] = _mix(np.arange(start, stop), key) % np.uint64(vocab_size)
    return tokens


def _permute(places: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """The images of `places` under a permutation of range(size) that looks random.

    A Feistel network on a grid of at least `size` cells: in turn the row is moved by a hash of the
    column and the column by a hash of the row, each of which can be undone. Who lands behind
    `size` goes on until inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    columns = np.uint64(math.isqrt(size - 1) + 1)
    rows = np.uint64(-(-size // int(columns)))
    images = places.astype(np.uint64)
    outside = np.ones(len(images), bool)
    while outside.any():
        row, column = np.divmod(images[outside], columns)
        for row_key, column_key in zip(keys[::2], keys[1::2]):
            row = (row + _mix(column, row_key) % rows) % rows
            column = (column + _mix(row, column_key) % columns) % columns
        images[outside] = row * columns + column
        outside = images >= size
    return images.astype(np.int64)


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """A hash of 64-bit numbers (the finalizer of splitmix64, Steele et al. 2014)."""
    mixed = values.astype(np.uint64) ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _keys(name: str, count: int) -> list[np.uint64]:
    """`count` 64-bit keys that depend on `name` alone, on any platform and NumPy version."""
    return list(np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * count), "<u8"))


def _check_length(num_tokens: int, context_length: int) -> None:
    if context_length < 1:
        raise ValueError(f"context_length is {context_length}; right: 1 or more")
    if num_tokens < context_length + 1:
        raise ValueError(
            f"context_length is {context_length:,}, which needs {context_length + 1:,} tokens; "
            f"the data has {num_tokens:,}"
        )
