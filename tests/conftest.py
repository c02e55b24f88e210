"""Settings of all tests."""

from hypothesis import settings

# The same cases in every run; `pytest --hypothesis-profile explore` draws new ones.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("seeded")
