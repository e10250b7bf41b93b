"""The exercises of notebook 06 against independent answers; their mistakes: test_exercise.py."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

from lib.lessons.exercise import draw_inputs, edited, verdict  # noqa: E402
from lib.lessons.flash_attention import (  # noqa: E402
    exercises,
    kernel_task,
    ladder_triton,
    solutions_triton,
)
from lib.lessons.flash_attention.kernel_task import Tiling  # noqa: E402
from tests.lessons.interpreter import no_overflow_checks  # noqa: E402

KERNELS = {
    name: getattr(exercises, name)
    for name in ("flash_forward", "causal_forward", "backward_queries", "backward_keys")
}


def by_autograd(q, k, v, grad_out, *, is_causal):
    """dQ, dK and dV, as PyTorch finds them."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return torch.autograd.grad(out, (q, k, v), grad_out)


def close(found, expected):
    assert len(found) == len(expected)
    for mine, right in zip(found, expected):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_solutions_are_what_pytorch_computes(seed):
    for q, k, v, tiling in draw_inputs(KERNELS["flash_forward"], seed):
        for name, is_causal in (("flash_forward", False), ("causal_forward", True)):
            found = KERNELS[name].harness(KERNELS[name].solve, q, k, v, tiling)
            factor = KERNELS[name].harness.scale(q.shape[-1]) * q.shape[-1] ** 0.5
            expected = kernel_task.attention_and_lse(factor * q, k, v, is_causal=is_causal)
            close(list(found.values()), expected)
    for given in draw_inputs(KERNELS["backward_queries"], seed):
        right = by_autograd(*given[:4], is_causal=True)
        names = ("backward_queries", "backward_keys")
        found = [KERNELS[name].harness(KERNELS[name].solve, *given) for name in names]
        close([x for one in found for x in one.values()], right)
    for q, k, v, BQ, BK in draw_inputs(exercises.tiled_forward, seed):
        found = exercises.tiled_forward.solve(q, k, v, BQ, BK)
        close(found, kernel_task.attention_and_lse(q, k, v, is_causal=False))
    for q, k, v, out, lse, grad_out, *tile in draw_inputs(exercises.tiled_backward, seed):
        found = exercises.tiled_backward.solve(q, k, v, out, lse, grad_out, *tile)
        right = by_autograd(*(x[None] for x in (q, k, v, grad_out)), is_causal=False)
        close([x[None] for x in found], right)


def test_online_softmax_gives_the_maximum_and_the_sum_of_the_row():
    for (tiles,) in draw_inputs(exercises.add_tile, 0):
        found = exercises.one_after_another(exercises.add_tile.solve, tiles)
        row = torch.cat(tiles).double()
        torch.testing.assert_close(found["m"].double(), row.max())
        total = (row - row.max()).exp().sum()
        torch.testing.assert_close(found["l"].double(), total, rtol=1e-5, atol=0)


def in_two_passes(q, k, v, BQ, BK):
    out, lse = torch.empty_like(q), q.new_empty(len(q))
    for i in range(0, len(q), BQ):
        Q = q[i : i + BQ] / q.shape[1] ** 0.5
        m = torch.full_like(Q[:, 0], -torch.inf)
        for j in range(0, len(k), BK):
            m = torch.maximum(m, (Q @ k[j : j + BK].T).amax(1))
        l, O = torch.zeros_like(m), torch.zeros_like(Q)
        for j in range(0, len(k), BK):
            P = torch.exp(Q @ k[j : j + BK].T - m[:, None])
            l, O = l + P.sum(1), O + P @ v[j : j + BK]
        out[i : i + BQ], lse[i : i + BQ] = O / l[:, None], m + l.log()
    return out, lse


def with_all_scores_kept(q, k, v, BQ, BK):
    out, lse = torch.empty_like(q), q.new_empty(len(q))
    starts = range(0, len(k), BK)
    for i in range(0, len(q), BQ):
        kept = [q[i : i + BQ] @ k[j : j + BK].T / q.shape[1] ** 0.5 for j in starts]
        m = torch.stack([S.amax(1) for S in kept]).amax(0)
        P = [torch.exp(S - m[:, None]) for S in kept]
        l = sum(p.sum(1) for p in P)
        out[i : i + BQ] = sum(p @ v[j : j + BK] for p, j in zip(P, starts)) / l[:, None]
        lse[i : i + BQ] = m + l.log()
    return out, lse


def with_keys_outside(q, k, v, BQ, BK):
    m, l, O = torch.full_like(q[:, 0], -torch.inf), torch.zeros_like(q[:, 0]), torch.zeros_like(q)
    for K, V in zip(k.split(BK), v.split(BK)):
        for i in range(0, len(q), BQ):
            tile = slice(i, i + BQ)
            S = torch.matmul(q[tile], K.mT) * q.shape[1] ** -0.5
            new_m = torch.maximum(m[tile], S.amax(1))
            P, shrink = torch.exp(S - new_m[:, None]), torch.exp(m[tile] - new_m)
            l[tile] = shrink * l[tile] + P.sum(1)
            O[tile] = shrink[:, None] * O[tile] + P.matmul(V)
            m[tile] = new_m
    return O / l[:, None], m + l.log()


def by_differentiation(q, k, v, out, lse, grad_out, BQ, BK):
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        found, _ = exercises.tiled_forward.solve(*given, BQ, BK)
        return torch.autograd.grad(found, given, grad_out)


@pytest.mark.parametrize(
    ("name", "attempt", "words"),
    [
        ("tiled_forward", in_two_passes, "a second tile of keys are computed before"),
        ("tiled_forward", with_all_scores_kept, "a second tile of keys are computed before"),
        ("tiled_forward", with_keys_outside, "right"),
        ("tiled_backward", by_differentiation, "autograd must not differentiate here"),
    ],
)
def test_only_one_pass_and_a_written_gradient_are_right(name, attempt, words):
    text = verdict_on(name, attempt)
    assert words in text
    assert text.startswith("right" if words == "right" else "not yet")


def verdict_on(name, attempt):
    with no_overflow_checks():
        return verdict(getattr(exercises, name), attempt, seed=0)


def wrong(name, *texts):
    """The verdict on the solution `name` with texts replaced (`edited`)."""
    return verdict_on(name, edited(getattr(exercises, name).solve, *texts))


def test_gradients_that_pytorch_computes_are_not_those_of_the_kernels():
    def attempt(q, k, v, out, lse, grad_out, *kernels):
        exercises.attention_backward.solve(q, k, v, out, lse, grad_out, *kernels)
        return by_autograd(q, k, v, grad_out, is_causal=True)

    text = verdict(exercises.attention_backward, attempt)
    assert "the gradients must be what the kernels stored, unchanged" in text


def test_a_kernel_with_two_loops_is_right_and_one_that_skips_nothing_is_not():
    causal = exercises.causal_forward
    assert verdict(causal, ladder_triton.mask_on_diagonal).startswith("right")
    text = verdict(causal, ladder_triton.every_tile)
    assert "heads=2, n=33, D=32, BQ=16, BK=32" in text
    assert "program (0, 0) loads 2 tiles of k; only 1 has a pair that is visible" in text
    assert "let the loop end with the last query of the tile" in text


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
SCALE = "* scale  # (BQ, BK)"
GRADIENTS = "return grad_q, grad_k, grad_v"
KEYS_LAUNCH = "keys_kernel[grid](*given, grad_k, grad_v, n, scale, **sizes)"
STORE_OUT = "tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)"
STORE_LSE = "tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)"
OUT = TWICE.partition("\n")[0] + "\n"
# the first program skips nothing, and all others load nothing
SHARED_OUT = "range(0, n if tl.program_id(0) == 0 else 0, BK)"
# (exercise, old, new, what the verdict has)
WRONG = [
    ("tiled_forward", "torch.empty_like(q), q", "torch.empty(n, D), q", "must be torch.float64"),
    ("tiled_backward", "torch.zeros_like(x) for", "torch.zeros(x.shape) for", "got torch.float32"),
    ("flash_forward", SCALE, "/ tl.sqrt(float(D))", "the argument scale is not used"),
    ("flash_forward", STORE_OUT, "pass", "nothing is stored in out"),
    ("flash_forward", STORE_LSE, "pass", "nothing is stored in lse"),
    ("flash_forward", 'float("-inf"), tl.float32', "0.0, tl.float32", "yours "),
    ("flash_forward", OUT, TWICE, "tiles of k, and the head has 1: load each once, in a single"),
    ("causal_forward", "range(0, end, BK)", SHARED_OUT, "loads 2 tiles of k; only 1 has a pair"),
    ("attention_backward", GRADIENTS, f"{GRADIENTS}, None", "dQ, dK and dV, got 4"),
    ("attention_backward", GRADIENTS, "return grad_q, grad_q, grad_v", "dK, position (0, "),
    ("attention_backward", KEYS_LAUNCH, "pass", "each of the two kernels must be launched once"),
    ("attention_backward", "-(-n // 16)", "n // 16", "no program ran"),
    # one size in place of another
    ("flash_forward", "tl.arange(0, D)", "tl.arange(0, BK)", ""),
    ("backward_queries", "tl.arange(0, D)", "tl.arange(0, BQ)", ""),
    ("causal_forward", "(head + key[:, None]) * D", "(head + key[:, None]) * BK", ""),
    ("flash_forward", "(head + query[:, None]) * D", "(head + query[:, None]) * BQ", ""),
    ("causal_forward", ", BK):", ", BQ):", ""),
    ("backward_queries", "tl.trans(v)", "v", ""),
    ("backward_keys", "tl.dot(k, tl.trans(q)", "tl.dot(k, q", ""),
    ("backward_keys", "tl.float32), tl.zeros((BK, D)", "tl.float32), tl.zeros((BK, BQ)", ""),
]


@pytest.mark.parametrize(("name", "old", "new", "words"), WRONG)
def test_a_wrong_answer_is_told_what_is_wrong(name, old, new, words):
    text = wrong(name, old, new)
    assert text.startswith("not yet")
    assert words in text


@pytest.mark.parametrize("tiling", [Tiling(32, 16), Tiling(16, 32)], ids=str)
@pytest.mark.parametrize("name", ["causal_forward", "backward_keys"])
def test_tiles_with_a_visible_pair_are_counted(name, tiling):
    task, side = getattr(exercises, name).harness, int(name == "backward_keys")
    for n in (1, 16, 17, 33, 40, 64):
        pairs = [rows.split(tiling.BK, 1) for rows in torch.ones(n, n).tril().split(tiling.BQ)]
        seen = torch.tensor([[bool(tile.any()) for tile in row] for row in pairs])
        found = [task.tiles_seen(tile, n, tiling) for tile in range(seen.shape[side])]
        assert found == seen.sum(1 - side).tolist()


DESCRIBED = """    out = tl.zeros((BQ, D), tl.float32)
    keys = tl.make_tensor_descriptor(k_ptr + head * D, [n, D], [D, 1], [BK, D])
    values = tl.make_tensor_descriptor(v_ptr + head * D, [n, D], [D, 1], [BK, D])
"""


def test_tensor_descriptors_are_as_right_as_pointers():
    start = DESCRIBED.partition("\n")[0] + "\n"
    texts = [start, DESCRIBED]
    for x, descriptor in (("k", "keys"), ("v", "values")):
        texts.append(f"{x} = tl.load({x}_ptr + k_rows, mask=key[:, None] < n, other=0.0)\n")
        texts.append(f"{x} = {descriptor}.load([start, 0])\n")
    assert wrong("flash_forward", *texts).startswith("right")


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_kernels_pass_too(name, capsys):
    kernel = triton.jit(getattr(exercises, name).solve)
    assert exercises.take(kernel) is kernel


def kernel_in_a_file(folder: Path, name: str, old: str, new: str):
    """The solution `name` with `old` replaced by `new`: Triton compiles what is in a file."""
    file = folder / "wrong_kernels.py"
    source = Path(solutions_triton.__file__).read_text(encoding="utf-8")
    file.write_text(source.replace(old, new), encoding="utf-8")
    return triton.jit(runpy.run_path(str(file))[name].solve)


SCORES = 'tl.where(key[None, :] < n, scores, float("-inf"))'


@pytest.mark.parametrize(
    ("old", "new", "cure"),
    [
        (f"scores = {SCORES}", 'scores[:, key >= n] = float("-inf")', "`tl.where(condition"),
        (SCORES, 'scores.masked_fill(key >= n, float("-inf"))', "`tl.where(condition"),
        ("m + tl.log(l)", '__import__("math").log(l)', "not PyTorch's"),
        ("m + tl.log(l)", '__import__("torch").log(l)', "not PyTorch's"),
        ("scores - new_m[:, None]", "scores - new_m", "`x[:, None]` goes with its rows"),
        ("tl.trans(k)", "k", "`tl.trans` turns"),
    ],
)
def test_an_error_names_its_line_in_the_kernel_and_a_cure(old, new, cure, tmp_path, capsys):
    source = Path(solutions_triton.__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(source) if old in text)
    exercises.take(kernel_in_a_file(tmp_path, "flash_forward", old, new))
    words = capsys.readouterr().out
    assert f"line {line} of the cell raised" in words
    assert cure in words


def test_a_kernel_that_rounds_float32_is_told_why_it_is_off(tmp_path, capsys):
    exercises.take(triton.jit(exercises.flash_forward.solve))
    assert "rounds" not in capsys.readouterr().out
    old = 'tl.trans(k), input_precision="ieee"'
    kernel = kernel_in_a_file(tmp_path, "flash_forward", old, "tl.trans(k)")
    assert exercises.take(kernel) is not kernel
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
    assert exercises.take(wrong).fn is exercises.causal_forward.solve
    words = capsys.readouterr().out
    assert "not yet: right in the interpreter, but for bfloat16 it does not" in words
    assert line in words
    assert cure in words
