"""The benchmark of training steps, on tiny models: fair peers, records, table and figure."""

import csv
import dataclasses
import shutil

import pytest
import torch

import lib.tools.benchmarks.training as benchmark
from lib.core.records import read_records
from lib.model.config import MODEL_PRESETS, ModelConfig
from lib.model.transformer import TransformerLM
from lib.tools.benchmarks.training import (
    CANDIDATES,
    PEER,
    PeerLM,
    TrainingBenchmarkConfig,
    benchmark_training,
    benchmark_with_peer,
    measure_loss,
    our_step,
    peer_step,
)

CPU = torch.device("cpu")
TINY = ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=4, d_ff=48)


@pytest.fixture(autouse=True, scope="module")
def on_a_cpu(one_core):
    """No compiling, no CUDA graphs; the rest as on a GPU."""
    tied = dataclasses.replace(TINY, tied_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setitem(benchmark.FASTEST, "cuda_graph", False)
        patch.setitem(MODEL_PRESETS, "one", TINY)
        patch.setitem(MODEL_PRESETS, "two", tied)
        yield


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_models_differ_by_the_peers_learned_positions_only(tied):
    shape = dataclasses.replace(TINY, tied_embeddings=tied)
    positions = shape.context_length * shape.d_model
    assert count(PeerLM(shape)) == count(TransformerLM(shape)) + positions


def test_the_peer_sees_no_later_token():
    torch.manual_seed(0)
    peer = PeerLM(TINY)
    tokens = torch.randint(61, (2, 17))
    logits = []
    peer.head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 61
    for sequences in (tokens, changed):
        peer(sequences[:, :-1], sequences[:, 1:])
    assert torch.equal(logits[0][:, :9], logits[1][:, :9])
    assert not torch.equal(logits[0][:, 9:], logits[1][:, 9:])


def caught(name, monkeypatch):
    """The models of this class that are built from now on."""
    models, cls = [], getattr(benchmark, name)

    def build(*arguments, **keywords):
        models.append(cls(*arguments, **keywords))
        return models[-1]

    monkeypatch.setattr(benchmark, name, build)
    return models


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("PeerLM", lambda: peer_step(TINY, CPU, torch.bfloat16)),
        ("TransformerLM", lambda: our_step(TINY, 4, CPU, torch.bfloat16)),
    ],
)
def test_both_train(name, make, monkeypatch):
    torch.manual_seed(0)
    models = caught(name, monkeypatch)
    step = make()
    (transformer,) = models
    # each token is the one before plus 7
    sequences = (torch.arange(4)[:, None] + 7 * torch.arange(17)) % 61

    def loss():
        loss_of = transformer if name == "PeerLM" else transformer.loss
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return float(loss_of(sequences[:, :-1], sequences[:, 1:]))

    before, weights = loss(), [parameter.detach().clone() for parameter in transformer.parameters()]
    for _ in range(100):
        step(sequences)
    assert loss() < before - 0.02
    assert all(not torch.equal(a, b) for a, b in zip(weights, transformer.parameters()))


def test_each_candidate_has_the_settings_in_its_name(monkeypatch):
    models = caught("TransformerLM", monkeypatch)
    for candidate, changes in CANDIDATES.items():
        our_step(TINY, 4, CPU, torch.bfloat16, **changes)
        is_bare = candidate == "none of these"
        model = models.pop()
        assert model.uses_kernels == (candidate != "without Triton kernels" and not is_bare)
        is_short = candidate != "without low-precision weights" and not is_bare
        assert (model.output_weight.dtype == torch.bfloat16) == is_short


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of a benchmark of two models, and its records."""
    folder = tmp_path_factory.mktemp("measured")
    config = TrainingBenchmarkConfig(
        models=("one", "two"), batch_sizes=(2, 3), samples=3, steps=2, loss=False, output=folder
    )
    assert benchmark_with_peer(config, CPU) == folder / "training_benchmark.md"
    return folder, read_records(folder / "training_benchmark.jsonl")


def test_each_model_has_a_record_of_the_peer_and_of_each_candidate(measured):
    _, records = measured
    for name, batch_size in (("one", 2), ("two", 3)):
        rows = [r["figures"] for r in records if r["figures"]["model"] == name]
        assert [row["candidate"] for row in rows] == [PEER, *CANDIDATES]
        assert [row["samples"] for row in rows] == [3] * len(rows)
        for row in rows:
            tokens = batch_size * TINY.context_length
            assert row["tokens_per_s"] == pytest.approx(tokens / row["median_ms"] * 1e3)
            assert row["iqr_ms"] >= 0
            # a CPU's memory and peak are not known
            assert (row["peak_memory_gb"], row["mfu"]) == (0, None)
        assert [row["candidate"] for row in rows if row.get("ratio_to_peer", 0) > 0] == ["all"]
    for record in records:
        assert record["config"]["models"] == ["one", "two"]
        assert record["versions"]["torch"] == torch.__version__
        assert record["seed"] == 0


def test_records_become_a_table_and_a_figure(measured):
    folder, records = measured
    text = (folder / "training_benchmark.md").read_text()
    assert "tokens/s" in text
    assert "The loss" not in text
    for candidate in (PEER, *CANDIDATES):
        assert text.count(f"| {candidate} ") == 2
    assert (folder / "training_benchmark.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((folder / "training_benchmark.csv").open()))
    assert len(rows) == len(records)


def test_a_later_run_adds_records_and_its_table_shows_these_only(measured, tmp_path):
    folder, records = measured
    shutil.copy(folder / "training_benchmark.jsonl", tmp_path)
    quick = {"samples": 1, "steps": 1, "ablations": False, "loss": False}
    config = TrainingBenchmarkConfig(models=("two",), batch_sizes=(1,), output=tmp_path, **quick)
    benchmark_with_peer(config, CPU)
    now = read_records(tmp_path / "training_benchmark.jsonl")
    assert now[: len(records)] == records
    assert [r["figures"]["candidate"] for r in now[len(records) :]] == [PEER, "all"]
    text = (tmp_path / "training_benchmark.md").read_text()
    assert "without" not in text
    assert "| one " not in text


def test_the_loss_is_measured_in_chunks_and_whole(monkeypatch):
    monkeypatch.setattr(benchmark, "LOSS_TOKENS", 100)
    rows = list(measure_loss(TINY, CPU, torch.float32))
    names = ["all logits at once", "chunked", "chunked, 1,024 tokens"]
    assert [row["candidate"] for row in rows] == names
    assert all(row["median_ms"] > 0 and row["samples"] == 5 for row in rows)
    # logits and their gradient
    assert rows[0]["peak_memory_gb"] > 100 * 61 * 4 / 1e9
    assert {(row["tokens"], row["vocab_size"], row["d_model"]) for row in rows} == {(100, 61, 32)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_device_decides_what_steps_are_compared_with(device, monkeypatch):
    monkeypatch.setattr(benchmark, "pick_device", torch.device)
    monkeypatch.setattr(benchmark, "benchmark_with_peer", lambda config, device: "cuda")
    monkeypatch.setattr(benchmark, "benchmark_on_cpu", lambda config: "cpu")
    assert benchmark_training(TrainingBenchmarkConfig(device=device)) == device


def test_any_other_device_is_refused(monkeypatch):
    monkeypatch.setattr(benchmark, "pick_device", torch.device)
    with pytest.raises(ValueError, match="device must be cpu or a CUDA device, got mps"):
        benchmark_training(TrainingBenchmarkConfig(device="mps"))
