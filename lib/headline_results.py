"""The README's table of results, from records alone: `python -m lib.headline_results` fills it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lib.files import write_atomically
from lib.report import Record, read_records, to_markdown

START, END = "<!-- results: python -m lib.headline_results -->", "<!-- end of results -->"
Row = dict[str, str]


def headline_rows(artifacts: str | os.PathLike) -> list[Row]:
    """What to say first of each benchmark whose records are in the folder `artifacts`."""
    folder = Path(artifacts)
    makers = {
        "tokenizer_benchmark": tokenizer_rows,
        "training_benchmark": training_rows,
        "attention_sweep": attention_rows,
        "lm_matrix": data_parallel_rows,
        "sharding_benchmark": sharding_rows,
    }
    rows = []
    for name, make in makers.items():
        path = folder / f"{name}.jsonl"
        if path.exists():
            rows += make(read_records(path))
    return rows


def tokenizer_rows(records: Iterable[Record]) -> list[Row]:
    """Training and encoding against the fastest other one."""
    rows = []
    for task, words in (("train", "tokenizer, training"), ("encode", "tokenizer, encoding")):
        case = {"task": task, "text": "natural", "vocab_size": 10_000}
        found = [r for r in records if case.items() <= r["figures"].items()]
        ours = next(r for r in found if r["figures"]["candidate"] == "numba")
        # our own readable one is no peer
        peers = [r for r in found if r["figures"]["candidate"] not in ("numba", "python")]
        peer = max(peers, key=lambda record: record["figures"]["MB_per_s"])
        speeds = [record["figures"]["MB_per_s"] for record in (ours, peer)]
        name = peer["figures"]["candidate"].split(",")[0]
        device = f"{ours['device']}, {ours['figures']['cores']} cores".replace(
            " 1 cores", " 1 core"
        )
        rows.append(row(words, speeds, "MB/s", name, device, "tokenizer_benchmark"))
    return rows


def training_rows(records: Iterable[Record]) -> list[Row]:
    """A step of GPT-2's smallest model, and the memory of its loss."""
    newest = {}
    for record in records:
        figures = record["figures"]
        newest[figures["task"], figures.get("model"), figures["candidate"]] = record
    ours = newest["step", "gpt2-124m", "all"]
    peer = newest["step", "gpt2-124m", "nanoGPT-style"]
    speeds = [record["figures"]["tokens_per_s"] for record in (ours, peer)]
    words = "training, 124 million parameters, 32 × 1,024 tokens"
    return [
        row(words, speeds, "tokens/s", "nanoGPT-style", ours["device"], "training_benchmark"),
    ]


def attention_rows(records: Iterable[Record]) -> list[Row]:
    """Causal attention of 4,096 tokens, against the best of PyTorch's own kernels."""
    rows = []
    for direction in ("forward", "backward"):
        for head_dim in (64, 128):
            case = {"queries": 4096, "keys": 4096, "head_dim": head_dim, "is_causal": True}
            case |= {"direction": direction, "dtype": "bfloat16"}
            found = [r for r in records if case.items() <= r["config"].items()]
            kernels = found[-1]["figures"]["kernels"]
            speed = {name: figures.get("tflops") or 0 for name, figures in kernels.items()}
            peers = [name for name in speed if name.startswith(("sdpa_", "flex_"))]
            best = max(peers, key=speed.__getitem__)
            words = f"attention {direction}, causal, 4,096 tokens, heads of {head_dim}"
            speeds = [speed["flash_attention_triton"], speed[best]]
            device = found[-1]["device"]
            rows.append(row(words, speeds, "TFLOP/s", best, device, "attention_sweep_report"))
    return rows


def data_parallel_rows(records: Iterable[Record]) -> list[Row]:
    """`large` on two GPUs, against PyTorch's DDP."""
    case = {"model": "large", "tr_batch_size": 128, "low_precision_weights": True, "ranks": 2}
    found = {r["config"]["wrapper"]: r for r in records if case.items() <= r["config"].items()}
    ours, peer = found["flashddp"], found["torch_ddp"]
    share = ours["figures"]["scaling_efficiency"]
    words = f"data parallelism, 969 million parameters, {share:.1%} of two alone"
    speeds = [record["figures"]["tokens_per_s"] for record in (ours, peer)]
    device = f"2 × {ours['device']}"
    return [row(words, speeds, "tokens/s", "PyTorch's DDP", device, "lm_matrix_report")]


def sharding_rows(records: Iterable[Record]) -> list[Row]:
    """`xl` with a sharded optimizer on two GPUs, against PyTorch's ZeRO under its DDP."""
    found = {r["config"]["method"]: r for r in records if r["config"]["model"] == "xl"}
    ours, peer = found["zero1"], found["torch_ddp+torch_zero"]
    speeds = [record["figures"]["tokens_per_s"] for record in (ours, peer)]
    words = "sharded optimizer, 2.0 billion parameters"
    device = f"2 × {ours['device']}"
    return [row(words, speeds, "tokens/s", "PyTorch's ZeRO", device, "sharding_benchmark")]


def row(what: str, speeds: list[float], unit: str, peer: str, device: str, record: str) -> Row:
    """A line of the table: ours and the peer's speed, and how many times as fast ours is."""
    ours, other = (f"{speed:,.0f}" for speed in speeds)
    return {
        "what": what,
        "here": f"{ours} {unit}",
        "best other": f"{other} ({peer})",
        "times": f"{speeds[0] / speeds[1]:.2f}",
        "on": f"[{device}](artifacts/{record}.md)",
    }


def fill_in(text: str, rows: list[Mapping[str, Any]]) -> str:
    """`text` with the table of `rows` between its two marks."""
    before, _, rest = text.partition(START)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the text has no {START} … {END}; right is: both, in this order")
    return f"{before}{START}\n{to_markdown(rows)}{END}{after}"


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    readme = root / "README.md"
    filled = fill_in(readme.read_text(encoding="utf-8"), headline_rows(root / "artifacts"))
    write_atomically(readme, filled)
