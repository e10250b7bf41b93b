"""Benchmarks: a command measures, appends records, and makes tables and figures from them."""
