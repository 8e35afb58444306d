"""What commands and the HTTP API tell as JSON is what the files of `tests/golden` hold."""

from __future__ import annotations

import pytest

from .. import golden


@pytest.mark.usefixtures("loads_once")
@pytest.mark.parametrize("name", golden.NAMES)
def test_the_json_is_as_it_was(name: str) -> None:
    assert golden.differences(name, golden.outcome(name)) == []


def test_only_figures_that_were_measured_are_left_out() -> None:
    found = {"tokens": 3, "seconds": 0.1, "rate": 0.12345, "speed_up": {"mean": 1.0, "low": None}, "rows": [{"ms": 3}]}
    left = {"tokens": 3, "seconds": "…", "rate": 0.123, "speed_up": "…", "rows": [{"ms": "…"}]}
    assert golden.settled(found) == left
    assert golden.settled({"seconds": 0.12345}, computed=True) == {"seconds": 0.123}
