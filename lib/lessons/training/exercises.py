"""Exercises of notebook 03: AdamW, the loop, diagnosis, resuming, top-p, a KV cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate as running_sums
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lib.lessons.differences import Named
from lib.lessons.exercise import check_of, exercise
from lib.lessons.training.broken import FAULTS
from lib.lessons.training.toys import (
    BATCH_POINTS,
    TRAINED,
    Batches,
    MakeRun,
    ToyDecoder,
    ToyLoss,
    ToyRun,
)

check = check_of(__name__)
# The reader's function if it is right, or else the solution.
take = check_of(__name__, returns=True)


# AdamW


def draw_gradients(generator: random.Random, size: int) -> tuple:
    width, num_steps = 1 + size // 5, 1 + size // 3
    weight = [generator.choice([-3.0, -2.0, 2.0, 3.0]) for _ in range(width)]
    # a gradient of 0 needs eps, a tiny one the right eps; unlike sizes tell moments apart
    gradients = [
        [generator.choice([-4.0, -1.0, 0.0, 1e-7, 0.5, 2.0]) for _ in range(width)]
        for _ in range(num_steps)
    ]
    lr, weight_decay = generator.choice([0.1, 0.5]), generator.choice([0.0, 0.2, 1.0])
    weight, gradients = (torch.tensor(x, dtype=torch.float64) for x in (weight, gradients))
    return weight, gradients, lr, weight_decay


def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise ValueError(f"{type(optimizer).__name__} does all of it; write the update out")


def take_steps(
    step: Callable, weight: Tensor, gradients: Tensor, lr: float, weight_decay: float
) -> Named:
    """The weight after each step, where no optimizer of PyTorch may take one."""
    state: dict[str, Any] = {}
    # what has a default is left out: the notebook leaves it out, too
    options = [weight_decay] if weight_decay else []
    found, hook = Named(), register_optimizer_step_pre_hook(refuse_step)
    try:
        for number, gradient in enumerate(gradients, start=1):
            # copies, since a step may change what it is given
            given = weight.clone(), gradient.clone()
            found[f"step {number}"] = weight = step(*given, state, lr, *options).clone()
    finally:
        hook.remove()
    return found


@exercise("warm-up", draw_gradients, harness=take_steps)
def adamw_step(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], lr: float, weight_decay: float = 0.0
) -> Tensor:
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    step = state["step"] = state.get("step", 0) + 1
    mean = state["mean"] = beta1 * state.get("mean", 0) + (1 - beta1) * gradient
    square = state["square"] = beta2 * state.get("square", 0) + (1 - beta2) * gradient**2
    mean_hat = mean / (1 - beta1**step)
    square_hat = square / (1 - beta2**step)
    return weight - lr * weight_decay * weight - lr * mean_hat / (square_hat.sqrt() + eps)


adamw_step.mistakes = """
beta1, beta2, eps = 0.9, 0.95, 1e-8 =>
    beta1, beta2, eps, gradient = 0.9, 0.95, 1e-8, gradient + weight_decay * weight
    && lr * weight_decay * weight - => | the decay is added to the gradient, as in Adam with L2;
    AdamW shrinks the weight itself and leaves the moments alone
mean / (1 - beta1**step) => mean && square / (1 - beta2**step) => square
    | the bias correction is missing; divide the moments by 1 - beta**step
mean_hat = mean => mean_hat = state["mean"] = mean
    && square_hat = square => square_hat = state["square"] = square
    | the corrected moments are kept for the next step; keep the uncorrected ones
step = state["step"] = state.get("step", 0) + 1 =>
    step = state.get("step", 0); state["step"] = step + 1
    | steps are counted from 0, which makes 0 / 0 of the first; count from 1
square_hat.sqrt() + eps => square_hat + eps
    | the root is missing; divide by the root of the second moment
lr * weight_decay * weight => weight_decay * weight
    | the decay lacks the learning rate; shrink by 1 - lr * weight_decay
"""


# The loop


def draw_training(generator: random.Random, size: int) -> tuple:
    def draws(count: int) -> list[float]:
        return [round(generator.gauss(0, 1), 1) for _ in range(count)]

    num_steps, accumulate, width = 2 + size // 3, generator.randint(1, 3), 1 + size // 5
    batches = Batches()
    for _ in range(num_steps * accumulate):
        x = torch.tensor([draws(width) for _ in range(BATCH_POINTS)], dtype=torch.float64)
        batches.append((x, torch.tensor(draws(BATCH_POINTS), dtype=torch.float64)))
    rates = [round(generator.uniform(0.02, 0.3), 2) for _ in range(num_steps)]
    return draws(width), batches, rates, accumulate, generator.choice([0.5, 1.0, 9.0])


def heavy_ball(weight: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> Tensor:
    """An update rule that shows a gradient of the wrong size, and whose state it is."""
    if "mean" in state and state["mean"].shape != weight.shape:
        raise ValueError("the state is that of another weight; each has a state of its own")
    state["mean"] = 0.5 * state.get("mean", 0) + gradient
    return weight - lr * state["mean"]


def run_loop(
    train: Callable,
    start: list[float],
    batches: Batches,
    rates: list[float],
    accumulate: int,
    max_norm: float,
) -> Named:
    """Run a loop; return what it reports of each update, and its last weights."""
    weights = {
        "slope": torch.tensor(start, dtype=torch.float64, requires_grad=True),
        "offset": torch.zeros((), dtype=torch.float64, requires_grad=True),
    }
    reports: list[tuple[float, float]] = []

    def on_step(loss: float, norm: float) -> None:
        if torch.is_tensor(loss) or torch.is_tensor(norm):
            raise TypeError("on_step must be called with numbers, got a tensor; use .item()")
        reports.append((loss, norm))

    # what has a default is left out: the notebook leaves it out, too
    options = [accumulate, max_norm]
    while options and options[-1] == 1:
        options.pop()
    train(weights, ToyLoss(), iter(batches), rates, heavy_ball, on_step, *options)
    losses, norms = torch.tensor(reports, dtype=torch.float64).reshape(-1, 2).unbind(1)
    found = Named({"calls of on_step": len(reports), "losses": losses, "norms": norms})
    return Named(found | {name: weight.detach() for name, weight in weights.items()})


@exercise("core", draw_training, harness=run_loop, trials=30)
def train(
    weights: dict[str, Tensor],
    loss_of: Callable,
    batches: Iterator[tuple[Tensor, Tensor]],
    rates: Iterable[float],
    update: Callable,
    on_step: Callable[[float, float], None],
    accumulate: int = 1,
    max_norm: float = 1.0,
) -> None:
    states: dict[str, dict] = {name: {} for name in weights}
    for rate in rates:
        total = 0.0
        for _ in range(accumulate):
            x, y = next(batches)
            loss = loss_of(weights, x, y) / accumulate  # forward
            loss.backward()  # backward
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)  # clip
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(update(weight, weight.grad, states[name], rate))  # update
                weight.grad = None  # clear
        on_step(total, norm.item())


train.mistakes = """
weight.grad = None => pass
    | gradients are never cleared, so each step also follows those of all steps before
loss_of(weights, x, y) / accumulate => loss_of(weights, x, y)
    | losses and gradients of the small batches are added up but not divided by their number
x, y = next(batches) => x, y = next(batches); [setattr(w, "grad", None) for w in weights.values()]
    | gradients are cleared before each small batch, so only those of the last one are left
states[name], rate => {}, rate
    | every update begins with an empty state; make the states once, before the loop
total += loss.item() => total += loss.item();
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)
    && norm = torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)  # clip => pass
    | gradients are clipped after each small batch; clip once, their mean
weight.copy_(update(weight, weight.grad, states[name], rate)) =>
    weight = update(weight, weight.grad, states[name], rate)
    | `weight = …` gives the new tensor a name, and the one in `weights` stays as it was; write
    weight.copy_(…)
"""


# The bits of a story


def draw_choices(generator: random.Random, size: int) -> tuple:
    choices = []
    for _ in range(generator.randint(0, 1 + size // 2)):
        options = generator.choices(["she", "he", "Zip", "cave"], k=generator.randint(1, 12))
        choices.append((options, generator.choice(options)))
    return (choices,)


@exercise("optional", draw_choices)
def story_bits(choices: Sequence[tuple[list, Any]]) -> float:
    return sum(math.log2(len(options) / options.count(shown)) for options, shown in choices)


story_bits.mistakes = """
math.log2 => math.log | these are nats; bits need log2
options.count(shown) => 1 | every side counts as the only one that would have shown this
len(options) / options.count(shown) => len(set(options))
    | every different text counts as equally likely; count the sides that show the same
len(options) => 256 | each die has 256 sides; these dice have any number, so take len(options)
sum(math.log2 => sum(-math.log2
    | the sign is wrong; what is certain has 0 bits, and all else more
"""


# Broken runs


def no_inputs(generator: random.Random, size: int) -> tuple:
    return ()


def swapped(one: str, other: str) -> dict[str, str]:
    """The right answer but for two letters, which have each other's faults."""
    return FAULTS | {one: FAULTS[other], other: FAULTS[one]}


def describe_diagnosis(yours: Any, expected: Mapping[str, str]) -> str:
    """Return how many runs are named right, and no word on which."""
    if not isinstance(yours, Mapping):
        return f"it returned {yours!r}; return a dict from each run to its fault"
    right = sum(yours.get(letter) == fault for letter, fault in expected.items())
    parts = [f"{right} of {len(expected)} right"]
    if missing := ", ".join(str(letter) for letter in expected if letter not in yours):
        parts.append(f"missing: {missing}")
    if strange := ", ".join(repr(letter) for letter in yours if letter not in expected):
        parts.append(f"no such run: {strange}")
    if twice := ", ".join(f for f in expected.values() if list(yours.values()).count(f) > 1):
        parts.append(f"named more than once: {twice}")
    if unknown := ", ".join(str(f) for f in yours.values() if f not in expected.values()):
        parts.append(f"unknown fault: {unknown}")
    return "; ".join(parts)


@exercise("core", no_inputs, trials=1, describe=describe_diagnosis)
def diagnose() -> dict[str, str]:
    return dict(FAULTS)


diagnose.mistakes = """
dict(FAULTS) => swapped("A", "D")
    | A and D are mixed up: one of them knows a single batch by heart, and held-out text surprises
    it more and more
dict(FAULTS) => swapped("B", "C")
    | B and C are mixed up: one learns as usual and then stops, the other never gets going
dict(FAULTS) => swapped("E", "F")
    | E and F are mixed up: one was odd before its first update, see the attention
dict(FAULTS) => swapped("C", "E")
    | C and E are mixed up: compare their largest gradient norms, and when they come
dict(FAULTS) => swapped("C", "F")
    | C and F are mixed up: one was odd before its first update, see the attention
dict(FAULTS) => swapped("B", "E")
    | B and E are mixed up: one learns as usual and then stops, in the other all gradient norms are
    too large
"""


# The same hash


def draw_runs(generator: random.Random, size: int) -> tuple:
    return MakeRun(generator.randrange(1000)), generator.randint(1, size), generator.randint(1, 9)


def interrupt(resume: Callable, make_run: MakeRun, before: int, after: int) -> Any:
    """The weights, refused where no second run goes on from where the first one was."""
    weights = resume(make_run, before, after)
    if len(make_run.made) < 2:
        raise ValueError("call make_run() twice; the second run goes on from what was saved")
    first, *others = (TRAINED.get(run, 0) for run in make_run.made)
    if first > before + 1:
        raise ValueError(f"the first run was trained for {first} steps; it gets {before} + 1")
    if max(others) > after:
        raise ValueError(
            f"the second run was trained for {max(others)} steps; the first {before} are saved "
            f"already, and it goes on for {after}"
        )
    return weights


@exercise("optional", draw_runs, harness=interrupt)
def resume(make_run: Callable[[], ToyRun], before: int, after: int) -> Tensor:
    first = make_run()
    first.train(before)
    saved: dict[str, Any] = {
        "weights": first.weights.clone(),
        "mean": first.mean.clone(),
        "square": first.square.clone(),
        "step": first.step,
        "generator": first.generator.getstate(),
        "order": list(first.order),
    }
    first.train(1)

    second = make_run()
    second.weights, second.step = saved["weights"], saved["step"]
    second.mean, second.square = saved["mean"], saved["square"]
    second.generator.setstate(saved["generator"])
    second.order = saved["order"]
    second.train(after)
    return second.weights


resume.mistakes = """
second.generator.setstate(saved["generator"]) => pass && second.order = saved["order"] => pass
    | only the weights, the moments and the step come back; the run also draws random numbers and
    has a place in its data
second.generator.setstate(saved["generator"]) => pass
    | the generator starts anew: the next epoch is shuffled as the first one was
second.order = saved["order"] => pass
    | the rest of this epoch is lost, and examples come again that were seen
saved["weights"], saved["step"] => saved["weights"], 0
    | the step is 0 again, which raises the learning rate and repeats the bias correction
saved: dict[str, Any] = { => saved = dict(vars(first)) or {
    && second.generator.setstate(saved["generator"]) => second.generator = saved["generator"]
    | nothing is copied: tensors, generator and order are those of the run, which goes on and
    changes them
second.generator.setstate(saved["generator"]) => second.generator = first.generator
    | both runs share a generator, and the lost step has used it; save `getstate()`
"""


# Top-p


def draw_probabilities(generator: random.Random, size: int) -> tuple:
    count = 2 + size // 3
    weights = generator.sample(range(1, 4 * count), count)
    # now and then most are equally likely
    if generator.random() < 0.2:
        weights = [weights[0]] * (count - 1) + [weights[1]]
    # over a power of two no sum is rounded, and that of all tokens is 1
    total = 1 << (sum(weights) - 1).bit_length()
    weights[weights.index(max(weights))] += total - sum(weights)
    sums = [partial / total for partial in running_sums(sorted(weights, reverse=True))]
    # The likeliest alone reaches top_p now and then, but not at first: a set without it would be
    # empty, and 0 / 0 tells a reader little.
    rank = generator.randrange(1 if size < 4 else 0, count)
    lower = sums[rank - 1] if rank else 0.0
    top_p = round(generator.choice([1.0, (lower + sums[rank]) / 2, (lower + sums[rank]) / 2]), 4)
    # now and then the sum is top_p to the bit
    if generator.random() < 0.2:
        top_p = sums[rank]
    return torch.tensor(weights, dtype=torch.float64) / total, top_p


def filtered(attempt: Callable, probabilities: Tensor, top_p: float) -> Any:
    """The result, in which equally likely tokens may change places.

    Raises:
        ValueError: the probabilities that are given were changed.
    """
    given = probabilities.clone()
    result = attempt(given, top_p)
    if not torch.equal(given, probabilities):
        raise ValueError("it changes the probabilities that are given; change a copy")
    if isinstance(result, Tensor) and result.shape == probabilities.shape:
        for value in probabilities.unique():
            tied = probabilities == value
            result[tied] = result[tied].sort(descending=True).values
    return result


@exercise("warm-up", draw_probabilities, harness=filtered)
def top_p_filter(probabilities: Tensor, top_p: float) -> Tensor:
    ranked, ids = probabilities.sort(descending=True)
    before = ranked.cumsum(0) - ranked
    ranked[before >= top_p] = 0
    result = torch.zeros_like(probabilities)
    result[ids] = ranked / ranked.sum()
    return result


top_p_filter.mistakes = """
before >= top_p => ranked.cumsum(0) > top_p
    | cumsum <= top_p drops the token that crosses; keep where the sum of those before is below
    top_p
before >= top_p => ranked.cumsum(0) >= top_p
    | cumsum < top_p drops the token that crosses; keep where the sum of those before is below
    top_p
before >= top_p => ranked < ranked[before < top_p][-1]
    | tokens as likely as the last one needed are kept, too; keep only as many as reach top_p
before >= top_p => before > top_p
    | one token too many is kept where the sum is exactly top_p, which is reached then
 / ranked.sum() => | the probabilities kept do not sum to 1; divide them by their sum
result[ids] = => result =
    | the result is left in sorted order; each probability belongs to its own id
"""


# The KV cache


def draw_prompt(generator: random.Random, size: int) -> tuple:
    model = ToyDecoder(generator.randrange(1000), generator.randint(1, 3), 2 * size)
    prompt = [generator.randrange(40) for _ in range(1 + size // 3)]
    return model, prompt, 1 + size // 2


@exercise("optional", draw_prompt)
def decode(model: ToyDecoder, prompt: Sequence[int], count: int) -> list[int]:
    tokens, keys, values = list(prompt), [], []
    for position in range(len(prompt) + count - 1):
        q, k, v = model.qkv(tokens[position], position)
        keys.append(k)
        values.append(v)
        scores = (torch.stack(keys) * q).sum(-1) / math.sqrt(q.shape[-1])
        weights = scores.softmax(dim=0)
        out = (weights[..., None] * torch.stack(values)).sum(0)
        if position >= len(prompt) - 1:
            tokens.append(model.next_token(out))
    return tokens[len(prompt) :]


decode.mistakes = """
 / math.sqrt(q.shape[-1]) => | the scores are not divided by the root of head_dim
dim=0 => dim=1 | the softmax goes over heads; it goes over positions
range(len(prompt) + count - 1) => range(len(prompt) - 1, len(prompt) + count - 1)
    | the prompt's keys and values but the last are missing from the cache
tokens, keys, values = list(prompt) =>
    prompt = [*prompt, prompt[-1]]; tokens, keys, values = list(prompt)
    | the prompt's last token is read a second time, at the next position; its first output already
    gives a new token
qkv(tokens[position], position) => qkv(tokens[position], position + 1)
    | positions are counted from 1; they count from 0
weights = scores => scores[1:] = -math.inf; weights = scores
    | all attend to position 0 alone, as with `is_causal=True` and one query; no mask is needed
"""
