"""What ranks run in tests of processes; as a program, what `torchrun` starts."""

import contextlib
import functools
import gc
import importlib
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lib.ddp import launcher, process_group
from lib.ddp.launcher import parse_as_rank

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = ("reduce_scatter_single", "reduce_scatter_tensor", "all_gather_single")
COLLECTIVES += ("all_gather_into_tensor", "all_reduce", "broadcast")


def launch(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", options: Any = None
) -> list:
    """What `fn` returns on each rank, after a long time too: other programs may take the cores."""
    return launcher.launch(fn, world_size, *args, backend=backend, options=options, timeout=120)


def run_cases(module: str, names: list[str]) -> dict[str, Any]:
    """What each function of a file returns on this rank.

    The first that fails ends the job, since its ranks are out of step.
    """
    results = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = getattr(importlib.import_module(module), name)()
        except Exception as error:
            raise AssertionError(f"{name} failed") from error
        gc.collect()
        process_group.barrier()
    return results


def message_of(action: Callable[[], Any]) -> str:
    """Class and text of the exception that `action` raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextlib.contextmanager
def recorded_collectives(note: Callable[[str, int], Any]) -> Iterator[None]:
    """Call `note` with kind and elements of the whole tensor as each collective starts."""
    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                call = functools.partial(_noting, note, "_".join(name.split("_")[:2]))
                call = functools.partial(call, getattr(dist, name))
                patches.enter_context(mock.patch.object(dist, name, call))
        yield


def _noting(
    note: Callable, kind: str, original: Callable, tensor: torch.Tensor, *args: Any, **options: Any
) -> Any:
    # a reduce-scatter's second argument is the whole tensor
    note(kind, (args[0] if kind == "reduce_scatter" else tensor).numel())
    return original(tensor, *args, **options)


# Launching


def start_ranks(*program: str) -> list[subprocess.Popen]:
    """Start Python's `program` as two ranks, as torchrun does, without its agent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *program],
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def identity(x: torch.Tensor) -> tuple[int, int, torch.Tensor, dict[str, str]]:
    """Rank, world size, the argument changed in place, and the variables of this rank."""
    x += process_group.rank()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    variables = {name: os.environ[name] for name in names}
    return process_group.rank(), process_group.world_size(), x, variables


def inside_init() -> str:
    """`init_from_environment` in a group that exists."""
    with process_group.init_from_environment() as device:
        pass
    assert dist.is_initialized()
    return str(device)


def write_pid_and_sleep(folder: str) -> None:
    (Path(folder) / f"{os.getpid()}.pid").touch()
    time.sleep(600)


def fail(how: str) -> None:
    """Rank 1 fails in the given way, and the others wait for it."""
    if process_group.rank() == 1:
        match how:
            case "raises":
                raise KeyError("a name that is missing")
            case "exits":
                sys.exit(3)
            case "vanishes":
                os._exit(0)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hangs":
                time.sleep(1000)
            case "returns early" | "returns before a collective":
                return
            case "sends another shape":
                dist.all_reduce(torch.ones(5))
    if how == "returns before a collective":
        dist.all_reduce(torch.ones(4))
        return
    if how == "sends another shape":
        dist.all_reduce(torch.ones(4))
    for _ in range(2):
        process_group.barrier()


def fail_with_collective_open() -> None:
    """Rank 0 raises while a collective of its own waits for a rank that is busy."""
    if process_group.rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        raise ValueError("open")
    time.sleep(1000)


def return_what_cannot_be_saved():
    return lambda: None


def parsed() -> dict[str, str]:
    """What becomes of arguments that rank 0, rank 1, or no rank refuses, and what is printed."""

    def parse(on_rank: int) -> str:
        if process_group.rank() == on_rank:
            print("bogus is no flag", file=sys.stderr)
            raise SystemExit(2)
        return "a config"

    def outcome(on_rank: int) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            try:
                return f"{parse_as_rank(lambda: parse(on_rank))}, {printed.getvalue()}"
            except SystemExit as refusal:
                return f"exit {refusal.code}, {printed.getvalue()}"

    return {name: outcome(rank) for name, rank in (("first", 0), ("second", 1), ("none", 9))}


# Groups


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


def broadcast() -> dict[str, Any]:
    """Whether a module is rank 0's afterwards, and how many elements were sent."""
    module, expected = Tied(seed=process_group.rank()), Tied(seed=0)
    sent = []
    with recorded_collectives(lambda kind, elements: sent.append(elements)):
        process_group.broadcast_module(module)
    tensors = [*module.parameters(), *module.buffers()]
    pairs = zip(tensors, [*expected.parameters(), *expected.buffers()])
    return {
        "is broadcast": all(torch.equal(a, b) for a, b in pairs),
        "is tied": module.a.weight is module.b.weight,
        "sent": sent,
    }


def means() -> tuple[float, torch.Tensor]:
    rank = process_group.rank()
    short = torch.tensor([rank, 2 * rank], dtype=torch.bfloat16)
    # 0 to 2 more than 2**24, which float32 cannot add up
    wide = torch.tensor(2.0**24 + rank, dtype=torch.float64)
    results = [process_group.mean_over_ranks(x) for x in (2.0**24 + rank, short, wide)]
    assert short.tolist() == [rank, 2 * rank], "the argument was changed"
    return tuple(results)


def settings() -> dict[str, Any]:
    return {
        "log level": logging.getLogger("lib").getEffectiveLevel(),
        "threads": torch.get_num_threads(),
    }


def failures_of_one() -> list[tuple[str, bool, bool]]:
    """The error on this rank, whether it is the original, and whether it is marked."""
    originals = [
        OSError("disk"),
        KeyError("name"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "bad"),
        torch.OutOfMemoryError("full"),
    ]
    results = []
    for original in originals:

        def call(original=original):
            if process_group.rank() == 1:
                raise original

        try:
            process_group.on_each_rank(call)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            results.append((text, error is original, process_group.is_collective(error)))
    return results


def results_of_calls() -> tuple[Any, Any]:
    """What each rank's own call returns, and what rank 0's returns everywhere."""
    calls = []

    def once() -> list[int]:
        calls.append(process_group.rank())
        return calls

    own = process_group.on_each_rank(lambda: 10 * process_group.rank())
    return own, process_group.on_first_rank(once), process_group.gather_objects(own)


def modules_that_differ() -> list[str]:
    """The errors of modules that differ between the last rank and the others."""
    is_odd = process_group.rank() == process_group.world_size() - 1
    modules = [
        nn.Linear(3, 4 if is_odd else 5, bias=False),
        nn.Linear(3, 4, dtype=torch.bfloat16 if is_odd else None),
        nn.Linear(3, 4).requires_grad_(not is_odd),
        nn.Sequential(*[nn.Linear(3, 3) for _ in range(1 + is_odd)]),
        nn.ModuleDict({name: nn.Linear(3, 3) for name in ("cba" if is_odd else "abc")}),
        nn.Linear(3, 4, device="meta"),
    ]
    return [message_of(lambda: process_group.broadcast_module(m)) for m in modules]  # noqa: B023


def lose_rank_1() -> int:
    if process_group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))
    return 0


def main() -> None:
    """Under torchrun: rank 0 fails with a collective open."""
    with process_group.init_from_environment("gloo", timeout=60):
        fail_with_collective_open()


if __name__ == "__main__":
    main()
