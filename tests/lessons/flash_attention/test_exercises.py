"""The exercises of notebook 06 against independent answers; their mistakes: test_exercise.py."""

import ast
import functools
import math
import random
import runpy
from pathlib import Path

import nbformat
import pytest
import torch
from torch.autograd import gradcheck

triton = pytest.importorskip("triton")

from lib.lessons.exercise import draw_inputs, edited, verdict  # noqa: E402
from lib.lessons.flash_attention import (  # noqa: E402
    exercises,
    kernel_exercises,
    kernel_task,
    ladder_triton,
    solutions_triton,
)
from lib.lessons.flash_attention.exercises import (  # noqa: E402
    FRAGMENTS,
    GRAD_SCORES,
    ONLINE_SOFTMAX,
)
from lib.lessons.flash_attention.kernel_exercises import CAUSAL, CAUSAL_TASK  # noqa: E402
from lib.lessons.flash_attention.kernel_task import Tiling  # noqa: E402
from tests.lessons.remembered import no_overflow_checks, remembered  # noqa: E402

CHECKED = {"online softmax": ONLINE_SOFTMAX, "gradient": GRAD_SCORES}


def max_and_sum(tiles):
    """In logarithms, as PyTorch adds them up."""
    m = lse = torch.tensor(-math.inf, dtype=torch.float64)
    for scores in tiles:
        m = torch.maximum(m, scores.double().max())
        lse = torch.logaddexp(lse, scores.double().logsumexp(0))
    return torch.stack([m, (lse - m).exp()])


def grad_scores(scores, v, out, lse, grad_out):
    """By autograd through one further key, which stands for all that the tile lacks."""
    scores = scores.double().requires_grad_()
    p = torch.exp(scores - lse[:, None])
    rest = 1 - p.detach().sum(1, keepdim=True)
    other = (out - p.detach() @ v.double()) / rest
    weights = torch.cat([scores, (lse + rest.squeeze(1).log())[:, None]], 1).softmax(1)
    total = weights[:, :-1] @ v.double() + weights[:, -1:] * other
    return torch.autograd.grad(total, scores, grad_out.double())[0]


def multiply_add(a, b, c):
    """By the order of lanes and registers alone: (g, t, half, column of a pair)."""

    def tall(x):
        return x.reshape(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)

    out = tall(c) + tall(a) @ b.reshape(8, 8).T
    return out.reshape(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4)


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [
        (ONLINE_SOFTMAX, max_and_sum),
        (GRAD_SCORES, grad_scores),
        (FRAGMENTS, multiply_add),
    ],
    ids=[*CHECKED, "fragments"],
)
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


@pytest.mark.parametrize("exercise", CHECKED.values(), ids=CHECKED)
def test_expected_values_are_finite_and_the_first_inputs_small(exercise):
    inputs = draw_inputs(exercise, 0)
    for arguments in inputs[:5]:
        tiles = arguments[0]
        tensors = tiles.tensors if isinstance(tiles, exercises.Tiles) else arguments[:3]
        assert all(tensor.numel() <= 16 for tensor in tensors)
    assert all(exercise.solve(*arguments).isfinite().all() for arguments in inputs)


def test_a_tile_of_keys_is_never_all_that_a_row_sees():
    for seed in range(50):
        scores, _, _, lse, _ = GRAD_SCORES.draw(random.Random(seed), 6)
        assert (scores.logsumexp(1) < lse).all()


@pytest.mark.parametrize(
    "change", [lambda tiles: list(tiles), lambda tiles: [tile.clone() for tile in tiles][::-1]]
)
def test_tiles_pass_by_once(change):
    """What is kept of them without a copy is overwritten; and then no more come."""
    drawn = draw_inputs(ONLINE_SOFTMAX, 0)[-1][0]
    expected = [tile.clone() for tile in drawn.tensors]
    kept = change(drawn)
    assert len(kept) == len(expected) > 1
    assert not list(drawn)
    is_copied = [torch.equal(tile, right) for tile, right in zip(kept[::-1], expected)]
    assert all(is_copied) or all(tile.isnan().all() for tile in kept)


def test_joined_tiles_are_refused_and_shown_by_their_scores():
    text = verdict(ONLINE_SOFTMAX, lambda tiles: torch.cat(tiles), seed=0)
    assert text.startswith("not yet: <lambda>(iter([tensor([")
    assert "must be tuple of Tensors" in text


def attempt_at(kernel):
    return lambda *tensors: CAUSAL_TASK.run(kernel, *tensors)


TASKS = {
    "FORWARD": kernel_exercises.FORWARD_TASK,
    "CAUSAL": CAUSAL_TASK,
    "BACKWARD_QUERIES": kernel_exercises.QUERIES_TASK,
    "BACKWARD_KEYS": kernel_exercises.KEYS_TASK,
}
ALL = tuple(TASKS)
FORWARDS = ALL[:2]


@functools.cache
def exercise_of(name):
    return remembered(getattr(exercises, name))


def verdict_on(name, attempt):
    with no_overflow_checks():
        return verdict(exercise_of(name), attempt, seed=0)


def wrong(name, *texts):
    """The verdict on the solution `name` with texts replaced (`edited`)."""
    kernel = edited(TASKS[name].solution, *texts)
    return verdict_on(name, lambda *given: TASKS[name].run(kernel, *given))


# (kernels, old, new): one size in place of another
MIXED_UP = {
    "columns": (ALL, "tl.arange(0, D)", "tl.arange(0, BK)"),
    "more columns": (ALL, "tl.arange(0, D)", "tl.arange(0, BQ)"),
    "stride of k": (FORWARDS, "(head + key[:, None]) * D", "(head + key[:, None]) * BK"),
    "stride of q": (FORWARDS, "(head + query[:, None]) * D", "(head + query[:, None]) * BQ"),
    "output": (FORWARDS, "out = tl.zeros((BQ, D)", "out = tl.zeros((BQ, BK)"),
    "not transposed": (ALL[:3], "tl.dot(q, tl.trans(k)", "tl.dot(q, k"),
    "values not transposed": (("BACKWARD_QUERIES",), "tl.trans(v)", "v"),
    "queries not transposed": (("BACKWARD_KEYS",), "tl.dot(k, tl.trans(q)", "tl.dot(k, q"),
    "keys in a step": (FORWARDS, ", BK):", ", BQ):"),
    "dQ": (("BACKWARD_QUERIES",), "tl.zeros((BQ, D)", "tl.zeros((BQ, BK)"),
    "dV": (("BACKWARD_KEYS",), "tl.float32), tl.zeros((BK, D)", "tl.float32), tl.zeros((BK, BQ)"),
}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param(name, old, new, id=f"{name}: {words}")
        for words, (names, old, new) in MIXED_UP.items()
        for name in names
    ],
)
def test_one_size_does_not_pass_for_another(name, old, new):
    assert wrong(name, old, new).startswith("not yet")


STORE_OUT = "tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)"
STORE_LSE = "tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)"


@pytest.mark.parametrize(
    ("tensor", "old"),
    [("out", STORE_OUT), ("lse", STORE_LSE), ("out", f"{STORE_OUT}\n    {STORE_LSE}")],
    ids=["out", "lse", "both"],
)
def test_a_result_that_is_not_stored_is_named_and_no_mistake_is_guessed(tensor, old):
    text = wrong("FORWARD", old, "pass")
    assert f"nothing is stored in {tensor}" in text
    assert "It looks as if" not in text


def test_a_mask_is_named_also_in_a_loop_that_starts_with_the_first_key():
    start = ("first // BQ * BQ", "first")
    assert "(keys, queries)" in wrong("BACKWARD_KEYS", *start, "<= query[None", ">= query[None")
    masked = "p = tl.where(key[:, None] <= query[None, :], p, 0.0)"
    assert "there is no mask" in wrong("BACKWARD_KEYS", *start, masked, "p = p")


def test_gradients_that_pytorch_computes_are_not_those_of_the_kernels():
    def attempt(q, k, v, out, lse, grad_out, *kernels):
        solutions_triton.attention_backward(q, k, v, out, lse, grad_out, *kernels)
        return kernel_exercises.gradients(q, k, v, grad_out)

    text = verdict(kernel_exercises.BACKWARD, kernel_exercises.launching(attempt))
    assert "the gradients must be what the kernels stored, unchanged" in text


def wrong_launches(*texts):
    """The verdict on the solution of BACKWARD with texts replaced."""
    attempt = edited(solutions_triton.attention_backward, *texts)
    return verdict_on("BACKWARD", kernel_exercises.launching(attempt))


def test_a_backward_pass_launches_both_kernels_on_a_grid_with_programs():
    only_one = "keys_kernel[grid](*given, grad_k, grad_v, n, scale, **sizes)"
    assert "each of the two kernels must be launched once, got 1" in wrong_launches(
        only_one, "pass"
    )
    assert "no program ran" in wrong_launches("triton.cdiv(n, 16)", "n // 16")
    assert "grad_k, (1 heads" in wrong_launches("return grad_q, grad_k", "return grad_q, grad_q")


@pytest.mark.parametrize("name", FORWARDS)
def test_a_maximum_that_starts_at_0_is_too_large_for_scores_far_below(name):
    text = wrong(name, 'float("-inf"), tl.float32', "0.0, tl.float32")
    assert text.startswith("not yet")
    assert "yours nan" in text or "yours -inf" in text


def test_a_kernel_with_two_loops_is_right_and_one_that_skips_nothing_is_not():
    assert verdict(CAUSAL, attempt_at(ladder_triton.mask_on_diagonal)).startswith("right")
    text = verdict(CAUSAL, attempt_at(ladder_triton.every_tile))
    assert "heads=2, n=33, D=32, BQ=16, BK=32" in text
    assert "program (0, 0) loads 2 tiles of k; only 1 has a pair that is visible" in text
    assert "let the loop end with the last query of the tile" in text


@pytest.mark.parametrize("tiling", [Tiling(32, 16), Tiling(16, 32)], ids=str)
@pytest.mark.parametrize("n", [1, 16, 17, 33, 40, 64])
@pytest.mark.parametrize("passing", ["k", "q"])
def test_tiles_with_a_visible_pair_are_counted(passing, n, tiling):
    task = CAUSAL_TASK if passing == "k" else kernel_exercises.KEYS_TASK
    pairs = [rows.split(tiling.BK, 1) for rows in torch.ones(n, n).tril().split(tiling.BQ)]
    seen = torch.tensor([[bool(tile.any()) for tile in row] for row in pairs])
    kept = range(seen.shape[0 if passing == "k" else 1])
    found = [task.tiles_seen(tile, n, tiling) for tile in kept]
    assert found == seen.sum(1 if passing == "k" else 0).tolist()


def test_a_program_that_loads_too_many_tiles_is_named_even_if_all_together_load_too_few():
    # the first skips nothing, and all others load nothing
    text = wrong("CAUSAL", "range(0, end, BK)", "range(0, n if tl.program_id(0) == 0 else 0, BK)")
    assert "program (0, 0) loads 2 tiles of k; only 1 has a pair" in text


# Two loops over the keys, the first of them for the maximum alone.
TWICE = """    out = tl.zeros((BQ, D), tl.float32)
    for start in range(0, n, BK):
        key = start + tl.arange(0, BK)
        k_rows = (head + key[:, None]) * D + channel[None, :]
        k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(key[None, :] < n, scores, float("-inf"))
        m = tl.maximum(m, tl.max(scores, 1))
"""
DESCRIBED = """    out = tl.zeros((BQ, D), tl.float32)
    keys = tl.make_tensor_descriptor(k_ptr + head * D, [n, D], [D, 1], [BK, D])
    values = tl.make_tensor_descriptor(v_ptr + head * D, [n, D], [D, 1], [BK, D])
"""


def test_a_forward_pass_that_reads_the_keys_twice_is_refused():
    start = TWICE.partition("\n")[0] + "\n"
    text = wrong("FORWARD", start, TWICE)
    assert "tiles of k; only 1 has a pair that is visible, to be loaded once" in text


def test_tensor_descriptors_are_as_right_as_pointers():
    start = DESCRIBED.partition("\n")[0] + "\n"
    texts = [start, DESCRIBED]
    for x, descriptor in (("k", "keys"), ("v", "values")):
        texts.append(f"{x} = tl.load({x}_ptr + k_rows, mask=key[:, None] < n, other=0.0)\n")
        texts.append(f"{x} = {descriptor}.load([start, 0])\n")
    assert wrong("FORWARD", *texts).startswith("right")


def test_a_check_gives_back_what_is_right_and_the_solution_in_place_of_what_is_not(capsys):
    kernel = triton.jit(solutions_triton.causal_forward)
    assert exercises.check_causal(kernel) is kernel
    words = capsys.readouterr().out
    assert words.startswith("right")
    assert "registers of each thread" in words
    wrong = triton.jit(solutions_triton.flash_forward)
    found = exercises.check_causal(wrong)
    assert found.fn is solutions_triton.causal_forward
    assert capsys.readouterr().out.startswith("not yet")


def test_the_first_wrong_value_is_named_by_its_tensor():
    task, expected = kernel_exercises.FORWARD_TASK, torch.zeros(1, 3, 32 + 1)
    yours = expected.clone()
    yours[0, 2, -1] = 1
    assert "lse, (1 heads, 3 rows, 1): position (0, 2, 0): yours 1" in task.describe(
        yours, expected
    )
    yours[0, 1, 4] = 2
    assert "out, (1 heads, 3 rows, 32): position (0, 1, 4)" in task.describe(yours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_compiled_kernels_pass_too(name):
    task = TASKS[name]
    kernel = triton.jit(task.solution)
    attempt = lambda *tensors: task.run(kernel, *tensors)  # noqa: E731
    assert verdict(getattr(exercises, name), attempt).startswith("right")


def test_another_good_schedule_is_right_and_says_how_long_tensor_cores_idle(capsys):
    def best_schedule():
        return (
            "A.S0 A.S1 B.S0 A.PV0 A.S2 B.S1 B.PV0 A.PV1 "
            "A.S3 B.S2 B.PV1 A.PV2 B.S3 B.PV2 A.PV3 B.PV3"
        )

    exercises.check_schedule(best_schedule)
    assert capsys.readouterr().out.startswith("right: as expected\n  yours 11.1 % idle")


NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks/06_flash_attention.ipynb"


def cell_with(words: str) -> int:
    """The number of the one code cell with `words`."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    (found,) = [i for i, c in enumerate(cells) if c.cell_type == "code" and words in c.source]
    return found


def limits_of_the_notebook() -> dict[str, float]:
    """The tolerances of the notebook's gradcheck for compiled kernels, which run in float32."""
    cell = nbformat.read(NOTEBOOK, as_version=4).cells[cell_with("gradcheck(FlashAttention")]
    nodes = ast.walk(ast.parse(cell.source))
    found = [ast.unparse(node) for node in nodes if isinstance(node, ast.Dict) and node.keys]
    (limits,) = [ast.literal_eval(text) for text in found if "eps" in text]
    return limits


def spoil(number: int, change):
    """Causal attention whose gradient of input `number` is `change` of the right one."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return kernel_task.attention_and_lse(*inputs, is_causal=True)[0]

        @staticmethod
        def backward(ctx, grad_out):
            with torch.enable_grad():
                found = list(kernel_exercises.gradients(*ctx.saved_tensors, grad_out))
            found[number] = change(found[number])
            return tuple(found)

    return Spoiled.apply


CHANGES = {
    "5% too large": lambda x: 1.05 * x,
    "a tile is missing": lambda x: torch.cat([x[:, :-3], torch.zeros_like(x[:, -3:])], 1),
}


@pytest.mark.parametrize("number", range(3), ids=["dQ", "dK", "dV"])
@pytest.mark.filterwarnings("ignore:Input #:UserWarning")
def test_gradcheck_refuses_wrong_gradients_in_float32_too(number):
    generator = torch.Generator().manual_seed(1)
    inputs = [x.requires_grad_() for x in torch.randn((3, 1, 5, 16), generator=generator).unbind()]
    check = functools.partial(
        gradcheck, inputs=inputs, raise_exception=False, **limits_of_the_notebook()
    )
    assert check(spoil(number, lambda x: x))
    for name, change in CHANGES.items():
        assert not check(spoil(number, change)), name


def test_the_schedule_is_asked_for_before_the_pictures_that_show_one():
    assert cell_with("check_schedule(") < cell_with("timeline.recorded_timelines()")


def kernel_in_a_file(folder: Path, name: str, old: str, new: str):
    """The solution `name` with `old` replaced by `new`: Triton compiles what is in a file."""
    file = folder / "wrong_kernels.py"
    source = Path(solutions_triton.__file__).read_text(encoding="utf-8")
    file.write_text(source.replace(old, new), encoding="utf-8")
    return triton.jit(runpy.run_path(str(file))[name])


SCORES = 'tl.where(key[None, :] < n, scores, float("-inf"))'


@pytest.mark.parametrize(
    ("old", "new", "cure"),
    [
        (f"scores = {SCORES}", 'scores[:, key >= n] = float("-inf")', "`tl.where(condition"),
        (SCORES, 'scores.masked_fill(key >= n, float("-inf"))', "`tl.where(condition"),
        ("m + tl.log(l)", '__import__("math").log(l)', "not PyTorch's"),
        ("m + tl.log(l)", '__import__("torch").log(l)', "not PyTorch's"),
        ("scores - new_m[:, None]", "scores - new_m", "`x[:, None]` makes a column"),
        ("tl.trans(k)", "k", "`tl.trans` turns"),
    ],
)
def test_an_error_names_its_line_in_the_kernel_and_a_cure(old, new, cure, tmp_path, capsys):
    source = Path(solutions_triton.__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(source) if old in text)
    exercises.check_forward(kernel_in_a_file(tmp_path, "flash_forward", old, new))
    words = capsys.readouterr().out
    assert f"line {line} of the cell raised" in words
    assert cure in words


def test_a_kernel_that_rounds_float32_is_told_why_it_is_off(tmp_path, capsys):
    exercises.check_forward(triton.jit(solutions_triton.flash_forward))
    assert "rounds" not in capsys.readouterr().out
    old = 'tl.trans(k), input_precision="ieee"'
    kernel = kernel_in_a_file(tmp_path, "flash_forward", old, "tl.trans(k)")
    assert exercises.check_forward(kernel) is not kernel
    words = capsys.readouterr().out
    assert words.startswith("not yet")
    assert "`tl.dot` rounds float32 unless" in words


LOOP = "for start in range(0, end, BK):\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "cure"),
    [
        ("p.to(v.dtype)", "p", "in `out = out * shrink[:, None] + tl.dot(p, v", "`p.to(v.dtype)`"),
        ("(BQ, D), tl.float32", "(BQ, D), tl.float16", "in `", ""),
        (
            LOOP,
            LOOP.replace("end", "n") + "        if start >= end:\n            break\n",
            "in `break`",
            "put the end into `range(…)`",
        ),
        ('tl.full((BQ,), float("-inf"), tl.float32)', 'float("-inf")', "in `", "start with a tile"),
        (
            "        m = new_m",
            "        print(m)\n        m = new_m",
            "print",
            "take out the `print`",
        ),
    ],
    ids=["cast", "accumulator", "break", "start", "print"],
)
def test_a_kernel_that_does_not_compile_for_16_bits_is_not_right(
    old, new, line, cure, tmp_path, capsys
):
    wrong = kernel_in_a_file(tmp_path, "causal_forward", old, new)
    assert exercises.check_causal(wrong).fn is solutions_triton.causal_forward
    words = capsys.readouterr().out
    assert "not yet: right in the interpreter, but for bfloat16 it does not" in words
    assert line in words
    assert cure in words


def test_an_order_that_is_not_a_string_is_told_so_and_nothing_is_raised(capsys):
    exercises.check_schedule(lambda: ["A.S0", "B.S0"])
    words = capsys.readouterr().out
    assert "the order must be one string, found list" in words
    assert "expected" not in words
