"""Training on ranks: what workers of `test_parallelism` run, and its program for torchrun."""

import dataclasses
import gc
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import lib.fsdp
import lib.training.checkpoint
import lib.training.loop
from lib.core.settings import from_json
from lib.data.batches import random_tokens
from lib.ddp import process_group
from lib.ddp.launcher import run_as_rank
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.training.config import OptimizerConfig, TrainConfig
from lib.training.evaluation import Evaluation, evaluate
from lib.training.metrics import MetricsLog
from lib.training.step import TrainStep, numerics
from tests.training.runs import before_step

STEPS, BATCH, PASSES = 3, 3, 2
CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=61, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
STEP = TrainConfig(
    model=MODEL,
    optimizer=OptimizerConfig(warmup_steps=0, z_loss=1e-3),
    batch_size=BATCH,
    gradient_accumulation_steps=PASSES,
    log_interval=3,
    # several buckets
    bucket_size_mb=0.005,
)
WRAPPERS = ("naive", "flat", "overlap", "flashddp", "torch_ddp")
ZERO1 = {"sharded_optimizer": "zero1"}
PARAMETERS = ZERO1 | {"zero1_strategy": "parameters"}
TORCH_ZERO = {"sharded_optimizer": "torch_zero"}
ALONE = {"ddp_wrapper": "none"} | ZERO1
FSDP, FSDP2 = {"ddp_wrapper": "fsdp"}, {"ddp_wrapper": "fsdp2"}
# One way for each kind of sharding, by name.
SHARDED = {"zero1": ALONE, "parameters": PARAMETERS, "torch_zero": TORCH_ZERO}
SHARDED |= {"fsdp": FSDP, "fsdp2": FSDP2}
# Each wrapper by itself, and each kind of sharding behind two of them.
WAYS: dict[str, dict[str, Any]] = {
    **{wrapper: {"ddp_wrapper": wrapper} for wrapper in WRAPPERS},
    "one pass": {"gradient_accumulation_steps": 1},
    **SHARDED,
    "checkpointed": {"activation_checkpointing": "input", "checkpointed_blocks": 2},
    "fsdp, checkpointed": FSDP | {"activation_checkpointing": "attention"},
    "zero1, torch_ddp": ZERO1 | {"ddp_wrapper": "torch_ddp"},
    "zero1, naive": ZERO1 | {"ddp_wrapper": "naive"},
    "parameters, overlap": PARAMETERS | {"ddp_wrapper": "overlap"},
    "torch_zero, flat": TORCH_ZERO | {"ddp_wrapper": "flat"},
}
# Kinds of parallelism that evaluate in ways of their own.
EVALUATED = {name: WAYS[name] for name in ("flashddp", "torch_ddp", "zero1", "fsdp", "fsdp2")}
# Settings of a step, and its dtype.
SETTINGS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "float16": ({}, torch.float16),
    "low-precision weights": ({"low_precision_weights": True}, torch.bfloat16),
    "unclipped": (
        {"optimizer": dataclasses.replace(STEP.optimizer, max_grad_norm=0.0)},
        torch.float32,
    ),
    "tied": (
        {"model": dataclasses.replace(MODEL, tied_embeddings=True, qk_norm=True)},
        torch.bfloat16,
    ),
}
# Which kinds of sharding have them.
SETTING_CASES = [
    (setting, name)
    for setting in SETTINGS
    for name in SHARDED
    if setting != "low-precision weights" or name not in ("torch_zero", "fsdp2")
]


def attempt(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the traceback of what it raised."""
    try:
        return call()
    except Exception:
        return traceback.format_exc()


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


# Steps


def part(step: int, rank: int, passes: int) -> torch.Tensor:
    """The sequences of a rank in a step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(61, (passes * BATCH, 9), generator=generator)


def sequences(step: int, num_ranks: int, passes: int) -> torch.Tensor:
    """Those of all ranks."""
    return torch.cat([part(step, rank, passes) for rank in range(num_ranks)])


def whole(step: TrainStep) -> list[torch.Tensor]:
    """The model's weights, on all ranks."""
    step.parallel.gather()
    params: Any = step.model.parameters()
    if isinstance(step.parallel.module, lib.fsdp.FSDP):
        params = step.parallel.module.full_parameters().values()
    params = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in params]
    return [param.detach().float().clone() for param in params]


def steps_with(
    config: TrainConfig,
    dtype: torch.dtype = torch.float32,
    windows: Callable[[int], torch.Tensor] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What each of a few steps reports, the weights after them, and elements of state here.

    Each rank has other initial weights and, unless `windows` are given, sequences of its own.
    """
    rank = process_group.rank()
    is_alone = process_group.world_size(options.get("group")) == 1
    generator = torch.Generator().manual_seed(0 if is_alone else rank)
    model = TransformerLM(config.model, generator=generator)
    if config.low_precision_weights:
        model.use_low_precision_weights(dtype)
    passes = config.gradient_accumulation_steps
    with numerics(tf32=False, deterministic=True):
        step = TrainStep(model, config, CPU, dtype, **options)
        for index in range(STEPS):
            step(windows(index) if windows else part(index, rank, passes), 1e-2)
    inner = step.optimizer.inner if step.parallel.is_sharded else step.optimizer
    states = [value for state in inner.state.values() for value in state.values()]
    state = sum(value.numel() for value in states if value.dim())
    return {"rows": step.read_log(), "weights": whole(step), "state": state}


def launched_and_recorded(how: dict[str, Any]) -> list[Any]:
    """What each of a few steps reports, launched and then recorded as a CUDA graph; on GPUs."""
    device, found = process_group.current_device(), []
    for cuda_graph in (False, True):
        generator = torch.Generator(device).manual_seed(0)
        model = TransformerLM(MODEL, device=device, generator=generator)
        config = dataclasses.replace(STEP, **how, cuda_graph=cuda_graph)
        with numerics(tf32=False, deterministic=True):
            step = TrainStep(model, config, device, torch.float32)
            for index in range(STEPS):
                step(part(index, process_group.rank(), PASSES).to(device), 1e-2)
            found.append(step.read_log())
    return found


def steps_of_one_process(num_ranks: int, passes: int = PASSES, **changes: Any) -> dict[str, Any]:
    """The same steps by one process, on the sequences of all ranks at once."""
    size = num_ranks * passes * BATCH
    config = dataclasses.replace(STEP, batch_size=size, gradient_accumulation_steps=1, **changes)
    return steps_with(config, windows=lambda step: sequences(step, num_ranks, passes))


def each_way(ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: attempt(lambda how=how: steps_with(dataclasses.replace(STEP, **how)))
        for name, how in ways.items()
    }


def each_setting() -> dict[tuple[str, str], Any]:
    """The steps of each setting, without sharding and with each kind of it."""
    results = {}
    for setting, name in [*((setting, "none") for setting in SETTINGS), *SETTING_CASES]:
        changes, dtype = SETTINGS[setting]
        fields = {"gradient_accumulation_steps": 1} | changes | SHARDED.get(name, {})
        config = dataclasses.replace(STEP, **fields)
        results[setting, name] = attempt(lambda c=config, d=dtype: steps_with(c, d))
    return results


def in_groups_of_one() -> dict[str, Any]:
    """Each rank trains in a group of its own, on the sequences of both, with the wrapper `none`."""
    groups = [dist.new_group([rank]) for rank in range(process_group.world_size())]
    config = dataclasses.replace(STEP, ddp_wrapper="none", batch_size=2 * PASSES * BATCH)
    config = dataclasses.replace(config, gradient_accumulation_steps=1)
    own = groups[process_group.rank()]
    return steps_with(config, windows=lambda step: sequences(step, 2, PASSES), group=own)


def one_is_not_finite(what: str, how: dict[str, Any]) -> tuple[list, bool]:
    """A step in which rank 1 alone has a loss, or gradients, that are not finite.

    Returns what it reports, and whether the weights stayed the same.
    """
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    config = dataclasses.replace(STEP, gradient_accumulation_steps=1, **how)
    step = TrainStep(model, config, CPU, torch.float32)
    before = whole(step)
    if process_group.rank() == 1:
        forward = step.loss.forward
        # adding changes no gradient, multiplying does
        change = {"loss": lambda loss: loss + math.inf, "gradients": lambda loss: loss * math.inf}
        step.loss.forward = lambda *args: change[what](forward(*args))
    step(part(0, process_group.rank(), 1), 1e-2)
    rows = step.read_log()
    return rows, all(map(torch.equal, before, whole(step)))


def pending_gathers(**changes: Any) -> dict[str, Any]:
    """How many buckets of zero1 were being gathered after two steps, and the results."""
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    config = dataclasses.replace(STEP, gradient_accumulation_steps=1, **ALONE, **changes)
    step = TrainStep(model, config, CPU, torch.float32)
    # nothing can be recorded on a CPU
    step.use_cuda_graph(False)
    for index in range(2):
        step(part(index, process_group.rank(), 1), 1e-2)
    pending = sum(bucket.gathering is not None for bucket in step.optimizer.strategy.buckets)
    return {"pending": pending, "rows": step.read_log(), "weights": whole(step)}


def evaluations(how: dict[str, Any] | None = None) -> list[Evaluation]:
    """With more batches than ranks, as many, and fewer; the last sequence is shorter."""
    model: Any = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    if how:
        model = TrainStep(model, dataclasses.replace(STEP, **how), CPU, torch.float32).parallel
    tokens = random_tokens(83, 61, seed=0)
    ones = np.ones(61, np.int64)
    return [
        evaluate(model, tokens, ones, batch_size=size, device="cpu", max_tokens=limit)
        for size, limit in ((1, 0), (3, 0), (8, 64), (64, 64))
    ]


def held_in_evaluation(how: dict[str, Any]) -> dict[str, int]:
    """Bytes of new tensors before an evaluation and at most in a block, and of model and block."""
    others = _bytes_of_tensors()
    config = dataclasses.replace(MODEL, d_model=64, d_ff=128, num_layers=8)
    model = TransformerLM(config)
    sizes = [sum(p.nbytes for p in part.parameters()) for part in (model, model.layers[0])]
    step = TrainStep(model, dataclasses.replace(STEP, model=config, **how), CPU, torch.float32)
    # what the batch of a step takes is no part of it
    tokens, ones = random_tokens(20, 61, seed=0), np.ones(61, np.int64)
    evaluate(step.parallel, tokens, ones, batch_size=1, device="cpu")
    before, held, most = _bytes_of_tensors() - others, [], []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: held.append(_bytes_of_tensors() - others))
    # the least of three, since what else this process does may hold tensors meanwhile
    for _ in range(3):
        held.clear()
        evaluate(step.parallel, tokens, ones, batch_size=1, device="cpu")
        most.append(max(held))
    return {"before": before, "most": min(most), "model": sizes[0], "block": sizes[1]}


def _bytes_of_tensors() -> int:
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# Runs


def train(config: TrainConfig, **options) -> lib.training.loop.TrainResult:
    torch.set_num_threads(1)
    return lib.training.loop.train(config, **options)


def note_and_train(config: TrainConfig, begun: Path) -> lib.training.loop.TrainResult:
    """`train`, after a file says that it begins."""
    begun.touch()
    return train(config)


def watched_run(config: TrainConfig) -> dict:
    """A run by all ranks, and what each of them wrote."""
    records, saved, opened = [], [], []
    publish, enter = lib.training.checkpoint._publish, MetricsLog.__enter__
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with (
        mock.patch.object(
            lib.training.checkpoint,
            "_publish",
            lambda target, keep: saved.append(int(target.name[5:])) or publish(target, keep),
        ),
        mock.patch.object(MetricsLog, "__enter__", lambda log: opened.append(1) or enter(log)),
    ):
        result = train(config, on_metrics=records.append)
    return {"result": result, "records": records, "saved": saved, "logs": len(opened)} | {
        "groups left": len(groups) - before
    }


def stop_before(number: int, config: TrainConfig, on_rank: int = 0) -> int:
    """Train; one rank gets a SIGTERM before its step of that number. Return the step saved."""
    act = int
    if process_group.rank() == on_rank:
        act = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    with before_step(number, act):
        return train(config).step


def stopped_and_resumed(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Runs with each kind of sharding, without and with a stop."""
    results = {}
    for name, how in SHARDED.items():
        run = dataclasses.replace(config, output=folder / name, **how)
        again = dataclasses.replace(run, output=folder / f"{name} stopped")
        results[name] = attempt(
            lambda run=run, again=again: [
                train(run).step,
                stop_before(5, again),
                train(again).step,
            ]
        )
    return results


def chain(config: TrainConfig) -> list[int]:
    """A run that one process began, continued by each way for a few steps, then to the end."""
    hows = [ALONE, FSDP2, TORCH_ZERO, {}, PARAMETERS]
    runs = [dataclasses.replace(config, **how) for how in hows]
    return [*(stop_before(1, run) for run in runs[:-1]), train(runs[-1]).step]


def evaluate_on(tokens: np.ndarray) -> Evaluation:
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    return evaluate(model, tokens, np.ones(61, np.int64), batch_size=1, device="cpu")


def refused_by_rank_1(config: TrainConfig) -> dict[str, tuple[str, str]]:
    """The errors of rank 1 alone in an evaluation, and in resuming."""
    is_second = process_group.rank() == 1
    tokens = random_tokens(83, 61, seed=0)
    found = {
        "no tokens": error_of(lambda: evaluate_on(tokens[: 1 if is_second else None])),
        "fewer tokens": error_of(lambda: evaluate_on(tokens[: 20 if is_second else None])),
    }
    stop_before(5, config)
    refuse = OSError("no such disk") if is_second else None
    wrapped = lib.training.loop.load_optimizer
    with mock.patch.object(lib.training.loop, "load_optimizer", side_effect=refuse, wraps=wrapped):
        found["resuming"] = error_of(lambda: train(config))
    return found


def errors(config: TrainConfig, folder: Path) -> dict[str, tuple[str, str]]:
    """What ends runs on all ranks."""
    rank = process_group.rank()
    changes = {
        "none": {"ddp_wrapper": "none"},
        "no data on rank 1": {"data": config.data if rank == 0 else folder / "nowhere"},
        "not as rank 0": {"log_interval": 4 + rank},
        "other run": {"output": folder / "run", "batch_size": config.batch_size + 1},
        "one device": {"device": "cuda:0"},
        "too high": {
            "output": folder / "too high",
            "optimizer": OptimizerConfig(learning_rate=1e30, warmup_steps=0),
            "max_nonfinite_steps": 3,
        },
    }
    found = {
        name: error_of(lambda fields=fields: train(dataclasses.replace(config, **fields)))
        for name, fields in changes.items()
    }

    found |= refused_by_rank_1(dataclasses.replace(config, output=folder / "refused", **ALONE))
    # hosts with disks of their own
    before, other = Path.cwd(), folder / f"host {rank}"
    other.mkdir()
    os.chdir(other)
    apart = dataclasses.replace(config, output=Path("apart"))
    found["not shared"] = error_of(lambda: train(apart))
    os.chdir(before)
    return found


def three_ranks(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Begin runs, which two ranks and one go on with; steps of the other kinds of sharding."""
    for name, how in {"from zero1": ALONE, "from fsdp": FSDP}.items():
        run = dataclasses.replace(config, output=folder / name, batch_size=2, **how)
        attempt(lambda run=run: stop_before(3, run))
    return each_way({name: SHARDED[name] for name in ("parameters", "torch_zero")})


def two_ranks(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """All that one start of two ranks can find out; `folder` holds what three and one began."""
    config = dataclasses.replace(config, batch_size=3)
    run, stopped = folder / "run", folder / "stopped"
    found = {
        "ways": each_way(WAYS),
        "settings": each_setting(),
        "alone": in_groups_of_one(),
        "loss": one_is_not_finite("loss", {}),
        "gradients": {
            name: attempt(lambda how=how: one_is_not_finite("gradients", how))
            for name, how in ({"flashddp": {}} | SHARDED).items()
        },
        "gathers": attempt(lambda: [pending_gathers(), pending_gathers(cuda_graph=True)]),
        "evaluations": evaluations(),
        "evaluated in training": {
            name: attempt(lambda how=how: evaluations(how)) for name, how in EVALUATED.items()
        },
        "held in evaluation": {
            name: attempt(lambda how=how: held_in_evaluation(how))
            for name, how in (("fsdp", FSDP), ("fsdp2", FSDP2))
        },
        "run": watched_run(dataclasses.replace(config, output=run)),
        "again": train(dataclasses.replace(config, output=run)).status,
        "signal": stop_before(6, dataclasses.replace(config, output=stopped), on_rank=1),
        "resumed": train(dataclasses.replace(config, output=stopped)).status,
        "exact": stopped_and_resumed(config, folder),
        "chain": attempt(lambda: chain(dataclasses.replace(config, output=folder / "chain"))),
    }
    ways = {"from zero1": PARAMETERS, "from fsdp": FSDP}
    for name, how in ways.items():
        other = dataclasses.replace(config, output=folder / name, **how)
        found[name] = attempt(lambda run=other: stop_before(3, run))
    # stopped here, and resumed by one process
    stop_before(6, dataclasses.replace(config, output=folder / "to one"))
    found["errors"] = errors(config, folder)
    return found


def compiled(ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compiled steps."""
    before = torch._dynamo.config.optimize_ddp
    found = each_way({name: {"compile": True} | how for name, how in ways.items()})
    assert torch._dynamo.config.optimize_ddp is before
    return found


def dies_in_saving(config: TrainConfig) -> None:
    """Rank 1 is killed while it writes its second shard."""
    write, calls = lib.training.checkpoint.write_tensors, []

    def save(*args: Any) -> None:
        calls.append(1)
        write(*args)
        if process_group.rank() == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(lib.training.checkpoint, "write_tensors", save):
        train(config)


def main() -> None:
    """Under torchrun: train; with a second argument, be killed once as rank 1 in step 13."""
    config = from_json(TrainConfig, Path(sys.argv[1]))
    marker = Path(sys.argv[2]) if len(sys.argv) > 2 else None

    def die() -> None:
        if marker is not None and process_group.rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def command() -> int:
        with before_step(13, die):
            result = train(config)
        if process_group.rank() == 0:
            print(result.status, result.step)
        return 0

    sys.exit(run_as_rank(command, print))


if __name__ == "__main__":
    main()
