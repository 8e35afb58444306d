"""The names that moved to `tests.harness`, for the tests that still ask for them here."""

from tests.harness.files import *  # noqa: F403
from tests.harness.models import *  # noqa: F403
