"""The speedrun of notebook 08 on this machine: what it is, what it is fast at, and the training."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lib.config_training import ModelConfig, TrainConfig
from lib.speedrun import Machine, Plan

if TYPE_CHECKING:
    from lib.train import TrainResult

log = logging.getLogger(__name__)

KERNELS = ("sdpa", "flash_attention_triton")


def this_machine() -> Machine:
    """The machine that this process runs on."""
    import torch

    from lib.hardware import device_name, pick_device

    device = pick_device()
    if device.type != "cuda":
        return Machine(device.type, device_name(device))
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    count = torch.cuda.device_count()
    return Machine("cuda", properties.name, count, capability, properties.total_memory)


def attention_times(model: ModelConfig, *, windows: int = 64) -> dict[str, float]:
    """Milliseconds of causal attention, forward and backward, with each kernel on this GPU.

    In the shape and type that `model` would train in; nothing without a CUDA device. A kernel that
    does not run here is left out, with a warning.
    """
    import torch

    from lib.attention import attention
    from lib.benchmark import measure
    from lib.hardware import pick_device, pick_dtype

    device = pick_device()
    if device.type != "cuda":
        return {}
    shape = (windows, model.num_heads, model.context_length, model.head_dim)
    options = {"device": device, "dtype": pick_dtype(device)}
    q, k, v = (torch.randn(shape, **options).requires_grad_() for _ in range(3))
    grad = torch.randn(shape, **options)

    def both_passes(kernel: str) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, kernel=kernel), (q, k, v), grad)

    times = {}
    for kernel in KERNELS:
        try:
            result = measure(partial(both_passes, kernel), device=device, max_seconds=1.0)
        # whatever a compiler raises on a chip that nobody tried
        except Exception as error:
            log.warning("%s does not run here: %s", kernel, error)
            continue
        if result.median_ms is not None:
            times[kernel] = result.median_ms
    return times


def run_training(
    plan: Plan,
    config: TrainConfig,
    deadline: float,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
) -> TrainResult:
    """Train as `config` says in the processes of `plan`, until `time.time()` reaches `deadline`.

    The same call with a later deadline goes on from there. Several processes are started for it,
    and `on_metrics` is not called.
    """
    from lib.distributed import launch
    from lib.train import train

    # the least that counts as a limit
    seconds = max(1e-3, deadline - time.time())
    config = dataclasses.replace(config, max_seconds=0.0 if math.isinf(seconds) else seconds)
    if plan.ranks == 1:
        return train(config, on_metrics=on_metrics)
    return launch(train, plan.ranks, config)[0]
