"""Lesson 10: the race, its exercises, record and leaderboard; the plan of a run for a machine."""
