"""A command of the command line in several processes that `torchrun` started: it speaks once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

from lib.distributed import barrier, init_from_environment, rank
from lib.ranks import is_of_all_ranks, on_each_rank

T = TypeVar("T")

# What gloo and NCCL say when a process at the other end is gone.
LOST = ("connection reset by peer", "connection closed by peer", "remote process exited")


def run_as_rank(command: Callable[[], int], tell: Callable[[Exception], None]) -> int:
    """Run `command` as one of the processes that `torchrun` started; its exit code.

    An error that all ranks raise alike is told by rank 0 with `tell`, and is exit code 2.

    Raises:
        ConnectionError: another rank is gone.
        Exception: what this rank alone raised.
    """
    with init_from_environment():
        try:
            return command()
        except Exception as error:
            if isinstance(error, RuntimeError) and any(w in str(error).lower() for w in LOST):
                raise ConnectionError(
                    f"rank {rank()} lost another rank: it failed, and said why, or was killed"
                ) from error
            if not is_of_all_ranks(error):
                raise
            if rank() == 0:
                tell(error)
            # the first to end makes torchrun end the others
            barrier()
            return 2


def parse_as_rank(parse: Callable[[], T]) -> T:
    """What `parse` makes of the arguments, which it may refuse with a text and `SystemExit`."""

    def parsed() -> T | SystemExit:
        try:
            return parse()
        except SystemExit as after_words:
            return after_words

    with contextlib.ExitStack() as quiet:
        if rank() > 0:
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        config = on_each_rank(parsed)
    if isinstance(config, SystemExit):
        raise config
    return config
