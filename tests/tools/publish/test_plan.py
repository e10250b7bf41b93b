"""Notebooks are found and planned: parameters, what each needs, and what may run beside it."""

from pathlib import Path

import pytest

from lib.tools.publish.plan import Job, find_notebooks, parameter_names, plan


@pytest.fixture
def shelf(tmp_path, make_notebook) -> Path:
    """A workbook of two notebooks that are not run here."""
    make_notebook(tmp_path / "notebooks/01_one.ipynb", "steps: int | None = 3\nsize = {\n 'a': 1}")
    make_notebook(tmp_path / "notebooks/02_two.ipynb", "# needs: 01\n# runs alone: yes\nratio = 2")
    (tmp_path / "notebooks/parameters").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("03_three: {a: 1}", "no notebook is called '03_three'"),
        ("steps: 3", "steps must be a mapping of parameters, got 3"),
        ("- steps", "must map notebook names to parameters"),
        ("a: [", "while parsing"),
        ("ä: {}", "can't decode"),
        # values that YAML has and Python's source or JSON have not
        ("01_one: {steps: 2026-01-01}", r"01_one\.steps must be text \(in quotes\), a finite"),
        ("01_one: {steps: !!set {1, 2}}", r"01_one\.steps must be .* got \{1, 2\}"),
        ("01_one: {size: {a: [1, 12:30:00Z, .inf]}}", r"01_one\.size must be .* got .*inf"),
        ("01_one: {size: !!binary aGk=}", r"01_one\.size must be .* got b'hi'"),
        ("01_one: {1: 2}", "01_one must have names in quotes, got 1"),
        ("01_one: {size: &all [*all]}", r"01_one\.size must be"),
        # of two, the first would be lost
        ("01_one: {steps: 1}\n02_two: {}\n01_one: {size: 2}", "got twice: 01_one"),
        ("01_one: {steps: 1, steps: 2}", "got twice: steps"),
    ],
)
def test_a_parameter_file_of_another_form_is_refused(shelf, text, said):
    path = shelf / "own.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"own\.yaml: .*{said}"):
        plan(find_notebooks((), shelf), path, shelf)


def test_a_parameters_cell_that_is_no_python_stops_only_who_sets_its_parameters(
    shelf, make_notebook
):
    make_notebook(shelf / "notebooks/02_two.ipynb", "%matplotlib inline\n# needs: 01\nratio = 2")
    path = shelf / "own.yaml"
    path.write_text("01_one: {steps: 1}")
    _, two = plan(find_notebooks((), shelf), path, shelf)
    assert two.needs == ("01_one",)
    path.write_text("02_two: {ratio: 1}")
    with pytest.raises(ValueError, match=r"02_two\.ipynb: its cell tagged `parameters` must be"):
        plan(find_notebooks((), shelf), path, shelf)


def test_a_plan_has_each_notebooks_parameters_needs_and_whether_it_runs_alone(shelf):
    path = shelf / "notebooks/parameters/gpu.yaml"
    path.write_text("01_one:\n  steps: 100\n")
    one, two = find_notebooks((), shelf)
    assert plan([one, two], "gpu", shelf) == [
        Job(one, {"steps": 100}, (), runs_alone=False),
        Job(two, {}, ("01_one",), runs_alone=True),
    ]
    assert parameter_names(one) == {"steps", "size"}
    assert find_notebooks(["2", "02_two.ipynb"], shelf) == [two]


@pytest.mark.parametrize("needed", ["02", "03", "nothing"])
def test_only_an_earlier_notebook_can_be_needed(shelf, make_notebook, needed):
    make_notebook(shelf / "notebooks/02_two.ipynb", f"# needs: {needed}\nratio = 2")
    with pytest.raises(ValueError, match=f"needs '{needed}'; earlier ones: there are: 01_one"):
        plan(find_notebooks((), shelf), None, shelf)
