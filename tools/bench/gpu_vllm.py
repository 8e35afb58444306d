"""vLLM on the same GPU."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from importlib.util import find_spec
from tempfile import TemporaryDirectory

from specdemo.drafters.none import NoDrafter
from specdemo.engines.gpu.graph import GraphRunner
from specdemo.engines.layout import FusedModel
from specdemo.racing.figures import tokens_per_second
from specdemo.system.hardware import dtype_name

from .gpu_passes import Gpu, rounds, slots

PART = "plain decoding beside vLLM"
SHARE = 0.5  # of the GPU's memory, for vLLM


def beside_vllm(on: Gpu) -> None:
    """Plain decoding of the same random weights, first by ours, then by vLLM: one greedy text.

    It has not been run with vLLM, only with a stand-in for its class `LLM`. vLLM keeps its memory until the process
    ends.
    """
    if not find_spec("vllm"):
        on.add(PART, "left out: vLLM is not installed")
        return
    prompt = [1] * on.sizes.context
    with TemporaryDirectory() as folder:
        _ours(on, folder, prompt)
        on.free()
        _theirs(on, folder, prompt)


def _ours(on: Gpu, folder: str, prompt: list[int]) -> None:
    model = on.model(on.sizes.draft)
    model.save_pretrained(folder)
    if graphs := slots(on, FusedModel.of(model), "what vLLM decodes"):
        runner = GraphRunner(graphs, len(prompt) + on.sizes.new_tokens)
        each = rounds(on, runner, NoDrafter(), prompt, 0)
        on.add(PART, "specdemo", tokens_per_second=len(each) / sum(event.seconds for event in each))


def _theirs(on: Gpu, folder: str, prompt: list[int]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine ends with this process
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    their = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype_name(on.dtype),
        max_model_len=len(prompt) + on.sizes.new_tokens,
        max_num_seqs=1,
        enable_prefix_caching=False,
        gpu_memory_utilization=SHARE,
    )

    def seconds(count: int) -> float:
        asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        their.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)
        return time.perf_counter() - began

    for count in (1, on.sizes.new_tokens):
        seconds(count)  # warms up
    speed = tokens_per_second(on.sizes.new_tokens, seconds(on.sizes.new_tokens), seconds(1))
    on.add(PART, f"vLLM {version('vllm')}", tokens_per_second=speed)
