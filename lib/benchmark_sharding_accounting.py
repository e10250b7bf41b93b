"""What training takes by formula, beside what the sharding benchmark measured of it.

From one rank to eight, for each stage of ZeRO; and the largest preset that a T4 trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.benchmark_sharding_cases import BASE, predicted_bytes
from lib.memory_accounting import SIZES, largest_preset, rank_memory
from lib.model_presets import model_preset
from lib.plots_lm_matrix import Section
from lib.plots_sharding import RankBar
from lib.report import format_value, to_markdown

# 16 GB, as one of the two of a free notebook on Kaggle.
T4_BYTES = 16 * 10**9
RANKS = (1, 2, 4, 8)
# The stages of ZeRO as they are measured here; of the second there is none.
STAGES = {"flashddp": 0, "zero1": 1, "ZeRO-2": 2, "fsdp2": 3}
# What changes the bytes of a rank, by name in a row and for `rank_memory`; buckets hardly do.
ACCOUNTING_SETTINGS = ("dtype", "low_precision_weights")


def accounting_report(sections: Sequence[Section]) -> str:
    """Peak bytes of a rank by model, stage and ranks, by formula and where it was measured.

    In the setting of the newest section; and the largest preset that a T4 trains.
    """
    lines = []
    for model, bars in accounting(sections).items():
        for method in STAGES:
            line: dict[str, Any] = {"model": model, "peak of a rank (GB)": method}
            for bar in bars:
                if bar.name == method:
                    text = format_value(bar.predicted["peak"] / 1e9)
                    if bar.measured:
                        text += f" ({format_value(bar.measured['peak'] / 1e9)})"
                    line[bar.group] = text
            lines.append(line)
    if not lines:
        return ""
    text = f"\n## By formula\n\n{accounting_title(sections)}; in brackets what was measured.\n"
    return f"{text}\n{to_markdown(lines)}\n{largest_presets()}"


def accounting_title(sections: Sequence[Section]) -> str:
    """The setting of the newest section in words."""
    row = _newest(sections)
    words = [row["dtype"], *["short weights"] * row["low_precision_weights"]]
    where = "CPUs" if row["backend"] == "gloo" else row["device"]
    return f"{', '.join(words)}, {row['tr_batch_size']} windows a rank; {where}"


def accounting(sections: Sequence[Section]) -> dict[str, list[RankBar]]:
    """By model what a rank holds on 1 to 8 ranks, in the setting of the newest section.

    Of the presets `small` to `2.7b`, after other models that were measured in that setting.
    """
    if not sections:
        return {}
    newest = _newest(sections)
    same = ("device", "kernel", "tr_batch_size", "compile", "cuda_graph", *ACCOUNTING_SETTINGS)
    measured = {
        (row["model"], row["method"], row["ranks"]): row["measured"]
        for section in sections
        for row in section.rows
        if row["status"] == "ok"
        and row["context_length"] == model_preset(row["model"]).context_length
        and all(row[key] == newest[key] for key in same)
    }
    models = [model for model in dict.fromkeys(key[0] for key in measured) if model not in SIZES]
    return {
        model: [
            _bar(model, method, ranks, newest, measured)
            for ranks in RANKS
            for method in (STAGES if ranks > 1 else [BASE])
        ]
        for model in [*models, *SIZES]
    }


def _newest(sections: Sequence[Section]) -> Mapping[str, Any]:
    return max((row for section in sections for row in section.rows), key=lambda row: row["date"])


def _bar(
    model: str,
    method: str,
    ranks: int,
    row: Mapping[str, Any],
    measured: Mapping[tuple[str, str, int], dict[str, int]],
) -> RankBar:
    """One model on so many ranks in the setting of `row`, and what was measured of it."""
    stage = STAGES[method]
    predicted = rank_memory(
        model_preset(model),
        ranks=ranks,
        stage=stage,
        batch_size=row["tr_batch_size"],
        ddp_wrapper="none" if stage else "flashddp",
        cuda=row["backend"] == "nccl",
        **{name: row[name] for name in ACCOUNTING_SETTINGS},
    )
    group = f"{ranks} rank" + "s" * (ranks > 1)
    if ranks == 1:
        # alone, whatever the others did
        found = next((held for key, held in measured.items() if key[:2] == (model, "none")), None)
    else:
        found = measured.get((model, method, ranks))
    return RankBar(group, method, predicted_bytes(predicted), found)


def largest_presets() -> str:
    """The largest preset that 16 GB train, alone and with ZeRO-1 on two, in words."""
    words = []
    for is_short in (False, True):
        options = {"batch_size": 1, "dtype": "float16", "low_precision_weights": is_short}
        alone = largest_preset(T4_BYTES, **options)
        on_two = largest_preset(T4_BYTES, 2, stage=1, ddp_wrapper="none", **options)
        held = "weights in 2 bytes" if is_short else "autocast"
        words.append(f"{held}: `{alone}` on one, `{on_two}` on two with `zero1`")
    return (
        "The largest preset that fits into a T4's 16 GB with one window at a time and products in "
        f"2 bytes, by formula and with 1 GB kept free: {'; '.join(words)}.\n"
    )
