"""The flags of each engine that control speculation.

Each was looked up in the source:

vLLM 0.32: `vllm/config/speculative.py` (an entry of the schedule by batch size is first size, last size, K),
`vllm/config/observability.py` and `vllm/engine/arg_utils.py`.
llama.cpp: `tools/server/README.md` at commit 00dc8057. It lists flags of older guides, such as --draft-max, as removed.
SGLang: `docs/advanced_features/server_arguments.md` at commit 004813e1. --speculative-num-draft-tokens counts the rows
that are checked: for a chain one more than its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..drafters.names import behind


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of one engine: to begin, to draft `{k}` tokens, to draft more often, to stop, and for many users."""

    on: str
    k: str
    more_often: str
    off: str
    crowd: str
    more_reported: str
    """The flags that make it report more of its rounds; empty if there are none."""


FLAGS = {
    "vLLM": Flags(
        on='--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 5}\', or a draft head of the model ("method": "eagle3", "model": ...)',
        k='"num_speculative_tokens": {k} in --speculative-config',
        more_often='a smaller "prompt_lookup_min" in --speculative-config, or a draft head instead of n-grams',
        off="leave out --speculative-config",
        crowd='"num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 1]] in --speculative-config drafts '
        "4 tokens for up to 8 requests, else 1",
        more_reported="--per-request-spec-decode-metrics detailed",
    ),
    "llama.cpp": Flags(
        on="--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5, or a draft model: "
        "-md DRAFT.gguf --spec-type draft-simple",
        k="--spec-draft-n-max {k} for a draft model, --spec-ngram-simple-size-m {k} for n-grams",
        more_often="a smaller --spec-ngram-simple-size-n (its usual 12 suits code that is edited), or a draft model",
        off="leave out --spec-type and -md",
        crowd="fewer slots (--parallel), or a server without speculation for the hours of many requests",
        more_reported="--metrics",
    ),
    "SGLang": Flags(
        on="--speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4, or --speculative-algorithm NGRAM",
        k="--speculative-num-steps {k} --speculative-num-draft-tokens {k_and_one} (NGRAM: the second alone)",
        more_often="a draft head (EAGLE3) instead of NGRAM",
        off="leave out --speculative-algorithm",
        crowd="fewer steps, or a server without speculation for the hours of many requests",
        more_reported="",
    ),
    "specdemo": Flags(
        on="--drafter prompt-lookup, or a drafter that knows the model, such as eagle",
        k="",
        more_often="another --drafter: n-grams and draft heads draft in every round",
        off="--drafter none",
        crowd="",
        more_reported="",
    ),
}


N_GRAMS, DRAFT_MODEL, HEAD, PARALLEL_HEAD = "n-grams", "a draft model", "a head", "a P-EAGLE head"
KINDS = {
    **dict.fromkeys(("prompt-lookup", "ngram", "suffix"), N_GRAMS),
    "draft-model": DRAFT_MODEL,
    "eagle": HEAD,
    "p-eagle": PARALLEL_HEAD,
}
ELSEWHERE = {  # transformers 5.17: `generation/configuration_utils.py`
    N_GRAMS: {
        "transformers": "generate(..., prompt_lookup_num_tokens={k})",
        "vLLM": '--speculative-config \'{"method": "ngram", "num_speculative_tokens": {k}, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 5}\'',
        "llama.cpp": "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {k}",
        "SGLang": "--speculative-algorithm NGRAM --speculative-num-draft-tokens {k_and_one}",
    },
    DRAFT_MODEL: {
        "transformers": "generate(..., assistant_model=DRAFT, num_assistant_tokens={k}, "
        'num_assistant_tokens_schedule="constant")',
        "vLLM": '--speculative-config \'{"model": "DRAFT", "num_speculative_tokens": {k}}\'',
        "llama.cpp": "-md DRAFT --spec-type draft-simple --spec-draft-n-max {k}",
        "SGLang": "--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT --speculative-num-steps {k} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {k_and_one}",
    },
    HEAD: {
        "vLLM": '--speculative-config \'{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": {k}}\'',
        "SGLang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD --speculative-num-steps {k} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {k_and_one}",
    },
    PARALLEL_HEAD: {
        "vLLM": '--speculative-config \'{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": {k}, '
        '"parallel_drafting": true}\'',
    },
}


def elsewhere(drafter: str, k: int, draft_model: str = "") -> list[tuple[str, str]]:
    """The programs that have a drafter of the same kind, each with the argument that makes it draft K tokens with it.

    DRAFT and HEAD stand for what a person has to name.
    """
    flags = ELSEWHERE.get(KINDS.get(behind(drafter), ""), {})
    return [(name, _filled(flag, k).replace("DRAFT", draft_model or "DRAFT")) for name, flag in flags.items()]


def k_flag(engine: str, k: int) -> str:
    """The flag with which an engine drafts K tokens in a round."""
    return _filled(FLAGS[engine].k, k)


def _filled(flag: str, k: int) -> str:
    return flag.replace("{k_and_one}", str(k + 1)).replace("{k}", str(k))
