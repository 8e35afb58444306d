"""What the Lab is asked and told, without a browser or a model."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.studies.checks import DESCRIPTIONS
from specdemo.studies.lab import STUDIES
from specdemo.studies.rules import BROKEN
from specdemo.studies.study import some_of_each
from specdemo.types import BadInput
from specdemo.ui.lab.pictures_of_theory import theory_of
from specdemo.ui.lab.results import plain

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.text()),
    st.lists(st.floats()),
    st.just(["ngram"]),
)


@pytest.mark.parametrize("view", STUDIES)
@given(data=st.data())
def test_any_form_is_read_or_refused_in_words(view: str, data: st.DataObject) -> None:
    fields = STUDIES[view].form()
    given = data.draw(st.fixed_dictionaries({field.name: st.one_of(values, st.just(field.value)) for field in fields}))
    try:
        read = STUDIES[view].read(given)
    except BadInput:
        return
    assert all(field.low <= read[field.name] <= field.high for field in fields if field.kind in ("whole", "number"))


@given(st.dictionaries(st.sampled_from(["draft_ms", "target_ms", "alpha"]), values))
def test_theory_of_any_numbers_is_a_picture_or_refused(asked: dict[str, Any]) -> None:
    try:
        (section,) = theory_of(asked)
    except BadInput:
        return
    assert section is not None
    assert not re.search(r"\bNaN\b|Infinity", "".join(figure.plot for figure in section.figures))


def test_the_words_of_the_broken_rules_are_those_of_the_rules_that_there_are() -> None:
    assert list(DESCRIPTIONS) == list(BROKEN)


@given(st.text())
def test_any_text_is_plain_in_markdown(text: str) -> None:
    assert re.sub(r"\\(.)", r"\1", plain(text)) == text
    assert not re.search(r"(?<!\\)(?:\\\\)*[<`*_\[$&]", plain(text))


def test_prompts_are_taken_from_each_category_in_turn() -> None:
    assert [prompt.id for prompt in some_of_each("easy-hard", 2)] == ["easy-1", "hard-1", "easy-2", "hard-2"]
    assert len({prompt.category for prompt in some_of_each("domains", 3)}) == 8
