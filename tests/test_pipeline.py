"""From a corpus to a tokenizer, token arrays, a model and its text; each step only when needed."""

import dataclasses
import threading
from contextlib import contextmanager, nullcontext

import pytest

from lib.config import TokenizeConfig
from lib.config_training import (
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from lib.data import load_token_array
from lib.pipeline import run_pipeline, tokenize_corpus
from lib.tokenizer import SEPARATOR, Tokenizer

STORY = f"The cat sat on the mat. “Là,” said the dog.\n{SEPARATOR}\n"


@contextmanager
def silent(name, num_bytes):
    yield lambda count: None


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i} {STORY}" for i in range(300)), encoding="utf-8")
    return TokenizeConfig(
        corpus=str(path), vocab_size=300, data_dir=tmp_path / "data", output=tmp_path / "out"
    )


def tokenize(config, **changes):
    rows = tokenize_corpus(dataclasses.replace(config, **changes), progress_bar=silent)
    return {row["step"]: row for row in rows}


def test_arrays_decode_to_the_corpus(config, tmp_path):
    rows = tokenize(config)
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    for part in ("train", "validation"):
        (text_path,) = (tmp_path / "data").glob(f"*/*{part}*.txt")
        tokens = load_token_array(
            tmp_path / "out" / f"{part}.npy", tokenizer=tokenizer, verify=True
        )
        assert tokenizer.decode(tokens) == text_path.read_text(encoding="utf-8")
        assert rows[part]["tokens"] == len(tokens)
        assert rows[part]["bytes"] == text_path.stat().st_size > 0


def test_table_adds_up(config):
    rows = tokenize(config)
    assert list(rows) == ["tokenizer", "train", "validation"]
    train = rows["train"]
    assert train["bytes_per_token"] == train["bytes"] / train["tokens"]
    assert rows["tokenizer"]["tokens"] == 300
    assert all(row["MB_per_s"] > 0 for row in rows.values())


def test_a_second_run_does_nothing(config, tmp_path):
    tokenize(config)
    before = {path.name: path.stat() for path in (tmp_path / "out").iterdir()}
    rows = tokenize(config)
    assert all(row["MB_per_s"] is None for row in rows.values())
    after = {path.name: path.stat() for path in (tmp_path / "out").iterdir()}
    assert {name: stat.st_mtime_ns for name, stat in after.items()} == {
        name: stat.st_mtime_ns for name, stat in before.items()
    }


def test_another_vocabulary_makes_everything_again(config):
    tokenize(config)
    rows = tokenize(config, vocab_size=290)
    assert rows["tokenizer"]["tokens"] == 290
    assert all(row["MB_per_s"] is not None for row in rows.values())


def test_only_the_lost_array_is_made_again(config, tmp_path):
    tokenize(config)
    (tmp_path / "out" / "validation.npy").unlink()
    rows = tokenize(config)
    assert [name for name, row in rows.items() if row["MB_per_s"]] == ["validation"]


def test_an_altered_tokenizer_is_refused_by_name(config, tmp_path):
    tokenize(config)
    path = tmp_path / "out" / "tokenizer.json"
    path.write_text(path.read_text().replace("endoftext", "endoftest"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenize(config)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}"])
def test_a_damaged_note_of_the_source_means_training_again(config, tmp_path, content):
    before = tokenize(config)
    (tmp_path / "out" / "tokenizer.source.json").write_bytes(content)
    after = tokenize(config)
    assert after["tokenizer"]["MB_per_s"] is not None
    assert after["train"]["tokens"] == before["train"]["tokens"]
    assert tokenize(config)["tokenizer"]["MB_per_s"] is None


def test_another_tokenizer_in_its_place_is_noticed(config, tmp_path):
    tokenize(config)
    tokens = (tmp_path / "out" / "train.npy").read_bytes()
    other = Tokenizer({i: bytes([i]) for i in range(256)}, [], [SEPARATOR])
    other.save(tmp_path / "out" / "tokenizer.json")
    tokenize(config)
    assert (tmp_path / "out" / "train.npy").read_bytes() == tokens
    assert Tokenizer.load(tmp_path / "out" / "tokenizer.json").vocab_size == 300


@pytest.fixture
def whole(config, tmp_path):
    """A pipeline of a second."""
    training = TrainConfig(
        model=ModelConfig(context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        optimizer=OptimizerConfig(warmup_steps=2),
        runs_dir=tmp_path / "runs",
        steps=8,
        batch_size=2,
        device="cpu",
        eval_tokens=50,
    )
    sample = SampleConfig(prompts=("The cat", ""), max_new_tokens=6)
    return PipelineConfig(corpus=config, train=training, sample=sample)


def run(config):
    return run_pipeline(config, progress_bar=silent)


def with_training(config, **changes):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_pipeline_ends_with_a_model_and_its_text(whole, tmp_path):
    rows, result, texts = run(whole)
    assert [row["step"] for row in rows] == ["tokenizer", "train", "validation"]
    assert (result.status, result.step) == ("finished", 8)
    assert result.output.parent == tmp_path / "runs"
    assert len(texts) == 2
    assert texts[0].startswith("The cat")
    assert all(len(text) > len(prompt) for text, prompt in zip(texts, whole.sample.prompts))


def test_a_pipeline_run_again_trains_nothing_and_says_the_same(whole, tmp_path, monkeypatch):
    from lib.train_step import TrainStep

    _, before, texts = run(whole)
    files = stamps(tmp_path)
    monkeypatch.setattr(TrainStep, "__call__", lambda *a: pytest.fail("it trains"))
    rows, after, again = run(whole)
    assert all(row["MB_per_s"] is None for row in rows)
    assert after.status == "up to date"
    assert (after.output, after.checkpoint) == (before.output, before.checkpoint)
    assert again == texts
    changed = {path.name for path, time in stamps(tmp_path).items() if files.get(path) != time}
    assert changed <= {".lock"}


def test_another_text_under_the_same_name_is_another_run(whole, tmp_path):
    _, before, _ = run(whole)
    weights = before.checkpoint / "model.safetensors"
    kept = weights.read_bytes()
    (tmp_path / "book.txt").write_text(f"Another story.\n{SEPARATOR}\n" * 400)
    rows, after, _ = run(whole)
    assert all(row["MB_per_s"] is not None for row in rows)
    assert after.status == "finished"
    assert after.output != before.output
    assert weights.read_bytes() == kept


def test_another_setting_is_another_run_of_the_same_tokens(whole):
    _, before, _ = run(whole)
    rows, after, _ = run(with_training(whole, seed=1))
    assert all(row["MB_per_s"] is None for row in rows)
    assert after.status == "finished"
    assert after.output != before.output


def test_another_sample_needs_no_training(whole):
    _, _, (first, _) = run(whole)
    sample = SampleConfig(prompts=("The dog",), max_new_tokens=0)
    _, result, texts = run(dataclasses.replace(whole, sample=sample))
    assert result.status == "up to date"
    assert texts == ["The dog"] != [first]


def test_without_the_data_step_the_arrays_that_there_are_are_used(whole, tmp_path):
    _, before, texts = run(whole)
    (tmp_path / "book.txt").unlink()
    skipping = with_training(whole, data=tmp_path / "out")
    rows, result, again = run(dataclasses.replace(skipping, skip_data=True))
    assert rows == []
    assert (result.status, result.output, again) == ("up to date", before.output, texts)


@pytest.mark.parametrize("has_data", [False, True])
def test_an_empty_prompt_without_an_end_of_text_token_is_refused_before_any_work(
    whole, tmp_path, has_data, monkeypatch
):
    corpus = dataclasses.replace(whole.corpus, special_tokens=("<|pad|>",))
    config = dataclasses.replace(whole, corpus=corpus)
    if has_data:
        tokenize(corpus)
        config = with_training(whole, data=tmp_path / "out")
    monkeypatch.setattr("lib.pipeline.tokenize_corpus", lambda *a, **k: pytest.fail("it works"))
    with pytest.raises(
        ValueError, match=r"prompts has an empty text, but special_tokens is \('<\|pad"
    ):
        run(config)
    assert not list((tmp_path / "runs").iterdir())


def test_an_empty_prompt_needs_an_end_of_text_token_of_the_data_alone(whole, tmp_path):
    tokenize(whole.corpus)
    corpus = dataclasses.replace(whole.corpus, special_tokens=())
    config = with_training(whole, data=tmp_path / "out")
    _, result, texts = run(dataclasses.replace(config, corpus=corpus, skip_data=True))
    assert (result.status, len(texts)) == ("finished", 2)


def test_data_that_are_given_are_trained_on_in_place_of_the_corpus(whole, tmp_path):
    other = tokenize(whole.corpus, output=tmp_path / "other", vocab_size=280)
    _, result, _ = run(with_training(whole, data=tmp_path / "other"))
    assert result.output.name.startswith("other-")
    assert other["tokenizer"]["tokens"] == 280


def test_without_the_data_step_a_folder_without_arrays_is_named(whole, tmp_path):
    skipping = with_training(whole, data=tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"none.*, which has no tokenizer\.json"):
        run(dataclasses.replace(skipping, skip_data=True))


def test_a_stopped_pipeline_has_no_text_and_goes_on(whole, monkeypatch):
    stop = threading.Event()
    stop.set()
    with monkeypatch.context() as patch:
        patch.setattr("lib.train.stop_signals", lambda: nullcontext(stop))
        rows, result, texts = run(whole)
    assert (len(rows), result.status, texts) == (3, "stopped", [])
    _, after, texts = run(whole)
    assert (after.status, after.step, after.output) == ("finished", 8, result.output)
    assert len(texts) == 2
