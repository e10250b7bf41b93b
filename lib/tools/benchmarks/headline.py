"""The main results in README.md and the table in .github/RESULTS.md, from records alone.

`python -m lib benchmark headline` writes them between the two marks in each file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lib.core.files import ROOT, write_atomically
from lib.core.records import read_records, to_frame, to_markdown
from lib.tools.benchmarks.attention_report import attention_rows

# As many of the newest runs make an interval.
RUNS = 5
START, END = "<!-- results: python -m lib benchmark headline -->", "<!-- end of results -->"


def fill_pages(root: str | os.PathLike = ROOT) -> None:
    """Fill both pages in the folder `root` from the records in its artifacts/.

    Raises:
        ValueError: a page lacks the marks.
    """
    for page, content in headline_pages(root).items():
        path = Path(root) / page
        write_atomically(path, fill_in(path.read_text(encoding="utf-8"), content))


def headline_pages(root: str | os.PathLike) -> dict[str, str]:
    """The text between the marks of each page: results in words, and the table of all."""
    rows = headline_rows(Path(root) / "artifacts")
    table = [row | {"on": row["on"].replace("](", "](../")} for _, row in rows]
    words = [comparison.in_words(row) for comparison, row in rows if comparison.meaning]
    return {"README.md": "\n".join(["", *words, ""]), ".github/RESULTS.md": to_markdown(table)}


def fill_in(text: str, content: str) -> str:
    """Return `text` with `content` between its two marks."""
    before, _, rest = text.partition(START)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the text must contain {START} and then {END}")
    return f"{before}{START}\n{content}{END}{after}"


def headline_rows(artifacts: str | os.PathLike) -> list[tuple[Comparison, dict[str, str]]]:
    """The main results of each benchmark that has records in the folder `artifacts`."""
    tables = [(comparison, comparison.read(Path(artifacts))) for comparison in COMPARISONS]
    return [(comparison, comparison.row(frame)) for comparison, frame in tables if len(frame)]


def on_record(report: Path, root: Path = ROOT) -> str:
    """Name the committed file that a new `report` can be compared with, and its main results.

    Empty if `report` is that file.
    """
    committed = root / "artifacts" / report.name
    if committed == report.resolve():
        return ""
    link = f"artifacts/{report.name}"
    rows = [
        comparison.row(comparison.read(root / "artifacts"))
        for comparison in COMPARISONS
        if comparison.link == link
    ]
    lines = [f"on record: {link}"]
    for row in rows:
        device = row["on"].split("]")[0].lstrip("[")
        lines.append(f"  {row['what']}: {row['here']}, best other {row['best other']}; {device}")
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class Comparison:
    """A row of the table: our speed against that of the fastest peer."""

    what: str  # `{…}` is a field of our row
    file: str  # of records, without .jsonl
    where: Mapping[str, Any]  # fields that select records; the newest run of them is shown
    candidate: str  # the field with the candidate's name
    ours: str  # our name
    peers: tuple[str, ...]  # the beginnings of the peers' names
    speed: str  # the field to compare
    unit: str
    device: str = "{device}"  # `{…}` is a field of our row
    report: str = ""  # without .md, if it is not called like the records
    meaning: str = ""  # the sentence of the README; `{times}` is the ratio and the peer

    @property
    def link(self) -> str:
        """The report's path in the repository."""
        return f"artifacts/{self.report or self.file}.md"

    def read(self, artifacts: Path) -> pd.DataFrame:
        """The records of `file` in the folder `artifacts`, a row for each candidate."""
        found = read_records(artifacts / f"{self.file}.jsonl")
        if self.file == "attention_repeats":
            return pd.DataFrame(attention_rows(found))
        return to_frame(found)

    def row(self, frame: pd.DataFrame) -> dict[str, str]:
        """The row for the table: the speeds of the newest run, and how far its runs agree."""
        # the candidates that ran, with a peer to compare with
        runs = [run for run in self._runs(frame) if self.ours in run and len(run) > 1]
        newest = runs[-1]
        ours = newest[self.ours]
        peers = newest.keys() - {self.ours}
        best = max(sorted(peers), key=lambda name: newest[name][self.speed])
        times = [
            run[self.ours][self.speed] / run[best][self.speed]
            for run in runs
            if best in run and run[best]["device"] == ours["device"]
        ][-RUNS:]
        peer = PEERS.get(best, best.split(",")[0])
        return {
            "what": self.what.format(**ours),
            "here": f"{ours[self.speed]:,.0f} {self.unit}",
            "best other": f"{newest[best][self.speed]:,.0f} ({peer})",
            "times": _interval(times),
            "runs": f"{len(times)}",
            "on": f"[{self.device.format(**ours)}]({self.link})",
        }

    def in_words(self, row: Mapping[str, str]) -> str:
        """The README's line for the row of `self.row`."""
        peer = row["best other"].partition("(")[2].rstrip(")")
        joint = "with" if row["times"].startswith("level") else "times"
        times = f"{row['times']} {joint} {peer}"
        return f"- {self.meaning.format(times=times)}"

    def _runs(self, frame: pd.DataFrame) -> list[dict[str, dict[str, Any]]]:
        """Group by run; a name that comes again, or another launch, begins one."""
        names = frame[self.candidate].fillna("").astype(str)
        is_shown = (names == self.ours) | names.str.startswith(self.peers)
        is_shown &= frame[self.speed].notna()
        for field, value in self.where.items():
            is_shown &= frame[field] == value
        runs: list[dict[str, dict[str, Any]]] = [{}]
        begun = None
        for row in frame[is_shown].to_dict("records"):
            launch = row["device"], row.get("launch")
            if row[self.candidate] in runs[-1] or launch != begun:
                runs.append({})
            begun = launch
            runs[-1][row[self.candidate]] = row
        return runs


def _interval(times: Sequence[float]) -> str:
    """`times` from least to most; "level" where they do not agree on who is ahead."""
    least, most = (f"{times:.2f}" for times in (min(times), max(times)))
    words = least if least == most else f"{least} to {most}"
    is_level = len(times) > 1 and min(times) <= 1 <= max(times)
    return f"level ({words})" if is_level else words


# Peers that the table does not call by their names in the records.
PEERS = {
    "torch_ddp": "PyTorch's DDP",
    "torch_ddp+torch_zero": "PyTorch's ZeRO",
    "fsdp2": "PyTorch's FSDP2",
    "fa4": "FlashAttention-4",
    "fa4_deterministic": "FlashAttention-4",
}
DICTIONARY, CODE = "gcide", "linux"
TOKENIZERS = ("gigatoken", "fastokens", "tiktoken", "tokenizers", "rustbpe")
KERNELS = ("kernel", "flash_attention_triton", ("sdpa_", "flex_", "fa4"), "tflops", "TFLOP/s")
CAUSAL = {
    "queries": 4096,
    "keys": 4096,
    "is_causal": True,
    "dtype": "bfloat16",
    "in_graph": True,
}
ATTENTION = {
    "forward": "**Attention forward**, causal, heads of 64, 4,096 tokens: {times}, which leads at "
    "16,384.",
    "backward": "**Attention backward**: {times}.",
}


def _tokenizer(what: str, task: str, text: str, cores: str, meaning: str = "") -> Comparison:
    return Comparison(
        f"tokenizer, {what}",
        "tokenizer_repeats",
        {"task": task, "text": text, "vocab_size": 10_000},
        *("candidate", "numba", TOKENIZERS, "MB_per_s", "MB/s"),
        device=f"{{device}}, {cores}",
        report="tokenizer_benchmark",
        meaning=meaning,
    )


def _sharding(what: str, ours: str, peer: str) -> Comparison:
    return Comparison(
        f"{what}, 2.0 billion parameters",
        "sharding_repeats",
        {"model": "xl", "ranks": 2},
        *("method", ours, (peer,), "tokens_per_s", "tokens/s"),
        device="2 × {device}",
        report="sharding_benchmark",
    )


COMPARISONS = (
    _tokenizer(
        "training on an English dictionary",
        *("train", DICTIONARY, "{cores} cores"),
        meaning="**Training a tokenizer** on a dictionary: {times}.",
    ),
    _tokenizer("training on Linux's C code", "train", CODE, "{cores} cores"),
    _tokenizer(
        "encoding the dictionary",
        *("encode", DICTIONARY, "1 core"),
        meaning="**Encoding** it, on one core: {times}.",
    ),
    _tokenizer("encoding Linux's C code", "encode", CODE, "1 core"),
    Comparison(
        "training, 124 million parameters, 32 × 1,024 tokens",
        "training_repeats",
        {"task": "step", "model": "gpt2-124m"},
        *("candidate", "all", ("nanoGPT-style",), "tokens_per_s", "tokens/s"),
        report="training_benchmark",
        meaning="**Training** a model of GPT-2's size on one GPU: {times} code, compiled too.",
    ),
    *(
        Comparison(
            f"attention {direction}, causal, 4,096 tokens, heads of {head_dim}",
            "attention_repeats",
            CAUSAL | {"direction": direction, "head_dim": head_dim},
            *KERNELS,
            report="attention_sweep_report",
            meaning=ATTENTION[direction] if head_dim == 64 else "",
        )
        for direction in ("forward", "backward")
        for head_dim in (64, 128)
    ),
    Comparison(
        "data parallelism, 969 million parameters, {scaling_efficiency:.1%} of two alone",
        "lm_matrix_repeats",
        {"model": "large", "tr_batch_size": 128, "low_precision_weights": True, "ranks": 2},
        *("wrapper", "flashddp", ("torch_ddp",), "tokens_per_s", "tokens/s"),
        device="2 × {device}",
        report="lm_matrix_report",
        meaning="**Data parallelism** on two GPUs: {times}; notebook 08 builds up to it.",
    ),
    _sharding("sharded optimizer", "zero1", "torch_ddp+torch_zero"),
    _sharding("fully sharded", "fsdp", "fsdp2"),
)
