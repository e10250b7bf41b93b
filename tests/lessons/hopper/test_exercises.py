"""The exercises of notebook 07; answers to them: test_answers.py."""

from lib.lessons.exercise import draw_inputs
from lib.lessons.hopper import exercises


def test_dealt_tiles_keep_the_busiest_within_one_tile_of_the_mean():
    for work, programs in draw_inputs(exercises.deal, 0):
        found = exercises.dealt(exercises.deal.solve, work, programs)
        assert sum(work) / programs <= found["busiest"] <= sum(work) / programs + max(work)
