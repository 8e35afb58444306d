"""Memory of weights: huge pages, how tightly tensors lie in them, and that memory is given back; what a load takes."""

from __future__ import annotations

import mmap
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from specdemo.engines.cpu.huge_pages import CHUNK, LINE, HugePages
from specdemo.models.weights import give_back

from ..sentences import refuses

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="only Linux is asked for huge pages")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copy_is_the_tensor_in_one_piece_and_begins_a_line(dtype: torch.dtype) -> None:
    pages = HugePages()
    for size in (3, 64, 7):
        given = torch.randn(size, 5).to(dtype).T
        copied = pages.copy(given)
        assert torch.equal(copied, given)
        assert copied.is_contiguous()
        assert copied.data_ptr() % LINE == 0


def test_what_needs_a_gradient_leaves_none_to_its_neighbours() -> None:
    pages = HugePages()
    pages.copy(torch.ones(4, requires_grad=True))
    assert not pages.copy(torch.ones(4)).requires_grad


def test_a_chunk_that_began_in_inference_mode_serves_outside_of_it() -> None:
    pages = HugePages()
    with torch.inference_mode():
        pages.copy(torch.ones(4))
    assert not pages.copy(torch.ones(4)).is_inference()


def test_small_tensors_share_a_chunk_and_one_that_does_not_fit_has_its_own() -> None:
    pages = HugePages()
    first, second = pages.copy(torch.ones(100)), pages.copy(torch.ones(100))
    assert second.data_ptr() - first.data_ptr() == 448  # 400 bytes, filled up to whole lines
    large = pages.copy(torch.ones(2 * CHUNK, dtype=torch.uint8))
    chunks = {tensor.untyped_storage().data_ptr() for tensor in (first, second, large)}
    assert len(chunks) == 2
    assert torch.equal(first, torch.ones(100))


def test_threads_that_copy_at_a_time_do_not_write_over_each_other() -> None:
    given = [torch.full((1000,), float(number)) for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        copied = list(threads.map(HugePages().copy, given))
    assert all(map(torch.equal, given, copied))


def test_memory_is_given_back_with_the_last_tensor_in_it() -> None:
    def size() -> int:
        return int(psutil.Process().memory_info().vms)

    before, pages = size(), HugePages()
    tensors = [pages.copy(torch.ones(CHUNK // 2, dtype=torch.uint8)) for _ in range(8)]
    assert size() - before >= 4 * CHUNK
    pages.begin_anew()
    del tensors[1:]
    assert size() - before >= CHUNK
    tensors.clear()
    assert size() - before < CHUNK
    large = pages.copy(torch.ones(2 * CHUNK, dtype=torch.uint8))
    assert size() - before >= 2 * CHUNK
    del large
    assert size() - before < CHUNK


def test_no_memory_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with refuses(MemoryError, "memory weights"):
        HugePages().copy(torch.ones(1))


def test_a_system_without_them_has_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    given = torch.randn(4, 5).T
    copied = HugePages().copy(given)
    assert torch.equal(copied, given)
    assert copied.is_contiguous()


def test_pages_of_a_file_are_given_back_and_read_again(tmp_path: Path) -> None:
    size = 16 << 20
    (tmp_path / "file").write_bytes(bytes([1, 2, 3, 4]) * (size // 4))
    mapped = torch.from_file(str(tmp_path / "file"), size=size, dtype=torch.uint8)
    total = int(mapped.sum())
    before = psutil.Process().memory_info().shared
    give_back(mapped.data_ptr() + 1, mapped.nbytes - 1)  # whole pages only
    assert before - psutil.Process().memory_info().shared > 0.9 * size
    assert int(mapped.sum()) == total == 10 * size // 4


LOAD = """
import threading
from pathlib import Path
from specdemo.models import loaded, sizes
from specdemo.models.presets import find_preset

def held(*names):
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0][:-1] in names)

def watch():
    while not over.wait(0.02):
        most[0], most[1] = max(most[0], held("RssAnon")), max(most[1], held("RssAnon", "RssFile"))

planned, most, over, plan, before = [], [0, 0], threading.Event(), loaded.plan, held("RssAnon")
loaded.plan = lambda parts, *others: planned.extend(map(sizes.weight_bytes, parts)) or plan(parts, *others)
watching = threading.Thread(target=watch)
watching.start()
try:
    loaded.load(find_preset("qwen2.5-coder"), "stored", "cpu")
finally:
    over.set()
print(sum(planned), most[0] - before, most[1])
"""


@pytest.mark.slow
@pytest.mark.real
def test_a_load_of_two_models_as_stored_takes_the_memory_that_was_planned() -> None:
    """Downloads 1.6 GB, once. The input embeddings, a tenth of the plan, stay in the file."""
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    planned, taken, resident = map(int, done.stdout.split())
    assert 0.7 * planned < taken < 1.2 * planned
    assert resident < 3e9
