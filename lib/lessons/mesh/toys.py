"""A small language model and a block of two matrices, the same on all ranks, for notebook 11."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM

CONFIG = ModelConfig(
    vocab_size=64, context_length=16, d_model=32, num_layers=8, num_heads=4, d_ff=64
)
# Sequences in a micro-batch.
SEQUENCES = 2
# What passes from stage to stage: (sequences, tokens, d_model).
HIDDEN = (SEQUENCES, CONFIG.context_length, CONFIG.d_model)


def language_model() -> TransformerLM:
    """The whole model."""
    return TransformerLM(CONFIG, generator=torch.Generator().manual_seed(0))


class Stage(nn.Module):
    """An equal share of the blocks; the first stage embeds, the last one has norm and head."""

    def __init__(self, number: int, count: int, model: TransformerLM | None = None) -> None:
        super().__init__()
        model = model or language_model()
        share = model.config.num_layers // count
        self.embedding = model.token_embeddings if number == 0 else nn.Identity()
        self.blocks = model.layers[number * share : (number + 1) * share]
        last = [model.ln_final, model.lm_head] if number == count - 1 else []
        self.last, self.rope = nn.Sequential(*last), model.rope

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.last(x)


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a micro-batch, each (sequences, tokens)."""
    generator = torch.Generator().manual_seed(number)
    size = (SEQUENCES, CONFIG.context_length + 1)
    tokens = torch.randint(CONFIG.vocab_size, size, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients_alone(micro_batches: int) -> list[Tensor]:
    """The gradients of one process, which accumulates them over the micro-batches."""
    model = language_model()
    for number in range(micro_batches):
        inputs, targets = micro_batch(number)
        loss_of(model(inputs), targets).backward()
    return [param.grad for param in model.parameters()]  # type: ignore[misc]


class Enter(torch.autograd.Function):
    """Notebook 10's, with a group: the same input on its ranks; gradients of copies add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_up(grad, ctx.group), None


class Leave(torch.autograd.Function):
    """Notebook 10's, with a group: the sum of its ranks' outputs."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        return add_up(y, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def add_up(tensor: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


# Widths of a block, and the rows of a rank in a step.
WIDTH, INNER, ROWS = 8, 24, 5


class Block(nn.Module):
    """x + W2 relu(W1 x), (rows, WIDTH) -> the same; `up` is W1 and `down` W2."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / 3

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def rows_of(step: int, first: int, last: int) -> Tensor:
    """Inputs and targets of the data-parallel ranks from `first` to before `last`."""
    parts = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + number)
        parts.append(torch.randn(2, ROWS, WIDTH, generator=generator))
    return torch.cat(parts, dim=1)  # (2, rows, WIDTH)


def train_block_alone(steps: int, ranks: int) -> list[Tensor]:
    """Train a block in one process on the rows of all ranks; return W1 and W2."""
    block = Block()
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    for step in range(steps):
        x, target = rows_of(step, 0, ranks)
        (block(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in block.parameters()]
