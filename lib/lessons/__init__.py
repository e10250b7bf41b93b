"""Functions that notebooks call: exercises, explorers, figures; a folder for each notebook.

`exercise.py` checks a reader's answer, `explorer.py` makes sliders.
"""
