"""A small language model and a block of two matrices, the same on all ranks, for notebook 11."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.core.settings import require
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
    """An equal share of the blocks; the first stage embeds, the last one has norm and head.

    Raises:
        ValueError: the stages don't divide the blocks.
    """

    def __init__(self, number: int, count: int, model: TransformerLM | None = None) -> None:
        super().__init__()
        model = model or language_model()
        layers = model.config.num_layers
        require(layers % count == 0, f"stages must divide the {layers} blocks, got {count}")
        share = layers // count
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


# Widths of a block, and the tokens of a data-parallel rank in a step.
WIDTH, INNER, TOKENS = 8, 24, 6


class Block(nn.Module):
    """x + W2 relu(W1 norm(x)), (tokens, WIDTH) -> the same; `up` is W1 and `down` W2."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        for linear in (self.up, self.down):
            linear.weight.data = torch.randn(linear.weight.shape, generator=generator) / 3

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def tokens_of(step: int, dp: int) -> Tensor:
    """Inputs and targets of a data-parallel rank, (2, TOKENS, WIDTH)."""
    generator = torch.Generator().manual_seed(100 * step + dp)
    return torch.randn(2, TOKENS, WIDTH, generator=generator)


def train_block_alone(steps: int, ranks: int) -> list[Tensor]:
    """Train a block in one process on the tokens of all ranks; return gain, W1 and W2."""
    block = Block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for step in range(steps):
        x, target = torch.cat([tokens_of(step, dp) for dp in range(ranks)], dim=1)
        (block(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in block.parameters()]
