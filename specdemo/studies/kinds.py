"""What kind of token a token is, from its text and the text before it."""

from __future__ import annotations

import unicodedata
from enum import Enum


class Kind(str, Enum):
    """The kinds that acceptance is counted by."""

    PUNCTUATION = "punctuation"
    FUNCTION_WORD = "function word"
    CONTENT_WORD = "content word"
    NUMBER = "number"
    SYMBOL = "whitespace or code symbol"
    CONTINUATION = "word continuation"


PUNCTUATION = frozenset(".,;:!?'\"()-\u2013\u2014\u2026\u2018\u2019\u201c\u201d\u00ab\u00bb\u00bf\u00a1")

# Articles, pronouns, prepositions, conjunctions, auxiliaries and particles of English.
_ENGLISH = """
    a about above after again against all also am among an and another any are around as at be because been before
    being below between both but by can could did do does doing down during each either few for from had has have
    having he her here hers herself him himself his how i if in into is it its itself just may me might mine more
    most much must my myself neither no nor not of off on once one only onto or other our ours ourselves out over own
    same shall she should since so some such than that the their theirs them themselves then there these they this
    those through to too toward towards under until up upon us very was we were what when where which while who whom
    whose why will with within without would yes yet you your yours yourself yourselves
"""
FUNCTION_WORDS = frozenset(_ENGLISH.split())


def kind_of(token: str, before: str) -> Kind:
    """The kind of a token with this text after the text `before`; the first rule that fits decides.

    1. A token without any visible character is whitespace (or part of a character: a continuation).
    2. One without letters is a number if it holds a digit, punctuation if every visible character is a mark of prose,
       and a code symbol otherwise.
    3. One with letters that is written right after a letter, a digit, an underscore or an apostrophe within a word
       continues that word.
    4. The rest begin words: function words by a list of English ones, else content words.

    It looks backwards only, so that a rejected guess, which nothing follows, is sorted by the same rules: the first
    piece of a longer word counts as the word it looks like. Scripts without spaces come out as continuations.
    """
    visible = token.strip()
    if not visible:
        return Kind.SYMBOL if token else Kind.CONTINUATION
    if not any(_is_letter(c) for c in visible):
        if any(c.isnumeric() for c in visible):
            return Kind.NUMBER
        return Kind.PUNCTUATION if PUNCTUATION.issuperset(visible) else Kind.SYMBOL
    if not token[0].isspace() and _in_word(token, before):
        return Kind.CONTINUATION
    word = visible.strip("".join(PUNCTUATION)).lower()
    return Kind.FUNCTION_WORD if word in FUNCTION_WORDS else Kind.CONTENT_WORD


def _in_word(token: str, before: str) -> bool:
    """Whether the token's first character goes on with the word that `before` ends in."""
    if before[-1:] in ("'", "\u2019"):  # don + ' + t, but not the opening mark of a quotation
        return _is_wordy(before[-2:-1])
    return _is_wordy(before[-1:]) and (_is_wordy(token[0]) or token[0] in "'\u2019")


def _is_wordy(character: str) -> bool:
    return character == "_" or character.isalnum() or _is_letter(character)


def _is_letter(character: str) -> bool:
    return bool(character) and unicodedata.category(character)[0] in "LM"  # letters and the marks on them
