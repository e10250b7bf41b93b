"""The attention kernels, compiled ahead of time: each choice of tiles fits the chips it is for.

No GPU is needed for that. Run as a program, this file compiles what it is told.
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

from lib.parallel import available_cpus

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("_forward_kernel", "_backward_queries_kernel", "_backward_keys_kernel")
# The most shared memory of a block, from CUDA's programming guide. sm_86 (RTX 30), sm_89 (L4,
# RTX 40) and sm_120 (RTX 50) run with the tiles of sm_80.
SHARED_KB = {75: 64, 80: 163, 86: 99, 90: 227}
SHORT_TYPES = {75: ("fp16",), 80: ("bf16", "fp16"), 90: ("bf16", "fp16")}
# Bytes a thread, beside 1020 in registers. On Hopper tiles are chosen by time, spills and all.
MOST_SPILLED = {75: 400, 80: 256, 90: 700}
FLOAT32_POINTERS = ("lse_ptr", "delta_ptr", "cos_ptr", "sin_ptr")


def jobs(architectures, head_dims, dtypes=None, **variant) -> list[dict]:
    """One for each kernel, head_dim and dtype."""
    return [
        {"architecture": sm, "kernel": kernel, "head_dim": head_dim, "dtype": dtype, **variant}
        for sm in architectures
        for head_dim, dtype, kernel in itertools.product(
            head_dims, dtypes or (SHORT_TYPES[sm][0], "fp32"), KERNELS
        )
    ]


def tiles_of(architecture: int, kernel: str, head_dim: int, dtype: str, precision="tf32x3"):
    """What the library chooses on that chip."""
    import torch

    from lib import flash_attention_triton as kernels

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    q = torch.empty(1, 1, 1, head_dim, dtype=torch_dtype, device="meta")
    capability = divmod(architecture, 10)
    if kernel == "_forward_kernel":
        return kernels.forward_tiles(q, capability, precision)
    return kernels.backward_tiles(q, capability, precision)[kernel == "_backward_keys_kernel"]


def compile_one(job: dict) -> dict:
    """`job`, its tiles, and what the compiled kernel takes of shared memory, registers, stack."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lib import flash_attention_triton as kernels

    precision = job.get("precision", "tf32x3" if job["architecture"] >= 80 else "ieee")
    names = ("architecture", "kernel", "head_dim", "dtype")
    tiles = tiles_of(*(job[key] for key in names), precision)
    length = tiles.queries * tiles.keys + job.get("is_uneven", False)
    fixed = kernels.constants(
        job.get("is_causal", True), job["head_dim"], length, length, precision, tiles
    ) | {"IS_TURNED": job.get("is_turned", False)}
    function = getattr(kernels, job["kernel"])
    signature, constants, divisible = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in fixed:
            signature[name], constants[(place,)] = "constexpr", fixed[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FLOAT32_POINTERS else f"*{job['dtype']}"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if name.endswith(("_ptr", "_batch", "_head", "_token")):
            divisible[(place,)] = [["tt.divisibility", 16]]
    options = {key: fixed[key] for key in ("num_warps", "num_stages", "maxnreg") if key in fixed}
    compiled = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=divisible),
        target=GPUTarget("cuda", job["architecture"], 32),
        options=options,
    )
    tensor_cores = "mma" in compiled.asm["ptx"]
    return job | resources(compiled) | {"tiles": list(tiles), "tensor_cores": tensor_cores}


def resources(compiled) -> dict[str, int]:
    """What a compiled kernel takes: bytes of shared memory; of a thread registers, stack bytes."""
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


def compile_what_is_told(compile_one: Callable[[dict], dict]) -> None:
    """What the program does that `compile_all` starts."""
    wanted = json.load(sys.stdin)
    workers = min(4, available_cpus())
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        print(json.dumps(list(pool.map(compile_one, wanted))))


def assert_all_fit(compiled: list[dict]) -> None:
    for row in compiled:
        # the tiles of sm_80 are for chips with less, too
        chips = (80, 86) if row["architecture"] == 80 else (row["architecture"],)
        for chip in chips:
            assert row["shared"] <= SHARED_KB[chip] * 1024, f"sm_{chip}: {row}"
        on_tensor_cores = row["architecture"] >= 80 and row.get("precision") != "ieee"
        # split factors take more registers; those tiles too are chosen by time
        is_split = on_tensor_cores and row["dtype"] == "fp32"
        assert row["stack"] <= (720 if is_split else MOST_SPILLED[row["architecture"]]), row
        assert row["tensor_cores"] == on_tensor_cores, row


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        pytest.skip("this form of ahead-of-time compilation is Triton 3.3's")


def test_the_tiles_of_usual_heads_fit_each_chip(quiet_environment):
    wanted = jobs((75, 90), (64,)) + jobs((80,), (128,), ("bf16",))
    assert_all_fit(compile_all(wanted, quiet_environment))


@pytest.mark.slow
def test_the_tiles_of_heads_of_64_and_128_fit_each_chip(quiet_environment):
    assert_all_fit(compile_all(jobs((75, 80, 90), (64, 128)), quiet_environment))


@pytest.mark.slow
def test_the_tiles_of_narrow_and_wide_heads_fit_each_chip(quiet_environment):
    wanted = [job for job in jobs((75, 80, 90), (32, 256)) if not is_too_wide(**job)]
    assert_all_fit(compile_all(wanted, quiet_environment))


def is_too_wide(architecture: int, kernel: str, head_dim: int, dtype: str) -> bool:
    """Whether a T4 has too little shared memory for the gradients, in the least tiles there are."""
    is_backward = kernel != "_forward_kernel"
    return architecture == 75 and is_backward and head_dim > 128 and dtype == "fp32"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_tiles_fit_other_products_of_float32(precision, quiet_environment):
    wanted = jobs((80, 90), (32, 64, 128, 256), ("fp32",), precision=precision)
    assert_all_fit(compile_all(wanted, quiet_environment))


@pytest.mark.slow
def test_the_tiles_fit_in_the_other_short_type(quiet_environment):
    wanted = jobs((80, 90), (32, 64, 128, 256), ("fp16",))
    assert_all_fit(compile_all(wanted, quiet_environment))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["full", "uneven", "turned"])
def test_the_tiles_fit_every_form_of_the_kernels(variant, quiet_environment):
    settings = {"full": {"is_causal": False}, "uneven": {"is_uneven": True}}
    wanted = jobs((75, 80, 90), (64, 128), **settings.get(variant, {"is_turned": True}))
    if variant == "turned":
        wanted = [job for job in wanted if job["kernel"] != "_forward_kernel"]
    assert_all_fit(compile_all(wanted, quiet_environment))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [1, 16, 33, 64, 80, 128, 129, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_there_are_tiles_for_every_width(capability, head_dim, dtype):
    for kernel in KERNELS:
        job = (10 * capability[0] + capability[1], kernel, head_dim, dtype)
        if is_too_wide(*job):
            with pytest.raises(ValueError, match=f"head_dim is {head_dim} in float32.* at most"):
                tiles_of(*job)
            continue
        tiles = tiles_of(*job)
        assert min(tiles.queries, tiles.keys) >= 16


if __name__ == "__main__":
    compile_what_is_told(compile_one)
