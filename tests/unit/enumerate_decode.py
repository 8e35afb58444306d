"""The names that moved to `tests.harness`."""

from tests.harness.enumerate_decode import *  # noqa: F403
