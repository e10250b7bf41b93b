"""The Hopper kernels: compiled ahead of time, and against float64 on a Hopper GPU.

Run as a program, the file compiles the jobs that it reads from standard input.
"""

import ctypes
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.flash_attention.cases import (
    Case,
    assert_error_at_most_twice_pytorchs,
    largest,
    make_inputs,
    new_memory_is_nan,
    right_results,
    with_gradients,
)
from tests.flash_attention.test_tiles import (
    ROOT,
    SHARED_KB,
    compile_all,
    compile_jobs_from_stdin,
    resources,
)

KERNELS = ("forward_kernel", "backward_queries_kernel", "backward_keys_kernel")
# Bytes that a thread may spill: for dK and dV with head_dim 128, and for the others
MAX_SPILLED = {True: 120, False: 16}
# what dK and dV may spill in addition if lengths are uneven or gradients rotated back
MAX_SPILLED_FURTHER = 24
# with head_dim 256; True: where a tile's gradients are rotated back, after its loop
MAX_SPILLED_WIDE = {True: 304, False: 24}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def hopper():
    """The module that launches the kernels; it needs a Triton with Gluon."""
    pytest.importorskip("triton")
    try:
        from lib.flash_attention.hopper import launch
    except ImportError as error:
        pytest.skip(str(error))
    return launch


def launches(job: dict, replace: Callable) -> dict[str, dict]:
    """The arguments with which the library would launch each kernel."""
    from lib.flash_attention.hopper import launch as hopper

    found = {}

    def record(key, tensors, make: Callable) -> None:
        found.update({kernel.__name__: arguments for kernel, _, arguments in make()})

    replace(hopper, "_launch", record)
    replace(torch.cuda, "is_current_stream_capturing", lambda: False)
    # fewer than there are items of work
    replace(hopper, "_multiprocessors", lambda device: 2)
    replace(hopper, "_work_list", lambda *work: torch.zeros(1, 2, dtype=torch.int32))
    head_dim, length = job["head_dim"], 384 + job.get("is_uneven", False)
    first, *others = hopper.forward_schedule(head_dim), *hopper.backward_schedules(head_dim)
    q = torch.zeros(1, 2, length, head_dim, dtype=DTYPES[job["dtype"]])
    angles = (torch.zeros(length, head_dim // 2),) * 2 if job.get("has_rope") else None
    mask_and_scale = (job.get("is_causal", True), 0.1)
    out, lse = hopper.flash_forward(q, q, q, *mask_and_scale, schedule=first)
    hopper.flash_backward(
        out, q, q, q, out, lse, *mask_and_scale, schedules=tuple(others), angles=angles
    )
    return found


def compile_one(job: dict) -> dict:
    """`job` with the resources of the compiled kernel."""
    from lib.flash_attention.hopper import compiled as hopper_compiled
    from lib.flash_attention.hopper import launch as hopper
    from lib.flash_attention.hopper.direct import DirectLaunch, TensorMap

    function = getattr(hopper, job["kernel"])
    with pytest.MonkeyPatch.context() as patch:
        arguments = launches(job, patch.setattr)[job["kernel"]]
    kind = hopper_compiled.kind_of(function, arguments)
    code, about = hopper_compiled.compile_with_triton(*kind)
    binary = hopper_compiled.Binary.of(kind[1], code, about)
    on_a_gpu = SimpleNamespace(handle=None, device=0)
    passed = DirectLaunch(binary, on_a_gpu, (1,), arguments, list(arguments)).fixed
    # a launch passes what this Triton's kernels take
    sizes = [ctypes.sizeof(TensorMap if x is None else x) for x in passed]
    assert sizes == parameter_bytes(code["ptx"])
    found = SimpleNamespace(asm=code, metadata=SimpleNamespace(shared=binary.shared_bytes))
    return job | resources(found) | {"matmuls": code["ptx"].count("wgmma.mma_async")}


def parameter_bytes(ptx: str) -> list[int]:
    """The bytes of each parameter of the kernel in PTX."""
    (declared,) = re.findall(r"\.entry \w+\(([^)]*)\)", ptx)
    arrays = [re.search(r"\.b8 \w+\[(\d+)\]", line) for line in declared.split(",")]
    bits = [re.search(r"\.param \.\w(\d+)", line) for line in declared.split(",")]
    return [int(a[1]) if a else int(b[1]) // 8 for a, b in zip(arrays, bits)]


def jobs(**variant) -> list[dict]:
    """A job for each kernel and head_dim."""
    return [
        {"kernel": kernel, "head_dim": head_dim, "dtype": "bf16", **variant}
        for kernel, head_dim in itertools.product(KERNELS, (64, 128, 256))
    ]


def assert_all_fit(compiled: list[dict]) -> None:
    for row in compiled:
        assert row["shared"] <= SHARED_KB[90] * 1024, row
        is_largest = row["kernel"] == "backward_keys_kernel" and row["head_dim"] == 128
        further = row.get("has_rope", False) or row.get("is_uneven", False)
        most = MAX_SPILLED[is_largest] + MAX_SPILLED_FURTHER * (is_largest and further)
        if row["head_dim"] == 256:
            most = MAX_SPILLED_WIDE[row.get("has_rope", False)]
        assert row["stack"] <= most, row
        assert row["matmuls"] > 0, row


@pytest.mark.usefixtures("hopper")
def test_the_tightest_kernels_fit_the_chip(quiet_environment):
    # three warpgroups that share a multiprocessor's registers, and most of its shared memory
    tightest = [("forward_kernel", 64), ("backward_keys_kernel", 128)]
    wanted = [job for job in jobs() if (job["kernel"], job["head_dim"]) in tightest]
    assert_all_fit(compile_all(wanted, quiet_environment, __file__))


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"is_causal": False},
        {"is_uneven": True},
        {"is_causal": False, "is_uneven": True},
        {"has_rope": True},
        {"has_rope": True, "is_causal": False},
        {"dtype": "fp16"},
    ],
    ids=str,
)
def test_every_form_of_the_kernels_fits_the_chip(variant, quiet_environment):
    assert_all_fit(compile_all(jobs(**variant), quiet_environment, __file__))


@pytest.fixture
def launched(hopper, monkeypatch):
    """The arguments of each kernel, as they would be launched."""
    return lambda **job: launches({"dtype": "bf16", "head_dim": 64} | job, monkeypatch.setattr)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("has_rope", [False, True])
def test_a_launch_has_every_argument_of_the_kernel(hopper, launched, kernel, has_rope):
    names = getattr(hopper, kernel).arg_names
    arguments = launched(has_rope=has_rope)[kernel]
    assert set(arguments) == {*names, "num_warps", "maxnreg"}
    # dQ, dK and dV only
    assert (has_rope and kernel != "forward_kernel") == arguments["CONFIG"].HAS_ROPE
    assert arguments["CONFIG"].HEAD_DIM == 64


def test_an_upstream_gradient_at_any_address_is_taken(launched, hopper):
    arguments = launched()
    q = torch.zeros(1, 2, 9, 64, dtype=torch.bfloat16)
    # contiguous, so that `contiguous` would make no copy
    grad_out = torch.randn(q.numel() + 1).bfloat16()[1:].view(q.shape)
    assert grad_out.data_ptr() % hopper.ALIGNMENT
    hopper.flash_backward(grad_out, q, q, q, q, q.new_zeros(1, 2, 9).float(), True, 0.1)
    for kernel in KERNELS[1:]:
        read = arguments[kernel]["grad_out_desc"].base
        assert read.data_ptr() % hopper.ALIGNMENT == 0
        torch.testing.assert_close(read, grad_out, rtol=0, atol=0)


OTHER_TRITON = """
import triton
triton.__version__ = "3.8.0"
from lib.flash_attention import triton_attention
assert triton_attention.hopper is None
"""


@pytest.mark.usefixtures("hopper")
def test_a_triton_whose_parameters_are_unknown_has_the_portable_kernels(quiet_environment):
    done = subprocess.run(
        [sys.executable, "-c", OTHER_TRITON],
        cwd=ROOT,
        env=quiet_environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def scheduled(hopper, forward, backward):
    """Attention with these schedules; None for the tuned ones."""

    class Scheduled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal, scale):
            assert hopper.supports(q, k, v)
            ctx.settings = (is_causal, scale or q.shape[-1] ** -0.5)
            out, lse = hopper.flash_forward(q, k, v, *ctx.settings, schedule=forward)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad_out):
            tensors = (grad_out, *ctx.saved_tensors)
            grads = hopper.flash_backward(*tensors, *ctx.settings, schedules=backward)
            return *grads, None, None

    return lambda q, k, v, *, is_causal, scale: Scheduled.apply(q, k, v, is_causal, scale)


# warpgroups, keys, stages, is_ordered, is_persistent, is_kept: of the forward pass, and of dQ and
# of dK and dV
FORWARD = {
    64: [(2, 128, 2), (3, 128, 3, True, False), (3, 128, 2, True), (2, 128, 3, False, True, True)],
    128: [(2, 128, 2), (2, 64, 4), (2, 128, 2, True, True, True)],
    256: [(2, 64, 2), (2, 64, 2, True, False)],
}
BACKWARD = {
    64: [
        ((3, 64, 4), (2, 64, 4)),
        ((3, 64, 4, False, False, True), (2, 64, 4, False, False, True)),
        ((2, 128, 3), (2, 64, 3, False, True, True)),
    ],
    128: [((2, 64, 3), (2, 64, 2)), ((2, 64, 3, False, False, True), (2, 64, 3, False, False))],
    256: [((2, 32, 3), (1, 64, 2)), ((2, 32, 3, False, False), (1, 64, 2, False, False))],
}
SCHEDULES = [(d, s, None) for d in FORWARD for s in FORWARD[d]]
SCHEDULES += [(d, None, s) for d in BACKWARD for s in BACKWARD[d]]
CASES = [
    Case(1, 300, 64),
    Case(300, 1, 128),
    Case(63, 65, 64, False, heads=4, key_heads=1),
    Case(193, 191, 128, heads=4, key_heads=1),
    Case(256, 256, 64, False, layout="tokens first"),
    Case(90, 1000, 128, heads=4, layout="amid NaN"),
    Case(1000, 90, 64, heads=4, key_heads=1),
    Case(1000, 1000, 64, heads=4, key_heads=2),
    Case(1000, 770, 128, False),
    # in wider tiles of the two backward kernels, and of the forward one without a mask up to 64
    Case(193, 191, 40, heads=4, key_heads=1),
    Case(150, 150, 56, False),
    Case(300, 200, 80, False, heads=4, key_heads=2),
    Case(257, 257, 96, scale=0.5),
    Case(500, 500, 88, layout="tokens first"),
    Case(1, 300, 192),
    Case(300, 1, 160, False),
    Case(193, 191, 192, heads=4, key_heads=1),
    Case(500, 500, 136, layout="tokens first"),
    Case(1000, 770, 168, False, heads=4, key_heads=2),
    Case(90, 1000, 160, layout="amid NaN"),
    # too wide for the one backward kernel
    Case(193, 191, 256, heads=4, key_heads=1),
    Case(90, 1000, 256, heads=4),
    Case(256, 256, 256, False),
]
# each width with one mask: half as much to compile
ON_FORMS = pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)], ids=str)


@pytest.fixture(scope="module")
def kernels(hopper):
    """What chooses between these kernels and the portable ones, on a Hopper GPU."""
    if not hopper._multiprocessors(torch.device("cuda:0")):
        pytest.skip("needs a Hopper GPU")
    from lib.flash_attention import triton_attention

    return triton_attention


def ours(kernels, case: Case):
    return lambda q, k, v: kernels.flash_attention(
        q, k, v, is_causal=case.is_causal, scale=case.scale
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "forward", "backward"), SCHEDULES, ids=str)
@pytest.mark.usefixtures("kernels")
def test_every_schedule_is_right(hopper, head_dim, forward, backward):
    backward = backward and tuple(hopper.Schedule(*schedule) for schedule in backward)
    attention = scheduled(hopper, forward and hopper.Schedule(*forward), backward)
    for sizes in [(450, 450), (130, 700), (700, 130), (1, 1)]:
        # more items than an H200 has multiprocessors, and some rows in the last tiles
        case = Case(*sizes, head_dim, heads=6, key_heads=3, batch=12)
        assert_error_at_most_twice_pytorchs(attention, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backward", ["two kernels", "one kernel", "one kernel in any order"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tuned_kernels_are_right(kernels, hopper, case, backward, dtype, monkeypatch):
    is_one = backward != "two kernels"
    if is_one and case.head_dim > 192:
        pytest.skip("too wide for one kernel")
    # several items of work for each
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 3)
    monkeypatch.setattr(hopper, "_one_kernel_is_faster", lambda q, k, is_causal: is_one)

    def attention(q: Tensor, k: Tensor, v: Tensor, **settings) -> Tensor:
        assert hopper.supports(q, k, v)
        deterministic = backward != "one kernel in any order"
        return kernels.flash_attention(q, k, v, deterministic=deterministic, **settings)

    assert_error_at_most_twice_pytorchs(attention, case, dtype, "cuda")


@pytest.mark.gpu
def test_calls_of_one_layout_launch_again_what_the_first_launched(hopper, kernels, monkeypatch):
    monkeypatch.setattr(hopper, "_remembered", {})
    case = Case(200, 130, 128, heads=4, key_heads=2)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    attention = ours(kernels, case)
    first = with_gradients(attention, inputs)
    known = dict(hopper._remembered)
    assert [len(launches) for launches in known.values()] == [1, 2]
    monkeypatch.setattr(hopper, "load", None)
    # elsewhere in memory
    again = with_gradients(attention, [x.detach().clone().requires_grad_() for x in inputs])
    assert all(a.equal(b) for a, b in zip(first, again))
    assert hopper._remembered == known


def rotations_of(length: int, head_dim: int) -> Tensor:
    """e^(i angle) of each position and pair."""
    frequencies = 0.01 ** torch.linspace(0, 1, head_dim // 2, device="cuda")
    angles = torch.arange(length, device="cuda")[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.gpu
@ON_FORMS
def test_gradients_are_rotated_back_as_well_as_afterwards(kernels, hopper, head_dim, is_causal):
    case = Case(450, 300, head_dim, is_causal, heads=6, key_heads=2)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    q, k, v, grad_out = (x.detach() for x in inputs)
    rotations = rotations_of(500, head_dim)

    def rotated_back(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotations[: x.shape[2]].conj()).flatten(-2)

    tensors = (grad_out, q, k, v, *hopper.flash_forward(q, k, v, is_causal, head_dim**-0.5))
    settings = (*tensors, is_causal, head_dim**-0.5)
    angles = (rotations.real.contiguous(), rotations.imag.contiguous())
    with new_memory_is_nan():
        results = hopper.flash_backward(*settings, angles=angles)
    plain, right = hopper.flash_backward(*settings), right_results(inputs, case)[1:]
    assert results[2].equal(plain[2])
    for a, b, c in zip(results[:2], plain, right):
        # one rounding fewer, but the largest error may be that of another element
        assert largest(a - rotated_back(c)) <= 1.5 * largest(rotated_back(b) - rotated_back(c))


@pytest.mark.gpu
@pytest.mark.parametrize("is_seen_before", [False, True])
@ON_FORMS
def test_a_recorded_graph_is_right(kernels, hopper, head_dim, is_causal, is_seen_before):
    # as many as in no other test
    heads = 41 + 6 * is_seen_before
    case = Case(330, 330, head_dim, is_causal, heads=heads, key_heads=heads)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    settings = (is_causal, 0.1)

    def attention() -> list[Tensor]:
        out, lse = kernels.flash_forward(q, k, v, *settings)
        return [out, *kernels.flash_backward(grad_out, q, k, v, out, lse, *settings)]

    for_queries, for_keys = (
        s._replace(is_persistent=False) for s in hopper.backward_schedules(head_dim)
    )
    schedule = hopper.forward_schedule(head_dim)._replace(is_persistent=False)
    # compiled before the recording
    once = hopper.flash_forward(q, k, v, *settings, schedule=schedule)
    hopper.flash_backward(grad_out, q, k, v, *once, *settings, schedules=(for_queries, for_keys))
    if is_seen_before:
        attention()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    known = len(hopper._work_lists(q.device))
    with torch.cuda.graph(graph):
        results = attention()
    assert len(hopper._work_lists(q.device)) == known
    for _ in range(2):
        for x in (q, k, v, grad_out):
            x.copy_(torch.randn_like(x))
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        # `attention()` also makes the work list, if there was none
        assert all(a.equal(b) for a, b in zip(results, attention()))


@pytest.fixture
def one_kernel(kernels, hopper, monkeypatch):
    """`kernels`, with gradients by the one backward kernel, for short sequences, too."""
    monkeypatch.setattr(hopper, "_one_kernel_is_faster", lambda q, k, is_causal: True)
    return kernels


@pytest.mark.gpu
@pytest.mark.parametrize("cache_bytes", [1, 2**40], ids=["a head a section", "one section"])
@pytest.mark.parametrize(
    ("head_dim", "is_causal"), [(64, True), (128, False), (80, True), (192, True)]
)
def test_the_gradients_of_one_kernel_repeat_to_the_bit(
    one_kernel, head_dim, is_causal, cache_bytes, monkeypatch
):
    monkeypatch.setattr(one_kernel.hopper, "CACHE_BYTES", cache_bytes)
    case = Case(1500, 1500, head_dim, is_causal, heads=16, key_heads=8)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    out, lse = one_kernel.flash_forward(q, k, v, is_causal, 0.1)
    tensors = (grad_out, q, k, v, out, lse, is_causal, 0.1)
    first = one_kernel.flash_backward(*tensors)
    for _ in range(5):
        assert all(a.equal(b) for a, b in zip(one_kernel.flash_backward(*tensors), first))


@pytest.mark.gpu
@ON_FORMS
def test_in_any_order_only_the_gradient_of_q_may_differ(one_kernel, head_dim, is_causal):
    case = Case(1500, 1500, head_dim, is_causal, heads=8, key_heads=8)
    inputs = make_inputs(case, torch.bfloat16, "cuda")

    def gradients():
        settings = {"is_causal": is_causal, "deterministic": False}
        attention = functools.partial(one_kernel.flash_attention, **settings)
        return with_gradients(attention, inputs)[1:]

    first, right = gradients(), right_results(inputs, case)[1]
    for _ in range(5):
        grad_q, *others = gradients()
        assert all(a.equal(b) for a, b in zip(others, first[1:]))
        assert largest(grad_q - right) <= 1.5 * largest(first[0] - right)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False), (160, True)])
def test_the_gradients_of_one_kernel_are_rotated_back(one_kernel, head_dim, is_causal):
    case = Case(450, 300, head_dim, is_causal, heads=6, key_heads=2)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    angles = torch.rand(500, head_dim // 2, device="cuda")
    settings = (is_causal, head_dim**-0.5)
    tensors = (grad_out, q, k, v, *one_kernel.flash_forward(q, k, v, *settings))
    angles = (angles.cos(), angles.sin())
    found = one_kernel.flash_backward(*tensors, *settings, angles=angles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_kernel.hopper, "_one_kernel_is_faster", lambda q, k, is_causal: False)
        expected = one_kernel.flash_backward(*tensors, *settings, angles=angles)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * largest(b))


@pytest.mark.gpu
def test_a_recorded_graph_of_one_kernel_is_right(one_kernel):
    case = Case(700, 700, heads=43, key_heads=43)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    out, lse = one_kernel.flash_forward(q, k, v, True, 0.1)
    tensors = (grad_out, q, k, v, out, lse, True, 0.1)
    one_kernel.flash_backward(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = one_kernel.flash_backward(*tensors)
    for _ in range(2):
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        for a, b in zip(results, one_kernel.flash_backward(*tensors)):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * largest(b))


@pytest.mark.gpu
def test_rotated_attention_compiles_into_one_graph(kernels):
    from lib.model.elementwise_triton import rotated_attention

    torch.compiler.reset()
    rotations = rotations_of(400, 64)
    cos, sin = rotations.real.contiguous(), rotations.imag.contiguous()
    qkv = torch.randn(2, 310, 3, 7, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def attention(qkv: Tensor) -> Tensor:
        return rotated_attention(qkv * 2, cos, sin) + 1

    results = []
    for function in (torch.compile(attention, fullgraph=True, dynamic=False), attention):
        out = function(qkv)
        (gradient,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
        results.append((out.detach(), gradient))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_another_device_than_the_current_one(kernels):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = Case(200, 200)
    inputs = make_inputs(case, torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0
    right = right_results(inputs, case)
    for a, b in zip(with_gradients(ours(kernels, case), inputs), right):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.02 * largest(b))


if __name__ == "__main__":
    compile_jobs_from_stdin(compile_one)
