"""Each exercise of each notebook both ways, each named mistake, and how a check reports."""

import contextlib
import dataclasses
import importlib.util
import json
import linecache
import math
import re
import signal
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from lib.lessons import exercise as lessons_exercise
from lib.lessons.calls import NOT_FINISHED, call
from lib.lessons.differences import Named
from lib.lessons.exercise import NOT_ATTEMPTED, RESULTS, Exercise, check, verdict
from lib.lessons.exercise import exercise as declare
from lib.lessons.mesh import context as mesh_context
from lib.lessons.ranks import Threads
from lib.lessons.tokenizer.exercises import encode_text
from lib.lessons.tokenizer.exercises import merge_pair as merge
from lib.tokenizer.bpe import merge_pair
from tests.lessons.interpreter import no_overflow_checks
from tests.lessons.speedrun.toy import plain_on_paper, race_on_paper

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# lessons whose readers write kernels, which need Triton, which is for Linux
KERNELS = ("triton", "flash_attention")
# the room of a notebook's lesson -> its exercises
TOPICS = {
    path.parent.name: importlib.import_module(f"lib.lessons.{path.parent.name}.exercises")
    for path in sorted((ROOT / "lib/lessons").glob("*/exercises.py"))
    if path.parent.name not in KERNELS or importlib.util.find_spec("triton")
}
# with their rooms, since two lessons may give one name to exercises of their own
CHECKED = {
    f"{room}.{name}": value
    for room, topic in TOPICS.items()
    for name, value in vars(topic).items()
    if isinstance(value, Exercise)
}
pytestmark = pytest.mark.usefixtures("quick_ranks")


def exercise_cells():
    """(stub, Markdown cell behind it, lesson) of every exercise in the notebooks."""
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        for number, cell in enumerate(cells):
            if "exercise" in cell.metadata.get("tags", []):
                following = cells[number + 1].source
                lesson = path.stem.split("_", 1)[1].removesuffix("_here")
                lesson = lesson.removeprefix("pipeline_context_")
                if lesson not in TOPICS:
                    continue
                yield pytest.param(cell.source, following, lesson, id=f"{path.stem}-{number + 1}")


EXERCISES = list(exercise_cells())


def run(code: str, lesson: str) -> None:
    names = {"exercises": TOPICS[lesson], "merge_pair": merge_pair, "math": math, "torch": torch}
    if lesson == "model":
        # what the page has written before
        topic = TOPICS[lesson]
        names |= {"split_heads": topic.split_heads, "attention": topic.attend}
        names |= {"rms_norm": topic.rms_norm, "swiglu": topic.swiglu}
    if lesson in KERNELS:
        names |= {"triton": importlib.import_module("triton")}
        names |= {"tl": importlib.import_module("triton.language")}
    if lesson == "mesh":
        names |= {name: getattr(mesh_context, name) for name in ("attend", "merge", "pass_on")}
    # Triton reads the source of kernels
    file = f"<cell {hash(code)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)


@pytest.mark.parametrize(("stub", "help_text", "lesson"), EXERCISES)
def test_an_untouched_stub_is_not_attempted(stub, help_text, lesson, capsys):
    run(stub, lesson)
    assert capsys.readouterr().out == f"{NOT_ATTEMPTED}\n"


@pytest.mark.parametrize(("stub", "help_text", "lesson"), EXERCISES)
def test_the_folded_solution_passes(stub, help_text, lesson, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(TOPICS["speedrun"], "race_source", race_on_paper)
    monkeypatch.setattr(TOPICS["speedrun"], "read_entries", plain_on_paper)
    monkeypatch.setattr(TOPICS["speedrun"], "own_board", lambda: tmp_path)
    hint, solution = help_text.split("<summary>Solution</summary>")
    assert "<summary>Hint</summary>" in hint
    code = re.search(r"```python\n(.*?)```", solution, re.DOTALL)[1]
    call = stub.strip().splitlines()[-1]
    run(f"{code}\n{call}", lesson)
    assert capsys.readouterr().out.startswith("right")


def test_each_exercise_is_in_the_notebook_of_its_lesson():
    counts = Counter(case.values[2] for case in EXERCISES)
    there_are = Counter(name.split(".")[0] for name in CHECKED)
    assert counts.keys() == there_are.keys() == TOPICS.keys()
    assert counts >= there_are


def says_which(exercise, name, mistake):
    """Whether the check sees the mistake, and says which one it is."""
    text = verdict(exercise, mistake, seed=0)
    # edits of kernels leave them valid Python
    is_kernel = "flash_attention" in exercise.solve.__module__
    never = "TypeError|NameError|AttributeError" if is_kernel else "NameError|UnboundLocalError"
    assert not re.search(never, text), text
    return re.match(rf"not yet: {mistake.__name__}[(,]", text) and f"It looks as if {name}." in text


@pytest.mark.parametrize("name", CHECKED)
def test_the_solution_passes_and_each_mistake_is_named(name):
    exercise = CHECKED[name]
    wrong = exercise.wrong_functions()
    # those that readers make; more would only slow a check down
    assert 1 <= len(wrong) <= 6
    # more inputs, if one mistake is not told from another
    trials = [min(exercise.trials, most) for most in (2, 15, exercise.trials)]
    fewer = [dataclasses.replace(exercise, trials=number) for number in trials]
    assert verdict(fewer[1], exercise.solve).startswith("right: as expected")
    with no_overflow_checks():
        for sentence, mistake in wrong.items():
            is_named = any(says_which(few, sentence, mistake) for few in fewer)
            assert is_named, f"{sentence}: {verdict(exercise, mistake, seed=0)}"


def verdict_on(result, expected):
    """The verdict on a function that returns `result` where the solution returns `expected`."""
    exercise = Exercise(lambda n: expected, lambda generator, size: (size,))

    def attempt(n):
        return result

    return verdict(exercise, attempt)


TENSOR = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
COUNTS = {(1, 2): 3, (2, 1): 5}
MANY = dict.fromkeys(range(50), 1)


@pytest.mark.parametrize(
    ("result", "expected", "message"),
    [
        ([1, 7, 3], [1, 2, 3], "position 1: yours 7, expected 2"),
        ([1, 2], [1, 2, 3], "position 2: yours nothing, expected 3"),
        ([1, 2, 3, 4], [1, 2, 3], "position 3: yours 4, expected nothing"),
        (None, [1, 2], "it returned None (is a `return` missing?); expected [1, 2]"),
        ("123", [1, 2], "it returned '123', of type str; expected [1, 2]"),
        (1.25, 1, "result: yours 1.25, expected 1"),
        (1_000_001, 1_000_000, "result: yours 1000001, expected 1000000"),
        ({(1, 2): 3}, COUNTS, "(2, 1): yours nothing, expected 5"),
        (COUNTS | {(1, 2): 4}, COUNTS, "(1, 2): yours 4, expected 3"),
        (COUNTS | {(9, 9): 1}, COUNTS, "(9, 9): yours 1, expected nothing"),
        ({"1 2": 3}, COUNTS, "it returned {'1 2': 3}, with keys of another kind; expected {(1,"),
        (MANY, {(1, 2): 3}, "(1, 2): yours nothing, expected 3"),
        (torch.zeros(2, 3), TENSOR, "the result: yours has shape (2, 3), expected (3, 2)"),
        (TENSOR + torch.eye(3)[:, :2], TENSOR, "(0, 0): yours 2, expected 1 (2 of 6 values differ"),
        (TENSOR * torch.nan, TENSOR, "(0, 0): yours nan, expected 1 (6 of"),
        ([[1, 2], [3, 4]], TENSOR, "of type list; expected tensor([[1, 2], [3, 4], [5, 6]])"),
        (2.5, torch.tensor(2.5), "it returned 2.5, of type float; expected tensor(2.5)"),
        (None, torch.zeros(5, 4), "expected <tensor of shape (5, 4)>"),
        ([[1, 2], [3]], [[1, 2], [4]], "position 1: yours [3], expected [4]"),
        (
            [0, {"a": [TENSOR]}],
            [0, {"a": [TENSOR + 1]}],
            "position 1, 'a', position 0, position (0,",
        ),
        (Named(a=Named(b=1.5)), Named(a=Named(b=2.0)), "  a, b: yours 1.5, expected 2"),
    ],
)
def test_the_first_difference_is_named(result, expected, message):
    first, second = verdict_on(result, expected).splitlines()
    assert first == "not yet: attempt(1)"
    assert message in second


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ((1, 2, 3), [1, 2, 3]),
        (np.array([1, 2, 3]), [1, 2, 3]),
        ([torch.tensor([3.0, 2.0]), torch.tensor([0.5])], [[3.0, 2.0], [0.5]]),
        (1 + 1e-6, 1.0),
        (np.float64(3), 3),
        (TENSOR.double() * (1 + 1e-6), TENSOR),
        (TENSOR.bfloat16(), TENSOR),
        (TENSOR.clone().requires_grad_(), TENSOR),
    ],
)
def test_rounding_and_the_kind_of_sequence_or_dtype_do_not_count(result, expected):
    assert verdict_on(result, expected).startswith("right")


@pytest.mark.parametrize("text", ["pair", "not there"])
def test_a_mistake_is_an_edit_of_text_that_occurs_once(text):
    exercise = Exercise(merge.solve, merge.draw, mistakes=f"{text} => triple | wrong")
    with pytest.raises(ValueError, match=f"'{text}' must occur once in merge_pair, found"):
        exercise.wrong_functions()


def lookup(words):
    return words.get("nothing", 1)


def test_an_error_names_its_line_and_is_the_same_mistake_in_another_line():
    def fail_later(words):
        nothing = "nothing"
        return words[nothing]

    missing = 'words.get("nothing", 1) => words["nothing"] | there is nothing'
    exercise = Exercise(lookup, lambda generator, size: ({},), mistakes=missing)
    text = verdict(exercise, fail_later)
    line = fail_later.__code__.co_firstlineno + 2
    assert f"line {line} of the cell raised KeyError: 'nothing'; expected 1" in text
    assert "It looks as if there is nothing." in text


def test_a_long_result_does_not_bury_an_error_and_inner_functions_have_lines():
    def attempt(size):
        def inner():
            return [][size]

        return inner()

    exercise = Exercise(lambda size: [*range(1000)], lambda _, size: (size,))
    line = attempt.__code__.co_firstlineno + 2
    words = verdict(exercise, attempt).splitlines()[1]
    assert words == f"  line {line} of the cell raised IndexError: list index out of range"


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (lambda *given: torch.zeros(2) @ torch.zeros(3, 3), "RuntimeError"),
        (lambda *given: torch.ones(2, device="meta").tolist(), "NotImplementedError"),
    ],
)
def test_of_an_error_of_pytorch_the_first_line_is_shown_and_it_is_no_stub(attempt, error):
    text = verdict(merge, attempt)
    assert f"raised {error}: " in text
    assert len(text.splitlines()) == 2


def test_a_function_is_checked_by_its_name_or_another_and_an_unknown_one_is_named(capsys):
    zero1 = TOPICS["zero1"]
    for given, name in ((zero1.sent_bytes.solve, ""), (lambda *given: 0.0, "sent_bytes")):
        zero1.check(given, name)
    zero1.check(double)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "right: as expected on 150 random inputs"
    assert last.startswith("not yet: no exercise is called double, but balanced_owners, fair_owner")


def test_what_is_right_on_threads_must_be_right_on_processes_too(capsys):
    step = TOPICS["zero1"].zero1_step

    def only_on_threads(params, grads, state, ranks):
        if isinstance(ranks, Threads):
            step.solve(params, grads, state, ranks)

    for attempt in (step.solve, only_on_threads):
        check(step, attempt)
    right, also, wrong = capsys.readouterr().out.splitlines()
    assert [right, also] == ["right: as expected on 30 random inputs", "  on 2 processes, too"]
    assert wrong == (
        "not yet: as expected on 30 random inputs; on 2 processes, rank 0, calls, all-gathers: "
        "yours 0, expected 3"
    )


def test_an_unusual_mistake_is_shown_without_a_guess():
    text = verdict(merge, lambda ids, pair, new_id: [777, *merge_pair(ids, pair, new_id)])
    assert "position 0: yours 777" in text
    assert "It looks as if" not in text


def test_an_input_may_change_only_where_the_solution_changes_it():
    def total(ids):
        return sum(ids)

    def emptying(ids):
        return sum(ids.pop() for _ in range(len(ids)))

    def draw(generator, size):
        return ([generator.randrange(1, 9) for _ in range(size)],)

    words = "it changes `ids`, which is given; work on a copy"
    assert verdict(Exercise(total, draw), emptying).endswith(words)
    assert verdict(Exercise(emptying, draw), emptying).startswith("right")
    assert verdict(Exercise(emptying, draw), total).startswith("right")


def draw_number(generator, size):
    return generator.randrange(size)


def added(x):
    return x + x


@pytest.mark.parametrize("change", [{"solve": lambda x: x / 0}, {"harness": lambda f, x: f(x) / 0}])
def test_where_the_solution_fails_no_answer_is_right(change):
    exercise = Exercise(added, lambda generator, size: (draw_number(generator, size),))
    text = verdict(dataclasses.replace(exercise, **change), lambda x: x / 0)
    assert re.match("no verdict: the exercise is at fault.*\n .*ZeroDivisionError", text)


@pytest.mark.parametrize(
    ("mistakes", "words"),
    [
        ("no edit | of the solution", "old => new | a sentence of its own"),
        ("x + x => x", r"of its own`, got 'x \+ x => x'"),
        ("x + x => x | the same\nx + x => 2 | the same", r"of its own`, got 'x \+ x => 2"),
        ("y => x | it is not there", "'y' must occur once in added, found 0 times"),
        ("x + x => x + | half", r"added with 'x \+' is no valid Python"),
    ],
)
def test_a_mistake_that_is_not_well_written_is_refused(mistakes, words):
    exercise = Exercise(added, draw_number, mistakes=mistakes)
    with pytest.raises(ValueError, match=words):
        exercise.wrong_functions()


@pytest.mark.parametrize(
    ("tier", "inputs", "words"),
    [
        ("extra", {"x": draw_number}, "tier must be one of warm-up, core, .*, got 'extra'"),
        ("core", {"y": draw_number}, r"inputs of added must be named \['x'\], got \['y'\]"),
    ],
)
def test_an_exercise_that_is_not_well_declared_is_refused(tier, inputs, words):
    with pytest.raises(ValueError, match=words):
        declare(tier, inputs)(added)


def test_a_stub_that_is_half_done_is_not_attempted():
    def attempt(ids, pair, new_id):
        if len(ids) < 5:
            return merge_pair(ids, pair, new_id)
        raise NotImplementedError

    assert verdict(merge, attempt) == NOT_ATTEMPTED


def test_inputs_are_fresh_and_can_be_repeated():
    # the first input is often the empty text
    first = verdict(encode_text, lambda *_: None)
    assert any(verdict(encode_text, lambda *_: None) != first for _ in range(40))
    assert len({verdict(encode_text, lambda *_: None, seed=3) for _ in range(5)}) == 1


def catch_everything(*given):
    while True:
        with contextlib.suppress(BaseException):
            while True:
                pass


def catch_everything_around_it(*given):
    while True:
        with contextlib.suppress(BaseException):
            catch_everything()


def wait_in_c_code(*given):
    with contextlib.closing(types.SimpleNamespace(close=threading.Event().wait)):
        pass


def wrong_at_first(ids, pair, new_id):
    while len(ids) > 5:
        pass
    return [-1]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on Windows")
@pytest.mark.parametrize(
    "attempt",
    [
        catch_everything,
        catch_everything_around_it,
        wait_in_c_code,
        wrong_at_first,
        lambda *given: time.sleep(1e9),
    ],
)
def test_what_never_ends_is_stopped_and_costs_one_limit(attempt, monkeypatch, request):
    monkeypatch.setattr(lessons_exercise, "TIME_LIMIT", 0.1)
    handler, tracers = signal.default_int_handler, (sys.gettrace(), sys.getprofile())
    before, start = signal.signal(signal.SIGALRM, handler), time.monotonic()
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, before))
    text = verdict(merge, attempt)
    is_named = "it did not finish in time; is there a loop that never ends?" in text
    assert is_named or attempt is wrong_at_first
    assert "It looks as if" not in text
    assert time.monotonic() - start < 5
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert (sys.gettrace(), sys.getprofile()) == tracers
    # C code that no function of Python's has called
    assert call(time.sleep, (1e9,), 0.01) is NOT_FINISHED


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on Windows")
def test_an_alarm_that_comes_late_does_not_end_the_process(request):
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, before))
    assert verdict(merge, merge_pair).startswith("right")
    signal.raise_signal(signal.SIGALRM)


def test_a_check_works_outside_the_main_thread():
    texts = []
    thread = threading.Thread(target=lambda: texts.append(verdict(merge, merge_pair)))
    thread.start()
    thread.join()
    assert texts[0].startswith("right")


def double(n):
    return 2 * n


def twice(n):
    return n + n


def test_what_an_open_exercise_measures_is_shown_beside_solution_and_baseline():
    options = {"measure": {double: 19800.0, twice: 3.0, sum: 40.0}.get, "unit": "ms", "trials": 4}
    exercise = Exercise(double, lambda _, size: (size,), "open", **options)
    assert verdict(exercise, twice).splitlines() == [
        "right: as expected on 4 random inputs",
        "  yours 3 ms, the solution 19,800 ms",
    ]
    assert "ms" not in verdict(exercise, lambda n: n)
    figures = verdict(dataclasses.replace(exercise, baseline=sum), twice).splitlines()[1]
    assert figures == "  yours 3 ms, the solution 19,800 ms, `sum` 40 ms"


def test_a_right_answer_at_too_high_a_cost_or_that_fails_where_it_is_measured_is_not_right():
    def fails(n):
        return 2 * n

    def measure(function):
        return {double: 2.0, twice: 9.0}[function]

    exercise = Exercise(
        double, lambda _, size: (size,), trials=2, measure=measure, unit="ms", at_most=4
    )
    assert verdict(exercise, double).startswith("right")
    assert verdict(exercise, twice).splitlines() == [
        "not yet: as expected on 2 random inputs, but at too high a cost",
        "  yours 9 ms, the solution 2 ms; 8 ms will do",
    ]
    text = verdict(exercise, fails)
    assert "but not where it is measured\n" in text
    assert "raised KeyError" in text


def test_a_call_that_the_check_makes_is_told_by_the_names_of_what_it_was_run_with():
    def run(function, numbers):
        return [function(number) for number in numbers]

    exercise = Exercise(double, lambda _, size: ([1, size],), harness=run)
    assert verdict(exercise, abs).startswith("not yet: abs, run with numbers=[1, 1]\n")


def test_a_secret_answer_is_not_told():
    exercise = Exercise(
        lambda: {"A": "launch-bound"},
        lambda *_: (),
        trials=1,
        describe=lambda yours, _: f"{yours} is not it",
    )
    text = verdict(exercise, lambda: {"A": "memory-bound"})
    assert "memory-bound" in text
    assert "launch-bound" not in text
    assert verdict(exercise, lambda: {"A": "launch-bound"}) == "right: as expected"


def test_verdicts_are_kept_where_a_report_asks_for_them(tmp_path, monkeypatch, capsys):
    def not_yet(n):
        raise NotImplementedError

    exercise = Exercise(double, lambda _, size: (size,), "core")
    monkeypatch.delenv(RESULTS, raising=False)
    check(exercise, double)
    monkeypatch.setenv(RESULTS, str(tmp_path / "results"))
    for attempt in (double, int, not_yet):
        check(exercise, attempt)
    lines = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [(line["exercise"], line["result"]) for line in lines] == [
        ("double", "passed"),
        ("int", "failed"),
        ("not_yet", "not attempted"),
    ]
    assert {line["tier"] for line in lines} == {"core"}


def test_what_a_check_refuses_is_said_in_its_own_words():
    text = verdict(CHECKED["model.attention"], lambda x, *given: x.detach())
    assert text.splitlines()[1].startswith("  autograd can't follow it")
    # and what its code meets in a result stays an error
    text = verdict(CHECKED["hopper.deal"], lambda work, programs: [*range(programs)])
    assert "it raised TypeError: 'int' object is not iterable" in text
