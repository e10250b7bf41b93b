"""Process groups: starting workers, joining them, and what every rank asks for.

A rank is one process of a group; the ranks of a group call the same collectives in the same order.
A process without a group is rank 0 of 1, so that the same code runs alone, under `launch` and under
`torchrun`. Functions take the group as an argument; None is the group of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.distributed_group import (
    all_gather,
    barrier,
    checked_backend,
    current_device,
    join_group,
    rank,
    reduce_scatter,
    world_size,
)
from lib.distributed_launch import WorkerError, launch
from lib.distributed_restart import rendezvous_from_environment
from lib.hardware import pick_device

__all__ = [
    "WorkerError",
    "all_gather",
    "barrier",
    "broadcast_module",
    "check_same",
    "current_device",
    "init_from_environment",
    "launch",
    "mean_over_ranks",
    "print_once",
    "progress",
    "rank",
    "reduce_scatter",
    "world_size",
]
# What torchrun tells each of its workers.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def init_from_environment(
    backend: str | None = None, *, timeout: float = 300.0
) -> Iterator[torch.device]:
    """Be the rank that `torchrun` made this process, in the block; yields the rank's device.

    Without `torchrun` there is no group, and the device is the best of this machine. Where a group
    exists, as under `launch`, it is used and left as it is. In the block, `lib` logs from rank 0
    only, and errors from any rank.

    Args:
        backend: as in `launch`.
        timeout: seconds that a rank waits for the others in a collective.

    Raises:
        ValueError: an environment variable or GPU is missing, or `backend` is unknown.
        TimeoutError: the others did not come to a collective in time (gloo; NCCL ends the process).
    """
    if dist.is_initialized():
        yield current_device()
        return
    if "RANK" not in os.environ:
        if backend is not None:
            checked_backend(backend, 1)
        yield pick_device({None: "auto", "nccl": "cuda", "gloo": "cpu"}[backend])
        return
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"RANK is {os.environ['RANK']!r}, but {', '.join(missing)} is not set; right is: all "
            "of what torchrun sets, or no RANK"
        )
    local_rank, local_world_size = (int(os.environ[f"LOCAL_{n}"]) for n in ("RANK", "WORLD_SIZE"))
    backend = checked_backend(backend, local_world_size)
    rendezvous = functools.partial(rendezvous_from_environment, timeout)
    with join_group(backend, local_rank, local_world_size, timeout, rendezvous) as device:
        yield device


def print_once(*values: Any, **options: Any) -> None:
    """Print on rank 0 only."""
    if rank() == 0:
        print(*values, **options)


def progress(steps: Iterable[Any], **options: Any) -> Iterable[Any]:
    """A tqdm bar around `steps` on rank 0, nothing elsewhere; `options` are tqdm's."""
    from tqdm import tqdm

    return tqdm(steps, **(options | {"disable": True} if rank() else options))


def mean_over_ranks(value: float | Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """The mean of each rank's `value`, a number or a tensor; the result is one too.

    Added up in float64, so that every rank gets the same bits whatever the dtype.
    """
    if world_size(group) == 1:
        return value
    total = torch.as_tensor(value).to(current_device(group), torch.float64, copy=True)
    dist.all_reduce(total, group=group)
    total /= world_size(group)
    return total.to(value.device, value.dtype) if isinstance(value, Tensor) else total.item()


def check_same(facts: dict[str, str], group: dist.ProcessGroup | None = None) -> None:
    """Raise a `ValueError` on all ranks, naming the first difference, unless all give the same."""
    if world_size(group) == 1:
        return
    every: list[dict[str, str]] = [{} for _ in range(world_size(group))]
    dist.all_gather_object(every, facts, group=group)
    for other, theirs in enumerate(every):
        for name in [*every[0], *theirs]:
            ours, found = (given.get(name, "missing") for given in (every[0], theirs))
            if ours != found:
                raise ValueError(
                    f"{name} is {ours} on rank 0, but {found} on rank {other}; right is: the same "
                    "on all ranks"
                )


@torch.no_grad()
def broadcast_module(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks the parameters and buffers of the group's rank 0; tied ones are sent once.

    Raises:
        ValueError: a parameter or buffer differs between ranks in shape, dtype, kind of device or
            `requires_grad`, or has no memory yet (device "meta").
    """
    if world_size(group) == 1:
        return
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    check_same({name: _describe(tensor) for name, tensor in tensors.items()}, group)
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on device meta; right is: a module with weights")
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for tensor in tensors.values():
        # of what shares its memory but not autograd's rules about leaves
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, first, group=group)
        tensor.detach().copy_(dense)


def _describe(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    use = "trained" if tensor.requires_grad else "fixed"
    return f"{kind} {tuple(tensor.shape)} on {tensor.device.type}, {use}"
