"""Whether a published head seems to be wired wrongly: then nearly all of its first guesses fail.

Those who publish heads report that 0.65 to 0.85 of the first guesses pass (EAGLE-3 for Llama-3.1-8B: 0.75 to 0.80;
DFlash for Qwen3-8B: 0.82 on mathematics; Medusa for Vicuna-7B: about 0.6), and even heads after a short training reach
0.4 (P-EAGLE for Qwen3-8B after 5,000 texts).
"""

from __future__ import annotations

from scipy.special import bdtr  # the binomial distribution: the chance of at most so many

USUAL = {"eagle": (0.65, 0.85), "block": (0.65, 0.85), "medusa": (0.5, 0.65)}  # by the kind of head
FAR_BELOW = 1 / 3  # of the lowest that is usual: where a share is less, something may be wrong
POOR = 0.6  # the same for heads that were trained for a short time, and for texts that are hard to guess
UNLIKELY = 1 / 200  # how often a poor head may be doubted by chance
# What may differ from its training, the likeliest first.
CAUSES = "the layers it reads", "its rope_theta", "the chat template", "the thinking mode", "a quantized target"


def head_doubt(kind: str, name: str, drafts: int, passed: int) -> str | None:
    """A sentence if far fewer first guesses of a published head pass than of such heads usually do.

    Few drafts are enough where none passes: K = auto soon stops asking a head that is always wrong.

    Args:
        kind: of the head, which is its drafter.
        name: of its format, see `Loaded.head_formats`.
        passed: in how many of the drafts the first guess was right.
    """
    lowest, highest = USUAL[kind]
    if passed >= FAR_BELOW * lowest * drafts or bdtr(passed, drafts, POOR * lowest) > UNLIKELY:
        return None
    return (
        f"Only {passed / drafts:.0%} of the first guesses of this {name} head pass, where {lowest:.0%} to "
        f"{highest:.0%} are usual. Likely causes, in this order: {', '.join(CAUSES)}."
    )
