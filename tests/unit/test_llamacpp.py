"""llama.cpp beside us: an answer as it was recorded, a server of a few lines, and the real one if it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import torch

from specdemo.decoding.events import emitted_tokens
from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.models.presets import DEFAULT_PRESET, find_preset
from specdemo.models.presets import preset_of as by_name
from specdemo.models.sources import Wheel
from specdemo.racing.race import start
from specdemo.servers import llamacpp_process
from specdemo.servers.address import Address
from specdemo.servers.client import Client
from specdemo.servers.llamacpp import LlamaCpp
from specdemo.servers.llamacpp_process import PYTHON, can_start
from specdemo.settings import AUTO, Settings
from specdemo.studies.greedy import against_server, differences_in_words, in_words
from specdemo.studies.perplexity import logits_of, loss_of, losses_of_llamacpp
from specdemo.studies.prompts import Prompt
from tests.harness.classes import Loaded
from tests.harness.files import write_gguf
from tools.bench import llamacpp
from tools.bench.cases import ALONE, DRAFTING, LLAMA, NGRAM, Case, cases_of_theirs, named_commands, theirs
from tools.bench.llamacpp import answered, served
from tools.bench.throughput import bench

from ..fakes.server import FakeServer, json_answer, llamacpp_answers, serving
from ..sentences import refuses, tells

ALONE_AND_NGRAMS = [Case(LLAMA), *(Case(NGRAM, f"ngram-simple {size}", 8) for size in (3, 5))]
NEEDS_LLAMACPP = pytest.mark.skipif(not can_start(), reason="there is no xllamacpp")

ANSWER = {
    "tokens": [*range(128)],
    "stop_type": "limit",
    "timings": {
        **{"cache_n": 0, "prompt_n": 43, "prompt_ms": 891.69, "predicted_n": 128, "predicted_ms": 8995.782},
        **{"draft_n": 48, "draft_n_accepted": 23},
    },
}
"""As xllamacpp 2026.10.11549 answered with ngram-simple, shortened."""


def test_a_run_from_a_recorded_answer() -> None:
    run = answered(ANSWER)
    assert [run[name] for name in ("new_tokens", "prompt_seconds", "seconds")] == pytest.approx(
        [128, 0.89169, 9.887472]
    )
    assert run["tokens_per_second"] == pytest.approx(127 / 8.995782)  # the server's own predicted_per_second
    assert (run["drafted"], run["accepted"], run["tested"]) == (48, 23, None)
    assert run["rounds"] == 127 - 23  # a round emits what passed and one more
    plain = answered({**ANSWER, "timings": {"prompt_ms": 1, "predicted_n": 1, "predicted_ms": 0.0}, "tokens": [7]})
    assert (plain["tokens_per_second"], plain["rounds"], plain["drafted"]) == (None, 0, 0)


@pytest.mark.parametrize("answer", [{}, {"timings": {}}, {"timings": None, "tokens": []}, {**ANSWER, "tokens": None}])
def test_an_answer_without_timings_is_refused(answer: dict[str, Any]) -> None:
    with refuses(BadInput, "llama.cpp old"):
        answered(answer)


@pytest.fixture
def fake(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server of the loaded model, which is started in the place of llama.cpp's."""
    content = loaded.tokenizer.decode(loaded.encode("The same tokens?"), clean_up_tokenization_spaces=False)
    answers = llamacpp_answers(json_answer(ANSWER)) | {"/detokenize": json_answer({"content": content})}
    with serving(answers) as (server, address):
        monkeypatch.setattr(llamacpp, "_asked", lambda *_: {})
        monkeypatch.setattr(llamacpp, "started", lambda asked: nullcontext((address, "b2")))
        yield server


def test_a_server_takes_part_and_gets_our_token_ids(loaded: Loaded, fake: FakeServer) -> None:
    assert theirs(f"hf, {LLAMA}") == ["hf", LLAMA]
    cases, prompt = [Case("hf"), Case(LLAMA), ALONE], Prompt("a", "easy", "the cat sat")
    with llamacpp.servers(loaded, cases, 64, print) as servers:
        assert servers[Case(LLAMA)].facts == {"version": "b2", "model": "toy.gguf"}
        outcome = bench(loaded, [prompt], cases, [0.0, 0.8], 4, 1, servers=servers)
    rows = [row for row in outcome["summary"] if row["method"] == LLAMA and row["category"] == "all"]
    assert rows[0]["tokens_per_second"].mean == pytest.approx(127 / 8.995782)
    assert rows[0]["ratio_to"]["plain"].count == 1
    asked = [json.loads(body) for path, _, body in fake.asked if path == "/completion"]
    assert all(body["prompt"] == loaded.encode("the cat sat") for body in asked)
    assert all((body["n_predict"], body["cache_prompt"]) == (4, False) for body in asked)
    assert [body["temperature"] for body in asked] == [0.0, 0.8] * 2
    assert asked[-1]["samplers"] == ["top_k", "top_p", "temperature"]


def test_a_server_of_another_model_is_refused(loaded: Loaded, fake: FakeServer) -> None:
    fake.answers = {**fake.answers, "/detokenize": json_answer({"content": "something else"})}
    with refuses(BadInput, "toy.gguf, toy"), llamacpp.servers(loaded, [Case(LLAMA)], 64, print):
        pass


def test_what_is_missing_is_told(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"target": {"gguf_sha256": "0" * 64}, "draft_model": None}
    shipped, methods = replace(loaded, preset=find_preset(DEFAULT_PRESET), weights=weights), [LLAMA]
    monkeypatch.setattr(llamacpp_process, "find_spec", lambda name: None)
    monkeypatch.delenv(PYTHON, raising=False)
    assert cases_of_theirs(loaded, methods, [AUTO]) == cases_of_theirs(shipped, methods, [AUTO]) == []
    toy, ours = capsys.readouterr().err.splitlines()
    assert tells(toy, "llama.cpp GGUF")
    assert tells(ours, "xllamacpp installed")
    monkeypatch.setenv(PYTHON, "/some/python")
    assert cases_of_theirs(shipped, methods, [AUTO]) == ALONE_AND_NGRAMS
    pair = replace(shipped, weights=dict.fromkeys(weights, weights["target"]))
    assert cases_of_theirs(pair, methods, [AUTO]) == [*ALONE_AND_NGRAMS, Case(DRAFTING, "draft-model", 4)]
    assert capsys.readouterr().err == ""


def test_a_server_that_does_not_start_is_told(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself stands in for the other Python: it has no such package, or the file is no model."""
    monkeypatch.setattr(Wheel, "gguf_path", lambda wheel, progress: "/no/such/file")
    monkeypatch.delenv(PYTHON, raising=False)
    shipped = replace(loaded, preset=find_preset(DEFAULT_PRESET))
    with refuses(BadInput, "start"), llamacpp.servers(shipped, [Case(LLAMA)], 64, print):
        pass


def test_a_server_of_a_command_runs_until_the_end_of_the_block() -> None:
    serve = (
        "import http.server as h, sys\n"
        "def answer(self): self.send_response(200); self.end_headers()\n"
        "handler = type('Handler', (h.BaseHTTPRequestHandler,), {'do_GET': answer})\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), handler).serve_forever()"
    )
    with served(["sh", "-c", f'"{sys.executable}" -c "$0" "$@"; true', serve, "-m", "a.gguf"], 64) as address:
        assert httpx.get(address).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no such model')"], "start model"),
        (["/no/such/program"], "/no/such/program started"),
    ],
)
def test_a_command_that_starts_no_server_is_refused(command: list[str], words: str) -> None:
    with refuses(BadInput, words), served(command, 64):
        pass


def test_servers_are_given_by_name_and_command() -> None:
    command = "llama-server -m {target} -md {draft_model}"
    assert named_commands([f" fast = {command}"]) == {
        Case("fast"): ["llama-server", "-m", "{target}", "-md", "{draft_model}"]
    }
    for text in ("llama-server -m {target}", "fast=llama-server", "=llama-server -m {target}"):
        with refuses(BadInput, "NAME=COMMAND {target}"):
            named_commands([text])
    with refuses(BadInput, "fast read"):
        named_commands(['fast=llama-server -m "{target}'])


@pytest.mark.parametrize(
    ("names", "methods", "taken"),
    [(["plain"], [], "plain"), (["hf"], [], "hf"), (["a", "a"], [], "a"), ([LLAMA], [LLAMA], LLAMA)],
)
def test_a_server_has_a_name_of_its_own(names: list[str], methods: list[str], taken: str) -> None:
    with refuses(BadInput, f"{taken} taken"):
        named_commands([f"{name}=server {{target}}" for name in names], methods)
    assert named_commands([f"{LLAMA}=server {{target}}"], ["hf"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A GGUF file that drafts for itself, as `--target` and `--draft` name it."""
    folder = tmp_path_factory.mktemp("pair")
    write_gguf(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEMO_CACHE", str(folder / "cache"))
        loaded = load(by_name(str(folder / "tiny.gguf"), str(folder / "tiny.gguf")), "float32", "cpu")
    yield loaded
    loaded.release()


def test_a_pair_of_gguf_files_given_by_name_runs_plain_with_ngrams_and_with_the_draft_model(
    pair: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, "/some/python")
    cases = cases_of_theirs(pair, [LLAMA], [2, 6, AUTO])
    assert cases == [*ALONE_AND_NGRAMS, *(Case(DRAFTING, "draft-model", k) for k in (2, 6))]
    served: list[dict[str, Any]] = []

    def refuse(asked: dict[str, Any]) -> None:
        served.append(asked)
        raise BadInput("enough")

    monkeypatch.setattr(llamacpp, "started", refuse)
    for case in cases:
        with refuses(BadInput, "enough"), llamacpp.servers(pair, [case], 64, print):
            pass
    file = str(pair.preset.target)
    told = [(asked["gguf"], asked["draft_gguf"], asked["ngram"], asked["k"], asked["context"]) for asked in served]
    assert told == [
        *((file, None, None, None, 64), (file, None, 3, 8, 64), (file, None, 5, 8, 64)),
        *((file, file, None, 2, 64), (file, file, None, 6, 64)),
    ]


@NEEDS_LLAMACPP
def test_the_real_server_writes_the_same_text_alone_and_with_its_own_speculation(pair: Loaded) -> None:
    """The target drafts for itself, so nothing that it drafts is rejected."""
    cases = [Case(LLAMA), Case(DRAFTING, "draft-model", 3), Case(NGRAM, "ngram-simple 3", 8)]
    with llamacpp.servers(pair, cases, 64, print) as servers:
        runs = [servers[case].generate(pair.encode("the cat sat"), Settings(max_new_tokens=16)) for case in cases]
    plain, drafted, looked_up = runs
    assert plain["token_ids"] == drafted["token_ids"] == looked_up["token_ids"]
    assert (plain["drafted"], plain["rounds"]) == (0, plain["new_tokens"] - 1)
    assert drafted["drafted"] >= drafted["accepted"] > 0
    assert looked_up["drafted"] >= looked_up["accepted"]
    assert drafted["rounds"] < plain["rounds"]
    assert all(run["new_tokens"] == len(run["token_ids"]) <= 16 for run in runs)
    assert all(0 < run["prompt_seconds"] < run["seconds"] for run in runs)


@NEEDS_LLAMACPP
def test_where_a_server_of_the_same_file_parts_from_us_two_tokens_nearly_tie(pair: Loaded) -> None:
    prompts = [Prompt(f"p{number}", "kind", text) for number, text in enumerate(("the cat sat", "a b c", "on the mat"))]
    with llamacpp.servers(pair, [Case(LLAMA)], 64, print) as servers:
        checks = list(against_server(pair, servers[Case(LLAMA)].dialect, prompts, 24))
    assert [check["prompt_id"] for check in checks] == ["p0", "p1", "p2"]
    for check in checks:
        assert check["text"] == "llama.cpp"
        assert check["tokens"] > 0
        if not check["identical"]:
            assert check["near_tie"]
            assert check["server_margin"] is not None
    parted = [check for check in checks if not check["identical"]]
    assert len(differences_in_words(checks)) == len(parted)
    assert in_words(checks)[0].startswith(f"llama.cpp: {3 - len(parted)} of 3 texts ")


LISTS_TABLES_AND_CODE = [
    "Continue the list:\n  10\n  20\n  30\n",
    "Sort these numbers:\n\n  42\n  7\n  19",
    "x = [\n    1,\n    2,\n]\nWhat is x?",
    "Complete the table:\n\n| n | n * n |\n|---|---|\n| 1 |  1 |\n| 2 |  4 |\n",
    "Explain this code:\n\nfor i in range(3):\n    print(i,  2 * i)",
    "1.  One\n2.  Two\n3.  Three\nWrite the next two lines.",
    "What does this print?\n\ndef f():\n    return  5\nprint(f())",
    'Fix the JSON:\n{\n    "a":  1,\n    "b":  2,\n}',
    "Add the columns:\n  12   30\n  15   45",
    "Write a list of five prime numbers:\n\n  2\n  3\n",
]


@NEEDS_LLAMACPP
@pytest.mark.servers
@pytest.mark.real
def test_lists_tables_and_code_of_the_default_preset_go_on_as_llama_cpp_writes_them() -> None:
    """It rounds what weights are multiplied with to 8 bits, which decides between tokens that nearly tie."""
    loaded = load(find_preset("smollm2-135m"), "float32", "cpu")
    prompts = [Prompt(str(number), "kind", text) for number, text in enumerate(LISTS_TABLES_AND_CODE)]
    with llamacpp.servers(loaded, [Case(LLAMA)], 256, print) as servers:
        checks = list(against_server(loaded, servers[Case(LLAMA)].dialect, prompts, 48))
    assert all(check["identical"] or (check["margin"] or 0) < 0.1 for check in checks)
    assert sum(check["identical"] for check in checks) > 5
    loaded.release()


@NEEDS_LLAMACPP
def test_the_real_server_tells_the_same_loss_of_a_text_even_of_unlikely_tokens(pair: Loaded) -> None:
    texts = [pair.encode(text, raw=True) for text in ("the cat sat on the mat", "sat mat the")]
    ours = [loss_of(logits_of(pair.target_runner, ids), ids) for ids in texts]
    theirs = [*losses_of_llamacpp(pair, texts)]
    assert [run["tokens"] for run in theirs] == [len(ids) - 1 for ids in texts]
    losses = [[run["loss"] for run in runs] for runs in (ours, theirs)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # its cache holds 16 bits


def test_the_loss_of_a_text_is_that_of_tokens_that_are_forced_one_by_one() -> None:
    answer = {"completion_probabilities": [{"id": 7, "logprob": -0.5}]}
    with serving(llamacpp_answers(json_answer(answer))) as (server, address), Client(Address.read(address)) as client:
        assert LlamaCpp(client).loss([5, 7, 7]) == 1.0
        bodies = [json.loads(body) for path, _, body in server.asked if path == "/completion"]
        assert [(body["prompt"], body["logit_bias"][0][0], body["n_predict"]) for body in bodies] == [
            ([5], 7, 1),
            ([5, 7], 7, 1),
        ]
        with refuses(BadInput, "emits"):
            LlamaCpp(client).loss([5, 6])
        server.answers = llamacpp_answers(json_answer({"completion_probabilities": [{"id": 7, "logprob": -3.4e38}]}))
        with refuses(BadInput, "probability"):
            LlamaCpp(client).loss([5, 7])


def test_what_rounding_does_not_explain_is_told(pair: Loaded) -> None:
    """A server that writes another token than the likeliest from the fourth on."""
    prompt = Prompt("p0", "kind", "the cat sat")
    truth = [
        token.id
        for event in start(pair, "none", pair.encode(prompt.prompt), Settings(0, max_new_tokens=8))
        for token in emitted_tokens(event)
    ]
    worst = int(pair.model(torch.tensor([[*pair.encode(prompt.prompt), *truth[:3]]])).logits[0, -1].argmin())

    class Other:
        """As much of a `Dialect` as the check asks for."""

        client = SimpleNamespace(address="here")
        facts: ClassVar[dict[str, str]] = {"engine": "llama.cpp", "model": "other.gguf"}

        def text_of(self, ids: Sequence[int]) -> str:
            return str(pair.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        def logprobs(self, prompt: Any, ids: Sequence[int]) -> dict[int, float]:
            assert [*ids] == truth[:3]
            return {worst: -0.5, truth[3]: -3.0}

        def written(self, prompt: Any, max_new_tokens: int) -> list[int]:
            return [*truth[:3], worst, *truth[4:]]

    (check,) = against_server(pair, Other(), [prompt], 8)  # type: ignore[arg-type]
    assert (check["identical"], check["first_difference"], check["near_tie"], check["server_margin"]) == (
        False,
        3,
        False,
        2.5,
    )
    assert tells(in_words([check])[0], "1 explanation")
    assert tells(differences_in_words([check])[0], "p0 4")
    Other.text_of = lambda self, ids: "else"  # type: ignore[method-assign]
    with refuses(BadInput, "here other.gguf,"):
        list(against_server(pair, Other(), [prompt], 8))  # type: ignore[arg-type]
