"""The measurements behind the Lab's views, where there is little or nothing to measure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.drafters.prompt_lookup import PromptLookup
from specdemo.errors import BadInput
from specdemo.studies.explain import Theory
from specdemo.studies.lab import STUDIES
from specdemo.studies.lossless import Lossless
from specdemo.studies.prompts import Prompt, readable
from specdemo.studies.study import Study
from specdemo.tokens import Draft
from specdemo.ui.lab.draw import drawn
from tests.harness.classes import Loaded

from ..sentences import refuses, tells

PROMPT = "the cat sat on the mat"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> str:
    """A drafter that never has anything to say."""
    monkeypatch.setattr(PromptLookup, "propose", lambda *asked: Draft())
    return "prompt-lookup"


def test_a_drafter_that_guesses_nothing_leaves_a_sentence_in_place_of_the_theory(loaded: Loaded, silent: str) -> None:
    study = Theory(loaded, {"prompt": PROMPT, "drafter": silent, "k": 4})
    assert study.sections() == []
    list(study.run())
    (section,) = study.sections()
    assert section is not None
    assert tells(section.verdict, f"{silent} little")
    assert study.values() == {}
    assert study.rows() == []


def test_where_nothing_can_be_sampled_the_greedy_texts_stay(loaded: Loaded, silent: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "drafter": silent, "k": 2, "temperature": 1.0}
    study = Lossless(loaded, {**asked, "rounds": 10, "rule": "match", "broken": "", "prompts": 1})
    list(study.run())
    assert len(study.checks) > 0
    *_, last = study.sections()
    assert last is not None
    assert tells(last.title, "Nothing sampled")
    assert tells(last.words[0], "choose another")
    assert study.result()["sampling"] is None


@pytest.mark.parametrize("study", [Theory, Lossless])
def test_what_is_measured_is_drawn_with_all_its_lines(loaded: Loaded, study: type[Study]) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "drafter": "draft-model", "k": 2, "temperature": 1.0}
    measured = study(loaded, {**asked, "rounds": 400, "rule": "match", "broken": "", "prompts": 1})
    list(measured.run())
    sections = measured.sections()
    assert [section and [plot for plot, _ in section.plots] for section in sections] == [*map(list, study.plots)]
    for plot, rows in (pair for section in sections if section for pair in section.plots):
        assert all(any(column in row for row in rows) for column in plot.figures), plot.title
    assert all(any(figures) for _, figures in filter(None, drawn(sections)))


OF_SERVERS = {
    "check": {"server", "server_key", "baseline", "baseline_key", "at_once", "context"},
    "causes": {"server", "server_key"},
}


@pytest.mark.parametrize("name", STUDIES)
def test_where_no_server_may_be_named_only_the_fields_of_servers_are_missing(name: str) -> None:
    study = STUDIES[name]
    form, left = ({field.name for field in study.form(servers)} for servers in (True, False))
    assert form - left == OF_SERVERS.get(name, set())
    with pytest.raises(BadInput):
        study.read({})


def test_prompts_that_a_model_cannot_read_are_told_apart() -> None:
    def encode(text: str) -> list[int]:
        if "1" in text:
            raise BadInput("There is a digit.")
        return [0]

    prompts = [Prompt("a", "x", "no digits"), Prompt("b", "x", "1 digit"), Prompt("c", "y", "none")]
    loaded: Any = SimpleNamespace(encode=encode)
    can, left_out = readable(loaded, prompts)
    assert [prompt.id for prompt in can] == ["a", "c"]
    assert tells(left_out, "Left since characters")
    assert readable(loaded, can) == (can, "")
    with refuses(BadInput, "(b)"):
        readable(loaded, prompts[1:2])
