"""The exercises of notebook 03 against independent answers; their mistakes: test_exercise.py."""

import math
import pickle

import pytest
import torch
from torch.optim.adamw import adamw

from lib.lessons.exercise import draw_inputs, verdict
from lib.lessons.training import exercises, toys
from lib.lessons.training.broken import FAULTS
from lib.lessons.training.toys import ToyDecoder


def adamw_step(weight, gradient, state, lr, weight_decay=0.0):
    """PyTorch's for one tensor, as its optimizer calls it, with the moments changed in place."""
    for name in ("mean", "square"):
        state.setdefault(name, torch.zeros_like(weight))
    number = state.setdefault("number", torch.zeros(()))
    adamw(
        [weight],
        [gradient],
        [state["mean"]],
        [state["square"]],
        [],
        [number],
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=lr,
        weight_decay=weight_decay,
        eps=1e-8,
        maximize=False,
    )
    return weight


def train(weights, loss_of, batches, rates, update, on_step, accumulate=1, max_norm=1.0):
    """The gradients of the batches of a step in a list, by hand; new tensors in place of old."""
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


def resume(make_run, before, after):
    """The whole run at once."""
    run = make_run()
    run.train(before + after)
    return run.weights


def resume_by_pickle(make_run, before, after):
    """Everything that a run has, as bytes."""
    first, second = make_run(), make_run()
    first.train(before)
    saved = pickle.dumps(vars(first))
    first.train(1)
    vars(second).update(pickle.loads(saved))
    second.train(after)
    return second.weights


def story_bits(choices):
    """From the probability of what each throw shows."""
    shares = [
        sum(option == shown for option in options) / len(options) for options, shown in choices
    ]
    return -sum(map(math.log2, shares))


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


@pytest.mark.parametrize("independent", [adamw_step, train, story_bits, top_p_filter, decode])
@pytest.mark.parametrize("seed", range(2))
def test_an_independent_answer_is_right(independent, seed):
    exercise = getattr(exercises, independent.__name__)
    assert verdict(exercise, independent, seed=seed).startswith("right")


@pytest.mark.parametrize("seed", range(2))
def test_an_interrupted_run_has_the_weights_of_a_whole_one(seed):
    for make_run, before, after in draw_inputs(exercises.resume, seed):
        assert torch.equal(
            exercises.resume.solve(make_run, before, after), resume(make_run, before, after)
        )
    assert verdict(exercises.resume, resume_by_pickle, seed=seed).startswith("right")


def test_a_token_that_is_computed_again_is_refused():
    model = ToyDecoder(0, 1, 4)
    model.qkv(3, 0)
    with pytest.raises(ValueError, match="position 0 was computed before; keep its key and value"):
        model.qkv(3, 0)


def test_batches_that_are_joined_are_refused():
    weights = {"slope": torch.ones(2), "offset": torch.zeros(())}
    with pytest.raises(MemoryError, match="points do not fit, only those of the 3 of one batch"):
        toys.ToyLoss()(weights, torch.ones(6, 2), torch.ones(6))


@pytest.mark.parametrize(
    ("answer", "described"),
    [
        (
            dict.fromkeys(FAULTS, "same batch"),
            "  1 of 6 right; named more than once: same batch",
        ),
        (
            {"A": "same batch", "B": "bad luck", "G": "same batch"},
            "  1 of 6 right; missing: C, D, E, F; no such run: 'G'; "
            "named more than once: same batch; unknown fault: bad luck",
        ),
        ("A", "  it returned 'A'; return a dict from each run to its fault"),
    ],
    ids=["one for all", "others", "no dict"],
)
def test_a_wrong_diagnosis_does_not_tell_the_right_one(answer, described):
    assert verdict(exercises.diagnose, lambda: answer).splitlines()[1:] == [described]


def test_a_run_without_an_interruption_is_refused():
    assert "raised ValueError: call make_run() twice" in verdict(exercises.resume, resume)


def test_a_loss_that_is_a_tensor_is_refused():
    def attempt(weights, loss_of, batches, rates, update, on_step, *_):
        on_step(loss_of(weights, *next(batches)), 1.0)

    assert "must be called with numbers, got a tensor; use .item()" in verdict(
        exercises.train, attempt
    )


def test_an_answer_without_the_defaults_that_the_page_relies_on_is_not_right():
    def step(weight, gradient, state, lr, weight_decay):
        return exercises.adamw_step.solve(weight, gradient, state, lr, weight_decay)

    def loop(weights, loss_of, batches, rates, update, on_step, accumulate, max_norm):
        exercises.train.solve(
            weights, loss_of, batches, rates, update, on_step, accumulate, max_norm
        )

    for name, attempt in {"adamw_step": step, "train": loop}.items():
        assert "missing" in verdict(getattr(exercises, name), attempt)
