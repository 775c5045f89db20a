"""Tests of intervals.py: `python3 -m unittest`."""

import unittest

from intervals import overlap


class Overlap(unittest.TestCase):
    """Numbers that two intervals have in common."""

    def test_both_ends_count(self):
        """As they belong to their interval."""
        self.assertEqual(overlap((1, 5), (3, 9)), 3)

    def test_intervals_that_touch_share_one_number(self):
        """The end of one is the start of the other."""
        self.assertEqual(overlap((1, 3), (3, 4)), 1)

    def test_intervals_apart_share_none(self):
        """Also with no number between them."""
        self.assertEqual(overlap((1, 2), (3, 5)), 0)
