"""A model, batches and descent for functions that `lib.ddp.launcher.launch` calls on ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lib.ddp.process_group import current_device
from lib.model.config import ModelConfig
from lib.model.transformer import MeanLoss, TransformerLM


def make_model(shape: ModelConfig, seed: int = 0) -> nn.Module:
    """A randomly initialized model as a module that maps inputs and targets to the mean loss."""
    device = current_device()
    model = TransformerLM(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return MeanLoss(model, device, None, 0.0)


def batch(shape: ModelConfig, batch_size: int, step: int, ranks: Iterable[int]) -> list[Tensor]:
    """Random inputs and targets of one step, those of `ranks` concatenated.

    Each rank has its own `batch_size` sequences; inputs and targets are (sequences, length).
    """
    size = (batch_size, shape.context_length + 1)
    parts = []
    for number in ranks:
        generator = torch.Generator().manual_seed(1000 * step + number)
        parts.append(torch.randint(shape.vocab_size, size, generator=generator))
    tokens = torch.cat(parts).to(current_device())
    return [tokens[:, :-1], tokens[:, 1:]]


@torch.no_grad()
def descend(model: nn.Module, lr: float = 0.1) -> None:
    """Take a step of plain gradient descent, and drop the gradients."""
    for param in model.parameters():
        if param.grad is not None:
            param -= lr * param.grad
            param.grad = None
