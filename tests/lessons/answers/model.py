"""Answers to the exercises of notebook 02."""

import math
from collections import Counter

import torch
import torch.nn.functional as F

from lib.lessons.model import exercises
from lib.model.config import ModelConfig
from lib.model.costs import flops_per_token, num_parameters
from lib.model.llama import pairs_to_halves
from lib.model.transformer import RotaryEmbedding, TransformerBlock
from tests.lessons.answers.table import right, wrong, wrong_edit


@right(exercises.cross_entropy_loss)
def in_float64(logits, targets):
    return F.nll_loss(logits.double().log_softmax(-1), targets)


@right(exercises.bigram_gradient)
def bigram_by_one_hot(weight, inputs, targets):
    """Matmuls add up the rows of a token, in another order."""
    seen, came = F.one_hot(inputs, len(weight)).float(), F.one_hot(targets, len(weight)).float()
    p = (seen @ weight).softmax(-1)
    return -(p * came).sum(-1).log().mean(), seen.T @ (p - came) / len(inputs)


@right(exercises.backward)
def backward_by_counting(result):
    """A value passes its gradient on when all that use it have passed on theirs."""
    uses, waiting = Counter(), [result]
    while waiting:
        for parent, _ in waiting.pop().parents:
            waiting += [parent] * (parent not in uses)
            uses[parent] += 1
    result.grad, ready = 1.0, [result]
    while ready:
        value = ready.pop()
        for parent, derivative in value.parents:
            parent.grad += value.grad * derivative
            uses[parent] -= 1
            ready += [parent] * (not uses[parent])


@right(exercises.attention)
def attention_of_pytorch(x, w_q, w_k, w_v, w_out, num_heads, rope):
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, len(w_q) // num_heads)) for w in (w_q, w_k, w_v))
    q, k, v = (y.movedim(-2, 1) for y in (q, k, v))
    q, k = map(rope, (q, k))
    # its own math, since the check refuses the function itself
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, is_causal=True)
    return F.linear(out.movedim(1, -2).flatten(-2), w_out)


@right(exercises.rotate)
def rotate_by_lib(x, theta, layout):
    """`lib` rotates neighbors; columns are reordered as an export reorders rows."""
    rope = RotaryEmbedding(x.shape[-1], x.shape[-2], theta)
    if layout == "pairs":
        return rope(x)
    pairs = torch.stack(x.chunk(2, dim=-1), -1).flatten(-2)
    return pairs_to_halves(rope(pairs).movedim(-1, 0), num_heads=1).movedim(0, -1)


@right(exercises.block)
def block_by_lib(x, w, num_heads, rope):
    """`lib`'s block, with the rope that is given."""
    width, d_ff = w["ffn.w2.weight"].shape
    sizes = {"vocab_size": 2, "context_length": 99, "d_model": width, "d_ff": d_ff}
    theirs = TransformerBlock(
        ModelConfig(**sizes, num_layers=1, num_heads=num_heads, positions="none")
    )
    return torch.func.functional_call(theirs, w, (x, lambda y, *_: rope(y)))


@right(exercises.bill)
def bill_by_lib(d_model, d_ff, layers, heads, kv_heads, vocab_size, context):
    sizes = {"vocab_size": vocab_size, "context_length": context, "d_model": d_model, "d_ff": d_ff}
    shape = ModelConfig(**sizes, num_layers=layers, num_heads=heads, positions="none")
    missing = layers * 2 * d_model * (heads - kv_heads) * (d_model // heads)
    return {
        "parameters": num_parameters(shape) - missing,
        "training FLOPs per token": flops_per_token(shape) - 6 * missing,
        "KV cache bytes": 4 * layers * context * (d_model // heads) * kv_heads,
    }


@right(exercises.previous_token_head)
def uneven_head(frequencies):
    """Longer arrows for the first pair, as gradient descent finds them."""
    size = torch.zeros(len(frequencies))
    size[:5] = torch.tensor([0.726, 0.328, 0.355, 0.345, 0.346])
    size *= 2 * math.sqrt(2 * len(size)) / size.norm()
    query, key = torch.polar(size, -frequencies), size + 0j
    return torch.view_as_real(query).flatten(), torch.view_as_real(key).flatten()


@wrong(exercises.cross_entropy_loss, "whose mean is right by luck; sum without `keepdim=True`")
def broadcast(logits, targets):
    of_target = logits[torch.arange(len(targets)), targets]
    return (logits.logsumexp(-1, keepdim=True) - of_target).mean()


@wrong(exercises.attention, "autograd can't follow it")
def by_way_of_numpy(x, *given):
    return exercises.attention.solve(torch.tensor(x.detach().numpy()), *given)


@wrong(exercises.attention, "scaled_dot_product_attention does all of it; write it out")
def attention_in_one_call(x, w_q, w_k, w_v, w_out, num_heads, rope):
    head_dim = len(w_q) // num_heads
    q, k, v = ((x @ w.T).unflatten(-1, (-1, head_dim)).transpose(1, 2) for w in (w_q, w_k, w_v))
    out = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(-2) @ w_out.T


@wrong(exercises.rotate, "it changes the tensor that is given")
def rotate_in_place(x, *given):
    x[...] = exercises.rotate.solve(x.clone(), *given)
    return x


@wrong(exercises.rotate, "the dtype must be that of the tensor given, got torch.float64")
def rotate_in_float64(x, *given):
    return exercises.rotate.solve(x.double(), *given)


@wrong(exercises.bigram_gradient, "grad does all of it; write it out")
def bigram_by_autograd(weight, inputs, targets):
    with torch.enable_grad():
        weight = weight.clone().requires_grad_()
        loss = F.cross_entropy(weight[inputs], targets)
        return loss.detach(), *torch.autograd.grad(loss, weight)


@wrong(exercises.attention, "it changes `w_q`")
def scales_its_weights(x, w_q, *given):
    out = exercises.attention.solve(x, w_q, *given)
    w_q /= 2
    return out


wrong_edit(exercises.attention, "position (", "-math.inf", "-100")


@wrong(exercises.backward, "a value passed its gradient on 1,000 times; it must do so once")
def along_each_way_by_itself(result, passed=1.0):
    result.grad += passed
    for parent, derivative in result.parents:
        along_each_way_by_itself(parent, passed * derivative)


@wrong(exercises.rotate, "layout 'halves' is not written yet")
def only_pairs(x, theta, layout):
    if layout == "pairs":
        return exercises.rotate.solve(x, theta, layout)
    raise NotImplementedError
