"""The CUDA C++ kernels on a CPU: the same source, with the instructions of this folder.

`instructions.cuh` here has those of `forward.cu` and the like, `hopper.cuh` those of the Hopper
kernels. Launching is the library's own, too, but for the functions that load a kernel.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from lib.flash_attention.cuda import attention, launch
from lib.flash_attention.cuda.build import SOURCES

if TYPE_CHECKING:
    from lib.flash_attention.hopper import fused, unpadded

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs g++")


class Counters(ctypes.Structure):
    """What a launch did: 16×8×16 matmuls, 8×8 matrices read, chunks written by eight lanes."""

    _fields_ = tuple(
        (name, ctypes.c_longlong)
        for name in ("multiplies", "loads", "load_conflicts", "stores", "store_conflicts")
    )


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    name: str
    counters: Counters


LAUNCHES: list[Launch] = []


def emulate(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the kernels run on the CPU in this test; return the device of their inputs."""
    monkeypatch.setattr(launch, "load_kernel", load_kernel)
    monkeypatch.setattr(attention, "check_device", lambda device, dtype: None)
    LAUNCHES.clear()
    return "cpu"


def load_kernel(name: str, q: Tensor) -> launch.Kernel:
    """What `launch.load_kernel` gives, on a CPU; each launch is appended to LAUNCHES."""
    file, dim = launch.FILES[name], launch.padded_dim(q)
    tiles = launch.TILES[file, dim]
    library = _library(
        file,
        "Attention",
        tuple(launch.constants(tiles, dim, q.dtype == torch.bfloat16).items()),
    )

    def run(blocks: int, arguments: launch.AttentionArguments) -> None:
        _launch(library, name, 32 * tiles.warps, tiles.shared_bytes(dim), blocks, arguments)
        counters = Counters.from_buffer_copy(Counters.in_dll(library, "counters"))
        LAUNCHES.append(Launch(name, counters))

    return launch.Kernel(tiles, run)


def emulate_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of `fused.py` and `unpadded.py` run on the CPU in this test."""
    from lib.flash_attention.hopper import fused, launch, unpadded

    monkeypatch.setattr(launch, "_remembered", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fused, "load_kernels", load_backward)
    monkeypatch.setattr(unpadded, "load_kernel", load_forward)
    monkeypatch.setattr(fused, "tensor_map", tensor_map)


def tensor_map(x: Tensor, rows: int) -> Callable[[int], ctypes.Array]:
    """Return a function: address -> `TensorMap` of hopper.cuh."""
    batch, heads, tokens, head_dim = x.shape
    numbers = (*x.stride()[:3], head_dim, tokens, heads, batch, rows)

    def at(address: int) -> ctypes.Array:
        image = struct.pack("<Qqqqiiiii", address, *numbers).ljust(128, b"\0")
        return (ctypes.c_ubyte * 128).from_buffer_copy(image)

    return at


def load_backward(
    tiles: fused.Tiles, device: None, is_bfloat16: bool, is_causal: bool, has_rope: bool
) -> list[fused.Launch]:
    """Stand in for `fused.load_kernels`, on a CPU."""
    macros = tiles.constants(is_bfloat16, is_causal, has_rope)
    library = _library(tiles.source, "Backward", tuple(macros.items()))
    return [
        functools.partial(_launch, library, "prepare", 128, 0),
        functools.partial(_launch, library, "backward", tiles.threads, tiles.shared_bytes),
        functools.partial(_launch, library, "finish", 128, 8192),
    ]


def load_forward(
    tiles: unpadded.Tiles, device: None, is_bfloat16: bool, is_causal: bool
) -> unpadded.Launch:
    """Stand in for `unpadded.load_kernel`, on a CPU."""
    macros = tiles.constants(is_bfloat16, is_causal)
    library = _library("hopper_forward", "Forward", tuple(macros.items()))
    threads = 128 * (tiles.warpgroups + 1)
    return functools.partial(_launch, library, "forward", threads, tiles.shared_bytes)


def _launch(library, name: str, threads: int, shared_bytes: int, blocks: int, arguments) -> None:
    function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    failure = library.run(function, ctypes.byref(arguments), blocks, threads, shared_bytes)
    if failure:
        raise RuntimeError(f"{name}: {failure.decode()}")


def _compile(*arguments: str | Path) -> None:
    # threads are fibers, and a fortified longjmp aborts when it leaves a stack
    flags = ["-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", "-Wno-psabi"]
    subprocess.run([COMPILER, *flags, *arguments], check=True)


@functools.cache
def _hopper_emulator() -> tempfile.TemporaryDirectory:
    """A folder with emulator.o, which takes far longer to compile than a kernel."""
    folder = tempfile.TemporaryDirectory()
    source = HERE / "hopper_emulator.cpp"
    _compile("-O1", "-c", source, "-o", Path(folder.name, "emulator.o"))
    return folder


@functools.cache
def _library(file: str, arguments: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """The kernels of a file, whose argument is the structure `arguments`."""
    is_hopper = file.startswith("hopper")
    own = {"SOURCE": f'"{file}.cu"', "ARGUMENTS": arguments}
    own["RUN"] = "run_hopper_blocks" if is_hopper else "run_blocks"
    options = [f"-D{name}={value}" for name, value in [*macros, *own.items()]]
    # the instructions of this folder come before those of the GPU
    options += [f"-I{HERE}", f"-I{SOURCES}"]
    objects = [Path(_hopper_emulator().name, "emulator.o")] if is_hopper else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.so")
        _compile(*options, "-Og", "-shared", HERE / "library.cpp", *objects, "-o", path)
        library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library
