"""Being a rank: the group of all processes, and who and where this one is in it.

A rank is one process of a group; the ranks of a group call the same collectives in the same order.
A process without a group is rank 0 of 1.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lib.parallel import available_cpus

log = logging.getLogger(__name__)

BACKENDS = ("nccl", "gloo")


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's number in the group; 0 without one."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in the group; 1 without one."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def current_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must be for a collective: this rank's GPU with NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank of the group has come here."""
    if world_size(group) > 1:
        device = current_device(group)
        dist.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def reduce_scatter(output: Tensor, tensor: Tensor, **options: Any) -> Any:
    """`torch.distributed.reduce_scatter_tensor`, which PyTorch 2.13 gave another name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, tensor, **options)


def all_gather(output: Tensor, tensor: Tensor, **options: Any) -> Any:
    """`torch.distributed.all_gather_into_tensor`, which PyTorch 2.13 gave another name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, tensor, **options)


def checked_backend(backend: str | None, local_world_size: int) -> str:
    """The backend for that many ranks on this host."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if backend is None:
        if 0 < gpus < local_world_size:
            log.warning("%s ranks, but %s GPUs: gloo on the CPU", local_world_size, gpus)
        return "nccl" if gpus >= local_world_size else "gloo"
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; right is: None or one of {', '.join(BACKENDS)}")
    if backend == "nccl" and gpus < local_world_size:
        raise ValueError(
            f"backend is 'nccl' for {local_world_size} ranks on this host, which has {gpus} GPUs; "
            "right is: 'gloo', or a GPU for each rank"
        )
    return backend


@contextlib.contextmanager
def join_group(
    backend: str,
    local_rank: int,
    local_world_size: int,
    timeout: float,
    rendezvous: Callable[[], dict[str, Any]],
) -> Iterator[torch.device]:
    """Join the group of all ranks for the block, on this rank's device.

    `rendezvous` gives what `init_process_group` needs to find them.
    """
    device, options = torch.device("cpu"), {}
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # connects at once, so that a rank that is missing is found out here
        options["device_id"] = device
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cpus() // local_world_size))
    limit = datetime.timedelta(seconds=timeout)
    failed: list[BaseException] = []
    leave = functools.partial(_leave, failed)
    atexit.register(leave)
    try:
        dist.init_process_group(backend, timeout=limit, **rendezvous(), **options)
        with _quiet_unless_first():
            yield device
    except (Exception, KeyboardInterrupt) as error:
        # the group is left as it is: to destroy it may mean to wait for ranks that will not come
        failed.append(error)
        if _is_timeout(error):
            raise TimeoutError(
                f"rank {os.environ['RANK']} waited for other ranks longer than timeout = "
                f"{timeout:g} s; it is too short, or another rank hangs or never came"
            ) from error
        raise
    dist.destroy_process_group()
    atexit.unregister(leave)


def _leave(failed: list[BaseException]) -> None:
    """End a process that failed as a rank, since torch would wait for its open collectives."""
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def _quiet_unless_first() -> Iterator[None]:
    """Let only errors be logged by `lib`, except on rank 0."""
    logger = logging.getLogger("lib")
    before = logger.level
    if rank() != 0:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_timeout(error: BaseException) -> bool:
    # gloo and the rendezvous raise no class of their own for it
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in ("timed out", "timeout")
    )
