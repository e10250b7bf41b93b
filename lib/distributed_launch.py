"""Starting a job of several processes on this host, and telling what made it fail."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.multiprocessing as mp

from lib.distributed_group import barrier, checked_backend, join_group
from lib.files import write_atomically

# How long the ranks that are left may take to end by themselves after one has failed.
GRACE_SECONDS = 2.0


class WorkerError(RuntimeError):
    """What made a launched job fail: the first failure of any rank.

    `rank` is the one that failed, `worker_traceback` what Python printed there, "" where the
    process ended without a word.
    """

    def __init__(self, message: str, rank: int, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.worker_traceback = rank, worker_traceback


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes that form a group; return their results.

    For notebooks and tests; jobs of many hosts start under `torchrun`. The processes are spawned,
    never forked, by `torch.multiprocessing`. Arguments and results are copied: no rank shares
    memory with another. Tensors in the results are on the CPU. With gloo, processor cores are
    shared out among the ranks.

    Args:
        fn: a function of a file that can be imported; it asks `rank()` who it is.
        backend: "nccl" (rank i on GPU i) or "gloo" (all on the CPU); by default NCCL where there
            are GPUs enough.
        timeout: seconds that a rank waits for the others in a collective and at the end of `fn`.

    Returns:
        What each rank's call returned, in order of the ranks.

    Raises:
        ValueError: `fn` is from a cell or another place that workers cannot import it from.
        WorkerError: a rank raised, ended or was waited for too long; the others were ended too.
    """
    _check_importable(fn)
    if world_size < 1 or not 0 < timeout < math.inf:
        raise ValueError(
            f"world_size is {world_size} and timeout {timeout}; right is: at least 1, and above 0 "
            "and finite"
        )
    backend = checked_backend(backend, world_size)
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        # in a file, since tensors given to a process directly would be one memory for all of them
        torch.save((fn, args), folder / "call.pt")
        job = (world_size, folder, backend, timeout, os.getpid())
        workers = mp.start_processes(_work, job, nprocs=world_size, join=False)
        try:
            while not workers.join(grace_period=GRACE_SECONDS):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise _failure(folder, workers.processes, error.error_index) from None
        finally:
            _end(workers.processes)
        results = [_result_file(folder, rank) for rank in range(world_size)]
        for rank, file in enumerate(results):
            if not file.exists():
                raise _failure(folder, workers.processes, rank)
        return [torch.load(file, map_location="cpu", weights_only=False) for file in results]


def _check_importable(fn: Callable[..., Any]) -> None:
    """Refuse a function that a new process could not import by its name."""
    target = fn.func if isinstance(fn, functools.partial) else fn
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    found = None
    if module and name and module != "__main__":
        with contextlib.suppress(ImportError, AttributeError):
            found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if found is not target:
        raise ValueError(
            f"fn is {name or target!r} of {module}, which new processes cannot import; right is: "
            "a function at the top level of a file, not of a cell, a script or another function"
        )


def _work(
    rank: int, world_size: int, folder: Path, backend: str, timeout: float, parent: int
) -> None:
    """What a launched process does: join, call, leave its result or its failure in `folder`."""
    if os.getppid() != parent:
        # it ended while this process started; from here on torch ends this one with it
        _end_now(1)
    # an interrupt ends a worker silently, even inside a collective
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for prefix in ("", "LOCAL_"):
        os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(world_size)}
    place = {"rank": rank, "world_size": world_size}
    rendezvous = {"init_method": f"file://{folder}/rendezvous", **place}
    try:
        fn, args = torch.load(folder / "call.pt", weights_only=False)
        with join_group(backend, rank, world_size, timeout, lambda: rendezvous):
            torch.save(fn(*args), _result_file(folder, rank))
            barrier()
    except BaseException as error:
        record = {
            "time": time.time(),
            "summary": traceback.format_exception_only(error)[-1].strip(),
            "traceback": traceback.format_exc(),
        }
        write_atomically(_failure_file(folder, rank), json.dumps(record))
        _end_now(1)
    leave(0)


def leave(exitcode: int) -> NoReturn:
    """End this process, which has left its group, without taking torch's threads down.

    That aborts a finished process once in a while.
    """
    atexit._run_exitfuncs()
    _end_now(exitcode)


def _end_now(exitcode: int) -> NoReturn:
    """End this process without waiting for collectives that never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.pt"


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def _failure(folder: Path, processes: list[Any], first: int) -> WorkerError:
    """The error of a job in which rank `first` was the first that was seen to have failed.

    The cause is a rank that ended without a word, if there is one, else the earliest exception:
    the others fail because a rank is gone.
    """
    ranks = range(len(processes))
    files = {rank: _failure_file(folder, rank) for rank in ranks}
    failures = {r: json.loads(files[r].read_text()) for r in ranks if files[r].exists()}
    # ended by this process after the first failure
    ours = (-signal.SIGTERM, -signal.SIGKILL)
    ended = [r for r in ranks if r != first and r not in failures and processes[r].exitcode in ours]
    silent = [
        r
        for r in ranks
        if r not in failures
        and r not in ended
        and (processes[r].exitcode != 0 or not _result_file(folder, r).exists())
    ]
    if silent:
        rank = first if first in silent else silent[0]
        return WorkerError(
            f"rank {rank} of {len(ranks)} {_how_it_ended(processes[rank].exitcode)}", rank
        )
    rank = min(failures, key=lambda r: failures[r]["time"])
    failure = failures[rank]
    returned = [r for r in ranks if processes[r].exitcode == 0]
    others = ""
    if failure["summary"].startswith("TimeoutError") and ended:
        others = f" (never came: rank {', '.join(map(str, ended))})"
    elif returned:
        others = f" (had returned by then: rank {', '.join(map(str, returned))})"
    summary = f"{failure['summary']}{others}"
    return WorkerError(
        f"rank {rank} of {len(ranks)} raised {summary}\n\n{failure['traceback']}",
        rank,
        failure["traceback"],
    )


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode} before its function returned"
    name = signal.Signals(-exitcode).name
    hints = {
        "SIGABRT": "; with NCCL that is also how a rank ends that waited longer than timeout",
        "SIGKILL": "; the system does that where memory runs out",
    }
    return f"was ended by {name}{hints.get(name, '')}"


def _end(processes: list[Any]) -> None:
    """Leave no worker behind, whatever ended the waiting for them."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
