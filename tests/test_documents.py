"""What the documents for people say about files, lines and settings is so."""

import re
import sys
import types
from pathlib import Path

import pytest

from lib.__main__ import Command, config_of, load
from lib.tools.publish.submissions import POINTS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "AGENTS.md", "lib/README.md", "artifacts/README.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(".github/*.md"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_files_of_each_lesson_exist_and_no_lesson_is_missing():
    rows = re.findall(r"^\| (\d\d) [^|]+\|(.+)\|$", read("lib/README.md"), re.MULTILINE)
    for _, files in rows:
        names = re.findall(r"`([^`]+\.py)`", files)
        assert names
        assert [name for name in names if not (ROOT / "lib" / name).is_file()] == []
    lessons = [path.name[:2] for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
    assert [number for number, _ in rows] == lessons


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_between_documents_lead_to_files(name):
    links = re.findall(r"\]\(([^)#\s]+)", read(name))
    here = (ROOT / name).parent
    assert [x for x in links if "://" not in x and not (here / x).exists()] == []


def test_the_syllabus_asks_for_every_essential_exercise_and_counts_its_points():
    asked, notebooks = set(), sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    essential = {
        (path.name[:2], number): POINTS[tier]
        for path in notebooks
        for number, tier in re.findall(
            r"### (?:Exercise|Puzzle) (\d+) \(([\w-]+)\)", path.read_text(encoding="utf-8")
        )
        if tier in ("warm-up", "core")
    }
    rows = re.findall(
        r"^\| \d+ \|.*\| (.+) \| (\d+) \|$", read(".github/SYLLABUS.md"), re.MULTILINE
    )
    for exercises, points in rows:
        parts = [part.split(": ") for part in exercises.split("; ")]
        here = {(name, number) for name, numbers in parts for number in numbers.split(", ")}
        assert sum(essential[each] for each in here) == int(points), exercises
        asked |= here
    assert sorted(essential.keys() - asked) == []


def is_there(name: str) -> bool:
    """Whether `lib.room.file.word` names folders, a file, and a word of that file."""
    place, *parts = ROOT, *name.split(".")
    for part in parts:
        if place.is_dir() and (place / part).is_dir():
            place /= part
        elif place.is_dir() and (place / f"{part}.py").is_file():
            place /= f"{part}.py"
        else:
            file = place / "__init__.py" if place.is_dir() else place
            return bool(re.search(rf"\b{part}\b", file.read_text(encoding="utf-8")))
    return True


def test_modules_and_names_that_prose_cites_exist():
    files = [*ROOT.glob("lib/**/*.py"), *ROOT.glob("artifacts/*.md"), ROOT / "lib/README.md"]
    cited = {
        (name, file.name)
        for file in files
        for name in re.findall(r"`(lib(?:\.\w+)+)", file.read_text(encoding="utf-8"))
    }
    assert len(cited) > 50
    assert [(name, file) for name, file in sorted(cited) if not is_there(name)] == []
    assert not is_there("lib.model.config.model_names")


def test_the_benchmark_that_is_shown_is_a_command_as_it_is_added(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", read(".github/CONTRIBUTING.md"), re.DOTALL)
    (source,) = [block for block in blocks if "class SoftmaxConfig" in block]
    (entry,) = [block for block in blocks if '"benchmark softmax": Command(' in block]
    module = types.ModuleType("lib.tools.benchmarks.softmax")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(module))
    (command,) = eval(f"{{{entry}}}", {"Command": Command}).values()
    assert config_of(load(command.function)) is module.SoftmaxConfig


def test_the_readme_is_read_in_minutes():
    assert len(read("README.md").split()) <= 700
