"""Toys of notebook 03's exercises: a model to train, a run to resume, a decoder to cache.

Each is small enough that a check runs it hundreds of times.
"""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from lib.lessons.meters import KeptByAutograd

# Points of a batch of `ToyLoss`, whose activations fill the memory of its story.
BATCH_POINTS = 3


class ToyLoss:
    """`loss_of(weights, x, y)` of a line through points.

    In its story, the line is so large that the activations of one batch alone fit into memory.
    """

    def __init__(self) -> None:
        self.kept = KeptByAutograd()

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch.

        Raises:
            MemoryError: autograd still keeps what it needs for another batch, or this one is
                several in one.
        """
        if len(x) > BATCH_POINTS:
            raise MemoryError(
                f"the activations of {len(x)} points do not fit, only those of the {BATCH_POINTS} "
                "of one batch; compute the loss of each batch by itself"
            )
        if self.kept.tensors():
            raise MemoryError(
                "autograd still keeps the activations of another batch; call backward for each "
                "batch before the next one's loss"
            )
        with self.kept:
            return (x @ weights["slope"] + weights["offset"] - y).square().mean()


class Batches(list):
    """A list of batches that prints in a few characters."""

    def __repr__(self) -> str:
        return f"<{len(self)} batches>"


# How many steps a run took by itself; no attribute, since those are copied from run to run.
TRAINED: weakref.WeakKeyDictionary[ToyRun, int] = weakref.WeakKeyDictionary()


class ToyRun:
    """A training run in miniature, with everything that a real one has to remember.

    Attributes:
        weights: what is learned.
        mean, square: AdamW's moments.
        step: updates so far; the learning rate and the bias correction depend on it.
        generator: a `random.Random`, which shuffles each epoch and adds noise, as dropout does.
        order: examples of this epoch that are still to come.
    """

    EXAMPLES = 6

    def __init__(self, seed: int) -> None:
        self.weights = torch.zeros(2, dtype=torch.float64)
        self.mean, self.square = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.step = 0
        self.generator = random.Random(seed)
        self.order: list[int] = []

    def train(self, steps: int) -> None:
        """Take `steps` steps; weights and moments change in place."""
        TRAINED[self] = TRAINED.get(self, 0) + steps
        for _ in range(steps):
            if not self.order:
                self.order.extend(range(self.EXAMPLES))
                self.generator.shuffle(self.order)
            example = self.order.pop()
            target = torch.tensor([example, example**2 / 4], dtype=torch.float64)
            gradient = self.weights - target + self.generator.gauss(0, 0.5)
            self.step += 1
            self.mean.lerp_(gradient, 0.1)
            self.square.lerp_(gradient**2, 0.05)
            mean, square = self.mean / (1 - 0.9**self.step), self.square / (1 - 0.95**self.step)
            self.weights.sub_(mean / (square.sqrt() + 1e-8) / self.step**0.5)

    def hash(self) -> str:
        """The first digits of the SHA-256 of the weights."""
        return hashlib.sha256(self.weights.numpy().tobytes()).hexdigest()[:12]


class MakeRun:
    """`make_run()` returns a new run, the same each time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.made: list[ToyRun] = []

    def __call__(self) -> ToyRun:
        self.made.append(ToyRun(self.seed))
        return self.made[-1]

    def __deepcopy__(self, memo: dict) -> MakeRun:
        return MakeRun(self.seed)

    def __repr__(self) -> str:
        return "make_run"


class ToyDecoder:
    """One layer of attention with random weights, which computes each position only once."""

    def __init__(self, seed: int, num_heads: int, head_dim: int, vocab_size: int = 40) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size, 3, num_heads, head_dim)
        self.table = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        width = num_heads * head_dim
        self.head = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64)
        self.seen: dict[int, int] = {}

    def qkv(self, token: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of a token, each (num_heads, head_dim).

        Raises:
            ValueError: it was asked for the same position before.
        """
        if self.seen.get(position) == token:
            raise ValueError(f"position {position} was computed before; keep its key and value")
        if position in self.seen:
            raise ValueError(f"position {position} already holds another token; count on")
        self.seen[position] = token
        turned = self.table[token].roll(position, dims=-1)  # in place of RoPE
        q, k, v = turned.unbind()
        return q, k, v

    def next_token(self, out: Tensor) -> int:
        """Return the likeliest next token, given attention's output (num_heads, head_dim)."""
        return int((self.head @ out.flatten()).argmax())

    def __repr__(self) -> str:
        return "model"
