"""Notebooks are found and planned: parameters, and what may run beside others."""

import pytest

from lib.tools.publish.plan import Job, find_notebooks, parameter_names, plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("03_three: {a: 1}", "no notebook is called '03_three'"),
        ("steps: 3", "steps must be a mapping of parameters, got 3"),
        ("- steps", "must map notebook names to parameters"),
        ("a: [", "while parsing"),
        ("ä: {}", "can't decode"),
    ],
)
def test_a_parameter_file_of_another_form_is_refused(shelf, text, said):
    path = shelf / "own.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"own\.yaml: .*{said}"):
        plan(find_notebooks((), shelf), path, shelf)


def test_a_plan_has_each_notebooks_parameters_and_whether_it_runs_alone(shelf):
    path = shelf / "notebooks/parameters/gpu.yaml"
    path.write_text("01_one:\n  steps: 100\n")
    one, two = find_notebooks((), shelf)
    assert plan([one, two], "gpu", shelf) == [
        Job(one, {"steps": 100}, runs_alone=False),
        Job(two, {}, runs_alone=True),
    ]
    assert parameter_names(one) == {"steps", "size"}
    assert find_notebooks(["2", "02_two.ipynb"], shelf) == [two]
