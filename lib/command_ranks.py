"""A command of the command line in several processes that `torchrun` started: it speaks once."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch.distributed as dist

from lib.distributed import barrier, init_from_environment, rank, world_size
from lib.distributed_launch import leave
from lib.ranks import is_of_all_ranks, on_each_rank

T = TypeVar("T")

# What gloo and NCCL say when a process at the other end is gone.
LOST = ("connection reset by peer", "connection closed by peer", "remote process exited")


def run_as_rank(command: Callable[[], int], tell: Callable[[Exception], None]) -> NoReturn:
    """Run `command` as one of the processes that `torchrun` started, and end this one.

    An error that all ranks raise alike is told by rank 0 with `tell`, and is exit code 2.

    Raises:
        ConnectionError: another rank is gone.
        Exception: what this rank alone raised.
    """
    with init_from_environment():
        try:
            code = command()
        except SystemExit as after_words:
            code = after_words.code
        except Exception as error:
            if isinstance(error, RuntimeError) and any(w in str(error).lower() for w in LOST):
                raise ConnectionError(
                    f"rank {rank()} lost another rank: it failed, and said why, or was killed"
                ) from error
            if not is_of_all_ranks(error):
                raise
            if rank() == 0:
                tell(error)
            code = 2
        # the first to end with an error makes torchrun end the others
        barrier()
    leave(code if isinstance(code, int) else 1)


def parse_as_rank(parse: Callable[[], T]) -> T:
    """What `parse` makes of the arguments, which it may refuse with a text and `SystemExit`.

    Where one rank does, all end: told by the first that did.
    """

    words = io.StringIO()

    def parsed() -> tuple[T | None, SystemExit | None]:
        try:
            return parse(), None
        except SystemExit as after_words:
            return None, after_words

    with contextlib.ExitStack() as quiet:
        if rank() > 0:
            quiet.enter_context(contextlib.redirect_stdout(words))
            quiet.enter_context(contextlib.redirect_stderr(words))
        config, refusal = on_each_rank(parsed)
    codes = [refusal and refusal.code]
    if world_size() > 1:
        codes = [None] * world_size()
        dist.all_gather_object(codes, refusal and refusal.code)
    first = next((r for r, code in enumerate(codes) if code is not None), None)
    if first is None:
        return config
    if 0 < first == rank():
        print(f"rank {first}:\n{words.getvalue()}", file=sys.stderr, end="")
    raise SystemExit(codes[first])
