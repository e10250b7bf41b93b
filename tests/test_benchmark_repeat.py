"""Settings of kept records, measured again: the same ones, as many as there is time for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_benchmarks import flags

from lib import benchmark_lm_matrix_cases, benchmark_repeat, benchmark_sharding_cases
from lib.__main__ import main
from lib.benchmark_repeat import chosen_sections, config_of, sections_of
from lib.config_ranks import RepeatConfig
from lib.report import read_records
from lib.strict_json import to_dict

ROOT = Path(__file__).resolve().parent.parent
KEPT = [
    (name, section)
    for name in ("lm_matrix", "sharding_benchmark")
    for section in sections_of(read_records(ROOT / f"artifacts/{name}.jsonl"))[1]
]
SIZES = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 61}
SIZES |= {"context_length": 8, "tr_batch_size": 2, "epochs": 2, "timed_epochs": 1}
SIZES |= {"steps_per_epoch": 2, "trace_steps": 1, "loss_steps": 0}
CELLS = ["--kernels", "sdpa", "--wrappers", "flat", "flashddp"]


pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A folder with records of two settings on two ranks, and of one on one."""
    folder = tmp_path_factory.mktemp("kept")
    for settings in ({"bucket_size_mb": 1.0}, {"low_precision_weights": True}, {"ranks": 1}):
        settings = {"backend": "gloo", "output": folder, **SIZES, **settings}
        words = [w for w in flags(**settings) if w != "True"]
        assert main(["benchmark", "lm-matrix", *CELLS, *words]) == 0
    return folder / "lm_matrix.jsonl"


@pytest.mark.parametrize(("name", "section"), KEPT, ids=lambda value: getattr(value, "title", ""))
def test_a_kept_setting_is_measured_as_it_was(name, section, tmp_path):
    newest = max(section.rows, key=lambda row: row["date"])
    config = config_of(section, RepeatConfig(output=tmp_path))
    assert config.output == tmp_path
    on_gpu = newest["backend"] == "nccl"
    if name == "lm_matrix":
        cases = benchmark_lm_matrix_cases
        config = cases.settled(config, newest["ranks"], on_gpu=on_gpu)
        case = cases.make_case(config, newest["kernel"], newest["wrapper"], newest["dtype"])
    else:
        cases = benchmark_sharding_cases
        config = cases.settled(config, newest["ranks"], on_gpu=on_gpu)
        case = cases.make_case(config, newest["model"], newest["method"], newest["dtype"])
    assert to_dict(case) == {key: newest[key] for key in to_dict(case)}


def test_buckets_can_be_those_that_training_chooses():
    section = KEPT[-1][1]
    assert config_of(section, RepeatConfig()).bucket_size_mb == section.rows[-1]["bucket_size_mb"]
    assert config_of(section, RepeatConfig(keep_buckets=False)).bucket_size_mb is None


@pytest.mark.slow
def test_settings_of_as_many_ranks_are_measured_again(kept, tmp_path, capsys):
    command = ["benchmark", "repeat", *flags(records=kept, output=tmp_path)]
    assert main(command) == 0
    before, again = read_records(kept), read_records(tmp_path / "lm_matrix.jsonl")
    assert [r["config"] for r in again] == [
        r["config"] for r in before if r["config"]["ranks"] == 2
    ]
    assert {record["figures"]["status"] for record in again} == {"ok"}
    report = (tmp_path / "lm_matrix_report.md").read_text()
    assert report.count("\n## tiny") == 2
    assert capsys.readouterr().out.count("-- tiny") == 2


@pytest.mark.slow
def test_only_some_are_measured_where_words_are_given(kept, tmp_path):
    command = ["benchmark", "repeat", *flags(records=kept, output=tmp_path, only="short weights")]
    assert main(command) == 0
    again = read_records(tmp_path / "lm_matrix.jsonl")
    assert [record["config"]["low_precision_weights"] for record in again] == [True, True]


def test_ranks_of_torchrun_measure_all_and_one_writes(kept, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [*torchrun, "-m", "lib", "benchmark", "repeat", *flags(records=kept, output=tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    (first, *_) = again = read_records(tmp_path / "lm_matrix.jsonl")
    assert len(again) == 2
    assert first["config"]["ranks"] == 1
    assert (tmp_path / "lm_matrix_report.md").exists()


def test_nothing_is_begun_that_would_end_too_late(kept, tmp_path, monkeypatch, capsys):
    clock = iter([0.0, 0.0, 30.0])
    monkeypatch.setattr(benchmark_repeat.time, "monotonic", lambda: next(clock))
    measured = []
    monkeypatch.setattr(
        benchmark_repeat, "run_benchmark", lambda _, config: measured.append(config) or []
    )
    monkeypatch.setattr(benchmark_repeat, "read_records", lambda path: read_records(kept))
    benchmark_repeat.benchmark_repeat(RepeatConfig(records=kept, seconds=50, output=tmp_path))
    assert len(measured) == 1
    assert "seconds 50 are over: 1 of 2 left" in capsys.readouterr().out


def test_words_that_no_title_has_are_refused_with_the_titles(kept):
    _, sections = sections_of(read_records(kept))
    with pytest.raises(
        ValueError, match="no setting of 2 ranks over gloo has that in its title; there"
    ):
        chosen_sections(sections, ["nowhere"], "gloo", 2)
    with pytest.raises(ValueError, match=r"no setting of 4 ranks over nccl .*; there are: none"):
        chosen_sections(sections, [], "nccl", 4)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"records .*none\.jsonl: no such file"):
        benchmark_repeat.benchmark_repeat(RepeatConfig(records=tmp_path / "none.jsonl"))
