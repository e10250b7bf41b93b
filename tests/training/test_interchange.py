"""Runs as folders of `transformers`, both ways: the same logits, ids and stories."""

import dataclasses
import json
import math
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from lib.__main__ import main
from lib.core.files import ROOT
from lib.model.config import ModelConfig
from lib.model.transformer import TransformerLM
from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.pretokenize import SEPARATOR
from lib.training.config import ExportConfig, ImportConfig
from lib.training.generation import generate_text, load_model
from lib.training.interchange import export_run, import_model
from lib.training.loop import train
from tests.training.runs import BYTES, saved_run

TINY = ROOT / "artifacts/tiny_stories"
SHAPE = ModelConfig(
    vocab_size=257, context_length=32, d_model=32, num_layers=2, num_heads=4, d_ff=48
)


@pytest.fixture
def make_run(tmp_path):
    """A function that makes a run's folder with random weights."""

    def make(dtype=torch.float32, **changes):
        torch.manual_seed(0)
        config = dataclasses.replace(SHAPE, **changes)
        return saved_run(tmp_path / "run", {5: TransformerLM(config, dtype=dtype)})

    return make


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The committed model as a folder of `transformers`."""
    folder = tmp_path_factory.mktemp("tiny") / "exported"
    return export_run(ExportConfig(folder=folder, checkpoint=TINY))


def export(run, name="exported"):
    return export_run(ExportConfig(folder=run.parent / name, checkpoint=run))


def import_(folder):
    return import_model(ImportConfig(folder=folder, output=folder.parent / "imported"))


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_an_exported_run_comes_back_bit_for_bit(make_run, dtype, tied):
    run = make_run(dtype, tied_embeddings=tied)
    model, tokenizer, config = load_model(import_(export(run)), "cpu")
    before, _, _ = load_model(run, "cpu")
    assert config.model == before.config
    assert tokenizer.parts == BYTES.parts
    ours = model.state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in before.state_dict().items())


def test_hugging_faces_tokenizer_reads_the_folder(tiny):
    theirs = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = f"Once upon a time, there was 1 fox.\n{SEPARATOR}The end"
    assert theirs.encode(text).ids == Tokenizer.load(TINY).encode(text)


def test_the_card_of_the_committed_model_gives_the_figures_of_its_record(tiny):
    judged = json.loads((TINY / "record.json").read_text())["evaluation"]
    figures = f"loss {judged['loss']:.3f}, perplexity {judged['perplexity']:.2f}."
    card = (tiny / "README.md").read_text()
    assert figures in card
    assert "held-out generated stories" in card


def test_the_card_says_what_was_trained_and_how_well(make_run):
    run = make_run()
    (run / "metrics.jsonl").write_text(
        '{"step": 4, "validation_loss": 1.5, "validation_perplexity": 4.48}\n{"step": 5}\n'
    )
    card = (export(run) / "README.md").read_text()
    for words in ("2 Transformer blocks of 4 heads", "5 steps.", "after step 4: loss 1.500"):
        assert words in card
    run = import_(run.parent / "exported")
    card = (export(run, "again") / "README.md").read_text()
    assert "Imported, and not trained by the workbook" in card
    assert "{" not in card


@pytest.mark.parametrize("name", ["folder", "run"])
def test_a_folder_with_files_is_not_written_to(make_run, name):
    run = make_run()
    (run.parent / "folder").mkdir()
    (run.parent / "folder/mine.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")}
    with pytest.raises(ValueError, match="folder must be new, empty"):
        export(run, name)
    assert before == {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")}
    # nor does an import write into a run
    with pytest.raises(ValueError, match="output must be new, empty or an unfinished import"):
        import_model(ImportConfig(folder=export(run, "new"), output=run))


def test_an_export_can_be_repeated_after_it_failed(make_run, monkeypatch):
    run = make_run()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lib.training.interchange.save", full)
        with pytest.raises(OSError, match="No space"):
            export(run)
    assert not (run.parent / "exported/config.json").exists()
    names = {path.name for path in export(run).iterdir()}
    assert names == {path.name for path in export(run, "another").iterdir()}
    assert ".workbook" not in names


def test_a_variant_that_llama_lacks_leaves_no_folder(make_run):
    run = make_run(qk_norm=True)
    with pytest.raises(ValueError, match="qk_norm must be False in Llama"):
        export(run)
    assert not (run.parent / "exported").exists()


def template(*added):
    """A post-processor that puts special tokens before a text."""
    first = [{"SpecialToken": {"id": token, "type_id": 0}} for token in added]
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}


@pytest.mark.parametrize(
    "processor",
    [None, template(), {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template()]}],
)
def test_a_post_processor_that_adds_nothing_is_taken(make_run, processor):
    folder = export(make_run())
    content = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": processor}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_model(import_(folder), "cpu")[1].parts == BYTES.parts


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"generation_config": {"eos_token_id": 256}}, ["<end>"]),
        ({"generation_config": {"eos_token_id": [257, 256]}}, ["<turn>", "<end>"]),
        ({"generation_config": {}, "config": {"eos_token_id": 257}}, ["<turn>"]),
        ({"generation_config": {"eos_token_id": 65}, "config": {"eos_token_id": 256}}, ["<end>"]),
        ({"tokenizer_config": {"eos_token": {"content": "<turn>"}}}, ["<turn>"]),
        ({}, []),
    ],
)
def test_the_token_that_ends_a_text_is_the_imported_models(make_run, settings, ends):
    folder = export(make_run(vocab_size=258))
    tokens = {"<end>": 256, "<turn>": 257}
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        {"id": token_id, "content": text} for text, token_id in tokens.items()
    ]
    del content["model"]["vocab"][SEPARATOR]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config | settings.get("config", {})))
    for name in ("generation_config", "tokenizer_config"):
        (folder / f"{name}.json").write_text(json.dumps(settings.get(name, {})))
    run = import_(folder)
    assert list(load_model(run, "cpu")[1].end_tokens) == ends
    # and exported again
    ids = [tokens[text] for text in ends]
    written = json.loads((export(run, "again") / "generation_config.json").read_text())
    assert written["eos_token_id"] == (ids if len(ids) > 1 else ids[0] if ids else None)


def test_only_the_files_that_transformers_reads_are_imported(make_run):
    run = make_run()
    folder = export(run)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: 0 * weight for name, weight in weights.items()}, folder / "model_old.safetensors"
    )
    model, _, _ = load_model(import_(folder), "cpu")
    assert model.state_dict()["ln_final.weight"].count_nonzero() > 0
    shutil.rmtree(folder.parent / "imported")
    # in two files, by an index
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{len(name) % 2}.safetensors" for name in weights}
    for file in {*names.values()}:
        save_file({n: w for n, w in weights.items() if names[n] == file}, folder / file)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in"):
        import_(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    again, _, _ = load_model(import_(folder), "cpu")
    assert all(torch.equal(w, again.state_dict()[n]) for n, w in model.state_dict().items())
    shutil.rmtree(folder.parent / "imported")
    for wrong, message in ((f"../{file}", "must name files in its folder"), ("x", "no x in")):
        index.write_text(json.dumps({"weight_map": {"a": wrong}}))
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            import_(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: head.bfloat16(), None),
        (lambda head: head.double(), "must be float32, bfloat16 or float16, got torch.float64"),
        (lambda head: head.index_fill(1, torch.tensor([3]), math.nan), "must be finite, got 257"),
    ],
)
def test_weights_of_several_dtypes_become_one_or_are_refused_by_name(make_run, change, message):
    folder = export(make_run())
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"] = change(weights["lm_head.weight"])
    save_file(weights, folder / "model.safetensors")
    if message:
        with pytest.raises(ValueError, match=f"lm_head.weight {message}"):
            import_(folder)
    else:
        model, _, _ = load_model(import_(folder), "cpu")
        assert torch.equal(model.output_weight, head.float())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"hidden_act": "gelu"}, r"config\.json: hidden_act must be 'silu'"),
        ("config.json", {"vocab_size": None}, "vocab_size must be .* 257, got None"),
        ("config.json", {"vocab_size": 200}, "vocab_size must be at least the tokenizer's 257"),
        ("config.json", {"hidden_size": "wide"}, r"config\.json: d_model must be a whole number"),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}, "normalizer must be None"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Sequence"}}, "pre_tokenizer must be"),
        ("tokenizer.json", {"post_processor": template("<s>")}, "post_processor must be None, got"),
        ("tokenizer.json", {"post_processor": {"type": "BertProcessing"}}, "got 'BertProcessing'"),
        ("config.json", None, r"no config\.json in"),
        ("tokenizer.json", None, r"no tokenizer\.json in"),
        ("model.safetensors", None, r"no model\.safetensors in .*; other formats are not read"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(make_run, name, change, message):
    folder = export(make_run())
    if change is None:
        (folder / name).unlink()
    else:
        content = json.loads((folder / name).read_text()) | change
        (folder / name).write_text(json.dumps(content))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        import_(folder)
    assert not (folder.parent / "imported").exists()


def test_the_folder_of_transformers_is_no_run_and_the_error_says_what_makes_one(make_run):
    folder = export(make_run())
    with pytest.raises(ValueError, match=f"`python -m lib import {folder}` makes a run of it"):
        load_model(folder)


def test_an_imported_model_cannot_be_trained_on_and_nothing_tells_to_remove_it(config):
    run = import_(export_run(ExportConfig(folder=config.output / "exported", checkpoint=TINY)))
    vocab_size = load_model(run, "cpu")[2].model.vocab_size
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    with pytest.raises(ValueError, match="which holds an imported model") as refusal:
        train(dataclasses.replace(config, output=run, model=model))
    assert "remove" not in str(refusal.value)


def test_the_commands_take_the_folder_as_a_word(make_run, capsys, monkeypatch):
    run = make_run()
    monkeypatch.chdir(run.parent)
    assert main(["export", "--to", "transformers", "fox", "--checkpoint", "run"]) == 0
    assert capsys.readouterr().out.startswith("fox; transformers.AutoModelForCausalLM.from_")
    shutil.rmtree("run")
    assert main(["import", "fox"]) == 0
    assert "artifacts/runs/fox" in capsys.readouterr().out
    flags = ["--max_new_tokens", "3", "--device", "cpu", "--prompts", "a"]
    assert main(["generate", *flags]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["export", "run", "fox"])
    assert "Unrecognized options: fox" in capsys.readouterr().err
    assert main(["export"]) == 2
    assert "folder must be a path, as in `export DIR`" in capsys.readouterr().err


# With transformers itself, where it is installed


@pytest.fixture
def transformers():
    return pytest.importorskip(
        "transformers", reason="needs transformers: pip install -r .ci/requirements-interop.txt"
    )


def test_a_model_that_transformers_has_saved_again_comes_back(tiny, transformers, tmp_path):
    again = tmp_path / "again"
    transformers.AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(again)
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(again)
    model, tokenizer, _ = load_model(import_(again), "cpu")
    before, own, _ = load_model(TINY, "cpu")
    assert tokenizer.parts == own.parts
    weights = model.state_dict()
    assert all(torch.equal(weights[name], own) for name, own in before.state_dict().items())


def test_transformers_tells_the_same_story(tiny, transformers):
    prompts = ("Once upon a time", "One day, a little fox")
    model, tokenizer, _ = load_model(TINY, "cpu")
    ours = generate_text(model, tokenizer, prompts, max_new_tokens=100, temperature=0)

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    for prompt, story in zip(prompts, ours):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        told = model.generate(ids, max_new_tokens=100, do_sample=False)[0]
        assert tokenizer.decode(told, skip_special_tokens=True) == prompt + story
