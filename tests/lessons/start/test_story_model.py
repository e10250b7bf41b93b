"""The committed model: whole, small, deterministic, and as good as its record says."""

import contextlib
import json
import re
from pathlib import Path

import pytest

from lib.core.files import claim_folder
from lib.core.settings import from_json
from lib.data.prepare import TokenizeConfig
from lib.lessons.start.story import FOLDER, StoryConfig, evaluate_on_stories, keep, load_story_model
from lib.model.config import ModelConfig
from lib.training.config import OptimizerConfig, PipelineConfig, SampleConfig, TrainConfig
from lib.training.generation import load_model
from lib.training.metrics import read_metrics
from lib.training.pipeline import run_pipeline


@pytest.fixture(scope="module")
def story_model():
    return load_story_model("cpu")


def test_it_is_small_and_loads_as_any_training_run_does():
    model, tokenizer, config = load_model(FOLDER, "cpu")
    assert model.config.vocab_size == tokenizer.vocab_size == config.model.vocab_size
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 5e6


def test_it_predicts_held_out_stories_as_well_as_its_record_says(story_model):
    model, tokenizer, record = story_model
    judged = evaluate_on_stories(model, tokenizer)
    assert judged.tokens == record["evaluation"]["tokens"]
    # matmuls round differently from machine to machine
    assert judged.loss <= record["evaluation"]["loss"] + 1e-3
    assert judged.bits_per_byte <= record["evaluation"]["bits_per_byte"] + 1e-3


def test_its_record_says_how_it_was_made_and_nothing_private(story_model):
    record = story_model[2]
    assert record["evaluation"]["loss"] - record["loss_before_rounding_to_float16"] < 1e-3
    assert re.fullmatch(r"[0-9a-f]{40}", record["commit"])
    assert record["dirty"] is False
    assert {"torch", "python"} <= record["versions"].keys()
    assert record["steps"] == from_json(TrainConfig, FOLDER / "config.json").steps
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.json*")]
    assert [text for text in texts if re.search(r"/(home|Users|root)/", text)] == []


def test_its_card_gives_the_figures_of_its_record(story_model):
    model, _, record = story_model
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: mit\n")
    judged = record["evaluation"]
    for figure in (
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters",
        f"{record['steps']:,} steps",
        f"{record['tokens']:,} tokens, {record['seconds']:,.0f} s",
        f"loss {judged['loss']:.3f}, perplexity {judged['perplexity']:.2f}",
        f"{judged['bits_per_byte']:.3f} bits per byte",
    ):
        assert figure in " ".join(card.split()), figure


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a training run of two steps."""
    tmp_path = tmp_path_factory.mktemp("story")
    config = PipelineConfig(
        TokenizeConfig(corpus_bytes=50_000, vocab_size=300, data_dir=tmp_path, workers=1),
        TrainConfig(
            model=ModelConfig(context_length=16, d_model=16, num_layers=1, num_heads=1, d_ff=16),
            optimizer=OptimizerConfig(warmup_steps=1),
            output=tmp_path / "run",
            steps=2,
            batch_size=2,
            device="cpu",
        ),
        SampleConfig(max_new_tokens=1),
    )
    run_pipeline(config, progress_bar=lambda *_: contextlib.nullcontext(lambda count: None))
    return tmp_path / "run"


@pytest.mark.parametrize("output", ["run", "own"])
def test_keep_leaves_a_folder_of_the_readers_alone(run, tmp_path, output):
    folder = run if output == "run" else tmp_path
    (folder / "notes.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ValueError, match="output must be new"):
        keep(StoryConfig(run, folder))
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    # and the committed model, unless it is named
    assert StoryConfig().output.parent == Path("artifacts/local")


def test_keep_makes_such_a_folder_from_a_training_run(run, tmp_path):
    claim_folder(tmp_path / "kept", "a story model", setting="output")
    (tmp_path / "kept/README.md").write_text("the card")
    record = keep(StoryConfig(run, tmp_path / "kept"))
    assert record == json.loads((tmp_path / "kept/record.json").read_text())
    assert record["tokens"] == read_metrics(run / "metrics.jsonl")[-1]["tokens"]
    model, _, kept = load_model(tmp_path / "kept", "cpu")
    assert model.output_weight.element_size() == 2
    assert kept.output is None
    files = {path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert ".lock" not in files
    assert "README.md" in files
