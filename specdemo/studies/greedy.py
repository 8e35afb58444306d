"""Is the text with a drafter the target's own? Token for token, against the target alone, transformers and a server.

Under the match rule that is so at every temperature. At temperature 0 the target alone is compared with transformers:
its own `generate` runs the same weights through its own forward, cache and loop: it shares no code with ours. So does a
server of the same file, which also multiplies the stored weights in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from ..decoding.events import emitted_tokens
from ..drafters.names import DRAFTERS
from ..errors import BadInput
from ..models.loaded import Loaded
from ..racing.compare import compare, is_exact, is_near_tie
from ..racing.race import check_run, start
from ..servers.llamacpp import LlamaCpp
from ..servers.race import gap
from ..settings import Settings
from ..tokens import Token, TokenKind
from .prompts import Prompt
from .statistics import POWER
from .summaries import Figures, Row, Runs, summarise, total

TRANSFORMERS = "transformers"
FIGURES: Figures = {"texts": len, "same": total("identical"), "ties": total(lambda check: bool(check["near_tie"]))}


def steps(prompts: Sequence[Prompt], drafters: Sequence[str], transformers: bool = True) -> int:
    """How many checks `greedy` yields."""
    return len(prompts) * (len(drafters) + transformers)


def greedy(
    loaded: Loaded, prompts: Sequence[Prompt], drafters: Sequence[str], settings: Settings, transformers: bool = True
) -> Iterator[Row]:
    """Check every prompt with every drafter, and the target alone against transformers unless `transformers` is False:
    a row for each two texts, see `_check`.

    Args:
        settings: temperature 0, or the match rule; transformers is compared with at temperature 0 only.
    """
    transformers = transformers and settings.temperature == 0
    prompt_ids = {prompt.id: loaded.encode(prompt.prompt) for prompt in prompts}
    for name in ("none", *drafters):
        check_run(loaded, name, [*prompt_ids.values()], settings)
    held = loaded.model if transformers else None  # opened once for all prompts, and freed with this  # noqa: F841
    for prompt in prompts:
        ids = prompt_ids[prompt.id]
        plain = _text(loaded, "none", ids, settings)
        for name in drafters:
            exact = is_exact(loaded.environment(), settings.k, settings.tree)
            yield _check(loaded, prompt, settings, name, plain, _text(loaded, name, ids, settings), exact)
        if transformers:
            theirs = [Token(token, TokenKind.TARGET) for token in _theirs(loaded, ids, settings.max_new_tokens)]
            yield _check(loaded, prompt, settings, TRANSFORMERS, plain, theirs)


def against_server(loaded: Loaded, server: LlamaCpp, prompts: Sequence[Prompt], max_new_tokens: int) -> Iterator[Row]:
    """Check every prompt against a server that runs the same model: both read the same token ids, without a drafter of
    ours, at temperature 0.
    """
    settings = Settings(0, max_new_tokens=max_new_tokens)
    for prompt in prompts:
        ids = loaded.encode(prompt.prompt)
        check_tokens(loaded, server, ids)
        plain = _text(loaded, "none", ids, settings)
        written = [Token(id, TokenKind.TARGET) for id in server.written(ids, max_new_tokens)]
        # Both tell the token that ends a text, but one may go on after a token that ends it for the other.
        ours, theirs = (text[: min(len(plain), len(written))] for text in (plain, written))
        check = _check(loaded, prompt, settings, server.facts["engine"], ours, theirs)
        place = check["first_difference"]
        if place is not None:
            pair = ours[place], theirs[place]
            before = [*ids, *(token.id for token in ours[:place])]
            margin = _gap(loaded, before, pair, len(ids) + max_new_tokens)
            near_tie = is_near_tie(margin, "")  # a server does not tell how it rounds
            apart = gap(server, ids, ours[:place], pair)
            check |= {"margin": margin, "near_tie": near_tie, "server_margin": apart}
        yield check


def check_tokens(loaded: Loaded, server: LlamaCpp, ids: Sequence[int]) -> None:
    """Refuse a server whose token ids mean something else."""
    if server.text_of(ids) != loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False):
        raise BadInput(
            f"The server at {server.client.address} runs {server.facts['model']}, whose tokens are not those of the "
            f"preset {loaded.preset.name}: it must serve the same model."
        )


@torch.inference_mode()
def _gap(loaded: Loaded, ids: Sequence[int], pair: Sequence[Token], capacity: int) -> float:
    """How far apart the target has the logits of two tokens after a text, in a run of this capacity."""
    runner = loaded.target_runner(capacity)
    try:
        one, other = runner.prefill(ids)[0, [token.id for token in pair]].tolist()
        return float(abs(one - other))
    finally:
        runner.release()


def differences_in_words(checks: Runs) -> list[str]:
    """Where the texts of a server part from ours, a line each."""

    def apart(margin: float | None) -> str:
        return "an unknown distance apart" if margin is None else f"{margin:.2f} of a logit apart"

    return [
        f"{check['prompt_id']}: from token {check['first_difference'] + 1} on; the two tokens are "
        f"{apart(check['margin'])} for the target here, {apart(check['server_margin'])} for the server."
        for check in checks
        if check["first_difference"] is not None
    ]


def in_words(checks: Runs) -> list[str]:
    """What the checks showed, one sentence for each drafter, K and temperature, and for transformers."""
    lines = []
    for row in summarise(checks, ("text", "k", "temperature"), FIGURES):
        text, count, same, ties = (row[name] for name in ("text", "texts", "same", "ties"))
        texts, are = "text" if count == 1 else "texts", "is" if 1 in (same, count) else "are"
        ours = text in DRAFTERS
        name = f"{text}, K = {row['k']}, temperature {row['temperature']:g}" if ours else text
        line = f"{name}: {same} of {count} {texts} {are} the target's own, token for token"
        if ties:
            line += f"; {ties} {'parts' if ties == 1 else 'part'} at a near-tie, which rounding decides"
            line += " (float32 rounds less)" if ours or text == TRANSFORMERS else ""
        if unexplained := count - same - ties:
            part = "parts" if unexplained == 1 else "part"
            line += f"; {unexplained} {part} where rounding is no explanation: something is wrong"
        if same == count:
            caught = 1 - (1 - POWER) ** (1 / same)
            line += f" (a fault that parts {caught:.0%} of all texts would show in {POWER:.0%} of such runs)"
        lines.append(line + ".")
    return lines


def _text(loaded: Loaded, drafter: str, prompt_ids: Sequence[int], settings: Settings) -> list[Token]:
    return [token for event in start(loaded, drafter, prompt_ids, settings) for token in emitted_tokens(event)]


def _theirs(loaded: Loaded, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """What transformers' `generate` writes greedily. All other settings are those of the checkpoint."""
    from transformers import GenerationConfig

    from ..engines.modules import make_stoppable
    from ..engines.settled import settled

    model = settled(loaded.model, len(prompt_ids) + max_new_tokens)  # else longer texts can begin otherwise than ours
    make_stoppable(model)
    ids = torch.tensor([prompt_ids], device=loaded.device)
    ends = {"eos_token_id": sorted(loaded.eos_ids) or None, "pad_token_id": min(loaded.eos_ids, default=None)}
    # Some checkpoints ask for another penalty.
    config = GenerationConfig(do_sample=False, repetition_penalty=1.0, max_new_tokens=max_new_tokens, **ends)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt_ids) :].tolist()


def _check(
    loaded: Loaded,
    prompt: Prompt,
    settings: Settings,
    text: str,
    plain: list[Token],
    other: list[Token],
    exact: bool = False,
) -> Row:
    """Two texts of one prompt, which should be the same.

    `text` is a drafter's name, `transformers`, or the engine of a server; it is compared with the target alone. Where
    they part, `margin` is how close the two tokens were for the target, and `near_tie` whether rounding decides between
    them: never with a drafter on an engine that is exact to the bit. `server_margin` is how close a server had them.
    """
    found = compare(plain, other)
    near_tie = None
    if not found.identical:
        margin, dtype = found.margin, str(loaded.dtype).removeprefix("torch.")
        near_tie = margin is not None and not exact and is_near_tie(margin, dtype, settings.temperature)
    return {
        "prompt_id": prompt.id,
        "category": prompt.category,
        "text": text,
        "k": settings.k,
        "temperature": settings.temperature,
        "tokens": len(plain),
        **asdict(found),
        "near_tie": near_tie,
        "server_margin": None,
    }
