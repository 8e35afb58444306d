import ast

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
