"""Readers' answers to exercises, a file for each lesson: rows of one table, `table.ANSWERS`."""
