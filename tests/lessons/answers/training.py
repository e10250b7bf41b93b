"""Answers to the exercises of notebook 03."""

import math
import pickle

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw

from lib.lessons.training import exercises
from lib.lessons.training.broken import FAULTS
from tests.lessons.answers.table import right, wrong


@right(exercises.adamw_step)
def adamw_of_pytorch(weight, gradient, state, lr, weight_decay=0.0):
    """PyTorch's for one tensor, as its optimizer calls it, with the moments changed in place."""
    for name in ("mean", "square"):
        state.setdefault(name, torch.zeros_like(weight))
    moments = [state["mean"]], [state["square"]]
    number = state.setdefault("number", torch.zeros(()))
    betas = {"beta1": 0.9, "beta2": 0.95}
    options = {"lr": lr, "weight_decay": weight_decay, "eps": 1e-8, "maximize": False}
    adamw([weight], [gradient], *moments, [], [number], amsgrad=False, **betas, **options)
    return weight


@right(exercises.train)
def train_by_hand(weights, loss_of, batches, rates, update, on_step, accumulate=1, max_norm=1.0):
    """The gradients of the batches of a step in a list; new tensors in place of old."""
    states = [{} for _ in weights]
    for rate in rates:
        losses, gradients = [], []
        for _ in range(accumulate):
            losses.append(loss_of(weights, *next(batches)))
            gradients.append(torch.autograd.grad(losses[-1], [*weights.values()]))
        means = [torch.stack(parts).mean(0) for parts in zip(*gradients)]
        norm = torch.cat([mean.flatten() for mean in means]).norm().item()
        scale = min(1, max_norm / (norm + 1e-6))
        for name, mean, state in zip(list(weights), means, states):
            new = update(weights[name].detach(), mean * scale, state, rate)
            weights[name] = new.requires_grad_()
        on_step(torch.stack(losses).mean().item(), norm)


@right(exercises.resume)
def resume_by_pickle(make_run, before, after):
    """Everything that a run has, as bytes."""
    first, second = make_run(), make_run()
    first.train(before)
    saved = pickle.dumps(vars(first))
    first.train(1)
    vars(second).update(pickle.loads(saved))
    second.train(after)
    return second.weights


@right(exercises.story_bits)
def bits_by_probability(choices):
    """From the probability of what each throw shows."""
    shares = [
        sum(option == shown for option in options) / len(options) for options, shown in choices
    ]
    return -sum(map(math.log2, shares))


@right(exercises.decode)
def decode_without_cache(model, prompt, count):
    """Attention over the whole text for each new token, from the model's tables."""
    tokens = list(prompt)
    for _ in range(count):
        rows = [model.table[token].roll(place, dims=-1) for place, token in enumerate(tokens)]
        q, k, v = torch.stack(rows, dim=2).unbind()  # (heads, positions, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, -1]
        tokens.append(model.next_token(out))
    return tokens[len(prompt) :]


@right(exercises.top_p_filter)
def token_by_token(probabilities, top_p):
    """The likeliest first, until their sum reaches top_p."""
    chosen = torch.zeros_like(probabilities)
    for token in sorted(range(len(probabilities)), key=lambda token: -probabilities[token]):
        if chosen.sum() < top_p:
            chosen[token] = probabilities[token]
    return chosen / chosen.sum()


@right(exercises.top_p_filter)
def others_of_equally_likely_tokens(probabilities, top_p):
    return exercises.top_p_filter.solve(probabilities.flip(0), top_p).flip(0)


@wrong(exercises.top_p_filter, "it changes the probabilities that are given")
def filter_in_place(probabilities, top_p):
    probabilities.copy_(exercises.top_p_filter.solve(probabilities, top_p))
    return probabilities


@wrong(exercises.adamw_step, "AdamW does all of it; write the update out")
def adamw_in_one_call(weight, gradient, state, lr, weight_decay=0.0):
    weight = torch.nn.Parameter(weight)
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([weight], lr=lr, **options)
    weight.grad = gradient
    optimizer.step()
    return weight.detach()


# the page relies on the defaults of both
@wrong(exercises.adamw_step, "missing")
def step_without_a_default(weight, gradient, state, lr, weight_decay):
    return exercises.adamw_step.solve(weight, gradient, state, lr, weight_decay)


@wrong(exercises.train, "missing")
def train_without_defaults(weights, loss_of, batches, rates, update, on_step, accumulate, max_norm):
    given = weights, loss_of, batches, rates, update, on_step
    exercises.train.solve(*given, accumulate, max_norm)


@wrong(exercises.train, "call backward for each batch before the next one's loss")
def both_losses_at_once(weights, loss_of, batches, *given, accumulate=1, max_norm=1.0):
    sum(loss_of(weights, *next(batches)) for _ in range(2)).backward()


@wrong(exercises.train, "must be called with numbers, got a tensor; use .item()")
def loss_as_a_tensor(weights, loss_of, batches, rates, update, on_step, *_, **__):
    on_step(loss_of(weights, *next(batches)), 1.0)


@wrong(exercises.train, "the state is that of another weight; each has a state of its own")
def one_state_for_all(weights, loss_of, batches, rates, update, *given, **more):
    state = {}
    exercises.train.solve(
        weights, loss_of, batches, rates, lambda w, g, _, lr: update(w, g, state, lr), *given
    )


@wrong(exercises.resume, "call make_run() twice")
def whole_run_at_once(make_run, before, after):
    run = make_run()
    run.train(before + after)
    return run.weights


@wrong(exercises.resume, "are saved already, and it goes on for")
def trained_after_saving(make_run, before, after):
    make_run()
    return whole_run_at_once(make_run, before, after)


@wrong(exercises.resume, "the first run was trained for")
def trained_too_long(make_run, before, after):
    run, _ = make_run(), make_run()
    run.train(before + after)
    return run.weights


# a wrong diagnosis does not tell the right one
DIAGNOSES = {
    "\n  1 of 6 right; named more than once: same batch": dict.fromkeys(FAULTS, "same batch"),
    "\n  1 of 6 right; missing: C, D, E, F; no such run: 'G'; "
    "named more than once: same batch; unknown fault: bad luck": {
        "A": "same batch",
        "B": "bad luck",
        "G": "same batch",
    },
    "\n  it returned 'A'; return a dict from each run to its fault": "A",
}
for words, diagnosis in DIAGNOSES.items():
    wrong(exercises.diagnose, words)(lambda diagnosis=diagnosis: diagnosis)
