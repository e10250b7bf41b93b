"""Settings of kept records, measured again: the same ones, as many as there is time for."""

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest

from lib.__main__ import main
from lib.core.records import read_records
from lib.core.settings import to_dict
from lib.ddp.launcher import launch
from lib.tools.benchmarks import repeat
from lib.tools.benchmarks.lm_matrix import LmMatrixConfig
from lib.tools.benchmarks.repeat import RepeatConfig, choose_settings, config_of, settings_of
from tests.tools.benchmarks.rank_benchmarks import SMALL, flags, plant

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = [
    setting
    for name in ("lm_matrix", "sharding_benchmark")
    for setting in settings_of(read_records(ROOT / f"artifacts/{name}.jsonl"))[1]
]
QUICK = SMALL | {"epochs": 2, "timed_epochs": 1, "trace_steps": 0, "loss_steps": 0}

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture
def kept(tmp_path) -> Path:
    """Records of two settings on two ranks, and of one on one, with a cell each."""
    config = LmMatrixConfig(**QUICK, bucket_size_mb=1.0).with_defaults(2, on_gpu=False)
    case = config.case("sdpa", "flat", "float32")
    for changes in ({}, {"low_precision_weights": True, "dtype": "bfloat16"}, {"ranks": 1}):
        plant(tmp_path / "kept.jsonl", dataclasses.replace(case, **changes), 5.0)
    return tmp_path / "kept.jsonl"


@pytest.mark.parametrize("setting", COMMITTED, ids=lambda setting: setting.title)
def test_a_committed_setting_is_measured_as_it_was(setting, tmp_path):
    newest = max(setting.rows, key=lambda row: row["date"])
    config = config_of(setting, RepeatConfig(output=tmp_path))
    assert config.output == tmp_path
    config = config.with_defaults(newest["ranks"], on_gpu=newest["backend"] == "nccl")
    keys = ("model", "method") if "method" in newest else ("kernel", "wrapper")
    case = to_dict(config.case(*(newest[key] for key in keys), newest["dtype"]))
    assert case == {key: newest[key] for key in case}


@pytest.mark.slow
def test_the_command_measures_the_named_settings_of_as_many_ranks_again(kept, tmp_path, capsys):
    command = ["benchmark", "repeat", *flags(records=kept, output=tmp_path, only="parameters")]
    assert main(command) == 0
    [again] = read_records(tmp_path / "lm_matrix.jsonl")
    assert again["config"] == read_records(kept)[1]["config"]
    assert again["figures"]["status"] == "ok"
    assert capsys.readouterr().out.count("-- tiny") == 1
    assert (tmp_path / "lm_matrix_report.md").read_text().count("\n## tiny") == 1


def command_on_a_rank(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command on a rank that is there already, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return main(arguments), printed.getvalue()


# the harness is that of `lm-matrix`, of which test_multi_rank.py tries the same
@pytest.mark.slow
def test_ranks_that_are_there_already_measure_and_one_writes(kept, tmp_path):
    command = ["benchmark", "repeat", *flags(records=kept, output=tmp_path)]
    first, second = launch(command_on_a_rank, 2, command, backend="gloo", timeout=60)
    assert (first[0], second) == (0, (0, ""))
    again = read_records(tmp_path / "lm_matrix.jsonl")
    assert [record["config"] for record in again] == [
        record["config"] for record in read_records(kept)[:2]
    ]
    assert first[1].count("-- tiny") == 2
    assert first[1].count("sdpa, flat: ") == 2
    assert (tmp_path / "lm_matrix_report.md").exists()


def test_texts_that_no_title_has_are_refused_with_the_titles(kept):
    _, settings = settings_of(read_records(kept))
    with pytest.raises(ValueError, match=r"only must be .* 2 ranks over gloo, got .*nowhere.*tiny"):
        choose_settings(settings, ["nowhere"], "gloo", 2)
    with pytest.raises(ValueError, match=r"4 ranks over nccl.*there are: none"):
        choose_settings(settings, [], "nccl", 4)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"records .*none\.jsonl: no such file"):
        repeat.benchmark_repeat(RepeatConfig(records=tmp_path / "none.jsonl"))
