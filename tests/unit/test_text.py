"""Token ids to text as they come: whole characters, one string a token, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specdemo.decoding.events import Event, Finished, Prefilled, Round, emitted_tokens
from specdemo.racing.lanes import Detokenizer, LaneText, StopStrings
from specdemo.settings import Settings
from specdemo.tokens import DraftedToken, DraftOutcome, FinishReason, Token, TokenKind
from tests.harness.doubles import (
    SPECIAL,
    Scripted,
    TableRunner,
    byte_tokenizer,
    counting_table,
    fallback_tokenizer,
    ids_of,
    letters_tokenizer,
    oracle,
)
from tests.harness.texts import decode

CORPUS = {
    "plain": "hello world, hell  he",
    "emoji": "👍🏽 ok 😀😀😀",
    "family": "a 👨‍👩‍👧‍👦 b",
    "flag": "🏴󠁧󠁢󠁥󠁮󠁧󠁿!",
    "right to left": "שלום \u202eabc\u202c عربى",
    "combining": "e\u0301 न\u094dम\u0938\u094d\u0924\u0947",
    "chinese": "漢字仮名交じり文です。",
    "markup": "<img src=x onerror=alert(1)> ${x} {{x}} `y` </script>",
    "special": f"<|im_end|> {SPECIAL} <s>",
    "replacement": "a\ufffdb\ufffd",
    "lines": "a\n\r\n\tb\u2028c\u0085",
    "spaces": "   he  llo ",
}
TOKENIZERS = {"byte level": byte_tokenizer, "byte fallback": fallback_tokenizer}

texts = st.one_of(st.text(max_size=12), st.text(alphabet="he lo wæ漢😀\u200d👨\ufffd", max_size=16))


def spans_of(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """The string of each token, and what the end releases."""
    detokenizer = Detokenizer(tokenizer, before)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def whole(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# The detokenizer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS.keys())
def test_the_spans_joined_are_the_text(tokenizer, text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    assert "".join(spans_of(tokenizer(), ids)) == whole(tokenizer(), ids)
    assert whole(tokenizer(), ids).lstrip(" ") == text.lstrip(" ")  # Llama's manner eats one leading space


@given(st.sampled_from(sorted(TOKENIZERS)), texts, st.integers(0, 8))
def test_the_spans_joined_are_the_text_wherever_the_prompt_ends(name: str, text: str, cut: int) -> None:
    # Written out in bytes, a text's own replacement characters cannot be told from unfinished ones.
    text = text if name == "byte level" else text.replace("\ufffd", "?")
    tokenizer = TOKENIZERS[name]()
    prompt = tokenizer.encode("he" + text[:cut], add_special_tokens=False)
    ids = tokenizer.encode("he" + text[cut:], add_special_tokens=False)[1:]
    written = "".join(spans_of(tokenizer, ids, prompt))
    assert whole(tokenizer, prompt) + written == whole(tokenizer, [*prompt, *ids])


@given(st.lists(st.integers(0, 261), max_size=24))
@example([0xF0, 0x9F, 0x98, 0xF0])
def test_any_ids_at_all_give_the_decoded_text(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    assert "".join(spans_of(tokenizer, ids)) == whole(tokenizer, ids)


@given(st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x41, 0xC3]), max_size=24))
@example([0x80] * 40)
@example([0x80] * 40 + [0xF0, 0x9F, 0x98, 0x80, 0x41])
@example([0xF0, 0x9F, 0x98] * 12 + [0x80, 0x41])
def test_any_bytes_at_all_give_the_decoded_text(content: list[int]) -> None:
    tokenizer = byte_tokenizer()
    ids = [id_of_byte(byte) for byte in content]
    assert "".join(spans_of(tokenizer, ids)) == whole(tokenizer, ids)
    assert whole(tokenizer, ids) == bytes(content).decode(errors="replace")


def id_of_byte(byte: int) -> int:
    """The token of one byte in the byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [code for code in range(256) if code not in printable]
    letter = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return int(byte_tokenizer().convert_tokens_to_ids(letter))


def test_an_emoji_over_several_tokens_belongs_to_the_last_of_them() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("he😀ll", add_special_tokens=False)
    spans = spans_of(tokenizer, ids)
    assert spans == ["he", *[""] * (len(ids) - 3), "😀", "ll", ""]
    assert len(ids) > 4


def test_a_character_that_never_ends_is_shown_at_the_end_and_only_once() -> None:
    ids = byte_tokenizer().encode("he😀", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(byte_tokenizer())
    assert [detokenizer.push(token) for token in ids] == ["he"] + [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_are_no_character_are_shown_as_they_come() -> None:
    detokenizer = Detokenizer(byte_tokenizer())
    shown = "".join(detokenizer.push(id_of_byte(0x80)) for _ in range(40))
    assert len(shown) >= 38
    assert shown + detokenizer.flush() == "\ufffd" * 40


def test_special_tokens_are_shown_literally() -> None:
    tokenizer = byte_tokenizer()
    eos = tokenizer.eos_token_id
    he, ll = tokenizer.convert_tokens_to_ids("he"), tokenizer.convert_tokens_to_ids("ll")
    assert spans_of(tokenizer, [he, eos, ll, eos]) == ["he", SPECIAL, "ll", SPECIAL, ""]


def test_a_leading_space_is_kept_behind_a_prompt() -> None:
    tokenizer = fallback_tokenizer()
    hi = tokenizer.convert_tokens_to_ids("▁hi")
    assert spans_of(tokenizer, [hi, hi], before=[hi]) == [" hi", " hi", ""]
    assert spans_of(tokenizer, [hi, hi]) == ["hi", " hi", ""]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_long_text_stays_whole(tokenizer) -> None:
    text = "漢字 hi 😀é" * 40
    ids = tokenizer().encode(text, add_special_tokens=False)
    assert "".join(spans_of(tokenizer(), ids)) == text


@given(texts, texts, texts)
def test_a_fork_reads_ahead_without_disturbing(before: str, drafted: str, after: str) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    first, second, third = (tokenizer.encode(text, add_special_tokens=False) for text in (before, drafted, after))
    written = "".join(detokenizer.push(token) for token in first)
    fork = detokenizer.fork()
    drafted_text = "".join(fork.push(token) for token in second) + fork.flush()
    written += "".join(detokenizer.push(token) for token in third) + detokenizer.flush()
    assert written == whole(tokenizer, [*first, *third])
    assert whole(tokenizer, [*first, *second]).endswith(drafted_text)


# Stop strings ----------------------------------------------------------------------------------------------


def stopped_at(text: str, strings: Sequence[str], step: int = 1) -> int | None:
    """After how many tokens of a text the strings end it; the ids are told `step` more at a time."""
    ids = byte_tokenizer().encode(text, add_special_tokens=False)
    stop = StopStrings(byte_tokenizer(), [], strings)
    return next((end for end in range(1, len(ids) + 1, step) if stop(ids[:end])), None)


def test_a_stop_string_is_found_across_token_borders() -> None:
    tokens = byte_tokenizer().convert_ids_to_tokens(byte_tokenizer().encode("hello world", add_special_tokens=False))
    assert tokens[:4] == ["hell", "o", "Ġw", "o"]
    assert stopped_at("hello world", ["lo w"]) == 3
    assert stopped_at("hello world", ["hello"]) == 2
    assert stopped_at("hello world", ["world", "el"]) == 1
    assert stopped_at("hello world", ["planet"]) is None
    assert stopped_at("hello world", []) is None


def test_a_stop_string_may_be_a_single_character_or_an_emoji() -> None:
    assert stopped_at("he\nll", ["\n"]) == 2
    ids = byte_tokenizer().encode("he😀ll", add_special_tokens=False)
    assert stopped_at("he😀ll", ["😀"]) == len(ids) - 1  # once its last byte is there
    assert stopped_at("he😀ll", ["😀l"]) == len(ids)


@given(
    st.text(alphabet="helo w😀", max_size=20),
    st.lists(st.text(alphabet="helo w😀", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_end_a_text_at_the_first_token_that_completes_one(text: str, strings: list[str]) -> None:
    ids = byte_tokenizer().encode(text, add_special_tokens=False)
    spans = spans_of(byte_tokenizer(), ids)[:-1]
    expected = (end for end in range(1, len(ids) + 1) if any(s in "".join(spans[:end]) for s in strings))
    assert stopped_at(text, strings) == next(expected, None)


def test_text_of_the_prompt_does_not_stop_a_run() -> None:
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("hell", add_special_tokens=False)
    stop = StopStrings(tokenizer, prompt, ["hell"])
    o = tokenizer.convert_tokens_to_ids("o")
    assert not stop([o])
    assert stop([o, *prompt])


@pytest.mark.parametrize("k", [0, 1, 2, 5, 16])
def test_a_stop_string_completed_inside_a_round_ends_the_text_there(k: int) -> None:
    letters = letters_tokenizer(20)
    drafter = oracle(range(20), vocab=20) if k else Scripted(lambda *_: [])
    settings = Settings(k=k, max_new_tokens=15, stop=("fgh", "zz"))
    stop = StopStrings(letters, [0, 1], settings.stop)
    events = list(decode(TableRunner(counting_table(20)), drafter, [0, 1], settings, stop=stop))
    assert letters.decode(ids_of(events)) == "cdefgh"
    assert events[-1] == Finished(FinishReason.STOP)


# A lane's text ---------------------------------------------------------------------------------------------


def emitted(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(token, TokenKind.ACCEPTED, 1.0) for token in ids)


def drafted(*ids: int) -> tuple[DraftedToken, ...]:
    return tuple(DraftedToken(token, DraftOutcome.UNTESTED, 1.0, 1.0, 0.5) for token in ids)


def events_of(rounds: Sequence[tuple[Sequence[int], Sequence[int]]], first: int) -> list[Event]:
    return [
        Prefilled(1, emitted(first)[0], 0.1),
        *(Round(i, drafted(*draft), emitted(*out), 0.1, 0.1, 0.2) for i, (draft, out) in enumerate(rounds)),
        Finished(FinishReason.LENGTH),
    ]


def emitted_texts(event: Event) -> list[str]:
    texts = [token.text for token in emitted_tokens(event)]
    return texts + [event.text] * bool(event.text) if isinstance(event, Finished) else texts


def drafted_texts(event: Event) -> list[str]:
    return [token.text for token in event.drafted] if isinstance(event, Round) else []


def test_a_lane_gives_each_token_its_own_string_even_where_texts_are_equal() -> None:
    letters = letters_tokenizer(3)
    lane = LaneText(letters, [0])
    shown = [lane.read(event) for event in events_of([([1, 1], [1, 1, 0]), ([0, 2], [1])], first=1)]
    assert [emitted_texts(event) for event in shown] == [["b"], ["b", "b", "a"], ["b"], []]
    assert [drafted_texts(event) for event in shown] == [[], ["b", "b"], ["a", "c"], []]
    assert lane.text == "bbbab"


def test_a_character_split_between_rounds_and_drafts() -> None:
    tokenizer = byte_tokenizer()
    he, *emoji = tokenizer.encode("he😀", add_special_tokens=False)
    lane = LaneText(tokenizer, [])
    rounds = [([*emoji[:2], he], emoji[:1]), (emoji[1:], emoji[1:])]
    shown = [lane.read(event) for event in events_of(rounds, first=he)]
    assert [drafted_texts(event) for event in shown][1][-1].endswith("he")
    assert [emitted_texts(event) for event in shown] == [["he"], [""], [*[""] * (len(emoji) - 2), "😀"], []]
    assert [drafted_texts(event) for event in shown][2][-1] == "😀"
    assert lane.text == "he😀"


def test_a_guess_of_a_tree_goes_on_from_its_parent_and_not_from_a_sibling() -> None:
    tokenizer = byte_tokenizer()
    he, *emoji = tokenizer.encode("he😀", add_special_tokens=False)
    parents = [-1, -1, 0, *range(2, len(emoji))]
    guesses = zip([emoji[0], he, *emoji[1:]], parents, strict=True)
    tree = tuple(DraftedToken(token, DraftOutcome.UNTESTED, parent=parent) for token, parent in guesses)
    read = LaneText(tokenizer, []).read(Round(0, tree, emitted(he), 0.1, 0.1, 0.2))
    assert drafted_texts(read) == ["", "he", *[""] * (len(emoji) - 2), "😀"]


def test_what_waits_at_the_end_is_released_by_the_end() -> None:
    tokenizer = byte_tokenizer()
    he, *emoji = tokenizer.encode("he😀", add_special_tokens=False)
    lane = LaneText(tokenizer, [])
    shown = [lane.read(event) for event in events_of([([], emoji[:1])], first=he)]
    assert [emitted_texts(event) for event in shown] == [["he"], [""], ["\ufffd"]]
    assert lane.text == "he\ufffd"


def test_hidden_tokens_are_shown_but_are_not_text() -> None:
    tokenizer = byte_tokenizer()
    he, eos = tokenizer.convert_tokens_to_ids("he"), tokenizer.eos_token_id
    lane = LaneText(tokenizer, [], frozenset({eos}))
    shown = [lane.read(event) for event in events_of([([eos], [eos])], first=he)]
    assert emitted_texts(shown[1]) == [SPECIAL]
    assert drafted_texts(shown[1]) == [SPECIAL]
    assert lane.text == "he"
