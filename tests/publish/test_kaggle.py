"""The bundle for Kaggle: what is in it, that it runs there, and that nothing private leaves."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lib.publish import kaggle
from lib.publish.cells import FIRST_CELL
from lib.publish.kaggle import KaggleBuildConfig, KagglePushConfig, build, push

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workbook(tmp_path, make_notebook):
    """A workbook with one small notebook, and what its first cell needs."""
    root = tmp_path / "workbook"
    for name in ("core", "lessons", "presets", "publish/templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "lib" / name, root / "lib" / name, ignore=ignored)
    shutil.copy(ROOT / "lib/__init__.py", root / "lib")
    (root / "artifacts/runs/1").mkdir(parents=True)
    (root / "artifacts/runs/1/secret.jsonl").write_text("{}")
    (root / "artifacts/records.jsonl").write_text('{"figures": {}}\n')

    def add(*cells, name="10_try"):
        make_notebook(root / f"notebooks/{name}.ipynb", "steps = 3", *cells)
        sizes = root / "notebooks/parameters/kaggle.yaml"
        sizes.parent.mkdir(exist_ok=True)
        sizes.write_text(f"{name}:\n  steps: 400\n")
        return root

    return add


def built(root, tmp_path, **settings):
    settings = {"verify": False, "attention": False, "output": tmp_path / "bundle"} | settings
    return build(KaggleBuildConfig(**settings), root=root)


def metadata_of(bundle, kernel="10_try"):
    dataset = json.loads((bundle / "dataset/dataset-metadata.json").read_text())
    return dataset, json.loads((bundle / f"kernels/{kernel}/kernel-metadata.json").read_text())


def test_a_kernel_asks_for_two_t4_the_dataset_and_no_network(workbook, tmp_path):
    dataset, kernel = metadata_of(built(workbook("steps"), tmp_path, user="ada"))
    assert kernel["machine_shape"] == "NvidiaTeslaT4"
    flags = ("enable_gpu", "enable_internet", "is_private")
    assert [kernel[flag] for flag in flags] == [True, False, True]
    assert kernel["dataset_sources"] == [dataset["id"]] == ["ada/training-workbook"]
    assert kernel["code_file"] == "10_try.ipynb"
    # its address is its title in Kaggle's way
    assert kernel["id"] == "ada/" + re.sub(r"[^a-z0-9]+", "-", kernel["title"].lower())


def test_the_dataset_holds_code_and_records_and_no_runs(workbook, tmp_path):
    bundle = built(workbook("steps"), tmp_path)
    files = {p.relative_to(bundle / "dataset").as_posix() for p in bundle.rglob("dataset/**/*")}
    wanted = {"lib/lessons/notebook.py", "artifacts/records.jsonl", "bundle.json"}
    # what reads flags there
    wanted |= {f"{name}/__init__.py" for name in ("tyro", "docstring_parser", "typeguard")}
    assert (
        wanted | {"lib/publish/templates/page.css", "lib/presets/tiny.json", "tyro/__init__.py"}
        <= files
    )
    assert not [name for name in files if "runs" in name]
    hashes = json.loads((bundle / "dataset/bundle.json").read_text())["sha256"]
    assert "lib/lessons/notebook.py" in hashes


@pytest.mark.parametrize("is_checkout", [True, False])
def test_the_bundle_takes_what_git_tracks_and_no_target_of_a_link(
    workbook, tmp_path, capsys, is_checkout
):
    root = workbook("steps")
    (root / "lib/größe.txt").write_text("kept")
    (root / "lib/core/tracked link.py").symlink_to(tmp_path / "secret.py")
    (root / "lib/linked").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    for name in ("mine/key.py", "secret.py"):
        (tmp_path / name).write_text("SECRET")
    if is_checkout:
        git = ["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "-A"], check=True)
    hidden = (".secrets/token", ".ipynb_checkpoints/a.py", "core/.env", "core/__pycache__/a.pyc")
    untracked = ("core/untracked.py", "token.txt")
    for name in (*hidden, *untracked):
        (root / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "lib" / name).write_text("SECRET")
    (root / "artifacts/mine.csv").write_text("SECRET")
    bundle = built(root, tmp_path)
    found = {p.name for p in (bundle / "dataset").rglob("*") if p.is_file()}
    assert {"größe.txt", "notebook.py", "tiny.json", "page.html", "records.jsonl"} <= found
    taken = {Path(name).name for name in untracked} | {"mine.csv"}
    assert {p.name for p in bundle.rglob("*") if p.is_file() and b"SECRET" in p.read_bytes()} == (
        set() if is_checkout else taken
    )
    said = f"{root} is no git checkout: all files in its lib/ go into the bundle"
    assert (said in capsys.readouterr().out) is not is_checkout


def test_the_dataset_names_a_license_that_kaggle_knows_and_brings_its_text(workbook, tmp_path):
    root = workbook("steps")
    shutil.copy(ROOT / "LICENSE", root)
    bundle = built(root, tmp_path)
    about, _ = metadata_of(bundle)
    # MIT is not among the names of Kaggle/kaggle-cli, docs/datasets_metadata.md
    assert about["licenses"] == [{"name": "other"}]
    assert "MIT" in about["description"]
    assert (bundle / "dataset/LICENSE").read_text().startswith("MIT License")


def test_notebooks_go_without_outputs(workbook, tmp_path):
    root = workbook("steps")
    path = root / "notebooks/10_try.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="a very long output")]
    nbformat.write(notebook, path)
    built(root, tmp_path)
    text = (tmp_path / "bundle/kernels/10_try/10_try.ipynb").read_text()
    assert "very long" not in text
    # and with a first cell of their own
    code = nbformat.reads(text, as_version=4).cells[1]
    assert code.source == kaggle.KAGGLE_FIRST_CELL != FIRST_CELL
    assert kaggle.INPUT in code.source


def steps_of(bundle, *, is_small, monkeypatch):
    """`steps` after the cells of sizes have run."""
    monkeypatch.setenv("WORKBOOK_SMALL", str(int(is_small)))
    values = {}
    notebook = nbformat.read(bundle / "kernels/10_try/10_try.ipynb", as_version=4)
    for cell in notebook.cells:
        if {"parameters", "injected-parameters"}.intersection(cell.metadata.get("tags", ())):
            exec(cell.source, values)
    return values["steps"]


def test_kaggle_gets_its_sizes_and_the_test_here_the_small_ones(workbook, tmp_path, monkeypatch):
    bundle = built(workbook("steps"), tmp_path)
    assert steps_of(bundle, is_small=False, monkeypatch=monkeypatch) == 400
    assert steps_of(bundle, is_small=True, monkeypatch=monkeypatch) == 3
    bundle = built(workbook("steps"), tmp_path, parameters="")
    assert steps_of(bundle, is_small=False, monkeypatch=monkeypatch) == 3


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
    # nor a data set of the reader's own
    (tmp_path / "mine/dataset").mkdir(parents=True)
    (tmp_path / "mine/dataset/dataset-metadata.json").write_text("{}")
    with pytest.raises(ValueError, match="output must be new"):
        built(root, tmp_path, output=tmp_path / "mine")
    assert (tmp_path / "mine/dataset/dataset-metadata.json").exists()


def test_a_build_can_be_repeated_after_it_failed_and_half_a_bundle_is_not_pushed(
    workbook, tmp_path, monkeypatch
):
    root = workbook("steps")

    def full(source, target):
        Path(target).write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(OSError, match="No space"):
            built(root, tmp_path)
    (root / "artifacts/leak.jsonl").write_text('{"output": "/home/ada/out"}')
    with pytest.raises(ValueError, match=r"nothing private, .*leak\.jsonl: a home folder"):
        built(root, tmp_path)
    with pytest.raises(ValueError, match="folder must be one"):
        push(KagglePushConfig(folder=tmp_path / "bundle", user="ada"))
    (root / "artifacts/leak.jsonl").unlink()
    assert metadata_of(built(root, tmp_path))


REFUSED = """
import os
import subprocess
import sys

import requests
from lib.core.files import ROOT
from lib.lessons.notebook import workspace

assert "KAGGLE_KEY" not in os.environ and "/home" in os.environ["HOME"]
environment = os.environ | {"PYTHONPATH": str(ROOT)}
refused = []
for attempt in (
    lambda: __import__("math_core"),
    lambda: (ROOT / "lib/new.py").write_text(""),
    lambda: requests.get("http://192.0.2.1", timeout=5),
    # processes that a notebook starts meet the same
    lambda: subprocess.run([sys.executable, "-c", "import math_core"], env=environment, check=True),
):
    try:
        attempt()
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        refused.append(type(error).__name__)
assert len(refused) == 4, refused
(workspace() / "result.txt").write_text("here")
"""


def test_a_notebook_meets_what_kaggle_gives_it_and_writes_to_its_working_folder(
    workbook, tmp_path, monkeypatch
):
    monkeypatch.setenv("KAGGLE_KEY", "0123456789")
    bundle = built(workbook(REFUSED), tmp_path)
    _, written = kaggle.check_kernel(bundle, "10_try", "training-workbook")
    assert written == ["result.txt"]


def test_a_notebook_that_does_not_run_there_ends_the_build(workbook, tmp_path):
    root = workbook("import math_core")
    with pytest.raises(ValueError, match=r"10_try does not run on Kaggle(.|\n)*named 'math_core'"):
        built(root, tmp_path, verify=True)


def test_what_the_lessons_import_is_in_kaggles_image():
    absent = set(kaggle.absent_modules())
    assert "math_core" in absent
    assert not absent & {"torch", "numpy", "numba", "regex", "safetensors", "matplotlib", "IPython"}
    assert not absent & {"ipywidgets", "tqdm", "filelock", "yaml", "sympy", "zmq", "PIL", "jinja2"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("saved to /home/ada/book/data", "a home folder"),
        ("'/Users/ada'", "a home folder"),
        ('{"username":"ada","key":"' + "0123456789abcdef" * 2 + '"}', "a key of Kaggle"),
        ("KGAT_" + "0123456789abcdef" * 2, "a key of Kaggle"),
        ("hf_" + "a1B2" * 9, "a token of Hugging Face"),
        ("ghp_" + "a1B2" * 9, "a token of GitHub"),
        ("AKIA" + "ABCD1234" * 2, "a key of AWS"),
        ("WANDB_API_KEY=" + "0a" * 20, "a key of W&B"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "a private key"),
        ("password = 'correct horse'".replace(" h", "-h"), "a password"),
    ],
)
def test_each_kind_of_leak_is_found(tmp_path, text, what):
    (tmp_path / "file.bin").write_bytes(b"\x00\n\xff" + text.encode() + b"\n")
    # named, and not repeated on the screen
    assert kaggle.find_leaks(tmp_path) == [f"file.bin: {what} in line 2"]


def test_the_name_of_this_machine_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "ada-laptop.example.org")
    (tmp_path / "record.json").write_text('{"host": "ada-laptop"}')
    assert kaggle.find_leaks(tmp_path) == ["record.json: the name of this machine in line 1"]


def test_addresses_and_committed_notebooks_hold_nothing_private():
    harmless = "https://example.org/home/ada data/home/x api_key: str lib/home.py token = 'short'"
    assert list(kaggle.leaks_in(harmless)) == []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert list(kaggle.leaks_in(path.read_text(encoding="utf-8"))) == [], path.name


def test_a_kernel_times_attention_on_each_gpu(workbook, tmp_path):
    bundle = built(workbook("steps"), tmp_path, attention=True)
    assert {path.name for path in (bundle / "kernels").iterdir()} == {"10_try", kaggle.ATTENTION}
    _, kernel = metadata_of(bundle, kaggle.ATTENTION)
    assert kernel["machine_shape"] == "NvidiaTeslaT4"
    assert kernel["id"].endswith("/workbook-attention-on-t4")
    notebook = nbformat.read(bundle / "kernels" / kaggle.ATTENTION / kernel["code_file"], 4)
    text, first, *cells = (cell.source for cell in notebook.cells)
    assert first == kaggle.KAGGLE_FIRST_CELL
    for cell in cells:
        compile(cell, "cell", "exec")
    assert "flash_attention_cuda" in text


def test_the_real_bundle_holds_nothing_private_and_the_model(tmp_path):
    # or else it would not be built
    bundle = build(KaggleBuildConfig(verify=False, output=tmp_path / "bundle"))
    assert list(bundle.glob("dataset/artifacts/tiny_stories/checkpoints/*/model.safetensors"))
    assert (bundle / "dataset/lib/data/stories.txt").is_file()
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    assert size < 50e6


@pytest.mark.slow
def test_the_speedrun_runs_on_kaggle(tmp_path):
    build(KaggleBuildConfig(output=tmp_path / "bundle"))


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A `kaggle` that writes down how it was called, and answers as the texts given say."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls"

    def add(*states, failing=""):
        (tmp_path / "states").write_text("\n".join(states))
        program = folder / "kaggle"
        program.write_text(
            f"#!{sys.executable}\n"
            "import sys\n"
            "from pathlib import Path\n"
            f"states, calls = Path({str(tmp_path / 'states')!r}), Path({str(calls)!r})\n"
            "words = ' '.join(sys.argv[1:])\n"
            "with calls.open('a') as file: file.write(words + '\\n')\n"
            f"if {failing!r} and {failing!r} in words: sys.exit(1)\n"
            "if 'datasets status' in words:\n"
            "    state, *rest = states.read_text().split('\\n')\n"
            "    states.write_text('\\n'.join(rest or [state]))\n"
            "    print(state) if state else sys.exit('404')\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return lambda: [" ".join(line.split()[:2]) for line in calls.read_text().splitlines()]

    return add


def test_push_makes_a_new_dataset_and_waits_for_it(workbook, tmp_path, client):
    bundle = built(workbook("steps"), tmp_path)
    calls = client("", "pending", "ready")
    push(KagglePushConfig(folder=bundle, user="ada", timeout=20))
    status = ["datasets status"]
    assert calls() == [*status, "datasets create", *status, *status, "kernels push"]
    dataset, kernel = metadata_of(bundle)
    assert dataset["id"] == "ada/training-workbook"
    assert kernel["id"] == "ada/workbook-10-try"
    assert kernel["dataset_sources"] == [dataset["id"]]


def test_push_makes_a_new_version_and_stores_no_credentials(
    workbook, tmp_path, client, monkeypatch
):
    monkeypatch.setenv("KAGGLE_KEY", "0123456789abcdef" * 2)
    monkeypatch.setenv("KAGGLE_USERNAME", "grace-hopper")
    bundle = built(workbook("steps"), tmp_path, user="ada")
    calls = client("ready")
    push(KagglePushConfig(folder=bundle))
    assert calls() == ["datasets status", "datasets version", "datasets status", "kernels push"]
    texts = [path.read_text(errors="replace") for path in bundle.rglob("*") if path.is_file()]
    assert not [
        text for text in texts if "0123456789abcdef" in text or re.search(r"\bgrace\b", text)
    ]


@pytest.mark.parametrize(
    ("client_says", "settings", "error", "message"),
    [
        (["ready"], {"user": ""}, ValueError, "user must be your name on Kaggle"),
        (["ready", "kernels push"], {}, OSError, "`kaggle kernels push` ended with exit code 1"),
        (["pending"], {"timeout": 0.3}, TimeoutError, "ada/training-workbook is pending"),
    ],
)
def test_push_says_what_went_wrong(
    workbook, tmp_path, client, client_says, settings, error, message
):
    state, *failing = client_says
    client(state, failing="".join(failing))
    folder = built(workbook("steps"), tmp_path)
    with pytest.raises(error, match=message):
        push(KagglePushConfig(**{"folder": folder, "user": "ada", **settings}))


def test_push_without_a_bundle_or_a_client(workbook, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="folder must be"):
        push(KagglePushConfig(folder=tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pip install kaggle"):
        push(KagglePushConfig(folder=built(workbook("steps"), tmp_path, user="ada")))


@pytest.mark.parametrize(
    ("field", "value"),
    [("notebooks", ()), ("user", "ada lovelace"), ("dataset", "Book"), ("dataset", "two--dashes")],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        KaggleBuildConfig(**{field: value})
