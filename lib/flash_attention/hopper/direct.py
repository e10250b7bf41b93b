"""Launches of compiled kernels by the CUDA driver, without Triton's way through Python.

Triton looks at every argument of every call: 36 µs for the forward kernel on an H200's host. Where
shapes and strides are those of an earlier call only addresses differ, and where these are the same,
too, as in a training loop, its parameters lie packed already: a launch takes a few µs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lib.flash_attention.cuda.driver import Function, check, driver, use_context
from lib.flash_attention.hopper.compiled import Binary

# A tensor map of the CUDA driver.
TensorMap = ctypes.c_ubyte * 128
# CUDA driver API: CUtensorMapDataType, CUtensorMapL2promotion (128 bytes), a map's alignment
MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
PROMOTE_128 = 2
MAP_ALIGNMENT = 64
# CUresult: this thread has not used the GPU yet
NO_CONTEXT = 201
# Addresses for which a launch keeps its parameters: in a training loop tensors return to them.
KEPT = 64
# The addresses of a call's tensors, in the order of their names.
Addresses = tuple[int, ...]
NUMBERS: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


def make_map(
    dtype: torch.dtype,
    shape: list[int],
    strides: list[int],
    compiled: Mapping[str, Any],
    address: int,
) -> ctypes.Array:
    """The tensor map (`TensorMap`) for a tensor at an address.

    Args:
        strides: in elements; the last is 1.
        compiled: what Triton made of the descriptor's layout (`tensordesc_meta`).

    Raises:
        RuntimeError: the driver refuses it.
    """
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + MAP_ALIGNMENT)
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
    rank, size = len(shape), dtype.itemsize
    # the driver counts dimensions from the last
    steps = [size * stride for stride in strides[:-1]][::-1] or [size * shape[0]]
    arguments = (
        ctypes.addressof(made),
        MAP_TYPES[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*shape[::-1]),
        (ctypes.c_uint64 * len(steps))(*steps),
        (ctypes.c_uint32 * rank)(*compiled["block_size"][::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        compiled["swizzle"],
        PROMOTE_128,
        0,
    )
    code = driver().cuTensorMapEncodeTiled(*arguments)
    # in a thread that the user made
    if code == NO_CONTEXT:
        use_context(torch.cuda.current_device())
        code = driver().cuTensorMapEncodeTiled(*arguments)
    check(code)
    return made


class DirectLaunch:
    """A kernel with the arguments of one call, to be launched at the addresses of any such call.

    Args:
        binary: the kernel.
        function: the same in the memory of a GPU.
        grid: how many programs.
        arguments: by name. Tensors and descriptors, except `work_list_ptr`, may lie elsewhere in
            each launch, with the same strides and dtype, at multiples of 16 bytes.
        names: of the tensors whose addresses a launch gets, in their order.
    """

    def __init__(
        self,
        binary: Binary,
        function: Function,
        grid: tuple[int],
        arguments: Mapping[str, Any],
        names: Sequence[str],
    ):
        self.names = names
        # where in `fixed`, and which of the names
        self.maps: list[tuple[int, int, Callable[[int], ctypes.Array]]] = []
        self.pointers: list[tuple[int, int]] = []
        # memory that parameters are read from
        self.fixed: list[Any] = []
        compiled = iter(binary.maps)
        for name, kind in binary.signature.items():
            self._add(name, kind, arguments[name], compiled)
        # Triton's scratch memory, of which these kernels need none
        self.fixed += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        self.packed = functools.lru_cache(KEPT)(self._pack)
        self.device = function.device
        block = (binary.threads, 1, 1)
        self.settings = (function.handle, grid[0], 1, 1, *block, binary.shared_bytes)

    def _add(self, name: str, kind: str, argument: Any, compiled: Iterator[Mapping]) -> None:
        """Add the parameters of one argument; `compiled` goes through the descriptors."""
        if kind.startswith("tensordesc"):
            shape, strides = list(argument.shape), list(argument.strides)
            # without the tensor itself, whose memory would stay in use
            make = functools.partial(make_map, argument.base.dtype, shape, strides, next(compiled))
            known = functools.lru_cache(KEPT)(make)
            self.maps.append((len(self.fixed), self.names.index(name), known))
            self.fixed += [None, *map(ctypes.c_int32, shape)]
            self.fixed += map(ctypes.c_int64, strides)
        elif kind.startswith("*"):
            if name != "work_list_ptr":
                self.pointers.append((len(self.fixed), self.names.index(name)))
            self.fixed.append(ctypes.c_uint64(argument.data_ptr()))
        else:
            self.fixed.append(NUMBERS[kind](argument))

    def _pack(self, addresses: Addresses) -> tuple[ctypes.Array, list[Any]]:
        """Pack what the driver reads at a launch: the parameters' addresses, and the parameters."""
        parameters = self.fixed.copy()
        for index, number, known in self.maps:
            parameters[index] = known(addresses[number])
        for index, number in self.pointers:
            parameters[index] = ctypes.c_uint64(addresses[number])
        places = map(ctypes.addressof, parameters)
        return (ctypes.c_void_p * len(parameters))(*places), parameters

    def __call__(self, addresses: Addresses) -> None:
        """Launch the kernel on the current stream, for tensors at these addresses.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        parameters, _ = self.packed(addresses)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        code = driver().cuLaunchKernel(*self.settings, stream, parameters, None)
        if code == NO_CONTEXT:
            use_context(self.device)
            code = driver().cuLaunchKernel(*self.settings, stream, parameters, None)
        check(code)
