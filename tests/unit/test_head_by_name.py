"""A head of others by its name: on the command line, in a preset, and in a preset that was saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdemo.decoding.acceptance import branches
from specdemo.decoding.events import Round, emitted_tokens
from specdemo.drafters.names import DRAFTERS
from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.models.presets import Defaults, Preset, find_preset, load_presets, preset_of, with_head
from specdemo.models.published_heads import head_format
from specdemo.models.report import report_on, save_preset
from specdemo.models.sources import Folder, Hub
from specdemo.racing.race import race, start
from specdemo.racing.request import DraftedLane, Request, fitted
from specdemo.racing.summary import summary
from specdemo.racing.trace import read_trace, trace_lines
from specdemo.settings import AUTO, Settings
from specdemo.tokens import TokenKind
from specdemo.ui.facts import facts
from tests.conftest import Command
from tests.harness.classes import EagerRunner, Loaded
from tests.harness.files import make_tokenizer
from tests.harness.models import save, tiny

from ..fakes import published
from ..fakes.published import write
from ..sentences import refuses, tells


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    model = tiny("llama", len(tokenizer), num_hidden_layers=6)
    return save(model, tokenizer, tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def heads(target: Path, tmp_path: Path) -> dict[str, Path]:
    """A head of each kind for the target; that of the library names it."""
    vocab = len(make_tokenizer())
    config, tensors = published.library_eagle3(vocab)
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    eagle = write(tmp_path / "eagle", config, tensors)
    others = {"block": published.dflash, "medusa": published.medusa, "p-eagle": published.peagle}
    return {"eagle": eagle, **{kind: write(tmp_path / kind, *make(vocab)) for kind, make in others.items()}}


def preset_in(folder: Path, target: Path, *lines: str) -> Preset:
    """A preset whose file, in that folder, has these lines besides what every preset needs."""
    stated = 'title = "T"', 'description = "D"', f'target.path = "{target}"'
    (folder / "mine.toml").write_text("\n".join((*stated, *lines)))
    return find_preset("mine", folder)


def tokens_of(loaded: Loaded, drafter: str, temperature: float) -> list[Any]:
    ids = loaded.encode("the cat sat on the mat", raw=True)
    run = start(loaded, drafter, ids, Settings(k=3, max_new_tokens=24, temperature=temperature))
    return [token for event in run for token in emitted_tokens(event)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_preset_loads_heads_of_others_and_drafts_with_them(
    target: Path, heads: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    kept = (f'heads.{kind}.path = "{kind}"' for kind in ("eagle", "medusa", "p-eagle"))
    paths = f'heads.block.path = "{heads["block"]}"', *kept
    loaded = load(preset_in(tmp_path, target, *paths), dtype, "cpu")
    assert (loaded.parts.head_files, loaded.parts.missing_heads) == (heads, {})
    for temperature in (0.0, 0.7):
        alone = [token.id for token in tokens_of(loaded, "none", temperature)]
        for drafter in ("eagle", "block", "medusa", "p-eagle", "lookup-eagle"):
            tokens = tokens_of(loaded, drafter, temperature)
            assert [token.id for token in tokens] == alone
            assert {token.kind for token in tokens} != {TokenKind.TARGET}
    loaded.release()


def test_a_head_goes_with_a_preset_or_names_its_target(
    command: Command, target: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    asked = "--prompt", "the cat", "--raw", "--max-new-tokens", "6", "-k", "3", "--json", "--dtype", "float32"
    texts = []
    for given in (("--target", str(target)), ("--head", str(heads["eagle"]))):
        status, out, messages = command("generate", *given, *asked)
        assert status == 0, messages
        texts.append(json.loads(out))
    assert texts[0]["text"] == texts[1]["text"]
    assert texts[1]["stats"]["drafted"] > 0
    assert tells(messages, f"{heads['eagle']}: nothing")
    assert tells(messages, f"speculators eagle3, eagle, {target}.")
    status, _, messages = command("generate", "--head", str(heads["block"]), *asked)
    assert status == 2
    assert tells(messages, f"{heads['block']} --target.")
    status, _, messages = command("generate", "--preset", "smollm2-135m", "--head", str(target), *asked)
    assert status == 2
    assert tells(messages, f"{target} no")
    status, _, messages = command("generate", "--head", "some/where.gguf", *asked)
    assert status == 2


def test_a_head_is_part_of_a_presets_name_and_of_a_saved_one(
    target: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    preset = with_head(preset_of(str(target)), "eagle", str(heads["eagle"]))
    assert find_preset(preset.name) == preset
    assert preset.heads == {"eagle": Folder(heads["eagle"])}
    both = with_head(find_preset("qwen3-4b"), "block", "owner/name@v1")
    assert find_preset(both.name) == both
    assert both.heads == {**find_preset("qwen3-4b").heads, "block": Hub("owner/name", "v1")}
    assert (both.defaults.drafter, both.results) == ("block", None)
    two = with_head(preset, "block", "owner/name")
    assert find_preset(two.name) == two
    with refuses(BadInput, "'a with the head b'"):
        find_preset("a with the head b")
    assert (preset.defaults.tree, both.defaults.tree) == (True, False)  # an eagle head drafts trees
    save_preset(preset, "kept", tmp_path)
    presets, broken = load_presets(tmp_path)
    assert not broken
    assert (presets["kept"].heads, presets["kept"].defaults) == (preset.heads, preset.defaults)
    (tmp_path / "x.gguf").touch()
    with refuses(BadInput, "x.gguf"):
        with_head(preset, "eagle", str(tmp_path / "x.gguf"))


def test_a_wrong_head_is_refused_before_the_weights_are_fetched(
    target: Path, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any) -> Any:
        raise AssertionError("too early")

    monkeypatch.setattr("specdemo.models.loaded.fetch_weights", fetch)
    base = preset_of(str(target))
    with refuses(BadInput, "DFlash, block eagle"):
        load(with_head(base, "eagle", str(heads["block"])), "float32", "cpu")
    config = json.loads((heads["block"] / "config.json").read_text()) | {"vocab_size": 5}
    (heads["block"] / "config.json").write_text(json.dumps(config))
    with refuses(BadInput, "5 32"):
        load(with_head(base, "block", str(heads["block"])), "float32", "cpu")


def test_a_preset_does_without_a_head_that_is_missing_and_says_why(
    command: Command, target: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = published.eagle3(len(make_tokenizer()))
    damaged = write(tmp_path / "damaged", config, {name: tensors[name] for name in tensors if name != "norm.weight"})
    paths = 'heads.eagle.path = "damaged"', 'heads.block.path = "block"', 'heads.medusa.path = "nowhere"'
    preset = preset_in(tmp_path, target, *paths, 'defaults.drafter = "block"')
    loaded = load(preset, "float32", "cpu")
    assert loaded.missing_heads.keys() == {"eagle", "medusa"}
    lacking, absent = (loaded.missing_heads[kind] for kind in ("eagle", "medusa"))
    assert tells(lacking, f"eagle {damaged} norm.weight [32]")
    assert tells(absent, f"medusa {tmp_path / 'nowhere'} config.json")
    assert loaded.parts.head_files == {"block": heads["block"]}
    assert lacking in facts(loaded)
    for drafter in ("block", "prompt-lookup"):
        assert tokens_of(loaded, drafter, 0.0)
    for drafter in ("eagle", "lookup-eagle"):
        with refuses(BadInput, "eagle lacks"):
            tokens_of(loaded, drafter, 0.0)
    loaded.release()
    monkeypatch.setattr("specdemo.cli.models.find_preset", lambda name: preset)
    status, _, messages = command(
        "generate", "--preset", "mine", "--prompt", "the cat", "--raw", "--max-new-tokens", "3"
    )
    assert status == 0, messages
    assert tells(messages, "mine")
    assert lacking in messages
    asked = with_head(preset, "eagle", str(damaged))
    with refuses(BadInput, "damaged norm.weight [32]."):
        load(asked, "float32", "cpu")


def test_heads_of_several_kinds_for_one_target_race_as_lanes(
    command: Command, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset has an EAGLE-3, a DFlash, a DSpark and a DFlash 2 head. Three lanes at most race the target alone."""
    published_by = {
        "eagle": published.deepspec_eagle3,
        "block": published.deepspec_dflash,
        "dspark": published.dspark,
        "dflash2": published.library_dflash2,
    }
    for name, make in published_by.items():
        write(tmp_path / name, *make(len(make_tokenizer())))
    preset = preset_in(tmp_path, target, *(f'heads.{name}.path = "{name}"' for name in published_by))
    assert [*preset.heads] == [*published_by]
    loaded = load(preset, "float32", "cpu")
    formats = "EAGLE-3 of DeepSpec", "DFlash of DeepSpec", "DSpark", "speculators dflash2"
    assert (tuple(loaded.head_formats.values()), loaded.missing_heads) == (formats, {})
    loaded.release()
    monkeypatch.setattr("specdemo.cli.models.find_preset", lambda name: preset)
    asked = "--prompt", "the cat", "--raw", "--max-new-tokens", "20", "--temperature", "0.8", "--dtype", "float32"
    for names in (("eagle", "block", "dspark"), ("block", "dspark", "dflash2")):
        lanes = [f"{name}:4" for name in names]
        words = [word for lane in lanes for word in ("--lane", lane)]
        status, out, messages = command("race", "--preset", "mine", *asked, *words, "--json")
        assert status == 0, messages
        outcome = json.loads(out)
        texts = {lane: outcome[lane]["text"] for lane in ("plain", *lanes)}
        assert len({*texts.values()}) == 1
        drafted = {lane: outcome[lane]["stats"]["drafted"] for lane in lanes}
        assert all(count > 20 for count in drafted.values()), drafted
        assert len({outcome[lane]["stats"]["accepted"] for lane in lanes}) > 1  # each has a head of its own


def test_trees_of_a_preset_are_a_default_and_no_condition(
    command: Command, target: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = 'defaults.drafter = "eagle"', "defaults.k = 6", "defaults.tree = true"
    preset = preset_in(tmp_path, target, 'heads.eagle.path = "eagle"', *defaults)
    monkeypatch.setattr("specdemo.cli.models.find_preset", lambda name: preset)
    out = tmp_path / "race.jsonl"

    def trees(*more: str) -> tuple[bool, bool, str]:
        words = "--preset", "mine", "--prompt", "the cat", "--raw", "--max-new-tokens", "20", "--dtype", "float32"
        status, _, messages = command("record", *words, "--out", str(out), *more)
        assert status == 0, messages
        header, entries = read_trace(trace_lines(out))
        drafts = [entry.event.drafted for entry in entries if isinstance(entry.event, Round)]
        return header["settings"]["tree"], any(map(branches, drafts)), messages

    assert trees()[:2] == (True, True)
    assert trees("--chain")[:2] == (False, False)
    monkeypatch.setattr(EagerRunner, "cannot_branch", "it is too old")
    tree, branched, messages = trees("--eager")
    assert (tree, branched, tells(messages, "chains old.")) == (False, False, True)
    refused = command("race", "--preset", "mine", "--prompt", "the cat", "--raw", "--eager", "--tree")
    assert (refused[0], tells(refused[2], "Draft checked")) == (2, True)


def test_trees_are_left_out_only_where_the_preset_began_with_them(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DRAFTERS, "lookahead", DRAFTERS["lookahead"]._replace(branches=False))
    preset = replace(preset_of(str(target)), defaults=Defaults(tree=True))
    loaded = load(preset, "float32", "cpu")
    asked = Request("the cat", preset.name, "lookahead", Settings(k=3, tree=True), raw=True)
    request, note = fitted(asked, loaded)
    assert request.settings == replace(asked.settings, tree=False)
    assert tells(note, "lookahead chains")
    twice = replace(asked, more=(DraftedLane("lookahead", 3), DraftedLane("ngram", 2)))
    assert fitted(twice, loaded)[0].more == (DraftedLane("ngram", 2),)
    for other in (
        replace(asked, drafter="prompt-lookup"),
        replace(asked, drafter="none"),
        replace(asked, settings=replace(asked.settings, k=40)),
        replace(asked, settings=replace(asked.settings, tree=False)),
    ):
        assert fitted(other, loaded) == (other, "")
    loaded.preset = replace(preset, defaults=Defaults())
    assert fitted(asked, loaded) == (asked, "")
    loaded.release()


@pytest.mark.parametrize("k", [4, AUTO])
def test_the_summary_of_a_race_doubts_a_head_that_is_always_wrong(
    target: Path, heads: dict[str, Path], k: int | str
) -> None:
    loaded = load(with_head(preset_of(str(target)), "eagle", str(heads["eagle"])), "float32", "cpu")
    ids, settings = loaded.encode("the cat sat on the mat", raw=True), Settings(k=k, max_new_tokens=60)
    more = (DraftedLane("prompt-lookup", 2),)
    for others in ((), more):
        asked = Request("", "", "eagle", settings, more=others).drafted
        entries = list(race(loaded, "eagle", ids, settings, more=others))
        outcome = summary(loaded, ids, settings, entries, asked)
        assert outcome["sentence"].count("speculators eagle3") == 1
        assert tells(outcome["verdicts"][next(iter(asked))]["sentence"], "speculators eagle3 65% 85%")
    loaded.release()


def test_the_report_counts_the_memory_of_a_head(target: Path, heads: dict[str, Path]) -> None:
    preset: Preset = preset_of(str(target))
    both = preset, with_head(preset, "block", str(heads["block"]))
    alone, with_it = ([*report_on(one, "float32", "cpu")] for one in both)
    megabytes = [float(lines[-1].partition(" MB")[0].split()[-1]) for lines in (alone, with_it)]
    size = (heads["block"] / "model.safetensors").stat().st_size / 1e6
    assert megabytes[1] - megabytes[0] == pytest.approx(size, abs=0.1)
    assert any(tells(line, "DFlash, block.") for line in with_it)
    assert head_format(str(heads["block"])).target is None
