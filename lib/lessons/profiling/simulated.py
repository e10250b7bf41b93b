"""Toy machines with a clock of their own: a queue to time, kernels launched one by one, a loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Launch(NamedTuple):
    """When the host works on a launch, and when the GPU works on its kernel, in µs."""

    called: float
    returned: float
    start: float
    end: float


def simulate(kernels_us: Sequence[float], launch_us: float) -> list[Launch]:
    """Launch kernels of these lengths one after another; the GPU runs them in order."""
    host = gpu = 0.0
    launches = []
    for kernel_us in kernels_us:
        called, host = host, host + launch_us
        # a kernel waits for its launch and for the kernel before it
        start = max(host, gpu)
        gpu = start + kernel_us
        launches.append(Launch(called, host, start, gpu))
    return launches


@dataclass
class ToyGPU:
    """A device that takes orders into a queue, with a clock that shows whole milliseconds.

    Example:
        >>> gpu = ToyGPU(work_ms=[90, 30])
        >>> gpu.run(), gpu.clock(), gpu.wait(), gpu.clock()
        (None, 1, None, 91)
    """

    work_ms: list[int]
    """How long the device works on each call of `run`; on further ones as on the last."""

    def __post_init__(self) -> None:
        self._now = self._busy_until = self._calls = 0

    def run(self) -> None:
        """Launch one piece of work; returns after 1 ms, while the device works."""
        self._now += 1
        work = self.work_ms[min(self._calls, len(self.work_ms) - 1)]
        self._busy_until = max(self._now, self._busy_until) + work
        self._calls += 1

    def wait(self) -> None:
        """Return once the device has done everything that was launched."""
        self._now = max(self._now, self._busy_until)

    def clock(self) -> int:
        """The time in ms."""
        return self._now


@dataclass
class ToyTrainer:
    """A training loop's GPU: steps are launched, and a loss is a number that stays on the device.

    `load` takes the host 2 ms, a launch 1 ms; a step takes the device 4 ms. Sums and quotients of
    losses, and `maximum` of two, are launched, too. Whatever needs the number of a loss on the host
    waits for it: `item()`, `float()`, a comparison, formatting.
    """

    now: int = 0
    busy_until: int = 0
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Kind (load, launch, wait, step), start and end in ms."""

    last_step: int = 0
    """When the host began to launch the last step, in ms."""

    def load(self, batch: int) -> int:
        """Prepare a batch on the host."""
        self._host("load", 2)
        return batch

    def step(self, batch: int) -> ToyLoss:
        """Launch a training step; return its loss, on the device."""
        self.last_step = self.now
        return self._launch("step", 4, (batch * 37) % 11 + batch / 8)

    def maximum(self, a: ToyLoss | float, b: ToyLoss | float) -> ToyLoss:
        """Launch the larger of two losses or numbers; it stays on the device."""
        return self._launch("sum", 0, max(_value(a), _value(b)))

    def wait_until(self, ready: int) -> None:
        """Let the host wait for the device."""
        if ready > self.now:
            self._host("wait", ready - self.now)

    @property
    def early_waits(self) -> int:
        """How often the host waited before it had launched its last step."""
        return sum(kind == "wait" and start < self.last_step for kind, start, _ in self.spans)

    def _host(self, kind: str, duration: int) -> None:
        self.spans.append((kind, self.now, self.now + duration))
        self.now += duration

    def _launch(self, kind: str, duration: int, value: float) -> ToyLoss:
        self._host("launch", 1)
        start = max(self.now, self.busy_until)
        self.busy_until = start + duration
        self.spans.append((kind, start, self.busy_until))
        return ToyLoss(self, value, self.busy_until)


@functools.total_ordering
@dataclass(eq=False)
class ToyLoss:
    """A number on the device of a `ToyTrainer`; sums of them stay there."""

    trainer: ToyTrainer
    value: float
    ready: int

    def __repr__(self) -> str:
        return "a loss that is still on the device"

    def item(self) -> float:
        """Wait for the number, and return it."""
        self.trainer.wait_until(self.ready)
        return self.value

    __float__ = item

    def __add__(self, other: ToyLoss | float) -> ToyLoss:
        return self.trainer._launch("sum", 0, self.value + _value(other))

    __radd__ = __add__

    def __truediv__(self, number: float) -> ToyLoss:
        return self.trainer._launch("sum", 0, self.value / number)

    def __lt__(self, other: ToyLoss | float) -> bool:
        return self.item() < float(other)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)


def _value(number: ToyLoss | float) -> float:
    """The number itself, without waiting for it."""
    return number.value if isinstance(number, ToyLoss) else number


class Kernel(NamedTuple):
    """A kernel of a trace: when it ran, in µs, and its name."""

    start: float
    end: float
    name: str


def kernels_of(
    work: Sequence[tuple[float, str]], launch_us: float, begin_us: float = 0
) -> list[Kernel]:
    """Return the kernels of (µs, name) launched one after another, the first at `begin_us`."""
    launches = simulate([us for us, _ in work], launch_us)
    return [
        Kernel(begin_us + at.start, begin_us + at.end, name)
        for at, (_, name) in zip(launches, work)
    ]
