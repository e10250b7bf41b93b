"""Ranks that start at once: copies of a process that has loaded what they need."""

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

# What ranks load in seconds, the same in all test files: pytest has one server, and the file that
# comes first starts it. Deterministic algorithms are switched by a function that loads
# torch's compiler; FSDP2 and ZeroRedundancyOptimizer load much of torch.distributed.
LOADED = ["torch._inductor", "torch._inductor.config"]
LOADED += ["torch.distributed.fsdp", "torch.distributed.optim"]
LOADED += ["lib.train", "lib.pipeline", "lib.sharded_optimizer", "pytest"]


def work(
    rank: int, fn: Callable[..., Any], environment: dict[str, str], parent: int, *args: Any
) -> None:
    """Call `fn` as in a process that `parent` had spawned, with its environment."""
    os.environ.clear()
    os.environ.update(environment)
    # a copy's parent is the server; both end where the server's parent does
    os.getppid = lambda: parent
    fn(rank, *args)


def start(original: Callable[..., Any], fn: Callable[..., Any], args: tuple, **options: Any) -> Any:
    """`torch.multiprocessing.start_processes`, of copies."""
    args = (fn, dict(os.environ), os.getpid(), *args)
    return original(work, args, start_method="forkserver", **options)


@contextmanager
def ranks_from_a_server() -> Iterator[None]:
    """Let `lib.distributed.launch` start its ranks from a server, where there can be one.

    Its own tests, and those of `torchrun`, start them as everybody does.
    """
    import torch
    import torch.multiprocessing as mp

    # a copy of a process that has looked at its GPUs could not use them
    if "forkserver" not in mp.get_all_start_methods() or torch.cuda.is_available():
        yield
        return
    multiprocessing.set_forkserver_preload(LOADED)
    with mock.patch.object(mp, "start_processes", functools.partial(start, mp.start_processes)):
        yield
