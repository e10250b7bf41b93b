"""The machine code of the Gluon kernels: compiled once for all lengths, numbers of heads, layouts.

Triton's own launch compiles again where an argument is 1 or a multiple of 16, and builds a program
in C for each list of types. Here the types of all arguments are fixed, and the driver launches
(`direct.py`). What is compiled is kept where the kernels in CUDA C++ are.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lib.flash_attention.background import Once
from lib.flash_attention.cuda.build import find_or_make
from lib.flash_attention.cuda.driver import Function

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
TARGET = GPUTarget("cuda", 90, 32)
# Arguments that may lie at any address, and integers that may be large.
UNALIGNED = ("lse_ptr",)
LARGE = ("out_batch", "out_head", "out_token")
OPTIONS = ("num_warps", "maxnreg")
# The code of a kernel is made under it: that is Python, and changes filters of warnings.
_LOCK = threading.Lock()


class Binary(NamedTuple):
    """The machine code of a kernel, and what a launch must know of it."""

    image: bytes
    name: str
    threads: int
    shared_bytes: int

    signature: dict[str, str]
    """The types of its arguments, by name and in order, without the compile-time constants."""

    maps: list[dict[str, Any]]
    """Triton's layout of each descriptor (`tensordesc_meta`)."""

    @classmethod
    def of(cls, types: tuple, code: Mapping[str, Any], about: Mapping[str, Any]) -> Binary:
        """The binary of a kernel that Triton compiled for arguments of these types."""
        name, threads = about["name"], 32 * about["num_warps"]
        maps = [dict(x) for x in about["tensordesc_meta"] or ()]
        return cls(code["cubin"], name, threads, about["shared"], dict(types), maps)

    def pack(self) -> bytes:
        """As bytes: a line of JSON, and the machine code."""
        return json.dumps(self[1:]).encode() + b"\n" + self.image

    @classmethod
    def unpack(cls, packed: bytes) -> Binary:
        """The binary of `pack`."""
        line, image = packed.split(b"\n", 1)
        return cls(image, *json.loads(line))


def kind_of(function: Any, arguments: Mapping[str, Any]) -> tuple:
    """The key of a kernel's code: its name, the types of arguments, constants, options.

    Args:
        function: one of the kernels of `forward.py` and `backward.py`.
        arguments: by name, with CONFIG and OPTIONS.
    """
    names = [name for name in function.arg_names if name != "CONFIG"]
    types = tuple((name, type_of(name, arguments[name])) for name in names)
    return function, types, arguments["CONFIG"], tuple((x, arguments[x]) for x in OPTIONS)


def type_of(name: str, argument: Any) -> str:
    """The type of an argument as Triton writes it."""
    if name == "work_list_ptr":
        # any tensor stands for it where there is none
        return "*i32"
    if isinstance(argument, torch.Tensor):
        return f"*{TYPES[argument.dtype]}"
    if isinstance(argument, TensorDescriptor):
        block = f"{TYPES[argument.base.dtype]}{list(argument.block_shape)}"
        return f"tensordesc<{block},{argument.layout!r}>"
    if isinstance(argument, float):
        return "fp32"
    return "i64" if name in LARGE else "i32"


@functools.cache
def load(device: int, *kind: Any) -> tuple[Binary, Function]:
    """A kernel of this kind (`kind_of`), on a GPU."""
    binary = binary_of(*kind)
    settings = {"device": device, "threads": binary.threads, "shared_bytes": binary.shared_bytes}
    return binary, Function(binary.image, binary.name, **settings)


@Once
def binary_of(*kind: Any) -> Binary:
    """A kernel of this kind, from the cache, or compiled."""
    function, types, config, options = kind
    found = repr((function.__name__, types, config, options, triton.__version__)).encode()
    key = hashlib.sha256(found + _sources()).hexdigest()
    file = f"{function.__name__}-sm_90a-{key[:24]}.bin"
    return Binary.unpack(
        find_or_make(file, lambda: Binary.of(types, *compile_with_triton(*kind)).pack())
    )


@functools.cache
def _sources() -> bytes:
    folder = Path(__file__).parent
    return b"\0".join((folder / f"{x}.py").read_bytes() for x in ("blocks", "forward", "backward"))


def compile_with_triton(
    function: Any, types: tuple, config: Any, options: tuple
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile a kernel of a kind, for any Hopper GPU.

    As `triton.compile` does, without its cache, for whose keys Triton reads itself from the disk.

    Returns:
        The code as `ptx` and `cubin`, and what Triton noted about it.
    """
    names = function.arg_names
    is_aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types
        if kind.startswith("*") and name not in UNALIGNED
    }
    signature = dict(types) | {"CONFIG": "constexpr"}
    source = GluonASTSource(function, signature, {(names.index("CONFIG"),): config}, is_aligned)
    backend = make_backend(TARGET)
    settings = backend.parse_options(dict(options))
    stages: dict[str, Callable[[Any, dict], Any]] = {}
    backend.add_stages(stages, settings, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(settings), backend.get_module_map()
    with _LOCK:
        code = source.make_ir(TARGET, settings, functions, modules, context)
    about, forms = vars(settings) | {"target": TARGET}, {}
    for ending, lower in stages.items():
        code = lower(code, about)
        if ending in ("ptx", "cubin"):
            forms[ending] = code
    return forms, about
