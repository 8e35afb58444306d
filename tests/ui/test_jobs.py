"""The thread that loads models and runs jobs, and who follows them, without a browser."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from specdemo.models.sources import Folder
from specdemo.racing.trace import PLAIN, Entry
from specdemo.studies.study import Study
from specdemo.system.progress import check_stopped, tell
from specdemo.ui import engine as engine_module
from specdemo.ui.engine import EngineTrouble, pauses
from specdemo.ui.facts import facts
from specdemo.ui.lab.run import LabRun
from specdemo.ui.page import build_page
from specdemo.ui.race.run import RaceRun
from specdemo.ui.run_and_stop import halting
from specdemo.ui.runs import is_local
from specdemo.ui.serving.stream import _events
from tests.harness.ui_classes import Engine, Runs

from ..fakes.engine import PRESETS, PROMPTS, Script, ScriptedBackend, ScriptedLoaded
from ..sentences import refuses, tells
from .browser import in_a_loop_of_its_own, wait_until
from .test_messages import ask


def test_loading_is_followed_and_the_old_preset_is_freed() -> None:
    script = Script()
    engine = script.engine()
    seen = list(engine.follow("scripted"))
    assert seen[-1].stage == "ready"
    unavailable = seen[-1].unavailable or {}
    assert tells(unavailable["draft-model"], "preset model")
    assert tells(unavailable["layer-skip"], "preset layer")
    assert not {"none", "prompt-lookup", "ngram"} & set(unavailable)
    assert [status.stage for status in engine.follow("scripted")] == ["ready"]
    list(engine.follow("other"))
    assert [(load.preset.name, load.released) for load in script.loads] == [("scripted", True), ("other", False)]
    with pytest.raises(EngineTrouble):
        list(engine.stream("scripted", lambda loaded: (None for _ in "1")))


def test_a_model_that_was_saved_again_is_loaded_again(tmp_path: Path) -> None:
    script = Script()
    engine = script.engine()
    engine.add(replace(PRESETS["other"], name="own", target=Folder(tmp_path)), None)
    for text, loads in (("{}", [False]), (None, [False]), ('{"a": 1}', [True, False])):
        if text:
            (tmp_path / "config.json").write_text(text)
        *_, last = engine.follow("own")
        assert (last.stage, [load.released for load in script.loads]) == ("ready", loads)


def test_who_wants_another_preset_meanwhile_gets_it() -> None:
    script = Script()
    script.loading.clear()
    engine = script.engine()
    engine.begin_loading("scripted")
    engine.begin_loading("other")
    followed = engine.follow("other")
    assert next(followed).preset == "other"
    script.loading.set()
    *_, last = followed
    assert (last.preset, last.stage) == ("other", "ready")
    assert list(engine.stream("other", lambda loaded: (loaded.preset for _ in "1"))) == [[PRESETS["other"]]]


def test_a_load_that_nobody_wants_any_more_is_given_up() -> None:
    script = Script()
    script.loading.clear()
    engine = script.engine()
    for status in engine.follow("scripted"):
        if status.fraction is not None:
            break
    engine.begin_loading("other")
    script.loading.set()
    *_, last = engine.follow("other")
    assert (last.preset, last.stage) == ("other", "ready")
    assert [loaded.preset.name for loaded in script.loads] == ["other"]


def test_a_preset_that_is_wanted_again_after_its_load_was_given_up_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.loading.clear()
    engine = script.engine()
    giving_up, wanted_again = threading.Event(), threading.Event()

    failures = []

    def explain(error: BaseException) -> str:
        failures.append(error)
        return str(error)

    def load(preset: Any, progress: Any, instead_of: Any) -> Any:
        try:
            return script.load(preset, progress, instead_of)
        except EngineTrouble as error:
            giving_up.set()
            wanted_again.wait(30)
            raise RuntimeError("as what opens models puts it") from error

    engine.backend = ScriptedBackend(script, load)
    monkeypatch.setattr("specdemo.models.errors.explain", explain)
    for status in engine.follow("scripted"):
        if status.fraction is not None:
            break
    engine.begin_loading("other")
    script.loading.set()
    assert giving_up.wait(30)
    engine.begin_loading("scripted")
    wanted_again.set()
    *_, last = engine.follow("scripted")
    assert (last.preset, last.stage) == ("scripted", "ready")
    assert failures == []


@pytest.mark.parametrize(
    ("environment", "notes"),
    [
        ({"dtype": "float32", "engine": "eager"}, ("float32", "a computer", "transformers'")),
        ({"dtype": "float32", "weights_dtype": "float16"}, ("float32", "float16 weights", "a computer")),
        ({"dtype": "bfloat16", "weights_dtype": "bfloat16"}, ("bfloat16", "a computer")),
    ],
)
def test_what_a_preset_runs_on_is_told(environment: dict[str, str], notes: tuple[str, ...]) -> None:
    class Slow:
        missing_heads: ClassVar[dict[str, str]] = {"eagle": "its eagle head is missing"}

        def environment(self) -> dict[str, str]:
            return {"device_name": "a computer", **environment}

    shown = facts(Slow())
    assert all(tells(fact, note) for fact, note in zip(shown, (*notes, "eagle missing"), strict=True)), shown


def test_a_failed_load_is_told_and_tried_again() -> None:
    script = Script()
    script.load_failure = KeyError("secret")
    engine = script.engine()
    *_, last = engine.follow("scripted")
    assert last.stage == "failed"
    assert tells(last.words, "Something KeyError engine")
    script.load_failure = None
    *_, last = engine.follow("scripted")
    assert last.stage == "ready"


def play(engine: Engine, run: RaceRun) -> Iterator[dict[str, Any]]:
    return (json.loads(message) for message in run.play(engine))


def test_a_closed_run_ends_the_race_and_leaves_the_model_free() -> None:
    script = Script()
    script.pace = 0.05
    engine = script.engine()
    run = RaceRun(ask(max_new_tokens=50, k=2, drafter="ngram"))
    messages = run.play(engine)
    while "lanes" not in json.loads(next(messages)):
        pass
    assert script.open_races == 1
    closer = threading.Thread(target=messages.close)  # type: ignore[attr-defined]
    closer.start()
    closer.join()
    assert script.open_races == 0
    assert run.ended.is_set()
    last = json.loads(run.messages[-1])  # whoever follows it learns that it is over
    assert (last["error"], last["stopped"], last["seq"]) == ("Stopped.", True, len(run.messages) - 1)
    script.pace = 0.0
    assert list(play(engine, RaceRun(ask(max_new_tokens=3))))[-1]["end"]["stats"][PLAIN]["tokens"] == 3


def slow(words: str, reached: threading.Event, before: int = 0) -> Any:
    """A race that stands still after so many entries, as in the prefill of a long prompt on a slow machine."""

    def race(*arguments: Any) -> Iterator[Entry]:
        entries = Script().race(*arguments)
        yield from islice(entries, before)
        tell(words)
        reached.set()
        for _ in range(1000):
            time.sleep(0.01)
            check_stopped()
        yield from entries

    return race


def slow_engine(words: str, reached: threading.Event, before: int = 0) -> Engine:
    engine = Script().engine()
    engine.backend = ScriptedBackend(Script(), race=slow(words, reached, before))
    return engine


@pytest.mark.parametrize("before", [0, 1])
def test_stop_interrupts_a_prefill_and_the_next_run_works(before: int) -> None:
    reached = threading.Event()
    engine, run = slow_engine("measuring", reached, before), RaceRun(ask(max_new_tokens=20))
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(lambda: list(play(engine, run)))
        assert reached.wait(10)
        began = time.monotonic()
        run.stop.set()
        if before:  # what was written by then is shown
            assert done.result()[-1]["end"]["stopped"] is True
        else:
            with refuses(EngineTrouble, "Stopped began."):
                done.result()
    assert time.monotonic() - began < 5  # not the ten seconds of the race
    last = json.loads(run.messages[-1])
    assert last.get("stopped", before == 1)
    engine.backend = Script().engine().backend
    assert "end" in list(play(engine, RaceRun(ask(max_new_tokens=3))))[-1]


def test_what_the_engine_says_before_a_race_is_a_status_and_the_model_is_ready_again_after_it() -> None:
    reached = threading.Event()
    engine = slow_engine("measuring 7", reached)
    run = RaceRun(ask(max_new_tokens=20))
    messages = play(engine, run)
    status = next(message["status"] for message in messages if message.get("status", {}).get("stage") == "loading")
    while status["words"] != "measuring 7":  # it was loaded first
        status = next(messages).get("status", status)
    run.stop.set()
    with pytest.raises(EngineTrouble):
        list(messages)
    before_last = json.loads(run.messages[-2])["status"]
    assert (before_last["stage"], before_last["words"]) == ("ready", "Scripted 135M")

    def quick(*arguments: Any) -> Iterator[Entry]:
        tell("measuring")
        yield from Script().race(*arguments)

    engine.backend = ScriptedBackend(Script(), race=quick)
    seen = list(play(engine, RaceRun(ask(max_new_tokens=3))))
    at = next(place for place, message in enumerate(seen) if "start" in message)
    assert (seen[at - 1]["status"]["stage"], seen[at - 1]["status"]["words"]) == ("loading", "measuring")
    assert seen[at]["status"]["stage"] == "ready"


def test_stop_interrupts_a_step_of_the_lab() -> None:
    reached = threading.Event()

    class Slow(Study):
        name = "slow"

        def run(self) -> Iterator[str]:
            reached.set()
            for _ in range(1000):
                time.sleep(0.01)
                check_stopped()
            yield "too late"

        def rows(self) -> list[dict[str, Any]]:
            return []

    engine = Script().engine()
    with ThreadPoolExecutor(1) as threads:
        run = LabRun("scripted", Slow, {})
        done = threads.submit(lambda: list(run.play(engine)))
        assert reached.wait(10)
        began = time.monotonic()
        run.stop.set()
        assert tells(json.loads(done.result()[-1])["end"], "Stopped no results")
        assert time.monotonic() - began < 5


def test_who_follows_a_run_is_woken_by_every_message_and_then_forgotten() -> None:
    script = Script()
    script.pace = 0.01
    engine = script.engine()
    run = RaceRun(ask(max_new_tokens=20, k=2, drafter="ngram"))

    async def follow() -> list[str]:
        asleep = asyncio.Event()
        events: list[str] = []

        async def read() -> None:
            asyncio.get_running_loop().call_soon(asleep.set)
            async for event in _events(run, 0):
                events.append(event)

        reading = asyncio.create_task(read())
        await asleep.wait()
        assert len(run.followers) == 1
        assert not events
        await asyncio.to_thread(lambda: list(run.play(engine)))
        await asyncio.wait_for(reading, 20)
        return events

    events = in_a_loop_of_its_own(follow())
    assert events == [f"id: {place}\ndata: {message}\n\n" for place, message in enumerate(run.messages)]
    assert "end" in json.loads(run.messages[-1])
    assert not run.followers


@pytest.mark.parametrize(
    ("host", "here"),
    {"127.0.0.1": True, "::1": True, "10.0.0.1": False, "2001:db8::1": False, "testclient": False, "": False}.items(),
)
def test_a_browser_on_this_machine_is_known_by_its_address(host: str, here: bool) -> None:
    assert is_local(SimpleNamespace(host=host)) is here
    assert not is_local(None)  # which has no address


@pytest.mark.parametrize(
    ("device", "cores", "here"),
    [
        ("cpu", 2, (engine_module.SHARED_SECONDS, engine_module.OPENING_SECONDS)),
        ("cpu", 3, (engine_module.CPU_SECONDS, 0.0)),  # a core is left for the browser
        ("cpu", None, (engine_module.CPU_SECONDS, 0.0)),
        ("meta", 2, (engine_module.GPU_SECONDS, 0.0)),  # whatever computes elsewhere
    ],
)
def test_only_a_browser_on_the_engines_own_cores_is_told_more_seldom(
    device: str, cores: int | None, here: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedLoaded, "environment", lambda _: {"threads": 2, "cores": cores})
    loaded = ScriptedLoaded(PRESETS["scripted"], device=torch.device(device))
    assert pauses(loaded, local=True) == here
    assert pauses(loaded, local=False) == (engine_module.CPU_SECONDS if device == "cpu" else here[0], 0.0)


@pytest.mark.parametrize("local", [False, True])
def test_news_come_as_often_as_where_they_are_shown_allows(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "pauses", lambda _, local: (60.0 if local else 0.0, 0.0))
    script = Script()
    script.pace = 0.01
    run = RaceRun(ask(max_new_tokens=20, k=2, drafter="ngram"))
    run.local = local
    messages = list(play(script.engine(), run))
    news = [message for message in messages if "lanes" in message]
    assert len(news) == 2 if local else len(news) > 3  # the first event at once, and the rest when it has ended


@pytest.mark.parametrize("local", [False, True])
def test_the_engine_waits_once_for_a_page_on_its_own_cores_to_draw_the_first_item(
    local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = 0.5
    monkeypatch.setattr(engine_module, "pauses", lambda _, local: (0.0, opening if local else 0.0))
    engine = Script().engine()
    list(engine.follow("scripted"))
    batches = engine.stream("scripted", lambda _: clock(4), local)
    moments = [moment for batch in batches for moment in batch if not isinstance(moment, str)]
    waits = [later - earlier for earlier, later in pairwise(moments)]
    assert waits[0] >= opening if local else waits[0] < opening
    assert max(waits[1:]) < opening


def clock(count: int) -> Generator[float]:
    for _ in range(count):
        yield time.monotonic()


def test_who_stops_following_a_run_is_forgotten() -> None:
    run = RaceRun(ask())
    run.messages.append(run.message(status={}))

    async def leave() -> None:
        events = _events(run, 0)
        await anext(events)
        assert len(run.followers) == 1
        await events.aclose()

    in_a_loop_of_its_own(leave())
    assert not run.followers


def test_one_thread_loads_and_runs_every_race() -> None:
    script = Script()
    engine = script.engine()
    computing: list[int] = []
    load, race = script.load, script.race

    def seen(work: Any) -> Any:
        def working(*arguments: Any) -> Any:
            computing.append(threading.get_ident())
            return work(*arguments)

        return working

    engine.backend = ScriptedBackend(script, seen(load), seen(race))
    for preset in ("scripted", "other", "other"):
        list(play(engine, RaceRun(ask(preset=preset, max_new_tokens=3))))
    assert len(computing) == 5
    assert set(computing) == {computing[0]}
    assert computing[0] != threading.get_ident()


def test_the_engine_does_not_wait_for_whoever_looks_on() -> None:
    script = Script()
    engine = script.engine()
    messages = play(engine, RaceRun(ask(max_new_tokens=40)))
    while "lanes" not in next(messages):
        pass
    wait_until(lambda: not script.open_races)
    assert script.ended_races == 1  # though only its first event was taken
    assert list(messages)[-1]["end"]["stats"][PLAIN]["tokens"] == 40


def test_nothing_can_be_run_before_a_preset_is_loaded() -> None:
    with refuses(EngineTrouble, "loaded"):
        list(Script().engine().stream("scripted", lambda loaded: (None for _ in "1")))


def test_a_failure_is_the_last_message_and_the_next_run_works() -> None:
    script = Script()
    script.fail_at = 5
    engine = script.engine()
    run = RaceRun(ask())
    with refuses(EngineTrouble, "RuntimeError"):
        list(run.play(engine))
    assert tells(json.loads(run.messages[-1])["error"], "RuntimeError engine")
    assert [json.loads(message)["seq"] for message in run.messages] == list(range(len(run.messages)))
    assert script.open_races == 0
    script.fail_at = None
    assert "end" in list(play(engine, RaceRun(ask(max_new_tokens=3))))[-1]


def test_a_page_stops_the_runs_whose_ids_it_knows() -> None:
    build_page(Script().engine(), runs := Runs(), PROMPTS)
    made = [runs.begin(RaceRun(ask()), f"session {number}") for number in range(17)]
    assert runs.find(RaceRun, made[1].id) is made[1]
    assert runs.find(LabRun, made[1].id) is None
    halt = halting(runs)
    for run_id in (made[5].id, "no such run", None, ["a"]):
        in_a_loop_of_its_own(halt(run_id))  # type: ignore[arg-type]
    assert [run for run in made if run.stop.is_set()] == [made[5]]


# Earlier answers ---------------------------------------------------------------------------------------------


def test_a_drafter_remembers_the_earlier_answers_of_its_own_session_and_preset() -> None:
    script = Script()
    began: list[Any] = []

    def race(loaded: Any, asked: Any) -> Iterator[Entry]:
        began.append(loaded.parts.remembered)
        return script.race(loaded, asked)

    engine, runs = Engine(PRESETS, ScriptedBackend(script, race=race)), Runs()

    def answered(
        session: str, prompt: str, drafter: str = "suffix", preset: str = "scripted", weights: Any = None
    ) -> tuple[int, ...]:
        asked = ask(prompt=prompt, drafter=drafter, max_new_tokens=3, preset=preset)
        run = runs.begin(RaceRun(asked), session)
        list(runs.play(run, engine))
        assert run.outcome is not None
        (answer,) = run.answers()
        if weights:
            run.header["weights"] = weights
        return tuple(answer)

    one = answered("ann", "one two three")
    secret = answered("bob", "my secret words")
    assert began == [(), ()]
    assert not {*one} & {*secret}
    two = answered("ann", "four five", drafter="prompt-lookup")  # it remembers nothing, and is remembered
    assert began.pop() == ()
    answered("ann", "six", weights={"target": "other"})
    assert began.pop() == (one, two)
    answered("ann", "other models", preset="other")
    assert began.pop() == ()
    answered("ann", "seven")
    assert [*map(len, began.pop())] == [3, 3]  # not what other weights wrote
    answered("bob", "more words")
    assert began.pop() == (secret,)
    answered("", "without a session")
    answered("", "nor here")
    assert [began.pop(), began.pop()] == [(), ()]
