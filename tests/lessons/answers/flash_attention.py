"""Answers to the exercises of notebook 06."""

import math

import torch
import torch.nn.functional as F

from lib.lessons.flash_attention import exercises, ladder_triton
from tests.lessons.answers.table import right, right_edit, wrong, wrong_edit

ONE_PASS = "a second tile of keys are computed before"


@wrong(exercises.tiled_forward, ONE_PASS)
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


@wrong(exercises.tiled_forward, ONE_PASS)
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


@wrong(exercises.tiled_forward, "numbers in the largest tensor: yours ")
def without_tiles(q, k, v, BQ, BK):
    scores = q @ k.T / math.sqrt(q.shape[1])
    return scores.softmax(1) @ v, scores.logsumexp(1)


@right(exercises.tiled_forward)
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


@right(exercises.tiled_backward)
def with_queries_outside(q, k, v, out, lse, grad_out, BQ, BK):
    scale, grads = q.shape[1] ** -0.5, [torch.zeros_like(x) for x in (q, k, v)]
    rows = range(0, len(q), BQ)
    for i, Q, O, L, dO in zip(rows, *(x.split(BQ) for x in (q, out, lse, grad_out))):
        for j in range(0, len(k), BK):
            queries, keys = slice(i, i + BQ), slice(j, j + BK)
            P = torch.exp(scale * Q @ k[keys].T - L[:, None])
            dS = scale * P * ((dO @ v[keys].T) - (dO * O).sum(1, keepdim=True))
            grads[0][queries] += dS @ k[keys]
            grads[1][keys] += dS.T @ Q
            grads[2][keys] += P.T @ dO
    return grads


@wrong(exercises.tiled_backward, "autograd must not differentiate here")
def by_differentiation(q, k, v, out, lse, grad_out, BQ, BK):
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        found, _ = exercises.tiled_forward.solve(*given, BQ, BK)
        return torch.autograd.grad(found, given, grad_out)


def by_autograd(q, k, v, grad_out, *, is_causal):
    """dQ, dK and dV, as PyTorch finds them."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return torch.autograd.grad(out, (q, k, v), grad_out)


@wrong(exercises.attention_backward, "the gradients must be what the kernels stored, unchanged")
def gradients_of_pytorch(q, k, v, out, lse, grad_out, *kernels):
    exercises.attention_backward.solve(q, k, v, out, lse, grad_out, *kernels)
    return by_autograd(q, k, v, grad_out, is_causal=True)


# a kernel with two loops is right
right(exercises.causal_forward)(ladder_triton.mask_on_diagonal)

# tensor descriptors are as right as pointers
OUT = "    out = tl.zeros((BQ, D), tl.float32)\n"
DESCRIBED = f"""{OUT}\
    keys = tl.make_tensor_descriptor(k_ptr + head * D, [n, D], [D, 1], [BK, D])
    values = tl.make_tensor_descriptor(v_ptr + head * D, [n, D], [D, 1], [BK, D])
"""
LOAD = "{} = tl.load({}_ptr + k_rows, mask=key[:, None] < n, other=0.0)\n"
right_edit(
    exercises.flash_forward,
    *(OUT, DESCRIBED),
    *(LOAD.format("k", "k"), "k = keys.load([start, 0])\n"),
    *(LOAD.format("v", "v"), "v = values.load([start, 0])\n"),
)

# Two loops over the keys, the first of them for the maximum alone.
TWICE = f"""{OUT}\
    for start in range(0, n, BK):
        key = start + tl.arange(0, BK)
        k_rows = (head + key[:, None]) * D + channel[None, :]
        k = tl.load(k_ptr + k_rows, mask=key[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(key[None, :] < n, scores, float("-inf"))
        m = tl.maximum(m, tl.max(scores, 1))
"""
GRADIENTS = "return grad_q, grad_k, grad_v"
KEYS_LAUNCH = "keys_kernel[grid](*given, grad_k, grad_v, n, scale, **sizes)"
STORE_OUT = "tl.store(out_ptr + q_rows, out / l[:, None], mask=query[:, None] < n)"
STORE_LSE = "tl.store(lse_ptr + head + query, m + tl.log(l), mask=query < n)"
# the first program skips nothing, and all others load nothing, as many tiles in all
SHARED_OUT = "range(0, n if tl.program_id(0) == 0 else 0, BK)"
# (exercise, old, new, what the verdict has)
WRONG = [
    ("tiled_forward", "torch.empty_like(q), q", "torch.empty(n, D), q", "must be torch.float64"),
    ("tiled_backward", "torch.zeros_like(x) for", "torch.zeros(x.shape) for", "got torch.float32"),
    ("flash_forward", STORE_OUT, "pass", "nothing is stored in out"),
    ("flash_forward", STORE_LSE, "pass", "nothing is stored in lse"),
    ("flash_forward", 'float("-inf"), tl.float32', "0.0, tl.float32", "yours "),
    ("flash_forward", OUT, TWICE, "tiles of k, and the head has 1: load each once, in a single"),
    ("causal_forward", "range(0, end, BK)", SHARED_OUT, "It looks as if the result is right, but"),
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
for name, old, new, words in WRONG:
    wrong_edit(getattr(exercises, name), words, old, new)


@wrong(exercises.tiled_forward, "it changes `q`")
def scales_in_place(q, k, v, BQ, BK):
    results = exercises.tiled_forward.solve(q, k, v, BQ, BK)
    q /= math.sqrt(q.shape[1])
    return results


wrong_edit(
    exercises.flash_forward,
    "programs store in q, which is an input",
    "m, l = tl.full",
    "tl.store(q_ptr + q_rows, q * scale, mask=query[:, None] < n); m, l = tl.full",
)
