"""Between two tokenizers: tokens of the target as tokens of a draft model with another vocabulary, and back.

Both ways go through the text, as in universal assisted generation (Timor et al., arXiv 2502.05202, and transformers'
`AssistedCandidateGeneratorDifferentTokenizers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from .chat import special_ids

WINDOW = 16  # tokens encoded together with the drafted ones, since words may join
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what incomplete characters are decoded to
BY_TEXT = (  # measured as in docs/how-it-works.md, "Drafters"
    "The tokenizers differ, so the draft model drafts by text: each round decodes the text and encodes it again (1% to "
    "4% of the draft time in our measurement, and more for long texts), some drafts are lost where the two split words "
    "differently (2% of the rounds), and above temperature 0 fewer guesses are accepted, since they are not drawn."
)


def differing_token(target: Mapping[str, int], draft: Mapping[str, int], readable: int) -> str | None:
    """A sentence on the first token id that means different tokens in two vocabularies; None if there is none.

    Padding at the end of a vocabulary may differ, and so may tokens that only one of the two has, as long as the draft
    model can read whatever the target writes.

    Args:
        readable: how many ids the draft model has.
    """
    if target == draft and max(target.values(), default=0) < readable:  # the loop takes ten times as long to find it
        return None
    names = {index: token for token, index in draft.items()}
    for token, index in sorted(target.items(), key=lambda item: item[1]):
        if names.get(index, token) == token and draft.get(token, index) == index and index < readable:
            continue
        other = names.get(index)
        if other == token:
            return f"Token {index} is {token!r} for both models, but the draft model has no embedding for it."
        there = f"number {index} is {other!r}" if other is not None else f"there is no number {index}"
        return f"Token {index} is {token!r} for the target, but {there} for the draft model."
    return None


class Translation:
    """Translates the token ids of one pair of tokenizers, see `decoding.drafter.Translator`.

    A special token becomes the other tokenizer's special token of the same name or role (beginning or end of a text).
    Tokens without a counterpart or without an embedding are left out of the draft model's text.

    Args:
        readable: how many ids the draft model has; None is enough for all.
    """

    def __init__(
        self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, readable: int | None = None
    ) -> None:
        self._target, self._draft = target, draft
        self._unread = {index for index in draft.get_vocab().values() if readable is not None and index >= readable}
        self._target_specials, self._draft_specials = special_ids(target), special_ids(draft)
        self._to_draft = _same_specials(target, draft)
        self._to_target = _same_specials(draft, target)
        letter = draft.encode("a", add_special_tokens=True)
        self._beginning = [index for index in letter[:1] if index in self._draft_specials]

    def to_draft(self, token_ids: Sequence[int]) -> list[int]:
        """The text of the target's tokens in the draft model's tokens, without an incomplete character at the end."""
        text: list[int] = []
        for is_special, part in groupby(token_ids, self._target_specials.__contains__):
            if is_special:
                text += [self._to_draft[index] for index in part if index in self._to_draft]
            else:
                words = _decode(self._target, list(part)).rstrip(UNFINISHED)
                text += _encode(self._draft, words)
        text = text if text[:1] == self._beginning else self._beginning + text
        return [index for index in text if index not in self._unread]

    def to_target(self, token_ids: Sequence[int], read: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens that continue `token_ids` as `drafted` continues `read`.

        Empty if there are none, for instance where the two tokenizers cut a word in different places.

        Args:
            read: what `to_draft` made of `token_ids`, or the end of it.
            drafted: tokens of the draft model. What comes after a special token is left out.
        """
        count = next((i for i, index in enumerate(drafted) if index in self._draft_specials), len(drafted))
        before, words = list(read[-WINDOW:]), list(drafted[:count])
        seen = _decode(self._draft, before)
        both = _decode(self._draft, before + words).rstrip(UNFINISHED)
        new = both[len(seen) :] if both.startswith(seen) else ""
        translated = tokens_behind(self._target, last_text(token_ids, self._target_specials), new)
        finished = count < len(drafted) and drafted[count] in self._to_target
        if finished and len(translated) == 0 and new:  # the end would follow words that are missing
            return []
        return [*translated, self._to_target[drafted[count]]] if finished else translated


def tokens_behind(tokenizer: PreTrainedTokenizerBase, before: list[int], new: str) -> list[int]:
    """Tokens that add the text `new` to that of the tokens `before`, see `last_text`; empty if none do.

    First those of the whole text are tried, if the tokenizer cuts it where `before` ends; then those of the new text by
    itself, or after a line break, where no tokenizer puts a space before a word.
    """
    if not new:
        return []
    text = _decode(tokenizer, before).rstrip(UNFINISHED)
    whole = _encode(tokenizer, text + new)
    wanted = _decode(tokenizer, whole)  # differs from the text if the tokenizer normalises it
    cuts = sorted(range(len(whole) + 1), key=lambda cut: abs(cut - len(before)))
    alone, behind_break = _encode(tokenizer, new), _encode(tokenizer, "\n" + new)
    candidates = [whole[cut:] for cut in cuts[: WINDOW // 2]]
    candidates += [alone, *(behind_break[cut:] for cut in (1, 2))]
    return next((tokens for tokens in candidates if tokens and _decode(tokenizer, before + tokens) == wanted), [])


def _same_specials(of: PreTrainedTokenizerBase, to: PreTrainedTokenizerBase) -> dict[int, int]:
    """Special tokens of a tokenizer to those of another."""
    theirs = {to.convert_ids_to_tokens(index): index for index in special_ids(to)}
    names = {index: of.convert_ids_to_tokens(index) for index in special_ids(of)}
    named = {index: theirs[name] for index, name in names.items() if name in theirs}
    parts = {of.bos_token_id: to.bos_token_id, of.eos_token_id: to.eos_token_id}
    return {index: other for index, other in parts.items() if None not in (index, other)} | named


def last_text(token_ids: Sequence[int], specials: frozenset[int]) -> list[int]:
    """The last tokens of a text, after its last special token."""
    last = list(token_ids[-WINDOW:])
    special = [place for place, index in enumerate(last) if index in specials]
    return last[special[-1] + 1 :] if special else last


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)) if text else []


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
