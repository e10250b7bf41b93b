"""Building and launching the CUDA C++ kernels: compilers, the cache, the driver, resources."""

import ctypes
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from lib.flash_attention.cuda import build, driver, launch

NVCC = shutil.which("nvcc")
NEEDS_NVCC = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
# Of a multiprocessor: registers, and bytes of shared memory of a T4 and of an A100.
REGISTERS, SHARED_BYTES = 65536, {True: 64 << 10, False: 164 << 10}
# What a block of any chip from sm_80 on may have of these.
BLOCK_SHARED_BYTES = 99 << 10
# A few numbers that are kept beside registers cost nothing that one could measure.
SPILLED_BYTES = 96


def quick_at(dims: Sequence[int], every_tiles: Sequence) -> list:
    """Parameters of a test: all tiles, those for other head dimensions than `dims` as slow ones."""
    assert {x.dim for x in every_tiles}.issuperset(dims)
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(x, marks=marks[x.dim in dims], id=str(x.dim)) for x in every_tiles]


def compile_kernels(folder: Path, file: str, macros: dict[str, int], architecture: str) -> tuple:
    """The assembler's report of a source, and the registers and spilled bytes of each kernel."""
    options = [f"-D{name}={value}" for name, value in macros.items()]
    options += ["-I", str(build.SOURCES), "-Xptxas", "-v", "-o", str(folder / "kernel.cubin")]
    source = str(build.SOURCES / f"{file}.cu")
    command = [NVCC, f"-arch={architecture}", "-std=c++17", "-cubin", *options, source]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    numbers = re.findall(r"(\d+) bytes spill stores.*?Used (\d+) registers", report, re.DOTALL)
    return report, [(int(registers), int(spilled)) for spilled, registers in numbers]


def check_resources(
    folder: Path, file: str, dim: int, architecture: str, is_bfloat16: bool
) -> None:
    tiles = launch.pick_tiles(file, dim, architecture)
    kernels = [kernel for kernel, source in launch.FILES.items() if source == file]
    assert tiles.shared_bytes(dim) <= BLOCK_SHARED_BYTES
    # beside a kibibyte of the system in each block, from sm_80 on
    assert tiles.blocks * tiles.shared_bytes(dim) <= SHARED_BYTES[architecture == "sm_75"]
    macros = launch.constants(tiles, dim, is_bfloat16)
    _, found = compile_kernels(folder, file, macros, architecture)
    assert len(found) == len(kernels)
    for registers, spilled in found:
        assert registers * 32 * tiles.warps * tiles.blocks <= REGISTERS
        assert spilled <= SPILLED_BYTES


@NEEDS_NVCC
def test_a_kernel_fits_a_t4(tmp_path):
    check_resources(tmp_path, "forward", 64, "sm_75", False)


@NEEDS_NVCC
@pytest.mark.slow
@pytest.mark.parametrize(
    "chip", [("sm_75", False), ("sm_80", False), ("sm_80", True), ("sm_90", False), ("sm_90", True)]
)
@pytest.mark.parametrize(("file", "dim"), launch.TILES, ids=str)
def test_every_kernel_fits_every_chip(tmp_path, file, dim, chip):
    check_resources(tmp_path, file, dim, *chip)


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> list:
    """What a compiler that only notes its calls was asked for."""
    calls = []

    def compile_nothing(source: Path, options: list[str], architecture: str) -> bytes:
        calls.append((source.name, architecture))
        return f"code {len(calls)}".encode()

    monkeypatch.setattr(build, "_compile", compile_nothing)
    monkeypatch.setattr(build, "nvrtc_version", lambda: (12, 8))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_what_is_compiled_stays_until_source_options_or_compiler_change(compiled, monkeypatch):
    assert build.build("forward", {"DIM": 64}, "sm_75") == b"code 1"
    assert build.build("forward", {"DIM": 64}, "sm_75") == b"code 1"
    assert build.build("forward", {"DIM": 32}, "sm_75") == b"code 2"
    assert build.build("forward", {"DIM": 64}, "sm_80") == b"code 3"
    assert build.build("backward_keys", {"DIM": 64}, "sm_75") == b"code 4"
    monkeypatch.setattr(build, "nvrtc_version", lambda: (13, 0))
    assert build.build("forward", {"DIM": 64}, "sm_75") == b"code 5"
    sources = build.cache_folder() / "sources"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.build("forward", {"DIM": 64}, "sm_75") == b"code 5"
    (sources / "tiles.cuh").write_text("// another")
    assert build.build("forward", {"DIM": 64}, "sm_75") == b"code 6"


def test_a_t4_has_tiles_of_its_own():
    assert launch.pick_tiles("forward", 64, "compute_75") == launch.TILES["forward", 64]
    for architecture in ("sm_80", "sm_90", "sm_120", "compute_90"):
        tiles = launch.pick_tiles("forward", 64, architecture)
        assert tiles == launch.AMPERE_TILES["forward", 64]
        assert tiles.is_async


def test_bfloat16_for_a_t4_is_refused_before_anything_is_compiled(compiled):
    with pytest.raises(ValueError, match=r"float16 for code of compute_75 .*bfloat16"):
        launch._function("forward", 0, True, 64, "compute_75")
    assert not compiled


def test_without_a_folder_to_write_to_kernels_are_compiled_again(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.build("forward", {}, "sm_75") == b"code 1"
    assert build.build("forward", {}, "sm_75") == b"code 2"
    # nor is there a home folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", mock.Mock(side_effect=RuntimeError("no home")))
    assert build.build("forward", {}, "sm_75") == b"code 3"
    assert build.build("forward", {}, "sm_75") == b"code 4"
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        build.cache_folder()


@pytest.mark.parametrize("content", [b"", b"code 1", b"x" * 100])
def test_a_damaged_file_in_the_cache_is_compiled_again(compiled, content):
    build.build("forward", {}, "sm_75")
    (path,) = build.cache_folder().glob("*.bin")
    path.write_bytes(content)
    assert build.build("forward", {}, "sm_75") == b"code 2"
    assert build.build("forward", {}, "sm_75") == b"code 2"


def test_compiled_kernels_are_kept_in_the_folder_that_is_named(compiled, monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("WORKBOOK_KERNELS", str(folder))
    assert build.build("forward", {"DIM": 64}, "sm_75") == b"code 1"
    assert [x.name.rpartition("-")[0] for x in folder.iterdir()] == ["forward-sm_75"]
    assert build.build("forward", {"DIM": 64}, "sm_75") == b"code 1"


def test_an_unknown_chip_takes_the_ptx_of_the_last_known_one(monkeypatch):
    monkeypatch.setattr(build, "nvrtc_architectures", lambda: [75, 80, 90])
    assert build.pick_architecture((7, 5)) == "sm_75"
    assert build.pick_architecture((8, 9)) == "compute_80"
    assert build.pick_architecture((12, 0)) == "compute_90"
    monkeypatch.setenv("WORKBOOK_CUDA_ARCHITECTURE", "compute_75")
    assert build.pick_architecture((9, 0)) == "compute_75"


def test_an_architecture_that_is_none_and_a_chip_that_is_too_old_are_named(monkeypatch):
    monkeypatch.setattr(build, "nvrtc_architectures", lambda: [80, 90])
    monkeypatch.setattr(build, "nvrtc_version", lambda: (14, 0))
    with pytest.raises(RuntimeError, match=r"NVRTC 14\.0 does not compile for sm_75 any more"):
        build.pick_architecture((7, 5))
    monkeypatch.setenv("WORKBOOK_CUDA_ARCHITECTURE", "turing")
    with pytest.raises(ValueError, match=r"WORKBOOK_CUDA_ARCHITECTURE must be .*'turing'"):
        build.pick_architecture((9, 0))


def test_a_missing_compiler_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(build, "_nvrtc_files", lambda major: iter(["/nowhere/libnvrtc.so"]))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvrtc-cu12, or use sdpa"):
        build.nvrtc.__wrapped__()


@pytest.mark.skipif(not build.has_nvrtc(), reason="needs NVRTC")
def test_nvrtc_compiles_machine_code_and_ptx_and_shows_what_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    macros = launch.constants(launch.TILES["forward", 64], 64, False)
    assert build.build("forward", macros, "sm_75").startswith(b"\x7fELF")
    assert b".target sm_75" in build.build("forward", macros, "compute_75")
    with pytest.raises(RuntimeError, match=r"(?s)forward.cu does not compile for sm_75:.*ROWS"):
        build.build("forward", macros | {"ROWS": 100}, "sm_75")


def test_a_launch_reaches_the_driver_whole(monkeypatch):
    calls, refused = [], []

    class Driver:
        """Notes its calls in place of CUDA's driver."""

        def __getattr__(self, name: str):
            return lambda *arguments: calls.append((name, arguments)) or int(name in refused)

    monkeypatch.setattr(driver, "driver", Driver)
    monkeypatch.setattr(driver, "_context", driver._context.__wrapped__)
    stream = {2: 0x400000000004}.get
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    settings = {"device": 2, "threads": 128, "shared_bytes": 4096}
    function = driver.Function(b"ELF", "forward", **settings)
    assert dict(calls)["cuModuleLoadData"][1:] == (b"ELF",)
    assert dict(calls)["cuModuleGetFunction"][2:] == (b"forward",)
    assert dict(calls)["cuFuncSetAttribute"][1:] == (driver.SHARED_BYTES_ATTRIBUTE, 4096)
    calls.clear()
    arguments = launch.AttentionArguments(lse=0x123456789ABC, num_heads=7, scale=0.25)
    function(70000, arguments)
    # the thread may have no context yet
    assert [name for name, _ in calls][-2:] == ["cuCtxSetCurrent", "cuLaunchKernel"]
    handle, *sizes, queue, pointers, extra = calls[-1][1]
    assert (handle, queue.value, extra) == (function.handle, 0x400000000004, None)
    assert sizes == [70000, 1, 1, 128, 1, 1, 4096]
    assert ctypes.string_at(pointers[0], ctypes.sizeof(arguments)) == bytes(arguments)
    refused.append("cuLaunchKernel")
    with pytest.raises(RuntimeError, match="CUDA: unknown error"):
        function(1, arguments)


def test_sources_travel_with_the_package():
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = patterns["tool"]["setuptools"]["package-data"]["lib"]
    packed = {path for pattern in patterns for path in (root / "lib").glob(pattern)}
    assert set(build.SOURCES.glob("*.cu*")) <= packed
    assert len(list(build.SOURCES.glob("*.cu*"))) >= 5
    assert os.access(build.SOURCES, os.R_OK)
