"""Explorers of notebooks 00 and 02: RoPE, and attention patterns on any sentence."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from lib.core.charts import heat
from lib.core.figures import BLUE, GRID, VERMILLION
from lib.lessons.explorer import explorer, picture
from lib.lessons.show import visible

if TYPE_CHECKING:
    from ipywidgets import VBox

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


# More would be too small to read; the rest of a longer text is left out.
MOST_TOKENS = 40


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


def draw_pattern(figure: Figure, weights: np.ndarray, tokens: Sequence[str], title: str) -> None:
    """Draw attention weights, (queries, keys), as a grid: a row shows where a token looks."""
    labels: dict = {"xlabel": "key: what is looked at", "ylabel": "query: who looks"}
    cells: dict = {"rows": tokens, "columns": tokens, "norm": Normalize(0, 1)}
    heat(weights, axes=figure.subplots(), title=title, **labels, **cells)


def pattern_words(weights: np.ndarray, tokens: Sequence[str], title: str) -> str:
    """Describe a pattern in words: the key that each token looks at most."""
    looks = []
    for query in range(1, len(tokens)):
        key = int(weights[query].argmax())
        looks.append(f"{tokens[query]} at {tokens[key]} ({weights[query, key]:.0%})")
    return f"{title}. Each token looks most: {', '.join(looks)}."


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

    def chosen(text: str, layer: int, head: int) -> tuple[np.ndarray, list[str], str]:
        weights, tokens = patterns(text)
        return weights[layer - 1, head - 1], tokens, f"Layer {layer}, head {head}"

    def draw(figure: Figure, **values: Any) -> None:
        draw_pattern(figure, *chosen(**values))

    def words(**values: Any) -> str:
        return pattern_words(*chosen(**values))

    return explorer(
        picture(draw, width=6.4, height=5.6, words=words),
        text=ipywidgets.Text(text, description="text", layout={"width": "min(100%, 40rem)"}),
        layer=range(1, config.num_layers + 1),
        head=range(1, config.num_heads + 1),
        start={"layer": layer, "head": head},
        still=[(text, 1, 1), (text, config.num_layers, config.num_heads)],
        min_height="35em",
    )
