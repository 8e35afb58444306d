"""Speculative decoding, the whole idea. `python docs/speculative_decoding.py` writes with a large and a small GPT.

A *drafter*, here the small model, guesses the next tokens. The *target*, whose text is wanted, reads them all in one
pass. From its logits, a rule decides how many guesses are accepted, and one token of the target's own follows them.
That is one *round*: it adds one token or more, and the text is the target's, in fewer passes.

A model is a function from token ids [n] to logits [n, V]: row i predicts the token after ids[: i + 1]. For brevity
there is no KV cache, so a pass reads the whole text again. `specdemo/decoding` does the same with caches.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Tokens = tuple[int, ...]
Model = Callable[[Tokens], Tensor]
Gumbel = Callable[[int], Tensor]  # a position in the text -> its random numbers, -log(-log(uniform)) [V]


def read(target: Model, text: Tokens, branches: list[Tokens]) -> dict[Tokens, Tensor]:
    """The target's logits [V] after the text and each prefix of each branch of guesses, by prefix.

    A chain of guesses is one branch. Here each branch takes a pass; with a tree mask, one pass reads them all.
    """
    rows: dict[Tokens, Tensor] = {}
    for branch in branches:
        logits = target(text + branch)[len(text) - 1 :]
        rows |= {branch[:depth]: row for depth, row in enumerate(logits)}
    return rows


def score(logits: Tensor, temperature: float, gumbel: Tensor) -> Tensor:
    """Scores [..., V] whose argmax is a draw from softmax(logits / temperature), by the Gumbel-max trick."""
    return logits.double() / temperature + gumbel if temperature else logits


def draft(drafter: Model, text: Tokens, widths: Sequence[int], temperature: float, gumbel: Gumbel) -> list[Tokens]:
    """The branches of a tree: at depth d each branch goes on with its widths[d] best tokens. (1, 1, 1) is a chain.

    The drafter uses the target's random numbers, so where the models agree it guesses what the target will draw.
    """
    branches: list[Tokens] = [()]
    for depth, width in enumerate(widths):
        logits = torch.stack([drafter(text + branch)[-1] for branch in branches])
        best = score(logits, temperature, gumbel(len(text) + depth)).topk(width).indices.tolist()
        branches = [(*branch, token) for branch, tokens in zip(branches, best, strict=True) for token in tokens]
    return branches


def match(target: Model, text: Tokens, branches: list[Tokens], temperature: float, gumbel: Gumbel) -> Tokens:
    """The tokens of a round under the match rule: guesses are accepted as long as they are what the target draws.

    The target draws every token, with random numbers that depend on the position alone. So the text is the same for
    every draft. With the empty draft, [()], a round is a step of plain decoding.
    """
    rows, emitted = read(target, text, branches), Tokens()
    while emitted in rows:
        token = score(rows[emitted], temperature, gumbel(len(text) + len(emitted))).argmax()
        emitted += (int(token),)
    return emitted


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) [V]; at temperature 0 all of it on the largest."""
    return (logits / temperature).softmax(-1) if temperature else torch.eye(len(logits))[logits.argmax()]


def sample(weights: Tensor, u: float) -> int:
    """The first token at which the cumulative weight exceeds u times the sum."""
    cumulative = weights.double().cumsum(0)
    return int(torch.searchsorted(cumulative, u * cumulative[-1:], right=True))


def reject(target: Model, drafter: Model, text: Tokens, temperature: float, u: list[float], v: list[float]) -> Tokens:
    """The tokens of a round under rejection sampling (arXiv 2211.17192, algorithm 1); u [k] draws, v [k + 1] tests.

    A guess x, drawn from the drafter's q, is accepted with probability min(1, p(x) / q(x)). The first that is not is
    replaced by a token drawn from max(0, p - q), normalised. So every token follows p, the target's distribution.
    """
    guesses, qs = Tokens(), list[Tensor]()
    for number in u:
        qs.append(probabilities(drafter(text + guesses)[-1], temperature))
        guesses += (sample(qs[-1], number),)
    rows = read(target, text, [guesses])
    for i, (x, q) in enumerate(zip(guesses, qs, strict=True)):
        p = probabilities(rows[guesses[:i]], temperature)
        if v[i] >= p[x] / q[x]:
            return (*guesses[:i], sample((p - q).clamp(min=0), v[-1]))
    return (*guesses, sample(probabilities(rows[guesses], temperature), v[-1]))


@torch.inference_mode()
def main(prompt: str = "ROMEO:\n", length: int = 200, temperature: float = 0.8) -> None:
    weights = Path(__file__).parents[1] / "presets/weights/nanogpt-shakespeare"
    gpts = (AutoModelForCausalLM.from_pretrained(f"{weights}{size}", dtype=torch.float32) for size in ("-large", ""))
    target, drafter = (lambda ids, gpt=gpt: gpt(torch.tensor([ids])).logits[0] for gpt in gpts)
    tokenizer = AutoTokenizer.from_pretrained(weights)

    def gumbel(position: int) -> Tensor:
        u = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(position), dtype=torch.float64)
        return -(-u.log()).log()

    for name, widths in ("Alone", ()), ("A chain of 4", (1, 1, 1, 1)), ("A tree of 14", (2, 2, 2)), ("Rejection", None):
        text, rounds = tuple(tokenizer.encode(prompt)), 0
        while len(text) < length:
            if widths is None:
                emitted = reject(target, drafter, text, temperature, torch.rand(4).tolist(), torch.rand(5).tolist())
            else:
                emitted = match(target, text, draft(drafter, text, widths, temperature, gumbel), temperature, gumbel)
            accepted, own = tokenizer.decode(emitted[:-1]), tokenizer.decode(emitted[-1:])
            print(f"\033[32m{accepted}\033[33m{own}", end="\033[0m", flush=True)  # green: accepted, orange: own
            text, rounds = text + emitted, rounds + 1
        print(f"\n{name}: {rounds} rounds for {len(text)} tokens\n")


if __name__ == "__main__":
    main()
