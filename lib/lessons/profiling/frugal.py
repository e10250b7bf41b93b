"""The check of notebook 04's loss in chunks: no logits of more than one chunk, made or kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.lessons.differences import Named
from lib.lessons.meters import Holder, KeptByAutograd, Largest, load_dispatch
from lib.lessons.model.exercises import draw_tensor


def draw_hidden(generator: random.Random, size: int) -> tuple:
    load_dispatch()
    # so that the logits of all tokens are larger than any other tensor
    d_model, vocab_size = generator.randint(2, 3), generator.randint(4, 5 + size // 2)
    num_tokens = generator.choice([n for n in range(4, 7 + size) if n != vocab_size])
    hidden = draw_tensor(generator, num_tokens, d_model) * generator.choice([1, 1, 1, 20])
    targets = torch.tensor([generator.randrange(vocab_size) for _ in range(num_tokens)])
    chunk_tokens = generator.choice([1, generator.randint(1, num_tokens - 1)])
    return hidden, draw_tensor(generator, vocab_size, d_model), targets, chunk_tokens


# PyTorch's own operations behind `@`.
MATMULS = ("mm", "addmm", "bmm", "matmul", "mv")
# With as many chunks, what autograd keeps for one of them is less than the logits of all.
MANY_CHUNKS = 12


class KeptRows(KeptByAutograd):
    """Notes how many numbers autograd keeps at most in tensors whose rows are `width` long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.numbers = width, 0

    def pack(self, tensor: Tensor) -> Holder:
        holder = super().pack(tensor)
        now = sum(x.numel() for x in self.tensors() if x.shape[-1:] == (self.width,))
        self.numbers = max(self.numbers, now)
        return holder


def frugal(
    attempt: Callable, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int
) -> Named:
    """The loss and its gradients by name.

    Raises:
        ValueError: the attempt makes more logits than those of a chunk, or another tensor as
            large, or has autograd keep those of all chunks.
    """
    num_logits, of_chunk = len(hidden) * len(weight), chunk_tokens * len(weight)
    with Largest(len(weight)) as largest, (kept := KeptRows(len(weight))):
        loss, d_hidden, d_weight = attempt(hidden, weight, targets, chunk_tokens)
    # the gradient of `weight` is as wide
    if largest.numbers > max(of_chunk, weight.numel()):
        is_matmul = largest.operation in MATMULS
        made = f"logits of shape {largest.shape}" if is_matmul else f"a {largest.shape} tensor"
        whose = "all tokens" if largest.numbers >= num_logits else "several chunks"
        raise ValueError(
            f"it makes {made}, as many numbers as the logits of {whose}; "
            f"chunk_tokens={chunk_tokens} allows {(chunk_tokens, len(weight))}"
        )
    if kept.numbers >= num_logits and len(hidden) >= MANY_CHUNKS * chunk_tokens:
        raise ValueError("autograd keeps the logits of all chunks at once")
    loss = torch.as_tensor(loss).detach()
    return Named({"the loss": loss, "d_hidden": d_hidden, "d_weight": d_weight})


def backward_at_the_end(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens))
    losses = [F.cross_entropy(h @ weight.T, y, reduction="sum") for h, y in chunks]
    loss = torch.stack(losses).sum() / len(targets)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return loss, d_hidden, d_weight
