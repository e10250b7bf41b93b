"""The Hopper kernels in CUDA C++ on a CPU: the same source, with `hopper.cuh` of this folder."""

import ctypes
import functools
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lib.flash_attention.cuda.build import SOURCES
from lib.flash_attention.hopper import fused
from tests.flash_attention.cuda.emulator import COMPILER, HERE


def emulate(monkeypatch: pytest.MonkeyPatch, *fault: str) -> None:
    """Let `fused.flash_backward` run on the CPU in this test.

    Args:
        fault: a text of the source, and what is there instead.
    """
    load = functools.partial(load_kernels, fault=fault)
    monkeypatch.setattr(fused, "load_kernels", load)
    monkeypatch.setattr(fused, "tensor_map", tensor_map)


def tensor_map(x: Tensor, rows: int) -> bytes:
    """`TensorMap` of hopper.cuh."""
    batch, heads, tokens, head_dim = x.shape
    sizes = (head_dim, tokens, heads, batch, rows)
    return struct.pack("<Qqqqiiiii", x.data_ptr(), *x.stride()[:3], *sizes).ljust(128, b"\0")


def load_kernels(
    tiles: fused.Tiles, q: Tensor, is_causal: bool, has_rope: bool, fault: tuple[str, ...] = ()
) -> list[fused.Launch]:
    """What `fused.load_kernels` gives, on a CPU."""
    macros = tiles.constants(q.dtype == torch.bfloat16, is_causal, has_rope)
    library = _library(tuple(macros.items()), fault)

    def launch(name: str, threads: int, shared_bytes: int, blocks: int, arguments) -> None:
        function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        sizes = (blocks, threads, shared_bytes)
        failure = library.run(function, ctypes.byref(arguments), *sizes)
        if failure:
            raise RuntimeError(f"{name}: {failure.decode()}")

    return [
        functools.partial(launch, "prepare", 128, 0),
        functools.partial(launch, "backward", 384, tiles.shared_bytes),
        functools.partial(launch, "finish", 128, 8192),
    ]


@functools.cache
def _library(macros: tuple[tuple[str, int], ...], fault: tuple[str, ...]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        text = (SOURCES / "hopper_backward.cu").read_text()
        if fault:
            assert fault[0] in text
            text = text.replace(*fault)
        source, path = Path(folder, "kernel.cu"), Path(folder, "kernel.so")
        source.write_text(text)
        options = [f"-D{name}={value}" for name, value in macros]
        # this folder comes first: its hopper.cuh replaces that of the GPU
        options += [f'-DSOURCE="{source}"', "-I", str(HERE), "-I", str(SOURCES)]
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-Wno-psabi"]
        # threads are fibers, and a fortified longjmp aborts when it leaves a stack
        flags += ["-U_FORTIFY_SOURCE"]
        command = [COMPILER, *flags, *options, "-o", str(path), str(HERE / "hopper_emulator.cpp")]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library
