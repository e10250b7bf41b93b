"""Ending a training run when a signal asks for it, on all ranks after the same step."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

from lib.distributed import mean_over_ranks, world_size

log = logging.getLogger(__name__)


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second SIGINT interrupts as usual.

    A notebook's stop button sends SIGINT. Outside the main thread signals stay as they are.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        log.warning("%s: the step will be finished and saved", signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_asked_to_stop(stop: threading.Event, step: int, log_interval: int) -> bool:
    """Whether the run ends after `step`.

    One rank asks `stop` after each step. Several must end after the same one, and ask each other
    where they wait for one another anyway: after steps that are multiples of `log_interval`.
    """
    if world_size() == 1:
        return stop.is_set()
    return step % log_interval == 0 and mean_over_ranks(float(stop.is_set())) > 0
