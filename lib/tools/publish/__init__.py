"""Notebooks run, as report pages, and as a bundle for Kaggle: start with `run_notebooks.py`."""
