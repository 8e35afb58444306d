"""What the target writes alone, how often it writes each text, and runs to compare with that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.special import chdtrc
from torch import Tensor

from specdemo.decoding import batch
from specdemo.decoding.drafter import Drafter
from specdemo.decoding.events import Event, Finished, Prefilled
from specdemo.decoding.loop import Decoding
from specdemo.drafters.names import drafter_class
from specdemo.racing.race import rule_for, start
from specdemo.settings import AUTO, Settings
from specdemo.studies.statistics import chi_square
from specdemo.tokens import DraftOutcome
from tests.harness.classes import DraftLengthController, Loaded

from .doubles import copying, ids_of, rounds_of


def with_text(event: Event, emitted: Sequence[str] = (), drafted: Sequence[str] = ()) -> Event:
    """The event with the text of its tokens."""
    if isinstance(event, Finished):
        return replace(event, text="".join(emitted))
    if isinstance(event, Prefilled):
        return replace(event, token=replace(event.token, text="".join(emitted)))
    tokens = tuple(
        replace(token, text=text)
        for token, text in zip(event.emitted, [*emitted, *[""] * len(event.emitted)], strict=False)
    )
    guesses = tuple(replace(token, text=text) for token, text in zip(event.drafted, drafted, strict=False))
    return replace(event, drafted=guesses, emitted=tokens)


def true_texts(
    table: Tensor,
    prompt: Sequence[int],
    length: int,
    settings: Settings,
    eos: int = -1,
    allowed: Callable[[tuple[int, ...]], Sequence[bool]] | None = None,
) -> dict[tuple[int, ...], float]:
    """The probability of every text of `length` tokens (fewer after `eos`) under the target alone; with `allowed`,
    which says what may follow a text, under the target masked by it.

    Temperature, top-k and top-p are written out again here, in plain Python, as the reference.
    """
    texts: dict[tuple[int, ...], float] = {}

    def walk(text: tuple[int, ...], weight: float) -> None:
        if len(text) == length or (text and text[-1] == eos):
            texts[text] = weight
            return
        row = table[tuple((*prompt, *text)[-2:])].tolist()
        if allowed is not None:
            row = [p * may for p, may in zip(row, allowed(text), strict=True)]
        for token, p in enumerate(warped(row, settings)):
            if p:
                walk((*text, token), weight * p)

    walk((), 1.0)
    return texts


def warped(row: Sequence[float], settings: Settings) -> list[float]:
    """Temperature, top-k and top-p on a list of probabilities without ties."""
    if settings.temperature == 0:
        return [float(p == max(row)) for p in row]
    heated = normalised([p ** (1 / settings.temperature) for p in row])
    ranked = sorted(range(len(row)), key=lambda token: -heated[token])
    if settings.top_k:
        ranked = ranked[: settings.top_k]
    heated = normalised([p if token in ranked else 0.0 for token, p in enumerate(heated)])
    kept, total = [], 0.0
    for token in ranked:
        if total >= settings.top_p:
            break
        kept.append(token)
        total += heated[token]
    return normalised([p if token in kept else 0.0 for token, p in enumerate(heated)])


def normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def decode(runner: Any, drafter: Drafter, prompt: Sequence[int], settings: Settings, *args: Any, **more: Any) -> Any:
    """`batch.decode` by the rule of the settings, which is the one that `Toy.drafter` gave to the drafter."""
    rule = more.pop("rule", None) or getattr(drafter, "shared_rule", None) or rule_for(settings)
    if settings.k == AUTO:
        more["chooser"] = DraftLengthController(more["costs"], settings.tree)
    return batch.decode(Decoding(runner, drafter, prompt, rule, *args, **more))


def plain_text(
    runner: Any, prompt: Sequence[int], settings: Settings, eos_ids: frozenset[int] = frozenset()
) -> list[int]:
    """What the target writes alone."""
    return ids_of(list(decode(runner, drafter_class("none")(), prompt, replace(settings, k=0, tree=False), eos_ids)))


def texts_drafted_and_not(loaded: Loaded, prompt: Sequence[int], count: int) -> list[tuple[Settings, list[int]]]:
    """What a target writes at temperatures 0 and 0.8, with the settings. It is checked that drafts change no token."""
    became, texts = set(), []
    for temperature in (0.0, 0.8):
        settings = Settings(k=4, temperature=temperature, seed=3, max_new_tokens=count)
        alone = ids_of(list(start(loaded, "none", prompt, settings)))
        assert len(set(alone)) >= 5, "a text that says too little"
        runner = loaded.target_runner(len(prompt) + count)
        events = list(decode(runner, copying([*prompt, *alone], runner.vocab_size), prompt, settings, loaded.eos_ids))
        assert ids_of(events) == alone
        became |= {token.outcome for event in rounds_of(events) for token in event.drafted}
        texts.append((settings, alone))
    assert {DraftOutcome.ACCEPTED, DraftOutcome.REJECTED} <= became
    return texts


@torch.inference_mode()
def generated(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy text of transformers' `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


def p_value(found: Mapping[tuple[int, ...], int], true: Mapping[tuple[int, ...], float]) -> float:
    """Of sampled texts, against the probabilities of all, by a chi-square test."""
    assert found.keys() <= true.keys(), "a text was written that cannot be"
    tested = chi_square(np.array([found.get(text, 0) for text in true]), np.array([*true.values()]))
    assert tested is not None
    return tested


def p_of_pairs(table: Tensor, prompt: Sequence[int], texts: Sequence[Sequence[int]], temperature: float) -> float:
    """Of the tokens after each pair of tokens in sampled texts, against the target's distribution there."""
    counts = np.zeros(table.shape)
    for text in texts:
        whole = [*prompt, *text]
        for triple in list(zip(whole, whole[1:], whole[2:], strict=False))[len(prompt) - 2 :]:
            counts[triple] += 1
    probs = (table.log() / temperature).softmax(-1).numpy()
    assert counts[probs == 0].sum() == 0, "an impossible token was emitted"
    expected = counts.sum(-1, keepdims=True) * probs
    cells = expected > 0
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    degrees = cells.sum() - (counts.sum(-1) > 0).sum()
    return float(chdtrc(degrees, statistic))
