"""Exercises of notebook 03: AdamW, the loop, diagnosis, resuming, top-p, a KV cache, a budget."""

from __future__ import annotations

import functools
import math
import numbers
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lib.lessons.calls import call
from lib.lessons.exercise import (
    NOT_ATTEMPTED,
    TIME_LIMIT,
    Exercise,
    check,
    edited,
    name_of,
    report,
    trouble_of,
)
from lib.lessons.training.broken import FAULTS
from lib.lessons.training.toys import (
    BATCH_POINTS,
    BUDGET,
    TRAINED,
    Batches,
    MakeRun,
    ToyDecoder,
    ToyModel,
    ToyRun,
    loss_on_budget,
)

# 1. AdamW


def _draw_adamw(generator: random.Random, size: int) -> tuple:
    width, num_steps = 1 + size // 5, 1 + size // 3
    weight = [generator.choice([-3.0, -2.0, 2.0, 3.0]) for _ in range(width)]
    # a gradient of 0 needs eps, a tiny one the right eps; unlike sizes tell moments apart
    gradients = [
        [generator.choice([-4.0, -1.0, 0.0, 1e-7, 0.5, 2.0]) for _ in range(width)]
        for _ in range(num_steps)
    ]
    lr, weight_decay = generator.choice([0.1, 0.5]), generator.choice([0.0, 0.2, 1.0])
    kind = torch.float64
    return torch.tensor(weight, dtype=kind), torch.tensor(gradients, dtype=kind), lr, weight_decay


def adamw(weight: Tensor, gradients: Tensor, lr: float, weight_decay: float) -> Tensor:
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        weight = weight - lr * weight_decay * weight
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        mean_hat = mean / (1 - beta1**step)
        square_hat = square / (1 - beta2**step)
        weight = weight - lr * mean_hat / (square_hat.sqrt() + eps)
    return weight


ADAMW_STEPS = Exercise(
    adamw,
    _draw_adamw,
    {
        "the decay is added to the gradient, as in Adam with L2; "
        "AdamW shrinks the weight itself and leaves the moments alone": (
            "weight = weight - lr * weight_decay * weight",
            "gradient = gradient + weight_decay * weight",
        ),
        "the bias correction is missing; divide the moments by 1 - beta**step": (
            "mean / (1 - beta1**step)\n        square_hat = square / (1 - beta2**step)",
            "mean\n        square_hat = square",
        ),
        "only the mean is corrected; the mean of squares starts at 0 too": (
            "square / (1 - beta2**step)",
            "square",
        ),
        "only the mean of squares is corrected; the mean starts at 0 too": (
            "mean / (1 - beta1**step)",
            "mean",
        ),
        "the corrected moments are kept for the next step; keep the uncorrected ones": (
            "        weight = weight - lr * mean_hat",
            "        mean, square = mean_hat, square_hat\n        weight = weight - lr * mean_hat",
        ),
        "1 - beta is forgotten; new means are beta * old + (1 - beta) * new": (
            "(1 - beta1) * gradient\n        square = beta2 * square + (1 - beta2) * gradient**2",
            "gradient\n        square = beta2 * square + gradient**2",
        ),
        "beta2 is 0.999; here it is 0.95": ("0.95", "0.999"),
        "steps are counted from 0, where the correction divides by 0; the first step is 1": (
            "start=1",
            "start=0",
        ),
        "the update is added; the step goes against the gradient, so subtract it": (
            "weight - lr * mean_hat",
            "weight + lr * mean_hat",
        ),
        "the decay lacks the learning rate; shrink by 1 - lr * weight_decay": (
            "lr * weight_decay * weight",
            "weight_decay * weight",
        ),
        "the decay lacks the weight; subtract lr * weight_decay * weight": (
            "lr * weight_decay * weight",
            "lr * weight_decay",
        ),
        # the decay then shrinks the update too
        "the decay comes after the update; it shrinks the weight as it was before": (
            "lr * mean_hat",
            "(1 - lr * weight_decay) * lr * mean_hat",
        ),
        "eps is missing; where all gradients were 0, that is 0 / 0": (" + eps", ""),
        "eps is 1e-6; here it is 1e-8, which counts where gradients are tiny": ("1e-8", "1e-6"),
        "eps is added inside the root; add it to the root": (
            "square_hat.sqrt() + eps",
            "(square_hat + eps).sqrt()",
        ),
        "eps is added to a root that is not corrected yet; correct the mean of squares first": (
            "mean_hat / (square_hat.sqrt() + eps)",
            "mean_hat * (1 - beta2**step) ** 0.5 / (square.sqrt() + eps)",
        ),
        "the root is missing; divide by the root of the mean of squares": (".sqrt()", ""),
        "this is the square of the mean; take the mean of the squares": (
            "square_hat = square",
            "square_hat = mean**2",
        ),
        "the moments start anew in each step; keep them from one step to the next": (
            "        weight = weight - lr * weight_decay",
            "        mean, square, step = 0, 0, 1\n        weight = weight - lr * weight_decay",
        ),
    },
)


# 2. The loop


def _draw_training(generator: random.Random, size: int) -> tuple:
    def draws(count: int) -> list[float]:
        return [round(generator.gauss(0, 1), 1) for _ in range(count)]

    steps, accumulate, width = 2 + size // 3, generator.randint(1, 3), 1 + size // 5
    batches = Batches()
    for _ in range(steps * accumulate):
        x = torch.tensor([draws(width) for _ in range(BATCH_POINTS)], dtype=torch.float64)
        batches.append((x, torch.tensor(draws(BATCH_POINTS), dtype=torch.float64)))
    rates = [round(generator.uniform(0.02, 0.3), 2) for _ in range(steps)]
    return ToyModel(draws(width)), batches, rates, accumulate, generator.choice([0.5, 2.0, 9.0])


def train(
    model: ToyModel,
    batches: Sequence[tuple[Tensor, Tensor]],
    rates: Sequence[float],
    accumulate: int,
    max_norm: float,
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = []
    for step, rate in enumerate(rates):
        optimizer.zero_grad()
        total = 0.0
        for x, y in batches[step * accumulate : (step + 1) * accumulate]:
            loss = model.loss(x, y) / accumulate
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(total)
    return losses


def rounded(train: Callable) -> Callable:
    """Return `train` with its list of losses as a tensor, which is compared up to rounding."""

    @functools.wraps(train)
    def run(*arguments: Any) -> Any:
        losses = train(*arguments)
        if not isinstance(losses, (list, tuple)):
            return losses
        if any(map(torch.is_tensor, losses)):
            raise TypeError("a loss in the list is a tensor; make it a number with .item()")
        return torch.tensor(losses)

    return run


LOOP_MISTAKES = {
    "gradients are never cleared, so each step also follows those of all steps before": (
        "        optimizer.zero_grad()\n",
        "",
    ),
    "gradients are cleared before each small batch, so only the last one counts": (
        "            loss.backward()",
        "            optimizer.zero_grad()\n            loss.backward()",
    ),
    "no loss is divided by accumulate, so losses and gradients are sums; divide before backward": (
        "model.loss(x, y) / accumulate",
        "model.loss(x, y)",
    ),
    "gradients of the small batches are added up but not divided by their number": (
        "loss.backward()",
        "(loss * accumulate).backward()",
    ),
    "nothing is clipped": (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        "pass",
    ),
    "each number of the gradient is clipped by itself; clip their norm, with clip_grad_norm_": (
        "clip_grad_norm_",
        "clip_grad_value_",
    ),
    "each small batch is clipped by itself; clip once, when all gradients are there": (
        "total += loss.item()\n        torch",
        "total += loss.item()\n            torch",
    ),
    "the learning rate is set after the update, so each step takes that of the step before": (
        'group["lr"] = rate',
        'group["lr"] = rates[step - 1] if step else 0.0',
    ),
    "there is an update for each small batch; there is one for each learning rate": (
        "total += loss.item()",
        "total += loss.item()\n            torch.nn.utils.clip_grad_norm_(model.parameters(), "
        'max_norm)\n            optimizer.param_groups[0]["lr"] = rate\n'
        "            optimizer.step()\n            optimizer.zero_grad()",
    ),
    "every step takes the first batches again": (
        "batches[step * accumulate : (step + 1) * accumulate]",
        "batches[:accumulate]",
    ),
    "the losses are sums over the small batches; return their mean": (
        "losses.append(total)",
        "losses.append(total * accumulate)",
    ),
    "each loss is that of the last small batch alone; return the mean of all": (
        "losses.append(total)",
        "losses.append(loss.item() * accumulate)",
    ),
    "every update has the first learning rate; each has its own": (
        'group["lr"] = rate',
        'group["lr"] = rates[0]',
    ),
    "the learning rate is never set, so no weight moves": ('group["lr"] = rate', "pass"),
    "this is AdamW; the task asks for SGD": ("torch.optim.SGD", "torch.optim.AdamW"),
    "the losses are computed after the update; return those of the forward passes before it": (
        "losses.append(total)",
        "pieces = batches[step * accumulate :][:accumulate]\n"
        "        losses.append(sum(model.loss(*piece).item() for piece in pieces) / accumulate)",
    ),
    "the sum of the gradients is clipped, and divided afterwards; divide first": (
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        "        model.weight.grad *= accumulate\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
        "        model.weight.grad /= accumulate",
    ),
}
LOOP = Exercise(
    rounded(train),
    _draw_training,
    {name: rounded(edited(train, *edit)) for name, edit in LOOP_MISTAKES.items()},
    "core",
    trials=30,
)


# 3. The bits of a story


def _draw_choices(generator: random.Random, size: int) -> tuple:
    choices = []
    for _ in range(generator.randint(0, 1 + size // 2)):
        options = generator.choices(["she", "he", "Zip", "cave"], k=generator.randint(1, 12))
        choices.append((options, generator.choice(options)))
    return (choices,)


def story_bits(choices: Sequence[tuple[list, Any]]) -> float:
    return sum(math.log2(len(options) / options.count(shown)) for options, shown in choices)


STORY_BITS = Exercise(
    story_bits,
    _draw_choices,
    {
        "these are nats; bits need log2": ("math.log2", "math.log"),
        "every side counts as the only one that would have shown this": (
            "options.count(shown)",
            "1",
        ),
        "every different text counts as equally likely; count the sides that show the same": (
            "len(options) / options.count(shown)",
            "len(set(options))",
        ),
        "the share is taken of the different texts; take it of all sides": (
            "len(options) /",
            "len(set(options)) /",
        ),
        "this is the number of sides that show the same; the share of them is what counts": (
            "len(options) / options.count(shown)",
            "options.count(shown)",
        ),
        "each die has 256 sides; these dice have any number, so take len(options)": (
            "len(options)",
            "256",
        ),
        "the bits of each choice are multiplied by its probability, as in an entropy; "
        "add them as they are": (
            "math.log2(",
            "options.count(shown) / len(options) * math.log2(",
        ),
        "this is what a die shows on average, its entropy; count what this throw showed": (
            "math.log2(len(options) / options.count(shown))",
            "sum(math.log2(len(options) / options.count(o)) for o in options) / len(options)",
        ),
        "the sign is wrong; what is certain has 0 bits, and all else more": (
            "sum(math.log2",
            "sum(-math.log2",
        ),
        "these are the bits of a mean choice; those of a story are the sum": (
            "for options, shown in choices)",
            "for options, shown in choices) / max(1, len(choices))",
        ),
    },
)


# 4. Broken runs


def diagnose() -> dict[str, str]:
    return dict(FAULTS)


def _swapped(*letters: str) -> Callable[[], dict[str, str]]:
    """Return the right answer but for `letters`, which pass their faults on in a ring."""
    moved = [*letters[1:], letters[0]]

    def diagnose() -> dict[str, str]:
        return FAULTS | {one: FAULTS[other] for one, other in zip(letters, moved)}

    return diagnose


def describe_diagnosis(yours: Any, expected: Mapping[str, str]) -> str:
    """Return how many runs are named right, and no word on which."""
    if not isinstance(yours, Mapping):
        return f"it returned {yours!r}; return a dict from letters to faults"
    right = sum(yours.get(letter) == fault for letter, fault in expected.items())
    parts = [f"{right} of {len(expected)} right"]
    if missing := ", ".join(letter for letter in expected if letter not in yours):
        parts.append(f"missing: {missing}")
    if strange := ", ".join(str(letter) for letter in yours if letter not in expected):
        parts.append(f"no such run: {strange}")
    if unknown := ", ".join(str(f) for f in yours.values() if f not in expected.values()):
        parts.append(f"unknown fault: {unknown}")
    return "; ".join(parts)


BROKEN_RUNS = Exercise(
    diagnose,
    lambda generator, size: (),
    {
        "A and D are mixed up: one of them knows a single batch by heart, and held-out text "
        "surprises it more and more": _swapped("A", "D"),
        "B and C are mixed up: one learns as usual and then stops, the other never gets going": (
            _swapped("B", "C")
        ),
        "E and F are mixed up: one was odd before its first update, see the attention": (
            _swapped("E", "F")
        ),
        "C and E are mixed up: compare their largest gradient norms, and when they come": (
            _swapped("C", "E")
        ),
        "C and F are mixed up: one was odd before its first update, see the attention": (
            _swapped("C", "F")
        ),
        "B and E are mixed up: one learns as usual and then stops, in the other all gradient "
        "norms are too large": _swapped("B", "E"),
    },
    "core",
    trials=1,
    describe=describe_diagnosis,
)


# 5. The same hash


def _draw_runs(generator: random.Random, size: int) -> tuple:
    return MakeRun(generator.randrange(1000)), generator.randint(1, size), generator.randint(1, 9)


def resume(make_run: Callable[[], ToyRun], before: int, after: int) -> Tensor:
    run = make_run()
    run.train(before)
    saved: dict[str, Any] = {
        "weights": run.weights.clone(),
        "mean": run.mean.clone(),
        "square": run.square.clone(),
        "step": run.step,
        "generator": run.generator.getstate(),
        "order": list(run.order),
    }
    run.train(1)

    run = make_run()
    run.weights, run.mean, run.square = saved["weights"], saved["mean"], saved["square"]
    run.step, run.order = saved["step"], saved["order"]
    run.generator.setstate(saved["generator"])
    run.train(after)
    return run.weights


def _resume_by_reference(make_run: Callable[[], ToyRun], before: int, after: int) -> Tensor:
    run = make_run()
    run.train(before)
    saved = dict(vars(run))
    run.train(1)

    run = make_run()
    vars(run).update(saved)
    run.train(after)
    return run.weights


def interrupted(resume: Callable) -> Callable:
    """Return `resume`, refused where no second run goes on from where the first one was."""

    @functools.wraps(resume)
    def run(make_run: MakeRun, before: int, after: int) -> Any:
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

    return run


RESUME = Exercise(
    resume,
    _draw_runs,
    {
        "only the weights, the moments and the step come back; the run also draws random numbers "
        "and has a place in its data": (
            'run.order = saved["step"], saved["order"]\n'
            '    run.generator.setstate(saved["generator"])',
            'run.order = saved["step"], []',
        ),
        "only the weights and the step come back, as at the start": (
            'run.weights, run.mean, run.square = saved["weights"], saved["mean"], saved["square"]\n'
            '    run.step, run.order = saved["step"], saved["order"]\n'
            '    run.generator.setstate(saved["generator"])',
            'run.weights, run.step = saved["weights"], saved["step"]',
        ),
        "the generator starts anew: the next epoch is shuffled as the first one was": (
            'run.generator.setstate(saved["generator"])',
            "pass",
        ),
        "the rest of this epoch is lost, and examples come again that were seen": (
            'saved["order"]',
            "[]",
        ),
        "the step is 0 again, which raises the learning rate and repeats the bias correction": (
            'run.step, run.order = saved["step"], saved["order"]',
            'run.order = saved["order"]',
        ),
        "the moments start at zero": (
            'run.weights, run.mean, run.square = saved["weights"], saved["mean"], saved["square"]',
            'run.weights = saved["weights"]',
        ),
        "the mean of the squares starts at zero": ('saved["square"]', "run.square"),
        "nothing is copied: tensors, generator and order are those of the run, which goes on and "
        "changes them": _resume_by_reference,
        "the tensors saved are those of the run, which goes on and changes them; clone them": (
            '"weights": run.weights.clone(),\n        "mean": run.mean.clone(),\n'
            '        "square": run.square.clone()',
            '"weights": run.weights,\n        "mean": run.mean,\n        "square": run.square',
        ),
        "the weights saved are those of the run, which goes on and changes them; clone them": (
            "run.weights.clone()",
            "run.weights",
        ),
        "the order saved is the list of the run, which goes on and shortens it; copy it": (
            "list(run.order)",
            "run.order",
        ),
        "the generator saved is that of the run, which goes on drawing; save its getstate()": (
            "    run.train(1)\n",
            '    run.train(1)\n    saved["generator"] = run.generator.getstate()\n',
        ),
        "the generator and the order saved are those of the run, which goes on; copy both": (
            "    run.train(1)\n",
            '    run.train(1)\n    saved["generator"] = run.generator.getstate()\n'
            '    saved["order"] = run.order\n',
        ),
        "the step that was lost is counted as done": (
            "    run.train(1)\n",
            "    run.train(1)\n    saved['step'] += 1\n",
        ),
    },
    "core",
)


# 6. Top-p


def _draw_top_p(generator: random.Random, size: int) -> tuple:
    count = 2 + size // 3
    weights = generator.sample(range(1, 4 * count), count)
    # over a power of two no sum is rounded, and that of all tokens is 1
    total = 1 << (sum(weights) - 1).bit_length()
    weights[weights.index(max(weights))] += total - sum(weights)
    sums = [partial / total for partial in accumulate(sorted(weights, reverse=True))]
    # The likeliest alone reaches top_p now and then, but not at first: a set without it would be
    # empty, and 0 / 0 tells a reader little.
    rank = generator.randrange(1 if size < 4 else 0, count)
    lower = sums[rank - 1] if rank else 0.0
    top_p = round(generator.choice([1.0, (lower + sums[rank]) / 2, (lower + sums[rank]) / 2]), 4)
    # now and then the sum is top_p to the bit
    if generator.random() < 0.2:
        top_p = sums[rank]
    return torch.tensor(weights, dtype=torch.float64) / total, top_p


def top_p_filter(probabilities: Tensor, top_p: float) -> Tensor:
    ranked, ids = probabilities.sort(descending=True)
    before = ranked.cumsum(0) - ranked
    ranked[before >= top_p] = 0
    result = torch.zeros_like(probabilities)
    result[ids] = ranked / ranked.sum()
    return result


TOP_P = Exercise(
    top_p_filter,
    _draw_top_p,
    {
        "cumsum <= top_p drops the token that crosses; "
        "keep where the sum of those before is below top_p": (
            "before >= top_p",
            "ranked.cumsum(0) > top_p",
        ),
        "cumsum < top_p drops the token that reaches top_p; "
        "keep where the sum of those before is below top_p": (
            "before >= top_p",
            "ranked.cumsum(0) >= top_p",
        ),
        "cumsum <= top_p drops the token that crosses, even a first one, which leaves none; "
        "keep where the sum of those before is below top_p": (
            "before >= top_p] = 0",
            "ranked.cumsum(0) > top_p] = 0\n    if not ranked.any():\n        return ranked",
        ),
        "cumsum < top_p drops the token that reaches top_p, even a first one, which leaves none; "
        "keep where the sum of those before is below top_p": (
            "before >= top_p] = 0",
            "ranked.cumsum(0) >= top_p] = 0\n    if not ranked.any():\n        return ranked",
        ),
        "one token too many is kept where the sum is exactly top_p, which is reached then": (
            "before >= top_p",
            "before > top_p",
        ),
        "one token too many is kept; stop at the one that crosses top_p": (
            "ranked[before >= top_p]",
            "ranked[1:][before[:-1] >= top_p]",
        ),
        "the probabilities kept do not sum to 1; divide them by their sum": (" / ranked.sum()", ""),
        "the probabilities kept go through another softmax; divide them by their sum": (
            "result[ids] = ranked / ranked.sum()",
            "result[ids] = torch.where(ranked > 0, ranked.exp(), 0.0)\n    result /= result.sum()",
        ),
        "the result is left in sorted order; each probability belongs to its own id": (
            "result[ids] =",
            "result =",
        ),
        "the result is ranked[ids], which permutes again; result[ids] = ranked puts values back": (
            "result[ids] = ranked / ranked.sum()",
            "result = (ranked / ranked.sum())[ids]",
        ),
        "each probability alone is compared with top_p; what counts is the sum of those before": (
            "before >= top_p",
            "ranked < top_p",
        ),
        "the tokens are sorted with the rarest first; the likeliest come first": (
            "descending=True",
            "descending=False",
        ),
        "the tokens are not sorted before they are summed": (
            "probabilities.sort(descending=True)",
            "probabilities.clone(), torch.arange(len(probabilities))",
        ),
    },
)


# 7. The KV cache


def _draw_prompt(generator: random.Random, size: int) -> tuple:
    model = ToyDecoder(generator.randrange(1000), generator.randint(1, 3), 2 * size)
    prompt = [generator.randrange(40) for _ in range(1 + size // 3)]
    return model, prompt, 1 + size // 2


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


DECODE = Exercise(
    decode,
    _draw_prompt,
    {
        "the scores are not divided by the root of head_dim": (" / math.sqrt(q.shape[-1])", ""),
        "the scores are divided by head_dim; divide by its root": (
            "math.sqrt(q.shape[-1])",
            "q.shape[-1]",
        ),
        "the softmax goes over heads; it goes over positions": ("dim=0", "dim=1"),
        "the prompt's keys and values but the last are missing from the cache": (
            "range(len(prompt) + count - 1)",
            "range(len(prompt) - 1, len(prompt) + count - 1)",
        ),
        "old tokens are computed again; keep their keys and values": (
            "        q, k, v =",
            "        if position >= len(prompt):\n            model.qkv(tokens[0], 0)\n"
            "        q, k, v =",
        ),
        "only the prompt's last token is read; those before it belong in the cache too": (
            "tokens, keys, values = list(prompt)",
            "prompt = prompt[-1:]\n    tokens, keys, values = list(prompt)",
        ),
        "the prompt's last token is computed twice; its first output already gives a new token": (
            "        q, k, v =",
            "        if position == len(prompt) - 1:\n"
            "            model.qkv(tokens[position], position)\n        q, k, v =",
        ),
        "the prompt's last token is read a second time, at the next position; "
        "its first output already gives a new token": (
            "tokens, keys, values = list(prompt)",
            "prompt = [*prompt, prompt[-1]]\n    tokens, keys, values = list(prompt)",
        ),
        "positions start at 0 again after the prompt": (
            "qkv(tokens[position], position)",
            "qkv(tokens[position], position % len(prompt))",
        ),
        "positions are counted from 1; they count from 0": (
            "qkv(tokens[position], position)",
            "qkv(tokens[position], position + 1)",
        ),
        "a token doesn't attend to itself; append its key and value before the scores": (
            "        weights =",
            "        if position:\n            scores[-1] = -math.inf\n        weights =",
        ),
        "all attend to position 0 alone, as with `is_causal=True` and one query; "
        "no mask is needed": (
            "        weights =",
            "        scores[1:] = -math.inf\n        weights =",
        ),
        "the prompt is returned too; return the new tokens": ("tokens[len(prompt) :]", "tokens"),
        "one token too many is returned": (
            "len(prompt) + count - 1)",
            "len(prompt) + count)",
        ),
        "each token sees only itself; keep the keys and values of those before": (
            "keys.append(k)\n        values.append(v)",
            "keys, values = [k], [v]",
        ),
        "the newest values are not in the cache yet when they are needed: a token sees itself": (
            "torch.stack(values)).sum(0)",
            "torch.stack([torch.zeros_like(v), *values[:-1]])).sum(0)",
        ),
    },
    "core",
)


# 8. A budget of tokens

PLAIN_SETTINGS = {
    "batch_size": 32,
    "learning_rate": 3e-3,
    "warmup_steps": 4,
    "weight_decay": 0.1,
}
BUDGET_GOAL = 2.5
BUDGET_SECONDS = 120


def settings_verdict(attempt: Callable[[], Mapping[str, float]]) -> str:
    """Return the verdict on settings: the held-out loss they reach must be below BUDGET_GOAL."""
    try:
        settings = call(attempt, (), TIME_LIMIT)
    except NotImplementedError:
        return NOT_ATTEMPTED
    if trouble := trouble_of(settings):
        return f"not yet: {trouble}"
    if not isinstance(settings, Mapping) or settings.keys() != PLAIN_SETTINGS.keys():
        return f"not yet: return a dict with the keys {', '.join(PLAIN_SETTINGS)}"
    for name, value in settings.items():
        if not (isinstance(value, numbers.Real) and math.isfinite(value)):
            return f"not yet: {name} must be a number, got {value!r}"
    if not 1 <= settings["batch_size"] <= BUDGET:
        return f"not yet: batch_size must be between 1 and {BUDGET}, got {settings['batch_size']}"
    steps = BUDGET // int(settings["batch_size"])
    if not 0 <= settings["warmup_steps"] < steps:
        return (
            f"not yet: {BUDGET} sequences are {steps} steps at this batch size; "
            f"warmup_steps must be fewer, got {settings['warmup_steps']}"
        )
    loss = call(loss_on_budget, (settings,), BUDGET_SECONDS)
    if trouble := trouble_of(loss):
        return f"not yet: {trouble}"
    if not loss < BUDGET_GOAL:
        return (
            f"not yet: held-out loss {loss:.3f} after {BUDGET} sequences; get below {BUDGET_GOAL}"
        )
    return f"right: held-out loss {loss:.3f}, below {BUDGET_GOAL}; how low can you get?"


def without_optimizers(attempt: Callable) -> Callable:
    """Return `attempt` as a function in which no optimizer of PyTorch may take a step."""

    @functools.wraps(attempt)
    def run(*arguments: Any) -> Any:
        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            raise ValueError(f"{type(optimizer).__name__} does all of it; write the update out")

        hook = register_optimizer_step_pre_hook(refuse)
        try:
            return attempt(*arguments)
        finally:
            hook.remove()

    return run


def check_adamw(attempt: Callable) -> None:
    """Check `adamw(weight (n,), gradients (steps, n), lr, weight_decay)` -> weight (n,)."""
    check(ADAMW_STEPS, without_optimizers(attempt))


def check_top_p(attempt: Callable) -> Callable:
    """Check `top_p_filter(probabilities (vocab,), top_p)` -> probabilities (vocab,)."""
    return check(TOP_P, attempt)


def check_train(attempt: Callable) -> None:
    """Check `train(model, batches, rates, accumulate, max_norm)` -> the loss before each update."""
    check(LOOP, rounded(attempt))


def check_story_bits(attempt: Callable) -> Callable:
    """Check `story_bits(choices)`: a list of (options, shown) -> bits."""
    return check(STORY_BITS, attempt)


def check_diagnose(attempt: Callable) -> None:
    """Check `diagnose()` -> letter of each broken run: its fault."""
    check(BROKEN_RUNS, attempt)


def check_resume(attempt: Callable) -> None:
    """Check `resume(make_run, before, after)` -> the weights of a run that was interrupted."""
    check(RESUME, interrupted(attempt))


def check_decode(attempt: Callable) -> None:
    """Check `decode(model, prompt, count)` -> the next `count` tokens, each projected once."""
    check(DECODE, attempt)


def check_settings(attempt: Callable) -> None:
    """Show the held-out loss that `settings()` -> dict reaches on a budget of tokens."""
    report(settings_verdict(attempt), name_of(attempt), "open")
