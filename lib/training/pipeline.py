"""The whole pipeline: corpus -> tokenizer and token arrays -> training -> a sample of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lib.core.files import make_folder
from lib.core.settings import require
from lib.data.prepare import ProgressBar, tokenize_corpus
from lib.tokenizer import files as tokenizer_files
from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.pretokenize import SEPARATOR
from lib.training.config import PipelineConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    from lib.ddp.process_group import patient_group

    with patient_group() as group:
        return _run_pipeline(config, progress_bar, group)


def _run_pipeline(
    config: PipelineConfig, progress_bar: ProgressBar, group: ProcessGroup | None
) -> tuple[list[dict[str, Any]], TrainResult, list[str]]:
    """`run_pipeline`, whose ranks wait for rank 0 in `group`."""
    from lib.ddp.process_group import on_each_rank, on_first_rank
    from lib.training.generation import generate_text, load_model
    from lib.training.loop import train
    from lib.training.run_folder import check_machine

    rows, training = [], config.train
    # check first: making a corpus may take long
    on_each_rank(lambda: check_machine(training))
    on_first_rank(lambda: make_folder(training.output or training.runs_dir))
    on_first_rank(lambda: _check_prompts(config))
    if not config.skip_data:
        make_data = partial(tokenize_corpus, config.corpus, progress_bar=progress_bar)
        rows = on_first_rank(make_data, group)
        training = dataclasses.replace(training, data=training.data or config.corpus.output_dir)
    result = train(training)
    if result.status == "stopped":
        return rows, result, []

    def sample() -> list[str]:
        model, tokenizer, _ = load_model(result.checkpoint, training.device)
        prompts = config.sample.prompts
        texts = generate_text(model, tokenizer, prompts, **config.sample.options())
        return [prompt + text for prompt, text in zip(prompts, texts)]

    return rows, result, on_first_rank(sample, group)


def _check_prompts(config: PipelineConfig) -> None:
    """Refuse an empty prompt if the tokenizer will have no token that ends a text to start from."""
    special_tokens, data = config.corpus.special_tokens, config.train.data
    if all(config.sample.prompts):
        return
    ends: Sequence[str] = tokenizer_files.default_end_tokens(special_tokens)
    if data is not None and tokenizer_files.find(data).exists():
        tokenizer = Tokenizer.load(data)
        special_tokens, ends = tuple(tokenizer.special_tokens), tokenizer.end_tokens
    require(
        ends,
        f"prompts must not be empty texts unless {SEPARATOR} is among the special_tokens, got "
        f"{special_tokens}",
    )
