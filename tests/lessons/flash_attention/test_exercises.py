"""The exercises of notebook 06 against independent answers; their mistakes: test_exercise.py."""

import functools
import math
import random
import runpy
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from lib.lessons.exercise import draw_inputs, edited, verdict  # noqa: E402
from lib.lessons.flash_attention import (  # noqa: E402
    exercises,
    kernel_exercises,
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
def test_an_independent_answer_is_right(exercise, independent):
    assert verdict(exercise, independent, seed=0).startswith("right")


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


def attempt_at(kernel):
    return lambda *tensors: CAUSAL_TASK.run(kernel, *tensors)


TASKS = {
    "FORWARD": kernel_exercises.FORWARD_TASK,
    "CAUSAL": CAUSAL_TASK,
    "BACKWARD_QUERIES": kernel_exercises.QUERIES_TASK,
    "BACKWARD_KEYS": kernel_exercises.KEYS_TASK,
}
ALL = tuple(TASKS)


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


# (kernel, old, new): one size in place of another
MIXED_UP = {
    "columns": ("FORWARD", "tl.arange(0, D)", "tl.arange(0, BK)"),
    "more columns": ("BACKWARD_KEYS", "tl.arange(0, D)", "tl.arange(0, BQ)"),
    "stride of k": ("FORWARD", "(head + key[:, None]) * D", "(head + key[:, None]) * BK"),
    "stride of q": ("CAUSAL", "(head + query[:, None]) * D", "(head + query[:, None]) * BQ"),
    "output": ("FORWARD", "out = tl.zeros((BQ, D)", "out = tl.zeros((BQ, BK)"),
    "keys not transposed": ("CAUSAL", "tl.dot(q, tl.trans(k)", "tl.dot(q, k"),
    "values not transposed": ("BACKWARD_QUERIES", "tl.trans(v)", "v"),
    "queries not transposed": ("BACKWARD_KEYS", "tl.dot(k, tl.trans(q)", "tl.dot(k, q"),
    "keys in a step": ("CAUSAL", ", BK):", ", BQ):"),
    "dQ": ("BACKWARD_QUERIES", "tl.zeros((BQ, D)", "tl.zeros((BQ, BK)"),
    "dV": ("BACKWARD_KEYS", "tl.float32), tl.zeros((BK, D)", "tl.float32), tl.zeros((BK, BQ)"),
}


@pytest.mark.parametrize(("name", "old", "new"), MIXED_UP.values(), ids=MIXED_UP)
def test_one_size_does_not_pass_for_another(name, old, new):
    assert wrong(name, old, new).startswith("not yet")


STORE_OUT = "tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)"
STORE_LSE = "tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)"
FROM_THE_FIRST_KEY = ("first // BQ * BQ", "first")
MASKED = "p = tl.where(key[:, None] <= query[None, :], p, 0.0)"
NEW_OUT = "    out = tl.zeros((BQ, D), tl.float32)\n"
# Two loops over the keys, the first of them for the maximum alone.
TWICE = f"""{NEW_OUT}    for start in range(0, n, BK):
        key = start + tl.arange(0, BK)
        k_rows = (head + key[:, None]) * D + channel[None, :]
        k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(key[None, :] < n, scores, float("-inf"))
        m = tl.maximum(m, tl.max(scores, 1))
"""
TWO_TILES = "program (0, 0) loads 2 tiles of k; only 1 has a pair"


@pytest.mark.parametrize(
    ("name", "texts", "words"),
    [
        ("FORWARD", (STORE_OUT, "pass"), "nothing is stored in out"),
        ("FORWARD", (STORE_LSE, "pass"), "nothing is stored in lse"),
        ("FORWARD", (f"{STORE_OUT}\n    {STORE_LSE}", "pass"), "nothing is stored in out"),
        ("FORWARD", (NEW_OUT, TWICE), "tiles of k; only 1 has a pair that is visible, to be load"),
        # a maximum that starts at 0 is too large for scores far below
        ("FORWARD", ('float("-inf"), tl.float32', "0.0, tl.float32"), ("yours nan", "yours -inf")),
        # the first program skips nothing, and all others load nothing
        ("CAUSAL", ("(0, end, BK)", "(0, n if tl.program_id(0) == 0 else 0, BK)"), TWO_TILES),
        # a mask in a loop that starts with the first key
        ("BACKWARD_KEYS", (*FROM_THE_FIRST_KEY, "<= query[N", ">= query[N"), "(keys, queries)"),
        ("BACKWARD_KEYS", (*FROM_THE_FIRST_KEY, MASKED, "p = p"), "there is no mask"),
    ],
    ids=str,
)
def test_a_wrong_kernel_is_told_what_is_wrong(name, texts, words):
    text = wrong(name, *texts)
    assert text.startswith("not yet")
    assert any(each in text for each in ([words] if isinstance(words, str) else words))
    assert "nothing is stored" not in words or "It looks as if" not in text


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


def test_a_kernel_with_two_loops_is_right_and_one_that_skips_nothing_is_not():
    assert verdict(CAUSAL, attempt_at(ladder_triton.mask_on_diagonal)).startswith("right")
    text = verdict(CAUSAL, attempt_at(ladder_triton.every_tile))
    assert "heads=2, n=33, D=32, BQ=16, BK=32" in text
    assert "program (0, 0) loads 2 tiles of k; only 1 has a pair that is visible" in text
    assert "let the loop end with the last query of the tile" in text


@pytest.mark.parametrize("tiling", [Tiling(32, 16), Tiling(16, 32)], ids=str)
@pytest.mark.parametrize("n", [1, 17, 40, 64])
@pytest.mark.parametrize("passing", ["k", "q"])
def test_tiles_with_a_visible_pair_are_counted(passing, n, tiling):
    task = CAUSAL_TASK if passing == "k" else kernel_exercises.KEYS_TASK
    pairs = [rows.split(tiling.BK, 1) for rows in torch.ones(n, n).tril().split(tiling.BQ)]
    seen = torch.tensor([[bool(tile.any()) for tile in row] for row in pairs])
    kept = range(seen.shape[0 if passing == "k" else 1])
    found = [task.tiles_seen(tile, n, tiling) for tile in kept]
    assert found == seen.sum(1 if passing == "k" else 0).tolist()


DESCRIBED = f"""{NEW_OUT}
    keys = tl.make_tensor_descriptor(k_ptr + head * D, [n, D], [D, 1], [BK, D])
    values = tl.make_tensor_descriptor(v_ptr + head * D, [n, D], [D, 1], [BK, D])
"""


def test_tensor_descriptors_are_as_right_as_pointers():
    texts = [NEW_OUT, DESCRIBED]
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
