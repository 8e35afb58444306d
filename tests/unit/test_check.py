"""Does it pay: the answer for drafters and servers of known speeds, the time that it takes, and its command."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import gradio as gr
import pytest
import torch

from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.models.presets import preset_of as by_name
from specdemo.servers.flags import elsewhere
from specdemo.settings import AUTO, Settings
from specdemo.studies import perplexity, writers
from specdemo.studies.check import ANSWERS, NO, PAYS, TRIAL_EACH, UNCLEAR, YES, Check
from specdemo.studies.perplexity import difference, logits_of, loss_of, rows_of
from specdemo.studies.study import some_of_each
from specdemo.studies.summaries import Row
from specdemo.studies.writers import Text
from specdemo.ui.lab.draw import drawn
from specdemo.ui.lab.results import Results
from tests.harness.files import make_tokenizer, write_gguf
from tests.harness.models import preset_of, save, tiny

from ..conftest import Command
from ..fakes.writers import ALONE, DRAFTED, Rounds, Scripted, written
from ..sentences import gist, refuses, tells

ROUND = 0.1  # seconds of the target alone
TOKENS = 2.4  # of a round with a draft, see DRAFTED


class Paced(Scripted):
    """A `Writer` whose rounds take about as long as they are meant to: by `noise` more or less."""

    def __init__(self, rounds: Rounds, seconds: float, noise: float, rng: random.Random, facts: Any) -> None:
        super().__init__(rounds, seconds)
        self.rounds, self.seconds, self.noise, self.rng = rounds, seconds, noise, rng
        self.facts, self.at_once = facts, False

    def write(self, prompt: str, settings: Settings, alone: bool = True) -> Text:
        super().write(prompt, settings, alone)
        return written(self.rounds, self.seconds * (1 + self.noise * self.rng.uniform(-1, 1)))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a check of drafters with these speed-ups, None for one that drafts nothing; `lucky` ones are those of the
    trials."""

    def _checked(
        speeds: dict[str, float | None],
        noise: float = 0.02,
        seed: int = 0,
        lucky: Mapping[str, float] = MappingProxyType({}),
        **asked: Any,
    ) -> Check:
        rng, left = random.Random(seed), dict(lucky)

        def make(_: Any, drafter: str, k: Any) -> Paced:
            facts = {"engine": "specdemo", "version": "f32", "model": "toy", "drafter": drafter, "k": k}
            speed = left.pop(drafter, speeds.get(drafter))
            drafts = drafter != "none" and speed is not None
            seconds = ROUND * TOKENS / speed if drafts and speed else ROUND
            return Paced(DRAFTED if drafts else ALONE, seconds, noise, rng, facts)

        monkeypatch.setattr(writers, "PresetWriter", make)
        preset = SimpleNamespace(defaults=SimpleNamespace(drafter="eagle"), draft_model=None)
        usual = {field.name: field.value for field in Check.fields} | {"drafters": list(speeds)}
        machine = {
            "device": "cpu",
            "device_name": "Toy CPU",
            "threads": 2,
            "bytes_per_pass": 300,
            "weights_dtype": "bfloat16",
        }
        loaded = SimpleNamespace(preset=preset, weights_dtype=None, weights={}, environment=lambda: machine)
        study = Check(loaded, usual | asked)  # type: ignore[arg-type]
        for _ in study.run():
            pass
        return study

    return _checked


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let every text take so long, by the clock of the check."""
    now, write = [0.0], Paced.write

    def slow(self: Paced, *args: Any) -> Text:
        now[0] += seconds
        return write(self, *args)

    for module in ("check", "examination"):
        monkeypatch.setattr(f"specdemo.studies.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Paced, "write", slow)


@pytest.mark.parametrize(
    ("speed", "answer"), [(1.5, YES), (1.2, YES), (1.0, NO), (0.7, NO), (1 + (PAYS - 1) / 2, NO), (PAYS, UNCLEAR)]
)
def test_the_answer_is_that_of_the_known_speed(checked: Any, speed: float, answer: str) -> None:
    study = checked({"eagle": speed})
    assert study.answer == answer
    assert study.words()[0].startswith(f"{ANSWERS[answer]}:")
    assert tells(study.words()[0], f"eagle {study.found.speed_up.mean:.2f}")
    assert tells(study.in_short(), f"eagle {study.found.speed_up.mean:.2f}")
    assert study.found.speed_up.mean == pytest.approx(speed, rel=0.02)
    assert study.found.tokens_per_round.mean == pytest.approx(TOKENS)
    assert study.found.break_even["tokens_per_round"] == pytest.approx(TOKENS / speed, rel=0.02)


def test_a_clear_answer_takes_one_look_and_an_unclear_one_all(checked: Any) -> None:
    assert len(checked({"eagle": 1.5}).found.samples) == 8
    assert len(checked({"eagle": PAYS}).found.samples) == 3 * 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("speed", [1.0, 1.1])
def test_a_wrong_answer_is_rare_however_noisy_the_machine(checked: Any, speed: float) -> None:
    """By the interval's own promise: 95% over all looks. Twice as many wrong ones fail."""
    wrong = YES if speed < PAYS else NO
    found = [checked({"eagle": speed}, noise=0.25, seed=seed).answer for seed in range(30)]
    assert found.count(wrong) <= 3
    assert UNCLEAR in found


def test_the_fastest_drafter_is_examined_and_slow_ones_are_dropped(checked: Any) -> None:
    study = checked({"prompt-lookup": 1.1, "ngram": 0.5, "eagle": 1.6, "medusa": 1.55})
    assert study.best == "eagle" == study.found.engine["drafter"]
    assert study.found.engine["k"] == AUTO
    rows = {row["drafter"]: row["texts"] for row in study.rows()}
    assert rows == {"eagle": 2 * TRIAL_EACH, "medusa": 2 * TRIAL_EACH, "prompt-lookup": 2, "ngram": 2}
    assert next(iter(rows)) == "eagle"  # the fastest first
    assert study.rows()[0]["needed"] == pytest.approx(TOKENS / 1.6, rel=0.03)


def test_the_next_drafter_is_examined_where_the_one_that_seemed_fastest_does_not_pay(checked: Any) -> None:
    study = checked({"ngram": 0.8, "eagle": 1.4, "medusa": 0.9}, lucky={"ngram": 1.5})
    assert study.best == "ngram"
    assert study.answer == YES
    assert study.examined == ["ngram", "eagle"]
    assert study.found.engine["drafter"] == "eagle"
    assert "vLLM" in {row["program"] for row in study.elsewhere()}
    hopeless = checked({"ngram": 0.8, "eagle": 0.9}, lucky={"ngram": 1.5, "eagle": 1.3})
    assert (hopeless.answer, hopeless.examined) == (NO, ["ngram", "eagle"])


def test_it_is_unclear_while_a_drafter_that_may_pay_was_not_examined(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 1)
    study = checked({"ngram": 0.8, "eagle": 1.4}, lucky={"ngram": 1.5}, seconds=28)
    assert (study.answer, study.examined) == (UNCLEAR, ["ngram"])
    assert any(tells(line, "eagle faster tried,") for line in study.words())


def test_a_drafter_that_drafts_nothing_does_not_pay(checked: Any) -> None:
    study = checked({"eagle": None})
    assert (study.answer, study.elsewhere()) == (NO, [])
    assert tells(study.in_short(), "drafted")


def test_what_to_change_elsewhere_names_the_drafter_and_the_draft_length(checked: Any) -> None:
    study = checked({"prompt-lookup": 1.5})
    assert study.k
    arguments = {row["program"]: row["argument"] for row in study.elsewhere()}
    assert arguments["transformers"] == f"generate(..., prompt_lookup_num_tokens={study.k})"
    assert f'"num_speculative_tokens": {study.k}' in arguments["vLLM"]
    json.loads(arguments["vLLM"].split("'")[1])
    assert arguments["SGLang"].endswith(f"--speculative-num-draft-tokens {study.k + 1}")
    assert tells(study.words()[1], f"prompt-lookup K = {study.k}")
    page = study.page()
    assert tells(page, "pays")
    assert "prompt_lookup_num_tokens" in page
    assert checked({"prompt-lookup": 0.8}).elsewhere() == []
    assert "someone/small" in dict(elsewhere("draft-model", 3, "someone/small"))["llama.cpp"]
    assert elsewhere("layer-skip", 3) == []
    assert "parallel_drafting" in dict(elsewhere("p-eagle", 3))["vLLM"]


def test_the_page_has_the_verdict_what_to_do_one_chart_and_lines_to_paste_then_the_rest(checked: Any) -> None:
    study = checked({"prompt-lookup": 1.5, "ngram": 1.2})
    front, details = study.sections()
    assert [front.verdict, *front.words, *details.words] == study.words()
    assert len({*study.words()}) == len(study.words())
    assert [plot.title for plot, _ in front.plots] == ["Speed-up by kind of prompt"]
    assert (front.tables, details.verdict, details.paste) == ((), "", "")
    assert all(plot.title not in [table.title for table in details.tables] for plot, _ in details.plots)
    first, *flags = front.paste.splitlines()
    assert study.verdict in first
    assert tells(first, "toy bfloat16. Toy CPU, 2 threads.")
    assert flags[0] == study.to_do
    assert flags[1:] == [f"{row['program']}: {row['argument']}" for row in study.elsewhere()]
    assert study.result()["paste"] == front.paste


def test_while_it_runs_there_is_no_answer_yet(checked: Any) -> None:
    study = checked({"eagle": 1.5})
    study._over = False
    (section,) = study.sections()
    assert (section.verdict, section.words, section.paste, len(section.plots)) == ("", (), "", 1)


@pytest.mark.parametrize(
    ("speed", "words"), [(0.7, "off: --drafter none."), (PAYS, "more 120 seconds."), (None, "switch --drafter")]
)
def test_there_is_one_thing_to_do(checked: Any, speed: float | None, words: str) -> None:
    study = checked({"eagle": speed})
    assert tells(study.to_do, words)
    assert study.paste().splitlines()[1:] == [study.to_do]  # no program needs a flag


def test_smaller_weights_are_the_thing_to_do_where_they_can_be_worth_more(checked: Any) -> None:
    study = checked({"eagle": 1.5})
    study.loaded.preset.target = SimpleNamespace(size=100)
    assert tells(study.to_do, "--weights stored: 3.0")
    study.loaded.preset.target.size = 250
    assert not tells(study.to_do, "stored")


def test_trials_end_in_time_and_what_was_not_tried_is_said(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 20)
    study = checked({"eagle": 1.5, "ngram": 1.2, "medusa": 1.1, "block": 1.4}, seconds=140)
    assert [row["drafter"] for row in study.rows()] == ["eagle"]
    assert tells(study.words(), "ngram medusa")


def test_a_baseline_alone_is_refused(checked: Any) -> None:
    with refuses(BadInput, "address"):
        checked({"eagle": 1.0}, baseline="http://127.0.0.1:9")


def test_the_command_tells_the_bill_then_the_answer(tmp_path: Path, command: Command) -> None:
    tokenizer = make_tokenizer()
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    html = tmp_path / "report.html"
    status, out, err = command("check", "--target", str(folder), "--seconds", "10", "--json", "--html", str(html))
    assert status == 0, err
    found = json.loads(out)
    assert found["answer"] in ANSWERS
    assert {row["drafter"] for row in found["trials"]} == {"prompt-lookup", "lookahead", "suffix"}
    assert found["texts"]["same"] == found["texts"]["compared"] > 0
    assert tells(err, "nothing download")
    assert ANSWERS[found["answer"]] in html.read_text(encoding="utf-8")


def test_what_ends_before_anything_is_examined_is_unclear(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 60)
    study = checked({"eagle": 1.5}, seconds=200)
    assert study.found is None
    assert tells(study.words()[0], "Unclear: nothing")
    assert tells(study.words()[1], "more 200 seconds.")
    assert study.page() == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seconds", "5"], "10"),
        (["--seconds", "5000"], "10 600"),
        (["--baseline", "http://127.0.0.1:9"], "address"),
        (["--server", "http://127.0.0.1:9"], "http://127.0.0.1:9 reached"),
        (["--drafters", "magic"], "'magic'"),
        (["--text", __file__], "quantized"),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path: Path, command: Command, options: list[str], words: str) -> None:
    tokenizer = make_tokenizer()
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    status, _, err = command("check", "--target", str(folder), *options)
    assert (status, tells(err, words), "Traceback" in err) == (2, True, False)


# Quantized weights ----------------------------------------------------------------------------------------------


def losses(weights: str, found: list[tuple[float, int]], reference: list[tuple[float, int]]) -> list[Row]:
    return [
        {"weights": weights, "text": place, "loss": loss, "tokens": tokens, "more": loss - exact}
        for place, ((loss, tokens), (exact, _)) in enumerate(zip(found, reference, strict=True))
    ]


def test_the_ratio_of_perplexities_is_that_of_their_means_and_has_an_interval() -> None:
    reference = [(2.0 * count, count) for count in (10, 20, 30, 40, 50, 60, 70, 80)]
    runs = losses("int8", reference, reference)
    runs += losses("int4", [(loss + 0.1 * n, n) for loss, n in reference], reference)
    runs += losses("better", [(loss - 0.1 * n * (n % 20 + 1) / 11, n) for loss, n in reference], reference)
    same, worse, better = (row["ratio"] for row in rows_of(runs))
    assert same.mean == 1
    assert worse.mean == pytest.approx(math.exp(0.1))
    assert better.low < better.mean < 1  # it may be below 1
    assert better.high is not None


def test_the_page_has_room_for_every_table(checked: Any) -> None:
    study = checked({"eagle": 1.5})
    study.perplexities = rows_of(losses("int8", [(1.0, 2)] * 2, [(1.0, 2)] * 2))
    with gr.Blocks():
        results = Results(Check)
    updates = results.update(drawn(study.sections()))
    _, section = results.sections
    titles = [updates[table.fold].get("label") for table in section.tables]
    assert titles == [table.title if table.rows else None for table in study.tables()]
    assert {"What the weights cost in quality", "Drafters tried", "Every text"} <= {*titles}


def test_logits_differ_by_the_root_mean_square_and_another_token_may_be_the_likeliest() -> None:
    exact = torch.tensor([[1.0, 3.0], [5.0, 2.0], [0.0, 1.0], [1.0, 0.0]])
    other = exact + torch.tensor([[0.0, 0.0], [-4.0, 0.0], [0.0, 0.0], [0.0, 0.5]])
    runs = losses("int4", [(1.0, 2)] * 2, [(1.0, 2)] * 2)
    differences = [difference(other[rows], exact[rows]) for rows in ([0, 1], [2, 3])]
    (found,) = rows_of([{**run, **differs} for run, differs in zip(runs, differences, strict=True)])
    assert found["rms"] == pytest.approx(math.sqrt(16.25 / 8))
    assert found["changed"].mean == 1 / 4


def test_a_check_of_stored_weights_compares_them_with_llamacpp_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", stored_in={"ffn_up": "Q8_0"})
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    loaded = load(by_name(str(tmp_path / "tiny.gguf")), "stored", "cpu")
    monkeypatch.setattr(perplexity, "can_start", lambda: True)
    monkeypatch.setattr(
        perplexity, "losses_of_llamacpp", lambda _, texts: ({"loss": 3.0, "tokens": len(ids) - 1} for ids in texts)
    )
    study = Check(loaded, {})
    assert [*study._compare_weights()][-1] == perplexity.COMPARING_LLAMACPP
    stored, exact, theirs = study.perplexities
    assert (stored["weights"], exact["weights"], theirs["weights"].split(",")[0]) == ("stored", "float32", "llama.cpp")
    assert stored["tokens"] == theirs["tokens"]
    assert 0 < stored["rms"] < 0.01  # the products alone: those in float32 are of the same numbers
    assert (exact["rms"], theirs["rms"], theirs["changed"]) == (None, None, None)
    assert theirs["perplexity"].mean == pytest.approx(math.exp(3 * theirs["texts"] / theirs["tokens"]))
    assert theirs["ratio"].mean == pytest.approx(theirs["perplexity"].mean / exact["perplexity"].mean)

    def fail(*_: Any) -> Any:
        raise BadInput("It does not start.")
        yield

    monkeypatch.setattr(perplexity, "losses_of_llamacpp", fail)
    study = Check(loaded, {})
    assert len([*study._compare_weights()]) == stored["texts"]
    assert len(study.perplexities) == 2
    assert [*map(gist, study.not_compared)] == ["The llama.cpp It"]
    text = "the cat sat on the mat " * 5
    tokens = len(loaded.encode(text, raw=True))
    monkeypatch.setattr(perplexity, "PIECE", tokens // 2 + 1)
    study = Check(loaded, {"text": text})
    assert len([*study._compare_weights()]) == 2  # llama.cpp reads none of it
    assert (study.perplexities[0]["texts"], study.perplexities[0]["tokens"]) == (2, tokens - 2)
    loaded.release()


@pytest.mark.slow
def test_a_check_of_quantized_weights_compares_them_with_float32(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    loaded = load(preset_of(folder, draft=folder), "int8", "cpu")
    study = Check(loaded, {})
    for _ in study._compare_weights():
        pass
    assert not study.not_compared
    quantized, exact = study.perplexities
    assert (quantized["weights"], exact["weights"]) == ("int8", "float32")
    plain = load(preset_of(folder), "float32", "cpu")
    ids = plain.encode(some_of_each("written", 1)[0].prompt, raw=True)
    expected = torch.nn.functional.cross_entropy(
        plain.model(torch.tensor([ids[:-1]])).logits[0], torch.tensor(ids[1:]), reduction="sum"
    )
    found = loss_of(logits_of(plain.target_runner, ids), ids)
    assert found == {"loss": pytest.approx(expected.item(), rel=1e-4), "tokens": len(ids) - 1}
    assert quantized["ratio"].mean == pytest.approx(1, abs=0.05)
    assert quantized["ratio"].mean == pytest.approx(quantized["perplexity"].mean / exact["perplexity"].mean)
    assert not loaded.released
    loaded.release()
    plain.release()
