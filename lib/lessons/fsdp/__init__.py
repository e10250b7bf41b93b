"""Lesson 09: exercises on ranks that are threads, the orders of a step on a clock, records."""
