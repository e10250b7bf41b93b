"""The README's table of results, from records alone.

`python -m lib benchmark headline` writes it between the two marks in README.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.benchmarks.attention_report import attention_rows
from lib.core.files import ROOT, write_atomically
from lib.core.records import Record, read_records, to_markdown

START, END = "<!-- results: python -m lib benchmark headline -->", "<!-- end of results -->"


def fill_readme(root: str | os.PathLike = ROOT) -> None:
    """Fill the table in README.md of the folder `root` from the records in its artifacts/.

    Raises:
        ValueError: README.md lacks the marks.
    """
    readme = Path(root) / "README.md"
    text = fill_in(readme.read_text(encoding="utf-8"), headline_rows(Path(root) / "artifacts"))
    write_atomically(readme, text)


def fill_in(text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `text` with the table of `rows` between its two marks."""
    before, _, rest = text.partition(START)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the text must contain {START} and then {END}")
    return f"{before}{START}\n{to_markdown(rows)}{END}{after}"


def headline_rows(artifacts: str | os.PathLike) -> list[dict[str, str]]:
    """The main results of each benchmark that has records in the folder `artifacts`."""
    rows = []
    for comparison in COMPARISONS:
        records = read_records(Path(artifacts, f"{comparison.file}.jsonl"))
        rows += [comparison.row(records)] if records else []
    return rows


def on_record(report: Path, root: Path = ROOT) -> str:
    """Name the committed file that a new `report` can be compared with, and its main results.

    Empty if `report` is that file.
    """
    committed = root / "artifacts" / report.name
    if committed == report.resolve():
        return ""
    link = f"artifacts/{report.name}"
    rows = [
        comparison.row(read_records(root / f"artifacts/{comparison.file}.jsonl"))
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
    where: Mapping[str, Any]  # fields that select records; the newest of them counts
    candidate: str  # the field with the candidate's name
    ours: str  # our name
    peers: tuple[str, ...]  # the beginnings of the peers' names
    speed: str  # the field to compare
    unit: str
    device: str = "{device}"  # `{…}` is a field of our row
    report: str = ""  # without .md, if it is not called like the records

    @property
    def link(self) -> str:
        """The report's path in the repository."""
        return f"artifacts/{self.report or self.file}.md"

    def row(self, records: Iterable[Record]) -> dict[str, str]:
        """The row for the table, from records."""
        if self.file == "attention_sweep":
            flat = attention_rows(records)
        else:
            flat = [{**r["config"], **r["figures"], "device": r["device"]} for r in records]
        found = {r[self.candidate]: r for r in flat if self.where.items() <= r.items()}
        speeds = {name: row.get(self.speed) or 0 for name, row in found.items()}
        ours = found[self.ours]
        peers = [name for name in found if name.startswith(self.peers)]
        best = max(peers, key=speeds.__getitem__)
        peer = PEERS.get(best, best.split(",")[0])
        return {
            "what": self.what.format(**ours),
            "here": f"{speeds[self.ours]:,.0f} {self.unit}",
            "best other": f"{speeds[best]:,.0f} ({peer})",
            "times": f"{speeds[self.ours] / speeds[best]:.2f}",
            "on": f"[{self.device.format(**ours)}]({self.link})",
        }


# Peers that the table does not call by their names in the records.
PEERS = {
    "torch_ddp": "PyTorch's DDP",
    "torch_ddp+torch_zero": "PyTorch's ZeRO",
    "fsdp2": "PyTorch's FSDP2",
    "fa4": "FlashAttention-4",
    "fa4_deterministic": "FlashAttention-4",
}
DICTIONARY = {"text": "gcide", "vocab_size": 10_000}
CODE = {"text": "linux", "vocab_size": 10_000}
TOKENIZERS = (
    "candidate",
    "numba",
    ("gigatoken", "fastokens", "tiktoken", "tokenizers", "rustbpe"),
    "MB_per_s",
    "MB/s",
)
KERNELS = ("kernel", "flash_attention_triton", ("sdpa_", "flex_", "fa4"), "tflops", "TFLOP/s")
CAUSAL = {
    "queries": 4096,
    "keys": 4096,
    "is_causal": True,
    "dtype": "bfloat16",
    "in_graph": True,
}
COMPARISONS = (
    Comparison(
        "tokenizer, training on an English dictionary",
        "tokenizer_benchmark",
        DICTIONARY | {"task": "train"},
        *TOKENIZERS,
        device="{device}, {cores} cores",
    ),
    Comparison(
        "tokenizer, training on Linux's C code",
        "tokenizer_benchmark",
        CODE | {"task": "train"},
        *TOKENIZERS,
        device="{device}, {cores} cores",
    ),
    Comparison(
        "tokenizer, encoding the dictionary",
        "tokenizer_benchmark",
        DICTIONARY | {"task": "encode"},
        *TOKENIZERS,
        device="{device}, 1 core",
    ),
    Comparison(
        "tokenizer, encoding Linux's C code",
        "tokenizer_benchmark",
        CODE | {"task": "encode"},
        *TOKENIZERS,
        device="{device}, 1 core",
    ),
    Comparison(
        "training, 124 million parameters, 32 × 1,024 tokens",
        "training_benchmark",
        {"task": "step", "model": "gpt2-124m"},
        *("candidate", "all", ("nanoGPT-style",), "tokens_per_s", "tokens/s"),
    ),
    *(
        Comparison(
            f"attention {direction}, causal, 4,096 tokens, heads of {head_dim}",
            "attention_sweep",
            CAUSAL | {"direction": direction, "head_dim": head_dim},
            *KERNELS,
            report="attention_sweep_report",
        )
        for direction in ("forward", "backward")
        for head_dim in (64, 128)
    ),
    Comparison(
        "data parallelism, 969 million parameters, {scaling_efficiency:.1%} of two alone",
        "lm_matrix",
        {"model": "large", "tr_batch_size": 128, "low_precision_weights": True, "ranks": 2},
        *("wrapper", "flashddp", ("torch_ddp",), "tokens_per_s", "tokens/s"),
        device="2 × {device}",
        report="lm_matrix_report",
    ),
    Comparison(
        "sharded optimizer, 2.0 billion parameters",
        "sharding_benchmark",
        {"model": "xl"},
        *("method", "zero1", ("torch_ddp+torch_zero",), "tokens_per_s", "tokens/s"),
        device="2 × {device}",
    ),
    Comparison(
        "fully sharded, 2.0 billion parameters",
        "sharding_benchmark",
        {"model": "xl"},
        *("method", "fsdp", ("fsdp2",), "tokens_per_s", "tokens/s"),
        device="2 × {device}",
    ),
)
