"""The candidates of the tokenizer benchmark: ours and its peers, on one text.

Processes that are started here have their memory measured, so nothing loads torch or pandas.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lib.core.hardware import available_cpus
from lib.data.stories import generate_stories
from lib.tokenizer.bpe import Tokenizer, train_bpe
from lib.tokenizer.files import save_huggingface
from lib.tokenizer.pretokenize import SEPARATOR

log = logging.getLogger(__name__)
PEERS = ("gigatoken", "fastokens", "tokenizers")
MEGABYTE = 1_000_000
# Seconds after which a candidate is slow enough to be measured once.
PATIENCE = 30
# How much text the slow candidates encode.
SLOW_BYTES = 4 * MEGABYTE
# Characters of a document, where documents are encoded one by one, and of all documents.
DOCUMENT_CHARACTERS = (200, 5_000, 50_000, 500_000, 5_000_000)
ALL_DOCUMENTS_CHARACTERS = 10_000_000

# A sample has `seconds` and `bytes` of text, and may have `peak_MB` of memory.
Sample = dict[str, float]
Candidates = dict[str, Callable[[], Sample]]


class Corpus:
    """A text, and the tokenizer trained on it."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path, self.vocab_size = path, vocab_size
        self.size = path.stat().st_size

    @cached_property
    def text(self) -> str:
        return self.path.read_bytes().decode()

    @cached_property
    def trained(self) -> tuple[Any, Any]:
        return train_bpe(self.path, self.vocab_size, [SEPARATOR], implementation="numba")

    @cached_property
    def document(self) -> str:
        """The tokenizer in Hugging Face's format."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            save_huggingface(path, self.ours().parts)
            return path.read_text()

    def ours(self, implementation: str = "numba") -> Tokenizer:
        """A tokenizer with empty caches."""
        return Tokenizer(*self.trained, [SEPARATOR], implementation=implementation)


def is_installed(peer: str) -> bool:
    """Whether a peer can be measured here."""
    return importlib.util.find_spec(peer) is not None


def is_here(candidate: str) -> bool:
    """Whether a candidate is ours, or a peer that is installed."""
    return candidate not in PEERS or is_installed(candidate)


def interleave(
    candidates: Mapping[str, Callable[[], Sample]], samples: int
) -> dict[str, list[Sample]]:
    """Sample each candidate `samples` times, interleaved; one slower than PATIENCE only once."""
    results: dict[str, list[Sample]] = {name: [] for name in candidates}
    for _ in range(samples):
        for name, candidate in candidates.items():
            if not results[name] or results[name][0]["seconds"] < PATIENCE:
                results[name].append(candidate())
    return results


def summarize(results: Mapping[str, Sequence[Sample]]) -> Iterator[dict[str, Any]]:
    """Figures of each candidate: medians, spreads, and how many times faster `numba` is."""
    speeds = {
        name: statistics.median(sample["bytes"] / sample["seconds"] for sample in samples)
        for name, samples in results.items()
    }
    for name, samples in results.items():
        seconds = [sample["seconds"] for sample in samples]
        peaks = [sample["peak_MB"] for sample in samples if "peak_MB" in sample]
        yield {
            "seconds": statistics.median(seconds),
            "spread": max(seconds) - min(seconds),
            "samples": len(seconds),
            "MB": samples[0]["bytes"] / MEGABYTE,
            "MB_per_s": speeds[name] / MEGABYTE,
            "ratio": speeds["numba"] / speeds[name] if "numba" in speeds else None,
            "peak_MB": max(peaks, default=None),
        }


def timed(function: Callable[[], Any], num_bytes: int) -> Callable[[], Sample]:
    """A candidate that calls `function`, which processes `num_bytes` of text."""

    def sample() -> Sample:
        start = time.perf_counter()
        function()
        return {"seconds": time.perf_counter() - start, "bytes": num_bytes}

    return sample


def fresh(make: Callable[[], Callable[[], Any]], num_bytes: int) -> Callable[[], Sample]:
    """A candidate that is made anew for each sample, which is not timed: its caches are empty."""
    return lambda: timed(make(), num_bytes)()


@contextlib.contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Pin this thread, and those that it starts, to this many cores, where the system allows it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def in_new_process(function: Callable, *arguments: Any) -> Any:
    """Call a function in a fresh process, not a forked one, and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def peak_memory() -> float:
    """The most memory that this process has held so far, in MB, without its children."""
    status = Path("/proc/self/status")
    if status.exists():
        # with getrusage, a process would inherit the peak of the one that started it
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 / MEGABYTE
    import resource

    # in bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MEGABYTE


def train_candidates(corpus: Corpus, task: str) -> Candidates:
    """From a file to its merges on all cores, each sample in a process of its own."""
    return {
        name: functools.partial(
            in_new_process, timed_training, name, corpus.path, corpus.vocab_size
        )
        for name in TRAINERS
    }


def timed_training(trainer: str, path: Path, vocab_size: int) -> Sample:
    """Train on a small text for warmup, then on the file at `path`."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.txt"
        small.write_text("".join(generate_stories(20_000)), newline="")
        TRAINERS[trainer](small, 290)
    sample = timed(lambda: TRAINERS[trainer](path, vocab_size), path.stat().st_size)()
    return sample | {"peak_MB": peak_memory()}


def _train_ours(path: Path, vocab_size: int, implementation: str) -> None:
    train_bpe(path, vocab_size, [SEPARATOR], implementation=implementation)


def _train_tokenizers(path: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(path), trainer)


def _train_gigatoken(path: Path, vocab_size: int) -> None:
    from gigatoken.gigatoken_rs import train_bpe as train

    train(str(path), vocab_size, [SEPARATOR])


# Candidate -> a function that trains it on the file at a path, to a vocabulary size.
TRAINERS: dict[str, Callable[[Path, int], None]] = {
    "numba": functools.partial(_train_ours, implementation="numba"),
    "python": functools.partial(_train_ours, implementation="python"),
    "gigatoken": _train_gigatoken,
    "tokenizers": _train_tokenizers,
}


def documents(path: Path) -> Iterator[str]:
    """The documents of a file without the separators, which peers would count as text."""
    rest = ""
    with open(path, encoding="utf-8", newline="") as file:
        while block := file.read(1 << 20):
            *whole, rest = (rest + block).split(SEPARATOR)
            yield from whole
    yield rest


def encode_stream(corpus: Corpus, workers: int) -> Callable[[], Sample]:
    """Ours on a file, with empty caches."""
    return fresh(
        lambda: functools.partial(_encode_file, corpus.ours(), corpus.path, workers), corpus.size
    )


def encode_candidates(corpus: Corpus, task: str) -> Candidates:
    """Encoding on one core with empty caches; the slow ones encode less of the text."""
    slow = corpus.text[: SLOW_BYTES // 2]
    slow_bytes = len(slow.encode())
    candidates = {
        "numba": encode_stream(corpus, workers=1),
        "python": timed(lambda: corpus.ours("python").encode(slow), slow_bytes),
    }
    if is_installed("tokenizers"):
        from tokenizers import Tokenizer as PeerTokenizer

        peer, documents = PeerTokenizer.from_str(corpus.document), slow.split(SEPARATOR)
        candidates["tokenizers"] = timed(
            lambda: [peer.encode(document).ids for document in documents], slow_bytes
        )
    for name, make in array_encoders(corpus).items():
        if name != "numba":
            # with empty caches
            made = lambda make=make: functools.partial(make(), corpus.text)  # noqa: E731
            candidates[name] = fresh(made, corpus.size)
    return candidates


def warm_candidates(corpus: Corpus, task: str) -> Candidates:
    """Encoding on one core a text that was encoded before."""
    makers = array_encoders(corpus).items()
    return {
        name: timed(functools.partial(make(), corpus.text), corpus.size) for name, make in makers
    }


def all_core_candidates(corpus: Corpus, task: str) -> Candidates:
    """Encoding a file on all cores, beside one."""
    return {
        "one core": encode_stream(corpus, workers=1),
        "numba": encode_stream(corpus, workers=available_cpus()),
        "gigatoken": lambda: in_new_process(_encode_gigatoken, corpus.document, corpus.path),
    }


def _encode_gigatoken(document: str, path: Path) -> Sample:
    """Encode a file on all cores with empty caches; its threads have started."""
    from gigatoken import BytesSource, Tokenizer

    tokenizer, data = Tokenizer.from_json(document), path.read_bytes()
    tokenizer.encode_batch(["a", "b"], parallel=True)
    source = BytesSource([data], separator=SEPARATOR)
    return timed(lambda: tokenizer.encode_batch(source, parallel=True), len(data))()


def array_encoders(corpus: Corpus) -> dict[str, Callable[[], Callable[[str], np.ndarray]]]:
    """Candidate -> a function that makes it anew, with empty caches, and returns its encoder.

    Ours and those peers that encode a text of any size to an array on one core.
    """
    candidates: dict[str, Any] = {"numba": lambda: corpus.ours().encode_array}
    if is_installed("gigatoken"):
        import gigatoken

        candidates["gigatoken"] = lambda: gigatoken.Tokenizer.from_json(corpus.document).encode
    if is_installed("fastokens"):
        from fastokens._native import Tokenizer as FastTokenizer

        def make_fastokens() -> Callable[[str], np.ndarray]:
            encode = FastTokenizer.from_json_str(corpus.document).encode_batch_flat
            return lambda text: np.frombuffer(encode([text])[0], dtype=np.uint32)

        candidates["fastokens"] = make_fastokens
    return candidates


def compare_ids(
    makers: Mapping[str, Callable[[], Callable[[str], np.ndarray]]], text: str
) -> dict[str, bool]:
    """Whether each peer gives our ids for `text`; a warning says where it does not."""
    expected, same = makers["numba"]()(text), {}
    for name, make in makers.items():
        if name != "numba":
            same[name] = np.array_equal(expected, make()(text))
            if not same[name]:
                log.warning("%s gives other ids", name)
    return same


def document_candidates(corpus: Corpus, task: str) -> Candidates:
    """Encoding documents of a size one by one on one core, with warm caches."""
    size = int(task.split()[2].replace(",", ""))
    text = corpus.text[:ALL_DOCUMENTS_CHARACTERS].replace(SEPARATOR, " ")
    documents = [text[start : start + size] for start in range(0, len(text), size)]
    encoders = {name: make() for name, make in array_encoders(corpus).items()}

    def encode_all(encode: Callable) -> None:
        for document in documents:
            encode(document)

    num_bytes, batch = len(text.encode()), corpus.ours().encode_batch
    candidates = {
        name: timed(functools.partial(encode_all, encode), num_bytes)
        for name, encode in encoders.items()
    }
    return candidates | {
        "numba, encode_batch": timed(lambda: batch(documents, workers=1), num_bytes)
    }


def _encode_file(tokenizer: Tokenizer, path: Path, workers: int) -> None:
    with open(path, "rb") as stream:
        for _ in tokenizer.encode_stream(stream, workers=workers):
            pass


ARRAYS = ("numba", "gigatoken", "fastokens")
# Task, up to " of " -> a function that makes its candidates, and which are measured.
TASKS: dict[str, tuple[Callable[[Corpus, str], Candidates], tuple[str, ...]]] = {
    "train": (train_candidates, tuple(TRAINERS)),
    "encode": (encode_candidates, ("numba", "python", "tokenizers", *ARRAYS[1:])),
    "encode, warm": (warm_candidates, ARRAYS),
    "encode, all cores": (all_core_candidates, ("one core", "numba", "gigatoken")),
    "documents": (document_candidates, (*ARRAYS, "numba, encode_batch")),
}
