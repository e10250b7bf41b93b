"""The committed model: a small one that tells stories, for whatever needs a trained model at once.

It was trained by `python -m lib pipeline` on the generated stories, with the settings in its
config.json; record.json says what it reached. `python -m lib.story_model RUN` makes it anew from
the folder of such a training run: weights in float16, which halves them, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.files import make_folder, write_atomically
from lib.hardware import ROOT
from lib.strict_json import to_json

if TYPE_CHECKING:
    from lib.evaluate import Evaluation
    from lib.model import TransformerLM
    from lib.tokenizer import Tokenizer

FOLDER = ROOT / "artifacts/tiny_stories"
# Held-out text that the record's figures are about: the first so many bytes of it.
EVALUATION_BYTES = 200_000
# What the record takes over from the run's own.
KEPT = ("device", "cores", "versions", "commit", "dirty", "date", "data_sha256")


def load_story_model(device: str = "auto") -> tuple[TransformerLM, Tokenizer, dict[str, Any]]:
    """The model in float32, its tokenizer, and the record of how it was made.

    Args:
        device: as in `lib.hardware.pick_device`.

    Raises:
        FileNotFoundError, ValueError: as `lib.generate.load_model`.
    """
    from lib.generate import load_model

    model, tokenizer, _ = load_model(FOLDER, device)
    record = json.loads((FOLDER / "record.json").read_text(encoding="utf-8"))
    return model.float(), tokenizer, record


def evaluate_on_stories(
    model: TransformerLM, tokenizer: Tokenizer, num_bytes: int = EVALUATION_BYTES
) -> Evaluation:
    """How well `model` predicts the first `num_bytes` bytes of held-out generated stories."""
    import numpy as np

    from lib.evaluate import bytes_of_token, evaluate
    from lib.stories import generate_stories

    text = "".join(generate_stories(num_bytes, split="validation"))
    return evaluate(
        model,
        np.array(tokenizer.encode(text)),
        bytes_of_token(tokenizer),
        batch_size=32,
        device=model.output_weight.device,
    )


def keep(run: Path, folder: Path = FOLDER) -> dict[str, Any]:
    """Make `folder` from the newest checkpoint of the training run in `run`; return its record.

    Raises:
        FileNotFoundError, ValueError: as `lib.generate.load_model`.
    """
    import torch

    from lib.checkpoint import find_checkpoint, save_checkpoint
    from lib.generate import load_model
    from lib.metrics import read_metrics

    model, tokenizer, config = load_model(run, "cpu")
    before = evaluate_on_stories(model, tokenizer)
    step = int(find_checkpoint(run / "checkpoints").name.removeprefix("step-"))
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    tokenizer.save(folder / "tokenizer.json")
    config = dataclasses.replace(config, data=None, output=None)
    write_atomically(folder / "config.json", to_json(config))
    # norms stay in float32, as in training with short weights
    model.use_low_precision_weights(torch.float16)
    save_checkpoint(folder / "checkpoints", step=step, model=model)
    (folder / "checkpoints/.lock").unlink()
    after = evaluate_on_stories(model.float(), tokenizer)
    made = json.loads((run / "run.json").read_text(encoding="utf-8"))
    lines = read_metrics(run / "metrics.jsonl")
    record = {name: made[name] for name in KEPT} | {
        "made_by": "python -m lib pipeline, then python -m lib.story_model",
        "steps": step,
        "tokens": lines[-1]["tokens"],
        "seconds": lines[-1]["seconds"],
        "text": f"the first {EVALUATION_BYTES:,} bytes of held-out generated stories, seed 0",
        "evaluation": dataclasses.asdict(after),
        "loss_before_rounding_to_float16": before.loss,
    }
    write_atomically(folder / "record.json", json.dumps(record, indent=2) + "\n")
    return record


if __name__ == "__main__":
    print(json.dumps(keep(Path(sys.argv[1])), indent=2))
