"""The host's cost of a training step besides computing, for notebook 09.

A model as deep as `large`, but so narrow that there is next to nothing to compute or to send: its
step is hooks, bookkeeping and calls of operations, which a GPU's host has to get through as well.
"""

from __future__ import annotations

import statistics
import time

import torch

from lib.ddp.process_group import rank
from lib.model.config import ModelConfig, model_preset
from lib.model.transformer import TransformerLM
from lib.training.config import TrainConfig
from lib.training.step import TrainStep

WRAPPERS = ("flashddp", "fsdp", "fsdp2")


def host_ms(samples: int, blocks: int | None = None) -> dict[str, float]:
    """Milliseconds for which a step keeps this rank's main thread busy, by wrapper; medians.

    Time in which it waits for other ranks doesn't count. All ranks of a job on CPUs call it.

    Args:
        blocks: of the model; as many as `large` by default.
    """
    shape = ModelConfig(
        vocab_size=64,
        context_length=8,
        d_model=32,
        num_layers=blocks or model_preset("large").num_layers,
        num_heads=2,
        d_ff=64,
    )
    sequences = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(rank()))
    found = {}
    for name in WRAPPERS:
        model = TransformerLM(shape, generator=torch.Generator().manual_seed(0))
        config = TrainConfig(model=shape, batch_size=1, ddp_wrapper=name, dtype="float32")  # type: ignore[arg-type]
        step, times = TrainStep(model, config, torch.device("cpu"), torch.float32), []
        for _ in range(samples + 2):
            start = time.thread_time()
            step(sequences, 1e-4)
            times.append(1e3 * (time.thread_time() - start))
        # the first ones make buckets and buffers
        found[name] = statistics.median(times[2:])
    return found
