"""The flags of each program that control speculation: one table.

Each was looked up in the source:

vLLM 0.32: `vllm/config/speculative.py` (an entry of the schedule by batch size is first size, last size, K),
`vllm/config/observability.py` and `vllm/engine/arg_utils.py`.
llama.cpp: `tools/server/README.md` at commit 00dc8057. It lists flags of older guides, such as --draft-max, as removed.
SGLang: `docs/advanced_features/server_arguments.md` at commit 004813e1. --speculative-num-draft-tokens counts the rows
that are checked: for a chain one more than its steps.
transformers 5.17: `generation/configuration_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..drafters.names import behind

N_GRAMS, DRAFT_MODEL, HEAD, PARALLEL_HEAD = "n-grams", "a draft model", "a head", "a P-EAGLE head"
KINDS = {
    **dict.fromkeys(("prompt-lookup", "ngram", "suffix"), N_GRAMS),
    "draft-model": DRAFT_MODEL,
    "eagle": HEAD,
    "p-eagle": PARALLEL_HEAD,
}
USUAL_K = 4  # of the flags that switch speculation on


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of one program. DRAFT and HEAD stand for what a person has to name.

    Attributes:
        drafters: to draft `{k}` tokens with each kind of drafter that it has.
        k: to draft `{k}` tokens with the drafter that it has now.
        more_reported: to report more of its rounds; empty if it cannot.
    """

    drafters: Mapping[str, str]
    k: str = ""
    more_often: str = ""
    off: str = ""
    crowd: str = ""
    more_reported: str = ""

    @property
    def on(self) -> str:
        """To draft at all: with n-grams, or with a head or a draft model."""
        better = self.drafters.get(HEAD) or self.drafters[DRAFT_MODEL]
        return _filled(f"{self.drafters[N_GRAMS]}, or {better}", USUAL_K)


_SGLANG_CHAIN = "--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k_and_one}"
FLAGS = {
    "transformers": Flags(
        {
            N_GRAMS: "generate(..., prompt_lookup_num_tokens={k})",
            DRAFT_MODEL: "generate(..., assistant_model=DRAFT, num_assistant_tokens={k}, "
            'num_assistant_tokens_schedule="constant")',
        },
    ),
    "vLLM": Flags(
        {
            N_GRAMS: '--speculative-config \'{"method": "ngram", "num_speculative_tokens": {k}, '
            '"prompt_lookup_min": 2, "prompt_lookup_max": 5}\'',
            DRAFT_MODEL: '--speculative-config \'{"model": "DRAFT", "num_speculative_tokens": {k}}\'',
            HEAD: '--speculative-config \'{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": {k}}\'',
            PARALLEL_HEAD: '--speculative-config \'{"method": "eagle3", "model": "HEAD", '
            '"num_speculative_tokens": {k}, "parallel_drafting": true}\'',
        },
        k='"num_speculative_tokens": {k} in --speculative-config',
        more_often='a smaller "prompt_lookup_min" in --speculative-config, or a draft head instead of n-grams',
        off="leave out --speculative-config",
        crowd='"num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 1]] in --speculative-config drafts '
        "4 tokens for up to 8 requests, else 1",
        more_reported="--per-request-spec-decode-metrics detailed",
    ),
    "llama.cpp": Flags(
        {
            N_GRAMS: "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {k}",
            DRAFT_MODEL: "-md DRAFT --spec-type draft-simple --spec-draft-n-max {k}",
        },
        k="--spec-draft-n-max {k} for a draft model, --spec-ngram-simple-size-m {k} for n-grams",
        more_often="a smaller --spec-ngram-simple-size-n (its usual 12 suits code that is edited), or a draft model",
        off="leave out --spec-type and -md",
        crowd="fewer slots (--parallel), or a server without speculation for the hours of many requests",
        more_reported="--metrics",
    ),
    "SGLang": Flags(
        {
            N_GRAMS: "--speculative-algorithm NGRAM --speculative-num-draft-tokens {k_and_one}",
            DRAFT_MODEL: f"--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT {_SGLANG_CHAIN}",
            HEAD: f"--speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD {_SGLANG_CHAIN}",
        },
        k="--speculative-num-steps {k} --speculative-num-draft-tokens {k_and_one} (NGRAM: the second alone)",
        more_often="a draft head (EAGLE3) instead of NGRAM",
        off="leave out --speculative-algorithm",
        crowd="fewer steps, or a server without speculation for the hours of many requests",
    ),
    "specdemo": Flags(
        {N_GRAMS: "--drafter prompt-lookup -k {k}", HEAD: "--drafter eagle -k {k}"},
        more_often="another --drafter: n-grams and draft heads draft in every round",
        off="--drafter none",
    ),
}


def elsewhere(drafter: str, k: int, draft_model: str = "") -> list[tuple[str, str]]:
    """The other programs that have a drafter of the same kind, each with the flags to draft K tokens with it."""
    kind = KINDS.get(behind(drafter), "")
    return [
        (name, _filled(flags.drafters[kind], k).replace("DRAFT", draft_model or "DRAFT"))
        for name, flags in FLAGS.items()
        if kind in flags.drafters and name != "specdemo"
    ]


def k_flag(engine: str, k: int) -> str:
    """The flag with which an engine drafts K tokens in a round."""
    return _filled(FLAGS[engine].k, k)


def _filled(flag: str, k: int) -> str:
    return flag.replace("{k_and_one}", str(k + 1)).replace("{k}", str(k))
