"""Benchmarks: a command measures, appends records, and makes tables and figures from them.

`step.py` is a short example; `sections.py` makes the reports of all of them.
"""
