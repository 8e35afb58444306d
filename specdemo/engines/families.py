"""What a configuration says of a model, and the table of families: all that depends on the type of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Names of weights, as most families have them. Those of a layer follow the layer's number.
LAYERS, EMBEDDING, NORM, OUTPUT = "model.layers", "model.embed_tokens.weight", "model.norm", "lm_head.weight"
QKV, OUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"
HEAD_NORMS = "self_attn.q_norm", "self_attn.k_norm"
GATE_UP, DOWN = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
ROUTER, EXPERTS_UP, EXPERTS_DOWN = "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of some models differ from Llama's, and what their passes can do.

    `fused` says that the fused engines run it, else only transformers' forward does. `branches` says that the layers
    read only the layer before and the cache, so that one mask makes a tree. `state` says that layers keep a running
    state that a pass of any length can go on from. Without `parts` a model with a cache reads one token in a pass, or
    the whole text again. `mtp` says where the tensors of a multi-token-prediction layer are, if it is read here:
    "apart" under "mtp.", or as one "more" decoder layer. `text_alone` says that a model for pictures and text reads a
    text as its text model does. An `encoder` is one unless its configuration says `is_decoder`.

    A norm is None where there is none. `out_norm` and `down_norm` are applied to what attention and the MLP add to the
    residual stream. `above_one` says that a norm multiplies by 1 + its weight. A merged product has one name.
    `positions` names the embeddings of positions of a family without rotations. `gated` says that the MLP multiplies
    two products, one of them activated. `centred` says that norms subtract the mean, and that they and all products
    have biases. `transposed` says that weights of products are [in, out]. `growing_queries` says that rotated queries
    grow with their position. `interleaved` says that a rotation turns numbers 0 and 1 of a head, then 2 and 3, and so
    on, while Llama's turns the first number of each half, then the second. `scaled_embedding` says that embeddings are
    multiplied by the square root of their width. `beyond_float16` says that activations get larger than float16's
    largest number, 65504.
    """

    attention_norm: str | None = "input_layernorm"
    out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    down_norm: str | None = None
    qkv: tuple[str, ...] = QKV
    out: str = OUT
    up: tuple[str, ...] = GATE_UP
    down: str = DOWN
    layers: str = LAYERS
    embedding: str = EMBEDDING
    norm: str = NORM
    positions: str | None = None
    gated: bool = True
    centred: bool = False
    transposed: bool = False
    normed_heads: str | None = None  # how queries and keys are normed: each "head" by itself, or "all" of a token
    biased: str | None = "attention_bias"  # the field that says whether attention has biases; None: it has
    out_biased: bool = True  # whether its output then has one too
    above_one: bool = False
    growing_queries: bool = False
    interleaved: bool = False
    scaled_embedding: bool = False
    beyond_float16: bool = False
    expert_size: str | None = None  # the field with the inner size of an expert, if layers have experts
    rotated: str | None = None  # the field that says of each layer whether it has a rotation; None: all have
    drops_score_cap: bool = False  # transformers does not apply the cap of scores that the configuration states
    fused: bool = True
    branches: bool = False
    state: bool = False
    parts: bool = True
    mtp: Literal["apart", "more"] | None = None
    text_alone: bool = False
    encoder: bool = False

    def has_bias(self, config: PreTrainedConfig, name: str) -> bool:
        """Whether a product of a layer has a bias."""
        if self.centred:
            return True
        if name in (*self.up, self.down):
            return bool(getattr(config, "mlp_bias", False))
        can = self.out_biased or name != self.out
        return can and (self.biased is None or bool(getattr(config, self.biased, False)))


_OLMO = Family(None, "post_attention_layernorm", None, "post_feedforward_layernorm", normed_heads="all")
_GEMMA = Family(
    out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    down_norm="post_feedforward_layernorm",
    above_one=True,
    scaled_embedding=True,
    beyond_float16=True,
)
_MERGED = ("mlp.gate_up_proj",)
_GLM = Family(up=_MERGED, out_biased=False, interleaved=True)
_STATE = Family(fused=False, state=True)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral"), Family(branches=True)),
    **dict.fromkeys(("ministral", "granite"), Family()),
    "smollm3": Family(branches=True, rotated="no_rope_layers"),
    "ministral3": Family(growing_queries=True),
    "qwen2": Family(biased=None, out_biased=False, branches=True),
    "qwen3": Family(normed_heads="head", branches=True),
    "gemma": Family(above_one=True, scaled_embedding=True),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, normed_heads="head", drops_score_cap=True),
    "phi3": Family(qkv=("self_attn.qkv_proj",), up=_MERGED),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
    "glm": _GLM,
    "glm4": replace(_GLM, out_norm="post_self_attn_layernorm", down_norm="post_mlp_layernorm"),
    "mixtral": Family(expert_size="intermediate_size"),
    "qwen3_moe": Family(normed_heads="head", expert_size="moe_intermediate_size"),
    "olmoe": Family(normed_heads="all", expert_size="intermediate_size"),
    "flex_olmo": replace(_OLMO, expert_size="intermediate_size"),
    "gpt2": Family(
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        layers="transformer.h",
        embedding="transformer.wte.weight",
        norm="transformer.ln_f",
        positions="transformer.wpe.weight",
        gated=False,
        centred=True,
        transposed=True,
        branches=True,
    ),
    "gpt_neox": Family(fused=False, branches=True),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), replace(_STATE, mtp="apart")),
    **dict.fromkeys(("lfm2", "lfm2_moe", "falcon_h1", "granitemoehybrid", "olmo_hybrid"), _STATE),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), Family(fused=False, mtp="more")),
    # Gemma 3 from 4B on, and Mistral Small 3.1 and Ministral 3.
    **dict.fromkeys(("gemma3", "mistral3"), Family(fused=False, text_alone=True)),
    **dict.fromkeys(("cpmant", "prophetnet"), Family(fused=False, parts=False)),
    "bert-generation": Family(fused=False, encoder=True),
}
OTHER = Family(fused=False)  # a model whose type is not in the table
FULL, SLIDING = "full_attention", "sliding_attention"
RUNNING = {"linear_attention", "conv"}  # types of layers that have such a state instead of keys and values
ROPES = {"default", "linear", "llama3", "yarn", "longrope"}  # all but those with other angles at every length
ACTIVATIONS = {True: {"silu", "gelu_pytorch_tanh"}, False: {"gelu_new"}}  # of an MLP that is `gated`, and of another
DEPENDS_ON_LENGTH = "its rotary embedding depends on how long the text can get"  # why a model cannot branch


def family_of(config: PreTrainedConfig) -> Family:
    return FAMILIES.get(config.model_type, OTHER)


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of a model, and the caps of scores and logits: x becomes cap * tanh(x / cap), or stays where cap is 0."""

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    score_cap: float = 0.0
    logits_cap: float = 0.0

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Scales:
        def stated(name: str, default: float) -> float:
            value = getattr(config, name, None)
            return default if value is None else float(value)

        scaled = family_of(config).scaled_embedding
        return cls(
            attention=stated("attention_multiplier", stated("query_pre_attn_scalar", head_width(config)) ** -0.5),
            embedding=config.hidden_size**0.5 if scaled else stated("embedding_multiplier", 1.0),
            residual=stated("residual_multiplier", 1.0),
            logits=1 / stated("logits_scaling", 1.0),
            score_cap=stated("attn_logit_softcapping", 0.0),
            logits_cap=stated("final_logit_softcapping", 0.0),
        )


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer: MLPs of `inner` numbers, of which a router chooses `used` for each token.

    A token's output is the sum of those of its experts, weighted by their probabilities (Shazeer et al., arXiv
    1701.06538). With `normed` the weights are divided by their sum.
    """

    count: int
    used: int
    inner: int
    normed: bool


def expert_count(config: PreTrainedConfig) -> int:
    """How many experts its layers have, if any of them has some; else 0."""
    names = "num_experts", "num_local_experts", "n_routed_experts"
    return next((count for name in names if (count := getattr(config, name, None))), 0)


def mixture(config: PreTrainedConfig, layer: int) -> Mixture | None:
    """The experts of a layer of a model that `knows` accepts; None if it has a single MLP."""
    family = family_of(config)
    if family.expert_size is None or layer in getattr(config, "mlp_only_layers", ()):
        return None
    count = expert_count(config)
    if (layer + 1) % getattr(config, "decoder_sparse_step", 1) or not count:
        return None
    normed = bool(getattr(config, "norm_topk_prob", True))
    return Mixture(count, config.num_experts_per_tok, getattr(config, family.expert_size), normed)


def mixtures(config: PreTrainedConfig) -> set[Mixture]:
    """The kinds of layers with experts that a model has: one or none."""
    return {found for layer in range(config.num_hidden_layers) if (found := mixture(config, layer)) is not None}


def inner_size(config: PreTrainedConfig) -> int:
    """The inner width of the MLP in a layer without experts."""
    stated = config.n_inner if family_of(config).centred else config.intermediate_size
    return 4 * config.hidden_size if stated is None else int(stated)


def inner_sizes(config: PreTrainedConfig) -> set[int]:
    """How many numbers the products of its layers read, of a model that `knows` accepts."""
    layers = [mixture(config, layer) for layer in range(config.num_hidden_layers)]
    of_mlps = {inner_size(config) if layer is None else layer.inner for layer in layers}
    return {config.hidden_size, config.num_attention_heads * head_width(config), *of_mlps}


def knows(config: PreTrainedConfig) -> bool:
    """Whether the fused path computes the same as transformers' forward for a model with this configuration.

    Quantized weights are excluded: they are packed, or need scales that only transformers' forward knows. So is the
    text part of a larger model, whose weights have other names.
    """
    if config.get_text_config() is not config or getattr(config, "quantization_config", None):
        return False
    family = family_of(config)
    if not family.fused or activation(config) not in ACTIVATIONS[family.gated]:
        return False
    if family.centred:
        scaled = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        return scaled and not config.reorder_and_upcast_attn and not config.add_cross_attention
    if getattr(config, "use_bidirectional_attention", None) or not {*layer_kinds(config)} <= {FULL, SLIDING}:
        return False
    if getattr(config, "clip_qkv", None) is not None:  # of OLMoE
        return False
    if family.drops_score_cap and config.attn_logit_softcapping:
        return False
    ropes = [rope_of(config, kind) for kind in {*layer_kinds(config)}]
    return all(rope.get("rope_type", "default") in ROPES for rope in ropes)


def activation(config: PreTrainedConfig) -> str:
    """The name of the MLP's activation."""
    names = "hidden_activation", "hidden_act", "activation_function"
    return str(next((name for field in names if (name := getattr(config, field, None))), None))


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Whether each layer sees all tokens or those of a sliding window, in transformers' words."""
    if (kinds := getattr(config, "layer_types", None)) is not None:
        return list(kinds)
    return [SLIDING if getattr(config, "sliding_window", None) else FULL] * config.num_hidden_layers


def windows(config: PreTrainedConfig) -> list[int]:
    """How many tokens a token sees in each layer, itself included; 0 is all."""
    return [config.sliding_window if kind == SLIDING else 0 for kind in layer_kinds(config)]


def rope_of(config: PreTrainedConfig, kind: str = FULL) -> dict[str, Any]:
    """The parameters of the rotary embedding of layers of a kind."""
    stated = getattr(config, "rope_parameters", None) or {}
    return stated.get(kind, stated) or {}


def has_ropes_by_kind(config: PreTrainedConfig) -> bool:
    """Whether layers that see all tokens have other rotations than those with a window."""
    return FULL in (getattr(config, "rope_parameters", None) or {})


def has_growing_queries(config: PreTrainedConfig) -> bool:
    """Whether rotated queries are multiplied by a number that grows with their position, see `ropes.Rope`."""
    return family_of(config).growing_queries and bool(rope_of(config).get("llama_4_scaling_beta"))


def has_equal_factors(config: PreTrainedConfig) -> bool:
    """Whether long and short texts have the same LongRoPE factors, as in GGUF files."""
    rope = rope_of(config)
    return rope.get("rope_type") == "longrope" and rope.get("long_factor", 0) == rope.get("short_factor", 1)


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether `hybrid.HybridRunner` runs a model with this configuration."""
    return family_of(config.get_text_config()).state


def attending_layers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configurations of the layers that keep keys and values of every token; some models have several."""
    text = config.get_text_config(decoder=True)
    kinds = (getattr(text, "layer_types", None) if is_hybrid(text) else None) or [""] * text.num_hidden_layers
    return [text.per_layer_config[index] for index, kind in enumerate(kinds) if kind not in RUNNING]


def fits_float16(config: PreTrainedConfig) -> bool:
    """Whether a model of this type can be computed in float16; not known of all."""
    return not family_of(config.get_text_config()).beyond_float16


def key_heads(config: PreTrainedConfig) -> int:
    """The attention heads that have keys and values of their own."""
    stated = None if family_of(config).centred else getattr(config, "num_key_value_heads", None)
    return stated or config.num_attention_heads


def head_width(config: PreTrainedConfig) -> int:
    stated = None if family_of(config).centred else getattr(config, "head_dim", None)
    return stated or config.hidden_size // config.num_attention_heads


def final_norm_eps(config: PreTrainedConfig) -> float | None:
    """The epsilon of a model's final RMS norm; None if its norm is not like Llama's."""
    config = config.get_text_config()
    family = family_of(config)
    return config.rms_norm_eps if family.fused and not (family.centred or family.above_one) else None
