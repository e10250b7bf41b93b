"""Starting ranks: `launch` for notebooks and tests, `run_as_rank` for commands under torchrun."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import json
import math
import multiprocessing.util
import numbers
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.multiprocessing as mp

from lib.core.files import folder_for_sockets, write_atomically
from lib.core.settings import whole_number
from lib.ddp.process_group import (
    REGISTERED,
    barrier,
    checked_backend,
    gather_objects,
    init_from_environment,
    is_collective,
    join_group,
    on_each_rank,
    rank,
)

T = TypeVar("T")
# Seconds that the other ranks have to exit by themselves after one has failed.
GRACE_SECONDS = 2.0
# What takes long to load, and ranks need if the process that launches them has it.
SLOW_TO_LOAD = ("torch._dynamo", "matplotlib.pyplot", "pandas")
# Variable with the folder of a job, which is removed however the job ends.
JOB_FOLDER = "WORKBOOK_JOB_FOLDER"
# Errors of gloo and NCCL when the process at the other end is gone.
LOST = ("connection reset by peer", "connection closed by peer", "remote process exited")


class WorkerError(RuntimeError):
    """The first failure of any rank, which made a launched job fail.

    `rank` is the one that failed; the message has its Python traceback, or what it was doing when
    it crashed. `has_died` tells whether the process ended without an exception, such as by a
    signal; what other ranks raised follows from that.
    """

    def __init__(self, message: str, rank: int, has_died: bool = False) -> None:
        super().__init__(message)
        self.rank, self.has_died = rank, has_died


def launch(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = None,
    options: Any = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes that form a group; return their results.

    For notebooks and tests; jobs on several hosts start under `torchrun`. Ranks are never forked
    from this process (see `_start_method`). Arguments and results are copied: ranks share no
    memory. Tensors in the results are on the CPU. With gloo, ranks share the processor cores.

    Args:
        fn: a function of an importable file; it learns its rank from `rank()`.
        backend: "nccl" (rank i on GPU i) or "gloo" (all on the CPU), by default NCCL if there are
            enough GPUs; or the name of a registered one, such as "simulated" of
            `lib.lessons.simulated_network`.
        options: of a registered backend.
        timeout: seconds that a rank waits for the others in a collective and at the end of `fn`.

    Returns:
        What each rank's call returned, in order of the ranks.

    Raises:
        ValueError: an argument is wrong, or new processes cannot import `fn`, such as one of a
            notebook cell.
        WorkerError: a rank raised an error, died or timed out; the others were stopped.
    """
    _check_importable(fn)
    world_size = whole_number("world_size", world_size, least=1)
    if not (isinstance(timeout, numbers.Real) and 0 < timeout < math.inf):
        raise ValueError(f"timeout must be more than 0 and finite, got {timeout!r}")
    backend = checked_backend(backend, world_size, options)
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        # through a file: tensors passed to processes directly would be shared memory
        registered = REGISTERED.get(backend)
        torch.save((fn, args, options, registered), folder / "call.pt")
        job = (world_size, folder, backend, timeout, dict(os.environ))
        workers = None
        try:
            with _interrupts_held_back():
                workers = mp.start_processes(
                    _work, job, nprocs=world_size, join=False, start_method=_start_method()
                )
            ended = _wait_for(workers.processes)
        finally:
            if workers:
                _terminate(workers.processes)
        results = [_result_file(folder, rank) for rank in range(world_size)]
        if any(process.exitcode for process in workers.processes) or not all(
            file.exists() for file in results
        ):
            raise _failure(folder, [process.exitcode for process in workers.processes], ended)
        return [torch.load(file, map_location="cpu", weights_only=False) for file in results]


def _start_method() -> str:
    """Choose how new processes start, and have torch loaded before them where that is safe.

    On Linux without a GPU they are forked from a server that has loaded torch, what of SLOW_TO_LOAD
    this process has, and nothing of `lib`: after the first job a rank starts in a tenth of a
    second, not in seconds, and still sees edited files. Elsewhere each process is spawned and loads
    torch itself.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return "spawn"
    _keep_sockets_short()
    loaded_here = [name for name in SLOW_TO_LOAD if name in sys.modules]
    mp.set_forkserver_preload(["torch", *loaded_here])
    return "forkserver"


def _keep_sockets_short() -> None:
    """Have multiprocessing make its sockets where their paths are not too long."""
    before, tempfile.tempdir = tempfile.tempdir, folder_for_sockets()
    try:
        # made in the first call, and kept
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def _check_importable(fn: Callable[..., Any]) -> None:
    """Refuse a function that a new process could not import by its name."""
    target = fn.func if isinstance(fn, functools.partial) else fn
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    found = None
    if module and name and module != "__main__":
        with contextlib.suppress(ImportError, AttributeError):
            found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if found is not target or not callable(target):
        raise ValueError(
            "fn must be a function at the top level of a file, which new processes can import, not "
            f"of a cell, a script or another function; got {name or target!r} of {module}"
        )


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; processes that start in it inherit that.

    So one that is still importing PyTorch prints no traceback, and none starts unknown to `launch`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # it would let interrupts through again when it starts
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # another thread may get it, and Python then calls the handler in the main one
    is_main = threading.current_thread() is threading.main_thread()
    came: list[int] = []
    if is_main:
        handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _wait_for(processes: list[Any]) -> list[int]:
    """Wait until all ranks have ended, or one has failed; return those that ended, in that order.

    After a failure the others have GRACE_SECONDS to end by themselves.
    """
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    ended: list[int] = []
    deadline = math.inf
    while running:
        seconds = max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(running), None if deadline == math.inf else seconds)
        for sentinel in ready:
            ended.append(running.pop(sentinel))
            processes[ended[-1]].join()
        if deadline == math.inf and any(processes[rank].exitcode for rank in ended):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() >= deadline:
            break
    return ended


def _work(
    rank: int,
    world_size: int,
    folder: Path,
    backend: str,
    timeout: float,
    environment: dict[str, str],
) -> None:
    """Run a launched process: join the group, call, and leave the result or failure in `folder`."""
    # what is loaded by now is no garbage: looking through it would take a quarter of a second
    gc.freeze()
    # a crash leaves what every thread was doing
    faulthandler.enable(open(_crash_file(folder, rank), "w"))  # noqa: SIM115  # for good
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # a server has the environment of its own start
    os.environ.clear()
    os.environ.update(environment)
    # an interrupt ends a worker silently, even inside a collective
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for prefix in ("", "LOCAL_"):
        os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(world_size)}
    os.environ[JOB_FOLDER] = str(folder)
    numbers = {"rank": rank, "world_size": world_size}
    rendezvous: dict[str, Any] = {"init_method": f"file://{folder}/rendezvous", **numbers}
    has_returned = False
    try:
        # loading a registered backend's function imports its file, which registers it here
        fn, args, options, registered = torch.load(folder / "call.pt", weights_only=False)
        if registered is not None:
            rendezvous["pg_options"] = options
        with join_group(backend, rank, world_size, timeout, lambda: rendezvous):
            torch.save(fn(*args), _result_file(folder, rank))
            has_returned = True
            barrier()
    except BaseException as error:
        record = {
            "time": time.time(),
            "has_returned": has_returned,
            "summary": traceback.format_exception_only(error)[-1].strip(),
            "traceback": traceback.format_exc(),
        }
        write_atomically(_failure_file(folder, rank), json.dumps(record))
        _exit_now(1)
    _exit_cleanly(0)


def _end_with_parent() -> None:
    """End this process, even inside a collective, as soon as the one that launched it is gone."""
    mp.parent_process().join()
    _exit_now(1)


def _exit_cleanly(exitcode: int) -> NoReturn:
    """Exit after leaving the group: run exit handlers, but don't tear down torch's threads.

    Tearing them down occasionally aborts a process that has finished.
    """
    atexit._run_exitfuncs()
    _exit_now(exitcode)


def _exit_now(exitcode: int) -> NoReturn:
    """Exit without waiting for collectives that never finish."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.pt"


def _crash_file(folder: Path, rank: int) -> Path:
    return folder / f"crash-{rank}.txt"


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def _failure(folder: Path, exitcodes: list[int], ended: list[int]) -> WorkerError:
    """The error of a job whose ranks `ended` by themselves, in this order; the others were stopped.

    The cause is a rank that ended without an exception, if there is one, else the earliest
    exception: later ones are raised because a rank is gone. One of a rank whose function had
    returned, and which waited for the others, counts only if there is no other.
    """
    ranks = range(len(exitcodes))
    files = {r: _failure_file(folder, r) for r in ranks}
    failures = {r: json.loads(files[r].read_text()) for r in ranks if files[r].exists()}
    returned = {r for r in ended if exitcodes[r] == 0 and _result_file(folder, r).exists()}
    died = [r for r in ended if r not in failures and r not in returned]
    returned |= {r for r in failures if failures[r]["has_returned"]}
    causes = [r for r in failures if r not in returned] or failures

    earliest = min(causes, key=lambda r: failures[r]["time"], default=None)
    if died:
        rank = died[0]
        message = f"rank {rank} of {len(ranks)} {_how_it_ended(exitcodes[rank])}"
        parts = [message, _stack_of_crash(_crash_file(folder, rank))]
        # of interest unless it only says that the rank is gone
        if earliest is not None and not _is_lost(failures[earliest]["summary"]):
            parts.append(f"rank {earliest} raised:\n{failures[earliest]['traceback']}")
        return WorkerError("\n\n".join(filter(None, parts)), rank, has_died=True)

    rank = earliest
    failure, others = failures[rank], ""
    # a registered backend may name them itself
    is_named = "did not call" in failure["summary"]
    stopped = [r for r in ranks if r not in (*ended, *failures)]
    if failure["summary"].startswith("TimeoutError") and stopped and not is_named:
        others = f" (not called by rank {', '.join(map(str, stopped))})"
    elif others_returned := sorted({*returned} - {rank}):
        others = f" (had returned by then: rank {', '.join(map(str, others_returned))})"
    message = f"rank {rank} of {len(ranks)} raised {failure['summary']}{others}"
    return WorkerError(f"{message}\n\n{failure['traceback']}", rank)


def _stack_of_crash(file: Path) -> str:
    """The stacks of a rank's threads when it crashed; "" if unknown."""
    text = file.read_text(errors="replace") if file.exists() else ""
    # a list of all compiled modules follows
    threads = text.partition("\nExtension modules:")[0].strip().split("\n\n")
    return "\n\n".join(thread for thread in threads if _end_with_parent.__name__ not in thread)


def _is_lost(message: str) -> bool:
    """Whether an error of gloo or NCCL says that the process at the other end is gone."""
    return any(words in message.lower() for words in LOST)


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode} before its function returned"
    name = signal.Signals(-exitcode).name
    hints = {
        "SIGABRT": "; gloo aborts a rank that receives more data than it asked for (shapes differ "
        "between ranks), NCCL one that waited longer than timeout",
        "SIGKILL": "; the system does that when memory runs out",
    }
    return f"was killed by {name}{hints.get(name, '')}"


def _terminate(processes: list[Any]) -> None:
    """Leave no worker behind, however waiting for them ended."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def run_as_rank(command: Callable[[], int], report: Callable[[Exception], None]) -> NoReturn:
    """Run `command` in a process that `torchrun` started, and exit.

    An error that all ranks raise alike is reported by rank 0 with `report`; exit code 2.

    Raises:
        ConnectionError: another rank is gone.
        Exception: what this rank alone raised.
    """
    with init_from_environment():
        try:
            code = command()
        except SystemExit as refusal:
            code = refusal.code
        except Exception as error:
            if isinstance(error, RuntimeError) and _is_lost(str(error)):
                raise ConnectionError(
                    f"rank {rank()} lost another rank, which was killed or reported an error"
                ) from error
            if not is_collective(error):
                raise
            if rank() == 0:
                report(error)
            code = 2
        # torchrun ends the others as soon as one exits with an error
        barrier()
    _exit_cleanly(code if isinstance(code, int) else 1)


def parse_as_rank(parse: Callable[[], T]) -> T:
    """Return what `parse` makes of the arguments; if any rank refuses them, all exit.

    `parse` refuses by printing why and raising `SystemExit`. The first rank that does so prints.
    """

    def parse_or_refuse() -> tuple[T | None, int | str | None]:
        try:
            return parse(), None
        except SystemExit as refusal:
            return None, refusal.code

    # hold back what ranks other than the first print
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        if rank() > 0:
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(printed))
        config, code = on_each_rank(parse_or_refuse)
    codes = gather_objects(code)
    first = next((r for r, code in enumerate(codes) if code is not None), None)
    if first is None:
        return config
    if 0 < first == rank():
        print(f"rank {first}:\n{printed.getvalue()}", file=sys.stderr, end="")
    raise SystemExit(codes[first])
