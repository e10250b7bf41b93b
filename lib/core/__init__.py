"""Shared by all rooms: settings, files, records, hardware, memory, profiler ranges, figure style.

Look into `settings.py` first: every config is checked, read and written by it. `files.py` writes
files that survive a crash.
"""
