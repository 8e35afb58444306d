"""Builds the tokenizer that the header of a GGUF file describes. It gives the ids that llama.cpp gives.

llama.cpp's `llama_vocab::impl::load` reads the same fields and has the same defaults:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .store import LoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Fields = Mapping[str, Any]  # the metadata of a GGUF file by its keys
BYTE_LEVEL, SENTENCEPIECE, GEMMA4 = "gpt2", "llama", "gemma4"  # values of `tokenizer.ggml.model`
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # kinds of tokens
BLANK = "▁"  # stands for a space in the tokens of SentencePiece

# How texts are split before merging, by `tokenizer.ggml.pre`: expressions of the models' own tokenizers. Each splits
# the pieces that the ones before it leave. (llama.cpp takes simpler ones for TEKKEN and GPT4O, which part capitals
# beyond ASCII, and marks, from the letters beside them.)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
AROUND = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
LLAMA3 = f"{ENDING}|{AROUND}"
ONE_DIGIT = AROUND.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN2 = f"{ENDING}|{ONE_DIGIT}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SYMBOLS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|{SYMBOLS}"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}?"
    rf"|\p{{N}}{{1,3}}|{SYMBOLS}"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANKS}"
)
IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CASED = (  # letters that have two cases, as deepseek-llm lists them
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffcℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DIGITS_FIRST = (r"\p{N}", GPT2)
DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK)
OPENING = r" ?[^(\s|.,!?…。，、।۔،)]+"
LINES = r"[^\n]+|[\n]+"
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("", "default"), (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"), (GPT2,)),
    **dict.fromkeys(("a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion"), (GPT2,)),
    **dict.fromkeys(("granite-docling", "exaone4", "jina-v1-en", "jina-v2-code", "roberta-bpe"), (GPT2,)),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), DIGITS_FIRST),
    **dict.fromkeys(("minerva-7b", "mellum2"), DIGITS_FIRST),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), (LLAMA3,)),
    **dict.fromkeys(("lfm2", "jina-v5-nano", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"), (QWEN2,)),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), (QWEN2,)),
    "qwen35": (QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),),
    "ufakzeka": (ONE_DIGIT,),
    "laguna": (LINES, QWEN2),
    "minicpm5": (r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")),
    "seed-coder": (QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (f"'(?i:[sdmt]|ll|ve|re)|{ONE_DIGIT}".replace(r"\s*[\r\n]+", r"\s*[\r\n]"),),
    ),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (GPT4O,)),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+\z", IDEOGRAPHS, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (OPENING,)),
    "viking": (OPENING, r"\p{N}"),
}
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
WHOLE_WORDS |= {"tekken", "minicpm5"}  # a piece that is a token stays whole, whatever its merges are
BEGINNING = WHOLE_WORDS - {"minicpm5"}  # begin with a first token where `add_bos_token` is missing
ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"}
ENDS |= {"<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"}
ENDS |= {"<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["}


def check_tokenizer(name: str, fields: Fields) -> None:
    """Refuse a GGUF file whose tokenizer cannot be built, with a sentence that names the field."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE, GEMMA4):
        raise LoadError(
            f"{name} cannot be run here, because its tokenizer is not known: tokenizer.ggml.model is {kind}."
        )
    if kind == BYTE_LEVEL and str(pre) not in SPLITS:
        raise LoadError(f"{name} cannot be run here, because its tokenizer is not known: tokenizer.ggml.pre is {pre}.")
    lists = {"tokens": str, "scores": float} if kind == SENTENCEPIECE else {"tokens": str, "merges": str}
    for key, of_each in lists.items():
        found = fields.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, list) or not all(isinstance(one, of_each) for one in found):
            raise LoadError(f"{name} cannot be run here: it lacks tokenizer.ggml.{key}.")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    for key in ("scores", "token_type"):
        found = fields.get(f"tokenizer.ggml.{key}")
        if isinstance(found, list) and len(found) < len(tokens):
            raise LoadError(f"{name} cannot be run here: tokenizer.ggml.{key} has fewer entries than there are tokens.")
    if len(set(tokens)) < len(tokens):
        twice = next(token for place, token in enumerate(tokens) if token in tokens[:place])
        raise LoadError(f"{name} cannot be run here: tokenizer.ggml.tokens has {twice!r} twice.")


def special_id(fields: Fields, role: str) -> int | None:
    """The id of the `bos`, `eos`, `unknown`, `padding`, `eot` or `eom` token.

    Where the file does not say, llama.cpp takes a fixed id. Here it counts only for a token that is flagged as special.
    """
    kind, tokens = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.tokens"]
    stated = fields.get(f"tokenizer.ggml.{role}_token_id")
    if isinstance(stated, int) and 0 <= stated < len(tokens):
        return stated
    fixed = {SENTENCEPIECE: {"bos": 1, "eos": 2, "unknown": 0}, BYTE_LEVEL: {"bos": 11, "eos": 11}}
    default = fixed.get(kind, {}).get(role)
    return default if default in _special(fields) else None


def end_ids(fields: Fields) -> list[int]:
    """The ids of the tokens that end an answer: those that the file names, and those with well-known names."""
    tokens = fields["tokenizer.ggml.tokens"]
    named = {token: index for index, token in enumerate(tokens) if token in ENDS}
    if "<|end|>" in named and (
        {"<|return|>", "<|call|>"} <= named.keys() or {"<|calls|>", "<|flush|>"} <= named.keys()
    ):
        del named["<|end|>"]  # ends a part of an answer
    stated = (special_id(fields, role) for role in ("eos", "eot", "eom"))
    return list(dict.fromkeys([index for index in stated if index is not None] + sorted(named.values())))


def build_tokenizer(name: str, fields: Fields) -> PreTrainedTokenizerFast:
    """The tokenizer of a header that `check_tokenizer` accepts.

    Raises:
        LoadError: what it makes of the tokens is not what the file says.
    """
    from transformers import PreTrainedTokenizerFast

    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(fields["tokenizer.ggml.tokens"])]
    try:
        core = _byte_level(tokens, fields) if kind == BYTE_LEVEL else _by_characters(tokens, fields)
    except Exception as error:  # of the package tokenizers, which has no class of its own for them
        raise LoadError(f"{name} cannot be run here, because its tokenizer cannot be built: {error}.") from error
    whole = _special(fields)
    _add_whole(core, {tokens[index]: special for index, special in whole.items()})
    if core.get_vocab_size() != len(tokens):
        raise LoadError(f"{name} cannot be run here: of its {len(tokens)} tokens {core.get_vocab_size()} were built.")
    if other := next(
        (i for i in whole if tokens[i] and core.encode(tokens[i], add_special_tokens=False).ids != [i]), None
    ):
        raise LoadError(f"{name} cannot be run here: its tokenizer does not read {tokens[other]!r} as one token.")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: special_id(fields, theirs) for ours, theirs in roles.items()}
    begins = kind in (SENTENCEPIECE, GEMMA4) or pre in BEGINNING
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        add_bos_token=bool(fields.get("tokenizer.ggml.add_bos_token", begins)) and ids["bos"] is not None,
        add_eos_token=False,  # a prompt goes on
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[index] for role, index in ids.items() if index is not None},
    )
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        tokenizer.chat_template = template
    return tokenizer


def _special(fields: Fields) -> dict[int, bool]:
    """The ids of tokens that are found in a text before it is split, and whether they are special."""
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    return {
        index: kind != USER_DEFINED or token in ENDS
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or token in ENDS
    }


def _add_whole(core: Tokenizer, names: Mapping[str, bool]) -> None:
    from tokenizers import AddedToken

    core.add_tokens([AddedToken(name, normalized=False, special=special) for name, special in names.items()])


def _byte_level(tokens: Sequence[str], fields: Fields) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = fields.get("tokenizer.ggml.pre", "")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocabulary, _merges(fields), ignore_merges=pre in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[pre]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    core.decoder = decoders.ByteLevel()
    return core


def _by_characters(tokens: Sequence[str], fields: Fields) -> Tokenizer:
    """In SentencePiece's manner: characters are merged, and those that are in no token become bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    of_scores = fields["tokenizer.ggml.model"] == SENTENCEPIECE
    merges = _merges_by_score(tokens, fields) if of_scores else _merges(fields)
    unknown = special_id(fields, "unknown")
    core = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = of_scores and bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    beginning = [normalizers.Prepend(BLANK)] if prefix else []
    core.normalizer = normalizers.Sequence([*beginning, normalizers.Replace(" ", BLANK)])
    if not of_scores:
        core.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), "isolated")
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *ending])
    return core


def _merges(fields: Fields) -> list[tuple[str, str]]:
    """A token may begin with a space, so the first character separates nothing."""
    found = []
    for merge in fields["tokenizer.ggml.merges"]:
        left, _, right = merge[1:].partition(" ")
        found.append((merge[:1] + left, right))
    return found


def _merges_by_score(tokens: Sequence[str], fields: Fields) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the token with the highest score first."""
    scores, kinds = fields["tokenizer.ggml.scores"], fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    made = [index for index, kind in enumerate(kinds[: len(tokens)]) if kind not in (UNKNOWN, CONTROL, BYTE)]
    parts, found = {tokens[index] for index in made}, []
    for index in sorted(made, key=lambda index: -scores[index]):
        token = tokens[index]
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found += [(left, right) for left, right in pairs if left in parts and right in parts]
    return found
