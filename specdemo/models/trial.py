"""Tries what runs a model in a child process, once on a machine: `python -m specdemo.models.trial` is the child.

A kernel of a GPU may not compile, compute something else, hang or crash, and a crash ends all work on that GPU. The C
library may do the same on a machine that nobody has tried. Torch's operations run in the place of what fails.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..decoding import noise, sampling
from ..decoding.rule import Match
from ..drafters.captured_trees import CapturedTrees, Growth
from ..drafters.tree import grow_by_depth
from ..engines import ops
from ..engines.choose import engine_of, ops_for
from ..engines.cpu.library import library_for
from ..engines.families import family_of, head_width
from ..engines.fused import FusedRunner
from ..engines.gpu.capture import CapturedFunctions, capture_for
from ..engines.gpu.graph import GraphRunner, Graphs
from ..engines.layout import FusedModel, end_layers
from ..engines.named_weights import StoredAs
from ..engines.native import NativeModel, NativeRunner
from ..engines.passes import alone
from ..engines.self_test import SEED, WrongLogits, length_of, tested
from ..formats import reason
from ..settings import Settings
from ..system.hardware import QUANTIZED, STORED, device_name, unquantized
from ..system.progress import attended
from ..system.replaced import DRAWS, KERNELS, LIBRARY, REPLACED, TREES, replace
from ..system.trial import tried
from .store import LoadError
from .weights import shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DRIVER = Path("/proc/driver/nvidia/version")
ENGINES = Path(ops.__file__).parent
SUBJECTS = {
    KERNELS: "Triton's code",
    **{part: f"Triton's code for {part}" for part in ops.PARTS},
    DRAWS: "The kernel that draws tokens",
    TREES: "The kernel that grows trees",
    LIBRARY: "The C engine",
    "sampling.c": "The C code that finds the largest logits",
    "noise.c": "The C code that draws tokens",
}
INSTEAD = "Torch's operations run instead, which is slower."
SURE = 1e-6  # a larger margin is the same wherever it is computed
SCALE = 0.05  # of random weights
NODES, DEPTH, TOKENS = 16, 5, 64  # of a tree that is tried


def try_engine(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Try what would run a known model with weights of this type, and replace what fails."""
    if device.type == "cuda" and length_of(config) and has_kernels(config, device):
        _try_kernels(config, dtype, device)
    elif device.type == "cpu":
        _try_library(config, dtype, device)


def _try_library(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    quantized = dtype in QUANTIZED.values()
    library = library_for(unquantized(dtype), quantized=True) if quantized else library_for(dtype)
    if library:
        facts = [Path(library.functions._name).name, torch.__version__, dtype, sources()]
        if wrong := _tried([LIBRARY], config, dtype, device, facts).get(LIBRARY):
            _without_library(wrong, dtype)


def _try_kernels(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    versions = torch.version.cuda, torch.__version__, triton_version()
    facts = [device_name(device), driver, *versions, dtype, shapes(config), config, sources()]
    found = _tried([KERNELS, DRAWS, TREES], config, dtype, device, facts)
    for name in (DRAWS, TREES):
        if wrong := found.get(name):
            _replace(name, wrong, device)
    if whole := found.get(KERNELS):
        parts = _tried([*ops.PARTS], config, dtype, device, facts)
        failed = {part: wrong for part, wrong in parts.items() if wrong}
        if 0 < len(failed) < len(parts):
            for part, wrong in failed.items():
                _replace(part, wrong, device)
        else:
            _replace(KERNELS, whole, device)


def has_kernels(config: PreTrainedConfig, device: torch.device) -> bool:
    """Whether any part of a captured pass is computed by a kernel."""
    return ops_for(head_width(config), device) is not ops


@cache
def sources() -> str:
    """A checksum of the engines' code."""
    files = sorted([*ENGINES.rglob("*.py"), Path(__file__)])
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def triton_version() -> str:
    import triton  # its distribution may have another name

    return str(triton.__version__)


def _tried(
    names: list[str], config: Any, dtype: torch.dtype, device: torch.device, facts: Any
) -> dict[str, str | None]:
    return tried(__name__, names, pickle.dumps((config, dtype, str(device))), facts)


def check_draws(device: torch.device, size: int) -> None:
    """Replace what gives other tokens than torch of a vocabulary of this size. Elsewhere torch itself draws."""
    if device.type not in ("cpu", "cuda"):
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        draws_right = draws_alike(device, size)
    if not draws_right:
        _replace(DRAWS if device.type == "cuda" else "noise.c", "draws other tokens than torch", device)
        noise.library.cache_clear()
    if device.type == "cpu" and not finds_alike(size):
        _replace("sampling.c", "finds other tokens than torch", device)
        sampling.library.cache_clear()


def draws_alike(device: torch.device, size: int) -> bool:
    """Whether what draws on a device draws the tokens that torch's operations do."""
    rows = 4 * torch.randn(3, size, generator=torch.Generator().manual_seed(SEED)).to(device)
    probs, keys = rows.softmax(-1), [noise.key_of(0, position) for position in range(len(rows))]
    tokens, _ = noise.draw(probs, keys)
    expected, margins = noise.draw(probs.double(), keys)
    return torch.equal(tokens[margins > SURE], expected[margins > SURE])


def finds_alike(size: int) -> bool:
    """Whether the C library finds the largest logits and their margins as torch's operations do."""
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(SEED))
    found, (values, places) = sampling.largest(logits), logits.max(-1)
    seconds = logits.topk(min(2, size)).values[:, -1]
    return torch.equal(found.places, places) and torch.equal(found.margins, values - seconds)


def do_without(wrong: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the engine of a model, which has failed.

    Raises:
        LoadError: there is no other for weights of this type.
    """
    engine = engine_of(config, dtype, device)
    if engine == "graph" and has_kernels(config, device):
        _replace(KERNELS, wrong, device)
    elif engine == "native":
        _without_library(wrong, dtype)
    else:
        raise LoadError(f"The engine {engine} {wrong} on this machine: run transformers' own passes, with --eager.")


def _without_library(wrong: str, dtype: torch.dtype) -> None:
    _replace(LIBRARY, wrong, torch.device("cpu"))
    library_for.cache_clear()
    if dtype in QUANTIZED.values():
        raise LoadError(f"{REPLACED[LIBRARY].removesuffix(INSTEAD)}Choose another dtype, such as float32.")


def _replace(name: str, wrong: str, device: torch.device) -> None:
    where = [device_name(device), f"torch {torch.__version__}"]
    if device.type == "cuda":
        where += [f"CUDA {torch.version.cuda}", f"Triton {triton_version()}"]
    replace(name, f"{SUBJECTS[name]} {wrong} on this machine ({', '.join(where)}). {INSTEAD}")


# In the child ---------------------------------------------------------------------------------------------------------


def main() -> None:
    config, dtype, device = pickle.load(sys.stdin.buffer)
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    _beat()
    for name in sys.argv[1:]:
        with attended(_beat):
            wrong = outcome(name, config, dtype, device)
        print(json.dumps({name: wrong}), flush=True)
        if wrong:  # no more work may be possible on this GPU
            return


def outcome(name: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """What goes wrong in a trial, in words that follow its subject; "" if nothing does, None without memory for it."""
    try:
        _trial_of(name)(config, dtype, device)
    except (MemoryError, torch.OutOfMemoryError):
        return None
    except WrongLogits as error:
        return str(error)
    except Exception as error:
        return f"fails ({reason(error)})"
    return ""


def _beat() -> bool:
    """Tell the parent that something has ended."""
    print(flush=True)
    return False


def _trial_of(name: str) -> Callable[[PreTrainedConfig, torch.dtype, torch.device], None]:
    trials: dict[str, Any] = {LIBRARY: try_library, DRAWS: try_draws, TREES: try_trees, KERNELS: try_passes}
    return trials.get(name) or partial(try_passes, by_torch={*ops.PARTS} - {name})


def try_passes(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, by_torch: Collection[str] = ()
) -> None:
    """Captured passes by the kernels, but for those parts that are computed by torch."""
    functions = ops.partly(ops_for(head_width(config), device), by_torch)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)  # may have to be compiled
            _beat()
            return result

        return call

    names = {name for part in ops.PARTS.values() for name in part}
    watching = SimpleNamespace(**{**vars(functions), **{name: watched(getattr(functions, name)) for name in names}})
    weights, length = random_weights(config, dtype, device), length_of(config)
    graphs = Graphs(FusedModel.ends_of(config, weights), cast(Any, watching), capture_for(device), 1)
    with torch.inference_mode():
        plain = FusedRunner(FusedModel.ends_of(config, weights, plain=True), length)
        tested(partial(GraphRunner, graphs), plain, length)


def try_library(_: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """The C library of the engine, by a small model."""
    from transformers import LlamaConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(hidden_size=256, intermediate_size=512, vocab_size=500, **heads)
    stored = torch.quint4x2 if dtype in STORED else dtype
    weights = StoredAs(random_weights(config, torch.float32, device), stored)
    with torch.inference_mode():
        plain = FusedRunner(FusedModel.ends_of(config, weights, plain=True), length_of(config))
        make = partial(NativeRunner, NativeModel(FusedModel.of_weights(config, weights)))
        tested(make, plain, length_of(config))


def random_weights(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Weights of a model, of its layers only those of the first and of the last one."""
    layers = f"{family_of(config).layers}."
    kept = tuple(f"{layers}{index}." for index in end_layers(config.num_hidden_layers))
    named = {name: shape for name, shape in shapes(config).items() if name.startswith(kept) or layers not in name}
    numbers = torch.Generator(device).manual_seed(SEED)
    return {
        name: SCALE * torch.randn(shape, generator=numbers, device=device, dtype=dtype) + (len(shape) == 1)
        for name, shape in named.items()
    }


def try_draws(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    if not draws_alike(device, config.vocab_size):
        raise WrongLogits("draws other tokens than torch")


def try_trees(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """A tree that captured calls grow, against that of the host."""
    table = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(SEED)).to(device)
    rule = Match(Settings(tree=True))
    trees = CapturedTrees(partial(TableReader, table), CapturedFunctions(capture_for(device)), None, 2)
    found = trees.draw([table[:1]], NODES, DEPTH, rule, 0)
    host = alone(grow_by_depth(table[:1], lambda token_ids, _: table[token_ids], NODES, DEPTH, rule, 0, None))
    if (found.token_ids, found.parents) != (host.token_ids, host.parents):
        raise WrongLogits("grows other trees than the host")


class TableReader:
    """A `captured_trees.Reader` whose logits depend on the last token, [V, V]."""

    state: Sequence[Tensor] = ()

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def begin(self, *given: Tensor) -> Tensor:
        return given[0]

    def read(self, growth: Growth) -> Tensor:
        return self.table[growth.token_ids]


if __name__ == "__main__":
    main()
