"""The bundle for Kaggle: what is in it, that it runs there, and that nothing private leaves."""

import json
import os
import re
import stat
import sys
from pathlib import Path

import nbformat
import pytest

import lib.notebook
from lib import kaggle_check, kaggle_leaks
from lib.config_kaggle import KaggleBuildConfig, KagglePushConfig
from lib.kaggle import build, push

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def workbook(tmp_path, make_notebook):
    """A workbook with one small notebook, and what `lib.notebook` needs."""
    root = tmp_path / "workbook"
    for name in ("__init__", "notebook", "plots", "files", "hardware", "parallel"):
        source = ROOT / f"lib/{name}.py"
        (root / "lib").mkdir(parents=True, exist_ok=True)
        (root / f"lib/{name}.py").write_bytes(source.read_bytes())
    (root / "artifacts/runs/1").mkdir(parents=True)
    (root / "artifacts/runs/1/secret.jsonl").write_text("{}")
    (root / "artifacts/records.jsonl").write_text('{"figures": {}}\n')

    def add(*cells, name="08_try"):
        make_notebook(root / f"notebooks/{name}.ipynb", "steps = 3", *cells)
        sizes = root / "notebooks/parameters/kaggle.yaml"
        sizes.parent.mkdir(exist_ok=True)
        sizes.write_text(f"{name}:\n  steps: 400\n")
        return root

    return add


def built(root, tmp_path, **settings):
    settings = {"verify": False, "output": tmp_path / "bundle"} | settings
    return build(KaggleBuildConfig(**settings), root=root)


def metadata_of(bundle, kernel="08_try"):
    dataset = json.loads((bundle / "dataset/dataset-metadata.json").read_text())
    return dataset, json.loads((bundle / f"kernels/{kernel}/kernel-metadata.json").read_text())


def test_a_kernel_asks_for_two_t4_the_dataset_and_no_network(workbook, tmp_path):
    dataset, kernel = metadata_of(built(workbook("steps"), tmp_path, user="ada"))
    assert kernel["machine_shape"] == "NvidiaTeslaT4"
    assert (kernel["enable_gpu"], kernel["enable_internet"], kernel["is_private"]) == (
        True,
        False,
        True,
    )
    assert kernel["dataset_sources"] == [dataset["id"]] == ["ada/training-workbook"]
    assert kernel["code_file"] == "08_try.ipynb"


def test_a_kernels_address_is_its_title_in_kaggles_way(workbook, tmp_path):
    _, kernel = metadata_of(built(workbook("steps"), tmp_path, user="ada"))
    assert kernel["id"] == "ada/" + re.sub(r"[^a-z0-9]+", "-", kernel["title"].lower())


def test_the_dataset_holds_code_and_records_and_no_runs(workbook, tmp_path):
    bundle = built(workbook("steps"), tmp_path)
    files = {p.relative_to(bundle / "dataset").as_posix() for p in bundle.rglob("dataset/**/*")}
    assert {"lib/notebook.py", "artifacts/records.jsonl", "bundle.json"} <= files
    assert not [name for name in files if "runs" in name]
    hashes = json.loads((bundle / "dataset/bundle.json").read_text())["sha256"]
    assert "lib/notebook.py" in hashes


def test_notebooks_go_without_outputs(workbook, tmp_path):
    root = workbook("steps")
    path = root / "notebooks/08_try.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="a very long output")]
    nbformat.write(notebook, path)
    built(root, tmp_path)
    assert "very long" not in (tmp_path / "bundle/kernels/08_try/08_try.ipynb").read_text()


def steps_of(bundle, *, is_small, monkeypatch):
    """`steps` after the cells of sizes have run."""
    monkeypatch.setenv("WORKBOOK_SMALL", str(int(is_small)))
    values = {"lib": lib}
    notebook = nbformat.read(bundle / "kernels/08_try/08_try.ipynb", as_version=4)
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


def test_sizes_that_the_notebook_does_not_have_are_refused(workbook, tmp_path):
    root = workbook("steps")
    (root / "notebooks/parameters/kaggle.yaml").write_text("08_try:\n  step: 4\n")
    with pytest.raises(ValueError, match="08_try has no parameter 'step'"):
        built(root, tmp_path)


def test_a_folder_with_something_else_is_left_alone(workbook, tmp_path):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/thesis.tex").write_text("years")
    with pytest.raises(ValueError, match="holds something else"):
        built(workbook("steps"), tmp_path)
    assert (tmp_path / "bundle/thesis.tex").read_text() == "years"


def test_a_bundle_is_made_anew(workbook, tmp_path):
    root = workbook("steps")
    old = built(root, tmp_path) / "dataset/lib/old.py"
    old.write_text("")
    built(root, tmp_path)
    assert not old.exists()


REFUSED = """
import os
import requests
from pathlib import Path

assert "KAGGLE_KEY" not in os.environ and "/home" in os.environ["HOME"]
refused = []
for attempt in (
    lambda: __import__("tyro"),
    lambda: (root / "lib/new.py").write_text(""),
    lambda: requests.get("http://192.0.2.1", timeout=5),
):
    try:
        attempt()
    except (ImportError, OSError) as error:
        refused.append(type(error).__name__)
assert len(refused) == 3, refused
(lib.notebook.workspace() / "result.txt").write_text("here")
"""


def test_a_notebook_meets_what_kaggle_gives_it_and_writes_to_its_working_folder(
    workbook, tmp_path, monkeypatch
):
    monkeypatch.setenv("KAGGLE_KEY", "0123456789")
    bundle = built(workbook(REFUSED), tmp_path)
    _, written = kaggle_check.check_kernel(bundle, "08_try", "training-workbook")
    assert written == ["result.txt"]


def test_a_notebook_that_does_not_run_there_ends_the_build(workbook, tmp_path):
    root = workbook("import tyro")
    with pytest.raises(ValueError, match=r"08_try does not run on Kaggle(.|\n)*named 'tyro'"):
        built(root, tmp_path, verify=True)


def test_processes_that_a_notebook_starts_meet_the_same(workbook, tmp_path):
    start = (
        "import os, subprocess, sys\n"
        "environment = os.environ | {'PYTHONPATH': str(root)}\n"
        "subprocess.run([sys.executable, '-c', 'import tyro'], env=environment, check=True)"
    )
    bundle = built(workbook(start), tmp_path)
    with pytest.raises(ValueError, match="CalledProcessError"):
        kaggle_check.check_kernel(bundle, "08_try", "training-workbook")


def test_what_the_lessons_import_is_in_kaggles_image():
    absent = set(kaggle_check.absent_modules())
    assert {"tyro", "math_core"} <= absent
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
    (tmp_path / "file.bin").write_bytes(b"\x00\xff" + text.encode() + b"\n")
    (found,) = kaggle_leaks.find_leaks(tmp_path)
    assert found.startswith(f"file.bin: {what}")


def test_the_name_of_this_machine_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "ada-laptop.example.org")
    (tmp_path / "record.json").write_text('{"host": "ada-laptop"}')
    assert kaggle_leaks.find_leaks(tmp_path) == [
        "record.json: the name of this machine, 'ada-laptop'"
    ]


def test_addresses_and_pictures_are_no_leaks():
    harmless = "https://example.org/home/ada data/home/x api_key: str lib/home.py token = 'short'"
    assert list(kaggle_leaks.leaks_in(harmless)) == []


def test_a_leak_ends_the_build(workbook, tmp_path):
    root = workbook("steps")
    (root / "artifacts/records.jsonl").write_text('{"output": "/home/ada/out"}')
    with pytest.raises(ValueError, match=r"records.jsonl: a home folder, '/home/ada'"):
        built(root, tmp_path)


def test_committed_notebooks_hold_nothing_private():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert list(kaggle_leaks.leaks_in(path.read_text(encoding="utf-8"))) == [], path.name


def test_the_real_bundle_holds_nothing_private_and_the_model(tmp_path):
    bundle = build(KaggleBuildConfig(verify=False, output=tmp_path / "bundle"))
    assert kaggle_leaks.find_leaks(bundle) == []
    assert list(bundle.glob("dataset/artifacts/tiny_stories/checkpoints/*/model.safetensors"))
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
    assert kernel["id"] == "ada/workbook-08-try"
    assert kernel["dataset_sources"] == [dataset["id"]]


def test_push_gives_a_dataset_that_is_there_a_new_version(workbook, tmp_path, client):
    calls = client("ready")
    push(KagglePushConfig(folder=built(workbook("steps"), tmp_path, user="ada")))
    assert calls() == ["datasets status", "datasets version", "datasets status", "kernels push"]


def test_push_reads_and_stores_no_credentials(workbook, tmp_path, client, monkeypatch):
    monkeypatch.setenv("KAGGLE_KEY", "0123456789abcdef" * 2)
    monkeypatch.setenv("KAGGLE_USERNAME", "grace-hopper")
    bundle = built(workbook("steps"), tmp_path, user="ada")
    client("ready")
    push(KagglePushConfig(folder=bundle))
    texts = [path.read_text(errors="replace") for path in bundle.rglob("*") if path.is_file()]
    assert not [text for text in texts if "0123456789abcdef" in text or "grace" in text]


def test_push_needs_a_name(workbook, tmp_path, client):
    client("ready")
    with pytest.raises(ValueError, match="user is ''; right is: your name on Kaggle"):
        push(KagglePushConfig(folder=built(workbook("steps"), tmp_path)))


def test_push_tells_where_the_client_fails(workbook, tmp_path, client):
    client("ready", failing="kernels push")
    with pytest.raises(OSError, match="`kaggle kernels push` ended with exit code 1"):
        push(KagglePushConfig(folder=built(workbook("steps"), tmp_path, user="ada")))


def test_push_gives_up_on_a_dataset_that_is_never_ready(workbook, tmp_path, client):
    client("pending")
    with pytest.raises(TimeoutError, match="ada/training-workbook is pending"):
        push(KagglePushConfig(folder=built(workbook("steps"), tmp_path, user="ada"), timeout=0.3))


def test_push_without_a_bundle_or_a_client(workbook, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is no bundle"):
        push(KagglePushConfig(folder=tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pip install kaggle"):
        push(KagglePushConfig(folder=built(workbook("steps"), tmp_path, user="ada")))


@pytest.mark.parametrize(
    "settings",
    [{"notebooks": ()}, {"user": "ada lovelace"}, {"dataset": "Book"}, {"dataset": "two--dashes"}],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is"):
        KaggleBuildConfig(**settings)


def test_an_unknown_notebook_is_refused(workbook, tmp_path):
    with pytest.raises(ValueError, match="no notebook is called '12'"):
        built(workbook("steps"), tmp_path, notebooks=("12",))


def test_kaggles_input_folder_is_where_notebooks_look():
    from lib.notebook import FIRST_CELL

    assert kaggle_check.INPUT in FIRST_CELL


def test_the_command_line_tells_what_is_wrong(capsys):
    from lib.__main__ import main

    assert main(["kaggle", "build", "--notebooks", "12"]) == 2
    assert "no notebook is called '12'" in capsys.readouterr().err
