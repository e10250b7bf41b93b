"""The attention kernels for Hopper: compiled ahead of time for it, and against float64 on one.

Run as a program, this file compiles what it is told.
"""

import functools
import itertools
import subprocess
import sys
import threading
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.attention_cases import (
    Case,
    assert_error_at_most_twice_pytorchs,
    formula,
    largest,
    make_inputs,
    new_memory_is_nan,
    right_results,
    with_gradients,
)
from tests.test_flash_attention_compile import (
    ROOT,
    SHARED_KB,
    compile_all,
    compile_what_is_told,
    resources,
)

KERNELS = ("forward_kernel", "backward_queries_kernel", "backward_keys_kernel")
# Bytes of a thread, beside its registers: of dK and dV, 128 wide, and of the others
MOST_SPILLED = {True: 120, False: 16}
# and what those take more where lengths are uneven, or gradients are turned back
MOST_SPILLED_FURTHER = 24
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


@pytest.fixture(scope="module")
def hopper():
    """The file that launches the kernels; it needs a Triton with Gluon."""
    pytest.importorskip("triton")
    try:
        from lib import flash_attention_hopper
    except ImportError as error:
        pytest.skip(str(error))
    return flash_attention_hopper


def launches(job: dict, replace: Callable) -> dict[str, tuple[tuple, dict]]:
    """Of each kernel, the arguments with which the library would launch it."""
    from lib import flash_attention_hopper as hopper

    found = {}

    class Recorder:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **settings: found.update({self.name: (args, settings)})

    for name in KERNELS:
        replace(hopper, name, Recorder(name))
    # fewer than there are items of work
    replace(hopper, "_multiprocessors", lambda device: 2)
    replace(hopper, "_order", lambda *work: torch.zeros(2, dtype=torch.int32))
    dtype = {name: dtype for dtype, name in DTYPES.items()}[job["dtype"]]
    head_dim, length = job["head_dim"], 384 + job.get("is_uneven", False)
    is_persistent = job.get("is_listed", True)
    first, *others = (
        schedule._replace(is_persistent=is_persistent)
        for schedule in (
            hopper.forward_schedule(head_dim),
            *hopper.backward_schedules(head_dim),
        )
    )
    q = torch.zeros(1, 2, length, head_dim, dtype=dtype)
    angles = (torch.zeros(length, head_dim // 2),) * 2 if job.get("is_turned") else None
    mask_and_scale = (job.get("is_causal", True), 0.1)
    out, lse = hopper.flash_forward(q, q, q, *mask_and_scale, schedule=first)
    hopper.flash_backward(
        out, q, q, q, out, lse, *mask_and_scale, schedules=tuple(others), angles=angles
    )
    return found


def type_of(argument) -> str:
    """As Triton writes it."""
    if isinstance(argument, Tensor):
        return f"*{DTYPES[argument.dtype]}"
    if isinstance(argument, (int, float)):
        return "i32" if isinstance(argument, int) else "fp32"
    block = f"{DTYPES[argument.base.dtype]}{list(argument.block_shape)}"
    return f"tensordesc<{block},{argument.layout!r}>"


def compile_one(job: dict) -> dict:
    """`job`, and what the compiled kernel takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from lib import flash_attention_hopper as hopper

    function = getattr(hopper, job["kernel"])
    with pytest.MonkeyPatch.context() as patch:
        args, settings = launches(job, patch.setattr)[job["kernel"]]
    names = function.arg_names
    signature = {name: type_of(value) for name, value in zip(names, args)}
    constants = {(names.index(k),): v for k, v in settings.items() if k in names}
    signature |= dict.fromkeys((names[place] for (place,) in constants), "constexpr")
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name.startswith("out_") or signature[name].startswith("*")
    }
    compiled = triton.compile(
        GluonASTSource(function, signature, constants, divisible),
        target=GPUTarget("cuda", 90, 32),
        options={key: settings[key] for key in ("num_warps", "maxnreg")},
    )
    products = compiled.asm["ptx"].count("wgmma.mma_async")
    return job | resources(compiled) | {"products": products}


def jobs(**variant) -> list[dict]:
    """One for each kernel and head_dim."""
    return [
        {"kernel": kernel, "head_dim": head_dim, "dtype": "bf16", **variant}
        for kernel, head_dim in itertools.product(KERNELS, (64, 128))
    ]


def assert_all_fit(compiled: list[dict]) -> None:
    for row in compiled:
        assert row["shared"] <= SHARED_KB[90] * 1024, row
        is_largest = row["kernel"] == "backward_keys_kernel" and row["head_dim"] == 128
        further = row.get("is_turned", False) or row.get("is_uneven", False)
        most = MOST_SPILLED[is_largest] + MOST_SPILLED_FURTHER * (is_largest and further)
        assert row["stack"] <= most, row
        assert row["products"] > 0, row


@pytest.mark.usefixtures("hopper")
def test_the_tightest_kernels_fit_the_chip(quiet_environment):
    # three warpgroups to a multiprocessor's registers, or most of its shared memory
    tightest = [
        ("forward_kernel", 64),
        ("backward_queries_kernel", 64),
        ("backward_keys_kernel", 128),
    ]
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
        {"is_turned": True},
        {"is_turned": True, "is_causal": False},
        {"is_listed": False},
        {"dtype": "fp16"},
    ],
    ids=str,
)
def test_every_form_of_the_kernels_fits_the_chip(variant, quiet_environment):
    assert_all_fit(compile_all(jobs(**variant), quiet_environment, __file__))


class OnHopper(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


def heads(*shape: int, dtype=torch.bfloat16, offset: int = 0) -> Tensor:
    size = torch.Size(shape).numel()
    x = torch.zeros(size + 8, dtype=dtype)[offset : offset + size].view(shape)
    return x.as_subclass(OnHopper)


@pytest.fixture
def on_hopper(hopper, monkeypatch):
    """`hopper` as on a machine that has such a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    return hopper


WIDE = (2, 4, 5, 64)


@pytest.mark.parametrize(
    "q",
    [
        heads(*WIDE),
        heads(2, 4, 5, 128),
        heads(*WIDE, dtype=torch.float16),
        heads(2, 5, 4, 64).transpose(1, 2),
        heads(2, 5, 3, 4, 64)[:, :, 1].transpose(1, 2),
        heads(2, 4, 5, 72)[..., 8:],
        # strides of a dimension of 1 are never used
        heads(64 * 5).as_strided((1, 1, 5, 64), (3, 0, 64, 1)),
        heads(64).as_strided((1, 1, 1, 64), (1, 1, 1, 1)),
    ],
    ids=lambda q: f"{tuple(q.shape)}, strides {q.stride()}",
)
def test_it_takes_aligned_rows_of_16_bit_numbers(on_hopper, q):
    assert on_hopper.supports(q, q, q)
    assert on_hopper.supports(q, q, q, q)


@pytest.mark.parametrize(
    "x",
    [
        heads(*WIDE, dtype=torch.float32),
        heads(2, 4, 5, 32),
        heads(2, 4, 5, 96),
        heads(2, 4, 5, 256),
        heads(0, 4, 5, 64),
        heads(2, 4, 0, 64),
        heads(*WIDE, offset=1),
        heads(*WIDE, offset=4),
        heads(2, 4, 5, 68)[..., :64],
        heads(2, 4, 5, 128)[..., ::2],
        heads(2, 4, 64, 5).mT,
        heads(1, 4, 5, 64).expand(2, -1, -1, -1),
        heads(2, 4, 1, 64).expand(-1, -1, 5, -1),
        heads(*WIDE).as_subclass(Tensor),
    ],
    ids=lambda x: f"{tuple(x.shape)}, strides {x.stride()}, at {x.storage_offset()}, {x.dtype}",
)
def test_it_leaves_other_inputs_to_the_portable_kernels(on_hopper, x):
    assert not on_hopper.supports(x, x, x)


@pytest.mark.parametrize("which", [1, 2, 3, 4, 5])
def test_it_looks_at_every_tensor_that_is_copied(on_hopper, which):
    tensors = [heads(*WIDE) for _ in range(6)]
    assert on_hopper.supports(*tensors)
    tensors[which] = heads(*WIDE, offset=1)
    assert not on_hopper.supports(*tensors)


def test_keys_there_must_be(on_hopper):
    q, none = heads(*WIDE), heads(2, 4, 0, 64)
    assert not on_hopper.supports(q, none, none)


@pytest.mark.parametrize(("major", "number"), [(8, 0), (9, 132), (10, 0), (12, 0)])
def test_only_hopper_will_do(hopper, monkeypatch, major, number):
    properties = types.SimpleNamespace(major=major, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert hopper._multiprocessors.__wrapped__(torch.device("cuda:0")) == number


def test_it_is_not_for_a_gpu_of_another_maker(on_hopper, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not on_hopper.supports(*[heads(*WIDE)] * 3)


def test_counts_of_rows_fit_32_bits_with_those_that_are_padded(on_hopper):
    # 2²⁵ heads of one token become 2³¹ rows in tiles of 64
    few, many = (
        torch.empty(n, 1, 1, 64, dtype=torch.bfloat16, device="meta").as_subclass(OnHopper)
        for n in (2**25 - 1, 2**25)
    )
    assert on_hopper.supports(few, few, few)
    assert not on_hopper.supports(many, many, many)


def test_a_programs_registers_are_as_many_as_there_are(hopper):
    for warpgroups in (2, 3):
        total, computing = hopper._registers(hopper.Schedule(warpgroups, 64, 2))
        assert total % 8 == computing % 8 == 0
        # after the start the warps that compute take from the one that copies, and its three peers
        in_all = warpgroups * computing + hopper.LOAD_REGISTERS.value
        assert in_all <= total * (warpgroups + 1) <= 512


@pytest.fixture
def launched(hopper, monkeypatch):
    """What would be launched, by kernel."""
    return lambda **job: launches({"dtype": "bf16", "head_dim": 64} | job, monkeypatch.setattr)


def test_a_program_for_each_item_when_not_persistent(launched):
    assert not any(s["IS_LISTED"] for _, s in launched(is_listed=False).values())
    assert all(s["IS_LISTED"] for _, s in launched().values())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_launch_fills_every_argument(hopper, launched, kernel, is_turned):
    names = getattr(hopper, kernel).arg_names
    args, settings = launched(is_turned=is_turned)[kernel]
    compiled_in = [name for name in names if name.isupper()]
    assert len(args) + len(compiled_in) == len(names)
    assert set(settings) == {*compiled_in, "num_warps", "maxnreg"}


def test_an_upstream_gradient_at_any_address_is_taken(launched, monkeypatch, hopper):
    launched()
    q = heads(1, 2, 9, 64).as_subclass(Tensor)
    # contiguous, and so that `contiguous` makes no copy
    grad_out = heads(1, 2, 9, 64, offset=1).as_subclass(Tensor)
    hopper.flash_backward(grad_out, q, q, q, q, q.new_zeros(1, 2, 9).float(), True, 0.1)


def test_an_order_is_made_once_and_not_in_a_recording(hopper, monkeypatch):
    device = torch.device("cpu")
    is_recording = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_recording)
    monkeypatch.setattr(hopper, "_orders", functools.cache(lambda device: {}))
    work = hopper.Work((1, 2, 3), 7, 2, True)
    assert hopper._order(work, 5, device) is None
    is_recording = False
    order = hopper._order(work, 5, device)
    assert order.dtype == torch.int32
    assert order[0].sum() == 21
    is_recording = True
    assert hopper._order(work, 5, device) is order
    assert hopper._order(work, 6, device) is None


WITHOUT_GLUON = """
import sys
sys.modules["triton.experimental.gluon"] = None
import lib.flash_attention_triton
# Triton looks for it itself
del sys.modules["triton.experimental.gluon"]
"""
OLD_GLUON = """
from triton.experimental.gluon import language
del language.num_warps
"""
SMALL_ATTENTION = """
import torch
from lib import flash_attention_triton as kernels
assert kernels.hopper is None
q = torch.randn(1, 2, 5, 64, dtype=torch.float16, requires_grad=True)
out = kernels.flash_attention(q, q, q)
right = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
torch.testing.assert_close(out, right, rtol=0.01, atol=0.01)
assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()
"""


@pytest.mark.parametrize("preparation", [WITHOUT_GLUON, OLD_GLUON], ids=["no Gluon", "older Gluon"])
@pytest.mark.usefixtures("hopper")
def test_an_older_triton_has_the_portable_kernels(preparation, quiet_environment):
    done = subprocess.run(
        [sys.executable, "-c", preparation + SMALL_ATTENTION],
        cwd=ROOT,
        env=quiet_environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def scheduled(hopper, forward, backward):
    """Attention by these schedules; None stands for the tuned ones."""

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


# warpgroups, keys, stages, is_ordered, is_persistent, kept
FORWARD = {
    64: [
        (2, 128, 2),
        (3, 128, 3, False, False),
        (3, 128, 3, True, False),
        (3, 128, 2, True),
        (2, 128, 3, False, True, 1),
    ],
    128: [(2, 128, 2), (2, 128, 2, True, True, 1), (2, 64, 4), (2, 128, 2, False, False, 1)],
}
BACKWARD = {
    64: [
        ((3, 64, 4), (2, 64, 4)),
        ((3, 64, 4, False, False, 1), (2, 64, 4, False, False, 2)),
        ((2, 128, 3), (2, 64, 3, False, True, 1)),
    ],
    128: [((2, 64, 3), (2, 64, 2)), ((2, 64, 3, False, False, 1), (2, 64, 3, False, False))],
}
ON_MASKS = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
ON_WIDTHS = pytest.mark.parametrize("head_dim", [64, 128])
# each width with one mask: half as much to compile
ON_FORMS = pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)], ids=str)


@pytest.fixture(scope="module")
def kernels(hopper):
    """What chooses between these kernels and the portable ones, on a Hopper GPU."""
    if not hopper._multiprocessors(torch.device("cuda:0")):
        pytest.skip("needs a Hopper GPU")
    from lib import flash_attention_triton

    return flash_attention_triton


def ours(kernels, case: Case):
    return lambda q, k, v: kernels.flash_attention(
        q, k, v, is_causal=case.is_causal, scale=case.scale
    )


def ragged(head_dim: int, is_causal: bool, dtype=torch.bfloat16, **changes):
    """Of more items than an H200 has multiprocessors, with some rows in the last tiles."""
    case = Case(
        450, 450, head_dim, is_causal, **{"heads": 6, "key_heads": 6, "batch": 12} | changes
    )
    return make_inputs(case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "schedule"), [(d, s) for d in FORWARD for s in FORWARD[d]], ids=str
)
def test_every_forward_schedule_is_right(hopper, kernels, head_dim, schedule):
    attention = scheduled(hopper, hopper.Schedule(*schedule), None)
    for sizes in [(450, 450), (130, 700), (700, 130), (1, 1)]:
        case = Case(*sizes, head_dim, heads=6, key_heads=3, batch=12)
        assert_error_at_most_twice_pytorchs(attention, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "schedules"), [(d, s) for d in BACKWARD for s in BACKWARD[d]], ids=str
)
def test_every_backward_schedule_is_right(hopper, kernels, head_dim, schedules):
    attention = scheduled(hopper, None, tuple(hopper.Schedule(*s) for s in schedules))
    for sizes in [(450, 450), (130, 700), (700, 130), (1, 1)]:
        case = Case(*sizes, head_dim, heads=6, key_heads=3, batch=12)
        assert_error_at_most_twice_pytorchs(attention, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@ON_WIDTHS
@ON_MASKS
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1),
        (1, 300),
        (300, 1),
        (63, 65),
        (65, 63),
        (193, 191),
        (256, 256),
        (90, 1000),
        (1000, 90),
    ],
    ids=str,
)
def test_the_tuned_kernels_are_right(
    kernels, hopper, sizes, key_heads, head_dim, is_causal, monkeypatch
):
    # several items of work for each
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 3)
    case = Case(*sizes, head_dim, is_causal, heads=4, key_heads=key_heads)
    attention = scheduled(hopper, None, None)
    assert_error_at_most_twice_pytorchs(attention, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@ON_FORMS
def test_the_tuned_kernels_are_right_in_float16(kernels, hopper, head_dim, is_causal):
    case = Case(300, 300, head_dim, is_causal, scale=0.3)
    attention = scheduled(hopper, None, None)
    assert_error_at_most_twice_pytorchs(attention, case, torch.float16, "cuda")


@pytest.mark.gpu
@ON_FORMS
def test_programs_with_many_items_are_right(kernels, hopper, head_dim, is_causal):
    # 15 for each multiprocessor
    case = Case(300, 300, head_dim, is_causal, heads=16, key_heads=16, batch=64)
    attention = scheduled(hopper, None, None)
    assert_error_at_most_twice_pytorchs(attention, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@ON_FORMS
@pytest.mark.parametrize(
    ("layout", "is_taken"),
    [
        ("tokens first", True),
        ("packed", True),
        ("amid NaN", True),
        ("gaps in head_dim", False),
        ("transposed", False),
        ("one batch for all", False),
    ],
)
def test_any_layout_is_right(kernels, hopper, layout, is_taken, head_dim, is_causal):
    case = Case(200, 200, head_dim, is_causal, layout=layout)
    q, k, v, _ = make_inputs(case, torch.bfloat16, "cuda")
    assert hopper.supports(q, k, v) == is_taken
    assert_error_at_most_twice_pytorchs(kernels.flash_attention, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("which", [0, 3])
def test_a_tensor_at_any_address_is_taken(kernels, which):
    case = Case(100, 100, 64)
    inputs = list(make_inputs(case, torch.bfloat16, "cuda"))
    right = right_results(inputs, case)
    x = inputs[which].detach()
    moved = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    inputs[which] = moved.requires_grad_(which < 3)
    for a, b in zip(with_gradients(ours(kernels, case), inputs), right):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.02 * largest(b))


@pytest.mark.gpu
@ON_FORMS
def test_the_portable_kernels_are_right_on_hopper_too(kernels, head_dim, is_causal):
    from lib.flash_attention_tiles import backward_tiles, forward_tiles

    case = Case(450, 300, head_dim, is_causal)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    q, k, v, grad_out = (x.detach() for x in inputs)
    settings = (is_causal, head_dim**-0.5)
    out, lse = kernels.flash_forward(q, k, v, *settings, tiles=forward_tiles(q))
    grads = kernels.flash_backward(grad_out, q, k, v, out, lse, *settings, tiles=backward_tiles(q))
    for a, b in zip((out, *grads), right_results(inputs, case)):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.02 * largest(b))


def turns_of(length: int, head_dim: int) -> Tensor:
    """e^(i angle) of each position and pair."""
    frequencies = 0.01 ** torch.linspace(0, 1, head_dim // 2, device="cuda")
    angles = torch.arange(length, device="cuda")[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.gpu
@ON_FORMS
def test_gradients_are_turned_back_as_well_as_afterwards(kernels, hopper, head_dim, is_causal):
    case = Case(450, 300, head_dim, is_causal, heads=6, key_heads=2)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    q, k, v, grad_out = (x.detach() for x in inputs)
    turns = turns_of(500, head_dim)

    def turned_back(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns[: x.shape[2]].conj()).flatten(-2)

    tensors = (grad_out, q, k, v, *hopper.flash_forward(q, k, v, is_causal, head_dim**-0.5))
    settings = (*tensors, is_causal, head_dim**-0.5)
    angles = (turns.real.contiguous(), turns.imag.contiguous())
    with new_memory_is_nan():
        results = hopper.flash_backward(*settings, angles=angles)
    plain, right = hopper.flash_backward(*settings), right_results(inputs, case)[1:]
    assert results[2].equal(plain[2])
    for a, b, c in zip(results[:2], plain, right):
        # one rounding fewer, but the largest error may be that of another element
        assert largest(a - turned_back(c)) <= 1.5 * largest(turned_back(b) - turned_back(c))


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
    known = len(hopper._orders(q.device))
    with torch.cuda.graph(graph):
        results = attention()
    assert len(hopper._orders(q.device)) == known
    for _ in range(2):
        for x in (q, k, v, grad_out):
            x.copy_(torch.randn_like(x))
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        # which also makes the order, if there was none
        assert all(a.equal(b) for a, b in zip(results, attention()))


@pytest.mark.gpu
@ON_WIDTHS
def test_no_hidden_key_has_influence(kernels, head_dim):
    inputs = ragged(head_dim, True)
    attention = ours(kernels, Case(450, 450, head_dim))
    right = with_gradients(attention, inputs)
    with torch.no_grad():
        # to the end of tiles of 192 or 128 queries there are others that see these
        inputs[1][:, :, 256:], inputs[2][:, :, 256:] = torch.inf, torch.nan
    out, grad_q, *_ = with_gradients(attention, inputs)
    assert out[:, :, :256].equal(right[0][:, :, :256])
    assert grad_q[:, :, :256].equal(right[1][:, :, :256])


@pytest.mark.gpu
@ON_WIDTHS
def test_keys_beyond_the_last_query_have_no_influence(kernels, head_dim):
    case = Case(100, 600, head_dim)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    right = with_gradients(ours(kernels, case), inputs)
    with torch.no_grad():
        inputs[1][:, :, 128:], inputs[2][:, :, 128:] = torch.nan, torch.nan
    again = with_gradients(ours(kernels, case), inputs)
    assert all(a.equal(b) for a, b in zip(again, right))
    assert not any(x[:, :, 100:].any() for x in again[2:])


@pytest.mark.gpu
@ON_FORMS
def test_a_key_of_minus_infinity_counts_for_nothing(kernels, head_dim, is_causal):
    q, k, v, _ = (x.detach() for x in make_inputs(Case(300, 300, head_dim), torch.bfloat16, "cuda"))
    q = q.abs() + 0.1
    # the first and the last tiles of a row have such keys only
    k[:, :, :128, 0], k[:, :, 256:, 0], k[:, :, 0, 0] = -torch.inf, -torch.inf, 0
    case = Case(300, 300, head_dim, is_causal)
    out = kernels.flash_attention(q, k, v, is_causal=is_causal)
    right = formula(q.double(), k.double(), v.double(), case)[0]
    torch.testing.assert_close(out.double(), right, rtol=0, atol=0.02 * largest(v))


@pytest.mark.gpu
@ON_FORMS
@pytest.mark.parametrize("tokens", [64, 63, 100, 257])
def test_a_key_of_minus_infinity_has_no_gradient(kernels, tokens, head_dim, is_causal):
    case = Case(tokens, tokens, head_dim, is_causal)
    q, k, v, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    q, k = q.abs() + 0.1, k.clone()
    k[:, :, 2] = -torch.inf
    leaves = [x.requires_grad_() for x in (k, v)]
    out = kernels.flash_attention(q, k, v, is_causal=is_causal)
    grad_k, grad_v = torch.autograd.grad(out, leaves, grad_out)
    assert out.isfinite().all()
    for grad in (grad_k, grad_v):
        assert grad.isfinite().all()
        assert not grad[:, :, 2].any()


@pytest.mark.gpu
@ON_WIDTHS
def test_where_all_scores_are_minus_infinity_there_are_zeros(kernels, head_dim):
    q, v = (
        torch.ones(1, 1, 70, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    k = torch.zeros_like(q)
    k[:, :, 0] = -torch.inf
    out = kernels.flash_attention(q, k, v, is_causal=True)
    assert out[0, 0, :, 0].tolist() == [0.0] + 69 * [1.0]
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert grad.isfinite().all()
    assert not grad[0, 0, 0].any()


@pytest.mark.gpu
@ON_FORMS
def test_large_scores_do_not_overflow(kernels, head_dim, is_causal):
    case = Case(300, 300, head_dim, is_causal, batch=1)
    *leaves, grad_out = (x.detach() for x in make_inputs(case, torch.bfloat16, "cuda"))
    inputs = (*((100 * x).requires_grad_() for x in leaves), grad_out)
    results = with_gradients(ours(kernels, case), inputs)
    assert all(x.isfinite().all() for x in results)
    right = right_results(inputs, case)[0]
    torch.testing.assert_close(results[0].double(), right, rtol=0, atol=0.02 * largest(right))


@pytest.mark.gpu
@ON_FORMS
def test_results_repeat_to_the_bit_whatever_runs_beside(kernels, head_dim, is_causal):
    inputs = ragged(head_dim, is_causal)
    attention = ours(kernels, Case(450, 450, head_dim, is_causal))
    first = with_gradients(attention, inputs)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    again = []
    for i in range(12):
        with torch.cuda.stream(streams[i % 3]):
            again.append(with_gradients(attention, inputs))
    torch.cuda.synchronize()
    for results in again:
        assert all(a.equal(b) for a, b in zip(results, first))


@pytest.mark.gpu
def test_threads_may_meet_a_shape_at_once(kernels):
    inputs = ragged(64, True, heads=7, key_heads=7)
    attention = ours(kernels, Case(450, 450, 64))
    # compiled before
    attention(*ragged(64, True)[:3])
    torch.cuda.synchronize()
    results = []

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(attention(*inputs[:3]))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(x.equal(attention(*inputs[:3])) for x in results)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, pytest.param("reduce-overhead", marks=pytest.mark.slow)])
def test_rotated_attention_compiles_into_one_graph(kernels, mode):
    from lib.model_triton import rotated_attention

    torch.compiler.reset()
    turns = turns_of(400, 64)
    cos, sin = turns.real.contiguous(), turns.imag.contiguous()

    def attention(qkv: Tensor) -> Tensor:
        return rotated_attention(qkv * 2, cos, sin) + 1

    compiled = torch.compile(attention, fullgraph=True, mode=mode, dynamic=False)
    lengths = (310,) if mode is None else (310, 390)
    inputs = [
        torch.randn(2, n, 3, 7, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for n in lengths
    ]
    for _ in range(5):
        for qkv in inputs:
            results = []
            for function in (compiled, attention):
                torch.compiler.cudagraph_mark_step_begin()
                out = function(qkv)
                (gradient,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
                results.append((out.detach().clone(), gradient.clone()))
            torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_autocast_brings_float32_here(kernels, hopper, monkeypatch):
    calls = []
    forward = hopper.flash_forward
    monkeypatch.setattr(hopper, "flash_forward", lambda *a: calls.append(a) or forward(*a))
    case = Case(200, 200)
    q, k, v, _ = make_inputs(case, torch.float32, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = kernels.flash_attention(q, k, v)
    assert len(calls) == 1
    assert out.equal(kernels.flash_attention(*(x.bfloat16() for x in (q, k, v))))
    assert torch.autograd.grad(out, q, torch.ones_like(out))[0].dtype == torch.float32


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


@pytest.mark.gpu
@pytest.mark.slow
def test_three_keys_for_very_many_queries(kernels):
    # a section of heads that fits the cache would be of 2²⁰ heads, and of 2³² items
    q = torch.randn(1, 32, 192 * 4096, 64, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, 1, 3, 64, dtype=torch.bfloat16, device="cuda")
    out = kernels.flash_attention(q, k, v, is_causal=False)
    for part in (slice(0, 200), slice(-200, None)):
        case = Case(200, 3, 64, False, heads=32, key_heads=1)
        right = formula(q[:, :, part].double(), k.double(), v.double(), case)[0]
        torch.testing.assert_close(out[:, :, part].double(), right, rtol=0, atol=0.03)


if __name__ == "__main__":
    compile_what_is_told(compile_one)
