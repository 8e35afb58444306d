"""Memory in huge pages: what is copied there, how tightly it lies, and that it is given back."""

from __future__ import annotations

import mmap
import platform
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from specdemo.engines.cpu.huge_pages import CHUNK, LINE, HugePages

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
    with pytest.raises(MemoryError, match="no memory left for the weights"):
        HugePages().copy(torch.ones(1))


def test_a_system_without_them_has_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    given = torch.randn(4, 5).T
    copied = HugePages().copy(given)
    assert torch.equal(copied, given)
    assert copied.is_contiguous()
