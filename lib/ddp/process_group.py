"""Process groups: joining one, its collectives, and ranks that agree and fail together.

A rank is one process of a group; all ranks call the same collectives in the same order. Without a
group a process is rank 0 of 1, so that the same code runs alone, under `launch` and under
`torchrun`. Functions take the group as an argument; None is the group of all ranks.

**Errors.** What ranks make together is compared, and so is the first step that they train together,
before the first collective, and an error of one rank is raised on all (`agree`, `on_each_rank`). In
later steps that would cost a collective each: there, an error of one rank should end its process,
upon which `launch` and `torchrun` end the others. If it is caught, and the rank doesn't call the
next collective, the others wait for it until the timeout.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import datetime
import faulthandler
import functools
import gc
import logging
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.core.hardware import available_cpus, pick_device

log = logging.getLogger(__name__)
T = TypeVar("T")
BACKENDS = ("nccl", "gloo")
# The registered ones: name -> what checks the options for a number of ranks.
REGISTERED: dict[str, Callable[[Any, int], None]] = {}
# What every backend sends; other dtypes travel as bytes.
SENT_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Variables that torchrun sets for each process.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's number in the group; 0 without one."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in the group; 1 without one.

    Raises:
        ValueError: this rank is not in the group.
    """
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size < 1:
        raise ValueError(
            f"group must be one that this rank is in, but rank {rank()} of {world_size()} is not; "
            "only the ranks that were given to new_group() may use it"
        )
    return size


def global_rank(rank: int, group: dist.ProcessGroup | None = None) -> int:
    """The number of a group's rank among all processes, which broadcasts take as their source."""
    return rank if group is None else dist.get_global_rank(group, rank)


def current_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of tensors in a collective: this rank's GPU with NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# Joining the group of all ranks


@contextlib.contextmanager
def init_from_environment(
    backend: str | None = None, *, timeout: float = 300.0
) -> Iterator[torch.device]:
    """Join the group as the rank that `torchrun` made this process; yields the rank's device.

    Without `torchrun` there is no group, and the device is the best of this machine. If a group
    exists, as under `launch`, it is used and left as it is. In the block, `lib` logs from rank 0
    only, except for errors.

    Args:
        backend: as in `launch`.
        timeout: seconds that a rank waits for the others in a collective.

    Raises:
        ValueError: an environment variable is missing or wrong, a GPU is missing, or `backend` is
            unknown.
        TimeoutError: a rank did not call a collective in time (gloo; NCCL aborts the process).
    """
    # there is a group already
    if dist.is_initialized():
        yield current_device()
        return
    # started without torchrun: one process
    if "RANK" not in os.environ:
        if backend is not None:
            checked_backend(backend, 1)
        yield pick_device({None: "auto", "nccl": "cuda", "gloo": "cpu"}[backend])
        return
    # started by torchrun
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be set, since RANK is {os.environ['RANK']!r}; torchrun "
            "sets all of them"
        )
    numbers = {name: _whole_number(name) for name in VARIABLES if name != "MASTER_ADDR"}
    for prefix in ("", "LOCAL_"):
        of_rank, count = numbers[f"{prefix}RANK"], numbers[f"{prefix}WORLD_SIZE"]
        if of_rank >= count:
            raise ValueError(
                f"{prefix}RANK must be below {prefix}WORLD_SIZE = {count}, got {of_rank}"
            )
    local_rank, local_world_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
    backend = checked_backend(backend, local_world_size)
    rendezvous = functools.partial(rendezvous_from_environment, timeout)
    with join_group(backend, local_rank, local_world_size, timeout, rendezvous) as device:
        yield device


def _whole_number(variable: str) -> int:
    """The number in an environment variable of `torchrun`.

    Raises:
        ValueError: it is none.
    """
    text = os.environ[variable]
    if not text.isdecimal():
        raise ValueError(f"{variable} must be a whole number, as torchrun sets it, got {text!r}")
    return int(text)


def register_backend(
    name: str, make: Callable[..., dist.ProcessGroup], check: Callable[[Any, int], None]
) -> None:
    """Let `launch` and torch.distributed know a backend for ranks on the CPU.

    Args:
        make: makes the group, as `torch.distributed.Backend.register_backend` with `extended_api`
            says; gets the options.
        check: called with the options and the number of ranks before any starts, to raise a
            `ValueError`. A function of the file that registers the backend, since ranks import it.
    """
    if name not in REGISTERED:
        dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
    REGISTERED[name] = check


def checked_backend(backend: str | None, local_world_size: int, options: Any = None) -> str:
    """Choose or check the backend, and its options, for `local_world_size` ranks on this host."""
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if backend is None:
        if 0 < gpus < local_world_size:
            log.warning("%s ranks, but %s GPUs: gloo on the CPU", local_world_size, gpus)
        backend = "nccl" if gpus >= local_world_size else "gloo"
    known = (*BACKENDS, *REGISTERED)
    if backend not in known:
        raise ValueError(f"backend must be None or one of {', '.join(known)}, got {backend!r}")
    if backend in REGISTERED:
        REGISTERED[backend](options, local_world_size)
        return backend
    if options is not None:
        raise ValueError(f"options must be None with backend {backend!r}, got {options!r}")
    if backend == "nccl" and gpus < local_world_size:
        raise ValueError(
            f"backend 'nccl' needs a GPU for each of {local_world_size} ranks on this host, which "
            f"has {gpus}; use 'gloo' or fewer ranks"
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

    Args:
        rendezvous: returns the arguments with which `init_process_group` finds the other ranks.
    """
    # a crash prints what every thread was doing
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    device = torch.device("cpu")
    options: dict[str, Any] = {}
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # connects at once, so that a missing rank is noticed here
        options["device_id"] = device
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cpus() // local_world_size))
    limit = datetime.timedelta(seconds=timeout)
    failed: list[BaseException] = []
    exit_if_failed = functools.partial(_exit_if_failed, failed)
    atexit.register(exit_if_failed)
    try:
        dist.init_process_group(backend, timeout=limit, **rendezvous(), **options)
        with _quiet_unless_first():
            yield device
    except (Exception, KeyboardInterrupt) as error:
        # leave the group as it is: destroying it may wait for ranks that are gone
        failed.append(error)
        if _is_timeout(error):
            raise TimeoutError(
                f"rank {os.environ['RANK']} waited for other ranks longer than timeout = "
                f"{timeout:g} s; it is too short, or another rank hangs or never started"
            ) from error
        raise
    _let_go()
    dist.destroy_process_group()
    atexit.unregister(exit_if_failed)


# Bound methods, held weakly, of what must let go of the group before it is destroyed.
_HOLDERS: list[weakref.WeakMethod] = []


def before_leaving(let_go: Callable[[], None]) -> None:
    """Call a bound method before this process leaves its group, if its object lives then."""
    _HOLDERS.append(weakref.WeakMethod(let_go))


def _let_go() -> None:
    while _HOLDERS:
        let_go = _HOLDERS.pop()()
        if let_go is not None:
            let_go()
    # what they let go of may be part of a cycle
    gc.collect()


def _exit_if_failed(failed: list[BaseException]) -> None:
    """Exit at once after a failure, since torch would wait for pending collectives."""
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def _quiet_unless_first() -> Iterator[None]:
    """Let `lib` log only errors in the block, except on rank 0."""
    logger = logging.getLogger("lib")
    before = logger.level
    if rank() != 0:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_timeout(error: BaseException) -> bool:
    # gloo and the rendezvous have no exception class for it
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)


def rendezvous_from_environment(timeout: float) -> dict[str, Any]:
    """The arguments with which `init_process_group` finds the ranks that torchrun started.

    torchrun may keep one store for all its restarts. In releases of PyTorch that do not separate
    them, ranks would read addresses of processes that are gone, and fail once more.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {"init_method": "env://"}
    numbers = {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        numbers["world_size"],
        is_master=False,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return numbers | {"store": store_of_this_start(store, **numbers)}


def store_of_this_start(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """Find a prefix of `store` that only the ranks started together use.

    torchrun's own restart count is not enough: hosts may count differently. Instead, rank 0 draws a
    prefix, and gives it to each number that another rank has drawn until that rank confirms it.
    Requests that earlier ranks left behind are answered too, and nobody reads the answers.
    """
    own = secrets.token_hex(8)
    if rank > 0:
        store.set(f"drawn/{rank}", own)
        prefix = store.get(f"prefix for/{own}").decode()
        store.set(f"confirmed/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    waiting = set(range(1, world_size))
    while waiting:
        for other in sorted(waiting):
            drawn = store.get(f"drawn/{other}").decode()
            store.set(f"prefix for/{drawn}", own)
            if store.check([f"confirmed/{own}/{other}"]):
                waiting.remove(other)
        time.sleep(0.01)
    return dist.PrefixStore(own, store)


# Collectives


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank of the group has called it."""
    if world_size(group) > 1:
        device = current_device(group)
        dist.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def reduce_scatter(output: Tensor, tensor: Tensor, **options: Any) -> Any:
    """`torch.distributed.reduce_scatter_tensor`, which PyTorch 2.13 renamed; complex ones too."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    if tensor.is_complex():
        output, tensor = as_real(output), as_real(tensor)
    return scatter(output, tensor, **options)


def all_gather(output: Tensor, tensor: Tensor, **options: Any) -> Any:
    """`torch.distributed.all_gather_into_tensor`, which PyTorch 2.13 renamed; of any dtype."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if tensor.dtype not in SENT_AS_THEY_ARE:
        output, tensor = as_sent(output), as_sent(tensor)
    return gather(output, tensor, **options)


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself, or pairs of real numbers for complex ones, which NCCL does not have."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Each rank's `value`, which can be pickled, in order of the ranks, on all ranks."""
    if world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def mean_over_ranks(value: float | Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """The mean of each rank's `value`, a number or a tensor, as a number or a tensor.

    Added up in float64, so that every rank gets the same bits whatever the dtype.
    """
    if world_size(group) == 1:
        return value
    total = torch.as_tensor(value, dtype=torch.float64).to(current_device(group), copy=True)
    dist.all_reduce(total, group=group)
    total /= world_size(group)
    return total.to(value.device, value.dtype) if isinstance(value, Tensor) else total.item()


@torch.no_grad()
def broadcast_module(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    facts: Callable[[], dict[str, str]] = dict,
) -> None:
    """Give all ranks the parameters and buffers of the group's rank 0; tied ones are sent once.

    Args:
        facts: what else the ranks must `agree` on before.

    Raises:
        Exception: as `agree`.
        ValueError: a parameter or buffer differs between ranks in shape, dtype, kind of device or
            `requires_grad`, has no shape or no memory of its own yet, is sparse, or is divided
            among the ranks.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if world_size(group) == 1:
        # nothing is sent, but what divided a module must not lie inside of what wraps it
        for name, tensor in tensors.items():
            _check_is_whole(name, tensor)
        facts()
        return

    def checked() -> dict[str, str]:
        for name, tensor in tensors.items():
            _check_can_be_sent(name, tensor)
        return {name: describe_tensor(tensor) for name, tensor in tensors.items()} | facts()

    agree(checked, group)
    for tensor in tensors.values():
        # detached: autograd forbids writing to leaves in place
        dense = tensor.detach().contiguous().resolve_conj()
        dist.broadcast(as_sent(dense.view(-1)), global_rank(0, group), group=group)
        tensor.detach().copy_(dense)


def _check_is_whole(name: str, tensor: Tensor) -> None:
    """Raise a `ValueError` if a tensor of a module is a rank's part of one."""
    if is_sharded(tensor):
        raise ValueError(
            f"{name} must be whole, but is divided among the ranks already: one of them would "
            "overwrite the others' parts; wrap the whole module once (FSDP: name parts in blocks=)"
        )


def _check_can_be_sent(name: str, tensor: Tensor) -> None:
    """Raise a `ValueError` unless a tensor of a module has memory that can be overwritten."""
    _check_is_whole(name, tensor)
    if nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{name} must have a shape, but is lazy; run a forward pass before wrapping"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be dense, got {tensor.layout}")
    if tensor.is_meta:
        raise ValueError(f"{name} must have memory, but is on device meta")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
        raise ValueError(
            f"{name} must have memory for each element, but is expanded; register its clone()"
        )


def as_sent(flat: Tensor) -> Tensor:
    """A view of a 1-dim tensor in a dtype that every backend sends."""
    return flat if flat.dtype in SENT_AS_THEY_ARE else flat.view(torch.uint8)


def mark_sharded(param: Tensor) -> None:
    """Mark a parameter that from now on is this rank's part of one."""
    param.is_shard = True  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is a rank's part of one: of `lib.fsdp`, or a DTensor of PyTorch's."""
    return getattr(tensor, "is_shard", False) or hasattr(tensor, "device_mesh")


# Agreeing and failing together, so that no rank waits for one that is gone


def agree(facts: Callable[[], dict[str, str]], group: dist.ProcessGroup | None = None) -> None:
    """Check what this rank was given, and that all ranks were given the same; on all ranks.

    Everything that ranks make together begins with this check, so that they meet in the same
    collective even if one was asked for something else.

    Args:
        facts: checks, and returns what must be the same. The order counts too: what ranks do with
            parameters goes by their positions.

    Raises:
        Exception: as `gather_results`, if `facts` raised.
        ValueError: ranks were given different ones; names the first difference, on all ranks.
    """
    first, *others = gather_results(facts, group)
    for other, theirs in enumerate(others, start=1):
        for name in [*first, *theirs]:
            expected, found = first.get(name, "missing"), theirs.get(name, "missing")
            if expected != found:
                raise ValueError(
                    f"{name} must be the same on all ranks, but is {expected} on rank 0 and "
                    f"{found} on rank {other}"
                )
        for position, pair in enumerate(zip(first, theirs)):
            if pair[0] != pair[1]:
                raise ValueError(
                    f"the order must be the same on all ranks, but at position {position} is "
                    f"{pair[0]} on rank 0 and {pair[1]} on rank {other}"
                )


def describe_tensor(tensor: Tensor) -> str:
    """Describe what all ranks must share, for `agree`: `float32 (4, 3) on cpu, trained`."""
    kind = str(tensor.dtype).removeprefix("torch.")
    use = "trained" if tensor.requires_grad else "not trained"
    return f"{kind} {tuple(tensor.shape)} on {tensor.device.type}, {use}"


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """A number for each of the tensors, of one device, that tells its bits apart from others."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in tensors:
        real = as_real(tensor)
        bits = real.detach().contiguous().view(-1).view(widths[real.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    # one transfer for all
    return torch.stack(sums).tolist() if sums else []


def gather_results(call: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return on all ranks what `call()` returned on each; results must be picklable.

    Raises:
        Exception: from the first rank on which `call` raised: the exception itself there, and one
            of the same kind and text on the other ranks.
    """
    if world_size(group) == 1:
        return [call()]
    result = error = None
    try:
        result = call()
    except Exception as caught:
        error = caught
    failure = _kind_and_text(error, rank(group)) if error else None
    failures, results = zip(*gather_objects((failure, result), group))
    first = next((other for other, failure in enumerate(failures) if failure), None)
    if first is None:
        return list(results)
    raise mark_collective(error if first == rank(group) else _exception(*failures[first]))


def on_each_rank(call: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return what `call()` returns on this rank, once it has returned on all.

    Raises:
        Exception: as `gather_results`.
    """
    result: list[T] = []
    gather_results(lambda: result.append(call()), group)
    return result[0]


def on_first_rank(call: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call on rank 0 alone, and return the result, which can be pickled, on all ranks.

    Raises:
        Exception: as `gather_results`.
    """
    results: list[Any] = gather_results(lambda: call() if rank(group) == 0 else None, group)
    return results[0]


@contextlib.contextmanager
def patient_group() -> Iterator[dist.ProcessGroup | None]:
    """A second group of all ranks, whose collectives may wait for one of them for any time.

    All ranks enter and leave the block together. If a rank fails, waiting ends at once, as in any
    group.
    """
    if world_size() == 1:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
    # after an error others may still wait in it, until this process ends
    yield group
    barrier(group)
    dist.destroy_process_group(group)


def mark_collective(error: Exception) -> Exception:
    """Mark an exception that is raised on every rank, so that only rank 0 reports it."""
    error.is_collective = True  # type: ignore[attr-defined]
    return error


def is_collective(error: Exception) -> bool:
    """Whether every rank raises this exception."""
    return getattr(error, "is_collective", False)


def _kind_and_text(error: Exception, rank: int) -> tuple[str, str]:
    """The name of a built-in base class of `error`, which every rank knows, and the text."""
    kind = next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")
    text = str(error) or type(error).__name__
    return kind.__name__, text if rank == 0 else f"rank {rank}: {text}"


def _exception(kind: str, text: str) -> Exception:
    try:
        return getattr(builtins, kind)(text)
    except TypeError:
        # one that takes more than a text, such as UnicodeDecodeError
        return RuntimeError(text)
