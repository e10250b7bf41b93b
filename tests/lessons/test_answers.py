"""Answers to exercises as readers write them: right in another way, wrong in an unforeseen one."""

import contextlib
import functools
import importlib
from pathlib import Path

import pytest
import torch

from lib.lessons import exercise
from lib.lessons.exercise import verdict
from tests.lessons.answers.table import ANSWERS
from tests.lessons.interpreter import no_overflow_checks
from tests.lessons.test_exercise import CHECKED, TOPICS

FILES = {path.stem for path in (Path(__file__).parent / "answers").glob("*.py")}
# without Triton, which is for Linux, some lessons are not there
for lesson in sorted(FILES & TOPICS.keys()):
    importlib.import_module(f"tests.lessons.answers.{lesson}")


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_an_answer_is_right_or_fails_for_its_own_reason(answer):
    # readers run right answers with these checks
    with contextlib.nullcontext() if answer.is_right else no_overflow_checks():
        text = verdict(answer.exercise, answer.attempt, seed=0)
    assert text.startswith("right" if answer.is_right else "not yet")
    assert answer.words in text
    # what a named mistake finds needs no answer here
    assert "It looks as if" in answer.words or "It looks as if" not in text


GPU_KERNELS = {
    "triton": ("copy", "add_bias", "transpose", "row_sums", "softmax"),
    "flash_attention": ("flash_forward", "causal_forward", "backward_queries", "backward_keys"),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lesson", "name"), [(lesson, name) for lesson, names in GPU_KERNELS.items() for name in names]
)
def test_compiled_kernels_pass_too(lesson, name):
    triton = pytest.importorskip("triton")
    kernel = triton.jit(getattr(TOPICS[lesson], name).solve)
    assert TOPICS[lesson].take(kernel) is kernel


class Strange:
    """An object that can be neither compared nor shown."""

    def __eq__(self, other):
        raise ValueError("no comparison")

    __hash__ = None

    def __repr__(self):
        raise ValueError("no text")


def fails_strangely(*given):
    raise Exception(Strange())


STRANGE = {
    "an object": lambda *given: Strange(),
    "objects in a list": lambda *given: [Strange(), {"a": Strange()}],
    "complex numbers": lambda *given: torch.zeros(3, dtype=torch.cfloat),
    "a sparse tensor": lambda *given: torch.eye(3).to_sparse(),
    "a tensor without numbers": lambda *given: torch.zeros(3, device="meta"),
    "a dict of tensors": lambda *given: {"a": torch.ones(2), "b": [torch.ones(3)]},
    "a generator": lambda *given: (value for value in given),
    "a function": lambda *given: len,
    "three of them": lambda *given: (torch.ones(2), None, Strange()),
    "an error without text": fails_strangely,
    "the end of the kernel": lambda *given: exit(),
    "another number of arguments": lambda: None,
    "no function at all": 42,
    "its input": lambda given=None, *_: given,
    "a partial function": functools.partial(max, 3),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_never_raises(name, monkeypatch):
    # the first input will do
    monkeypatch.setattr(exercise, "_recognize", lambda *given: None)
    for what, attempt in STRANGE.items():
        text = verdict(CHECKED[name], attempt)
        # one copies its input
        assert text.startswith("not yet") or (name, what) == ("triton.copy", "its input"), what
