"""Explorers of notebook 09: the bytes of a rank, by model, ranks, precision and stage.

As in `lib.lessons.show`, where nobody can move a slider one setting is shown instead.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from lib.lessons.explorer import explorer, picture
from lib.lessons.zero1.figures import CARDS, KINDS, draw_kinds
from lib.model.config import ModelConfig, model_preset
from lib.model.costs import num_parameters
from lib.profiling.memory_formula import RESERVED_BYTES, SIZES, RankMemory, rank_memory

if TYPE_CHECKING:
    from ipywidgets import VBox


# How weights are held and multiplied, as `rank_memory` takes it.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16 by autocast": {"dtype": "bfloat16"},
    "bfloat16 parameters": {"dtype": "bfloat16", "low_precision_weights": True},
}
# By name the stage of ZeRO, and who averages gradients. The first three are this library's, the
# last two the paper's; FSDP2 is close to the last.
STAGES = {
    "DDP": (0, "flashddp"),
    "zero1 behind flashddp": (1, "flashddp"),
    "zero1": (1, "none"),
    "ZeRO-2": (2, "none"),
    "ZeRO-3": (3, "none"),
}
OWN = "own sizes"
MOST_RANKS = 64
# Tokens in a sequence.
CONTEXTS = tuple(2**power for power in range(8, 16))


def stage_memory(
    config: ModelConfig,
    ranks: int,
    name: str,
    precision: str = "bfloat16 parameters",
    *,
    batch_size: int = 1,
    context: int | None = None,
    checkpoints: bool = False,
) -> RankMemory:
    """Bytes of a GPU's rank; `name` is one of `STAGES`, and `precision` of `PRECISIONS`.

    Args:
        context: tokens in a sequence (default: the config's).
        checkpoints: whether each block keeps its input alone.
    """
    stage, wrapper = STAGES[name]
    config = dataclasses.replace(config, context_length=context or config.context_length)
    how = {"stage": stage, "ddp_wrapper": wrapper, **PRECISIONS[precision]}
    return rank_memory(config, ranks=ranks, batch_size=batch_size, checkpoints=checkpoints, **how)


def memory_kinds(
    config: ModelConfig, memory: RankMemory, ranks: int, *, is_sharded: bool
) -> dict[str, int]:
    """The bytes of `memory` by the kinds that `lib.lessons.zero1.figures.KINDS` names."""
    updated = -(-num_parameters(config) // ranks) if is_sharded else num_parameters(config)
    # two of float32 for each weight; beyond them there are only masters
    moments = min(8 * updated, memory.optimizer_state)
    found = (
        memory.parameters,
        memory.gradients,
        moments,
        memory.optimizer_state - moments,
        memory.activations,
        memory.communication + memory.gathered,
    )
    return dict(zip(KINDS, found))


def verdict(memory: RankMemory) -> str:
    """Which card is the smallest that holds the peak and what is reserved, in words."""
    needed = memory.peak + RESERVED_BYTES
    card = next((size for size in CARDS if needed <= size * 10**9), None)
    words = f"peak {memory.peak / 1e9:.3g} GB"
    if card is None:
        return f"{words}, too much for {max(CARDS)} GB"
    return f"{words}, fits into {card} GB"


def own_config(d_model: int, num_layers: int) -> ModelConfig:
    """A model of these sizes, in all else as the presets are."""
    sizes: dict = {"d_model": d_model, "num_layers": num_layers, "d_ff": 4 * d_model}
    return dataclasses.replace(model_preset("small"), num_heads=d_model // 64, **sizes)


def memory_explorer(*, start: tuple[str, int, str, str, int, int, str]) -> VBox:
    """Sliders for a model and how it is trained; the bytes of a rank by kind.

    The upper bar is plain data parallelism. The last two sliders are the width and layers of the
    model `own sizes`.

    Args:
        start: model, ranks, precision, stage, sequences, context and checkpointing shown at first.
    """

    def draw(
        figure: Figure,
        model: str,
        ranks: int,
        precision: str,
        stage: str,
        sequences: int,
        context: int,
        checkpointing: str,
        own_width: int,
        own_layers: int,
    ) -> None:
        config = own_config(own_width, own_layers) if model == OWN else model_preset(model)
        how: dict = {"batch_size": sequences, "context": context}
        how["checkpoints"] = checkpointing == "on"
        bars, peaks = {}, {}
        for each in dict.fromkeys(("DDP", stage)):
            memory = stage_memory(config, ranks, each, precision, **how)
            bars[each] = memory_kinds(config, memory, ranks, is_sharded=each != "DDP")
            peaks[each] = memory.peak
        words = f"{model}, {num_parameters(config) / 1e9:.3g} billion weights, {ranks} rank"
        words += "s" * (ranks > 1) + f", {sequences} × {context:,} tokens"
        words += ", checkpoints" * (checkpointing == "on")
        title = f"{words}, {precision}\n{stage}: {verdict(memory)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        draw_kinds(figure.subplots(), bars, peaks)

    controls: dict = {
        "model": [*SIZES, OWN],
        "ranks": range(1, MOST_RANKS + 1),
        "precision": list(PRECISIONS),
        "stage": list(STAGES),
        "sequences": [2**power for power in range(7)],
        "context": list(CONTEXTS),
        "checkpointing": ["off", "on"],
        "own_width": range(256, 8193, 256),
        "own_layers": range(4, 97, 4),
    }
    first = dict(zip(controls, start)) | {"own_width": 4096, "own_layers": 32}
    return explorer(picture(draw, width=9.0, height=3.8), start=first, **controls)
