"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# A busy machine makes any single example slow now and then, and a failure must be found again the same way.
hypothesis.settings.register_profile("specdemo", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.load_profile("specdemo")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Toy tensors on one thread: waking a second one takes a hundred times as long as the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
