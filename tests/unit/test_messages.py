import ast
import re

import pytest

from ..messages import KEPT, messages, script_sentences, sentences


def test_every_message_is_as_it_was() -> None:
    """Where that is meant, `python -m tests.messages --write` writes the new ones."""
    assert messages().splitlines() == KEPT.read_text(encoding="utf-8").splitlines()


def test_sentences_are_found_with_places_for_their_values() -> None:
    source = '''
def f(name: str, k: int) -> None:
    """No one is shown this."""
    note = "two words" + (" and " + word) if k else "none"
    raise BadInput(f"K = {k} of {self.name!r}: {'too many' if k else 'x'}" + plural(k))
'''
    assert set(sentences(ast.parse(source))) == {
        "two words and {word}",
        "K = {k} of {name}: {}{}",
        "too many",
    }
    script = """// a comment, not shown
        show(`the round ${round(n)} ${n ? `is over` : "yet"}`, 'so it goes', ".part");"""
    assert set(script_sentences(script)) == {"the round {} {}", "is over", "so it goes"}


# One word for one thing, where people read it: the page, the studies, and what is said of a race.
OTHER_WORDS = {
    r"baselines?|plain decoding|plain lane": "the target alone",
    r"propos\w+|draft(ed)? tokens?|candidates? of the drafter|speculated": "a guess",
    r"iterations?|drafting steps?|speculation steps?": "a round",
    r"forwards?|forward pass(es)?|verification pass(es)?|model runs?": "a pass",
    r"verifier|big model|large model": "the target",
    r"speculator|proposer|assistant model": "the drafter",
}
READ_BY_PEOPLE = re.compile(r"specdemo/(ui|studies|racing/(words|verdict_words|busy|outcome)|drafters/names)")


@pytest.mark.parametrize("others", OTHER_WORDS)
def test_a_thing_has_one_word(others: str) -> None:
    place, found = "", []
    for line in messages().splitlines():
        if line.startswith("# "):
            place = line
        elif READ_BY_PEOPLE.search(place) and re.search(rf"\b({others})\b", line, re.IGNORECASE):
            found.append(f"{place}: {line}")
    assert found == [], f"Say {OTHER_WORDS[others]}."
