"""The names that moved to `tests.harness`, for the tests that still ask for them here."""

from tests.harness.doubles import *  # noqa: F403
from tests.harness.engines import *  # noqa: F403
from tests.harness.texts import *  # noqa: F403
from tests.harness.toys import *  # noqa: F403
