"""Run a Triton kernel in Triton's interpreter, and note which elements each program touches.

The interpreter runs one program after another, each operation as one of NumPy. Here it gets made-up
addresses in place of a tensor's own: each load and store comes by this file, which looks up the
element that is meant. So a kernel that reads or writes out of bounds does no harm, and is found.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction, KernelInterface

# Addresses that belong to one tensor; far more than a kernel strays.
ADDRESSES = 1 << 40
ARITHMETIC = (
    *("fadd", "fsub", "fmul", "fdiv", "precise_divf", "frem", "fabs", "floor", "ceil"),
    *("exp", "exp2", "log", "log2", "sin", "cos", "erf", "sqrt", "precise_sqrt", "rsqrt"),
    *("maximumf", "maxnumf", "minimumf", "minnumf"),
)

# Triton's language before anything was interpreted.
LANGUAGE = [
    (owner, dict(vars(owner)))
    for owner in (
        *(module for name, module in sys.modules.items() if name.startswith("triton.language")),
        *(tl.tensor, tl.dtype, core.tensor_descriptor_base),
    )
]


class KernelError(IndexError):
    """A kernel touched what is not there, used atomics, or two programs stored to one element."""


@dataclass(frozen=True)
class Access:
    """One load or store of one program."""

    program: int
    """Programs are numbered in the order of the grid, its last axis fastest."""

    kind: Literal["load", "store"]
    tensor: str
    """The parameter whose pointer it went through."""

    offsets: np.ndarray
    """Elements from the start of the tensor, as a kernel counts them, of the lanes that are on."""

    masked: np.ndarray
    """The same of the lanes that the mask turns off."""


@dataclass
class Memory:
    """A tensor argument: its elements, and the addresses that the kernel sees."""

    name: str
    tensor: Tensor
    base: int

    def __post_init__(self) -> None:
        self.dtype = self.tensor.dtype
        self.shape, self.itemsize = tuple(self.tensor.shape), self.tensor.element_size()
        if self.dtype == torch.bfloat16:
            raise TypeError(
                f"{self.name} must be float16 or float32: the interpreter has no bfloat16"
            )
        # all of its storage, even if the tensor is a view of a part
        storage = torch.empty(0, dtype=self.dtype).set_(self.tensor.untyped_storage().cpu())
        self.cells = storage.numpy()
        # the place of each element of the storage in the tensor, which may be a view of a part
        self.places = np.full(len(self.cells), -1)
        numbers = torch.arange(len(self.cells))
        strides, start = self.tensor.stride(), self.tensor.storage_offset()
        if self.tensor.numel():
            view = numbers.as_strided(self.shape, strides, start).reshape(-1)
            self.places[view.numpy()] = np.arange(len(view))
        self.start = start
        self.version = self.tensor._version

    def data_ptr(self) -> int:
        return self.base

    def still_holds(self, result: Tensor) -> bool:
        """Whether `result` is this tensor, and PyTorch has not changed it since the launch."""
        same = result.data_ptr() == self.tensor.data_ptr() and result.shape == self.shape
        return same and result._version == self.version

    def place(self, offsets: np.ndarray) -> np.ndarray:
        """Row-major index in the tensor of each offset; -1 outside of it."""
        index = offsets + self.start
        is_there = (index >= 0) & (index < len(self.places))
        return np.where(is_there, self.places[np.where(is_there, index, 0)], -1)


@dataclass
class Run:
    """The loads, stores and FLOPs of the programs of a launch."""

    grid: tuple[int, ...]
    tensors: dict[str, Memory] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    flops: Counter = field(default_factory=Counter)
    """`matmul`: of tl.dot, a multiply-add is two; `other`: one for each number computed."""

    largest_tile: int = 0
    """Numbers in the largest tile that was loaded or multiplied."""

    least_depth: int = 1 << 31
    """The fewest products that a tl.dot adds up."""

    called: set[str] = field(default_factory=set)
    """Functions of Triton that are kernels themselves, as `tl.sum`."""

    @property
    def num_programs(self) -> int:
        return int(np.prod(self.grid))

    def of(self, kind: str, tensor: str | None = None) -> list[Access]:
        """The loads or the stores, of one tensor or of all."""
        return [a for a in self.accesses if a.kind == kind and tensor in (None, a.tensor)]

    def bytes_moved(self, kind: str | None = None, tensor: str | None = None) -> int:
        """Bytes that programs ask for: what one program asks for twice counts twice."""
        return sum(
            len(access.offsets) * self.tensors[access.tensor].itemsize
            for access in self.accesses
            if kind in (None, access.kind) and tensor in (None, access.tensor)
        )

    def least_bytes(self) -> int:
        """Bytes that must move at least: each element loaded counts once, and each stored one."""
        touched: dict[tuple[str, str], list[np.ndarray]] = {}
        for access in self.accesses:
            touched.setdefault((access.kind, access.tensor), []).append(access.offsets)
        return sum(
            len(np.unique(np.concatenate(offsets))) * self.tensors[tensor].itemsize
            for (_, tensor), offsets in touched.items()
        )

    def faults(self) -> list[str]:
        """Accesses out of bounds, and elements that several programs store."""
        found = []
        for access in self.accesses:
            memory = self.tensors[access.tensor]
            outside = access.offsets[memory.place(access.offsets) < 0]
            if len(outside):
                found.append(_outside(access, memory, int(outside[0])))
        for name, memory in self.tensors.items():
            found += _races(self.of("store", name), memory)
        return found


def _outside(access: Access, memory: Memory, offset: int) -> str:
    verb = "loads" if access.kind == "load" else "stores"
    count = math.prod(memory.shape)
    size = f"{count} element{'' if count == 1 else 's'}"
    return f"program {access.program} {verb} element {offset} of {memory.name}, which has {size}"


def _races(stores: Sequence[Access], memory: Memory) -> list[str]:
    """Sentences about elements that several programs store; at most one for each tensor."""
    first: dict[int, int] = {}
    for access in stores:
        for offset in access.offsets.tolist():
            if first.setdefault(offset, access.program) != access.program:
                programs = f"programs {first[offset]} and {access.program}"
                return [f"{programs} both store element {offset} of {memory.name}"]
    return []


def plain(kernel: Any) -> Any:
    """The Python function of a kernel, under `triton.jit`, `triton.autotune` and the like."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def watch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, strict: bool = False, **options: Any
) -> Run:
    """Launch `kernel` in the interpreter as `kernel[grid](*arguments, **options)` would.

    Stores arrive in the tensors. What a load finds out of bounds is NaN, or the largest integer.

    Args:
        kernel: a function that `triton.jit` was applied to, or could be.
        strict: raise at the first access out of bounds, in the line that makes it, and after the
            launch if two programs stored to one element.

    Raises:
        KernelError: see `strict`.
        Exception: what the kernel itself raises.
    """
    run = Run(grid)
    interpreted = InterpretedFunction(plain(kernel))
    with np.errstate(all="ignore"), _reaching_into_triton(_Recorder(run, strict)):
        # `tl` and `core`, which are globals of `watch`; else each call of `tl.sum` would, in 10 ms
        interpreter._patch_lang(watch)
        executor = _Executor(interpreted.rewrite(), interpreted.arg_names, grid)
        executor.recorded = run
        try:
            executor(*arguments, **options)
        except interpreter.InterpreterError as error:
            raise error.__cause__ from None
        finally:
            restore_language()
    if strict and (races := [fault for fault in run.faults() if "both store" in fault]):
        raise KernelError(races[0])
    return run


@contextmanager
def watched() -> Iterator[list[Run]]:
    """Let each launch `kernel[grid](…)` be interpreted and recorded; strict, see `watch`.

    Meanwhile `__getitem__` of all of Triton's kernels is ours, since the code that launches them is
    the reader's and stays as it is.
    """
    runs: list[Run] = []

    def launcher(kernel, grid):
        def launch(*arguments, **options):
            # of what `triton.autotune` may choose from, the first
            for config in getattr(kernel, "configs", ())[:1]:
                options = config.kwargs | options
            size = grid(options) if callable(grid) else grid
            runs.append(watch(kernel, size, *arguments, strict=True, **options))

        return launch

    with patch.object(KernelInterface, "__getitem__", launcher):
        yield runs


class _Executor(GridExecutor):
    """Hands `Memory` to the kernel in place of tensors, and writes it back afterwards."""

    recorded: Run

    def _init_args_hst(self, args_dev, kwargs):
        given = dict(zip(self.arg_names, args_dev)) | kwargs
        for name, value in given.items():
            if isinstance(value, Tensor):
                short = name.removesuffix("_ptr")
                base = ADDRESSES * (1 + len(self.recorded.tensors))
                self.recorded.tensors[short] = given[name] = Memory(short, value, base)
        return [given[name] for name in self.arg_names[: len(args_dev)]], {
            name: given[name] for name in kwargs
        }

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        for memory in self.recorded.tensors.values():
            if memory.tensor.device.type != "cpu":
                cells = torch.from_numpy(memory.cells).untyped_storage()
                memory.tensor.untyped_storage().copy_(cells)


class _Recorder:
    """Does the interpreter's loads, stores, matmuls and arithmetic, and notes them in a `Run`."""

    def __init__(self, run: Run, strict: bool) -> None:
        self.run, self.strict = run, strict
        # Triton's own, before they are replaced
        self.builder = interpreter.interpreter_builder
        self.matmul, self.reduction = self.builder.create_dot, interpreter.ReduceOps.apply

    def operations(self) -> dict[str, Any]:
        """The operations of the interpreter's builder that go through here, by name."""
        found: dict[str, Any] = {
            "create_masked_load": self.load,
            "create_masked_store": self.store,
            "create_dot": self.dot,
        }
        found |= dict.fromkeys(("create_atomic_rmw", "create_atomic_cas"), self.refuse)
        for name in (f"create_{name}" for name in ARITHMETIC):
            if hasattr(self.builder, name):
                found[name] = partial(self.compute, getattr(self.builder, name))
        return found

    def load(self, pointers, mask, other, *_, **__):
        memory, offsets, is_on, is_there = self.note_access("load", pointers, mask)
        index = np.where(is_there, offsets + memory.start, 0)
        kind = memory.cells.dtype
        junk = np.nan if kind.kind == "f" else np.iinfo(kind).max if kind.kind in "iu" else True
        found = np.where(is_there, memory.cells[index], np.asarray(junk, kind))
        # without `other` they hold anything, on a GPU
        unread = np.asarray(junk, kind) if other is None else other.data.astype(kind)
        return TensorHandle(np.where(is_on, found, unread), pointers.get_element_ty())

    def store(self, pointers, value, mask, *_, **__):
        memory, offsets, is_on, is_there = self.note_access("store", pointers, mask)
        values = np.broadcast_to(value.data, offsets.shape)
        chosen = is_on & is_there
        memory.cells[offsets[chosen] + memory.start] = values[chosen].astype(memory.cells.dtype)

    def note_access(
        self, kind: Literal["load", "store"], pointers: Any, mask: Any
    ) -> tuple[Memory, np.ndarray, np.ndarray, np.ndarray]:
        """Note an access; return its tensor, the offsets, and which lanes are on and in bounds."""
        memories = list(self.run.tensors.values())
        addresses = pointers.data.astype(np.int64)
        # an address far before a tensor belongs to it, too
        memory = memories[int((addresses.flat[0] + ADDRESSES // 2) // ADDRESSES) - 1]
        offsets = (addresses - memory.base) // memory.itemsize
        is_on = np.broadcast_to(np.asarray(mask.data, bool), offsets.shape)
        x, y, z = self.builder.grid_idx
        _, ny, nz = self.builder.grid_dim
        access = Access(
            program=(x * ny + y) * nz + z,
            kind=kind,
            tensor=memory.name,
            offsets=offsets[is_on],
            masked=offsets[~is_on],
        )
        self.run.accesses.append(access)
        self.run.largest_tile = max(self.run.largest_tile, offsets.size)
        is_there = memory.place(offsets) >= 0
        if self.strict and (is_on & ~is_there).any():
            raise KernelError(_outside(access, memory, int(offsets[is_on & ~is_there][0])))
        return memory, offsets, is_on, is_there

    def refuse(self, *_):
        raise KernelError("atomics are not recorded: store each element once, with tl.store")

    def dot(self, a, b, d, precision, *rest):
        run = self.run
        run.flops["matmul"] += 2 * a.data.size * b.data.shape[-1]
        run.largest_tile = max(run.largest_tile, a.data.size, b.data.size, d.data.size)
        run.least_depth = min(run.least_depth, a.data.shape[-1])
        if getattr(precision, "name", precision) == "TF32" and a.data.dtype == np.float32:
            a, b = (TensorHandle(to_tf32(x.data), x.dtype.scalar) for x in (a, b))
        return self.matmul(a, b, d, precision, *rest)

    def compute(self, operation, *handles):
        result = operation(*handles)
        self.run.flops["other"] += result.data.size
        return result

    def reduce(self, operation, given):
        first = given[0] if isinstance(given, tuple) else given
        self.run.flops["other"] += first.handle.data.size
        return self.reduction(operation, given)


@contextmanager
def _reaching_into_triton(recorder: _Recorder) -> Iterator[None]:
    """Replace these parts of Triton, which offers no other way in; afterwards all are as before.

    - Operations of the interpreter's builder: the recorder's in their place.
    - `ReduceOps.apply`: the same for `tl.sum` and `tl.max`.
    - `_patch_lang_tensor`: tiles get what older versions lack (`_patch_tensor`).
    - Calls of functions that `triton.jit` was applied to, as `tl.sum`: they are interpreted. At its
      import Triton decides whether they are compiled.
    """

    def reduce(operation, given):
        return recorder.reduce(operation, given)

    def call(function, *arguments, **options):
        recorder.run.called.add(function.fn.__name__)
        return InterpretedFunction(function.fn).rewrite()(*arguments, **options)

    def bind(function, owner, kind=None):
        # `x.sum` for a tile x is `tl.sum` with x as its first argument
        return function if owner is None else partial(call, function, owner)

    with (
        patch.multiple(recorder.builder, **recorder.operations()),
        patch.object(interpreter.ReduceOps, "apply", reduce),
        patch.object(JITFunction, "__call__", call),
        patch.object(JITFunction, "__get__", bind, create=True),
        patch.object(InterpretedFunction, "__call__", call),
    ):
        yield


def to_tf32(x: np.ndarray) -> np.ndarray:
    """Float32 numbers rounded to the 10 bits of TF32's fraction, as tensor cores take them."""
    return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def _patch_tensor(tensor: type, *scope: Any, patch_all=interpreter._patch_lang_tensor) -> None:
    patch_all(tensor, *scope)
    # Triton before 3.7 makes an index of an array of one number, which NumPy 2.4 refuses
    tensor.__index__ = lambda self: self.handle.data.item()  # type: ignore[attr-defined]


# for kernels that a page launches in the interpreter by itself, too
interpreter._patch_lang_tensor = _patch_tensor


def restore_language() -> None:
    """Undo what the interpreter leaves behind in Triton's language, so that kernels compile."""
    for owner, names in LANGUAGE:
        for name in set(vars(owner)) - set(names) if isinstance(owner, type) else ():
            delattr(owner, name)
        for name, value in names.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
