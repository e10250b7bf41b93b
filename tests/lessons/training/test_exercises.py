"""The exercises of notebook 03 against independent answers; their mistakes: test_exercise.py."""

import pytest
import torch

from lib.lessons.exercise import NOT_ATTEMPTED, verdict
from lib.lessons.training.broken import FAULTS
from lib.lessons.training.exercises import (
    ADAMW_STEPS,
    BROKEN_RUNS,
    BUDGET_GOAL,
    DECODE,
    LOOP,
    PLAIN_SETTINGS,
    RESUME,
    TOP_P,
    interrupted,
    rounded,
    settings_verdict,
)
from lib.lessons.training.toys import ToyDecoder, loss_on_budget

# the first one in a process loads PyTorch's compiler, which can take longer than a check waits
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def adamw(weight, gradients, lr, weight_decay):
    """PyTorch's, as a reader would not write it."""
    parameter = torch.nn.Parameter(weight.clone())
    settings = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def train(model, batches, rates, accumulate, max_norm):
    """The gradients of the batches of a step in a list, by hand."""
    losses = []
    for step, rate in enumerate(rates):
        found, gradients = [], []
        for x, y in batches[step * accumulate : (step + 1) * accumulate]:
            found.append(model.loss(x, y))
            gradients += torch.autograd.grad(found[-1], model.parameters())
        gradient = torch.stack(gradients).mean(0)
        with torch.no_grad():
            model.weight -= rate * gradient * min(1, max_norm / (gradient.norm().item() + 1e-6))
        losses.append(torch.stack(found).mean().item())
    return losses


def resume(make_run, before, after):
    """The whole run at once."""
    run = make_run()
    run.train(before + after)
    return run.weights


def decode(model, prompt, count):
    """Attention over the whole text for each new token, from the model's tables."""
    tokens = list(prompt)
    for _ in range(count):
        rows = [model.table[token].roll(place, dims=-1) for place, token in enumerate(tokens)]
        q, k, v = torch.stack(rows, dim=2).unbind()  # (heads, positions, head_dim)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, -1]
        tokens.append(model.next_token(out))
    return tokens[len(prompt) :]


def top_p_filter(probabilities, top_p):
    """Token by token, the likeliest first, until their sum reaches top_p."""
    chosen = torch.zeros_like(probabilities)
    for token in sorted(range(len(probabilities)), key=lambda token: -probabilities[token]):
        if chosen.sum() < top_p:
            chosen[token] = probabilities[token]
    return chosen / chosen.sum()


@pytest.mark.parametrize(
    ("exercise", "independent"),
    [
        (ADAMW_STEPS, adamw),
        (LOOP, rounded(train)),
        (RESUME, resume),
        (TOP_P, top_p_filter),
        (DECODE, decode),
    ],
    ids=["adamw", "train", "resume", "top_p", "decode"],
)
def test_an_independent_answer_is_right(exercise, independent):
    assert verdict(exercise, independent, seed=0).startswith("right")


def test_a_token_that_is_computed_again_is_refused():
    model = ToyDecoder(0, 1, 4)
    model.qkv(3, 0)
    with pytest.raises(ValueError, match="position 0 was computed before; keep its key and value"):
        model.qkv(3, 0)


def train_on_joined_batches(model, batches, rates, accumulate, max_norm):
    """All batches of a step as one, for which the memory of the story is too small."""
    steps = range(0, len(batches), accumulate)
    joined = [[torch.cat(part) for part in zip(*batches[i : i + accumulate])] for i in steps]
    return train(model, joined, rates, 1, max_norm)


@pytest.mark.parametrize(
    ("answer", "described"),
    [
        (dict.fromkeys(FAULTS, "same batch"), "  1 of 6 right"),
        (
            {"A": "same batch", "B": "bad luck", "G": "same batch"},
            "  1 of 6 right; missing: C, D, E, F; no such run: G; unknown fault: bad luck",
        ),
        ("A", "  it returned 'A'; return a dict from letters to faults"),
    ],
    ids=["one for all", "others", "no dict"],
)
def test_a_wrong_diagnosis_does_not_tell_the_right_one(answer, described):
    assert verdict(BROKEN_RUNS, lambda: answer).splitlines()[1:] == [described]


def losses_as_tensors(*arguments):
    return [torch.tensor(loss) for loss in LOOP.solve(*arguments).tolist()]


@pytest.mark.parametrize(
    ("exercise", "attempt", "words"),
    [
        (LOOP, rounded(train_on_joined_batches), "points do not fit, only those of the 3 of one"),
        (LOOP, rounded(losses_as_tensors), "make it a number with .item()"),
        (RESUME, interrupted(resume), "raised ValueError: call make_run() twice"),
    ],
    ids=["joined batches", "tensors", "no interruption"],
)
def test_what_is_not_what_was_asked_for_is_told(exercise, attempt, words):
    assert words in verdict(exercise, attempt)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 8}, "not yet: return a dict with the keys batch_size, learning_rate"),
        (PLAIN_SETTINGS | {"batch_size": 0}, "not yet: batch_size must be between 1 and 512"),
        (PLAIN_SETTINGS | {"warmup_steps": 100}, "not yet: 512 sequences are 16 steps at this"),
        (PLAIN_SETTINGS, "not yet: held-out loss 4."),
        (PLAIN_SETTINGS | {"learning_rate": 1e4}, "not yet: held-out loss"),
        (PLAIN_SETTINGS | {"batch_size": 4, "learning_rate": 0.01}, "right: held-out loss 2."),
    ],
)
def test_settings_are_judged_by_the_loss_that_they_reach(settings, message):
    assert settings_verdict(lambda: settings).startswith(message)


def test_the_goal_of_the_budget_lies_between_plain_settings_and_good_ones():
    assert loss_on_budget(PLAIN_SETTINGS) > BUDGET_GOAL + 1

    def stub():
        raise NotImplementedError

    assert settings_verdict(stub) == NOT_ATTEMPTED
