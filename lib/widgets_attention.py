"""The attention of a trained model on the reader's own sentence, layer by layer and head by head.

A picture here is drawn by Pillow, pixel by pixel and in a few milliseconds, so that it follows a
slider; matplotlib would take a tenth of a second and more.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lib.plots import GRID, INK, PAPER
from lib.pretokenize import SEPARATOR
from lib.widgets import visible
from lib.widgets_model import SHADES, picture_output, picture_slider

if TYPE_CHECKING:
    from ipywidgets import VBox
    from PIL.ImageFont import FreeTypeFont

    from lib.model import TransformerLM
    from lib.tokenizer import Tokenizer

# More would be too small to read; the rest of a longer text is left out.
MOST_TOKENS = 40
# Pixels on the page, of which a picture has twice as many.
CELL, MARGIN = 18, 12
LEGEND = "Row: who looks. Column: at whom. Darker is more."


def attention_patterns(model: TransformerLM, token_ids: Sequence[int]) -> np.ndarray:
    """Who looks where: softmax(q kᵀ / √head_dim) of each layer and head, under the causal mask.

    Args:
        model: with norms before its parts (`norm="pre"`), or after or without them.
        token_ids: one text, at most `context_length` tokens.

    Returns:
        (layers, heads, queries, keys) float32; each row sums to 1, and is 0 for later keys.
    """
    import torch

    from lib.attention import causal_mask
    from lib.loss import softmax

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
    """A PNG of attention weights (queries, keys): each row says where a token looks.

    Tokens stand at the left as queries, and below, turned by a quarter, as keys.
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
    """One of the fonts that matplotlib brings along, for twice the pixels of the page."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf", name), 2 * size)


def pattern_words(weights: np.ndarray, tokens: Sequence[str], title: str) -> str:
    """What a pattern shows, in words: where its tokens look most."""
    looks = []
    for query in range(1, len(tokens)):
        key = int(weights[query].argmax())
        looks.append(f"{tokens[query]} at {tokens[key]} ({weights[query, key]:.0%})")
    return f"{title}. Each token looks most: {', '.join(looks)}."


def pattern_output(weights: np.ndarray, tokens: Sequence[str], title: str) -> dict[str, Any]:
    """`pattern_picture` as a notebook's output, with `pattern_words`."""
    png = pattern_picture(weights, tokens, title)
    # a PNG's width and height stand behind its first 16 bytes
    size = (int.from_bytes(png[at : at + 4], "big") // 2 for at in (16, 20))
    return picture_output(png, pattern_words(weights, tokens, title), *size)


def pattern_slider(patterns: Mapping[str, np.ndarray], tokens: Sequence[str]) -> VBox:
    """The attention of one head after the other on the same text.

    Args:
        patterns: the head's name -> its weights, (queries, keys).
        tokens: the text's tokens, as they are to be read.
    """
    names = list(patterns)

    def picture(name: str) -> dict[str, Any]:
        return pattern_output(patterns[name], tokens, name)

    still = (names[len(names) // 2], names[-1])
    return picture_slider(picture, names, description="head", still=still)


def attention_explorer(
    model: TransformerLM, tokenizer: Tokenizer, text: str, *, layer: int = 1, head: int = 1
) -> VBox:
    """A text box and sliders for layer and head, above the attention pattern of the text.

    Arrow keys move the sliders. Where nobody can, the first and the last head are shown too. Of a
    long text the first tokens are taken, 40 at most.

    Args:
        layer, head: shown at first, counted from 1.
    """
    import ipywidgets

    config = model.config

    def slider(description: str, value: int, last: int) -> Any:
        return ipywidgets.IntSlider(value, 1, last, description=description, **look)

    look = {"layout": ipywidgets.Layout(width="min(100%, 34rem)")}
    box = ipywidgets.Text(text, description="Text", **look)
    layers = slider("Layer", layer, config.num_layers)
    heads = slider("Head", head, config.num_heads)

    @functools.lru_cache(maxsize=8)
    def patterns(sentence: str) -> tuple[np.ndarray, list[str]]:
        ids = tokenizer.encode(sentence)[: min(MOST_TOKENS, config.context_length)]
        # of an empty text, the token that every text starts behind
        ids = ids or tokenizer.encode(SEPARATOR)
        return attention_patterns(model, ids), [visible(tokenizer.vocab[i]) for i in ids]

    def output(layer: int, head: int) -> dict[str, Any]:
        weights, tokens = patterns(box.value)
        title = f"Layer {layer}, head {head}"
        return pattern_output(weights[layer - 1, head - 1], tokens, title)

    view, still = ipywidgets.Output(), ipywidgets.Output(layout={"display": "none"})

    def show(change: Any = None) -> None:
        view.outputs = (output(layers.value, heads.value),)

    for control in (box, layers, heads):
        control.observe(show, "value")
    show()
    others = dict.fromkeys([(1, 1), (config.num_layers, config.num_heads)])
    still.outputs = tuple(output(*other) for other in others if other != (layer, head))
    return ipywidgets.VBox([box, layers, heads, view, still])
