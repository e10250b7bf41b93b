"""A story that a trained model tells as soon as its prompt or its temperature changes."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from lib.widgets import TEXT

if TYPE_CHECKING:
    from ipywidgets import VBox

    from lib.model import TransformerLM
    from lib.tokenizer import Tokenizer

# What is shown beside the first story where nobody can move the slider.
STILL_TEMPERATURES = (0.0, 1.5)


def story_teller(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    temperature: float = 0.7,
    max_new_tokens: int = 100,
) -> VBox:
    """A box for the prompt, a slider for the temperature, and the story, token by token.

    Another prompt or temperature draws with the same random numbers; the button takes other ones.
    Where nobody can move the slider, stories at two other temperatures follow.
    """
    import ipywidgets

    from lib.generate import generate_text

    look = {
        "layout": ipywidgets.Layout(width="min(100%, 34rem)"),
        "style": {"description_width": "6.5em"},
        "continuous_update": False,
    }
    box = ipywidgets.Text(prompt, description="Prompt", **look)
    slider = ipywidgets.FloatSlider(
        temperature, min=0, max=1.5, step=0.1, description="Temperature", **look
    )
    button = ipywidgets.Button(description="Another story")
    # tall enough for most stories, so that what follows does not jump
    view = ipywidgets.Output(layout=ipywidgets.Layout(min_height="9em"))
    still = ipywidgets.Output(layout=ipywidgets.Layout(display="none"))
    seed = 0

    def tell(view: ipywidgets.Output, temperature: float, caption: str = "") -> None:
        told = ""

        def add(row: int, piece: str) -> None:
            nonlocal told
            told += piece
            view.outputs = (*before, _story(box.value, told, caption))

        before = view.outputs if caption else ()
        generate_text(
            model,
            tokenizer,
            [box.value],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            on_text=add,
        )

    def show(change: Any = None) -> None:
        tell(view, slider.value)

    def another(button: Any) -> None:
        nonlocal seed
        seed += 1
        show()

    box.observe(show, "value")
    slider.observe(show, "value")
    button.on_click(another)
    show()
    for other in STILL_TEMPERATURES:
        tell(still, other, f"Temperature: {other:.1f}")
    return ipywidgets.VBox([box, slider, button, view, still])


def _story(prompt: str, told: str, caption: str) -> dict[str, Any]:
    head = f"<div>{html.escape(caption)}</div>" if caption else ""
    text = f"<b>{html.escape(prompt)}</b>{html.escape(told)}"
    data = {
        "text/html": f'{head}<div style="{TEXT}">{text}</div>',
        "text/plain": f"{caption}\n{prompt}{told}".strip(),
    }
    return {"output_type": "display_data", "data": data, "metadata": {}}
