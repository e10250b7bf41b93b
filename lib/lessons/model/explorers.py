"""Figures of notebook 02: RoPE, the scale of scores, and attention patterns on any sentence.

Attention patterns are drawn by Pillow, in a few milliseconds, so that they follow a slider;
matplotlib would take a tenth of a second or more.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from lib.core.figures import BLACK, BLUE, GRID, INK, PAPER, VERMILLION
from lib.lessons.explorer import SHADES, explorer, picture, png_output
from lib.lessons.show import visible

if TYPE_CHECKING:
    from ipywidgets import VBox
    from PIL.ImageFont import FreeTypeFont

    from lib.model.transformer import TransformerLM
    from lib.tokenizer.bpe import Tokenizer


def rope_slider() -> VBox:
    """A slider that moves a key, and a query `distance` tokens after it, through a text."""
    show = picture(draw_rotation, width=8.4, height=3.5)
    return explorer(show, position=range(33), still=[(3,), (13,)])


def draw_rotation(
    figure: Figure, position: int, *, distance: int = 5, head_dim: int = 8, theta: float = 100.0
) -> None:
    """Draw a circle for each pair of coordinates, with the key at `position` and the query.

    Each pair of coordinates rotates at its own speed; the angle between key and query stays. Both
    start from the same random unit vector in each pair, so only the rotation sets them apart.
    """
    num_pairs = head_dim // 2
    starts = np.random.default_rng(2).uniform(0, 2 * math.pi, num_pairs)
    all_axes = figure.subplots(ncols=num_pairs)
    scores = np.cos(distance * theta ** (-np.arange(num_pairs) / num_pairs))
    figure.suptitle(
        f"θ = {theta:g}, key at {position}, query at {position + distance}: "
        f"score {scores.sum():.3f}, whatever the position",
        x=0.01,
        ha="left",
        weight="bold",
    )
    for pair, axes in enumerate(all_axes):
        speed = theta ** (-pair / num_pairs)
        axes.add_patch(Circle((0, 0), 1, fill=False, color=GRID, linewidth=1.2))
        vectors = (("key", position, VERMILLION), ("query", position + distance, BLUE))
        for name, token, color in vectors:
            angle = starts[pair] + token * speed
            tip = (math.cos(angle), math.sin(angle))
            style = {"arrowstyle": "-|>", "color": color, "linewidth": 2.2, "shrinkA": 0}
            axes.annotate("", tip, (0, 0), arrowprops=style | {"shrinkB": 0})
            axes.plot([], [], color=color, marker="", label=name)
        axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_title(f"pair {pair}", fontsize=11, loc="center")
        axes.set_xlabel(f"{speed:.3g} rad a token\npart of score {scores[pair]:.3f}", fontsize=10)
    names = all_axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=2)


def scale_slider() -> VBox:
    """A slider for head_dim above the softmax of random scores, with and without the scale."""
    head_dims = [4**power for power in range(1, 6)]
    return explorer(picture(draw_scale, height=2.9), head_dim=head_dims, still=[(64,), (1024,)])


def draw_scale(figure: Figure, head_dim: int) -> None:
    """Draw as bars the attention weights of a random query for 16 random keys.

    The slope is the derivative of the largest weight with respect to its own score.
    """
    num_keys = 16
    generator = np.random.default_rng(0)
    query = generator.standard_normal(head_dim)
    scores = generator.standard_normal((num_keys, head_dim)) @ query
    all_axes = figure.subplots(ncols=2, sharey=True)
    titles = {"q · k": 1.0, "q · k / √head_dim": 1 / math.sqrt(head_dim)}
    for axes, color, (title, scale) in zip(all_axes, (VERMILLION, BLUE), titles.items()):
        exponentials = np.exp(scale * (scores - scores.max()))
        weights = np.sort(exponentials / exponentials.sum())[::-1]
        axes.bar(range(1, num_keys + 1), weights, color=color)
        axes.set(ylim=(0, 1.02), xlabel="key, largest weight first")
        axes.set_title(f"softmax of {title}", fontsize=11)
        slope = weights[0] * (1 - weights[0])
        text = f"head_dim {head_dim}\nlargest weight {weights[0]:.2f}\nits slope {slope:.2f}"
        axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top", color=BLACK)
        axes.grid(visible=False, axis="x")
    all_axes[0].set_ylabel("attention weight")


def draw_pattern(axes: Axes, weights: np.ndarray, tokens: Sequence[str]) -> None:
    """Draw attention weights, (queries, keys), as a grid: a row shows where a token looks."""
    image = axes.imshow(weights, cmap=SHADES, vmin=0, vmax=1)
    places = range(len(tokens))
    axes.set_xticks(places, tokens, rotation=90, family="monospace", fontsize=9)
    axes.set_yticks(places, tokens, family="monospace", fontsize=9)
    axes.set(xlabel="key: what is looked at", ylabel="query: who looks")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.6)
    bar.set_label("attention weight")
    bar.outline.set_visible(False)


# More would be too small to read; the rest of a longer text is left out.
MOST_TOKENS = 40
# Pixels on the page, of which a picture has twice as many.
CELL, MARGIN = 18, 12
LEGEND = "Row: who looks. Column: at whom. Darker is more."


def attention_patterns(model: TransformerLM, token_ids: Sequence[int]) -> np.ndarray:
    """Compute softmax(q kᵀ / √head_dim) for each layer and head, with the causal mask.

    Args:
        token_ids: one text, at most `context_length` tokens.

    Returns:
        (layers, heads, queries, keys) float32; each row sums to 1, and is 0 for later keys.
    """
    import torch

    from lib.model.attention import causal_mask
    from lib.model.loss import softmax

    found, handles = [], []

    def note(attention: Any, arguments: tuple) -> None:
        x = arguments[0]
        qkv = attention.qkv_proj(x).unflatten(-1, (3, attention.num_heads, -1))
        q, k, _ = qkv.transpose(1, 3).unbind(2)  # (1, heads, length, head_dim) each
        if attention.has_qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        if model.rope is not None:
            q, k = model.rope(q), model.rope(k)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        unseen = ~causal_mask(q.shape[-2], q.shape[-2], x.device)
        found.append(softmax(scores.float().masked_fill(unseen, -math.inf), dim=-1)[0])

    try:
        for layer in model.layers:
            handles.append(layer.attn.register_forward_pre_hook(note))
        with torch.inference_mode():
            model.hidden(torch.tensor([list(token_ids)], device=model.output_weight.device))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found).cpu().numpy()


def pattern_picture(weights: np.ndarray, tokens: Sequence[str], title: str) -> bytes:
    """Draw attention weights (queries, keys) as a PNG: a row shows where a token looks.

    Tokens are written on the left as queries, and below, rotated by 90°, as keys.
    """
    from PIL import Image, ImageDraw

    font, bold = _font("DejaVuSansMono.ttf", 11), _font("DejaVuSans-Bold.ttf", 12)
    small = _font("DejaVuSans.ttf", 10)
    length, cell, margin = len(tokens), 2 * CELL, 2 * MARGIN
    # room for the longest token, at the left and below
    room = max(int(font.getlength(token)) for token in tokens) + margin // 2
    left, top, side = margin + room, 4 * margin, length * cell
    widest = max(bold.getlength(title), small.getlength(LEGEND))
    width = max(left + side + margin, int(widest) + 2 * margin)
    height = top + side + room + margin
    # even, as twice the pixels of the page
    picture = Image.new("RGB", (width + width % 2, height + height % 2), PAPER)
    shades = Image.fromarray((SHADES(weights)[..., :3] * 255).astype(np.uint8))
    picture.paste(shades.resize((side, side), Image.Resampling.NEAREST), (left, top))
    draw = ImageDraw.Draw(picture)
    draw.text((margin, margin // 2), title, INK, bold)
    draw.text((margin, 2 * margin), LEGEND, INK, small)
    names = Image.new("RGB", (room, side), PAPER)
    write = ImageDraw.Draw(names)
    for place, token in enumerate(tokens):
        at = place * cell
        write.text((room - margin // 2, at + cell // 2), token, INK, font, anchor="rm")
        draw.rectangle((left, top + at, left + side, top + at + cell), outline=GRID)
        draw.rectangle((left + at, top, left + at + cell, top + side), outline=GRID)
    picture.paste(names, (margin, top))
    picture.paste(names.transpose(Image.Transpose.ROTATE_90), (left, top + side))
    file = io.BytesIO()
    picture.save(file, format="png", compress_level=1)
    return file.getvalue()


@functools.cache
def _font(name: str, size: int) -> FreeTypeFont:
    """A font that comes with matplotlib, for twice the pixels of the page."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf", name), 2 * size)


def pattern_words(weights: np.ndarray, tokens: Sequence[str], title: str) -> str:
    """Describe a pattern in words: the key that each token looks at most."""
    looks = []
    for query in range(1, len(tokens)):
        key = int(weights[query].argmax())
        looks.append(f"{tokens[query]} at {tokens[key]} ({weights[query, key]:.0%})")
    return f"{title}. Each token looks most: {', '.join(looks)}."


def pattern_output(weights: np.ndarray, tokens: Sequence[str], title: str) -> dict[str, Any]:
    """`pattern_picture` as a notebook output, with `pattern_words` as its alternative text."""
    png = pattern_picture(weights, tokens, title)
    # a PNG's width and height follow its first 16 bytes
    size = (int.from_bytes(png[at : at + 4], "big") // 2 for at in (16, 20))
    return png_output(png, pattern_words(weights, tokens, title), *size)


def pattern_slider(patterns: Mapping[str, np.ndarray], tokens: Sequence[str]) -> VBox:
    """A slider through the attention heads on one text.

    Args:
        patterns: name of a head -> its weights, (queries, keys).
        tokens: as they are shown.
    """
    names = list(patterns)

    def show(head: str) -> dict[str, Any]:
        return pattern_output(patterns[head], tokens, head)

    still = [(names[len(names) // 2],), (names[-1],)]
    return explorer(functools.cache(show), head=names, still=still)


def attention_explorer(
    model: TransformerLM, tokenizer: Tokenizer, text: str, *, layer: int = 1, head: int = 1
) -> VBox:
    """A text box and sliders for layer and head, above the attention pattern of the text.

    Only the first 40 tokens of a long text are used.

    Args:
        layer, head: shown first, counted from 1.
    """
    import ipywidgets

    config = model.config

    @functools.lru_cache(maxsize=8)
    def patterns(sentence: str) -> tuple[np.ndarray, list[str]]:
        ids = tokenizer.encode(sentence)[: min(MOST_TOKENS, config.context_length)]
        # an empty text is the token that starts every document
        ids = ids or tokenizer.end_ids[:1] or tokenizer.encode("\n")
        return attention_patterns(model, ids), [visible(tokenizer.vocab[i]) for i in ids]

    def show(text: str, layer: int, head: int) -> dict[str, Any]:
        weights, tokens = patterns(text)
        title = f"Layer {layer}, head {head}"
        return pattern_output(weights[layer - 1, head - 1], tokens, title)

    return explorer(
        show,
        text=ipywidgets.Text(text, description="text", layout={"width": "min(100%, 40rem)"}),
        layer=range(1, config.num_layers + 1),
        head=range(1, config.num_heads + 1),
        start={"layer": layer, "head": head},
        still=[(text, 1, 1), (text, config.num_layers, config.num_heads)],
        min_height="1em",
    )
