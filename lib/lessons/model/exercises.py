"""Exercises of notebook 02: the loss, gradients, attention, RoPE, costs, a head made by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lib.lessons.differences import Named
from lib.lessons.exercise import check_of, exercise

check = check_of(__name__)
taken = check_of(__name__, returns=True)


def take(attempt: Callable, name: str = "") -> Callable:
    """Check the reader's function; return it if it is right, or else the solution.

    The solution's block calls the `attention` of the reader's notebook.
    """
    function = taken(attempt, name)
    if function is block.solve:
        return block_with(getattr(attempt, "__globals__", {"attention": attend}))
    return function


def draw_tensor(generator: random.Random, *shape: int) -> Tensor:
    # halves, which print short and exactly
    values = [generator.randint(-6, 6) / 2 for _ in range(math.prod(shape))]
    return torch.tensor(values).reshape(shape)


class Without(TorchFunctionMode):
    """Raises ValueError where one of these functions of PyTorch is called."""

    def __init__(self, *functions: Callable) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.functions:
            raise ValueError(f"{function.__name__} does all of it; write it out")
        return function(*args, **(kwargs or {}))


def in_a_model(attempt: Callable, x: Tensor, *given: Any) -> Any:
    """Call an answer with `x` as a model has it: others read it, too, and autograd follows it.

    Raises:
        ValueError: autograd has not followed how the result was computed; or x was changed, or
            has another dtype than the result.
    """
    watched = x.clone().requires_grad_() * 1
    result = attempt(watched, *given)
    if not torch.equal(watched, x):
        raise ValueError("it changes the tensor that is given, which the model still needs")
    if isinstance(result, Tensor):
        if not result.requires_grad:
            raise ValueError("autograd can't follow it; compute it from the tensors that are given")
        # a loss may be a number of any dtype
        if result.dim() and result.dtype != x.dtype:
            raise ValueError(f"the dtype must be that of the tensor given, got {result.dtype}")
    return result


# The loss


def draw_logits(generator: random.Random, size: int) -> tuple:
    vocab_size = generator.randint(2, 2 + size)
    # never as many tokens as logits: a row used as a column then fits nothing, and raises
    lengths = [length for length in range(1, 4 + size // 2) if length != vocab_size]
    logits = draw_tensor(generator, generator.choice(lengths), vocab_size)
    # some so large that their exponentials, or their differences', leave float32
    logits = logits * generator.choice([1, 1, 1, 50]) + generator.choice([0, 0, 0, 100])
    return logits, torch.tensor([generator.randrange(vocab_size) for _ in range(len(logits))])


class NoTableOfPairs(TorchFunctionMode):
    """Raises ValueError where (n, 1) meets (n,), which gives n x n: its mean is right by luck."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
        if len(shapes) == 2 and {*map(len, shapes)} == {1, 2} and math.prod(map(sum, shapes)) > 2:
            n = max(shapes, key=len)[0]
            if {*shapes} == {(n,), (n, 1)} and tuple(result.shape) == (n, n):
                raise ValueError(
                    f"shapes {shapes[0]} and {shapes[1]} make a table of {n} x {n}, whose mean is "
                    "right by luck; sum without `keepdim=True`"
                )
        return result


def loss_by_hand(attempt: Callable, logits: Tensor, targets: Tensor) -> Any:
    with Without(F.cross_entropy), NoTableOfPairs():
        return in_a_model(attempt, logits, targets)


@exercise("warm-up", draw_logits, harness=loss_by_hand)
def cross_entropy_loss(logits: Tensor, targets: Tensor) -> Tensor:
    shifted = logits - logits.amax(-1, keepdim=True)
    log_sum_exp = shifted.exp().sum(-1).log()
    of_target = shifted[torch.arange(len(targets)), targets]
    return (log_sum_exp - of_target).mean()


cross_entropy_loss.mistakes = """
logits - logits.amax(-1, keepdim=True) => logits
    | large logits overflow inside the sum; subtract the row's maximum first
of_target = shifted => of_target = logits
    | the maximum is subtracted inside the sum only; subtract it from the target's logit too
mean() => sum() | the losses are added up; take their mean
log_sum_exp - of_target => of_target - log_sum_exp | the sign is wrong; a loss is never below 0
(log_sum_exp - of_target).mean() =>
    -logits.softmax(-1)[torch.arange(len(targets)), targets].log().mean()
    | this is the logarithm of a softmax, whose small probabilities have become 0; use the
    log-sum-exp
torch.arange(len(targets)) => :
    | logits[:, targets] takes every target from every row; each row has one,
    logits[torch.arange(len(targets)), targets]
"""


# The bigram's gradient


def draw_pairs(generator: random.Random, size: int) -> tuple:
    vocab_size, num_pairs = generator.randint(2, 4 + size // 3), generator.randint(2, 4 + size)
    ids = [[generator.randrange(vocab_size) for _ in range(num_pairs)] for _ in range(2)]
    return draw_tensor(generator, vocab_size, vocab_size), *map(torch.tensor, ids)


def without_autograd(attempt: Callable, weight: Tensor, *pairs: Tensor) -> Named:
    with torch.no_grad(), Without(torch.autograd.grad, Tensor.backward, torch.autograd.backward):
        loss, d_weight = attempt(weight, *pairs)
    # a number is as good as a tensor
    loss = torch.tensor(loss) if isinstance(loss, float) else loss
    return Named({"the loss": loss, "the gradient": d_weight})


@exercise("core", draw_pairs, harness=without_autograd, trials=80)
def bigram_gradient(weight: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = weight[inputs]  # (pairs, vocab)
    rows = torch.arange(len(inputs))
    loss = -logits.log_softmax(-1)[rows, targets].mean()
    d_logits = logits.softmax(-1)
    d_logits[rows, targets] -= 1
    d_weight = torch.zeros_like(weight)
    d_weight.index_add_(0, inputs, d_logits / len(inputs))
    return loss, d_weight


bigram_gradient.mistakes = """
d_logits[rows, targets] -= 1 => pass
    | the one-hot of the target is missing; the gradient is softmax - one-hot
d_logits[rows, targets] -= 1 => d_logits[rows, inputs] -= 1
    | 1 is subtracted at the token that was seen; subtract it at the one that came next
index_add_ => index_copy_
    | a token that is seen several times keeps one gradient; add up all of them, with index_add_
d_logits / len(inputs) => d_logits
    | the gradient is that of the summed loss; divide it by the number of pairs
logits.log_softmax(-1) => logits.log_softmax(0) && logits.softmax(-1) => logits.softmax(0)
    | softmax runs over the pairs; each row sums to 1 by itself
d_logits / len(inputs) => -d_logits / len(inputs)
    | the gradient has the wrong sign; it is softmax - one-hot
"""


# Reverse-mode autograd


class Value:
    """A number that remembers what it was computed from.

    `parents` has a pair for each operand: the operand, and the derivative with respect to it.

    Raises:
        ValueError: they are asked for so often that the gradient goes along each way by itself.
    """

    def __init__(self, number: float, parents: Sequence[tuple[Value, float]] = ()) -> None:
        self.number, self.given_parents, self.grad, self.asked = number, parents, 0.0, 0

    @property
    def parents(self) -> Sequence[tuple[Value, float]]:
        self.asked += 1
        if self.asked > 1000:
            raise ValueError("a value passed its gradient on 1,000 times; it must do so once")
        return self.given_parents

    def __add__(self, other: Value) -> Value:
        return Value(self.number + other.number, [(self, 1.0), (other, 1.0)])

    def __mul__(self, other: Value) -> Value:
        return Value(self.number * other.number, [(self, other.number), (other, self.number)])


def draw_formula(generator: random.Random, size: int) -> tuple:
    """Numbers, and steps `(+ or *, which, which)` whose results are appended to them."""
    # now and then 24 doublings, so that 2^24 ways lead to the first value
    if size > 9 and generator.random() < 0.5:
        return [generator.randint(1, 4) / 2], [("+", i, i) for i in range(24)]
    numbers = [generator.randint(-4, 4) / 2 or 1.0 for _ in range(generator.randint(1, 3))]
    steps = []
    for count in range(len(numbers), len(numbers) + generator.randint(1, 1 + size // 2)):
        # the newest is always used, and others again and again
        operands = generator.sample([count - 1, generator.randrange(count)], 2)
        steps.append((generator.choice("+*"), *operands))
    return numbers, steps


def evaluate_formula(numbers: Sequence[Any], steps: Sequence[tuple[str, int, int]]) -> list:
    """All values, first the given ones; the last is the result."""
    values = list(numbers)
    for operation, a, b in steps:
        values.append(values[a] + values[b] if operation == "+" else values[a] * values[b])
    return values


def gradients_of(attempt: Callable, numbers: list[float], steps: list[tuple]) -> list[float]:
    values = evaluate_formula([Value(number) for number in numbers], steps)
    attempt(values[-1])
    return [value.grad for value in values]


def formula_words(numbers: list[float], steps: list[tuple]) -> str:
    names = ascii_lowercase
    given = [f"{name} = {number:g}" for name, number in zip(names, numbers)]
    made = zip(names[len(numbers) :], steps)
    given += [f"{name} = {names[a]} {sign} {names[b]}" for name, (sign, a, b) in made]
    return ", ".join(given) + ", and the gradients of all of them"


@exercise("optional", draw_formula, harness=gradients_of, show=formula_words)
def backward(result: Value) -> None:
    order, seen = [], set()

    def visit(value: Value) -> None:
        if value not in seen:
            seen.add(value)
            for parent, _ in value.parents:
                visit(parent)
            order.append(value)

    visit(result)
    result.grad = 1.0
    for value in reversed(order):
        for parent, derivative in value.parents:
            parent.grad += derivative * value.grad


backward.mistakes = """
parent.grad += => parent.grad =
    | a value that is used twice keeps one of its gradients; add them up
result.grad = 1.0 => pass
    | nothing starts; the gradient of the result with respect to itself is 1
reversed(order) => order
    | values pass their gradients on before they have them; begin at the result
derivative * value.grad => derivative
    | the derivative of a single step is added; the chain rule multiplies it by the gradient of what
    comes after
if value not in seen: => if True:
    | a value that is used twice passes its gradient on twice; visit each value once
order.append(value) => pass && seen.add(value) => seen.add(value); order.append(value)
    && reversed(order) => order
    | a value passes its gradient on before all of it has arrived; whatever uses it must come first
"""


# Attention with heads


def draw_attention(generator: random.Random, size: int) -> tuple:
    head_dim, num_heads = generator.randint(2, 3), generator.randint(1, 3 + size // 8)
    batch, length = generator.randint(1, 2), generator.randint(1, 2 + size // 2)
    # mostly not as wide as all heads together
    d_model = num_heads * head_dim + generator.randint(0, 2)
    x = draw_tensor(generator, batch, length, d_model)
    width = num_heads * head_dim
    w_q, w_k, w_v = (draw_tensor(generator, width, d_model) / d_model for _ in range(3))
    rope = generator.choice([identity, scaled_by_position])
    # some scores so large that a mask of -100 does not hide them, but not for all to be rounded
    w_q = w_q * generator.choice([1, 1, 30] if rope is identity else [1])
    w_out = draw_tensor(generator, d_model, width)
    return x, w_q, w_k, w_v, w_out, num_heads, rope


def identity(x: Tensor) -> Tensor:
    return x


def scaled_by_position(x: Tensor) -> Tensor:
    """Scale x (..., length, head_dim) by factors that differ between positions and coordinates."""
    length, head_dim = x.shape[-2:]
    return x * (1 + torch.arange(length)[:, None] * torch.arange(1, 1 + head_dim) / head_dim)


def split_heads(y: Tensor, head_dim: int) -> Tensor:
    """(batch, length, heads · head_dim) -> (batch, heads, length, head_dim)."""
    return y.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attention_by_hand(attempt: Callable, x: Tensor, *given: Any) -> Any:
    with Without(F.scaled_dot_product_attention, F.multi_head_attention_forward):
        return in_a_model(attempt, x, *given)


@exercise("core", draw_attention, harness=attention_by_hand, trials=80)
def attention(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_out: Tensor,
    num_heads: int,
    rope: Callable[[Tensor], Tensor],
) -> Tensor:
    head_dim, length = len(w_q) // num_heads, x.shape[1]
    q, k, v = (split_heads(x @ w.T, head_dim) for w in (w_q, w_k, w_v))
    q, k = rope(q), rope(k)
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)  # (batch, heads, queries, keys)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(-2)  # (batch, length, heads · head_dim)
    return out @ w_out.T


attention.mistakes = """
 / math.sqrt(head_dim) => | the scale is missing; divide the scores by sqrt(head_dim)
.masked_fill(~visible, -math.inf) => | there is no mask; a query must not see later keys
dtype=torch.bool).tril() => dtype=torch.bool).tril(-1)
    | the mask hides each token from itself, and the first one from everything; a query sees its own
    key
q, k = rope(q), rope(k) => pass
    | `rope` is not called; give it queries and keys, cut into heads
.transpose(1, 2).flatten(-2) => .reshape(*x.shape[:2], -1)
    | heads are put together without being transposed back, which mixes tokens
math.sqrt(head_dim) => math.sqrt(x.shape[-1])
    | the scores are divided by sqrt(d_model); a score is a sum of head_dim products
"""


# RoPE in both layouts


def draw_positions(generator: random.Random, size: int) -> tuple:
    head_dim = 2 * generator.randint(1, 2 + size // 4)
    x = draw_tensor(generator, generator.randint(1, 2 + size // 2), head_dim)
    # later ones as in a model: (batch, heads, length, head_dim)
    if size > 5:
        x = torch.stack([x, x.flip(0)]).expand(generator.randint(1, 2), 2, -1, -1)
    return x, generator.choice([10.0, 100.0, 10_000.0]), generator.choice(["pairs", "halves"])


def in_both_layouts(attempt: Callable, x: Tensor, theta: float, layout: str) -> Any:
    try:
        return in_a_model(attempt, x, theta, layout)
    except NotImplementedError:
        # raises, too, where nothing is written yet
        in_a_model(attempt, x, theta, "pairs" if layout == "halves" else "halves")
        raise ValueError(f"layout {layout!r} is not written yet") from None


@exercise("core", draw_positions, harness=in_both_layouts, trials=100)
def rotate(x: Tensor, theta: float, layout: str) -> Tensor:
    length, head_dim = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)  # (head_dim / 2,)
    angles = torch.arange(length)[:, None] * frequencies  # (length, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()
    a, b = (x[..., 0::2], x[..., 1::2]) if layout == "pairs" else x.chunk(2, dim=-1)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    return torch.stack(rotated, -1).flatten(-2) if layout == "pairs" else torch.cat(rotated, -1)


rotate.mistakes = """
length, head_dim = x.shape[-2:] => (length, head_dim), layout = x.shape[-2:], "pairs"
    | both layouts are rotated in pairs of neighbors; in `halves`, coordinate i goes with
    i + head_dim / 2
length, head_dim = x.shape[-2:] =>
    (length, head_dim), layout = x.shape[-2:], "halves" if layout == "pairs" else "pairs"
    | the layouts are swapped; `pairs` are neighbors, coordinates 2i and 2i + 1
torch.stack(rotated, -1).flatten(-2) if layout == "pairs" else => | the result of `pairs` comes in
    halves; stack a and b on a last dimension, and flatten
rotated = (a * cos - b * sin, a * sin + b * cos) =>
    a = a * cos - b * sin; rotated = (a, a * sin + b * cos)
    | b is rotated with the new a; compute both from the old ones
(a * cos - b * sin, a * sin + b * cos) => (a * cos + b * sin, b * cos - a * sin)
    | the rotation goes the other way; (a, b) becomes (a cos - b sin, a sin + b cos)
torch.arange(0, head_dim, 2) => torch.arange(head_dim // 2)
    | the exponent is -i / head_dim; pair i has -2i / head_dim
"""


# The order of a block


class Weights(dict):
    """Weights by name that do not fill the page when a check shows them."""

    def __repr__(self) -> str:
        return f"<{len(self)} tensors by name>"


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, value = (x @ w13.T).chunk(2, dim=-1)
    return (F.silu(gate) * value) @ w2.T


def draw_block(generator: random.Random, size: int) -> tuple:
    x, *_, num_heads, rope = draw_attention(generator, size)
    width = num_heads * generator.randint(1, 2)
    shapes = {
        "ln1": (width,),
        "ln2": (width,),
        "attn.qkv_proj": (3 * width, width),
        "attn.output_proj": (width, width),
        "ffn.w13": (6, width),
        "ffn.w2": (width, 3),
    }
    weights = {f"{name}.weight": draw_tensor(generator, *shapes[name]) / 4 for name in shapes}
    return draw_tensor(generator, *x.shape[:2], width), Weights(weights), num_heads, rope


attend = attention.solve


def block_with(names: Mapping[str, Any]) -> Callable:
    """The solution's block, which calls the attention that `names` have at the time of a call."""

    def attend_by_name(*given: Any) -> Tensor:
        return names["attention"](*given)

    return FunctionType(block.solve.__code__, block.solve.__globals__ | {"attend": attend_by_name})


@exercise("warm-up", draw_block, harness=in_a_model, trials=40)
def block(
    x: Tensor, w: dict[str, Tensor], num_heads: int, rope: Callable[[Tensor], Tensor]
) -> Tensor:
    qkv, w_out = w["attn.qkv_proj.weight"].chunk(3), w["attn.output_proj.weight"]
    x = x + attend(rms_norm(x, w["ln1.weight"]), *qkv, w_out, num_heads, rope)
    return x + swiglu(rms_norm(x, w["ln2.weight"]), w["ffn.w13.weight"], w["ffn.w2.weight"])


block.mistakes = """
x + attend => attend | attention overwrites the stream; add to it
rms_norm(x, w["ln1.weight"]), *qkv => x, *qkv
    | attention reads the stream itself; the norm is missing
rms_norm(x, w["ln2.weight"]), w["ffn => x, w["ffn
    | SwiGLU reads the stream itself; the norm is missing
x = x + attend(rms_norm(x, w["ln1.weight"]), => x = rms_norm(x, w["ln1.weight"]); x = x + attend(x,
    && return x + swiglu(rms_norm(x, w["ln2.weight"]), =>
    x = rms_norm(x, w["ln2.weight"]); return x + swiglu(x,
    | the norm changes the stream itself; only what a part reads is normalized
x = x + attend(rms_norm(x, w["ln1.weight"]), *qkv, w_out, num_heads, rope) =>
    x = rms_norm(x + attend(x, *qkv, w_out, num_heads, rope), w["ln1.weight"])
    && return x + swiglu(rms_norm(x, w["ln2.weight"]), w["ffn.w13.weight"], w["ffn.w2.weight"]) =>
    return rms_norm(x + swiglu(x, w["ffn.w13.weight"], w["ffn.w2.weight"]), w["ln2.weight"])
    | a norm comes after each sum; it comes before each part
rms_norm(x, w["ln1.weight"]) => rms_norm(x, w["ln2.weight"])
    && rms_norm(x, w["ln2.weight"]), w["ffn => rms_norm(x, w["ln1.weight"]), w["ffn
    | the norms are swapped; ln1 comes before attention, ln2 before SwiGLU
"""


# What a model costs


def draw_shape(generator: random.Random, size: int) -> tuple:
    kv_heads = generator.randint(1, 3)
    heads = kv_heads * generator.randint(1, 3)
    d_model = heads * generator.randint(1, 2 + size)
    layers, d_ff = generator.randint(1, 1 + size), generator.randint(1, 4 + 9 * size)
    vocab_size, context = generator.randint(5, 10 * size + 10), generator.randint(2, 2 + 9 * size)
    return d_model, d_ff, layers, heads, kv_heads, vocab_size, context


@exercise("optional", draw_shape)
def bill(
    d_model: int,
    d_ff: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab_size: int,
    context: int,
) -> dict[str, int]:
    kv_width = d_model // heads * kv_heads
    matrices = layers * (2 * d_model**2 + 2 * d_model * kv_width + 3 * d_model * d_ff)
    head = vocab_size * d_model
    norms = (2 * layers + 1) * d_model
    return {
        "parameters": matrices + 2 * head + norms,
        "training FLOPs per token": 6 * (matrices + head) + 12 * layers * context * d_model,
        "KV cache bytes": 2 * layers * kv_width * context * 2,
    }


bill.mistakes = """
 + norms => | norms have no FLOPs here but weights all the same: two in a layer, and one before the
    head
2 * head => head | one of embedding and head is missing; both are vocab_size · d_model
6 * (matrices + head) + 12 * => 2 * (matrices + head) + 4 *
    | the FLOPs are those of the forward pass; backward takes twice as many again
d_model // heads * kv_heads => d_model
    | keys and values are as wide as queries everywhere; they have kv_heads · head_dim
2 * layers * kv_width * context * 2 => 2 * layers * kv_width * context
    | the cache is half as large as it should be: it holds both keys and values, of 2 bytes
6 * (matrices + head) => 6 * (matrices + 2 * head + norms)
    | all parameters are given FLOPs; a lookup is no matmul, and norms are no matrices
"""


# A head that looks at the token before

CONTEXT = 128
# The root of the mean square of a query's and a key's coordinates.
MOST_RMS = 2.0
WIDTHS = (16, 32, 64)


def weights_by_distance(query: Tensor, key: Tensor, frequencies: Tensor) -> Tensor:
    """The attention that each position gives to the token 0, 1, 2, … before it.

    Args:
        query, key: (head_dim,), the same for all tokens, before RoPE rotates them in pairs.
        frequencies: (head_dim / 2,), in radians a token.

    Returns:
        (CONTEXT - 1, CONTEXT): the first position is left out, and nothing lies before it.
    """
    q, k = (torch.view_as_complex(x.reshape(-1, 2).contiguous()) for x in (query, key))
    distances = torch.arange(CONTEXT)[:, None]  # of the query from the key
    turns = torch.polar(torch.ones(CONTEXT, len(q)), distances * frequencies)
    scores = (q * k.conj() * turns).real.sum(-1) / math.sqrt(len(query))  # by distance
    outside = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
    return scores.expand(CONTEXT, -1).masked_fill(outside, -math.inf).softmax(-1)[1:]


def frequencies_of(head_dim: int) -> Tensor:
    """RoPE's, with θ = 10,000."""
    return 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)


def aimed(attempt: Callable, frequencies: Tensor) -> dict[str, Any]:
    """Describe what a head does, from its worst position."""
    query, key = (torch.as_tensor(x).detach().float() for x in attempt(frequencies))
    head_dim, shapes = 2 * len(frequencies), [tuple(query.shape), tuple(key.shape)]
    if shapes != [(head_dim,)] * 2:
        raise ValueError(f"query and key must each be ({head_dim},), got {shapes}")
    rms = max(x.square().mean().sqrt().item() for x in (query, key))
    weights = weights_by_distance(query, key, frequencies)
    worst = weights[weights[:, 1].argmin()].clone()
    worst[1] = 0
    next_best = "one beside it" if worst.argmax() <= 2 else "one further back"
    on_previous = f"the most, but less than half; {next_best} comes next"
    if rms < 0.9 * MOST_RMS:
        on_previous += ", and the arrows may be longer"
    if weights[:, 1].min() > 0.5:
        on_previous = "more than half"
    elif (weights.argmax(-1) != 1).any():
        on_previous = "less than another one"
    return {
        "RMS of query and key": "at most 2" if rms <= MOST_RMS + 1e-3 else "more than 2",
        "attention that the token before gets": on_previous,
    }


def missed_percent(attempt: Callable) -> float:
    """Percent of the attention that goes elsewhere, from the worst position, for head_dim 32."""
    frequencies = frequencies_of(32)
    query, key = (torch.as_tensor(x).detach() for x in attempt(frequencies))
    return 100 * (1 - weights_by_distance(query, key, frequencies)[:, 1].min().item())


@exercise(
    "open",
    {"frequencies": lambda generator, size: frequencies_of(WIDTHS[size % len(WIDTHS)])},
    harness=aimed,
    trials=6,
    measure=missed_percent,
    unit="% of the attention misses",
)
def previous_token_head(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    pairs = len(frequencies)
    # the fastest pairs tell neighbors apart; several of them, so that no other distance fits all
    size = torch.tensor([1.0] * 4 + [0.0] * (pairs - 4))
    size *= MOST_RMS * math.sqrt(2 * pairs) / size.norm()
    key = torch.stack([size, torch.zeros(pairs)], -1).flatten()
    # a query one position further on has been rotated by `frequencies` more than the key
    query = torch.stack([size * frequencies.cos(), -size * frequencies.sin()], -1).flatten()
    return query, key


previous_token_head.mistakes = """
size * frequencies.cos(), -size * frequencies.sin() => size, torch.zeros(pairs)
    | another token gets the most, as where query and key point the same way, or the query is
    rotated forward; rotate it back by one position
[1.0] * 4 + [0.0] * (pairs - 4) => [1.0] * (pairs // 4) + [0.0] * (pairs - pairs // 4)
    | narrow heads fail alone; give long arrows to three or more of the fastest pairs, as slow ones
    hardly tell neighbors apart
[1.0] * 4 + [0.0] * (pairs - 4) => [1.0] * pairs
    && MOST_RMS * math.sqrt(2 * pairs) / size.norm() => 1
    | arrows are too short to tell neighbors apart; drop the slow pairs, and make the fast ones as
    long as allowed
[1.0] * 4 + [0.0] * (pairs - 4) => [1.0] * pairs
    | slow pairs take length from the fast ones, which tell neighbors apart; let some be 0
[1.0] * 4 + [0.0] * (pairs - 4) => [1.0] + [0.0] * (pairs - 1)
    | one or two pairs are too few; the fastest comes around after 6.28 tokens
MOST_RMS * math => 2 * MOST_RMS * math
    | query and key are longer than allowed; their mean square is at most 4
"""
