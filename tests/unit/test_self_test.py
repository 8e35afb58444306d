"""An engine is tested where it runs: what is wrong there is found and replaced, and what is said of it is true."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdemo.decoding import noise, sampling
from specdemo.engines import choose, fused, ops, self_test
from specdemo.engines.cpu import library
from specdemo.engines.exactness import TESTED_ROWS, TESTED_TREE_ROWS
from specdemo.engines.linear import Linear
from specdemo.engines.named_weights import StoredAs
from specdemo.engines.native import NativeRunner
from specdemo.engines.runner import ANY_ROWS
from specdemo.engines.self_test import tree_around
from specdemo.models import opened, trial
from specdemo.models.loaded import load
from specdemo.models.store import LoadError
from specdemo.racing.compare import Texts
from specdemo.racing.race import start
from specdemo.settings import Settings
from specdemo.system.hardware import QUANTIZED
from specdemo.system.replaced import REPLACED
from specdemo.tokens import Token, TokenKind
from specdemo.ui.facts import facts
from tests.harness.classes import Loaded
from tests.harness.doubles import ids_of
from tests.harness.models import FAMILIES, load_by, model_of, preset_of, run_by, save, tiny

from ..sentences import refuses, tells

CPU = torch.device("cpu")
CASES = [(name, engine, "float32") for name in FAMILIES for engine in ("native", "fused", "graph")]
CASES += [
    (name, "native", dtype)
    for name in FAMILIES
    for dtype in ("bfloat16", "int8", "int4")
    if not name.startswith("gpt2")
]
PRODUCT = "AHEAD, 0, block, x, inner, inner, sums);"  # of `sum_weights`
ALONE = "else sum_weights(rows, block, in->x + row * p->inner, p->inner, sums);"


@pytest.fixture(autouse=True)
def nothing_replaced() -> Iterator[None]:
    yield
    REPLACED.clear()
    for module in (library.library_for, noise.library, sampling.library):
        module.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    return save(tiny("llama", len(tokenizer)), tokenizer, tmp_path_factory.mktemp("target") / "llama")


def text_of(loaded: Loaded, drafter: str = "prompt-lookup") -> list[int]:
    return ids_of(start(loaded, drafter, loaded.encode("the cat sat on the cat"), Settings(k=4, max_new_tokens=24)))


def text_by_transformers(folder: Path) -> list[int]:
    return text_of(load(preset_of(folder), "float32", "cpu", eager=True), "none")


# What it finds -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "engine", "dtype"), CASES, ids=map(" by ".join, CASES))
def test_an_engine_that_is_right_is_as_exact_as_it_claims(
    name: str, engine: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stored = model_of(name), QUANTIZED.get(dtype) or getattr(torch, dtype)
    make: Any = run_by(engine, model, monkeypatch, stored)
    rows, tree_rows = make(1).claimed_rows
    tree_rows = 0 if make(1).cannot_branch else tree_rows
    weights = {weight: value.detach() for weight, value in model.named_parameters(remove_duplicate=False)}
    found, runner = self_test.self_test(make, model.config, StoredAs(weights, stored)), make(8)
    assert (runner.exact_rows, runner.exact_tree_rows) == (rows, tree_rows)
    assert found is not None
    assert (found.rows, found.tree_rows) == (min(rows, TESTED_ROWS), min(tree_rows, TESTED_TREE_ROWS))


def after_test(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, bool], Tensor]) -> Any:
    """A runner whose logits are changed, after its test. `change` is told whether they are those of a tree."""
    forward, model = NativeRunner.forward, model_of("llama")

    def changed(self: NativeRunner, ids: Any, parents: Any = None) -> Tensor:
        return change(forward(self, ids, parents), parents is not None)

    monkeypatch.setattr(NativeRunner, "forward", changed)
    make = run_by("native", model, monkeypatch)
    self_test.self_test(make, model.config, dict(model.named_parameters(remove_duplicate=False)))
    return make(8)


@pytest.mark.parametrize(("more_than", "rows"), [(0, 0), (1, 0), (2, 2), (6, 6), (9, 9), (17, ANY_ROWS)])
def test_rows_are_exact_up_to_the_longest_pass_that_was(
    more_than: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer passes have other last bits."""

    def change(logits: Tensor, _: bool) -> Tensor:
        return logits * (1 + 1e-6 * (len(logits) > more_than) * len(logits))

    runner = after_test(monkeypatch, change)
    assert runner.exact_rows == rows
    assert runner.exact_tree_rows == (64 if more_than == 17 else 0)


def test_a_row_alone_is_compared_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row that is read alone has other bits than in a chain."""
    alone = list[int]()

    def change(logits: Tensor, _: bool) -> Tensor:
        alone.extend([1] * (len(logits) == 1))
        return logits * (1 + 1e-5 * (len(logits) == 1 and len(alone) == 2))

    assert after_test(monkeypatch, change).exact_rows == 2


@pytest.mark.parametrize(("more_than", "rows"), [(0, 0), (8, 8), (16, 64)])
def test_trees_are_exact_up_to_the_largest_that_was(more_than: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = after_test(monkeypatch, lambda logits, tree: logits * (1 + 1e-5 * (tree and len(logits) > more_than)))
    assert (runner.exact_rows, runner.exact_tree_rows) == (ANY_ROWS, rows)


def test_trees_that_are_not_exact_at_one_end_of_a_text_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = list[int]()

    def change(logits: Tensor, tree: bool) -> Tensor:
        trees.extend([1] * tree)
        return logits * (1 + 1e-5 * (tree and len(trees) == 1))

    assert after_test(monkeypatch, change).exact_tree_rows == 0


@pytest.mark.parametrize("context", [4, 17, 18, 19, 40])
@pytest.mark.parametrize("engine", ["native", "fused", "graph"])
def test_a_context_may_be_too_short_for_a_test(context: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", max_position_embeddings=context)
    make = run_by(engine, model, monkeypatch)
    found = self_test.self_test(make, model.config, dict(model.named_parameters(remove_duplicate=False)))
    assert (found is None) == (context <= 18)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen3_moe"])
def test_rows_that_rounding_gives_other_experts_are_not_wrong(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name, seed)
    make = run_by("native", model, monkeypatch, torch.bfloat16)
    weights = {weight: value.detach() for weight, value in model.named_parameters(remove_duplicate=False)}
    assert self_test.self_test(make, model.config, StoredAs(weights, torch.bfloat16))


def test_a_path_that_is_not_kept_and_rows_beside_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeRunner, "keep", lambda self, path: self.rollback(self._start + len(path)))
    runner = after_test(monkeypatch, lambda logits, _: logits)
    assert (runner.exact_rows, runner.exact_tree_rows) == (ANY_ROWS, 0)
    read = fused.SharedPasses.read
    monkeypatch.setattr(fused.SharedPasses, "read", lambda self, passes: [one * 1.001 for one in read(self, passes)])
    assert after_test(monkeypatch, lambda logits, _: logits).exact_rows == 2


@pytest.mark.parametrize("wrong", [torch.nan, 1.01, 0.0])
def test_logits_that_are_wrong_are_found(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(self_test.WrongLogits):
        after_test(monkeypatch, lambda logits, _: logits * wrong)
    with pytest.raises(self_test.WrongLogits):  # in trees alone
        after_test(monkeypatch, lambda logits, tree: logits * wrong if tree else logits)


def test_the_tree_of_the_test_has_two_children_at_each_token_of_its_path() -> None:
    token_ids, parents, path = tree_around([10, 11, 12, 13, 14, 15, 16, 17])
    assert parents == [-1, 0, 0, 1, 1, 3, 3, 5]
    assert [token_ids[row] for row in path] == [10, 11, 12, 13, 14]
    assert [parents[row] for row in path] == [-1, *path[:-1]]


# What it replaces --------------------------------------------------------------------------------------------------


def broken_library(old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the C library with a fault."""
    for file in library.SOURCE.parent.glob("*.[ch]"):
        shutil.copy(file, folder)
    source = folder / "products.h"
    text = source.read_text()
    assert text.count(old) == 1
    source.write_text(text.replace(old, new))
    monkeypatch.setattr(library, "SOURCE", folder / library.SOURCE.name)
    monkeypatch.setattr(trial, "tried", lambda *_: {})  # no child sees this fault
    library.library_for.cache_clear()
    if library.library_for(torch.float32) is None:
        pytest.skip("no C library here")


def test_a_wrong_product_in_c_is_replaced_and_the_text_stays_the_targets(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken_library(PRODUCT, PRODUCT.replace("inner, inner,", "inner, inner - STEP,"), tmp_path, monkeypatch)
    loaded = load(preset_of(folder), "float32", "cpu")
    assert loaded.engine == "fused"
    assert text_of(loaded) == text_by_transformers(folder)
    found = loaded.environment()
    (sentence,) = found["self_test"]["replaced"]
    assert tells(sentence, "C engine logits torch slower")
    assert sentence in facts(loaded)
    texts = Texts([Token(1, TokenKind.TARGET)], [Token(1, TokenKind.TARGET)], Settings(), environment=found)
    assert texts.badge["words"].endswith(sentence)
    assert sentence in caplog.text
    assert found["exact_rows"] == found["self_test"]["rows"] == 0


def test_without_the_c_library_quantized_weights_are_refused_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise self_test.WrongLogits("gives other logits than torch")

    monkeypatch.setattr(opened, "self_test", wrong)
    with refuses(LoadError, "C engine logits dtype float32"):
        load(preset_of(folder), "int8", "cpu")
    with refuses(LoadError, "engine fused logits eager"):  # the next one after the C library
        load(preset_of(folder), "float32", "cpu")


def test_c_whose_rows_depend_on_their_number_is_not_called_exact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_library(ALONE, f"{ALONE} if (count > 6) sums[0] *= 1.00001f;", tmp_path, monkeypatch)
    loaded = load(preset_of(folder), "float32", "cpu")
    assert (loaded.engine, loaded.exact_rows, loaded.exact_tree_rows) == ("native", 6, 0)
    found = loaded.environment()["self_test"]
    assert (found["rows"], found["tree_rows"], found["replaced"]) == (6, 0, [])


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "not finite": lambda x: x * torch.nan,
    "other numbers": lambda x: x.roll(1, -1),
    "an error": lambda x: x.view(-1)[[x.numel()]],
}


def broken(part: str, way: str) -> Any:
    """In place of the kernels: torch's operations, one of them broken. All are said to be exact."""
    name = ops.PARTS[part][-1]
    right: Any = getattr(ops, name)
    return SimpleNamespace(
        **{**vars(ops), "EXACT": True, name: lambda *given, **named: WAYS[way](right(*given, **named))}
    )


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials without a child, and those of what only a GPU has left out."""

    def tried(_: str, names: list[str], given: bytes, facts: Any) -> dict[str, str | None]:
        config, dtype, _ = pickle.loads(given)
        passes = {*names} - {"C", "draws", "trees"}
        return {name: trial.outcome(name, config, dtype, CPU) if name in passes else "" for name in names}

    monkeypatch.setattr(trial, "tried", tried)
    monkeypatch.setattr("specdemo.engines.gpu.graph.ROOM", 128)
    monkeypatch.setattr(self_test, "LENGTH", 64)
    monkeypatch.setattr("specdemo.engines.gpu.noise.prepare", lambda *_: None)
    monkeypatch.setattr("specdemo.engines.gpu.trees.prepare", lambda *_: None)
    monkeypatch.setattr(Linear, "of", lambda weight, bias, parts=1: Linear.unpacked(weight, bias))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ops.PARTS)
def test_a_kernel_that_fails_is_replaced_by_itself(
    part: str,
    way: str,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    in_this_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = "flex_olmo" if part == "experts" else "gemma2"  # which has norms after its products
    model = model_of(family, initializer_range=0.5)
    folder = save(model, tokenizer, tmp_path / family)
    monkeypatch.setattr(trial, "ops_for", lambda *_: broken(part, way))
    monkeypatch.setattr(choose, "ops_for", lambda *_: ops.partly(broken(part, way), [*REPLACED]))
    trial._try_kernels(model.config, torch.float32, CPU)
    ((name, sentence),) = REPLACED.items()
    assert name == part
    assert tells(sentence, f"Triton {part} torch slower")
    loaded = load_by("graph", folder, monkeypatch)
    assert (loaded.exact_rows, loaded.exact_tree_rows) == (0, 0)
    assert loaded.environment()["self_test"]["replaced"] == [sentence]
    assert text_of(loaded) == text_by_transformers(folder)
