"""Is the captured engine right on the machine it meets? What is checked is random and fresh, and small.

Everything here also runs on a CPU, where passes are called and not replayed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..costs import Costs
from ..decode import decode
from ..drafters import Drafter
from ..drafters.draft_model import DraftModel
from ..drafters.head import HeadDrafter
from ..drafters.none import NoDrafter
from ..drafters.prompt_lookup import PromptLookup
from ..events import Event, Round, emitted_tokens
from ..runners import Runner, ops
from ..runners.choose import OLDEST, ops_for
from ..runners.eager import EagerRunner
from ..runners.graph import Capture, CudaCapture, GraphRunner, Graphs
from ..runners.layout import FusedModel, Norm, Product
from ..sampling import probabilities
from ..types import MAX_K, MAX_SEED, Settings
from .gpu_heads import WITH_HEADS, logits_of_captured, random_head
from .law import chi_square

log = logging.getLogger(__name__)
FAMILIES = ("llama", "qwen3", "gpt2")
LENGTHS = (1, 3, 6, MAX_K + 1)  # of passes
EXACT, ROUGH = 1e-4, 2e-2  # relative errors: in float32, in 16 bits
NO_WORSE = 1.25  # ours from the truth, over transformers' from the truth
UNLIKELY = 1e-3
CONTEXT, VOCAB, LAW_VOCAB, REAL_VOCAB = 150, 512, 12, 151_936
# For the kernels: heads, heads of keys, and their width; tokens read, and how many are live before them.
HEADS = ((8, 2, 64), (6, 6, 32), (9, 3, 16))
READS = ((1, 0), (1, 127), (5, 126), (17, 300))
WIDE, LONG = 8250, 5000  # of a product and of a cache, beyond where the kernels take larger parts
LONGEST_ERROR = 300  # characters of what one says


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, whether it holds, and what was found."""

    name: str
    passed: bool
    found: str


def checks(device: torch.device, runs: int = 1500) -> Iterator[Check]:
    """All of them; `runs` is how often the sampled law is drawn from."""
    functions, every = ops, list[partial[Check]]()
    try:
        functions = ops_for(FusedModel.of(tiny("qwen3", device)))
    except Exception as error:
        log.exception("what passes are made of could not be chosen")
        yield Check("ops_for", False, told(error))
    if functions is not ops:
        dtypes = torch.float32, torch.float16, torch.bfloat16
        every += [partial(kernels_agree, functions, device, dtype) for dtype in dtypes]
        every += [partial(attention_keeps_its_order, functions, device), partial(logits_agree, "qwen3", device, ops)]
        every += [partial(drafts_change_no_bit, device, torch.bfloat16)]
    every += [partial(logits_agree, family, device) for family in FAMILIES]
    every += [partial(check, device) for check in (bfloat16_is_no_worse, texts_are_equal, heads_agree)]
    every += [partial(law_is_the_targets, device, runs)]
    if device.type == "cuda":
        every += [partial(kernels_are_used, functions, device), partial(waits_once, device)]
    for check in every:
        try:
            yield check()
        except Exception as error:  # the others are still worth knowing, and a GPU is not had every day
            log.exception("%s could not be checked", check.func.__name__)
            yield Check(check.func.__name__, False, told(error))


def told(error: Exception) -> str:
    """What an error says, on a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_ERROR]


def tiny(family: str, device: torch.device, vocab: int = VOCAB) -> PreTrainedModel:
    """A random model of a few layers in float32 whose laws are peaked enough for greedy text to be beyond rounding."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": vocab}
    wide = {"intermediate_size": 192, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(family, **sizes, **wide, **ids)
    return AutoModelForCausalLM.from_config(config).eval().to(device)


def graphs_of(model: PreTrainedModel, functions: ModuleType | None = None) -> Graphs:
    """The model's passes, see `captured`."""
    return captured(FusedModel.of(model), functions)


def captured(model: FusedModel, functions: ModuleType | None = None) -> Graphs:
    """Passes made of the fastest functions unless told: captured, or on a CPU to be called.

    Where these fail it fails, unlike `choose.captured`: that is to be known here.
    """
    device = model.embedding.device
    return Graphs(model, functions or ops_for(model), capture_for(device), 1)


def capture_for(device: torch.device) -> Capture:
    """What captures on a GPU; a CPU runs what it would capture."""
    return CudaCapture(device) if device.type == "cuda" else lambda work: work


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """|ours - truth| / |truth|; what is no number is infinitely wrong."""
    error = float((ours.double() - truth.double()).norm() / truth.double().norm())
    return error if error == error else float("inf")


def kernels_are_used(functions: ModuleType, device: torch.device) -> Check:
    """Whether captured passes are made of Triton's kernels where they should be: without, all is right, and slow."""
    should = bool(find_spec("triton")) and torch.cuda.get_device_capability(device) >= OLDEST
    found = "torch's own operations" if functions is ops else "Triton's kernels"
    return Check("what passes are made of", functions is not ops or not should, found)


def kernels_agree(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> Check:
    """Each kernel against the same function in torch in float64."""
    worst: dict[str, float] = {}
    for heads, kv_heads, width in HEADS:
        for count, live in READS:
            for name, inputs in _kernel_inputs(heads, kv_heads, width, count, live, device, dtype):
                exact = [_double(value) for value in inputs]
                ours, truth = getattr(kernels, name)(*inputs), getattr(ops, name)(*exact)
                if name == "place":  # writes keys and values too
                    ours, truth = (ours, *inputs[3:5]), (truth, *exact[3:5])
                pairs = zip(ours, truth, strict=True) if isinstance(ours, tuple) else [(ours, truth)]
                worst[name] = max(worst.get(name, 0.0), *(relative_error(*pair) for pair in pairs))
    limit = EXACT if dtype == torch.float32 else ROUGH
    found = ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
    return Check(f"Triton kernels in {dtype}", max(worst.values()) < limit, f"relative errors: {found}")


def attention_keeps_its_order(kernels: ModuleType, device: torch.device) -> Check:
    """Whether what a token sees is the same bits, however many tokens are read together with it."""
    same = 0
    for live in range(100, 100 + 17 * 20, 17):
        q, start = torch.randn(17, 8, 64, device=device).bfloat16(), torch.tensor([live], device=device)
        keys, values = torch.randn(2, 2, 512, 64, device=device).bfloat16()
        alone = [kernels.attend(q[at : at + 1], keys, values, start + at) for at in range(17)]
        same += torch.equal(torch.cat(alone), kernels.attend(q, keys, values, start))
    return Check(
        "order of sums in attention", same == 20, f"{same} of 20 passes over 17 tokens equal single ones bit by bit"
    )


def _kernel_inputs(
    heads: int, kv_heads: int, width: int, count: int, live: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, list[Any]]]:
    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    hidden, capacity = heads * width, live + count + 77
    start = torch.tensor([live], device=device)
    outer, step = 70, Product.unpacked(noise(70, hidden), None)
    for norm in (None, Norm(noise(hidden), None, 1e-5), Norm(noise(hidden), noise(hidden), 1e-5)):
        yield "product", [step, noise(count, hidden), norm]
    biased = Product.unpacked(noise(outer, hidden), noise(outer))
    yield "product", [biased, noise(count, hidden), None, noise(count, outer)]
    yield "swiglu", [noise(count, 2 * hidden)]
    for head_norms in (None, (Norm(noise(width), None, 1e-6), Norm(noise(width), None, 1e-6))):
        for rotation in (None, (noise(capacity, 1, width), noise(capacity, 1, width))):
            qkv, (keys, values) = noise(count, (heads + 2 * kv_heads) * width), noise(2, kv_heads, capacity, width)
            yield "place", [qkv, head_norms, rotation, keys, values, start]
    keys, values = noise(2, kv_heads, capacity, width)
    keys[:, live + count :] = values[:, live + count :] = 1e4  # what lies behind the text must have no say
    yield "attend", [noise(count, heads, width), keys, values, start]
    if not live:
        yield "product", [Product.unpacked(noise(WIDE, hidden), None), noise(count, hidden)]
        keys, values = noise(2, kv_heads, LONG, width)
        yield "attend", [noise(count, heads, width), keys, values, start + LONG - count]


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Product):
        assert value.weight is not None
        return Product.unpacked(value.weight.double(), _double(value.bias))
    if isinstance(value, Norm):
        return Norm(value.weight.double(), _double(value.bias), value.eps)
    return tuple(map(_double, value)) if isinstance(value, tuple) else value


def logits_agree(family: str, device: torch.device, functions: ModuleType | None = None) -> Check:
    """Passes of several lengths against transformers' forward, in float32."""
    model = tiny(family, device)
    runners = GraphRunner(graphs_of(model, functions), 2 * CONTEXT), EagerRunner(model, 2 * CONTEXT)
    worst = max(relative_error(*rows) for rows in _passes(runners))
    return Check(f"logits, {family}, float32", worst < EXACT, f"relative error {worst:.0e} from transformers")


def bfloat16_is_no_worse(device: torch.device) -> Check:
    """In bfloat16 ours may stray from float32 as far as transformers' own forward does."""
    exact = tiny("qwen3", device)
    rough = type(exact)(exact.config).eval().to(device)
    rough.load_state_dict(exact.state_dict())
    rough = rough.bfloat16()
    runners = [runner(2 * CONTEXT) for runner in (_eager(exact), _captured(rough), _eager(rough))]
    errors = [(relative_error(ours, truth), relative_error(theirs, truth)) for truth, ours, theirs in _passes(runners)]
    ours, theirs = (sum(error) / len(errors) for error in zip(*errors, strict=True))
    found = f"relative error {ours:.1e}, transformers' own {theirs:.1e}"
    return Check("logits, bfloat16", ours < NO_WORSE * theirs, found)


def _eager(model: PreTrainedModel) -> Callable[[int], Runner]:
    return lambda capacity: EagerRunner(model, capacity)


def _captured(model: PreTrainedModel) -> Callable[[int], Runner]:
    graphs = graphs_of(model)
    return lambda capacity: GraphRunner(graphs, capacity)


def _passes(runners: Sequence[Runner]) -> Iterator[list[Tensor]]:
    """The logits of the same passes by each runner; after each, half of what it read is taken back."""
    vocab = runners[0].vocab_size
    prompt = torch.randint(vocab, (CONTEXT,)).tolist()
    yield [runner.prefill(prompt) for runner in runners]
    for count in LENGTHS:
        ids = torch.randint(vocab, (count,)).tolist()
        yield [runner.forward(ids) for runner in runners]
        for runner in runners:
            runner.rollback(runner.length - count // 2)
    for runner in runners:
        runner.release()


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of a model's first layers that shares its weights."""
    fields = {**model.config.to_dict(), "num_hidden_layers": layers}
    fields.pop("layer_types", None)
    with torch.device("meta"):
        part = AutoModelForCausalLM.from_config(type(model.config)(**fields), dtype=model.dtype)
    whole: Any = model
    part.model.embed_tokens, part.model.norm = whole.model.embed_tokens, whole.model.norm
    part.model.layers, part.model.rotary_emb = ModuleList(whole.model.layers[:layers]), whole.model.rotary_emb
    part.lm_head = whole.lm_head
    return part.eval()


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, and a draft model that is its first layers, both captured."""

    target: PreTrainedModel
    draft: PreTrainedModel
    graphs: Graphs
    draft_graphs: Graphs

    @classmethod
    def of(cls, target: PreTrainedModel, layers: int) -> Pair:
        draft = first_layers(target, layers)
        return cls(target, draft, graphs_of(target), graphs_of(draft))

    def drafter(self, capacity: int, settings: Settings) -> DraftModel:
        """The draft model as a drafter for one run."""
        runner = GraphRunner(self.draft_graphs, capacity)
        noise = torch.Generator(runner.device).manual_seed(settings.seed + 1)
        return DraftModel(runner, self.target.config.get_text_config().vocab_size, settings, noise)

    def events(
        self, prompt: Sequence[int], settings: Settings, drafter: Drafter | None = None, costs: Costs | None = None
    ) -> Iterator[Event]:
        """A run with that drafter, by default the draft model."""
        capacity = len(prompt) + settings.max_new_tokens
        drafter = drafter or self.drafter(capacity, settings)
        return decode(GraphRunner(self.graphs, capacity), drafter, prompt, settings, costs=costs)


def text_of(events: Iterable[Event]) -> list[int]:
    """The emitted token ids."""
    return [token.id for event in events for token in emitted_tokens(event)]


def texts_are_equal(device: torch.device) -> Check:
    """Greedy text of transformers' forward, alone, and with two drafters: token for token, in float32."""
    pair, settings, same, texts = Pair.of(tiny("qwen3", device), 2), Settings(k=5, max_new_tokens=96), 0, 0
    for _ in range(3):
        prompt = torch.randint(VOCAB, (30,)).tolist()
        alone = replace(settings, k=0)
        truth = text_of(decode(EagerRunner(pair.target, 200), NoDrafter(), prompt, alone))
        others = [pair.events(prompt, alone, NoDrafter()), pair.events(prompt, settings)]
        for events in (*others, pair.events(prompt, settings, Copying())):
            same, texts = same + (text_of(events) == truth), texts + 1
    return Check("greedy texts", same == texts, f"{same} of {texts} equal to plain decoding by transformers' forward")


def drafts_change_no_bit(device: torch.device, dtype: torch.dtype) -> Check:
    """Whether greedy text is the same with and without a draft in a number type where rounding decides often."""
    pair, same = Pair.of(tiny("qwen3", device).to(dtype), 2), 0
    for k in (1, 3, 5, 8, MAX_K):
        prompt, settings = torch.randint(VOCAB, (30,)).tolist(), Settings(k=k, max_new_tokens=96)
        alone = text_of(pair.events(prompt, replace(settings, k=0), NoDrafter()))
        same += text_of(pair.events(prompt, settings)) == alone
    return Check(f"greedy texts, {dtype}", same == 5, f"{same} of 5 equal to ours alone")


def law_is_the_targets(device: torch.device, runs: int) -> Check:
    """The first three tokens of many sampled runs with a draft model, against the target's own probabilities."""
    pair = Pair.of(tiny("qwen3", device, LAW_VOCAB), 2)
    settings = Settings(k=3, temperature=1.0, top_p=0.95, max_new_tokens=3)
    prompt = torch.randint(LAW_VOCAB, (8,)).tolist()
    counts = torch.zeros(LAW_VOCAB, LAW_VOCAB, LAW_VOCAB, dtype=torch.float64)
    for seed in torch.randint(MAX_SEED, (runs,)).tolist():
        counts[tuple(text_of(pair.events(prompt, replace(settings, seed=seed))))] += 1
    p_value = chi_square(counts.ravel().numpy(), _law(pair.target, prompt, settings).ravel().cpu().numpy())
    assert p_value is not None, "the law has more than one likely text"
    return Check("sampled law", p_value > UNLIKELY, f"chi-square over {runs} runs: p = {p_value:.3f}")


@torch.inference_mode()
def _law(model: PreTrainedModel, prompt: Sequence[int], settings: Settings) -> Tensor:
    """The probability of every text of three tokens, [V, V, V] float64, by transformers' forward."""
    vocab = torch.arange(LAW_VOCAB, device=model.device)
    pairs = torch.cartesian_prod(vocab, vocab)
    rows = torch.tensor(prompt, device=model.device).expand(len(pairs), -1)
    logits = model(torch.cat([rows, pairs], 1)).logits[:, -3:]
    first, second, third = probabilities(logits, settings).double().view(LAW_VOCAB, LAW_VOCAB, 3, LAW_VOCAB).unbind(2)
    law = first[0, 0][:, None, None] * second[:, 0][:, :, None] * third
    return law / law.sum()


class Copying(PromptLookup):
    """Prompt lookup that copies the beginning where it finds nothing: in a random text hardly anything comes twice."""

    def match(self, context: Sequence[int]) -> int | None:
        return super().match(context) or 0


def heads_agree(device: torch.device) -> Check:
    """Drafts of captured heads against those that run as they come, in float32."""
    target = tiny("qwen3", device)
    heads = [(kind, random_head(kind, target, capture_for(device))) for kind in WITH_HEADS.values()]
    errors = [relative_error(*both) for kind, ready in heads for both in logits_of_captured(kind, ready)]
    found = f"relative error {max(errors):.0e} between captured and not, {len(errors)} drafts"
    return Check("drafts of heads, float32", max(errors) < EXACT, found)


def waits_once(device: torch.device) -> Check:
    """How often a round makes the host wait for the GPU, by drafter, greedy and sampled: once, for its verdict."""
    pair, found = Pair.of(tiny("qwen3", device, REAL_VOCAB), 2), dict[str, int]()
    greedy = Settings(k=5, max_new_tokens=64)
    for settings in (greedy, replace(greedy, temperature=1.0, top_k=50, top_p=0.9)):
        for name, make in _drafters(pair, settings).items():
            runner = GraphRunner(pair.graphs, 80)
            events = decode(runner, make(runner), [1, 2, 3] * 5, settings)
            found[f"{name} at T = {settings.temperature:.0f}"] = _waits_of_a_round(events)
    words = ", ".join(f"{count} of {name}" for name, count in found.items())
    return Check("waits in a round", set(found.values()) == {1}, words)


def _drafters(pair: Pair, settings: Settings) -> dict[str, Callable[[Runner], Drafter]]:
    """By name, what makes a drafter for one run of the target's."""
    noise = torch.Generator(pair.target.device).manual_seed(settings.seed + 1)
    return {
        "draft-model": lambda runner: pair.drafter(runner.context, settings),
        "prompt-lookup": lambda _: Copying(),
        **{name: partial(_head_drafter, kind, pair, settings, noise) for name, kind in WITH_HEADS.items()},
    }


def _head_drafter(
    kind: type[HeadDrafter], pair: Pair, settings: Settings, noise: torch.Generator, runner: Runner
) -> Drafter:
    return kind(random_head(kind, pair.target, capture_for(runner.device)), runner, settings, noise)


def _waits_of_a_round(events: Iterator[Event]) -> int:
    """How often the third round of a run waits: in the first a draft model reads the prompt."""
    with closing(events):  # type: ignore[type-var]
        list(islice(events, 3))  # the prompt and two rounds
        with _waits() as seen:
            event = next(events)
    assert isinstance(event, Round), "the text ended too soon"
    assert event.drafted, "nothing was drafted, and so nothing tested"
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


@contextmanager
def _waits() -> Iterator[list[Any]]:
    """Collects a warning for each operation that makes the host wait."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
