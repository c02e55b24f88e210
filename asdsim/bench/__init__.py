"""Timings of the walk, beside other ways to do the same, in one run on one core."""
