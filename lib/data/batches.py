"""Batches for training, cut from token arrays.

A sequence is `context_length + 1` consecutive tokens: the inputs and, one later, the targets.
`get_batch` draws sequences at random; `BatchSampler` visits each once per epoch, as training does.
torch is imported only where tensors are returned.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lib.core.settings import whole_number

if TYPE_CHECKING:
    import torch

# rounds of the Feistel network that shuffles an epoch
ROUNDS = 8
# steps whose sequences are computed at once: the cost is in the NumPy calls, not in the numbers
STEPS_AHEAD = 64


def get_batch(
    dataset: np.ndarray,
    batch_size: int,
    context_length: int,
    device: torch.device | str,
    *,
    generator: np.random.Generator | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample training sequences from random offsets of `dataset`, all equally likely.

    Args:
        dataset: token ids, (num_tokens,), any integer type; may be memory-mapped.
        generator: draws the offsets, or its seed; by default a new one, seeded by the system.

    Returns:
        Inputs x and targets y, both (batch_size, context_length) int64 on `device`, where
        y[i, t] is the token that follows x[i, t] in `dataset`.

    Raises:
        ValueError: `dataset` is shorter than one sequence or no array of integers; or a size is no
            whole number, at least 1.
    """
    batch_size = whole_number("batch_size", batch_size, least=1)
    _check_length(len(dataset), context_length)
    generator = np.random.default_rng(generator)
    starts = generator.integers(len(dataset) - context_length, size=batch_size)
    return take_sequences(dataset, starts, context_length, device)


def take_sequences(
    dataset: np.ndarray, starts: np.ndarray, context_length: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of the sequences that begin at `starts`, like `get_batch`."""
    is_row = isinstance(dataset, np.ndarray) and dataset.ndim == 1 and dataset.dtype.kind in "iu"
    if not is_row:
        kind = getattr(dataset, "dtype", "no dtype")
        raise ValueError(
            "dataset must be a one-dimensional NumPy array of integers, got "
            f"{type(dataset).__name__} of {kind}, shape {np.shape(dataset)}"
        )
    sequences = read_sequences(dataset, starts, context_length, device)
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def read_sequences(
    dataset: np.ndarray, starts: np.ndarray, context_length: int, device: torch.device | str
) -> torch.Tensor:
    """Return the sequences that begin at `starts`: (len(starts), context_length + 1) int64.

    Raises:
        ValueError: a sequence does not begin and end in `dataset`.
    """
    import torch

    # NumPy would count a negative start from the end
    last = len(dataset) - context_length - 1
    starts = np.asarray(starts)
    if starts.dtype.kind not in "iu" or ((starts < 0) | (starts > last)).any():
        raise ValueError(f"starts must be whole numbers from 0 to {last}, got {starts}")

    # the tokens from each start on: (batch, context_length + 1)
    indices = starts.astype(np.int64)[:, None] + np.arange(context_length + 1)
    sequences = torch.from_numpy(dataset[indices].astype(np.int64))
    device = torch.device(device)
    if device.type == "cuda":
        # from pinned memory, the copy overlaps with work on the GPU
        return sequences.pin_memory().to(device, non_blocking=True)
    return sequences.to(device)


class BatchSampler:
    """The offsets of each step's sequences: every epoch visits each sequence once, shuffled.

    An epoch cuts the token array into sequences whose inputs do not overlap (the last target of one
    is the first input of the next, as it should be), beginning at an offset of its own, and visits
    each exactly once in an order of its own. Epochs follow one another without end. A step takes
    the next `batch_size * world_size` sequences, so a step may span two epochs and no sequence is
    left out. Rank r takes the r-th `batch_size` of these: ranks share nothing, and together see
    what one process with the whole batch would see.

    The order is a keyed permutation that is computed on the fly, so memory does not grow with the
    array, and a saved position resumes at once, on any NumPy version and any number of ranks.

    Args:
        num_tokens: length of the token array.
        context_length: inputs per sequence; one more token is read for the last target.
        batch_size: sequences per rank and step.
        seed: selects orders and offsets.
        rank, world_size: this process among all processes.

    Raises:
        ValueError: an argument is no whole number or out of range, the array is shorter than a
            sequence, or a step needs more sequences than an epoch has.

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
        # Python's integers, since JSON would not take NumPy's
        num_tokens = whole_number("num_tokens", num_tokens, least=0)
        context_length = _check_length(num_tokens, context_length)
        batch_size = whole_number("batch_size", batch_size, least=1)
        seed = whole_number("seed", seed, least=0)
        world_size = whole_number("world_size", world_size, least=1)
        rank = whole_number("rank", rank, least=0)
        if rank >= world_size:
            raise ValueError(
                f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}"
            )
        # as many as fit behind the largest offset, so that every epoch has the same number
        self.num_sequences = max(1, (num_tokens - context_length) // context_length)
        last_offset = num_tokens - 1 - self.num_sequences * context_length
        self.num_offsets = min(context_length, last_offset + 1)
        self.num_tokens, self.context_length, self.seed = num_tokens, context_length, seed
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.windows_seen = 0
        # sequences that all ranks together take in a step
        self.sequences_per_step = batch_size * world_size
        # offsets of the next steps, (steps, batch_size)
        self._ahead = np.empty((0, batch_size), np.int64)
        if self.sequences_per_step > self.num_sequences:
            raise ValueError(
                f"batch_size {batch_size} * world_size {world_size} = {self.sequences_per_step} "
                f"sequences per step, but {num_tokens:,} tokens give only {self.num_sequences:,} "
                f"sequences of context_length {context_length}"
            )

    @property
    def epoch(self) -> int:
        """The epoch that the next step begins in, from 0."""
        return self.windows_seen // self.num_sequences

    def next_starts(self) -> np.ndarray:
        """Return the offsets of this rank's sequences in the next step: (batch_size,) int64."""
        if not len(self._ahead):
            first = self.windows_seen + self.rank * self.batch_size
            num_steps = min(STEPS_AHEAD, self.num_sequences // self.sequences_per_step)
            steps = first + self.sequences_per_step * np.arange(num_steps)
            # (steps, batch_size)
            self._ahead = self._offsets(steps[:, None] + np.arange(self.batch_size))
        starts, self._ahead = self._ahead[0], self._ahead[1:]
        self.windows_seen += self.sequences_per_step
        return starts

    def _offsets(self, indices: np.ndarray) -> np.ndarray:
        """Map the sequences numbered `indices`, over all epochs, to offsets in the same shape."""
        epochs, indices = indices // self.num_sequences, indices % self.num_sequences
        offsets = np.empty(indices.shape, np.int64)
        for epoch in np.unique(epochs):
            is_here = epochs == epoch
            *keys, offset_key = _keys(f"{self.seed} {epoch}", 2 * ROUNDS + 1)
            sequences = _permute(indices[is_here], self.num_sequences, keys)
            offsets[is_here] = int(offset_key) % self.num_offsets + sequences * self.context_length
        return offsets

    def state_dict(self) -> dict[str, int]:
        """Return the position as plain JSON values, the same on every rank."""
        names = ("windows_seen", "num_tokens", "context_length", "seed")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a position from `state_dict`; batch_size and world_size may have changed.

        Raises:
            ValueError: it belongs to another array, context length or seed.
        """
        for name in ("num_tokens", "context_length", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"{name} must be {state[name]} as in the saved position, "
                    f"got {getattr(self, name)}"
                )
        self.windows_seen = state["windows_seen"]
        self._ahead = self._ahead[:0]


def random_tokens(num_tokens: int, vocab_size: int, seed: int) -> np.ndarray:
    """Make `num_tokens` uniformly distributed ids: uint16, or uint32 for a large `vocab_size`.

    For benchmarks, where the text does not matter. The same on every platform.
    """
    vocab_size = whole_number("vocab_size", vocab_size, least=1)
    tokens = np.empty(num_tokens, np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    (key,) = _keys(f"{seed}", 1)
    block = 1 << 20
    for start in range(0, num_tokens, block):
        stop = min(start + block, num_tokens)
        tokens[start:stop] = _mix(np.arange(start, stop), key) % np.uint64(vocab_size)
    return tokens


def _permute(indices: np.ndarray, size: int, keys: list[np.uint64]) -> np.ndarray:
    """Map `indices` through a pseudorandom permutation of range(size).

    A Feistel network on a grid of at least `size` cells: each round shifts the row by a hash of the
    column, then the column by a hash of the row, both of which can be undone. An index that lands
    at or beyond `size` goes through again until it is inside (cycle walking: Black and Rogaway
    2002, "Ciphers with Arbitrary Finite Domains").
    """
    columns = np.uint64(math.isqrt(size - 1) + 1)
    rows = np.uint64(-(-size // int(columns)))
    images = indices.astype(np.uint64)
    is_outside = np.ones(len(images), bool)
    while is_outside.any():
        row, column = np.divmod(images[is_outside], columns)
        for row_key, column_key in zip(keys[::2], keys[1::2]):
            row = (row + _mix(column, row_key) % rows) % rows
            column = (column + _mix(row, column_key) % columns) % columns
        images[is_outside] = row * columns + column
        is_outside = images >= size
    return images.astype(np.int64)


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Hash 64-bit numbers (the finalizer of splitmix64, Steele et al. 2014)."""
    mixed = values.astype(np.uint64) ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _keys(name: str, count: int) -> list[np.uint64]:
    """Derive `count` 64-bit keys from `name` alone, on any platform and NumPy version."""
    return list(np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * count), "<u8"))


def _check_length(num_tokens: int, context_length: int) -> int:
    context_length = whole_number("context_length", context_length, least=1)
    if num_tokens < context_length + 1:
        raise ValueError(
            f"context_length {context_length:,} needs {context_length + 1:,} tokens, "
            f"but the data has {num_tokens:,}"
        )
    return context_length
