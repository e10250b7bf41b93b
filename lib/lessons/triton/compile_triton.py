"""Compile Triton kernels ahead of time, for GPUs that are not here."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from lib.lessons.triton.recorder_triton import plain, restore_language

KERNELS = (JITFunction, InterpretedFunction)


@dataclass(frozen=True)
class Compiled:
    """A kernel in the languages that it passes through, and what it takes of a multiprocessor."""

    ttir: str
    """Triton's own intermediate language: operations on whole tiles."""

    ptx: str
    """NVIDIA's assembly language for an imagined chip: what one thread does."""

    registers: int
    """Registers of each thread, at most 255."""

    spilled_bytes: int
    """Bytes that a thread keeps in memory, since it has no registers left: written and read."""

    shared_bytes: int
    threads: int

    def instructions(self, *prefixes: str) -> Counter[str]:
        """How often instructions that begin so occur in the PTX, without their operands."""
        found = re.findall(r"^\s*(?:@%p\d+ )?([a-z][\w.:]+)", self.ptx, flags=re.MULTILINE)
        return Counter(name for name in found if name.startswith(prefixes))

    @property
    def body(self) -> str:
        """The instructions of the PTX, without declarations, comments and places in the source."""
        _, _, body = self.ptx.partition("\n{")
        lines = [line.partition("//")[0].strip() for line in body.partition("\n}")[0].splitlines()]
        return "\n".join(line for line in lines if line and not line.startswith((".", "$")))


def compile_for(
    architecture: int, kernel: Any, signature: dict[str, str], num_warps: int = 4, **constants: Any
) -> Compiled:
    """Compile `kernel` for GPUs of compute capability `architecture`, such as 80 or 90.

    Args:
        signature: the type of each argument: `*fp16` is a pointer, and divisible by 16 as PyTorch's
            are; `i32` an integer; `i32:16` one divisible by 16.
        constants: values of the arguments that are `tl.constexpr`.
    """
    types, fixed, facts = {}, {}, {}
    # what was interpreted without `watch` may have changed it
    restore_language()
    with _language_of(JITFunction):
        jitted = JITFunction(plain(kernel))
        for index, name in enumerate(jitted.arg_names):
            if name in constants:
                types[name], fixed[(index,)] = "constexpr", constants[name]
                continue
            types[name] = signature[name].removesuffix(":16")
            if signature[name].startswith("*") or signature[name].endswith(":16"):
                facts[(index,)] = [["tt.divisibility", 16]]
        compiled = triton.compile(
            ASTSource(fn=jitted, signature=types, constexprs=fixed, attrs=facts),
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": num_warps},
        )
    ptx = compiled.asm["ptx"]
    registers, spilled = assembled(ptx)
    shared = compiled.metadata.shared
    return Compiled(readable(compiled.asm["ttir"]), ptx, registers, spilled, shared, 32 * num_warps)


def readable(ttir: str) -> str:
    """TTIR without the places in the source that each line comes from."""
    text = re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)", "", ttir)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#loc")]
    return "\n".join(lines)


def assembled(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as NVIDIA's assembler reports them."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    chip = re.search(r"^\.target (\w+)", ptx, flags=re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [str(assembler), "-v", f"--gpu-name={chip}", str(file), "-o", f"{folder}/cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    return registers, int(stores) + int(loads)


def _forwarded(value: Any) -> Any:
    """The target of a method of tiles, as `tl.sum` of `x.sum`, interpreted; else `value`."""
    cells = getattr(value, "__closure__", None) or ()
    inside = (cell.cell_contents for cell in cells)
    return next((found for found in inside if isinstance(found, KERNELS)), value)


@contextmanager
def _language_of(kind: type) -> Iterator[None]:
    """Let functions of Triton's language that are kernels themselves, as `tl.sum`, be of `kind`.

    At its import Triton decides whether they are interpreted or compiled, and offers no way to
    change it: this sets the attributes of the modules of `triton.language` and of its class of
    tiles, and sets them back.
    """
    modules = [m for name, m in sys.modules.items() if name.startswith("triton.language")]
    before: list[tuple[Any, str, Any]] = []
    made: dict[Callable, Any] = {}
    for owner in (*modules, tl.tensor):
        for name, value in list(vars(owner).items()):
            function = _forwarded(value)
            if isinstance(function, KERNELS) and type(function) is not kind:
                made.setdefault(function.fn, kind(function.fn))
                before.append((owner, name, value))
                setattr(owner, name, made[function.fn])
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
