"""The tokenizer against its peers: training, encoding, decoding, memory.

Candidates are interleaved on the same text in the same run; peers that are not installed are left
out with a warning. Writes tokenizer_benchmark.jsonl, and a table and a figure from its records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt

from lib.core.figures import BLUE, ORANGE, house_figure, save_figure
from lib.core.hardware import available_cpus, local_results
from lib.core.records import Record, append_record, new_record, to_csv
from lib.core.settings import NonEmpty, PositiveInt, settings
from lib.data.stories import generate_stories
from lib.tokenizer.bpe import Tokenizer, train_bpe
from lib.tokenizer.files import save_huggingface, to_tiktoken
from lib.tokenizer.pretokenize import GPT2_PATTERN, SEPARATOR
from lib.tools.benchmarks.sections import Section, Table, write_report

log = logging.getLogger(__name__)
PEERS = ("gigatoken", "fastokens", "tiktoken", "tokenizers", "rustbpe")
MEGABYTE = 1_000_000
# Seconds after which a candidate is slow enough to be measured once.
PATIENCE = 30
# How much text the slow candidates encode, and tiktoken and the decoders get.
SLOW_BYTES, QUICK_CHARACTERS = 4 * MEGABYTE, 20 * MEGABYTE
BLOCK_CHARACTERS = 1 << 18
# Characters of a document, where documents are encoded one by one, and of all documents.
DOCUMENT_CHARACTERS = (200, 5_000, 50_000, 500_000, 5_000_000)
ALL_DOCUMENTS_CHARACTERS = 10_000_000
COLUMNS = {
    "task": "task",
    "text": "text",
    "vocab_size": "vocabulary",
    "candidate": "candidate",
    "cores": "cores",
    "seconds": "median (s)",
    "spread": "spread (s)",
    "samples": "samples",
    "MB_per_s": "MB/s",
    "ratio": "ours ÷ it",
    "peak_MB": "peak memory (MB)",
    "same_ids": "same ids",
}
# Tasks that the figure shows, and their titles.
FIGURE_TASKS = {"train": "Training, all cores", "encode": "Encoding, one core"}

# A sample has `seconds` and `bytes` of text, and may have `peak_MB` of memory.
Sample = dict[str, float]


@settings
class TokenizerBenchmarkConfig:
    """The tokenizer against its peers, on whole texts."""

    texts: tuple[str, ...] = ("stories",)
    """`stories` (generated), or UTF-8 text files."""

    megabytes: PositiveInt = 100
    """Megabytes of each text to use."""

    vocab_sizes: Annotated[tuple[Annotated[int, Gt(256)], ...], NonEmpty] = (10_000, 32_000)
    """Vocabulary sizes to train; the first one also encodes."""

    samples: PositiveInt = 3
    """Samples per candidate."""

    large_files: tuple[str, ...] = ()
    """Files to train on and encode once, for time and peak memory."""

    seed: int = 0
    """Seed of the generated stories."""

    output: Path = dataclasses.field(default_factory=local_results)
    """Folder for records, table and figure."""


def benchmark_tokenizer(config: TokenizerBenchmarkConfig) -> list[Record]:
    """Run the whole benchmark; write its records, a table and a figure, and return the records.

    Raises:
        FileNotFoundError: a text is neither `stories` nor a file.
    """
    # without it, Hugging Face's tokenizers use one core
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    missing = [name for name in PEERS if not is_installed(name)]
    if missing:
        log.warning(
            "not installed, so not measured: %s (pip install -r .ci/requirements-peers.txt)",
            ", ".join(missing),
        )
    versions = {name: importlib.metadata.version(name) for name in PEERS if is_installed(name)}
    path = config.output / "tokenizer_benchmark.jsonl"
    partial = path.with_suffix(".partial.jsonl")
    partial.unlink(missing_ok=True)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for figures in _measure_all(config, Path(folder)):
            record = new_record(figures, config=_without_folders(config), seed=config.seed)
            record["versions"] |= versions
            append_record(partial, record)
            records.append(record)
            log.info("%s", _line(figures))
    partial.replace(path)
    write_tokenizer_report(records, config.output)
    return records


def _measure_all(config: TokenizerBenchmarkConfig, folder: Path) -> Iterator[dict[str, Any]]:
    log.info("compiling the tokenizer from scratch, which takes half a minute")
    yield from measure_compilation(folder)
    for name in config.texts:
        log.info("writing %d MB of %s", config.megabytes, name)
        path = _prepare_text(name, config, folder)
        for vocab_size in config.vocab_sizes:
            log.info("training: each candidate %d times, in new processes", config.samples)
            yield from measure_training(path, vocab_size, config.samples)
        log.info("encoding and decoding: each candidate %d times", config.samples)
        yield from measure_encoding(path, config.vocab_sizes[0], config.samples)
        yield from measure_documents(path, config.vocab_sizes[0], config.samples)
    for name in config.large_files:
        yield from measure_memory(Path(name), config.vocab_sizes[0])


def _prepare_text(name: str, config: TokenizerBenchmarkConfig, folder: Path) -> Path:
    """Write the first `megabytes` of a text to a file named after it."""
    size = config.megabytes * MEGABYTE
    path = folder / f"{Path(name).stem}.txt"
    with open(path, "w", encoding="utf-8", newline="") as file:
        if name == "stories":
            file.writelines(generate_stories(size, seed=config.seed))
        else:
            with open(name, encoding="utf-8", errors="replace", newline="") as source:
                file.write(source.read(size))
    return path


def _without_folders(config: TokenizerBenchmarkConfig) -> TokenizerBenchmarkConfig:
    """The config for a record: file names without their folders on this machine."""
    names: dict = {
        key: tuple(Path(name).name for name in getattr(config, key))
        for key in ("texts", "large_files")
    }
    return dataclasses.replace(config, **names, output=Path(config.output.name))


def _line(figures: Mapping[str, Any]) -> str:
    """Describe figures in one line, for the log."""
    speed = f", {figures['MB_per_s']:.1f} MB/s" if figures.get("MB_per_s") else ""
    where = " ".join(str(figures[key]) for key in ("text", "vocab_size") if key in figures)
    return f"{figures['task']} {where} {figures['candidate']}: {figures['seconds']:.2f} s{speed}"


def is_installed(peer: str) -> bool:
    """Whether a peer can be measured here."""
    return importlib.util.find_spec(peer) is not None


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


def summarize(results: Mapping[str, Sequence[Sample]], **common: Any) -> Iterator[dict[str, Any]]:
    """Figures of each candidate: medians, spreads, and how many times faster `numba` is."""
    speeds = {
        name: statistics.median(sample["bytes"] / sample["seconds"] for sample in samples)
        for name, samples in results.items()
    }
    for name, samples in results.items():
        seconds = [sample["seconds"] for sample in samples]
        peaks = [sample["peak_MB"] for sample in samples if "peak_MB" in sample]
        yield {
            **common,
            "candidate": name,
            "seconds": statistics.median(seconds),
            "spread": max(seconds) - min(seconds),
            "samples": len(seconds),
            "MB": samples[0]["bytes"] / MEGABYTE,
            "MB_per_s": speeds[name] / MEGABYTE,
            "ratio": speeds["numba"] / speeds[name],
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


def measure_compilation(folder: Path) -> Iterator[dict[str, Any]]:
    """Seconds of the first use, with an empty cache of machine code and with a full one."""
    for candidate in ("nothing compiled yet", "compiled before"):
        seconds = in_new_process(_first_use, folder / "numba")
        figures = {"task": "first use", "candidate": candidate, "cores": 1}
        yield figures | {"seconds": seconds, "samples": 1}


def _first_use(cache_folder: Path) -> float:
    os.environ["NUMBA_CACHE_DIR"] = str(cache_folder)
    start = time.perf_counter()
    tokenizer = _trained_on("the cat sat on the mat " * 100, 260)
    tokenizer.decode(tokenizer.encode("the cat"))
    return time.perf_counter() - start


def _trained_on(text: str, vocab_size: int) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8", newline="")
        trained = train_bpe(path, vocab_size, [SEPARATOR], implementation="numba")
    return Tokenizer(*trained, [SEPARATOR], implementation="numba")


def measure_training(path: Path, vocab_size: int, samples: int) -> Iterator[dict[str, Any]]:
    """Time from a file to its merges on all cores, each sample in a process of its own."""
    candidates = {
        name: functools.partial(in_new_process, timed_training, name, path, vocab_size)
        for name in TRAINERS
        if name not in PEERS or is_installed(name)
    }
    common = {"task": "train", "text": path.stem, "vocab_size": vocab_size}
    yield from summarize(interleave(candidates, samples), **common, cores=available_cpus())


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


def _train_rustbpe(path: Path, vocab_size: int) -> None:
    import rustbpe

    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(documents(path), vocab_size - 1, pattern=GPT2_PATTERN)


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
    "rustbpe": _train_rustbpe,
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


def measure_encoding(path: Path, vocab_size: int, samples: int) -> Iterator[dict[str, Any]]:
    """Speed of encoding on one core, on all cores, and of decoding, in this process.

    Candidates encode to arrays if they can. In the task `encode` each starts with empty caches, in
    `encode, warm` it has encoded the text before. Where `same_ids` is true, a peer's ids were
    compared with ours one by one and are equal.
    """
    trained = train_bpe(path, vocab_size, [SEPARATOR], implementation="numba")
    text = path.read_bytes().decode()

    def ours(implementation: str) -> Tokenizer:
        return Tokenizer(*trained, [SEPARATOR], implementation=implementation)

    def encode_stream(workers: int) -> Callable[[], Sample]:
        def make() -> Callable[[], None]:
            return functools.partial(_encode_file, ours("numba"), path, workers)

        return fresh(make, path.stat().st_size)

    one_core, cores, size = encode_stream(workers=1), available_cpus(), path.stat().st_size
    makers = array_encoders(ours)
    same = compare_ids(makers, text)
    cold = {
        name: fresh(lambda make=make: functools.partial(make(), text), size)
        for name, make in makers.items()
        if name != "numba"
    }
    warm = {name: timed(functools.partial(make(), text), size) for name, make in makers.items()}
    tasks = {
        "encode": {"numba": one_core, **encoders(ours, text), **cold},
        "encode, warm": warm,
    }
    if cores > 1:
        tasks["encode, all cores"] = {"one core": one_core, "numba": encode_stream(cores)}
        if is_installed("gigatoken"):
            tasks["encode, all cores"]["gigatoken"] = functools.partial(
                in_new_process, _encode_gigatoken, huggingface_json(ours("numba")), path
            )
    tasks["decode"] = decoders(ours("numba"), text[:QUICK_CHARACTERS])
    for task, candidates in tasks.items():
        used = cores if task == "encode, all cores" else 1
        with on_cores(used):
            interleave(candidates, 1)  # warm up
            results = interleave(candidates, samples)
        common = {"text": path.stem, "vocab_size": vocab_size, "task": task, "cores": used}
        for figures in summarize(results, **common):
            yield figures | {"same_ids": same.get(figures["candidate"])}


def _encode_gigatoken(document: str, path: Path) -> Sample:
    """Encode a file on all cores with empty caches; its threads have started."""
    from gigatoken import BytesSource, Tokenizer

    tokenizer, data = Tokenizer.from_json(document), path.read_bytes()
    tokenizer.encode_batch(["a", "b"], parallel=True)
    source = BytesSource([data], separator=SEPARATOR)
    return timed(lambda: tokenizer.encode_batch(source, parallel=True), len(data))()


def huggingface_json(tokenizer: Tokenizer) -> str:
    """The tokenizer in Hugging Face's format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        save_huggingface(path, tokenizer.parts)
        return path.read_text()


def array_encoders(
    ours: Callable[[str], Tokenizer],
) -> dict[str, Callable[[], Callable[[str], np.ndarray]]]:
    """Candidate -> a function that makes it anew, with empty caches, and returns its encoder.

    Ours and those peers that encode a text of any size to an array on one core.
    """
    candidates: dict[str, Any] = {"numba": lambda: ours("numba").encode_array}
    document = huggingface_json(ours("numba"))
    if is_installed("gigatoken"):
        import gigatoken

        candidates["gigatoken"] = lambda: gigatoken.Tokenizer.from_json(document).encode
    if is_installed("fastokens"):
        from fastokens._native import Tokenizer as FastTokenizer

        def make_fastokens() -> Callable[[str], np.ndarray]:
            encode = FastTokenizer.from_json_str(document).encode_batch_flat
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


def measure_documents(path: Path, vocab_size: int, samples: int) -> Iterator[dict[str, Any]]:
    """Speed of encoding documents one by one on one core, by their size, with warm caches."""
    trained = train_bpe(path, vocab_size, [SEPARATOR], implementation="numba")
    text = path.read_bytes().decode()[:ALL_DOCUMENTS_CHARACTERS].replace(SEPARATOR, " ")

    def ours(implementation: str) -> Tokenizer:
        return Tokenizer(*trained, [SEPARATOR], implementation=implementation)

    candidates = {name: make() for name, make in array_encoders(ours).items()}
    if is_installed("tiktoken"):
        candidates["tiktoken"] = to_tiktoken(ours("numba").parts).encode_to_numpy
    batch = ours("numba").encode_batch
    for size in DOCUMENT_CHARACTERS:
        documents = [text[start : start + size] for start in range(0, len(text), size)]
        num_bytes = len(text.encode())

        def encode_all(encode: Callable, documents: Sequence[str] = documents) -> None:
            for document in documents:
                encode(document)

        runs = {
            name: timed(functools.partial(encode_all, encode), num_bytes)
            for name, encode in candidates.items()
        }
        runs["numba, encode_batch"] = timed(
            functools.partial(batch, documents, workers=1), num_bytes
        )
        with on_cores(1):
            interleave(runs, 1)  # warm up
            results = interleave(runs, samples)
        task = f"documents of {size:,} characters"
        common = {"text": path.stem, "vocab_size": vocab_size, "cores": 1}
        yield from summarize(results, task=task, **common)


def _encode_file(tokenizer: Tokenizer, path: Path, workers: int | None = None) -> None:
    with open(path, "rb") as stream:
        for _ in tokenizer.encode_stream(stream, workers=workers):
            pass


def encoders(ours: Callable[[str], Tokenizer], text: str) -> dict[str, Callable[[], Sample]]:
    """Candidates that encode the beginning of `text` on one core, the slow ones less of it."""
    slow, quick = text[: SLOW_BYTES // 2], text[:QUICK_CHARACTERS]
    slow_bytes, quick_bytes = len(slow.encode()), len(quick.encode())
    candidates = {"python": timed(lambda: ours("python").encode(slow), slow_bytes)}
    if is_installed("tiktoken"):
        encoding = to_tiktoken(ours("numba").parts)

        def encode_all(parts: Sequence[str]) -> None:
            for part in parts:
                encoding.encode_to_numpy(part, allowed_special="all")

        starts = range(0, len(quick), BLOCK_CHARACTERS)
        cuts = {
            "256 KB blocks": [quick[start : start + BLOCK_CHARACTERS] for start in starts],
            "by document": [document + SEPARATOR for document in quick.split(SEPARATOR)],
        }
        for name, parts in cuts.items():
            run = functools.partial(encode_all, parts)
            candidates[f"tiktoken, {name}"] = timed(run, quick_bytes)
    if is_installed("tokenizers"):
        from tokenizers import Tokenizer as PeerTokenizer

        peer = PeerTokenizer.from_str(huggingface_json(ours("numba")))
        documents = slow.split(SEPARATOR)
        candidates["tokenizers"] = timed(
            lambda: [peer.encode(document).ids for document in documents], slow_bytes
        )
    return candidates


def decoders(tokenizer: Tokenizer, text: str) -> dict[str, Callable[[], Sample]]:
    """Candidates that decode the tokens of `text`."""
    ids = tokenizer.encode_array(text)
    as_list, size = ids.tolist(), len(text.encode())
    candidates = {
        "numba": timed(lambda: tokenizer.decode(ids), size),
        "numba, from a list": timed(lambda: tokenizer.decode(as_list), size),
    }
    if is_installed("tiktoken"):
        encoding = to_tiktoken(tokenizer.parts)
        candidates["tiktoken"] = timed(lambda: encoding.decode(as_list), size)
    return candidates


def measure_memory(path: Path, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Time and peak memory of training on a large file, and of encoding it."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "bpe.json"
        # in processes of their own, so that the peak of encoding holds nothing of training
        in_new_process(_save_trained, path, vocab_size, tokenizer)
        samples = {
            "train, large": in_new_process(timed_training, "numba", path, vocab_size),
            "encode, large": in_new_process(_encode_large, path, tokenizer),
        }
    common = {"text": path.stem, "vocab_size": vocab_size, "cores": available_cpus()}
    for task, sample in samples.items():
        yield from summarize({"numba": [sample]}, task=task, **common)


def _save_trained(path: Path, vocab_size: int, output: Path) -> None:
    """Train on the beginning of a large file."""
    with open(path, "rb") as source:
        _trained_on(source.read(10 * MEGABYTE).decode(errors="ignore"), vocab_size).save(output)


def _encode_large(path: Path, tokenizer_path: Path) -> Sample:
    tokenizer = Tokenizer.load(tokenizer_path, implementation="numba")
    sample = timed(lambda: _encode_file(tokenizer, path), path.stat().st_size)()
    return sample | {"peak_MB": peak_memory()}


def write_tokenizer_report(records: Sequence[Record], output: Path) -> None:
    """Write tokenizer_benchmark.csv, .md and .png from the records of one run."""
    to_csv(records, output / "tokenizer_benchmark.csv")
    rows = [record["figures"] for record in records]
    first = records[0]
    peers = [f"{name} {first['versions'][name]}" for name in PEERS if name in first["versions"]]
    text = (
        f"{first['device']}, {first['date']}. Medians; the spread is the largest sample minus the "
        "smallest. `stories` is generated by this project; other texts are local files. Peers: "
        f"{', '.join(peers)}."
    )
    sections = [Section("The tokenizer against its peers", [text, Table(rows, COLUMNS)], level=1)]
    write_report(output / "tokenizer_benchmark.md", sections)
    save_tokenizer_figure(rows, output / "tokenizer_benchmark.png")


def save_tokenizer_figure(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> Path:
    """Draw bars of MB/s at the smallest vocabulary, a row of panels for each task."""
    rows = [row for row in rows if row["task"] in FIGURE_TASKS]
    first_size = min(row["vocab_size"] for row in rows)
    rows = [row for row in rows if row["vocab_size"] == first_size]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    shape = {"nrows": len(FIGURE_TASKS), "ncols": len(texts), "squeeze": False, "sharex": "row"}
    with house_figure(width=5.2 * len(texts), height=6.4, **shape) as (figure, grid):
        for panels, (task, title) in zip(grid, FIGURE_TASKS.items()):
            for axes, text in zip(panels, texts):
                chosen = [row for row in rows if (row["task"], row["text"]) == (task, text)]
                chosen.sort(key=lambda row: row["MB_per_s"])
                is_ours = [row["candidate"] in ("numba", "python") for row in chosen]
                bars = axes.barh(
                    [row["candidate"] for row in chosen],
                    [row["MB_per_s"] for row in chosen],
                    color=[BLUE if ours else ORANGE for ours in is_ours],
                )
                axes.bar_label(bars, fmt="%.3g", padding=3)
                axes.set(title=f"{title}\n{text}", xlabel="throughput (MB/s)", ylabel="candidate")
                axes.grid(visible=False, axis="y")
                axes.margins(x=0.15)
        return save_figure(figure, path)
