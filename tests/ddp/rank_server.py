"""Ranks that start at once: copies of a process that has loaded what they need."""

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

# Modules that take seconds to load, the same for all test files: pytest has one server, which the
# first file starts. Switching deterministic algorithms loads torch's compiler; FSDP2 and
# ZeroRedundancyOptimizer load much of torch.distributed.
LOADED = ["torch._inductor", "torch._inductor.config"]
LOADED += ["torch.distributed.fsdp", "torch.distributed.optim"]
LOADED += ["lib.training.loop", "lib.data.prepare", "lib.sharded_optimizer.optimizer", "pytest"]


def work(
    rank: int, fn: Callable[..., Any], environment: dict[str, str], parent: int, *args: Any
) -> None:
    """Call `fn` as in a process that `parent` spawned, with its environment."""
    os.environ.clear()
    os.environ.update(environment)
    # the parent of a copy is the server, which ends when pytest does
    os.getppid = lambda: parent
    fn(rank, *args)


def start(original: Callable[..., Any], fn: Callable[..., Any], args: tuple, **options: Any) -> Any:
    """`torch.multiprocessing.start_processes`, of copies."""
    args = (fn, dict(os.environ), os.getpid(), *args)
    return original(work, args, start_method="forkserver", **options)


@contextmanager
def ranks_from_a_server() -> Iterator[None]:
    """Let `lib.ddp.launcher.launch` start its ranks from a server, if there can be one."""
    import torch
    import torch.multiprocessing as mp

    # a copy of a process that has initialized CUDA could not use it
    if "forkserver" not in mp.get_all_start_methods() or torch.cuda.is_available():
        yield
        return
    multiprocessing.set_forkserver_preload(LOADED)
    with mock.patch.object(mp, "start_processes", functools.partial(start, mp.start_processes)):
        yield
