"""Tiles of the portable kernels: tables that fit their chips.

The tables are compiled ahead of time, without a GPU. Run as a program, the file compiles the jobs
that it reads from standard input.
"""

import concurrent.futures
import glob
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lib.core.hardware import available_cpus
from lib.flash_attention.tiles import backward_tiles, forward_tiles

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("_forward_kernel", "_backward_queries_kernel", "_backward_keys_kernel")
# Maximum shared memory of a block, from CUDA's programming guide. sm_86 (RTX 30), sm_89 (L4,
# RTX 40) and sm_120 (RTX 50) use the tiles of sm_80.
SHARED_KB = {75: 64, 80: 163, 86: 99, 90: 227}
SHORT_TYPES = {75: ("fp16",), 80: ("bf16", "fp16"), 90: ("bf16", "fp16")}
# Bytes that a thread may spill beyond 1020 in registers. Hopper's tiles are chosen by time.
MAX_SPILLED = {75: 400, 80: 256, 90: 700}
FLOAT32_POINTERS = ("lse_ptr", "delta_ptr", "cos_ptr", "sin_ptr")


def jobs(architectures, head_dims, dtypes=None, **variant) -> list[dict]:
    """A job for each kernel, head_dim and dtype."""
    return [
        {"architecture": sm, "kernel": kernel, "head_dim": head_dim, "dtype": dtype, **variant}
        for sm in architectures
        for head_dim, dtype, kernel in itertools.product(
            head_dims, dtypes or (SHORT_TYPES[sm][0], "fp32"), KERNELS
        )
    ]


def tiles_of(architecture: int, kernel: str, head_dim: int, dtype: str, precision="tf32x3"):
    """The library's choice for that chip."""
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    q = torch.empty(1, 1, 1, head_dim, dtype=torch_dtype, device="meta")
    capability = divmod(architecture, 10)
    if kernel == "_forward_kernel":
        return forward_tiles(q, capability, precision)
    return backward_tiles(q, capability, precision)[kernel == "_backward_keys_kernel"]


def compile_one(job: dict) -> dict:
    """`job` with its tiles, and the shared memory, registers and stack of the compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lib.flash_attention import triton_attention as kernels

    precision = job.get("precision", "tf32x3" if job["architecture"] >= 80 else "ieee")
    names = ("architecture", "kernel", "head_dim", "dtype")
    chosen = tiles_of(*(job[key] for key in names), precision)
    length = chosen.queries * chosen.keys + job.get("is_uneven", False)
    fixed = kernels.constants(
        job.get("is_causal", True), job["head_dim"], length, length, precision, chosen
    ) | {"HAS_ROPE": job.get("has_rope", False)}
    function = getattr(kernels, job["kernel"])
    signature, constants, divisible = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in fixed:
            signature[name], constants[(index,)] = "constexpr", fixed[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FLOAT32_POINTERS else f"*{job['dtype']}"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if name.endswith(("_ptr", "_batch", "_head", "_token")):
            divisible[(index,)] = [["tt.divisibility", 16]]
    options = {key: fixed[key] for key in ("num_warps", "num_stages", "maxnreg") if key in fixed}
    compiled = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=divisible),
        target=GPUTarget("cuda", job["architecture"], 32),
        options=options,
    )
    tensor_cores = "mma" in compiled.asm["ptx"]
    return job | resources(compiled) | {"tiles": list(chosen), "tensor_cores": tensor_cores}


def resources(compiled) -> dict[str, int]:
    """Bytes of shared memory of a compiled kernel; registers and stack bytes of its threads."""
    import triton

    (cuobjdump,) = glob.glob(f"{Path(triton.__file__).parent}/backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([cuobjdump, "-res-usage", file.name], text=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "shared": compiled.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
    }


def compile_all(
    wanted: list[dict], environment: dict[str, str], program: str = __file__
) -> list[dict]:
    """`compile_one` of `program` for each, in a process where Triton does not interpret."""
    environment = {k: v for k, v in environment.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def compile_jobs_from_stdin(compile_one: Callable[[dict], dict]) -> None:
    """The program that `compile_all` starts: jobs in, results out, as JSON."""
    wanted = json.load(sys.stdin)
    workers = min(4, available_cpus())
    # copies of this process, which has loaded torch and started no thread
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        print(json.dumps(list(pool.map(compile_one, wanted))))


def assert_all_fit(compiled: list[dict]) -> None:
    for row in compiled:
        # chips with less shared memory use the tiles of sm_80, too
        chips = (80, 86) if row["architecture"] == 80 else (row["architecture"],)
        for chip in chips:
            assert row["shared"] <= SHARED_KB[chip] * 1024, f"sm_{chip}: {row}"
        on_tensor_cores = row["architecture"] >= 80 and row.get("precision") != "ieee"
        # split operands take more registers; these tiles too are chosen by time
        is_split = on_tensor_cores and row["dtype"] == "fp32"
        assert row["stack"] <= (720 if is_split else MAX_SPILLED[row["architecture"]]), row
        assert row["tensor_cores"] == on_tensor_cores, row


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("this form of ahead-of-time compilation is Triton 3.3's")


def test_each_kernel_compiles_for_a_chip_and_fits_it(quiet_environment):
    forward, *_ = jobs((80,), (128,), ("bf16",))
    _, of_queries, _ = jobs((90,), (64,), ("bf16",))
    # most shared memory in proportion to the chip's
    *_, of_keys = jobs((75,), (64,), ("fp32",))
    assert_all_fit(compile_all([forward, of_queries, of_keys], quiet_environment))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architectures", "head_dims", "dtypes", "variant"),
    [
        ((75, 80, 90), (32, 64, 128, 256), None, {}),
        ((80, 90), (32, 64, 128, 256), ("fp16",), {}),
        ((80, 90), (32, 64, 128, 256), ("fp32",), {"precision": "ieee"}),
        ((80, 90), (32, 64, 128, 256), ("fp32",), {"precision": "tf32"}),
        ((75, 80, 90), (64, 128), None, {"is_causal": False}),
        ((75, 80, 90), (64, 128), None, {"is_uneven": True}),
        ((75, 80, 90), (64, 128), None, {"has_rope": True}),
    ],
    ids=str,
)
def test_all_tiles_fit_each_chip(architectures, head_dims, dtypes, variant, quiet_environment):
    wanted = [
        job
        for job in jobs(architectures, head_dims, dtypes, **variant)
        if not is_too_wide(*(job[key] for key in ("architecture", "kernel", "head_dim", "dtype")))
        and not (job["kernel"] == "_forward_kernel" and "has_rope" in variant)
    ]
    assert_all_fit(compile_all(wanted, quiet_environment))


def is_too_wide(architecture: int, kernel: str, head_dim: int, dtype: str) -> bool:
    """Whether a T4 has too little shared memory for the gradients, even in the smallest tiles."""
    is_backward = kernel != "_forward_kernel"
    return architecture == 75 and is_backward and head_dim > 128 and dtype == "fp32"


@pytest.mark.parametrize("architecture", [75, 80, 90, 120])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_there_are_tiles_for_every_head_dim(architecture, dtype):
    for head_dim, kernel in itertools.product([1, 16, 33, 64, 80, 128, 129, 256], KERNELS):
        job = (architecture, kernel, head_dim, dtype)
        if is_too_wide(*job):
            with pytest.raises(ValueError, match=f"at most 128 in float32, got {head_dim}"):
                tiles_of(*job)
            continue
        chosen = tiles_of(*job)
        assert min(chosen.queries, chosen.keys) >= 16


if __name__ == "__main__":
    compile_jobs_from_stdin(compile_one)
