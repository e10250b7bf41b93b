"""Tests, notebooks and `make clean` leave the reader's files alone: models, texts, copies."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lib.lessons import notebook
from lib.tools.publish.plan import find_notebooks

ROOT = Path(__file__).resolve().parents[2]
# What a reader may have made, in each folder that is not committed.
PLANTED = (
    "artifacts/runs/speedrun/checkpoints/step-00000100/model.safetensors",
    "artifacts/runs/speedrun-2/notes.txt",
    "artifacts/runs/mine/metrics.jsonl",
    "data/mine.txt",
    "data/speedrun/train.npy",
    "data/stories-4096/notes.txt",
    "work/03_training.ipynb",
)


def plant(root: Path) -> dict[str, tuple[bytes, int]]:
    """Put the reader's files into `root`; return what `contents` gives for them."""
    for name in PLANTED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"the reader's {name}")
    return contents(root)


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Name -> content and time of change, of those of the planted files that are there."""
    paths = {name: root / name for name in PLANTED if (root / name).exists()}
    return {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in paths.items()}


@pytest.fixture
def book(tmp_path) -> Path:
    """A workbook of planted files, with the guard of the tests."""
    shutil.copytree(ROOT / "tests/guard", tmp_path / "tests/guard")
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        "open('work/../artifacts/runs/mine/metrics.jsonl', 'r+')",
        "Path('data/mine.txt').unlink()",
        "os.replace('elsewhere', 'work/03_training.ipynb')",
        "shutil.rmtree(Path('data').resolve(), ignore_errors=True)",
        "shutil.copy('elsewhere', 'data/mine.txt')",
    ],
)
def test_under_the_guard_no_change_of_a_readers_file_succeeds(book, change):
    before = plant(book)
    (book / "elsewhere").write_text("new")
    code = f"import os, shutil\nfrom pathlib import Path\n{change}"
    environment = os.environ | {"PYTHONPATH": str(book / "tests/guard")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=book, env=environment, capture_output=True, text=True)
    assert "leave the reader's files alone" in done.stderr or "ignore_errors" in change
    assert contents(book) == before


def make(*arguments: str, folder: Path) -> str:
    command = ["make", "--no-print-directory", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_make_starts_every_test_behind_the_guard_and_notebooks_with_small_sizes():
    lines = make("--dry-run", "test-all", "test-gpu", folder=ROOT).splitlines()
    tests = [line for line in lines if "-m pytest" in line]
    assert len(tests) >= 5
    assert [line for line in tests if f'PYTHONPATH="{ROOT}/tests/guard"' not in line] == []
    assert [line for line in lines if "--nbval" in line and "WORKBOOK_SMALL=1" not in line] == []


def test_make_clean_removes_reports_and_caches_only(book):
    for name in ("Makefile", "requirements.txt", ".ci"):
        (book / name).symlink_to(ROOT / name)
    remade = ("artifacts/report/index.html", "lib/__pycache__/a.pyc", "artifacts/small/data/a")
    remade += ("notebooks/my copy/.ipynb_checkpoints/a.ipynb",)
    for name in remade:
        (book / name).parent.mkdir(parents=True)
        (book / name).touch()
    (book / "notebooks/my").mkdir()
    before = plant(book)
    make("clean", folder=book)
    assert contents(book) == before
    assert (book / "notebooks/my").exists()
    assert [name for name in remade if (book / name).exists()] == []


def test_small_runs_have_a_workspace_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_SMALL", "1")
    assert notebook.workspace(tmp_path) == tmp_path / "artifacts/small"
    monkeypatch.setenv("WORKBOOK_SMALL", "0")
    assert notebook.workspace(tmp_path) == tmp_path


def test_a_new_run_gets_a_folder_beside_the_earlier_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebook, "workspace", lambda: tmp_path)
    runs = tmp_path / "artifacts/runs"
    for start_again in (True, False):
        assert notebook.run_folder("speedrun", start_again=start_again) == runs / "speedrun"
    assert capsys.readouterr().out == ""
    before = plant(tmp_path)
    # names that only look alike count for nothing
    for name in ("speedrun-2-of-mine", "speedruns", "speedrun-x", "a-speedrun-9"):
        (runs / name).mkdir()
    (runs / "speedrun.jsonl").touch()
    assert notebook.run_folder("speedrun", start_again=False) == runs / "speedrun-2"
    assert notebook.run_folder("speedrun", start_again=True) == runs / "speedrun-3"
    assert "artifacts/runs/speedrun-3; earlier ones stay" in capsys.readouterr().out
    (runs / "speedrun-10").mkdir()
    assert notebook.run_folder("speedrun", start_again=True) == runs / "speedrun-11"
    assert contents(tmp_path) == before


REMOVERS = {"rmtree", "unlink", "rmdir", "removedirs", "rename", "renames", "move"}


@pytest.mark.parametrize("path", find_notebooks((), ROOT), ids=lambda path: path.stem)
def test_no_cell_of_a_notebook_removes_or_renames_files(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    trees = [ast.parse(source) for source in code if "%" not in source[:1] and "\n%" not in source]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    assert used & REMOVERS == set()
    assert not any("os.remove" in source or "os.replace" in source for source in code)


@pytest.mark.slow
def test_the_notebooks_that_write_leave_the_readers_files_as_they_were(tmp_path):
    """As `make run` and JupyterLab run them: in the reader's own folders."""
    for name in ("lib", "notebooks", "artifacts"):
        names = shutil.ignore_patterns("__pycache__", "runs", "report", "small", "kaggle")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=names)
    before = plant(tmp_path)
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text(
        "01_tokenizer: {corpus_bytes: 1000000, vocab_size: 768, lesson_bytes: 300000}\n"
        "02_model: {corpus_bytes: 1000000, vocab_size: 768, steps: 30}\n"
        "03_training: {corpus_bytes: 1000000, vocab_size: 768, steps: 20, sweep_steps: 6}\n"
        "12_speedrun: {corpus_bytes: 300000, judged_bytes: 9000, heat: 3.3, minutes: 0.4}\n"
    )
    command = [sys.executable, "-m", "lib", "run", "--parameters", str(sizes)]
    environment = {name: value for name, value in os.environ.items() if name != "WORKBOOK_SMALL"}
    for start in range(2):
        done = subprocess.run(
            [*command, "--notebooks", "01", "02", "03", "12"],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert contents(tmp_path) == before
        assert (tmp_path / f"artifacts/runs/speedrun-{3 + start}/checkpoints").is_dir()
    results = (tmp_path / "artifacts/runs/speedrun.jsonl").read_text()
    assert len(results.splitlines()) == 2
