"""Kernels from source to machine code at first use, by NVRTC, the compiler that PyTorch brings.

No toolkit and no C++ compiler is needed. What is compiled stays in the user's cache folder, under a
hash of sources, options and compiler, so that the next process loads it in milliseconds. Where the
environment variable WORKBOOK_KERNELS names a folder, it stays there: such a folder can travel to
other machines, which then compile nothing.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from lib.core.files import user_cache, write_atomically

SOURCES = Path(__file__).parent


def build(name: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """Compile SOURCES/name.cu, or take it from the cache.

    Args:
        name: of the source file, without its ending.
        constants: macros of the source.
        architecture: `sm_75` for the machine code of that chip; `compute_75` for PTX, which the
            driver translates for that chip or any later one.

    Raises:
        RuntimeError: there is no NVRTC, or the source does not compile.
    """
    files = [SOURCES / f"{name}.cu", *sorted(SOURCES.glob("*.cuh"))]
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in sorted(constants.items())]
    found = repr((name, options, nvrtc_version())).encode()
    key = hashlib.sha256(b"\0".join([found, *(file.read_bytes() for file in files)])).hexdigest()
    return find_or_make(
        f"{name}-{architecture}-{key[:24]}.bin",
        lambda: _compile(files[0], [*options, f"-I{SOURCES}"], architecture),
    )


def find_or_make(file: str, make: Callable[[], bytes]) -> bytes:
    """Return a compiled kernel from the cache, or make it and keep it there.

    A file that is damaged is made again: it begins with the SHA-256 hash of what follows.
    """
    with contextlib.suppress(OSError):
        content = (cache_folder() / file).read_bytes()
        digest, image = content[:32], content[32:]
        if hashlib.sha256(image).digest() == digest:
            return image
    image = make()
    # where nothing can be written, the next process compiles again
    with contextlib.suppress(OSError):
        write_atomically(cache_folder() / file, hashlib.sha256(image).digest() + image)
    return image


def cache_folder() -> Path:
    """The folder where compiled kernels are kept."""
    return Path(os.environ.get("WORKBOOK_KERNELS") or user_cache() / "cuda")


def pick_architecture(capability: tuple[int, int]) -> str:
    """Return the chip's own architecture, or the last that NVRTC knows before it, as PTX.

    The environment variable WORKBOOK_CUDA_ARCHITECTURE, say `compute_75`, overrides the choice.

    Raises:
        ValueError: that variable names no architecture.
        RuntimeError: NVRTC is too new for the chip.
    """
    if chosen := os.environ.get("WORKBOOK_CUDA_ARCHITECTURE"):
        if not re.fullmatch(r"(sm|compute)_\d{2,3}[af]?", chosen):
            raise ValueError(
                f"WORKBOOK_CUDA_ARCHITECTURE must be like sm_75 or compute_75, got {chosen!r}"
            )
        return chosen
    chip = 10 * capability[0] + capability[1]
    known = nvrtc_architectures()
    if chip in known:
        return f"sm_{chip}"
    if not (older := [x for x in known if x < chip]):
        version = ".".join(map(str, nvrtc_version()))
        raise RuntimeError(f"NVRTC {version} does not compile for sm_{chip} any more; use sdpa")
    return f"compute_{max(older)}"


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Load NVRTC.

    Raises:
        RuntimeError: it is not installed.
    """
    major = (torch.version.cuda or "13").split(".")[0]
    for file in map(Path, _nvrtc_files(major)):
        with contextlib.suppress(OSError):
            if file.is_absolute():
                # its second library, which it looks for by name and finds only once it is loaded
                for second in file.parent.glob("libnvrtc-builtins.so*"):
                    ctypes.CDLL(str(second))
            return ctypes.CDLL(str(file))
    package = "nvidia-cuda-nvrtc" + ("-cu12" if major == "12" else "")
    raise RuntimeError(
        f"kernels in CUDA C++ need NVRTC, its compiler, of CUDA {major}, and there is none: "
        f"pip install {package}, or use sdpa"
    )


def _nvrtc_files(major: str) -> Iterator[str]:
    """Yield where NVRTC may be: a wheel, PyTorch's folder, the library path, a toolkit."""
    file = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for pattern in (f"cuda_nvrtc/lib/{file}", f"cu{major}/lib/{file}"):
            yield from map(str, Path(folder).glob(pattern))
    yield str(Path(torch.__file__).parent / "lib" / file)
    yield file
    yield f"/usr/local/cuda/lib64/{file}"


@functools.cache
def has_nvrtc() -> bool:
    """Whether kernels in CUDA C++ can be compiled here."""
    with contextlib.suppress(RuntimeError):
        return bool(nvrtc())
    return False


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """The version of NVRTC, major and minor."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@functools.cache
def nvrtc_architectures() -> list[int]:
    """The chips that NVRTC compiles for, 75 for sm_75."""
    count = ctypes.c_int()
    _check(nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    architectures = (ctypes.c_int * count.value)()
    _check(nvrtc().nvrtcGetSupportedArchs(architectures))
    return list(architectures)


def _compile(source: Path, options: list[str], architecture: str) -> bytes:
    library, program = nvrtc(), ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        c_options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), c_options):
            log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"{source.name} does not compile for {architecture}:\n{log}")
        return _read(program, "CUBIN" if architecture.startswith("sm_") else "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    """One of the results of a compilation."""
    size = ctypes.c_size_t()
    _check(getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        get_text = nvrtc().nvrtcGetErrorString
        get_text.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {get_text(status).decode()}")
