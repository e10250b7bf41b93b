"""A model, batches and timing for functions that `lib.ddp.launcher.launch` calls on ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lib.core.allocator import synchronize
from lib.core.hardware import keep_freed_memory
from lib.ddp.process_group import barrier, current_device, mean_over_ranks
from lib.model.config import ModelConfig
from lib.model.transformer import MeanLoss, TransformerLM


def in_turn(jobs: Sequence[tuple[Callable[..., Any], tuple]]) -> list[Any]:
    """The results of `jobs`, pairs of a function and its arguments, one after the other."""
    return [fn(*arguments) for fn, arguments in jobs]


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


def time_runs(
    runs: Mapping[str, Callable[[], Any]], turns: int, device: torch.device
) -> dict[str, list[float]]:
    """The ms of each call of interleaved functions, which ranks start together: means over ranks.

    Three calls of each go before, which allocate memory and optimizer state, and agree on the order
    of buckets.
    """
    if device.type == "cpu":
        keep_freed_memory()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-3, turns):
        for name, run in runs.items():
            barrier()
            start = time.perf_counter()
            run()
            synchronize(device)
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    means = mean_over_ranks(torch.tensor(list(times.values()))).tolist()
    return dict(zip(times, means))
