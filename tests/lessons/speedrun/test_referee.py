"""The referee: an honest run, ten easy cheats, a fresh process that opens nothing."""

import builtins
import dataclasses
import time

import numpy as np
import pytest
import torch

from lib.lessons.speedrun import referee
from lib.lessons.speedrun.race import RECIPES, Track, compiled, edited
from lib.lessons.speedrun.referee import Fault, Run, check_distinct, run_entry, seeds
from tests.lessons.speedrun.toy import ENTRY, rule, run_here, toy_course

STEP = "        yield model, x.numel()\n"
BATCH = "        x, y = race.batch(8, 32, draws)\n"
BUILD = "    optimizer = AdamW"
# What a cheat changes in the honest entry -> what it is told.
CHEATS = {
    "looks at the held-out text": (
        {BATCH: "        x = y = race.validation_tokens\n"},
        "no attribute 'validation_tokens'",
    ),
    "starts with weights that are trained already": (
        {
            BUILD: "    for step in range(150):\n"
            "        x, y = race.batch(8, 32, np.random.default_rng(step))\n"
            "        loss = model.loss(x, y)\n        loss.backward()\n"
            "        with torch.no_grad():\n"
            "            [p.sub_(0.3 * p.grad) for p in model.parameters()]\n"
            "            model.zero_grad()\n    race.handed_out.clear()\n" + BUILD
        },
        "after one step the model is at",
    ),
    "trains on the held-out text": (
        {
            BATCH: "        race.batch(8, 32, draws)\n"
            "        t = torch.tensor(HELD_OUT)\n"
            "        x, y = t[:512].view(16, 32), t[1:].view(16, 32)\n",
            "yield model, x.numel()": "yield model, 256",
        },
        "it has seen that",
    ),
    "reports fewer tokens than it was given": (
        {STEP: "        yield model, 8\n"},
        "race.batch handed out",
    ),
    "trains on text of its own": (
        {BATCH: "        x = torch.randint(64, (8, 32))\n        y = x.roll(-1)\n"},
        "take every batch from there",
    ),
    "has the judge call a forward of its own": (
        {
            "def recipe": "class Sure(TransformerLM):\n    def loss(self, x, y):\n"
            "        return super().loss(x, y) * 0\n\ndef recipe",
            "model = TransformerLM(": "model = Sure(",
        },
        "yields a TransformerLM and an int, got Sure",
    ),
    "hides a table in the model": (
        {BUILD: "    model.register_buffer('table', torch.zeros(64, 64))\n" + BUILD},
        "weights are not those of a TransformerLM",
    ),
    "says that its vocabulary is smaller": (
        {BUILD: "    object.__setattr__(model.config, 'vocab_size', 32)\n" + BUILD},
        "vocab_size must be 64",
    ),
    "works while it is judged": (
        {
            BUILD: "    import threading\n    def work():\n        while True:\n"
            "            pass\n    threading.Thread(target=work, daemon=True).start()\n" + BUILD
        },
        "while its model was judged",
    ),
    "never yields": ({STEP: "", "itertools.count(1)": "range(6)"}, "a recipe is a generator"),
    "stops when it likes": (
        {"itertools.count(1)": "range(6)"},
        "ended after",
    ),
    "has weights that are no numbers": (
        {STEP: "        model.lm_head.weight.data.fill_(float('nan'))\n" + STEP},
        "bits per byte; try a lower rate",
    ),
}


def test_an_honest_run_is_timed_judged_and_told():
    found = run_here(ENTRY)
    assert found.curve[-1][2] <= 3.5 < found.curve[-2][2]
    assert found.processor_s > 0
    assert 0 < found.seconds <= found.curve[-1][1]
    assert found.fresh_bits == pytest.approx(found.curve[-1][2], rel=0.1)
    # the same seed takes the same steps
    assert run_here(ENTRY).tokens == found.tokens


@pytest.mark.parametrize("cheat", CHEATS)
def test_an_easy_cheat_is_caught(cheat, monkeypatch):
    changes, told = CHEATS[cheat]
    source = f"HELD_OUT = {rule(513, 1).tolist()}\n" + edited(ENTRY, changes)
    if cheat == "works while it is judged":
        # until this test ends, and not longer
        monkeypatch.setattr(builtins, "is_on", True, raising=False)
        source = source.replace(
            "while True", "import builtins\n        while hasattr(builtins, 'is_on')"
        )
        monkeypatch.setattr(referee, "IDLE_S", 0.02)
        judge = referee.Race.judge
        monkeypatch.setattr(referee.Race, "judge", lambda *a: (time.sleep(0.5), judge(*a))[1])
    with pytest.raises(ValueError, match=told):
        run_here(source)


def test_patching_the_clock_gains_nothing():
    patched = "    import time\n    time.perf_counter = time.process_time = lambda: 0.0\n"
    slow = {STEP: "        time.sleep(0.02)\n" + STEP}
    source = edited(ENTRY, {BUILD: patched + BUILD}, slow)
    found = run_entry(source, toy_course(), 1)
    assert found.seconds > 0.02 * found.tokens / 256


def test_one_curve_for_two_seeds_is_refused_and_seeds_are_the_referees():
    run = Run(1, 1.0, 1.0, 1.0, [(1, 1.0, 3.0)], None, "")
    with pytest.raises(Fault, match="draw weights and batches"):
        check_distinct([run, dataclasses.replace(run, seed=2)])
    assert not {*seeds()} & {*seeds()}


FORBIDDEN = {
    "another file": "open('README.md')",
    "the grammar of the stories": "__import__('lib.data.stories')",
    "the text of that grammar": "open('lib/data/stories.py')",
    "trained weights": "__import__('lib.training.generation')",
    "the network": "__import__('socket').create_connection(('localhost', 9))",
    "another process": "__import__('subprocess').run(['true'])",
}


def test_a_fresh_process_opens_nothing_but_code_and_finishes_the_race(tmp_path, monkeypatch):
    # what is installed beside the workbook travels, too
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # compiled kernels, which need not be there
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    tries = "".join(
        f"    try:\n        {act}\n        raise ValueError({name!r})\n"
        "    except PermissionError as error:\n        print(error)\n"
        for name, act in FORBIDDEN.items()
    )
    course = toy_course()
    source = "import beside\n" + edited(ENTRY, {BUILD: tries + BUILD})
    found = run_entry(source, course, 1)
    assert found.curve[-1][2] <= course.race.target
    assert np.diff([0, *(point[0] for point in found.curve)]).min() >= course.race.judged_every


def test_two_ranks_train_one_model_and_their_errors_are_told():
    course = toy_course()
    pair = dataclasses.replace(course, which=dataclasses.replace(course.which, ranks=2))
    found = run_entry((RECIPES / "pair.py").read_text(encoding="utf-8"), pair, 1)
    # two steps, in which each rank has a batch of its own
    assert found.curve[0][0] == 2 * 2 * 8 * 256
    assert found.curve[-1][2] <= course.race.target
    with pytest.raises(Fault, match="I am rank 1"):
        run_entry(
            edited(ENTRY, {BUILD: "    assert race.rank == 0, 'I am rank 1'\n" + BUILD}), pair, 1
        )


def test_the_recipe_for_tinystories_takes_a_step(monkeypatch):
    batch = Track.batch
    monkeypatch.setattr(Track, "batch", lambda race, size, *how: batch(race, size // 128, *how))
    track = Track(train_tokens=rule(1000, 0), vocab_size=64, device=torch.device("cpu"))
    source = (RECIPES / "full.py").read_text(encoding="utf-8")
    model, tokens = next(compiled(source, {}, "recipe")(track, 1))
    assert tokens == 2 * 256
    assert bool(torch.isfinite(model.lm_head.weight).all())
