"""A published head of the hub, which a folder stands in for: a pickle, as many are, fetched once and then kept."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from . import published
from .test_hub import COMMIT, asking, serving

ASK = """
import json, sys
from specdemo.models.presets import Hub, Preset
from specdemo.models.published_heads import fetch_heads, head_format
from types import SimpleNamespace
text = SimpleNamespace(vocab_size=61, hidden_size=32, num_hidden_layers=6, model_type="llama", rms_norm_eps=1e-5)
target = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
for repo in map(str.strip, sys.stdin):
    stages = []
    try:
        found = head_format(repo)
        preset = Preset("toy", "Toy", "Toy.", Hub("owner/target"), heads={found.kind: Hub(repo)})
        heads, _ = fetch_heads(preset, target, lambda *stage: stages.append(stage))
        folder = heads[found.kind]
        answer = [found.name, folder.name, sorted(file.name for file in folder.iterdir())]
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps([answer, stages, 0]), flush=True)
"""


MISSING = """
import json, sys
from specdemo.models.presets import Hub, Preset
from specdemo.models.published_heads import fetch_heads
from types import SimpleNamespace
text = SimpleNamespace(vocab_size=61, hidden_size=32, num_hidden_layers=6, model_type="llama", rms_norm_eps=1e-5)
target = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
for pair in map(str.split, sys.stdin):
    present, absent = map(Hub, pair)
    preset = Preset("toy", "Toy", "Toy.", Hub("owner/target"), heads={"block": absent, "eagle": present})
    heads, missing = fetch_heads(preset, target, lambda *stage: None)
    print(json.dumps([sorted(heads), [*missing.values()], 0]), flush=True)
"""


def test_a_head_of_the_hub_is_fetched_once(tmp_path: Path) -> None:
    expected = ["EAGLE-3", COMMIT, ["config.json", "pytorch_model.bin"]]
    head = published.write(tmp_path / "head", *published.eagle3(61), pickle=True)
    with ExitStack() as running:
        with serving(head) as url:
            ask = running.enter_context(asking(url, tmp_path / "home", ASK))
            (fetched, stages, _), (absent, _, _) = ask("someone/tiny"), ask("someone/absent")
        assert fetched == expected
        assert [fraction for fraction, words in stages if words.startswith("downloading")][-1:] == [1.0]
        assert absent.startswith("LoadError: There is no model someone/absent on the hub")
        kept, stages, _ = ask("someone/tiny")  # while nobody listens any more
        assert kept == expected
        assert not any("downloading" in words for _, words in stages)


def test_heads_that_the_hub_does_not_have_are_named_and_the_others_fetched(tmp_path: Path) -> None:
    head = published.write(tmp_path / "head", *published.eagle3(61), pickle=True)
    with serving(head) as url, asking(url, tmp_path / "home", MISSING) as ask:
        heads, (sentence,), _ = ask("someone/tiny someone/absent")
    assert heads == ["eagle"]
    assert sentence.startswith(
        "its block head someone/absent is missing: there is no model someone/absent on the hub, or it is private"
    )
