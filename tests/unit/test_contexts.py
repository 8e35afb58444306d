"""The context of a draft model: it limits the runs that the draft model drafts for, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdemo.errors import BadInput
from specdemo.models.loaded import load
from specdemo.racing.race import race, start
from specdemo.racing.request import DraftedLane
from specdemo.settings import Settings
from specdemo.studies.distributions import sampling
from specdemo.studies.domains import Domains
from specdemo.studies.greedy import greedy
from specdemo.studies.profile import Profile
from specdemo.studies.prompts import Prompt
from specdemo.studies.sweep import Sweep
from tests.harness.files import make_tokenizer
from tests.harness.models import preset_of, save, tiny
from tools.bench.throughput import read

from ..conftest import Command
from ..sentences import refuses, tells
from .test_models import text_of

SHORT = 48  # tokens that the draft model reads; the target reads 256


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The folders of a target and its draft model, by the family of the latter."""
    folder, tokenizer = tmp_path_factory.mktemp("pairs"), make_tokenizer()
    target = save(tiny("llama", len(tokenizer)), tokenizer, folder / "target")
    drafts = {
        kind: {"n_positions" if kind == "gpt2" else "max_position_embeddings": SHORT} for kind in ("llama", "gpt2")
    }
    return {
        kind: (target, save(tiny(kind, len(tokenizer), seed=3, **more), tokenizer, folder / f"short-{kind}"))
        for kind, more in drafts.items()
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_short_draft_model_drafts_to_the_end_of_its_context(pairs: dict[str, tuple[Path, Path]], kind: str) -> None:
    """Also trees, whose passes have more tokens than the context has left."""
    loaded = load(preset_of(*pairs[kind]), "float32", "cpu")
    loaded.eos_ids = frozenset()
    fitting = SHORT - len(loaded.encode("the cat sat"))
    plain = text_of(loaded, "none", max_new_tokens=fitting)
    assert len(plain) == fitting
    for drafts in ({"k": 4}, {"k": "auto"}, {"k": 8, "tree": True}, {"k": 63, "tree": True}):
        assert text_of(loaded, "draft-model", max_new_tokens=fitting, **drafts) == plain
    loaded.release()


def test_a_short_draft_model_limits_the_drafter_draft_model_alone(
    pairs: dict[str, tuple[Path, Path]], command: Command
) -> None:
    target, draft = pairs["llama"]
    loaded = load(preset_of(target, draft), "float32", "cpu")
    ids, prompts = loaded.encode("the cat sat"), [Prompt("one", "test", "the cat sat")]
    longer, asked = Settings(max_new_tokens=60), {"prompts": prompts, "max_new_tokens": 60}
    timed = {"prompt": "the cat sat", "k": 4, "repeats": 1, "max_new_tokens": 60}
    swept = {**asked, "drafters": ["draft-model"], "ks": [4], "temperatures": [0.0], "seeds": 1}
    assert text_of(loaded, "prompt-lookup", max_new_tokens=60) == text_of(loaded, "none", max_new_tokens=60)
    runs = (  # whoever asks for one: the page and its API, the command line, the studies and the benches
        lambda: start(loaded, "draft-model", ids, longer),
        lambda: next(race(loaded, "prompt-lookup", ids, longer, more=[DraftedLane("draft-model", 4)])),
        lambda: next(greedy(loaded, prompts, ["draft-model"], longer)),
        lambda: next(Domains(loaded, {**asked, "drafter": "draft-model"}).run()),
        lambda: next(sampling(loaded, "draft-model", ids * 2, Settings(temperature=1.0))),
        lambda: next(Sweep(loaded, swept).run()),
        lambda: Profile(loaded, {**timed, "drafters": ["draft-model"]}),
        lambda: read(loaded, prompts[0], 60, "draft-model"),
    )
    for run in runs:
        with refuses(BadInput, "short-llama 48."):
            run()
    study = Profile(loaded, {**timed, "drafters": ["prompt-lookup"]})
    assert {case.get("model", case.get("drafter")) for case in study.cases} == {"target", "prompt-lookup"}
    loaded.release()
    named = ["race", "--target", str(target), "--draft", str(draft), "--prompt", "the cat", "-k", "2"]
    assert command(*named, "--drafter", "prompt-lookup", "--max-new-tokens", "60")[0] == 0
    status, _, err = command(*named, "--max-new-tokens", "60")
    assert status == 2
    assert tells(err.splitlines()[-1], f"60 {draft} {SHORT}.")
