"""The CUDA C++ kernels on a CPU: the same source, with `instructions.cuh` of this folder.

`launch.py` is the same too; only its `load_kernel` is replaced by the one here.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lib.flash_attention.cuda import attention, launch
from lib.flash_attention.cuda.build import SOURCES

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
    blocks: int
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
    return kernel(name, launch.TILES[file, dim], dim, q.dtype == torch.bfloat16)


def kernel(name: str, tiles: launch.Tiles, dim: int, is_bfloat16: bool) -> launch.Kernel:
    """A kernel with any tiles."""
    library = _library(launch.FILES[name], dim, is_bfloat16, tiles)

    def run(blocks: int, arguments: launch.AttentionArguments) -> None:
        counters = Counters()
        function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        sizes = (blocks, 32 * tiles.warps, tiles.shared_bytes(dim))
        failure = library.run(function, ctypes.byref(arguments), *sizes, ctypes.byref(counters))
        if failure:
            raise RuntimeError(f"{name}: {failure.decode()}")
        LAUNCHES.append(Launch(name, blocks, counters))

    return launch.Kernel(tiles, run)


@functools.cache
def _library(file: str, dim: int, is_bfloat16: bool, tiles: launch.Tiles) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.so")
        macros = launch.constants(tiles, dim, is_bfloat16) | {"SOURCE": f'"{file}.cu"'}
        options = [f"-D{name}={value}" for name, value in macros.items()]
        # this folder comes first: its instructions.cuh replaces that of the GPU
        options += ["-I", str(HERE), "-I", str(SOURCES), "-o", str(path)]
        flags = ["-std=c++17", "-Og", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        # threads are fibers, and a fortified longjmp aborts when it leaves a stack
        flags += ["-U_FORTIFY_SOURCE"]
        subprocess.run([COMPILER, *flags, *options, str(HERE / "emulator.cpp")], check=True)
        library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library
