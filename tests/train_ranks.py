"""Training on ranks: what workers of `test_train_ranks` run, and its program for torchrun."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import lib.train
from lib import distributed
from lib.command_ranks import parse_as_rank, run_as_rank
from lib.config_training import ModelConfig, OptimizerConfig, TrainConfig
from lib.data import random_tokens
from lib.evaluate import Evaluation, evaluate
from lib.metrics import MetricsLog
from lib.model import TransformerLM
from lib.strict_json import from_json
from lib.train_step import TrainStep, numerics

STEPS, BATCH = 4, 3
CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=61, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
STEP = TrainConfig(
    model=MODEL,
    optimizer=OptimizerConfig(warmup_steps=0, z_loss=1e-3),
    batch_size=BATCH,
    log_interval=3,
    # several buckets
    bucket_size_mb=0.005,
)
WRAPPERS = ("naive", "flat", "overlap", "flashddp", "torch_ddp")
WAYS = [(name, accumulated) for name in WRAPPERS for accumulated in (1, 2)]


def part(step: int, rank: int, accumulated: int) -> torch.Tensor:
    """The windows of a rank in a step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(61, (accumulated * BATCH, 9), generator=generator)


def steps_with(
    config: TrainConfig, windows: Callable[[int], torch.Tensor], **options
) -> tuple[list, list]:
    """What each of a few steps reports, and the weights after them."""
    generator = torch.Generator().manual_seed(distributed.rank())
    if distributed.world_size(options.get("group")) == 1:
        generator.manual_seed(0)
    model = TransformerLM(config.model, generator=generator)
    with numerics(tf32=False, deterministic=True):
        step = TrainStep(model, config, CPU, torch.float32, **options)
        rows = []
        for index in range(STEPS):
            step(windows(index), 1e-2)
            if index == 1 or index == STEPS - 1:
                rows += step.read_log()
    return rows, [param.detach().clone() for param in model.parameters()]


def refuse(on_rank: int) -> str:
    """What becomes of arguments that one rank alone refuses, and what that rank prints."""

    def parse() -> str:
        if distributed.rank() == on_rank:
            print("bogus is no flag", file=sys.stderr)
            raise SystemExit(2)
        return "a config"

    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            return f"{parse_as_rank(parse)}, {told.getvalue()}"
        except SystemExit as refusal:
            return f"exit {refusal.code}, {told.getvalue()}"


def each_way() -> dict:
    """Steps with each wrapper; different initial weights on each rank."""
    rank, results = distributed.rank(), {}
    for name, accumulated in WAYS:
        config = dataclasses.replace(
            STEP, ddp_wrapper=name, gradient_accumulation_steps=accumulated
        )
        results[name, accumulated] = steps_with(
            config, lambda step, n=accumulated: part(step, rank, n)
        )
    return results


def alone() -> tuple[list, list]:
    """Each rank trains in a group of its own, on rank 0's windows, with the wrapper `none`."""
    groups = [dist.new_group([rank]) for rank in range(distributed.world_size())]
    config = dataclasses.replace(STEP, ddp_wrapper="none")
    own = groups[distributed.rank()]
    return steps_with(config, lambda step: part(step, 0, 1), group=own)


def one_is_not_finite(where: str) -> tuple[list, bool]:
    """A step in which rank 1 alone has a loss, or a gradient, that is not finite."""
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    step = TrainStep(model, STEP, CPU, torch.float32)
    before = [param.detach().clone() for param in model.parameters()]
    if distributed.rank() == 1 and where == "gradient":
        model.ln_final.weight.register_hook(lambda grad: grad * math.inf)
    if distributed.rank() == 1 and where == "loss":
        forward = step.loss.forward
        # its gradient is that of the loss alone
        step.loss.forward = lambda *args: forward(*args) + math.inf
    step(part(0, distributed.rank(), 1), 1e-2)
    is_same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    return step.read_log(), is_same


def evaluations() -> list[Evaluation]:
    """With more batches than ranks, as many, and fewer; the last window is shorter."""
    model = TransformerLM(MODEL, generator=torch.Generator().manual_seed(0))
    tokens = random_tokens(83, 61, seed=0)
    bytes_of_token = np.ones(61, np.int64)
    return [
        evaluate(model, tokens, bytes_of_token, batch_size=size, device="cpu", max_tokens=limit)
        for size, limit in ((1, 0), (3, 0), (8, 64), (64, 64))
    ]


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def train(config: TrainConfig, **options) -> lib.train.TrainResult:
    torch.set_num_threads(1)
    return lib.train.train(config, **options)


def tell_and_train(config: TrainConfig, begun: Path) -> lib.train.TrainResult:
    """`train`, after a file says that it begins."""
    begun.touch()
    return train(config)


def whole_run(config: TrainConfig) -> dict:
    """A run by all ranks, and what each of them did."""
    told, saved, opened = [], [], []
    save, enter = lib.train.save_checkpoint, MetricsLog.__enter__
    with (
        mock.patch.object(
            lib.train, "save_checkpoint", lambda *a, **k: saved.append(k["step"]) or save(*a, **k)
        ),
        mock.patch.object(MetricsLog, "__enter__", lambda log: opened.append(1) or enter(log)),
    ):
        result = train(config, on_metrics=told.append)
    return {"result": result, "told": told, "saved": saved, "logs": len(opened)}


@contextmanager
def before_step(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Let this rank act before the optimizer step of that number."""
    call, taken = TrainStep.__call__, []

    def step(self, *args):
        taken.append(1)
        if len(taken) == number:
            act()
        call(self, *args)

    with mock.patch.object(TrainStep, "__call__", step):
        yield


def signal_to_one(config: TrainConfig) -> tuple[str, int]:
    """Rank 1 gets a SIGTERM in step 6."""
    act = (lambda: os.kill(os.getpid(), signal.SIGTERM)) if distributed.rank() == 1 else int
    with before_step(6, act):
        result = train(config)
    return result.status, result.step


def full_disk(config: TrainConfig) -> tuple[str, str]:
    """Rank 0 cannot save."""
    refuse = OSError(errno.ENOSPC, "no space left to write a checkpoint")
    with mock.patch.object(lib.train, "save_checkpoint", side_effect=refuse):
        return error_of(lambda: train(config))


def errors(config: TrainConfig, folder: Path) -> dict[str, tuple[str, str]]:
    """What ends runs on all ranks before they begin."""
    rank, here = distributed.rank(), Path.cwd()
    changes = {
        "none": {"ddp_wrapper": "none"},
        "no data": {"data": folder / "nowhere"},
        "no data on rank 1": {"data": config.data if rank == 0 else folder / "nowhere"},
        "not as rank 0": {"log_interval": 4 + rank},
        "other run": {"output": folder / "run", "batch_size": config.batch_size + 1},
        "no folder": {"output": Path("/proc/run")},
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
    # as hosts whose disks are their own
    other = folder / f"host {rank}"
    other.mkdir()
    os.chdir(other)
    found["not shared"] = error_of(lambda: train(dataclasses.replace(config, output=Path("apart"))))
    os.chdir(here)
    return found


def everything(config: TrainConfig, folder: Path) -> dict:
    """All that one start of two ranks can tell. `folder / "half"` holds a run of one process."""
    run, stopped = folder / "run", folder / "stopped"
    found = {
        "ways": each_way(),
        "alone": alone(),
        "gradient": one_is_not_finite("gradient"),
        "loss": one_is_not_finite("loss"),
        "evaluations": evaluations(),
        "run": whole_run(dataclasses.replace(config, output=run)),
        "again": train(dataclasses.replace(config, output=run)).status,
        "signal": signal_to_one(dataclasses.replace(config, output=stopped)),
        "resumed": train(dataclasses.replace(config, output=stopped)).status,
        "from one": train(dataclasses.replace(config, output=folder / "half")).status,
        "full disk": full_disk(dataclasses.replace(config, output=folder / "full")),
        "errors": errors(config, folder),
    }
    # stopped here, and gone on with by one process
    with before_step(6, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        train(dataclasses.replace(config, output=folder / "to one"))
    return found


def blocks_and_whole() -> dict[str, tuple[list, list]]:
    """Compiled steps: what each wrapper reports."""
    config = dataclasses.replace(STEP, compile=True)
    return {
        name: steps_with(
            dataclasses.replace(config, ddp_wrapper=name),
            lambda step: part(step, distributed.rank(), 1),
        )
        for name in ("flat", "flashddp", "torch_ddp")
    }


def digest(weights: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()


def main() -> None:
    """Under torchrun: train; with a second argument, be killed once as rank 1 in step 13."""
    config = from_json(TrainConfig, Path(sys.argv[1]))
    marker = Path(sys.argv[2]) if len(sys.argv) > 2 else None

    def die() -> None:
        if marker is not None and distributed.rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def command() -> int:
        with before_step(13, die):
            result = train(config)
        distributed.print_once(result.status, result.step)
        return 0

    sys.exit(run_as_rank(command, print))


if __name__ == "__main__":
    main()
