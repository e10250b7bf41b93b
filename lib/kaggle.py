"""The workbook as a bundle for Kaggle: a dataset with the code, and a kernel for each notebook.

`build` writes a folder that Kaggle's command line takes, and `push` calls that command line. The
names of the fields are those of its documentation (`docs/kernels_metadata.md` and
`docs/datasets_metadata.md` in Kaggle/kaggle-cli):

- `machine_shape` NvidiaTeslaT4 is what the editor calls "GPU T4 x2"; there is none with one T4;
- without `enable_internet` the client turns the network on;
- a kernel's address is its title in lower case with dashes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from lib.config import require
from lib.config_kaggle import KaggleBuildConfig, KagglePushConfig
from lib.files import sha256_file
from lib.hardware import provenance
from lib.kaggle_leaks import find_leaks
from lib.notebook import ROOT
from lib.notebook_plan import Job, find_notebooks, plan

# What stands where a name on Kaggle is missing.
NOBODY = "INSERT_USERNAME"
TITLE = "Training workbook"
# Of artifacts/: what notebooks show. Folders of single runs stay here.
ARTIFACTS = ("*.jsonl", "*.md", "*.csv", "*.png", "tiny_stories/**/*", "profile_h200/**/*")
READY = "ready"


def build(config: KaggleBuildConfig, *, root: Path = ROOT) -> Path:
    """Write the bundle and, if asked, run its notebooks as Kaggle would; return its folder.

    Raises:
        ValueError: an unknown notebook or parameter, an `output` that holds something else,
            something that should not leave this machine, or a notebook that does not run there.
    """
    jobs = plan(find_notebooks(config.notebooks, root), config.parameters, None, root)
    output = config.output.absolute()
    is_ours = (output / "dataset/dataset-metadata.json").is_file()
    if output.exists() and not is_ours and any(output.iterdir()):
        raise ValueError(f"output {config.output} holds something else; right is: a new folder")
    shutil.rmtree(output, ignore_errors=True)
    write_dataset(output / "dataset", config, root)
    for job in jobs:
        write_kernel(output / "kernels" / job.name, job, config)
    leaks = find_leaks(output)
    require(not leaks, f"the bundle holds what should stay here: {'; '.join(leaks)}")
    if config.verify:
        from lib.kaggle_check import check_kernel

        for job in jobs:
            print(f"running {job.name} as Kaggle would", flush=True)
            seconds, written = check_kernel(output, job.name, config.dataset)
            print(f"{job.name} runs there: {seconds:.0f} s, and leaves {len(written)} files")
    return output


def write_dataset(folder: Path, config: KaggleBuildConfig, root: Path) -> None:
    """Code, records and the committed model; bundle.json says from which commit, with hashes."""
    sources = [*(root / "lib").rglob("*.py"), *(root / "lib").rglob("*.json")]
    for pattern in ARTIFACTS:
        sources += (root / "artifacts").glob(pattern)
    hashes = {}
    for source in sorted(set(sources)):
        name = source.relative_to(root).as_posix()
        if source.is_file() and not source.name.startswith("."):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            hashes[name] = sha256_file(target)
    state = provenance()
    made = {name: state[name] for name in ("commit", "dirty", "date")}
    _write_json(folder / "bundle.json", {**made, "sha256": hashes})
    metadata = {
        "title": TITLE,
        "id": f"{config.user or NOBODY}/{config.dataset}",
        "licenses": [{"name": "unknown"}],
    }
    _write_json(folder / "dataset-metadata.json", metadata)


def write_kernel(folder: Path, job: Job, config: KaggleBuildConfig) -> None:
    """The notebook with its sizes and without outputs, and what Kaggle wants to know about it."""
    import nbformat

    content = nbformat.read(job.source, as_version=4)
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    _insert_sizes(content.cells, job.parameters)
    has_gpu = bool(config.accelerator)
    # for those who upload the file in the browser
    content.metadata["kaggle"] = {
        "accelerator": config.accelerator[:1].lower() + config.accelerator[1:] or "none",
        "isGpuEnabled": has_gpu,
        "isInternetEnabled": config.internet,
        "language": "python",
        "sourceType": "notebook",
    }
    folder.mkdir(parents=True)
    nbformat.write(content, folder / job.source.name)
    title = f"Workbook {job.name.replace('_', ' ')}"
    slug = title.lower().replace(" ", "-")
    metadata = {
        "id": f"{config.user or NOBODY}/{slug}",
        "title": title,
        "code_file": job.source.name,
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": has_gpu,
        "enable_tpu": False,
        "enable_internet": config.internet,
        "machine_shape": config.accelerator,
        "dataset_sources": [f"{config.user or NOBODY}/{config.dataset}"],
        "competition_sources": [],
        "kernel_sources": [],
        "model_sources": [],
    }
    _write_json(folder / "kernel-metadata.json", metadata)


def _insert_sizes(cells: list, parameters: dict[str, Any]) -> None:
    """Put a cell that sets `parameters` behind the one tagged so, as papermill does."""
    from nbformat.v4 import new_code_cell

    if not parameters:
        return
    values = "\n".join(f"    {name} = {value!r}" for name, value in parameters.items())
    source = (
        f"# Sizes for this machine, except in a quick test.\nif not lib.notebook.small():\n{values}"
    )
    tags = [cell.metadata.get("tags", ()) for cell in cells]
    place = next(number for number, found in enumerate(tags) if "parameters" in found)
    cells.insert(place + 1, new_code_cell(source, metadata={"tags": ["injected-parameters"]}))


def push(config: KagglePushConfig) -> None:
    """Upload dataset and kernels with Kaggle's client, which finds the credentials by itself.

    The dataset is made, or gets a new version; kernels start when Kaggle has it ready.

    Raises:
        ValueError: the folder is no bundle, or nobody's name is known.
        FileNotFoundError: the client is not installed.
        OSError: the client failed; it has said why.
    """
    dataset = config.folder / "dataset"
    metadata_path = dataset / "dataset-metadata.json"
    if not metadata_path.is_file():
        raise ValueError(f"folder {config.folder} is no bundle; `python -m lib kaggle build` first")
    if shutil.which("kaggle") is None:
        raise FileNotFoundError("there is no `kaggle` here; install it: pip install kaggle")
    kernels = sorted((config.folder / "kernels").iterdir())
    for path in (metadata_path, *(kernel / "kernel-metadata.json" for kernel in kernels)):
        _fill_in(path, config.user)
    address = json.loads(metadata_path.read_text(encoding="utf-8"))["id"]
    arguments = ["-p", os.fspath(dataset), "--dir-mode", "zip"]
    if _status(address) is None:
        _kaggle("datasets", "create", *arguments)
    else:
        _kaggle("datasets", "version", *arguments, "-m", config.message)
    _wait_until_ready(address, config.timeout)
    for kernel in kernels:
        _kaggle("kernels", "push", "-p", os.fspath(kernel))


def _fill_in(path: Path, user: str) -> None:
    """Put `user` where the metadata at `path` has nobody yet."""
    text = path.read_text(encoding="utf-8")
    if NOBODY in text:
        require(user, f"user is {user!r}; right is: your name on Kaggle, as in --user ada")
        path.write_text(text.replace(NOBODY, user), encoding="utf-8")


def _wait_until_ready(address: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while (status := _status(address)) != READY:
        if time.monotonic() > deadline:
            raise TimeoutError(f"dataset {address} is {status or 'not there'} after {timeout:g} s")
        time.sleep(min(5.0, timeout / 10))


def _status(address: str) -> str | None:
    """What Kaggle says of the dataset; None where it knows none."""
    command = ["kaggle", "datasets", "status", address]
    done = subprocess.run(command, capture_output=True, text=True)
    # a warning may stand above
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if done.returncode == 0 and lines else None


def _kaggle(*arguments: str) -> None:
    done = subprocess.run(["kaggle", *arguments])
    if done.returncode:
        words = " ".join(arguments[:2])
        raise OSError(f"`kaggle {words}` ended with exit code {done.returncode}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
