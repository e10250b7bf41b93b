"""Training with sharded optimizers: what workers of `test_train_sharded` run."""

import dataclasses
import math
import os
import signal
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import train_ranks
from train_ranks import CPU, MODEL, STEP, before_step, part, train

from lib import distributed
from lib.config_training import TrainConfig
from lib.model import TransformerLM
from lib.train_step import TrainStep, numerics

# of gradient accumulation
PASSES = 2
ZERO1 = {"sharded_optimizer": "zero1"}
PARAMETERS = ZERO1 | {"zero1_strategy": "parameters"}
TORCH_ZERO = {"sharded_optimizer": "torch_zero"}
ALONE = {"ddp_wrapper": "none"} | ZERO1
FSDP2 = {"ddp_wrapper": "fsdp2"}
# by name, each with what a config takes
WAYS: dict[str, dict[str, str]] = {"zero1": ALONE, "fsdp2": FSDP2} | {
    f"{sharding}, {wrapper}": {"ddp_wrapper": wrapper, **how}
    for wrapper in train_ranks.WRAPPERS
    for sharding, how in (("zero1", ZERO1), ("parameters", PARAMETERS), ("torch_zero", TORCH_ZERO))
}
FEW = {"zero1": ALONE, "parameters": PARAMETERS, "torch_zero": TORCH_ZERO, "fsdp2": FSDP2}
# settings of a step, and its dtype
SETTINGS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "autocast": ({}, torch.bfloat16),
    "float16": ({}, torch.float16),
    "short weights": ({"low_precision_weights": True}, torch.bfloat16),
    "unclipped": (
        {"optimizer": dataclasses.replace(STEP.optimizer, max_grad_norm=0.0)},
        torch.float32,
    ),
    "tied": (
        {"model": dataclasses.replace(MODEL, tied_embeddings=True, qk_norm=True)},
        torch.bfloat16,
    ),
}


def whole(step: TrainStep) -> list[torch.Tensor]:
    """The model's weights, on all ranks."""
    return [param.detach().float().clone() for param in step.whole_model().parameters()]


def steps_with(config: TrainConfig, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What each of a few steps reports, the weights after them, and elements of state here."""
    generator = torch.Generator().manual_seed(distributed.rank())
    model = TransformerLM(config.model, generator=generator)
    if config.low_precision_weights:
        model.use_low_precision_weights(dtype)
    accumulated = config.gradient_accumulation_steps
    with numerics(tf32=False, deterministic=True):
        step = TrainStep(model, config, CPU, dtype)
        for index in range(train_ranks.STEPS - 1):
            step(part(index, distributed.rank(), accumulated), 1e-2)
    inner = getattr(step.optimizer, "inner", step.optimizer)
    states = [value for state in inner.state.values() for value in state.values()]
    state = sum(value.numel() for value in states if value.dim())
    return {"rows": step.read_log(), "weights": whole(step), "state": state}


def tried(call: Any) -> Any:
    """What `call` returns, or the traceback of what it raised."""
    try:
        return call()
    except Exception:
        return traceback.format_exc()


def each_way(ways: dict[str, dict[str, str]]) -> dict[str, Any]:
    config = dataclasses.replace(STEP, gradient_accumulation_steps=PASSES)
    return {
        name: tried(lambda how=how: steps_with(dataclasses.replace(config, **how)))
        for name, how in ways.items()
    }


def each_setting() -> dict[tuple[str, str], Any]:
    """Of each setting, what is found without sharding and with each kind of it."""
    results = {}
    for setting, (changes, dtype) in SETTINGS.items():
        for name, how in ({"none": {}} | FEW).items():
            if changes.get("low_precision_weights") and name in ("torch_zero", "fsdp2"):
                continue
            config = dataclasses.replace(STEP, **changes, **how)
            results[setting, name] = tried(lambda c=config, d=dtype: steps_with(c, d))
    return results


def not_finite_on_one(how: dict[str, Any]) -> tuple[list, bool]:
    """A step in which rank 1 alone has a gradient that is not finite, and whether it changed."""
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    step = TrainStep(model, dataclasses.replace(STEP, **how), CPU, torch.float32)
    before = whole(step)
    if distributed.rank() == 1:
        forward = step.loss.forward
        step.loss.forward = lambda *args: forward(*args) * math.inf
    step(part(0, distributed.rank(), 1), 1e-2)
    rows = step.read_log()
    return rows, all(torch.equal(a, b) for a, b in zip(before, whole(step)))


def gathers(**changes: Any) -> dict[str, list[Any]]:
    """How many buckets of zero1 were on their way in each of two steps, and the losses.

    At the end of the step, in the forward pass of the first layer, of the second, and when the log
    was read.
    """
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    step = TrainStep(model, dataclasses.replace(STEP, **ALONE, **changes), CPU, torch.float32)
    # on a CPU nothing is recorded
    step.config = dataclasses.replace(step.config, cuda_graph=False)
    found = []

    def count(*args: Any) -> None:
        buckets = step.optimizer.strategy.buckets
        found.append(sum(bucket.gathering is not None for bucket in buckets))

    for layer in model.layers:
        layer.attn.register_forward_hook(count)
    for index in range(2):
        step(part(index, distributed.rank(), 1), 1e-2)
        count()
    rows = step.read_log()
    count()
    return {"counts": found, "rows": rows, "weights": whole(step)}


def stop_before(number: int, config: TrainConfig) -> int:
    """Train; rank 0 gets a SIGTERM before its step of that number. The step that was saved."""
    act = (lambda: os.kill(os.getpid(), signal.SIGTERM)) if distributed.rank() == 0 else int
    with before_step(number, act):
        return train(config).step


def stopped_and_resumed(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Runs of each kind, without and with a stop."""
    results = {}
    for name, how in FEW.items():
        run = dataclasses.replace(config, output=folder / name, **how)
        again = dataclasses.replace(run, output=folder / f"{name} stopped")
        results[name] = tried(
            lambda run=run, again=again: [
                train(run).step,
                stop_before(5, again),
                train(again).step,
            ]
        )
    return results


def chain(config: TrainConfig, hows: list[dict[str, Any]]) -> list[int]:
    """One run, of which each way takes two steps, the last one all that are left."""
    runs = [dataclasses.replace(config, **how) for how in hows]
    return [*(stop_before(1, run) for run in runs[:-1]), train(runs[-1]).step]


def four_ranks(config: TrainConfig, folder: Path) -> None:
    """What four ranks begin."""
    for name, how in {"from zero1": ALONE, "from fsdp2": FSDP2}.items():
        run = dataclasses.replace(config, output=folder / name, batch_size=1, **how)
        tried(lambda run=run: stop_before(3, run))


def two_ranks(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """All that one start of two ranks can tell; `folder` holds what four ranks and one began."""
    half = dataclasses.replace(config, batch_size=2)
    hows = [ALONE, FSDP2, TORCH_ZERO, {}, PARAMETERS, ALONE]
    found = {
        "ways": each_way(WAYS),
        "settings": each_setting(),
        "not finite": {
            name: tried(lambda how=how: not_finite_on_one(how)) for name, how in FEW.items()
        },
        "gathers": tried(lambda: [gathers(), gathers(cuda_graph=True)]),
        "exact": stopped_and_resumed(half, folder),
        "chain": tried(lambda: chain(dataclasses.replace(half, output=folder / "chain"), hows)),
    }
    for name, how in {"from zero1": PARAMETERS, "from fsdp2": ALONE}.items():
        run = dataclasses.replace(half, output=folder / name, **how)
        found[name] = tried(lambda run=run: stop_before(3, run))
    for name, how in FEW.items():
        run = dataclasses.replace(half, output=folder / f"one, {name}", **how)
        found[f"one, {name}"] = tried(lambda run=run: train(run).step)
    return found


def three_ranks() -> dict[str, Any]:
    return each_way(FEW)


def compiled() -> dict[str, Any]:
    """Compiled steps, without sharding and with each kind of it."""
    config = dataclasses.replace(STEP, compile=True, gradient_accumulation_steps=PASSES)
    return {
        name: tried(lambda how=how: steps_with(dataclasses.replace(config, **how)))
        for name, how in ({"none": {}} | FEW).items()
    }


def dies_in_saving(config: TrainConfig) -> None:
    """Rank 1 is killed while it writes its second shard."""
    write, calls = torch.save, []

    def save(*args: Any, **options: Any) -> None:
        calls.append(1)
        write(*args, **options)
        if distributed.rank() == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(torch, "save", save):
        train(config)
