"""The tokenizer against its peers: training, encoding, decoding, memory.

Every figure comes from candidates that take turns on the same text in the same run. Peers that are
not installed are left out by name. Results are records in `tokenizer_benchmark.jsonl`, and a table
and a figure made from them.
"""

import dataclasses
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lib.config import TokenizerBenchmarkConfig
from lib.corpus import generate_stories
from lib.parallel import available_cpus
from lib.pretokenize import GPT2_PATTERN, SEPARATOR
from lib.report import Record, append_record, new_record, to_csv, to_markdown
from lib.tokenizer import Tokenizer, train_bpe

log = logging.getLogger(__name__)

PEERS = {"rustbpe": "rustbpe", "tokenizers": "tokenizers", "tiktoken": "tiktoken"}
MEGABYTE = 1_000_000

# How much of the text the slow candidates encode, and how tiktoken gets its text.
SLOW_BYTES = 4 * MEGABYTE
BLOCK_CHARACTERS = 1 << 18


def benchmark_tokenizer(config: TokenizerBenchmarkConfig) -> list[Record]:
    """Run the whole benchmark; returns its records and writes them with their table.

    Raises:
        FileNotFoundError: a text is neither `stories` nor a file.
    """
    # Hugging Face's tokenizers would use every core where one is measured.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    missing = [name for name in PEERS if importlib.util.find_spec(PEERS[name]) is None]
    if missing:
        log.warning("not installed, so not measured: %s", ", ".join(missing))
    path = config.output / "tokenizer_benchmark.jsonl"
    partial = path.with_suffix(".partial.jsonl")
    partial.unlink(missing_ok=True)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for figures in _measure_all(config, Path(folder)):
            record = new_record(figures, config=_without_folders(config), seed=config.seed)
            append_record(partial, record)
            records.append(record)
            log.info("%s", _line(figures))
    partial.replace(path)
    write_results(records, config.output)
    return records


def write_results(records: list[Record], output: Path) -> None:
    """Write the table (CSV and Markdown) and the figure of `records`."""
    from lib.plots import save_tokenizer_figure

    to_csv(records, output / "tokenizer_benchmark.csv")
    columns = {
        "task": "task",
        "text": "text",
        "vocab_size": "vocabulary",
        "candidate": "candidate",
        "cores": "cores",
        "seconds": "median (s)",
        "spread": "spread (s)",
        "MB_per_s": "MB/s",
        "ratio": "ours ÷ it",
        "peak_MB": "peak memory (MB)",
    }
    rows = [record["figures"] for record in records]
    first = records[0]
    heading = (
        f"# The tokenizer against its peers\n\n{first['device']}, {first['date']}. Medians; the "
        "spread is the largest less the smallest sample.\n\n"
    )
    text = heading + to_markdown(rows, columns)
    (output / "tokenizer_benchmark.md").write_text(text, encoding="utf-8")
    save_tokenizer_figure(records, output / "tokenizer_benchmark.png")


def _measure_all(config: TokenizerBenchmarkConfig, folder: Path) -> Iterator[dict[str, Any]]:
    yield from measure_compilation(folder)
    for name in config.texts:
        path = _prepare_text(name, config, folder)
        for vocab_size in config.vocab_sizes:
            yield from measure_training(path, vocab_size, config.samples)
        yield from measure_encoding(path, config.vocab_sizes[0], config.samples)
    for name in config.large_files:
        yield from measure_memory(Path(name), config.vocab_sizes[0])


def _prepare_text(name: str, config: TokenizerBenchmarkConfig, folder: Path) -> Path:
    """The first `megabytes` of a text, as a file named after it."""
    size = config.megabytes * MEGABYTE
    path = folder / f"{Path(name).stem}.txt"
    with open(path, "w", encoding="utf-8", newline="") as file:
        if name == "stories":
            file.writelines(generate_stories(size, seed=config.seed))
        else:
            with open(name, encoding="utf-8", errors="replace", newline="") as source:
                file.write(source.read(size))
    return path


def take_turns(
    candidates: dict[str, Callable[[], dict[str, float]]], samples: int
) -> dict[str, list[dict[str, float]]]:
    """Call each candidate `samples` times, taking turns, so that all see the same machine."""
    results = {name: [] for name in candidates}
    for _ in range(samples):
        for name, candidate in candidates.items():
            results[name].append(candidate())
    return results


def summarize(
    results: dict[str, list[dict[str, float]]], ours: str, **common: Any
) -> Iterator[dict[str, Any]]:
    """Medians and spreads, and how many times faster `ours` is, by throughput."""
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
            "ratio": speeds[ours] / speeds[name],
            "peak_MB": max(peaks, default=None),
        }


# Training: each sample in a process of its own, after a warm-up on a small text.


def measure_training(path: Path, vocab_size: int, samples: int) -> Iterator[dict[str, Any]]:
    """Seconds from a file to its merges, on all cores, for every candidate."""
    trainers = {"numba": _train_numba, "python": _train_python}
    if importlib.util.find_spec("rustbpe"):
        trainers["rustbpe"] = _train_rustbpe
    if importlib.util.find_spec("tokenizers"):
        trainers["tokenizers"] = _train_tokenizers
    candidates = {
        name: lambda trainer=trainer: in_new_process(_timed_training, trainer, path, vocab_size)
        for name, trainer in trainers.items()
    }
    results = take_turns(candidates, samples)
    common = {"task": "train", "text": path.stem, "vocab_size": vocab_size}
    yield from summarize(results, "numba", **common, cores=available_cpus())


def in_new_process(function: Callable, *arguments: Any) -> Any:
    """The result of `function` called in a fresh process, not forked."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def _timed_training(
    trainer: Callable[[Path, int], None], path: Path, vocab_size: int
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.txt"
        small.write_text("".join(generate_stories(20_000)), newline="")
        trainer(small, 290)
    before = time.perf_counter()
    trainer(path, vocab_size)
    seconds = time.perf_counter() - before
    return {"seconds": seconds, "bytes": path.stat().st_size, "peak_MB": peak_memory()}


def peak_memory() -> float:
    """The most memory that this process has held so far, in MB; its children are not counted."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: there, a process inherits the peak of the one that started it.
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 / MEGABYTE
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MEGABYTE if sys.platform == "darwin" else peak * 1024 / MEGABYTE


def _train_numba(path: Path, vocab_size: int) -> None:
    train_bpe(path, vocab_size, [SEPARATOR], implementation="numba")


def _train_python(path: Path, vocab_size: int) -> None:
    train_bpe(path, vocab_size, [SEPARATOR], implementation="python")


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


def documents(path: Path) -> Iterator[str]:
    """The documents of a file, without the separators, for peers that would count those."""
    rest = ""
    with open(path, encoding="utf-8", newline="") as file:
        while block := file.read(1 << 20):
            *whole, rest = (rest + block).split(SEPARATOR)
            yield from whole
    yield rest


def measure_compilation(folder: Path) -> Iterator[dict[str, Any]]:
    """Seconds that the first use costs, with an empty cache of machine code and with a full one."""
    for candidate in ("nothing compiled yet", "compiled before"):
        seconds = in_new_process(_first_use, str(folder / "numba"))
        yield {
            "task": "first use",
            "candidate": candidate,
            "cores": 1,
            "seconds": seconds,
            "samples": 1,
        }


def _first_use(cache_folder: str) -> float:
    os.environ["NUMBA_CACHE_DIR"] = cache_folder
    before = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.txt"
        path.write_text("the cat sat on the mat " * 100)
        vocab, merges = train_bpe(path, 260, implementation="numba")
    tokenizer = Tokenizer(vocab, merges, implementation="numba")
    tokenizer.decode(tokenizer.encode("the cat"))
    return time.perf_counter() - before


# Encoding and decoding: on one core, in this process; the caches of ours start empty every time.


def measure_encoding(path: Path, vocab_size: int, samples: int) -> Iterator[dict[str, Any]]:
    """MB/s of text encoded on one core, to arrays where the candidate can; then decoded."""
    vocab, merges = train_bpe(path, vocab_size, [SEPARATOR], implementation="numba")
    text = path.read_bytes().decode()
    slow_text = text[: SLOW_BYTES // 2]
    common = {"text": path.stem, "vocab_size": vocab_size}

    def ours(implementation: str) -> Tokenizer:
        return Tokenizer(vocab, merges, [SEPARATOR], implementation=implementation)

    def encode_stream(workers: int) -> None:
        with open(path, "rb") as stream:
            for _ in ours("numba").encode_stream(stream, workers=workers):
                pass

    num_bytes, slow_bytes = path.stat().st_size, len(slow_text.encode())
    candidates = {
        "numba": timed(lambda: encode_stream(1), num_bytes),
        "python": timed(lambda: ours("python").encode(slow_text), slow_bytes),
    }
    encodings = _peer_encodings(vocab, merges, text, slow_text)
    candidates |= {name: timed(function, size) for name, (function, size) in encodings.items()}
    candidates["numba"]()
    results = take_turns(candidates, samples)
    yield from summarize(results, "numba", **common, task="encode", cores=1)
    cores = available_cpus()
    if cores > 1:
        many = timed(lambda: encode_stream(cores), num_bytes)
        results = take_turns({"one core": candidates["numba"], "numba": many}, samples)
        yield from summarize(results, "numba", **common, task="encode, all cores", cores=cores)
    yield from _measure_decoding(ours("numba"), text[: 20 * MEGABYTE], samples, common)


def _peer_encodings(
    vocab: dict[int, bytes], merges: list, text: str, slow_text: str
) -> dict[str, tuple[Callable[[], Any], int]]:
    """How the peers encode: a function without arguments, and the bytes of text it takes."""
    encodings = {}
    if importlib.util.find_spec("tiktoken"):
        encoding = _tiktoken_encoding(vocab)
        part = text[: 20 * MEGABYTE]
        size = len(part.encode())
        blocks = [part[i : i + BLOCK_CHARACTERS] for i in range(0, len(part), BLOCK_CHARACTERS)]
        by_document = [document + SEPARATOR for document in part.split(SEPARATOR)]
        encodings["tiktoken, 256 KB blocks"] = (
            lambda: [encoding.encode_to_numpy(b, allowed_special="all") for b in blocks],
            size,
        )
        encodings["tiktoken, by document"] = (
            lambda: [encoding.encode_to_numpy(d, allowed_special="all") for d in by_document],
            size,
        )
    if importlib.util.find_spec("tokenizers"):
        tokenizer = _tokenizers_tokenizer(vocab, merges)
        slow_documents = slow_text.split(SEPARATOR)
        encodings["tokenizers"] = (
            lambda: [tokenizer.encode(document).ids for document in slow_documents],
            len(slow_text.encode()),
        )
    return encodings


def timed(function: Callable[[], Any], num_bytes: int) -> Callable[[], dict[str, float]]:
    """Make a candidate for `take_turns` of a function that works on so many bytes of text."""

    def sample() -> dict[str, float]:
        before = time.perf_counter()
        function()
        return {"seconds": time.perf_counter() - before, "bytes": num_bytes}

    return sample


def _measure_decoding(
    tokenizer: Tokenizer, text: str, samples: int, common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    ids = tokenizer.encode_array(text)
    as_list, size = ids.tolist(), len(text.encode())
    candidates = {
        "numba": timed(lambda: tokenizer.decode(ids), size),
        "numba, from a list": timed(lambda: tokenizer.decode(as_list), size),
    }
    if importlib.util.find_spec("tiktoken"):
        encoding = _tiktoken_encoding(tokenizer.vocab)
        candidates["tiktoken"] = timed(lambda: encoding.decode(as_list), size)
    take_turns(candidates, 1)
    results = take_turns(candidates, samples)
    yield from summarize(results, "numba", **common, task="decode", cores=1)


def _tiktoken_encoding(vocab: dict[int, bytes]) -> Any:
    import tiktoken

    ranks = {token: token_id for token_id, token in vocab.items()}
    special = {SEPARATOR: ranks.pop(SEPARATOR.encode())}
    return tiktoken.Encoding(
        "peer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def _tokenizers_tokenizer(vocab: dict[int, bytes], merges: list) -> Any:
    from tokenizers import Tokenizer as PeerTokenizer

    from lib.tokenizer_files import save_huggingface

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        save_huggingface(path, Tokenizer(vocab, merges, [SEPARATOR]).parts)
        return PeerTokenizer.from_file(str(path))


# Memory


def measure_memory(path: Path, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Time and peak memory of training on a large file, and of encoding it."""
    for task, function in (("train, large", _train_large), ("encode, large", _encode_large)):
        figures = in_new_process(function, path, vocab_size)
        yield {
            "task": task,
            "text": path.stem,
            "vocab_size": vocab_size,
            "candidate": "numba",
            "cores": available_cpus(),
            "seconds": figures["seconds"],
            "samples": 1,
            "MB": figures["bytes"] / MEGABYTE,
            "MB_per_s": figures["bytes"] / MEGABYTE / figures["seconds"],
            "peak_MB": figures["peak_MB"],
        }


def _train_large(path: Path, vocab_size: int) -> dict[str, float]:
    figures = timed(lambda: _train_numba(path, vocab_size), path.stat().st_size)()
    return {**figures, "peak_MB": peak_memory()}


def _encode_large(path: Path, vocab_size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.txt"
        with open(path, "rb") as source:
            part.write_bytes(source.read(10 * MEGABYTE))
        vocab, merges = train_bpe(part, vocab_size, [SEPARATOR], implementation="numba")
    tokenizer = Tokenizer(vocab, merges, [SEPARATOR], implementation="numba")

    def encode() -> None:
        with open(path, "rb") as stream:
            for _ in tokenizer.encode_stream(stream):
                pass

    figures = timed(encode, path.stat().st_size)()
    return {**figures, "peak_MB": peak_memory()}


def _without_folders(config: TokenizerBenchmarkConfig) -> TokenizerBenchmarkConfig:
    """What a record keeps: the names of files, not where they lie on this machine."""
    return dataclasses.replace(
        config,
        texts=tuple(Path(name).name for name in config.texts),
        large_files=tuple(Path(name).name for name in config.large_files),
        output=Path(config.output.name),
    )


def _line(figures: dict[str, Any]) -> str:
    speed = f", {figures['MB_per_s']:.1f} MB/s" if figures.get("MB_per_s") else ""
    where = " ".join(str(figures[key]) for key in ("text", "vocab_size") if key in figures)
    return f"{figures['task']} {where} {figures['candidate']}: {figures['seconds']:.2f} s{speed}"
