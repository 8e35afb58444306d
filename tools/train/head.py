"""Train a head: at every position of a draft it learns the target's distribution.

The loss is the cross-entropy against the target's whole distribution over the draft vocabulary (distillation), not
against the text. Later positions count less, since few drafts get there. Muon updates the matrices, because it learns
more from each token than AdamW where text is scarce; AdamW updates everything else.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from typer import Option

from specdemo.cli.export import kind_of
from specdemo.cli.options import numbers
from specdemo.drafters.heads.files import load_head, save_head
from specdemo.drafters.heads.medusa import MedusaHead, MedusaShape
from specdemo.drafters.heads.networks import BlockHead, Head, LayeredHead
from specdemo.drafters.heads.shapes import RANK, HeadShape
from specdemo.errors import BadInput
from specdemo.formats import reason

from .data import ASSISTANT, Seed, provenance_of, shard_paths
from .outputs import OUTPUTS
from .states import Shard, Text, default_layers

LATER_POSITIONS = 0.8  # the weight of a position's loss, relative to the position before
NORM_RATE = 1e-3
WARM_UP = 30  # steps
CHUNK = {"cpu": 128, "cuda": 2**15}  # rows of logits at a time
VALIDATED_ROWS, VALIDATED_STEPS = 16, 5
Kind = Annotated[str, Option(help="The kind of head: eagle, block or medusa.")]


def read_layers(text: str) -> tuple[int, ...]:
    return tuple(numbers(text, int, "Layers")) if text else ()


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to train and how long: `tokens` are read in all, with repeats of the text, within so many minutes."""

    kind: Kind
    tokens: Annotated[int, Option(min=1, help="How many tokens to read in all, repeats included.")]
    rows: Annotated[int, Option(min=1, help="Rows of text in a step.")] = 8
    steps: Annotated[int, Option("--places", min=1, help="Positions of a draft that are trained.")] = 4
    rate: Annotated[float, Option(help="The highest learning rate of the matrices.")] = 2e-3
    draft_vocab: Annotated[int, Option(min=1, help="How many tokens it can draft.")] = 8192
    mlp: Annotated[int, Option(min=1, help="Width of its feed-forward part.")] = 1280
    depth: Annotated[int, Option(min=1, help="Layers of a block head.")] = 1
    state_layers: Annotated[
        Any,
        Option(
            "--layers",
            help="Layers of the target that the head reads, such as 8,20,29.",
            **{"parser": read_layers, "metavar": "<str>", "show_default": False},
        ),
    ] = ()  # `default_layers` if empty
    seed: Seed = 0
    minutes: Annotated[float, Option(min=0, help="Stop after so many minutes, if that comes first; 0: no limit.")] = 0


def train_head(
    model: PreTrainedModel,
    plan: TrainingPlan,
    text: Path,
    out: Path,
    provenance: dict[str, Any],
    *,
    states_folder: Path | None = None,
    begin_with: Path | None = None,
    every: int = 50,
    progress: Callable[[int], None] = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
) -> None:
    """Train a head on the shards in `text` and write it to `out`, with its card.

    Every `every` steps a checkpoint is written beside `out`. Training continues from it if it exists.

    Args:
        states_folder: where the target's hidden states are stored, so that they are computed only once.
        begin_with: a trained head to continue from. It keeps its sizes, its vocabulary and, in the card, its history.
            A medusa head may also begin with the bigram term of a block head.
    Raises:
        BadInput: there is no text to train on or to hold out, or no such head for this target.
    """
    train, held_out = _shards(text)
    torch.manual_seed(plan.seed)
    model.requires_grad_(False)
    history = None
    if begin_with:
        bigrams_only = plan.kind == "medusa" and _kind_of(begin_with) == "block"
        kind = BlockHead if bigrams_only else kind_of(plan.kind)
        head = load_head(kind, begin_with, model.get_output_embeddings().weight).to(model.device)
        if bigrams_only:
            head = with_bigrams(new_head(model, plan, train), head)
        history = _history(begin_with)
    else:
        head = new_head(model, plan, train)
    shape = head.shape
    sizes = {"draft_vocab": shape.draft_vocab, "mlp": shape.mlp, "depth": getattr(shape, "depth", 0)}
    sizes["steps"] = min(plan.steps, shape.most_drafted)
    plan = replace(plan, state_layers=shape.state_layers, **sizes)
    shards = [Shard(model, shape.state_layers, path, states_folder) for path in train]
    validation = Shard(model, shape.state_layers, held_out, states_folder)
    optimizers = _optimizers(head, plan.rate)
    last = math.ceil(plan.tokens / (plan.rows * shards[0].block["tokens"].shape[1]))
    batches = _batches([shard.rows for shard in shards], plan)
    checkpoint = out.with_suffix(".checkpoint")
    asked = f"{replace(plan, tokens=0)}, begun with {begin_with}"  # the same plan may continue with more tokens
    state: dict[str, Any] = {"plan": asked, "done": 0, "curve": [], "seconds": 0.0}
    curve: list[dict[str, Any]] = state["curve"]

    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        if saved["plan"] != asked:
            raise BadInput(f"{checkpoint} belongs to another plan: {saved['plan']}. Remove it or use that plan.")
        head.load_state_dict(saved["head"])
        for optimizer, kept in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        state |= {"done": saved["done"], "seconds": saved.get("seconds", 0.0)}
        curve += saved["curve"]
    elif begin_with:  # how good it is on this text before training
        curve.append({"tokens": 0, **validate(head, model, validation)})
        log(json.dumps(curve[-1]))
    began = time.monotonic() - state["seconds"]
    for step, (shard, rows) in enumerate(batches):
        if step < state["done"]:
            continue
        done = step / last  # the share of the training
        if plan.minutes:
            done = max(done, (time.monotonic() - began) / (60 * plan.minutes))
        if done >= 1:
            break  # the checkpoint of a training that ran out of time may be older than the head
        torch.manual_seed(plan.seed + step)  # a seed for each step, so that a resumed training gives the same
        batch = shards[shard].read(rows)
        loss = torch.stack(
            [
                LATER_POSITIONS**position * loss
                for position, (loss, _) in enumerate(position_losses(head, model, batch, plan.steps))
            ]
        ).sum()
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * _rate_share(step, done)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress(batch.tokens.numel())
        state["done"] = step + 1
        if state["done"] % every == 0 or state["done"] == last:
            curve.append({"tokens": (step + 1) * batch.tokens.numel(), **validate(head, model, validation)})
            state |= {"seconds": time.monotonic() - began, "head": head.state_dict()}
            torch.save({**state, "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, checkpoint)
            log(json.dumps(curve[-1]))
    card = {
        **provenance,
        "plan": {name: getattr(plan, name) for name in TrainingPlan.__dataclass_fields__},
        "optimizer_steps": state["done"],
        "seconds": round(time.monotonic() - began),  # with the validations
        "text": {**provenance_of(train[0]), "training_tokens": sum(shard.block["tokens"].numel() for shard in shards)},
        "held_out_tokens": VALIDATED_ROWS * validation.block["tokens"].shape[1],
        "curve": curve,
        "began_with": history,
    }
    save_head(head, out, card)
    checkpoint.unlink(missing_ok=True)


def _shards(text: Path) -> tuple[list[Path], Path]:
    train, held_out = shard_paths(text, "train"), shard_paths(text, "heldout")
    if not train or not held_out:
        raise BadInput(f"{text} must hold training text and held-out text; run `python -m tools.train data` first.")
    return train, held_out[0]


def _kind_of(path: Path) -> str | None:
    """The kind of the head in a file; None if the file does not say.

    Raises:
        BadInput: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("kind")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"The head {path.name} cannot be read: {reason(error)}.") from error


def _history(path: Path) -> dict[str, Any]:
    """How a head was trained so far: its card without the machine."""
    with safe_open(path, framework="pt") as file:
        card = json.loads(file.metadata()["card"])
    return {name: card.get(name) for name in ("plan", "text", "curve", "began_with")}


def new_head(model: PreTrainedModel, plan: TrainingPlan, train: list[Path]) -> Head:
    """An untrained head for this target. Its draft vocabulary are the most frequent tokens of the target's answers.

    Raises:
        BadInput: the plan names layers that cannot be read, or the target is not of the Llama family.
    """
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    read = plan.state_layers or default_layers(model)
    if read[-1] != layers - 1 or not all(0 <= layer < layers for layer in read):
        raise BadInput(f"The target has the layers 0 to {layers - 1}; those that are read must end with the last one.")
    if not hasattr(config, "rms_norm_eps"):
        raise BadInput(f"Heads can be trained for targets of the Llama family, and this one is a {config.model_type}.")
    sizes = {"vocab_size": config.vocab_size, "hidden": config.hidden_size, "mlp": plan.mlp, "eps": config.rms_norm_eps}
    sizes["draft_vocab"] = min(plan.draft_vocab, config.vocab_size)
    if plan.kind == "medusa":
        shape: HeadShape | MedusaShape = MedusaShape(**sizes, state_layers=(layers - 1,), places=plan.steps, rank=RANK)
    else:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        attention = {"heads": heads, "kv_heads": kv_heads, "width": config.hidden_size // heads}
        shape = HeadShape(**sizes, **attention, state_layers=read, depth=plan.depth)
    head = kind_of(plan.kind)(shape)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    with torch.no_grad():  # at first its output is the target's last hidden state
        head.norm.weight.copy_(model.base_model.norm.weight)
        if isinstance(head, LayeredHead):
            head.fuse.weight[:, -shape.hidden :] += torch.eye(shape.hidden)
        for name, weight in head.named_parameters():
            if name.endswith(("out.weight", "down.weight", "after.weight")):
                weight.zero_()
    head.token_ids.copy_(most_frequent(_in_answers(train, shape.vocab_size), shape.draft_vocab))
    return head.to(model.device)


@torch.no_grad()
def with_bigrams(head: Any, block: Any) -> Head:
    """A medusa head that begins with the bigram term of a block head, for the tokens which that one can draft."""
    known = torch.isin(head.token_ids, block.token_ids)
    head.before.load_state_dict(block.before.state_dict())
    head.after.weight[known] = block.after.weight[torch.searchsorted(block.token_ids, head.token_ids[known])]
    return cast(Head, head)


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, in rising order."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def _in_answers(paths: list[Path], vocab_size: int) -> Tensor:
    """How often each token occurs in the answers, [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for path in paths:
        with safe_open(path, framework="pt") as file:
            answers = file.get_tensor("tokens")[file.get_tensor("roles") == ASSISTANT]
        counts += torch.bincount(answers, minlength=vocab_size)
    return counts


def judge(
    model: PreTrainedModel,
    kind: type[Head],
    path: Path,
    text: Path,
    states_folder: Path | None = None,
    draft_vocab: int = 0,
) -> dict[str, Any]:
    """What `validate` says of a trained head, on the held-out part of the text in a folder.

    Args:
        states_folder: where the target's hidden states are stored.
        draft_vocab: judge the head as if its draft vocabulary had this size: the most frequent of its own tokens and,
            beyond those, of the text.
    Raises:
        BadInput: there is no such text or head, or the weights of this kind of head depend on its vocabulary.
    """
    train, held_out = _shards(text)
    head = load_head(kind, path, model.get_output_embeddings().weight).to(model.device)
    if draft_vocab:
        if issubclass(kind, BlockHead | MedusaHead):
            raise BadInput(
                f"A {kind.kind} head cannot be given another vocabulary: what follows what is part of its weights."
            )
        counts = _in_answers(train, head.shape.vocab_size)
        counts[head.token_ids.cpu()] += int(counts.sum()) + 1
        head.token_ids = most_frequent(counts, draft_vocab).to(model.device)
    return validate(head, model, Shard(model, head.shape.state_layers, held_out, states_folder))


class Distil(torch.autograd.Function):
    """The mean cross-entropy of logits [N, V] against distributions [N, V].

    Loss and gradient (softmax of the logits minus the distribution) are computed together for a few rows at a time,
    which stay in the processor's cache. On a CPU that halves the time of a step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor) -> Tensor:
        loss = logits.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(logits)
        chunks = (part.split(CHUNK[logits.device.type]) for part in (logits, p, gradient))
        for some, wanted, slope in zip(*chunks, strict=True):
            log_q = some.float().log_softmax(-1)
            loss -= (wanted * log_q).sum()
            slope.copy_(log_q.exp_().sub_(wanted))
        ctx.save_for_backward(gradient)
        return loss / len(logits)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (outer[0] / len(gradient)), None


def position_losses(
    head: Head, model: PreTrainedModel, text: Text, steps: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The loss at each position of a draft, over the outputs that predict a token of an answer.

    Without gradients there are two more figures of each output: `agrees`, whether the head's likeliest token is the
    target's likeliest of all tokens, and `overlap`, the sum of min(p, q), the probability that a token drawn from q is
    accepted.
    """
    judged = not torch.is_grad_enabled()
    rows = model.get_output_embeddings().weight.detach()[head.token_ids]
    output = partial(F.linear, weight=rows)
    answers = F.pad(text.roles[:, 1:] == ASSISTANT, (0, 1))  # the token after the column is part of an answer
    with torch.no_grad():
        last = model.base_model.norm(text.states[..., -head.shape.hidden :])
    with torch.autocast(model.device.type, torch.bfloat16):
        with torch.no_grad():
            chunks = last.flatten(0, 1).split(CHUNK[last.device.type])
            wanted = torch.cat([output(some).float().softmax(-1).bfloat16() for some in chunks])
            if judged:
                favourites = torch.cat([model.get_output_embeddings()(some).argmax(-1) for some in chunks])
        for xs, rows, columns in OUTPUTS[head.kind](head, text, steps):
            counted = answers[rows, columns]
            row, column = rows[counted], columns[counted]
            logits = output(head.norm(xs[counted])) + head.bigram_bias(text.embedded[row, column])
            before = row * text.tokens.shape[1] + column
            p, facts = wanted[before], {}
            if judged:
                facts["agrees"] = head.token_ids[logits.argmax(-1)] == favourites[before]
                facts["overlap"] = torch.minimum(p, logits.softmax(-1)).sum(-1)
            yield Distil.apply(logits, p), facts


@torch.no_grad()
def validate(head: Head, model: PreTrainedModel, shard: Shard) -> dict[str, Any]:
    """Loss, greedy agreement and overlap on held-out answers, by position of the draft; the text before is given.

    `tokens_per_round` is what the agreements would give if positions were independent of each other.
    """
    torch.manual_seed(0)
    text = shard.read(torch.linspace(0, shard.rows - 1, VALIDATED_ROWS).long())
    loss, agreement, overlap = [], [], []
    for position_loss, facts in position_losses(head, model, text, min(VALIDATED_STEPS, head.shape.most_drafted)):
        loss.append(round(position_loss.item(), 3))
        agreement.append(round(facts["agrees"].float().mean().item(), 4))
        overlap.append(round(facts["overlap"].mean().item(), 4))
    chances = torch.tensor(agreement).cumprod(0)
    return {
        "loss": loss,
        "agreement": agreement,
        "overlap": overlap,
        "tokens_per_round": round(1 + chances.sum().item(), 3),
    }


def _optimizers(head: Head, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [module.weight for module in head.modules() if isinstance(module, nn.Linear)]
    others = [weight for weight in head.parameters() if all(weight is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=NORM_RATE, weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _rate_share(step: int, done: float) -> float:
    """The share of the learning rate at a step: a short linear warm-up, then a linear decay to 0 as `done` nears 1.

    Held high for two thirds of a training, it brought trained heads no gain before it fell.
    """
    return min((step + 1) / WARM_UP, 1 - done)


def _batches(rows: list[int], plan: TrainingPlan) -> Iterator[tuple[int, Tensor]]:
    """Endless pairs of a shard and some of its rows; every row comes once before any comes again."""
    rng = random.Random(plan.seed)
    while True:
        passes = []
        for shard, count in enumerate(rows):
            order = list(range(count))
            rng.shuffle(order)
            passes += [(shard, part) for part in torch.tensor(order).split(plan.rows)]
        rng.shuffle(passes)
        yield from passes
