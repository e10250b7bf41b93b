"""What the tests of `lib.distributed` run in workers; as a program, what they give to torchrun."""

import argparse
import gc
import importlib
import io
import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lib import distributed


def run_cases(module: str, names: list[str]) -> dict[str, Any]:
    """What each function of a file returns on this rank, or the traceback of what it raised."""
    results = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = getattr(importlib.import_module(module), name)()
        except Exception:
            results[name] = traceback.format_exc()
        gc.collect()
        distributed.barrier()
    return results


def identity(x: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    """Rank, world size, and the argument changed in place; rank 0 prints."""
    x += distributed.rank()
    distributed.print_once("printed by rank", distributed.rank())
    return distributed.rank(), distributed.world_size(), x


def fail(how: str) -> None:
    """Rank 1 fails in the given way, and the others wait for it."""
    if distributed.rank() == 1:
        match how:
            case "raises":
                raise KeyError("a name that is missing")
            case "exits":
                sys.exit(3)
            case "vanishes":
                os._exit(0)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(1000)
            case "returns early":
                return
    for _ in range(2):
        distributed.barrier()


def fail_with_collective_open() -> None:
    """Rank 0 raises while a collective of its own waits for a rank that is busy."""
    if distributed.rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        raise ValueError("open")
    time.sleep(1000)


def return_what_cannot_be_saved():
    return lambda: None


class Tied(nn.Module):
    """A tied pair, a buffer of integers, one that is not saved, and a transposed parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.fixed = nn.Parameter(torch.randn(2, 4).T, requires_grad=False)
        self.register_buffer("count", torch.full((), seed))
        self.register_buffer("angles", torch.full((2,), float(seed)), persistent=False)


def helpers() -> dict:
    """What the helpers give on this rank of several."""
    rank = distributed.rank()
    module = Tied(seed=rank)
    sent, broadcast = [], dist.broadcast
    dist.broadcast = lambda tensor, *args, **options: (
        sent.append(tensor.numel()),
        broadcast(tensor, *args, **options),
    )
    distributed.broadcast_module(module)
    dist.broadcast = broadcast
    expected = Tied(seed=0)
    pairs = zip(
        [*module.parameters(), *module.buffers()], [*expected.parameters(), *expected.buffers()]
    )
    return {
        "float": distributed.mean_over_ranks(float(rank)),
        "tensor": distributed.mean_over_ranks(torch.tensor([rank, 2 * rank], dtype=torch.bfloat16)),
        "is broadcast": all(torch.equal(a, b) for a, b in pairs),
        "sent": sent,
        "is tied": module.a.weight is module.b.weight,
        "log level": logging.getLogger("lib").getEffectiveLevel(),
        "has bar": not distributed.progress([], file=io.StringIO()).disable,
        "steps": list(distributed.progress(range(3), file=io.StringIO())),
        "device": str(distributed.current_device()),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    }


def inside_init() -> str:
    """`init_from_environment` where a group exists."""
    with distributed.init_from_environment() as device:
        pass
    assert dist.is_initialized()
    return str(device)


def broadcast_unlike(what: str) -> str:
    """The error of modules that differ between ranks."""
    is_odd = distributed.rank() == 1
    match what:
        case "shape":
            module = nn.Linear(3, 4 if is_odd else 5, bias=False)
        case "dtype":
            module = nn.Linear(3, 4, dtype=torch.bfloat16 if is_odd else None)
        case "frozen":
            module = nn.Linear(3, 4).requires_grad_(not is_odd)
        case "names":
            module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(1 + is_odd)])
        case "meta":
            module = nn.Linear(3, 4, device="meta")
    try:
        distributed.broadcast_module(module)
    except ValueError as error:
        return str(error)
    return "no error"


def all_differences() -> list[str]:
    return [broadcast_unlike(what) for what in ("shape", "dtype", "frozen", "names", "meta")]


def main() -> None:
    """Under torchrun: write what this rank is, or fail as asked, in the group of all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fail", default="")
    parser.add_argument("--timeout", type=float, default=60)
    options = parser.parse_args()
    with distributed.init_from_environment("gloo", timeout=options.timeout) as device:
        if options.fail == "open":
            fail_with_collective_open()
        if options.fail:
            fail(options.fail)
        rank = distributed.rank()
        record = {
            "rank": rank,
            "world_size": distributed.world_size(),
            "device": str(device),
            "mean": distributed.mean_over_ranks(float(rank)),
            "local rank": os.environ["LOCAL_RANK"],
        }
        (options.folder / f"{rank}.json").write_text(json.dumps(record))
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
