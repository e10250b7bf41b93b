"""The bundle for Kaggle: what is in it, that it runs, and that nothing uncommitted leaves."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lib.core.records import is_checkout
from lib.tools.publish import kaggle
from lib.tools.publish.cells import FIRST_CELL
from lib.tools.publish.kaggle import KaggleBuildConfig, build

ATTENTION = Path(kaggle.ATTENTION).stem
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def make_workbook(make_notebook):
    """Commit a workbook with one small notebook, and what its first cell needs, to a folder."""

    def make(root, *cells):
        for name in ("core", "lessons", "presets", "tools/publish/templates"):
            ignored = shutil.ignore_patterns("__pycache__")
            options = {"ignore": ignored, "dirs_exist_ok": True}
            shutil.copytree(ROOT / "lib" / name, root / "lib" / name, **options)
        for name in ("lib/__init__.py", "LICENSE"):
            shutil.copy(ROOT / name, root / name)
        (root / "artifacts/runs/1").mkdir(parents=True, exist_ok=True)
        (root / "artifacts/runs/1/metrics.jsonl").write_text("{}")
        (root / "artifacts/records.jsonl").write_text('{"figures": {}}\n')
        path = make_notebook(root / "notebooks/12_try.ipynb", "steps = 3", *cells)
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="a very long output")]
        nbformat.write(notebook, path)
        (root / "notebooks/parameters").mkdir(exist_ok=True)
        (root / "notebooks/parameters/kaggle.yaml").write_text("12_try:\n  steps: 400\n")
        commit(root)
        return root

    return make


@pytest.fixture
def workbook(make_workbook, tmp_path):
    return lambda *cells: make_workbook(tmp_path / "workbook", *cells)


@pytest.fixture(scope="module")
def plain(make_workbook, tmp_path_factory):
    """A bundle that no test changes."""
    folder = tmp_path_factory.mktemp("plain")
    return built(make_workbook(folder / "workbook", "steps"), folder, attention=True)


@pytest.fixture
def copied(plain, tmp_path):
    """A bundle that a test may change."""
    return Path(shutil.copytree(plain, tmp_path / "bundle"))


def commit(root):
    git = ["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)


def built(root, tmp_path, **settings):
    settings = {"verify": False, "attention": False, "output": tmp_path / "bundle"} | settings
    return build(KaggleBuildConfig(**settings), root=root)


def metadata_of(bundle, kernel="12_try"):
    dataset = json.loads((bundle / "dataset/dataset-metadata.json").read_text())
    return dataset, json.loads((bundle / f"kernels/{kernel}/kernel-metadata.json").read_text())


def test_each_kernel_asks_for_two_t4_the_dataset_and_no_network(plain):
    assert {path.name for path in (plain / "kernels").iterdir()} == {
        "12_try",
        ATTENTION,
    }
    for name in ("12_try", ATTENTION):
        dataset, kernel = metadata_of(plain, name)
        assert kernel["machine_shape"] == "NvidiaTeslaT4"
        flags = ("enable_gpu", "enable_internet", "is_private")
        assert [kernel[flag] for flag in flags] == [True, False, True]
        owner = kaggle.NOBODY
        assert kernel["dataset_sources"] == [dataset["id"]] == [f"{owner}/training-workbook"]
        assert kernel["code_file"] == f"{name}.ipynb"
        # its address is its title in Kaggle's way
        assert kernel["id"] == f"{owner}/" + re.sub(r"[^a-z0-9]+", "-", kernel["title"].lower())


def test_the_dataset_holds_code_records_and_license_and_no_runs(plain):
    files = {p.relative_to(plain / "dataset").as_posix() for p in plain.rglob("dataset/**/*")}
    wanted = {"lib/lessons/notebook.py", "artifacts/records.jsonl", "bundle.json"}
    # what reads flags there
    wanted |= {f"{name}/__init__.py" for name in ("tyro", "docstring_parser", "typeguard")}
    assert wanted | {"lib/tools/publish/templates/page.css", "lib/presets/tiny.json"} <= files
    assert not [name for name in files if "runs" in name]
    hashes = json.loads((plain / "dataset/bundle.json").read_text())["sha256"]
    assert "lib/lessons/notebook.py" in hashes
    about, _ = metadata_of(plain)
    # MIT is not among the names of Kaggle/kaggle-cli, docs/datasets_metadata.md
    assert about["licenses"] == [{"name": "other"}]
    assert "MIT" in about["description"]
    assert (plain / "dataset/LICENSE").read_text().startswith("MIT License")


def test_nothing_leaves_that_is_not_committed_and_no_target_of_a_link(workbook, tmp_path, capsys):
    root = workbook("steps")
    (tmp_path / "mine").mkdir()
    for name in ("mine/key.py", "secret.py"):
        (tmp_path / name).write_text("SECRET")
    (root / "lib/core/link.py").symlink_to(tmp_path / "secret.py")
    (root / "lib/linked").symlink_to(tmp_path / "mine")
    (root / "lib/größe.txt").write_text("kept")
    commit(root)
    for name in ("lib/.secrets/token", "lib/core/untracked.py", "artifacts/mine.csv"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("SECRET")
    for name in ("lib/core/files.py", "artifacts/records.jsonl", "notebooks/12_try.ipynb"):
        (root / name).write_text("SECRET")
    bundle = built(root, tmp_path)
    found = {p.name for p in (bundle / "dataset").rglob("*") if p.is_file()}
    assert {"größe.txt", "notebook.py", "tiny.json", "page.html", "records.jsonl"} <= found
    assert [p for p in bundle.rglob("*") if p.is_file() and b"SECRET" in p.read_bytes()] == []
    told = capsys.readouterr().out
    for name in ("lib/core/files.py", "artifacts/records.jsonl", "notebooks/12_try.ipynb"):
        assert f"bundled as it is committed, without your changes: {name}\n" in told
    shutil.rmtree(root / ".git")
    with pytest.raises(ValueError, match=f"made from a git checkout, and {root} is none"):
        built(root, tmp_path)


def test_notebooks_go_without_outputs_and_with_a_first_cell_of_their_own(plain):
    for name in ("12_try", ATTENTION):
        notebook = nbformat.read(plain / f"kernels/{name}/{name}.ipynb", as_version=4)
        assert "very long" not in nbformat.writes(notebook)
        first, *cells = (cell.source for cell in notebook.cells if cell.cell_type == "code")
        assert first == kaggle.KAGGLE_FIRST_CELL != FIRST_CELL
        assert kaggle.INPUT in first
        for cell in cells:
            compile(cell, "cell", "exec")
    assert "flash_attention_cuda" in notebook.cells[0].source


def steps_of(bundle, *, is_small, monkeypatch):
    """`steps` after the cells of sizes have run."""
    monkeypatch.setenv("WORKBOOK_SMALL", str(int(is_small)))
    values = {}
    notebook = nbformat.read(bundle / "kernels/12_try/12_try.ipynb", as_version=4)
    for cell in notebook.cells:
        if {"parameters", "injected-parameters"}.intersection(cell.metadata.get("tags", ())):
            exec(cell.source, values)
    return values["steps"]


def test_kaggle_gets_its_sizes_and_the_test_here_the_small_ones(plain, monkeypatch):
    assert steps_of(plain, is_small=False, monkeypatch=monkeypatch) == 400
    assert steps_of(plain, is_small=True, monkeypatch=monkeypatch) == 3


def test_a_bundle_is_made_anew_but_a_folder_with_something_else_is_left_alone(workbook, tmp_path):
    root = workbook("steps")
    old = built(root, tmp_path) / "dataset/lib/old.py"
    old.write_text("")
    built(root, tmp_path)
    assert not old.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("years")
    with pytest.raises(ValueError, match="output must be new"):
        built(root, tmp_path, output=tmp_path / "other")
    assert (tmp_path / "other/thesis.tex").read_text() == "years"


FROM_THE_BUNDLE = """
from lib.core.files import ROOT
from lib.lessons.notebook import small

assert (ROOT / "bundle.json").exists() and small()
"""


def test_a_notebook_runs_from_the_bundle_alone_and_one_that_does_not_ends_the_build(
    workbook, tmp_path, capsys
):
    built(workbook(FROM_THE_BUNDLE), tmp_path, verify=True)
    assert re.search(r"12_try runs: \d+ s", capsys.readouterr().out)
    with pytest.raises(ValueError, match=r"12_try does not run:(.|\n)*named 'lib.training'"):
        built(workbook("import lib.training"), tmp_path, verify=True)
    # which Kaggle's client needs
    assert not (tmp_path / "bundle/dataset/dataset-metadata.json").exists()


def test_on_kaggle_a_file_that_is_not_as_it_was_bundled_is_named(copied, monkeypatch, capsys):
    bundle = copied
    (bundle / "dataset/artifacts/records.jsonl").write_text("{}")
    (bundle / "dataset/lib/core/terminal.py").unlink()
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = kaggle.KAGGLE_FIRST_CELL.replace(kaggle.INPUT, str(bundle)).rpartition("\n")[0]
    exec(code, {})
    said = "not as it was bundled: "
    assert capsys.readouterr().out.splitlines() == [
        f"{said}artifacts/records.jsonl",
        f"{said}lib/core/terminal.py",
    ]


def test_the_lessons_load_nothing_that_kaggles_image_lacks():
    """Its packages: googlecolab/backend-info and Kaggle/docker-python, kaggle_requirements.txt."""
    absent = "import sys; sys.modules |= dict.fromkeys(('tyro', 'math_core', 'playwright')); "
    modules = "lib.tools.benchmarks.attention, lib.lessons.notebook, lib.lessons.speedrun.exercises"
    subprocess.run([sys.executable, "-c", f"{absent}import {modules}"], cwd=ROOT, check=True)


@pytest.mark.skipif(not is_checkout(ROOT), reason="not in a git checkout")
def test_the_real_bundle_holds_the_model_and_is_small(tmp_path):
    bundle = build(KaggleBuildConfig(verify=False, output=tmp_path / "bundle"))
    assert list(bundle.glob("dataset/artifacts/tiny_stories/checkpoints/*/model.safetensors"))
    assert (bundle / "dataset/lib/data/stories.txt").is_file()
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    assert size < 50e6


@pytest.mark.slow
def test_the_speedrun_runs_on_kaggle(tmp_path):
    build(KaggleBuildConfig(output=tmp_path / "bundle"))


def test_the_commands_that_upload_a_bundle_name_its_owner(workbook, tmp_path, capsys):
    bundle = built(workbook("steps"), tmp_path, user="ada")
    dataset, kernel = metadata_of(bundle)
    assert dataset["id"] == "ada/training-workbook"
    assert kernel["id"] == "ada/workbook-12-try"
    assert kernel["dataset_sources"] == [dataset["id"]]
    lines = capsys.readouterr().out.splitlines()
    assert f"  kaggle datasets create -p {bundle}/dataset --dir-mode zip" in lines
    assert f"  kaggle kernels push -p {bundle}/kernels/12_try" in lines
    assert "no owner" not in lines[-1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("notebooks", ()), ("user", "ada lovelace")],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        KaggleBuildConfig(**{field: value})
