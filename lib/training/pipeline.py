"""The whole pipeline: corpus -> tokenizer and token arrays -> training -> a sample of text."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from lib.core.files import make_folder
from lib.data.prepare import ProgressBar, tokenize_corpus
from lib.training.config import PipelineConfig

if TYPE_CHECKING:
    from lib.training.loop import TrainResult


def run_pipeline(
    config: PipelineConfig, *, progress_bar: ProgressBar
) -> tuple[list[dict[str, Any]], TrainResult, list[str]]:
    """Prepare the data, train a model, and sample text from it.

    Each step is skipped if its result exists and was made from the same content and settings. Ranks
    train together; rank 0 alone makes the data and the sample, which all ranks return.

    Returns:
        The rows of `tokenize_corpus` (none with `skip_data`), the result of the training, and each
        prompt with its continuation (none if the training was stopped).
    """
    from lib.ddp.process_group import on_each_rank, on_first_rank, patient_group
    from lib.training.generation import generate_text, load_model
    from lib.training.loop import train
    from lib.training.run_folder import check_machine

    def sample() -> list[str]:
        model, tokenizer, _ = load_model(result.checkpoint, training.device)
        prompts = config.sample.prompts
        texts = generate_text(model, tokenizer, prompts, **config.sample.options())
        return [prompt + text for prompt, text in zip(prompts, texts)]

    rows, training = [], config.train
    # check first: making a corpus may take long
    on_each_rank(lambda: check_machine(training))
    on_first_rank(lambda: make_folder(training.output or training.runs_dir))
    # ranks wait in this group while rank 0 works alone
    with patient_group() as patient:
        if not config.skip_data:
            make_data = partial(tokenize_corpus, config.corpus, progress_bar=progress_bar)
            rows = on_first_rank(make_data, patient)
            training = dataclasses.replace(training, data=training.data or config.corpus.output_dir)
        result = train(training)
        texts = [] if result.status == "stopped" else on_first_rank(sample, patient)
    return rows, result, texts
