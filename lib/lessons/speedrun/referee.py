"""The referee of a race: runs an entry in a fresh process, holds the clock, judges its model.

What an entry could spoil stays here: the clock, the seeds, the held-out text, and the judge, who
builds a `TransformerLM` of its own from the weights that it is sent. Once a run has reached its
target, the model is judged on fresh text, too, which nobody can have trained on.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from threading import Thread
from typing import Any

import numpy as np
import torch

from lib.core.files import ROOT
from lib.core.settings import require
from lib.data.prepare import ProgressBar, tokenize_corpus
from lib.data.stories import generate_stories
from lib.lessons.speedrun.entrant import KEY
from lib.lessons.speedrun.race import (
    Race,
    RaceClass,
    at_target,
    bits_of,
    prepare,
    race_on,
    vocab_size_of,
)
from lib.model import TransformerLM
from lib.model.config import ModelConfig
from lib.tokenizer import Tokenizer
from lib.training.generation import generate_text

# A claim needs as many runs, each with a seed of its own.
FEWEST_SEEDS = 3
# The share of a uniform guess's bits that a model still needs after one step.
UNTRAINED = 0.8
# How much worse a model may be on fresh text than on the held-out text.
SAME = 1.15
# Seconds of work that a process may do while its model is judged: threads that fall asleep.
IDLE_S = 0.2
# Times its limit that a run may take on the wall, beside other work.
PATIENCE = 6
PROMPT = "Once upon a time"
# At 0.7 a model at the sprint's target names four or five people in a story of two, at 0.3 three.
TELLING: dict = {"max_new_tokens": 150, "temperature": 0.3, "top_p": 0.9, "seed": 1}
# The entrants that run now.
RUNNING: set[subprocess.Popen] = set()


class Fault(ValueError):  # noqa: N818  a fault of an entry, not of this program
    """A run that does not count, and why."""


class EndError(Fault):
    """The entry's process has gone."""


@dataclass(frozen=True)
class Run:
    """A run to the target."""

    seed: int
    tokens: float
    seconds: float
    processor_s: float
    curve: list[tuple[float, float, float]]
    """(tokens, seconds, bits per byte) of each judgment."""

    fresh_bits: float | None
    """Bits per byte on text that was made after the run."""

    story: str


@dataclass(frozen=True)
class Course:
    """A class's race with one vocabulary."""

    which: RaceClass
    race: Race
    train_file: Path
    tokenizer: Tokenizer | None
    seconds: float = 0.0
    """Seconds that making the tokens took, where they count."""

    def fresh_text(self) -> np.ndarray | None:
        """Tokens of new text like the held-out text; None where nobody can make it."""
        if self.which.corpus != "stories" or self.tokenizer is None:
            return None
        seed, size = secrets.randbelow(2**31), self.which.judged_bytes
        text = "".join(generate_stories(size, seed=seed, split="validation"))
        return np.array(self.tokenizer.encode(text))


@contextlib.contextmanager
def course_of(which: RaceClass, source: str, progress_bar: ProgressBar) -> Iterator[Course]:
    """Make the tokens that an entry is raced on; anew and by the clock where that counts."""
    size = vocab_size_of(source)
    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        text = prepare(which, size, progress_bar)
        if which.times_tokenizer:
            # the text is there now; its tokens are made once more
            started = time.perf_counter()
            text = replace(text, output=Path(folder))
            tokenize_corpus(text, progress_bar=progress_bar)
        took = time.perf_counter() - started if which.times_tokenizer else 0.0
        tokenizer = Tokenizer.load(text.output_dir)
        file = text.output_dir / "train.npy"
        yield Course(which, race_on(which, text), file, tokenizer, took)


def run_entry(source: str, course: Course, seed: int) -> Run:
    """Run an entry to the target of its class in a fresh process.

    Raises:
        Fault: it broke a rule, failed, or did not get there.
    """
    with Listener(("localhost", 0), authkey=(key := secrets.token_bytes(16))) as listener:
        port = listener.address[1]
        environment = {"GOMP_SPINCOUNT": "1000", **os.environ, KEY: key.hex()}
        # compiled kernels are kept where an entry may read
        environment.setdefault("TRITON_CACHE_DIR", f"{gettempdir()}/triton")
        # packages may come by PYTHONPATH, as in a bundle without installation
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        program = f"from lib.lessons.speedrun.entrant import main; main({port})"
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
        RUNNING.add(process)
        Thread(target=knock_at_end, args=(process, listener.address, key), daemon=True).start()
        try:
            first = listener.accept()
            first.send_bytes(json.dumps(job_of(source, course, seed)).encode())
            entrant = listener.accept() if course.which.ranks > 1 else first
            return judge_run(entrant, course, seed)
        except EndError:
            # where several ranks train, the first process knows why
            if first.poll(10):
                read(first)
            raise
        finally:
            end(process)
            RUNNING.discard(process)


def end(process: subprocess.Popen) -> None:
    """End an entrant, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_all() -> None:
    """End all runs, which threads follow that an interrupt does not reach."""
    for process in [*RUNNING]:
        end(process)


def knock_at_end(process: subprocess.Popen, address: Any, key: bytes) -> None:
    """Once a process has ended, end the wait for its connection."""
    process.wait()
    with contextlib.suppress(OSError, EOFError):
        Client(address, authkey=key).close()


def job_of(source: str, course: Course, seed: int) -> dict[str, Any]:
    """The message that starts an entrant; nothing in it is of the held-out text."""
    race = course.race
    job = {"source": source, "seed": seed, "train_file": str(course.train_file)}
    job |= {"vocab_size": race.vocab_size, "ranks": course.which.ranks}
    return job | {"judged_every": race.judged_every, "limit": race.limit}


def judge_run(entrant: Connection, course: Course, seed: int) -> Run:
    """Start the clock, judge whenever the entrant's model is due, stop it at the target."""
    race = course.race
    read(entrant)
    seconds, processor, curve = course.seconds, [], []
    started = time.perf_counter()
    entrant.send_bytes(b"{}")
    while True:
        # the clock stands still while a model is judged
        point = read(entrant, PATIENCE * race.limit - seconds)
        seconds += time.perf_counter() - started
        model = rebuilt(point["config"], entrant.recv_bytes(), race)
        judged_from = time.perf_counter()
        bits = race.judge(model)
        if processor:
            curve.append((point["tokens"], seconds, bits))
        else:
            check_untrained(bits, race)
        processor.append(point["processor"])
        spent = point["processor"] if race.device.type == "cpu" else seconds
        is_over = spent >= race.limit or (bool(curve) and bits <= race.target)
        waited = time.perf_counter() - judged_from
        entrant.send_bytes(json.dumps({"goes_on": not is_over}).encode())
        idle = read(entrant)["idle"]
        if idle > IDLE_S + waited / 10:
            raise Fault(f"it worked for {idle:.1f} s while its model was judged")
        if is_over:
            break
        started = time.perf_counter()
    found = at_target(curve, race.target)
    if found is None:
        reached = f"it is at {bits:.3f} bits per byte, not {race.target}, with seed {seed}"
        raise Fault(f"{reached}, at the limit of {race.limit:.0f} s")
    # processor time is interpolated at the same point of the curve
    share = np.interp(found.tokens, [p[0] for p in curve], processor[1:])
    story, fresh = ending(model, course)
    if fresh is not None and fresh > SAME * bits:
        raise Fault(
            f"on text made after the run it is at {fresh:.3f} bits per byte, on the held-out text "
            f"at {bits:.3f}; it has seen that"
        )
    return Run(seed, found.tokens, found.seconds, float(share), curve, fresh, story)


def read(entrant: Connection, seconds: float = 600.0) -> dict[str, Any]:
    """The entrant's next message.

    Raises:
        Fault: it failed, says nothing for `seconds`, or has gone.
    """
    if not entrant.poll(max(1.0, seconds)):
        raise Fault(f"no model after {seconds:.0f} s more; yield after each step")
    try:
        message = json.loads(entrant.recv_bytes())
    except (EOFError, ConnectionResetError):
        raise EndError("its process ended") from None
    if "error" in message:
        raise Fault(message["error"])
    return message


def rebuilt(config: dict[str, Any], weights: bytes, race: Race) -> TransformerLM:
    """A model of the judge's own with the entrant's weights.

    Raises:
        Fault: they do not fit a `TransformerLM` of the race's vocabulary.
    """
    try:
        shape = ModelConfig(**config)
        require(shape.vocab_size == race.vocab_size, f"vocab_size must be {race.vocab_size}")
        model = TransformerLM(shape)
        model.load_state_dict(torch.load(io.BytesIO(weights), weights_only=True))
    except (TypeError, ValueError, RuntimeError) as error:
        raise Fault(f"its weights are not those of a TransformerLM: {error}") from None
    return model.to(race.device)


def check_untrained(bits: float, race: Race) -> None:
    """Refuse a model that knows more after one step than a step can teach."""
    targets = race.validation_tokens[1:]
    guessing = math.log2(race.vocab_size) * len(targets) / race.bytes_of_token[targets].sum()
    if bits < UNTRAINED * guessing:
        raise Fault(
            f"after one step the model is at {bits:.2f} bits per byte, where guessing is at "
            f"{guessing:.2f}; start from random weights, and yield after each step"
        )


def ending(model: TransformerLM, course: Course) -> tuple[str, float | None]:
    """The model's story, and its bits per byte on fresh text."""
    story, fresh = "", course.fresh_text()
    if course.tokenizer is not None:
        (told,) = generate_text(model, course.tokenizer, [PROMPT], **TELLING)
        story = PROMPT + told
    race = course.race
    if fresh is None:
        return story, None
    return story, bits_of(model, fresh, race.bytes_of_token, race.device)


def seeds(count: int = FEWEST_SEEDS) -> list[int]:
    """Seeds that nobody could choose a recipe for."""
    return [secrets.randbelow(2**31) for _ in range(count)]


def check_distinct(runs: Sequence[Run]) -> None:
    """Refuse runs that did not draw with their seeds."""
    if has_repeated([run.curve for run in runs]):
        raise Fault("two seeds gave the same curve; draw weights and batches with `seed`")


def has_repeated(curves: Sequence[Sequence[Sequence[float]]]) -> bool:
    """Return whether two curves have the same bits per byte throughout."""
    return len({tuple(bits for *_, bits in curve) for curve in curves}) < len(curves)
