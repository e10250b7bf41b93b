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
from lib.flash_attention.hopper import fused, unpadded
from tests.flash_attention.cuda.emulator import COMPILER, HERE


def emulate(monkeypatch: pytest.MonkeyPatch, *fault: str) -> None:
    """Let `fused.flash_backward` and `unpadded.flash_forward` run on the CPU in this test.

    Args:
        fault: a text of the source, and what is there instead.
    """
    monkeypatch.setattr(fused, "load_kernels", functools.partial(load_backward, fault=fault))
    monkeypatch.setattr(unpadded, "load_kernel", functools.partial(load_forward, fault=fault))
    monkeypatch.setattr(fused, "tensor_map", tensor_map)


def tensor_map(x: Tensor, rows: int) -> bytes:
    """`TensorMap` of hopper.cuh."""
    batch, heads, tokens, head_dim = x.shape
    sizes = (head_dim, tokens, heads, batch, rows)
    return struct.pack("<Qqqqiiiii", x.data_ptr(), *x.stride()[:3], *sizes).ljust(128, b"\0")


def load_backward(
    tiles: fused.Tiles, q: Tensor, is_causal: bool, has_rope: bool, fault: tuple[str, ...] = ()
) -> list[fused.Launch]:
    """What `fused.load_kernels` gives, on a CPU."""
    macros = tiles.constants(q.dtype == torch.bfloat16, is_causal, has_rope)
    library = _library(tiles.source, "Backward", tuple(macros.items()), fault)
    return [
        functools.partial(_launch, library, "prepare", 128, 0),
        functools.partial(_launch, library, "backward", tiles.threads, tiles.shared_bytes),
        functools.partial(_launch, library, "finish", 128, 8192),
    ]


def load_forward(
    tiles: unpadded.Tiles, q: Tensor, is_causal: bool, fault: tuple[str, ...] = ()
) -> unpadded.Launch:
    """What `unpadded.load_kernel` gives, on a CPU."""
    macros = tiles.constants(q.dtype == torch.bfloat16, is_causal)
    library = _library("hopper_forward", "Forward", tuple(macros.items()), fault)
    return functools.partial(
        _launch, library, "forward", 128 * (tiles.warpgroups + 1), tiles.shared_bytes
    )


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
def _emulator() -> tempfile.TemporaryDirectory:
    """A folder with emulator.o, which takes far longer to compile than a kernel."""
    folder = tempfile.TemporaryDirectory()
    source = HERE / "hopper_emulator.cpp"
    _compile("-O1", "-c", source, "-o", Path(folder.name, "emulator.o"))
    return folder


@functools.cache
def _library(
    name: str, arguments: str, macros: tuple[tuple[str, int], ...], fault: tuple[str, ...]
) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        # the kernel, and what it has in common with another one: a fault can be in either
        texts = {
            name: (SOURCES / name).read_text() for name in (f"{name}.cu", "hopper_backward.cuh")
        }
        if fault:
            assert any(fault[0] in text for text in texts.values())
        for file, text in texts.items():
            Path(folder, file).write_text(text.replace(*fault) if fault else text)
        source, path = Path(folder, f"{name}.cu"), Path(folder, "kernel.so")
        options = [f"-D{key}={value}" for key, value in macros]
        options.append(f"-DARGUMENTS={arguments}")
        options.append(f'-DSOURCE="{source}"')
        # hopper.cuh here comes before that of the GPU
        options += [f"-I{place}" for place in (folder, HERE, SOURCES)]
        emulator = Path(_emulator().name, "emulator.o")
        _compile(*options, "-Og", "-shared", HERE / "hopper_library.cpp", emulator, "-o", path)
        library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library
