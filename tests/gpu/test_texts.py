"""Whole texts by captured passes: greedy ones token for token, sampled ones by their distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdemo.decoding.batch import Failed, decode, decode_batch
from specdemo.decoding.events import Event
from specdemo.decoding.loop import Decoding
from specdemo.decoding.warping import probabilities
from specdemo.drafters.none import NoDrafter
from specdemo.engines import ops
from specdemo.racing.race import rule_for
from specdemo.settings import MAX_K, MAX_SEED, Settings
from tests.harness.classes import EagerRunner, GraphRunner

from .helpers import VOCAB, Copying, pair_of, text_of, tiny
from .test_passes import OTHERS, WITH_EXPERTS

SMALL_VOCAB = 12  # of sampled texts, so that every text of three tokens can be counted
FEWEST = 5  # texts that a cell of the chi-square test must be expected to hold


def length(device: torch.device) -> int:
    """Tokens of a text: a CPU, which is slow and always exact here, need not write so many."""
    return 96 if device.type == "cuda" else 32


@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers(device: torch.device) -> None:
    """Alone and with two drafters, in float32."""
    pair, settings, same = pair_of(tiny("qwen3", device)), Settings(k=5, max_new_tokens=length(device)), []
    for _ in range(3):
        prompt = torch.randint(VOCAB, (30,)).tolist()
        alone = replace(settings, k=0)
        truth = text_of(decode(Decoding(EagerRunner(pair.target, 200), NoDrafter(), prompt, rule_for(alone))))
        ours = pair.events(prompt, alone, NoDrafter()), pair.events(prompt, settings)
        same += [text_of(events) == truth for events in (*ours, pair.events(prompt, settings, Copying()))]
    assert all(same), f"{sum(same)} of {len(same)} equal to plain decoding by transformers' forward"


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in (*OTHERS, *WITH_EXPERTS))]
)
@pytest.mark.usefixtures("nothing_packed")
def test_drafts_change_no_bit(device: torch.device, family: str) -> None:
    """With Triton's kernels in bfloat16, where rounding decides often; in float32 on a CPU, where it never does."""
    pair = pair_of(tiny(family, device).to(torch.bfloat16 if device.type == "cuda" else torch.float32))
    if device.type == "cuda" and pair.graphs.ops is ops:
        pytest.skip("passes are made of torch's own operations, whose rows depend on each other")
    same, greedy = [], Settings(max_new_tokens=length(device))
    asked = [replace(greedy, k=k) for k in (1, 3, 5, 8, MAX_K)]
    asked += [replace(greedy, k=nodes, tree=True, temperature=T, seed=7) for nodes in (8, 40) for T in (0.0, 0.8)]
    for settings in asked:
        prompt = torch.randint(VOCAB, (30,)).tolist()
        alone = text_of(pair.events(prompt, replace(settings, k=0, tree=False), NoDrafter()))
        same.append(text_of(pair.events(prompt, settings)) == alone)
    assert all(same), f"{sum(same)} of {len(same)} equal to ours alone"


def test_texts_are_those_that_their_prompts_get_alone(device: torch.device) -> None:
    """Six prompts at once with a draft model, one of them too long for its context; the types as above."""
    pair = pair_of(tiny("qwen3", device).to(torch.bfloat16 if device.type == "cuda" else torch.float32))
    if device.type == "cuda" and pair.graphs.ops is ops:
        pytest.skip("passes are made of torch's own operations, whose rows depend on each other")
    asked = [Settings(k=place % 4, max_new_tokens=length(device) // (1 + place % 3), seed=place) for place in range(6)]
    asked = [replace(each, temperature=0.8 * (each.seed % 2)) for each in asked]
    prompts = [torch.randint(VOCAB, (5 + 20 * place % 63,)).tolist() for place in range(6)]

    def decodings() -> Iterator[Decoding]:
        for place, (prompt, settings) in enumerate(zip(prompts, asked, strict=True)):
            rule, capacity = rule_for(settings), len(prompt) + settings.max_new_tokens - (place == 4)
            yield Decoding(GraphRunner(pair.graphs, capacity), pair.drafter(capacity, rule), prompt, rule)

    texts: dict[int, list[Event | Failed]] = {}
    for index, event in decode_batch(decodings(), len(prompts)):
        texts.setdefault(index, []).append(event)
    assert isinstance(texts.pop(4)[0], Failed)
    alone = {index: text_of(pair.events(prompts[index], replace(asked[index], k=0), NoDrafter())) for index in texts}
    same = [text_of(texts[index]) == alone[index] for index in texts]  # type: ignore[arg-type]
    assert all(same), f"{sum(same)} of {len(same)} equal to ours alone"


@pytest.mark.slow
def test_sampled_texts_have_the_targets_distribution(device: torch.device) -> None:
    """The first three tokens of many runs with a draft model, by a chi-square test."""
    runs, pair = 1500 if device.type == "cuda" else 300, pair_of(tiny("qwen3", device, SMALL_VOCAB))
    settings = Settings(k=3, temperature=1.0, top_p=0.95, max_new_tokens=3)
    prompt = torch.randint(SMALL_VOCAB, (8,)).tolist()
    counts = torch.zeros(3 * [SMALL_VOCAB], dtype=torch.float64)
    for seed in torch.randint(MAX_SEED, (runs,)).tolist():
        counts[tuple(text_of(pair.events(prompt, replace(settings, seed=seed))))] += 1
    p_value = chi_square(counts.ravel(), probs_of_texts(pair.target, prompt, settings).ravel().cpu())
    assert p_value > 1e-3, f"chi-square over {runs} runs: p = {p_value:.3g}"


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """Pearson's p-value; rare texts are one cell. As in `studies.statistics`, which needs scipy."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    rare = expected < FEWEST
    found, expected = (torch.cat([cells[~rare], cells[rare].sum()[None]]) for cells in (counts, expected))
    assert len(found) > 2, "hardly any text is likely"
    statistic = ((found - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2), statistic / 2))


@torch.inference_mode()
def probs_of_texts(model: PreTrainedModel, prompt: Sequence[int], settings: Settings) -> Tensor:
    """The probability of every text of three tokens, [V, V, V] float64, by transformers' forward."""
    vocab = torch.arange(SMALL_VOCAB, device=model.device)
    pairs = torch.cartesian_prod(vocab, vocab)
    rows = torch.tensor(prompt, device=model.device).expand(len(pairs), -1)
    logits = model(torch.cat([rows, pairs], 1)).logits[:, -3:]
    rows = probabilities(logits, settings).double().view(SMALL_VOCAB, SMALL_VOCAB, 3, SMALL_VOCAB)
    first, second, third = rows.unbind(2)
    probs = first[0, 0][:, None, None] * second[:, 0][:, :, None] * third
    return probs / probs.sum()
