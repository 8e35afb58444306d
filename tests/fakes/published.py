"""Tiny random heads in the formats in which others publish them, and what they draft.

The forward passes are written out from the formats' own descriptions, with transformers' hidden states of the whole
text and no cache. They share nothing with specdemo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

Tensors = dict[str, Tensor]
Config = dict[str, Any]
EPS = 1e-5
HIDDEN, MASK, LAYERS = 32, 7, 6  # of the tiny target: its hidden size, a token that stands for a mask, its layers


def write(folder: Path, config: Config, tensors: Tensors, pickle: bool = False) -> Path:
    """The folder of a published head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickle:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class Maker:
    """Random tensors, always the same for a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, outer: int, inner: int) -> Tensor:
        return torch.randn(outer, inner, generator=self.generator) * 1.5 * inner**-0.5

    def vector(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self.generator)


def layer_tensors(make: Maker, prefix: str, sizes: Mapping[str, int], inner: int, more: Sequence[str] = ()) -> Tensors:
    """A decoder layer by transformers' names; `more` may be "bias" and "head norms"."""
    hidden, heads, kv, width, mlp = (sizes[name] for name in ("hidden", "heads", "kv", "width", "mlp"))
    rows = {"q": heads * width, "k": kv * width, "v": kv * width}
    tensors = {f"self_attn.{part}_proj.weight": make.matrix(count, inner) for part, count in rows.items()}
    if "bias" in more:
        tensors |= {f"self_attn.{part}_proj.bias": make.vector(count) - 1 for part, count in rows.items()}
    if "head norms" in more:
        tensors |= {f"self_attn.{part}_norm.weight": make.vector(width) for part in "qk"}
    tensors["self_attn.o_proj.weight"] = make.matrix(hidden, heads * width)
    tensors |= {f"{name}.weight": make.vector(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"mlp.{part}_proj.weight": make.matrix(mlp, hidden) for part in ("gate", "up")}
    tensors["mlp.down_proj.weight"] = make.matrix(hidden, mlp)
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def draft_table(make: Maker, vocab: int, draft_vocab: int) -> Tensors:
    """`d2t` and `t2d` of a random choice of tokens."""
    ids = torch.randperm(vocab, generator=make.generator)[:draft_vocab].sort().values
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": torch.isin(torch.arange(vocab), ids)}


# What they draft -------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """The rotary embedding of [T, heads, width], as transformers' Llama has it."""
    width = x.shape[-1]
    angles = positions[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    both = torch.cat([angles, angles], -1)[:, None]
    halves = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * both.cos() + halves * both.sin()


def attention(t: Tensors, p: str, queries: Tensor, keys: Tensor, seen: Tensor, sizes: Any, theta: float) -> Tensor:
    """Of the last positions [Q, inner] to all [S, inner], where `seen` [Q, S]; grouped heads."""
    heads, kv, width = sizes

    def projected(part: str, x: Tensor, count: int) -> Tensor:
        out = F.linear(x, t[f"{p}self_attn.{part}_proj.weight"], t.get(f"{p}self_attn.{part}_proj.bias"))
        out = out.view(len(x), count, width)
        norm = t.get(f"{p}self_attn.{part}_norm.weight")
        return out if norm is None else rms(out, norm)

    places = torch.arange(len(keys)).float()
    q = rotated(projected("q", queries, heads), places[len(keys) - len(queries) :], theta)
    k = rotated(projected("k", keys, kv), places, theta).repeat_interleave(heads // kv, 1)
    v = projected("v", keys, kv).repeat_interleave(heads // kv, 1)
    scores = torch.einsum("qhw,khw->hqk", q, k) * width**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khw->qhw", weights, v).flatten(1)
    return F.linear(attended, t[f"{p}self_attn.o_proj.weight"], t.get(f"{p}self_attn.o_proj.bias"))


def mlp(t: Tensors, p: str, x: Tensor) -> Tensor:
    gate, up = (F.linear(x, t[f"{p}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    return F.linear(F.silu(gate) * up, t[f"{p}mlp.down_proj.weight"])


def sizes_of(layer: Config) -> tuple[int, int, int]:
    heads = layer["num_attention_heads"]
    return heads, layer["num_key_value_heads"], layer.get("head_dim") or layer["hidden_size"] // heads


def theta_of(layer: Config) -> float:
    return float(layer.get("rope_theta") or (layer.get("rope_parameters") or {}).get("rope_theta") or 10_000)


def target_states(model: PreTrainedModel, ids: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """Those places of transformers' `hidden_states`, side by side, of each token."""
    with torch.no_grad():
        states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return torch.cat([states[number][0] for number in numbers], -1)


def fused(config: Config, t: Tensors, states: Tensor, count: int) -> Tensor:
    """One vector of the `count` states of a token, as EAGLE-3 makes it."""
    if config.get("fc_norm"):
        parts = states.chunk(count, -1)
        states = torch.cat([rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    if config.get("norm_before_fc"):
        states = rms(states, t["input_norm.weight"])
    return F.linear(states, t["fc.weight"])


@torch.no_grad()
def eagle_drafts(
    model: PreTrainedModel, config: Config, t: Tensors, numbers: Sequence[int], ids: Sequence[int], k: int
) -> tuple[list[int], Tensor]:
    """What an EAGLE-3 head drafts after a text whose last token is pending, and its logits [k, V']."""
    layer = config.get("transformer_layer_config", config)
    p = "midlayer." if "midlayer.hidden_norm.weight" in t else "layers.0."
    embedding = t.get("embed_tokens.weight", model.get_input_embeddings().weight)
    states, tokens, drafted, seen_logits = target_states(model, ids[:-1], numbers), list(ids[1:]), [], []
    g = fused(config, t, states, len(numbers))
    for _ in range(k):
        hidden = rms(g, t[f"{p}hidden_norm.weight"])
        x = torch.cat([rms(embedding[tokens], t[f"{p}input_layernorm.weight"]), hidden], -1)
        place = torch.arange(len(x))
        seen = place <= place[:, None]
        if "sliding_attention" in (layer.get("layer_types") or ()):
            seen &= place > place[:, None] - layer["sliding_window"]
        y = (hidden if config.get("norm_before_residual") else g) + attention(
            t, p, x, x, seen, sizes_of(layer), theta_of(layer)
        )
        y = (y + mlp(t, p, rms(y, t[f"{p}post_attention_layernorm.weight"])))[-1:]
        normed = rms(y, t["norm.weight"])
        logits = F.linear(normed, t.get("lm_head.weight", model.get_output_embeddings().weight))[0]
        best = int(logits.argmax())
        drafted.append(best + int(t["d2t"][best]) if "d2t" in t else best)
        seen_logits.append(logits)
        g = torch.cat([g, normed if config.get("norm_output") else y])
        tokens.append(drafted[-1])
    return drafted, torch.stack(seen_logits)


@torch.no_grad()
def peagle_drafts(
    model: PreTrainedModel, config: Config, t: Tensors, numbers: Sequence[int], ids: Sequence[int], k: int
) -> tuple[list[int], Tensor]:
    """The same of a P-EAGLE head, by one pass over the whole text and k - 1 masks after it."""
    layer = config.get("transformer_layer_config", config)
    t = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in t.items()}
    mask = config.get("ptd_token_id", config.get("mask_token_id"))
    masks = t["mask_hidden"].view(1, -1).expand(k - 1, -1)
    x = fused(config, t, torch.cat([target_states(model, ids[:-1], numbers), masks]), len(numbers))
    embedded = t.get("embed_tokens.weight", model.get_input_embeddings().weight)[[*ids[1:], *[mask] * (k - 1)]]
    place = torch.arange(len(x))
    for index, kind in enumerate(layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]):
        p = f"layers.{index}."
        seen = place <= place[:, None]
        if kind == "sliding_attention":
            seen &= place > place[:, None] - layer["sliding_window"]
        inner = rms(x, t[f"{p}{'input_layernorm' if index else 'hidden_norm'}.weight"])
        if index == 0:
            x = inner if config.get("norm_before_residual") else x
            inner = torch.cat([rms(embedded, t[f"{p}input_layernorm.weight"]), inner], -1)
        x = x + attention(t, p, inner, inner, seen, sizes_of(layer), theta_of(layer))
        x = x + mlp(t, p, rms(x, t[f"{p}post_attention_layernorm.weight"]))
    logits = F.linear(rms(x[len(ids) - 2 :], t["norm.weight"]), t["lm_head.weight"])
    best = logits.argmax(-1)
    return (best + t["d2t"][best]).tolist(), logits


@torch.no_grad()
def block_drafts(
    model: PreTrainedModel,
    config: Config,
    t: Tensors,
    numbers: Sequence[int],
    ids: Sequence[int],
    k: int,
    drawn: Sequence[int] = (),
) -> tuple[list[int], Tensor]:
    """The same of a DFlash, DFlash 2 or DSpark head, which drafts a whole block of which the first k are taken.

    `drawn` are tokens that were drawn from the logits, if these are not always the best.
    """
    layer, block = config.get("transformer_layer_config", config), {**config, **config.get("dflash_config", {})}
    for name, drafts in (("medusa_head.0.0.linear.weight", medusa_drafts), ("mask_hidden", peagle_drafts)):
        if name in t:
            return drafts(model, config, t, numbers, ids, k)
    t = {name.removeprefix("logit_head."): tensor for name, tensor in t.items()}
    embedding = t.get("embed_tokens.weight", model.get_input_embeddings().weight)
    output = t.get("lm_head.weight", model.get_output_embeddings().weight)
    context = rms(F.linear(target_states(model, ids[:-1], numbers), t["fc.weight"]), t["hidden_norm.weight"])
    x = embedding[[ids[-1], *[block["mask_token_id"]] * (block["block_size"] - 1)]]
    kinds = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    for index, kind in enumerate(kinds):
        p = f"layers.{index}."
        xn, after = prepared(t, f"{p}attention_conv.", rms(x, t[f"{p}input_layernorm.weight"]), block)
        both = torch.cat([context, xn])
        reach = layer["sliding_window"] if kind == "sliding_attention" else len(both)
        seen = (torch.arange(len(both)) >= len(context) - reach).expand(len(x), -1)
        x = x + after(attention(t, p, xn, both, seen, sizes_of(layer), theta_of(layer)))
        xn, after = prepared(t, f"{p}mlp_conv.", rms(x, t[f"{p}post_attention_layernorm.weight"]), block)
        x = x + after(mlp(t, p, xn))
    first = 0 if block["anchored"] else 1
    outputs = rms(x, t["norm.weight"])[first : first + k]
    logits = F.linear(outputs, output)
    drafted, seen_logits, previous = [], [], ids[-1]
    for place in range(len(logits)):
        row = logits[place]
        if "markov_head.markov_w1.weight" in t:
            row = row + t["markov_head.markov_w2.weight"] @ t["markov_head.markov_w1.weight"][previous]
        if "candidate_selector.successor_codebook" in t:
            row = selected(t, row, outputs[place], previous, block["selector_top_k"])
        best = int(row.argmax())
        drafted.append(best + int(t["d2t"][best]) if "d2t" in t else best)
        previous = drawn[place] if drawn else drafted[-1]
        seen_logits.append(row)
    return drafted, torch.stack(seen_logits)


def prepared(t: Tensors, p: str, x: Tensor, block: Config) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """DFlash 2's convolution of what goes into a part of a layer, and that of what comes out of it.

    The sum over the taps t is written out: out[i, c] = sum_t (base[t, c] + delta[i, t, g(c)]) * x[i - t, c].
    """
    if f"{p}base_kernel" not in t:
        return x, lambda out: out
    taps, size = block["conv_kernel_size"], block["conv_group_size"]
    deltas = F.linear(x, t[f"{p}kernel_projection.weight"]).view(len(x), 2, taps, x.shape[1] // size)

    def convolved(side: int, values: Tensor) -> Tensor:
        out = torch.zeros_like(values)
        for i in range(len(values)):
            for tap in range(min(taps, i + 1)):
                kernel = t[f"{p}base_kernel"][side, tap] + deltas[i, side, tap].repeat_interleave(size)
                out[i] += kernel * values[i - tap]
        return out

    return convolved(0, x), lambda values: convolved(1, values)


def selected(t: Tensors, row: Tensor, output: Tensor, previous: int, count: int) -> Tensor:
    """DFlash 2's edges from the previous token to the `count` likeliest ones, as logits of all tokens."""
    a, b = (t[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
    gate = t["candidate_selector.hidden_projection.weight"] @ output
    edges = torch.full_like(row, -torch.inf)
    for candidate in row.argsort(descending=True)[:count].tolist():
        edges[candidate] = row[candidate] + (a[previous] * gate * b[candidate]).sum()
    return edges


@torch.no_grad()
def medusa_drafts(
    model: PreTrainedModel, config: Config, t: Tensors, numbers: Sequence[int], ids: Sequence[int], k: int
) -> tuple[list[int], Tensor]:
    """The same of Medusa's heads, each of which has one guess."""
    last = target_states(model, ids[:-1], numbers)[-1]  # transformers' last hidden state is normed
    rows = []
    for place in range(k):
        x = last
        for layer in range(config["medusa_num_layers"]):
            p = f"medusa_head.{place}.{layer}.linear."
            x = x + F.silu(F.linear(x, t[f"{p}weight"], t[f"{p}bias"]))
        rows.append(F.linear(x, t[f"medusa_head.{place}.{config['medusa_num_layers']}.weight"]))
    return [int(row.argmax()) for row in rows], torch.stack(rows)


# The formats -----------------------------------------------------------------------------------------------------

FLAT = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden": HIDDEN, "heads": 4, "kv": 2, "width": 8, "mlp": 48}


def eagle3(vocab: int, draft_vocab: int = 40, **more: Any) -> tuple[Config, Tensors]:
    """As SafeAILab publishes it."""
    make = Maker(1)
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": vocab, "rms_norm_eps": EPS}
    config |= {"draft_vocab_size": draft_vocab, **FLAT, **more}
    tensors = {"fc.weight": make.matrix(HIDDEN, 3 * HIDDEN), "norm.weight": make.vector(HIDDEN)}
    tensors |= layer_tensors(make, "midlayer.", SIZES, 2 * HIDDEN)
    tensors |= {"midlayer.hidden_norm.weight": make.vector(HIDDEN), "lm_head.weight": make.matrix(draft_vocab, HIDDEN)}
    return config, tensors | draft_table(make, vocab, draft_vocab)


def specforge31(vocab: int) -> tuple[Config, Tensors]:
    """EAGLE 3.1 as SpecForge writes it: wider heads, another rotation, layers by their own numbers, a window."""
    config, tensors = eagle3(vocab, vocab)
    make = Maker(2)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "rope_theta": 1e6, "rope_scaling": None}
    config |= {"fc_norm": True, "norm_output": True, "layer_types": ["sliding_attention"], "sliding_window": 6}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}
    tensors |= layer_tensors(make, "midlayer.", {**SIZES, "width": 16}, 2 * HIDDEN)
    tensors |= {f"fc_norm.{index}.weight": make.vector(HIDDEN) for index in range(3)}
    tensors["embed_tokens.weight"] = make.matrix(vocab, HIDDEN)
    return config, tensors


def narrow_eagle3(vocab: int) -> tuple[Config, Tensors]:
    """A head that is narrower than its target, with embeddings of its own width."""
    make, hidden = Maker(3), 64
    config = {**eagle3(vocab)[0], "hidden_size": hidden, "target_hidden_size": HIDDEN, "norm_before_fc": True}
    sizes = {**SIZES, "hidden": hidden, "width": 16}
    tensors = {"fc.weight": make.matrix(hidden, 3 * HIDDEN), "norm.weight": make.vector(hidden)}
    tensors |= layer_tensors(make, "midlayer.", sizes, 2 * hidden, ("bias",))
    tensors |= {"midlayer.hidden_norm.weight": make.vector(hidden), "lm_head.weight": make.matrix(40, hidden)}
    tensors |= {"embed_tokens.weight": make.matrix(vocab, hidden), "input_norm.weight": make.vector(3 * HIDDEN)}
    return config, tensors | draft_table(make, vocab, 40)


def deepspec_eagle3(vocab: int) -> tuple[Config, Tensors]:
    """As DeepSpec publishes it: a copy of Qwen3's configuration, the layers by their own numbers, and all tokens."""
    make, layers = Maker(14), [0, 1, 2, 3, 4]
    config = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 8}
    config |= {"vocab_size": vocab, "rms_norm_eps": EPS, **FLAT, "rope_theta": 1e6, "rope_scaling": None}
    config |= {"layer_types": ["full_attention"], "sliding_window": None, "use_sliding_window": False}
    config |= {"target_model_name_or_path": "owner/target", "num_target_layers": LAYERS, "target_layer_ids": layers}
    config |= {"ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "tie_word_embeddings": False}
    tensors = {"fc.weight": make.matrix(HIDDEN, 5 * HIDDEN), "norm.weight": make.vector(HIDDEN)}
    tensors |= layer_tensors(make, "layers.0.", SIZES, 2 * HIDDEN, ("head norms",))
    tensors |= {f"{name}.weight": make.matrix(vocab, HIDDEN) for name in ("embed_tokens", "lm_head")}
    return config, tensors | {"layers.0.hidden_norm.weight": make.vector(HIDDEN)}


def library(method: str, vocab: int, layer: Config, **more: Any) -> Config:
    """The configuration of a head of the speculators library."""
    verifier = {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]}
    nested = {"vocab_size": vocab, "rms_norm_eps": EPS, **FLAT, **layer}
    return {
        "speculators_model_type": method,
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": method, "verifier": verifier},
        "transformer_layer_config": nested,
        **more,
    }


def library_eagle3(vocab: int) -> tuple[Config, Tensors]:
    """Of the library: the residual is normed, queries and keys have norms, and the whole attention has biases."""
    make = Maker(4)
    layer = {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 4]}
    config = library("eagle3", vocab, layer, draft_vocab_size=40, norm_before_residual=True, **ids)
    tensors = {"fc.weight": make.matrix(HIDDEN, 4 * HIDDEN), "norm.weight": make.vector(HIDDEN)}
    tensors |= layer_tensors(make, "layers.0.", SIZES, 2 * HIDDEN, ("bias", "head norms"))
    tensors |= {"layers.0.hidden_norm.weight": make.vector(HIDDEN), "lm_head.weight": make.matrix(40, HIDDEN)}
    tensors |= {
        "embed_tokens.weight": make.matrix(vocab, HIDDEN),
        "layers.0.self_attn.o_proj.bias": make.vector(HIDDEN),
    }
    return config, tensors | draft_table(make, vocab, 40)


def peagle(vocab: int) -> tuple[Config, Tensors]:
    """As AWS publishes it: an EAGLE-3 of more layers, with the token and the state of a mask."""
    make, (config, tensors) = Maker(16), eagle3(vocab, num_hidden_layers=3, ptd_token_id=MASK)
    for index in (1, 2):
        tensors |= layer_tensors(make, f"layers.{index}.", SIZES, HIDDEN)
    return config, tensors | {"mask_hidden": make.matrix(1, 3 * HIDDEN) * HIDDEN**0.5}


def library_peagle(vocab: int) -> tuple[Config, Tensors]:
    """Of the library: EAGLE-3 of Qwen3's layers, one of which has a window; the state of a mask has an axis more."""
    make, (config, tensors) = Maker(17), library_eagle3(vocab)
    config |= {"speculators_model_type": "peagle", "mask_token_id": MASK, "fc_norm": True}
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
    config["transformer_layer_config"] |= {"num_hidden_layers": 2, **windows}
    tensors |= layer_tensors(make, "layers.1.", SIZES, HIDDEN, ("bias", "head norms"))
    tensors |= {f"fc_norm.{index}.weight": make.vector(HIDDEN) for index in range(4)}
    tensors["layers.1.self_attn.o_proj.bias"] = make.vector(HIDDEN)
    return config, tensors | {"mask_hidden": make.matrix(1, 4 * HIDDEN)[None] * HIDDEN**0.5}


def block_tensors(make: Maker, states: int, depth: int) -> Tensors:
    tensors = {"fc.weight": make.matrix(HIDDEN, states * HIDDEN)}
    tensors |= {name: make.vector(HIDDEN) for name in ("hidden_norm.weight", "norm.weight")}
    for index in range(depth):
        tensors |= layer_tensors(make, f"layers.{index}.", SIZES, HIDDEN, ("head norms",))
    return tensors


def dflash(vocab: int, **more: Any) -> tuple[Config, Tensors]:
    """As z-lab publishes it; one of its layers has a window."""
    config = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "vocab_size": vocab, "rms_norm_eps": EPS}
    config |= {"num_target_layers": LAYERS, "block_size": 5, "rope_theta": 1e6, "model_type": "qwen3", **FLAT}
    config |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "head_dim": 8}
    config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [1, 2, 4]}
    return config | more, block_tensors(Maker(5), 3, 2)


def library_dflash(vocab: int) -> tuple[Config, Tensors]:
    """Of the library, with its own output rows and tokens."""
    make = Maker(6)
    layer = {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 1e4, "head_dim": 8}
    more = {"aux_hidden_state_layer_ids": [2, 4], "block_size": 4, "mask_token_id": MASK, "draft_vocab_size": 40}
    tensors = block_tensors(make, 2, 2) | {"lm_head.weight": make.matrix(40, HIDDEN)}
    tensors |= {"embed_tokens.weight": make.matrix(vocab, HIDDEN), **draft_table(make, vocab, 40)}
    return library("dflash", vocab, layer, **more), tensors


def second(config: Config, vocab: int, seed: int) -> tuple[Config, Tensors]:
    """What DFlash 2 adds to the configuration and the tensors of a DFlash head of two layers."""
    make, taps, group, rank = Maker(seed), 3, 4, 16
    tensors = {f"candidate_selector.{name}_codebook": make.matrix(vocab, rank) for name in ("predecessor", "successor")}
    tensors["candidate_selector.hidden_projection.weight"] = make.matrix(rank, HIDDEN)
    for conv in (f"layers.{index}.{part}_conv." for index in range(2) for part in ("attention", "mlp")):
        tensors[f"{conv}base_kernel"] = 0.7 * torch.randn(2, taps, HIDDEN, generator=make.generator)
        tensors[f"{conv}kernel_projection.weight"] = 0.3 * make.matrix(2 * taps * HIDDEN // group, HIDDEN)
    sizes = {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank, "selector_top_k": 6}
    return {**config, **sizes}, tensors


def dflash2(vocab: int) -> tuple[Config, Tensors]:
    """As z-lab publishes it: a window in a layer, which does not make the block causal, and the size of a block in the
    table of the blocks' settings."""
    config, tensors = dflash(vocab, architectures=["DFlash2DraftModel"], is_causal=False)
    table, more = second(config["dflash_config"], vocab, 11)
    return {**config, "dflash_config": {**table, "block_size": config.pop("block_size")}}, tensors | more


def library_dflash2(vocab: int) -> tuple[Config, Tensors]:
    """Of the library, which wants all tokens, and by default no causal blocks."""
    layer = {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 1e4, "head_dim": 8, "sliding_window": 4}
    layer |= {"layer_types": ["sliding_attention"] * 2}
    more = {"aux_hidden_state_layer_ids": [2, 4], "block_size": 4, "mask_token_id": MASK, "draft_vocab_size": vocab}
    config, tensors = second(library("dflash2", vocab, layer, **more), vocab, 12)
    return {**config, "architectures": ["DFlash2DraftModel"]}, block_tensors(Maker(13), 2, 2) | tensors


def markov(make: Maker, vocab: int, draft_vocab: int, prefix: str = "") -> Tensors:
    tensors = {f"{prefix}markov_head.markov_w1.weight": make.matrix(vocab, 16)}
    tensors[f"{prefix}markov_head.markov_w2.weight"] = make.matrix(draft_vocab, 16)
    tensors[f"{prefix}confidence_head.proj.weight"] = make.matrix(1, HIDDEN + 16)
    return tensors | {f"{prefix}confidence_head.proj.bias": torch.zeros(1)}


def dspark(vocab: int) -> tuple[Config, Tensors]:
    """As DeepSpec publishes it: the pending token's place drafts too."""
    config, tensors = dflash(vocab, architectures=["Qwen3DSparkModel"], layer_types=None)
    config |= {"markov_rank": 16, "markov_head_type": "vanilla", **config.pop("dflash_config")}
    return config, tensors | markov(Maker(7), vocab, vocab)


def deepspec_dflash(vocab: int) -> tuple[Config, Tensors]:
    """DFlash as DeepSpec publishes it: a DSpark without its two heads, so the pending token's place drafts too."""
    config, tensors = dflash(vocab, architectures=["Qwen3DSparkModel"], layer_types=["full_attention"] * 2)
    config |= {"markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512, "sliding_window": None}
    config |= config.pop("dflash_config")
    make = Maker(15)
    return config, tensors | {f"{name}.weight": make.matrix(vocab, HIDDEN) for name in ("embed_tokens", "lm_head")}


def specforge_dspark(vocab: int) -> tuple[Config, Tensors]:
    """As SpecForge writes it, and early on with another prefix."""
    config, tensors = dflash(vocab, architectures=["DSparkDraftModel"])
    config["dflash_config"] |= {"projector_type": "dspark", "markov_rank": 16, "markov_head_type": "vanilla"}
    return config, tensors | markov(Maker(8), vocab, vocab, "logit_head.")


def library_dspark(vocab: int) -> tuple[Config, Tensors]:
    config, tensors = library_dflash(vocab)
    config |= {"speculators_model_type": "dspark", "markov_rank": 16, "sample_from_anchor": True}
    return config, tensors | markov(Maker(9), vocab, 40)


def medusa(vocab: int) -> tuple[Config, Tensors]:
    """As FasterDecoding publishes it."""
    make, places, layers = Maker(10), 3, 2
    config = {"medusa_num_heads": places, "medusa_num_layers": layers, "base_model_name_or_path": "owner/target"}
    tensors: Tensors = {}
    for place in range(places):
        for layer in range(layers):
            tensors[f"medusa_head.{place}.{layer}.linear.weight"] = make.matrix(HIDDEN, HIDDEN)
            tensors[f"medusa_head.{place}.{layer}.linear.bias"] = make.vector(HIDDEN) - 1
        tensors[f"medusa_head.{place}.{layers}.weight"] = make.matrix(vocab, HIDDEN)
    return config, tensors
