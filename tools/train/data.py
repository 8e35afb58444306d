"""Text in the target's own voice: it writes user prompts, then answers them, many rows at a time.

The chat template is opened at the user turn, so the model first invents a prompt; when it closes
that turn, the assistant header is forced and it answers (as in Magpie, arXiv 2406.08464). A *wave*
is a [rows, columns] block of tokens: each row packs one conversation after another, all rows step
together, and a row's attention begins where its current conversation begins. A wave is one shard.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer import Option

from specdemo.engines.eager import PreallocatedCache
from specdemo.engines.modules import cache_argument, layers_at, outputs_of
from specdemo.errors import BadInput

from .states import default_layers, save_states, states_path

Seed = Annotated[int, Option(help="The same seed and machine give the same result.")]
TEMPLATE, USER, ASSISTANT = 0, 1, 2  # who wrote a token

OPENINGS = (  # how some user turns begin, so that the text covers what people try on the page
    "Write a Python function that",
    "Write a JavaScript function",
    "Write a SQL query",
    "Explain this code:",
    "List",
    "Give me a list of",
    "Name ten",
    "Write a short story about",
    "Tell me a story",
    "Write a poem about",
    "Write a dialogue between",
    "Who was",
    "What is the",
    "How do I",
    "Explain",
    "Summarize the following text:",
    "Rewrite the following sentence",
    "Repeat the following text",
    "Write an email",
    "Translate",
)
USER_TEMPERATURE = 0.9
ANSWER_TEMPERATURES = (0.0, 0.0, 0.5, 0.7, 1.0)
OPENED = 0.4  # share of user turns that get one of the openings
LONGEST_PROMPT, LONGEST_ANSWER = 120, 360  # tokens
BLOCK = 256  # tokens
HELD_OUT_EVERY = 20  # of this many waves one is held out, from the second on


@dataclass(frozen=True, slots=True)
class Template:
    """The fixed tokens of a conversation, from the tokenizer's chat template."""

    before_user: list[int]
    after_user: list[int]  # begins with the token that closes the user's turn
    end: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> Template:
        marker = "USER TURN"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
        before, after = str(text).split(marker)
        encode: Callable[[str], list[int]] = lambda s: tokenizer.encode(s, add_special_tokens=False)  # noqa: E731
        return cls(encode(before), encode(after), eos_ids)


class Row:
    """One row of a wave: which token is forced next, who is writing, at which temperature."""

    def __init__(self, template: Template, openings: list[list[int]], rng: random.Random) -> None:
        self.template, self.openings, self.rng = template, openings, rng
        self.begin(column=0)

    def begin(self, column: int) -> None:
        self.start = column
        opening = self.rng.choice(self.openings) if self.rng.random() < OPENED else []
        self.forced = [*self.template.before_user, *opening]
        self.role_after_forced, self.written = USER, 0
        self.opening_left = len(opening)
        self.temperature = USER_TEMPERATURE

    def take(self, sampled: int, column: int) -> tuple[int, int]:
        """The token of this row at `column`, and who wrote it."""
        if self.forced:
            token = self.forced.pop(0)
            return token, USER if self.role_after_forced == USER and len(self.forced) < self.opening_left else TEMPLATE
        self.written += 1
        role = self.role_after_forced
        if role == USER:
            closing, *rest = self.template.after_user
            if sampled == closing or self.written >= LONGEST_PROMPT:
                self.forced, self.role_after_forced, self.written = rest, ASSISTANT, 0
                self.temperature = self.rng.choice(ANSWER_TEMPERATURES)
                return closing, TEMPLATE
        elif sampled in self.template.end or self.written >= LONGEST_ANSWER:
            self.begin(column + 1)
        return sampled, role


def sample_rows(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row, [B, V] -> [B], by inverse transform; temperature 0 takes the largest logit.

    The transform first finds the block of tokens and then the token in it, because a cumulative sum over the whole
    vocabulary takes longer than everything else.
    """
    largest, tokens = logits.max(-1)
    drawn = temperatures.nonzero().squeeze(1)
    weights = logits[drawn].float().sub_(largest[drawn, None]).div_(temperatures[drawn, None]).exp_()
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    ends = blocks.sum(-1).double().cumsum(-1)  # [B, blocks]
    draws = torch.rand(len(drawn), 1, generator=generator, device=logits.device, dtype=torch.float64) * ends[:, -1:]
    block = torch.searchsorted(ends, draws, right=True).clamp(max=ends.shape[1] - 1)
    into = draws - F.pad(ends, (1, 0)).gather(1, block)
    chosen = blocks[torch.arange(len(drawn), device=logits.device), block.squeeze(1)].double().cumsum(-1)
    into = into.minimum(chosen[:, -1:].nextafter(torch.zeros_like(into)))  # the two sums round differently
    tokens[drawn] = (block * BLOCK + torch.searchsorted(chosen, into, right=True)).squeeze(1)
    return tokens


@torch.inference_mode()
def write_wave(
    model: PreTrainedModel,
    rows: list[Row],
    columns: int,
    generator: torch.Generator,
    progress: Callable[[int], None],
    layers: tuple[int, ...] = (),
) -> tuple[dict[str, Tensor], Tensor]:
    """Let the target fill one wave.

    Returns:
        `tokens` int32, `roles` uint8 and `starts` bool, each [rows, columns]; and the outputs of `layers`,
        [rows, columns, layers * hidden].
    """
    device = model.device
    cache = PreallocatedCache(columns)
    tokens = torch.zeros(len(rows), columns, dtype=torch.int32)
    roles = torch.zeros(len(rows), columns, dtype=torch.uint8)
    starts = torch.zeros(len(rows), columns, dtype=torch.bool)
    sampled = [0] * len(rows)
    modules = layers_at(model, layers)
    states = torch.zeros(len(rows), columns, len(layers) * model.config.hidden_size, dtype=model.dtype)
    for column in range(columns):
        first = torch.tensor([row.start for row in rows])[:, None]  # before they take their tokens, which may end it
        starts[:, column] = first[:, 0] == column
        taken = torch.tensor([row.take(token, column) for row, token in zip(rows, sampled, strict=True)])
        tokens[:, column], roles[:, column] = taken.unbind(1)
        first = first.to(device)
        seen = torch.arange(column + 1, device=device) >= first  # [rows, column + 1]
        with outputs_of(modules) as outputs:
            logits = model(
                tokens[:, column, None].long().to(device),
                position_ids=column - first,
                attention_mask=seen[:, None, None],
                use_cache=True,
                **{cache_argument(type(model)): cache},
            ).logits[:, -1]
        if modules:
            states[:, column] = torch.cat([outputs[module] for module in modules], -1)[:, 0].cpu()
        temperatures = torch.tensor([r.temperature for r in rows], device=device)
        sampled = sample_rows(logits, temperatures, generator).tolist()
        progress(len(rows))
    return {"tokens": tokens, "roles": roles, "starts": starts}, states


def shard_paths(folder: Path, split: str) -> list[Path]:
    """The finished shards of a split, `train` or `heldout`, in order."""
    return sorted(folder.glob(f"{split}-*.safetensors"))


def provenance_of(shard: Path) -> dict[str, Any]:
    """How a text was made, as `write_text` noted it, without what differs between shards and without the template."""
    with safe_open(shard, framework="pt") as file:
        facts = json.loads(file.metadata()["provenance"])
    return {name: value for name, value in facts.items() if name not in ("wave", "seconds", "template")}


def write_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: frozenset[int],
    folder: Path,
    tokens: int,
    provenance: dict[str, Any],
    *,
    rows: int = 192,
    columns: int = 512,
    seed: int = 0,
    states_folder: Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write waves into `folder` until it holds at least `tokens` tokens; finished waves are kept.

    Run again with a larger number to continue.

    Args:
        states_folder: where to store the target's hidden states of the text, for the training of heads.
    Returns:
        The number of tokens that the folder then holds.
    Raises:
        BadInput: the tokenizer has no chat template, or the folder holds text made with other settings.
    """
    if not tokenizer.chat_template:
        raise BadInput("Text is written as chats, and the tokenizer of this preset has no chat template.")
    folder.mkdir(parents=True, exist_ok=True)
    template = Template.of(tokenizer, eos_ids)
    openings = [tokenizer.encode(text, add_special_tokens=False) for text in OPENINGS]
    layers = default_layers(model) if states_folder else ()
    wave = 0
    while wave * rows * columns < tokens:
        split = "heldout" if wave % HELD_OUT_EVERY == 1 else "train"
        path = folder / f"{split}-{wave:05d}.safetensors"
        if path.exists():
            check_same_text(path, {**provenance, "seed": seed, "rows": rows, "columns": columns})
            progress(rows * columns)
        else:
            rng = random.Random(f"{seed}/{wave}")
            generator = torch.Generator(model.device).manual_seed(rng.getrandbits(63))
            begun = time.perf_counter()
            begin = [Row(template, openings, rng) for _ in range(rows)]
            block, states = write_wave(model, begin, columns, generator, progress, layers)
            if states_folder:
                save_states(states, block["tokens"], states_path(states_folder, path, layers))
            facts = {
                **provenance,
                **{"wave": wave, "seed": seed, "rows": rows, "columns": columns},
                "vocab_size": model.config.get_text_config().vocab_size,
                "template": {**asdict(template), "end": sorted(eos_ids)},
                "seconds": round(time.perf_counter() - begun, 1),
            }
            partial = path.with_suffix(".partial")
            save_file(block, partial, metadata={"provenance": json.dumps(facts)})
            partial.replace(path)
        wave += 1
    return wave * rows * columns


def check_same_text(path: Path, asked: dict[str, Any]) -> None:
    """Refuse to continue a text of another preset, seed or shape.

    Raises:
        BadInput: naming the shard and what it was made with.
    """
    made = provenance_of(path)
    for name in ("preset", "weights", "seed", "rows", "columns"):
        if made.get(name) != asked.get(name):
            raise BadInput(
                f"{path} was written with {name} {made.get(name)}, not {asked.get(name)}. Choose another folder."
            )
