"""Why did acceptance drop: causes of a known size are found, and what cannot be measured is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdemo.models.loaded import load
from specdemo.settings import Settings
from specdemo.studies import writers
from specdemo.studies.causes import CONTEXT, LANGUAGE, PLACE, TEMPERATURE, TEXT, THINKING, WEIGHTS, Causes
from specdemo.studies.writers import Written, _halves
from tests.harness.files import make_tokenizer
from tests.harness.models import preset_of, save, tiny

from ..conftest import Command
from ..fakes.writers import Rounds, events_of, written
from ..sentences import tells

GOOD: Rounds = [(4, 4), (4, 3), (4, 4), (4, 2), (4, 4)]
BAD: Rounds = [(4, 1), (4, 0), (4, 0), (4, 1), (4, 0)]


class Told:
    """A `Writer` that guesses badly where the prompt, the temperature or the template says so."""

    def __init__(self, loaded: Any, drafter: str, k: int) -> None:
        self.thinks = loaded.preset.chat_template_kwargs.get("enable_thinking")

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Written:
        bad = "Rom ansehen" in prompt or settings.temperature == 1 or self.thinks
        return replace(written(BAD if bad else GOOD, 0.1), halves=((20, 12), (20, 4)))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    def _measured(template: str = "", **asked: Any) -> Causes:
        monkeypatch.setattr(writers, "PresetWriter", Told)
        loaded = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template), device="cpu", preset=None)
        loaded.preset = preset_of(Path("x"))
        usual = {field.name: field.value for field in Causes.fields} | {"drafter": "ngram"}
        monkeypatch.setattr(
            "specdemo.studies.causes.replace", lambda kept, **new: SimpleNamespace(**vars_of(kept), **new)
        )
        study = Causes(loaded, usual | asked)  # type: ignore[arg-type]
        for _ in study.run():
            pass
        return study

    return _measured


def vars_of(kept: Any) -> dict[str, Any]:
    names = ("tokenizer", "device") if hasattr(kept, "tokenizer") else ()
    return {name: getattr(kept, name) for name in names}


def by_condition(study: Causes) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["cause"], row["condition"]): row for row in study.rows()}


def test_a_cause_of_a_known_size_is_found_and_others_are_not(measured: Any) -> None:
    study = measured("{% if enable_thinking %}")
    rows = by_condition(study)
    assert study.done == study.steps
    good, bad = (sum(a for _, a in rounds) / sum(min(a + 1, d) for d, a in rounds) for rounds in (GOOD, BAD))
    for cause in (TEMPERATURE, THINKING):
        first, *_, last = [row for (of, _), row in rows.items() if of == cause]
        assert (first["change"], first["clear"]) == (None, None)
        assert first["acceptance_rate"].mean == pytest.approx(good)
        assert last["acceptance_rate"].mean == pytest.approx(bad)
        assert last["change"] == pytest.approx(bad - good)
        assert last["tokens_per_round"].mean == pytest.approx(1 + sum(a for _, a in BAD) / len(BAD))
    assert rows[TEMPERATURE, "0.5"]["change"] == 0
    assert not rows[TEMPERATURE, "0.5"]["clear"]
    assert rows[CONTEXT, "after 1,024 tokens"]["change"] == pytest.approx(0)
    assert rows[PLACE, "second half"]["change"] == pytest.approx((4 - 12) / 20)
    assert len([of for of, _ in rows if of == TEXT]) == 11
    assert {name for of, name in rows if of == LANGUAGE} == {"English", "German", "French", "Spanish", "Chinese"}
    assert rows[LANGUAGE, "German"]["acceptance_rate"].mean < good  # of three prompts one is about Rome


def test_thinking_is_left_out_where_the_template_has_none(measured: Any) -> None:
    assert THINKING not in {cause for cause, _ in by_condition(measured("plain"))}


def test_the_halves_are_of_the_rounds_that_begin_in_them() -> None:
    events = [*events_of([(2, 2), (2, 1), (2, 0), (2, 2)], 0.1)]  # tokens 1 to 3, 4 and 5, 6, 7 to 9
    assert _halves(events, 10) == [(4, 3), (3, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    return save(tiny("llama", len(tokenizer)), tokenizer, tmp_path_factory.mktemp("causes") / "model")


def test_weights_of_another_type_are_compared_and_released(folder: Path) -> None:
    loaded = load(preset_of(folder), "float32", "cpu")
    asked = {"drafter": "prompt-lookup", "k": 2, "each": 1, "max_new_tokens": 16, "other_weights": "int8"}
    study = Causes(loaded, asked)
    study.plan([text for text in study.texts if text["cause"] == WEIGHTS])
    for _ in study.run():
        pass
    assert not study.left_out
    assert [row["condition"] for row in study.rows()] == ["as loaded", "int8"]
    assert not loaded.released
    loaded.release()


def test_the_command_prints_a_table_and_writes_it(folder: Path, command: Command, tmp_path: Path) -> None:
    asked = ["lab", "causes", "--target", str(folder), "--drafter", "prompt-lookup", "--each", "1"]
    status, out, err = command(*asked, "--max-new-tokens", "16", "--json", str(tmp_path / "causes.json"))
    assert status == 0, err
    assert "acceptance_rate" in out
    rows = json.loads((tmp_path / "causes.json").read_text())["rows"]
    assert {row["cause"] for row in rows} >= {TEXT, LANGUAGE, TEMPERATURE}
    status, _, err = command("lab", "causes", "--server", "http://127.0.0.1:9")
    assert (status, tells(err, "cannot reached"), "Traceback" in err) == (2, True, False)
