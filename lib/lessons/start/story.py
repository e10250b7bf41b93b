"""The small committed model that tells stories, and a widget that lets the reader play with it.

The model was trained on the generated stories, with the settings in its config.json; record.json
holds its loss. `python -m lib lessons story RUN --output artifacts/tiny_stories` makes its folder
anew from that of such a training run, with the weights rounded to float16 to halve them.
"""

from __future__ import annotations

import dataclasses
import html
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core.files import ROOT, claim_folder, write_atomically
from lib.core.settings import settings, to_json
from lib.lessons.show import TEXT
from lib.tokenizer import files as tokenizer_files

if TYPE_CHECKING:
    from ipywidgets import VBox

    from lib.model.transformer import TransformerLM
    from lib.tokenizer.bpe import Tokenizer
    from lib.training.evaluation import Evaluation


FOLDER = ROOT / "artifacts/tiny_stories"
# The figures in the record are for this many bytes of held-out text.
EVALUATION_BYTES = 200_000
# Fields that the record takes from that of the training run.
KEPT = ("device", "cores", "versions", "commit", "dirty", "date", "data_sha256")
# Shown beside the first story where nobody can move the slider.
STILL_TEMPERATURES = (0.0, 1.5)


def load_story_model(device: str = "auto") -> tuple[TransformerLM, Tokenizer, dict[str, Any]]:
    """The model in float32, its tokenizer, and the record of how it was made.

    Args:
        device: as in `lib.core.hardware.pick_device`.
    """
    from lib.training.generation import load_model

    model, tokenizer, _ = load_model(FOLDER, device)
    record = json.loads((FOLDER / "record.json").read_text(encoding="utf-8"))
    return model.float(), tokenizer, record


def story_teller(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    temperature: float = 0.7,
    max_new_tokens: int = 100,
) -> VBox:
    """A box for the prompt, a slider for the temperature, and the story, token by token.

    A new prompt or temperature samples with the same random numbers, the button with new ones.
    Where nobody can move the slider, stories at two other temperatures follow.
    """
    import ipywidgets

    from lib.training.generation import generate_text

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

    def write(view: ipywidgets.Output, temperature: float, caption: str = "") -> None:
        story = ""
        before = view.outputs if caption else ()

        def add(row: int, piece: str) -> None:
            nonlocal story
            story += piece
            view.outputs = (*before, _story_output(box.value, story, caption))

        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        generate_text(model, tokenizer, [box.value], **settings, on_text=add)

    def update(change: Any = None) -> None:
        write(view, slider.value)

    def another(button: Any) -> None:
        nonlocal seed
        seed += 1
        update()

    box.observe(update, "value")
    slider.observe(update, "value")
    button.on_click(another)
    update()
    for other in STILL_TEMPERATURES:
        write(still, other, f"Temperature: {other:.1f}")
    return ipywidgets.VBox([box, slider, button, view, still])


def _story_output(prompt: str, story: str, caption: str) -> dict[str, Any]:
    head = f"<div>{html.escape(caption)}</div>" if caption else ""
    text = f"<b>{html.escape(prompt)}</b>{html.escape(story)}"
    data = {
        "text/html": f'{head}<div style="{TEXT}">{text}</div>',
        "text/plain": f"{caption}\n{prompt}{story}".strip(),
    }
    return {"output_type": "display_data", "data": data, "metadata": {}}


def evaluate_on_stories(model: TransformerLM, tokenizer: Tokenizer) -> Evaluation:
    """Evaluate `model` on the first EVALUATION_BYTES bytes of held-out generated stories."""
    import numpy as np

    from lib.data.stories import generate_stories
    from lib.training.evaluation import bytes_of_token, evaluate

    text = "".join(generate_stories(EVALUATION_BYTES, split="validation"))
    return evaluate(
        model,
        np.array(tokenizer.encode(text)),
        bytes_of_token(tokenizer),
        batch_size=32,
        device=model.output_weight.device,
    )


@settings
class StoryConfig:
    """Which run's model is kept, and where."""

    run: Path | None = None
    """The run's folder. May be given without its flag. None = the newest in `artifacts/runs`."""

    output: Path = Path("artifacts/local/tiny_stories")
    """Folder for the model; `artifacts/tiny_stories` replaces the committed one."""


def keep(config: StoryConfig) -> dict[str, Any]:
    """Write the model of the run's newest checkpoint; return its record.

    The folder `config.output` is new or empty, one that this function made, or the committed one.
    """
    import torch

    from lib.training.checkpoint import read_checkpoint, save_checkpoint
    from lib.training.generation import checkpoints_of, load_model, newest_run
    from lib.training.metrics import read_metrics

    run, output = config.run or newest_run(), config.output
    checkpoint, (model, tokenizer, config) = read_checkpoint(
        checkpoints_of(run), lambda path: (path, load_model(path, "cpu"))
    )
    made = json.loads((run / "run.json").read_text(encoding="utf-8"))
    last = read_metrics(run / "metrics.jsonl")[-1]
    if output.resolve() != FOLDER:
        claim_folder(output, "a story model", setting="output")
    before = evaluate_on_stories(model, tokenizer)
    step = int(checkpoint.name.removeprefix("step-"))
    # the model card, README.md, stays
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    tokenizer.save(tokenizer_files.find(output))
    config = dataclasses.replace(config, data=None, output=None)
    write_atomically(output / "config.json", to_json(config))
    # norms stay in float32, as in training with low-precision weights
    model.use_low_precision_weights(torch.float16)
    save_checkpoint(output / "checkpoints", step=step, model=model)
    (output / "checkpoints/.lock").unlink()
    after = evaluate_on_stories(model.float(), tokenizer)
    record = {name: made[name] for name in KEPT} | {
        "made_by": "python -m lib lessons story, from a training run with config.json",
        "steps": step,
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "text": f"the first {EVALUATION_BYTES:,} bytes of held-out generated stories, seed 0",
        "evaluation": dataclasses.asdict(after),
        "loss_before_rounding_to_float16": before.loss,
    }
    write_atomically(output / "record.json", json.dumps(record, indent=2) + "\n")
    return record
