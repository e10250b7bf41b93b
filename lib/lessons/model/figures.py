"""Pictures of notebook 02: the Transformer, its heads, shared keys, and the plots of the lesson.

Drawings are SVG on opaque light cards, so that they read the same on light and dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt

from lib.core.figures import BLACK, BLUE, COLORS, INK, ORANGE
from lib.lessons.model.explorers import draw_pattern
from lib.lessons.show import show_svg

if TYPE_CHECKING:
    from IPython.display import HTML

STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#222}.name{font-weight:600}"
    ".note{font-size:12.5px;fill:#555}.shape{font:12.5px ui-monospace,monospace;fill:#555}"
)
FRAME = "#8a8f98"
STREAM, MIX, ALONE, NORM, EDGE = "#0072B2", "#bfe0f5", "#f6d6c4", "#e9e6de", "#fbe3b0"
# Colors of the heads: blue, orange, green, violet.
HEADS = ("#8fc7e8", "#f3b98a", "#8fd0b5", "#cdb8e6")


def show_transformer() -> HTML:
    """The Transformer from token ids to logits, along its residual stream, with shapes."""
    return show_svg(transformer_svg())


def show_heads() -> HTML:
    """Multi-head attention from x to the residual stream, with shapes."""
    return show_svg(heads_svg())


def show_sharing() -> HTML:
    """Query heads above the key and value heads that they use: their own, a group's, one."""
    return show_svg(sharing_svg())


def _svg(width: int, height: int, words: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(words)}" style="width:{min(width, 780)}px;max-width:none">'
        f'<style>{STYLE}</style><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
        f'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{FRAME}"/>'
        f'</marker></defs><rect width="{width}" height="{height}" rx="10" fill="#FBFAF7" '
        f'stroke="#D9D6CF"/>{"".join(parts)}</svg>'
    )


def _box(x: float, y: float, width: float, height: float, color: str, text: str = "") -> str:
    words = _text(x + width / 2, y + height / 2 + 5, text, "name", "middle") if text else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{color}" '
        f'stroke="{FRAME}"/>{words}'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{FRAME}" stroke-width="1.6" '
        'marker-end="url(#tip)"/>'
    )


def _plus(x: float, y: float) -> str:
    cross = f"M{x - 6} {y}H{x + 6}M{x} {y - 6}V{y + 6}"
    return (
        f'<circle cx="{x}" cy="{y}" r="11" fill="white" stroke="{STREAM}" stroke-width="2"/>'
        f'<path d="{cross}" stroke="{STREAM}" stroke-width="2"/>'
    )


def transformer_svg() -> str:
    """The Transformer from token ids, below, to logits, above."""
    stream, side, width = 150, 232, 128
    parts = [
        f'<rect x="84" y="136" width="566" height="282" rx="8" fill="none" stroke="{FRAME}" '
        'stroke-dasharray="5 4"/>',
        _text(638, 158, "block, num_layers times", "note", "end"),
        f'<line x1="{stream}" y1="496" x2="{stream}" y2="104" stroke="{STREAM}" stroke-width="7"/>',
        _box(stream - 62, 496, 124, 34, EDGE, "embedding"),
        _box(stream - 62, 70, 124, 34, NORM, "RMSNorm"),
        _box(stream - 62, 22, 124, 34, EDGE, "head"),
        _arrow((stream, 556), (stream, 531)),
        _arrow((stream, 70), (stream, 57)),
        _text(stream, 574, "token ids", "name", "middle"),
        _text(stream + 78, 44, "a logit for each token of the vocabulary", "note"),
        _text(stream + 78, 572, "(batch, length)", "shape"),
        _text(stream + 78, 518, "→ (batch, length, d_model)", "shape"),
        _text(stream + 78, 92, "(batch, length, d_model)", "shape"),
        _text(stream + 376, 44, "(batch, length, vocab)", "shape"),
        _text(stream - 14, 470, "residual stream", "note", "end"),
        _text(stream - 14, 487, "d_model wide", "note", "end"),
    ]
    rows = (
        (396, "attention", MIX, "carries information between positions", "q, k, v, cut into heads"),
        (268, "SwiGLU", ALONE, "works on each position by itself", "d_model → d_ff → d_model"),
    )
    for bottom, name, color, what, how in rows:
        top = bottom - 96
        parts += [
            _arrow((stream, bottom), (side + width / 2, bottom), (side + width / 2, bottom - 9)),
            _box(side, bottom - 36, width, 26, NORM, "RMSNorm"),
            _arrow((side + width / 2, bottom - 36), (side + width / 2, bottom - 47)),
            _box(side, bottom - 82, width, 34, color, name),
            _arrow((side + width / 2, bottom - 82), (side + width / 2, top), (stream + 13, top)),
            _plus(stream, top),
            _text(side + width + 16, bottom - 66, what, "note"),
            _text(side + width + 16, bottom - 49, how, "note"),
            _text(side + width + 16, bottom - 18, "(batch, length, d_model)", "shape"),
        ]
    words = (
        "A Transformer: token ids, embedding, then a residual stream of shape (batch, length, "
        "d_model). Each block reads it through RMSNorm and adds what attention finds, then reads "
        "it through RMSNorm again and adds what SwiGLU makes of it. After the last block a final "
        "RMSNorm and the head give logits (batch, length, vocab)."
    )
    return _svg(720, 592, words, parts)


def heads_svg(num_heads: int = 4) -> str:
    """Multi-head attention from left to right: project, cut into heads, attend, join, project."""
    top, cell, tall = 70, 17, 100
    wide = num_heads * cell
    parts = [
        _box(16, top, wide, tall, "white", "x"),
        _text(8, top + tall + 20, "length × d_model", "shape"),
        _text(123, top - 12, "qkv_proj", "name", "middle"),
        _arrow((92, top + tall / 2), (154, top + tall / 2)),
    ]
    for number, name in enumerate("qkv"):
        x = 162 + number * (wide + 14)
        parts.append(_text(x + wide / 2, top - 12, name, "name", "middle"))
        for head, color in enumerate(HEADS):
            parts.append(_box(x + head * cell, top, cell, tall, color))
    parts += [
        _text(162 + cell * 2, top + tall + 20, "num_heads × head_dim", "shape"),
        _arrow((410, top + tall / 2), (440, top + tall / 2)),
        _text(513, 20, "scores of each head", "name", "middle"),
        _text(513, 198, "length × length", "shape", "middle"),
        _text(513, 218, "softmax, then · v", "note", "middle"),
        _arrow((594, top + tall / 2), (632, top + tall / 2)),
    ]
    for head, color in enumerate(HEADS):
        x, y = 450 + 68 * (head % 2), 42 + 68 * (head // 2)
        parts.append(_box(x, y, 58, 58, "white"))
        parts.append(f'<path d="M{x} {y}L{x + 58} {y + 58}H{x}z" fill="{color}"/>')
        x = 640 + head * cell
        parts.append(_box(x, top, cell, tall, color))
    parts += [
        _text(640 + wide / 2, top - 12, "joined", "name", "middle"),
        _text(640 + wide / 2, top + tall + 20, "d_model", "shape", "middle"),
        _arrow((716, top + tall / 2), (796, top + tall / 2)),
        _text(756, top - 12, "output_proj", "name", "middle"),
        _box(804, top, wide, tall, "white", "out"),
        _text(804 + wide / 2, top + tall + 20, "d_model", "shape", "middle"),
    ]
    words = (
        "Multi-head attention: x (length, d_model) is projected to q, k and v, each cut into "
        f"{num_heads} heads of head_dim columns. Each head has its own triangle of scores, length "
        "by length. The heads' results are joined to d_model columns and projected again."
    )
    return _svg(880, 234, words, parts)


def sharing_svg(num_heads: int = 4) -> str:
    """Three ways for four query heads to share keys and values."""
    parts, side = [], 30
    names = {4: "multi-head", 2: "grouped-query", 1: "multi-query"}
    for column, (num_kv, name) in enumerate(names.items()):
        left = 24 + column * 226
        parts.append(_text(left, 26, name, "name"))
        group = num_heads // num_kv
        for head in range(num_heads):
            x, kv = left + head * 46, head // group
            kv_x = left + (kv * group + (group - 1) / 2) * 46
            line = f'<line x1="{x + side / 2}" y1="{44 + side}" x2="{kv_x + side / 2}" y2="104"'
            parts.append(f'{line} stroke="{FRAME}" stroke-width="1.6"/>')
            parts.append(_box(x, 44, side, side, HEADS[kv], "q"))
        for kv in range(num_kv):
            kv_x = left + (kv * group + (group - 1) / 2) * 46
            parts.append(_box(kv_x, 104, side, side, HEADS[kv], "kv"))
        share = "all of it" if group == 1 else f"1/{group} of it"
        parts.append(_text(left, 158, f"KV cache: {share}", "note"))
    words = (
        "Four query heads with four key and value heads (multi-head), with two that are shared by "
        "pairs of neighbors (grouped-query), and with one that all share (multi-query). The KV "
        "cache shrinks to a half and a quarter."
    )
    return _svg(700, 174, words, parts)


# Plots


def show_softmax_errors(errors: Mapping[str, Any], shifts: Any) -> None:
    """Show the relative error of the naive softmax against the shift of its logits, by dtype."""
    _, axes = plt.subplots(figsize=(7, 3))
    for name, error in errors.items():
        finite = np.isfinite(error)
        axes.semilogy(shifts[finite], np.maximum(error[finite], 1e-9), marker="", label=name)
    axes.set(xlabel="shift of the logits", ylabel="relative error", ylim=(3e-9, 40))
    axes.set_title("Where a line ends, the naive softmax gives no number")
    axes.legend(ncols=3, loc="upper right")
    plt.show()


def show_pattern(weights: Any, tokens: Sequence[str], *, title: str) -> None:
    """Show attention weights (queries, keys) of one text."""
    _, axes = plt.subplots(figsize=(6.4, 5))
    draw_pattern(axes, np.asarray(weights), tokens)
    axes.set_title(title)
    plt.show()


def show_scores_by_distance(lines: Mapping[str, Any]) -> None:
    """Show name -> size of the score by distance."""
    _, axes = plt.subplots(figsize=(7, 3))
    for name, scores in lines.items():
        axes.plot(scores, marker="", label=name)
    axes.set(xlabel="distance of query and key (tokens)", ylabel="size of score ÷ that at 0")
    axes.set_title("Only vectors that point the same way lose with distance")
    axes.legend()
    plt.show()


def show_stream(lines: Mapping[str, Sequence[float]]) -> None:
    """Show the size of the residual stream after each block, by how weights were initialized."""
    _, axes = plt.subplots(figsize=(7, 3))
    for name, sizes in lines.items():
        axes.semilogy(range(1, len(sizes) + 1), sizes, marker="o", label=name)
    axes.set(xlabel="blocks", ylabel="RMS of the stream")
    axes.set_title("Each block adds to the stream")
    axes.legend()
    plt.show()


def show_training(curves: Mapping[str, Sequence[float]], levels: Mapping[str, float]) -> None:
    """Show training losses, each the mean of 20 steps, beside the losses of other models."""
    _, axes = plt.subplots(figsize=(7, 3.6))
    for color, (name, losses) in zip(COLORS, curves.items()):
        width = min(20, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, "valid")
        axes.plot(np.arange(width, len(losses) + 1), smooth, marker="", label=name, color=color)
    for name, loss in levels.items():
        axes.axhline(loss, color=BLACK, linestyle="--", linewidth=1, marker="")
        at_edge = {"va": "center", "transform": axes.get_yaxis_transform()}
        axes.text(1.01, loss, f"{name} {loss:.2f}", **at_edge)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title("Training loss, mean of 20 steps; dashed: held out")
    axes.legend()
    plt.show()


def show_differences(rows: Sequence[Mapping[str, Any]]) -> None:
    """Show how much each variant adds to the loss: a dot for each seed, a bar for their mean."""
    _, axes = plt.subplots(figsize=(7, 0.5 * len(rows) + 1.2))
    for place, row in enumerate(rows):
        costs = row["costs"]
        is_clear = min(costs) > 0 or max(costs) < 0
        axes.barh(place, np.mean(costs), color=BLUE if is_clear else ORANGE, alpha=0.35, height=0.6)
        axes.plot(costs, [place] * len(costs), "o", color=INK, markersize=5)
    axes.axvline(0, color=BLACK, linewidth=1, marker="")
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.set(xlabel="nats per token above the model as built", ylabel="")
    axes.set_title("What each change costs, for three seeds")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    plt.show()
