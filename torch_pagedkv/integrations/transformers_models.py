"""What transformers models ask of an attention function, and what of it paged attention refuses."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

# What models hand to every attention function and what changes nothing about attention.
_NOT_ABOUT_ATTENTION = frozenset(
    (
        "cache_position",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    )
)
_KNOWN_LAYER_TYPES = frozenset(("full_attention", "sliding_attention", "attention"))
# Their layers attend twice, to the same keys with other values: the second would overwrite those of the first.
_ATTEND_TWICE = frozenset(("diffllama",))

# Tells a layer whose model passes no window argument at all from one that has no window.
NOT_PASSED: Any = object()


def check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> None:
    """Refuse what can be refused before any tensor is touched."""
    name = "paged_attention_forward"
    if attention_mask is not None:
        raise ValueError(
            f"{name}: attention_mask must be None (block table and lengths say what is visible), "
            f"got a {type(attention_mask).__name__}"
        )
    if dropout:
        raise ValueError(f"{name}: dropout must be 0, call model.eval() first, got {dropout}")
    for option, setting in options.items():
        if setting is not None and setting is not False and option not in _NOT_ABOUT_ATTENTION:
            raise NotImplementedError(
                f"{name}: {option} must be absent or None, paged attention does not know it, "
                f"got a {type(setting).__name__}"
            )
    if query.shape[0] != 1:
        raise ValueError(
            f"{name}: query must have batch size 1 (pack the sequences: input_ids [1, T]), got {query.shape[0]}"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{name}: key must have one row for each of the {query.shape[2]} query tokens (pass "
            f"use_cache=False and no past_key_values), got {key.shape[2]}"
        )
    check_layer_types(name, module.config)


def check_layer_types(name: str, config: PretrainedConfig) -> None:
    """Refuse models with layers that keep another state than keys and values, or mask otherwise."""
    if config.model_type in _ATTEND_TWICE:
        raise NotImplementedError(
            f"{name}: the model's layers must attend once, to one set of values, got {config.model_type}"
        )
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    unknown = sorted(set(layer_types) - _KNOWN_LAYER_TYPES)
    if unknown:
        raise NotImplementedError(
            f"{name}: the model's layers must be full_attention or sliding_attention, got {', '.join(unknown)}"
        )


def check_model(name: str, model: torch.nn.Module) -> None:
    """Refuse models that never call the attention function: they would attend without the pools, and silently."""
    classes = [c for c in type(model).__mro__ if issubclass(c, PreTrainedModel) and c is not PreTrainedModel]
    if classes and not any(c._can_set_attn_implementation() for c in classes):
        raise NotImplementedError(
            f"{name}: model must call transformers' attention interface, got {type(model).__name__}, "
            "which has attention of its own"
        )


def find_window(module: torch.nn.Module, sliding_window: Any, causal: bool) -> tuple[int, int]:
    """Return the window of a layer, as (left, right) of paged_attention."""
    if sliding_window is NOT_PASSED:  # Phi-MoE and Qwen2-MoE pass none and rely on the mask
        layer_types = getattr(module.config, "layer_types", None)
        has_window = layer_types is None or layer_types[module.layer_idx] == "sliding_attention"
        sliding_window = getattr(module.config, "sliding_window", None) if has_window else None
    if sliding_window is None:
        return -1, -1
    if sliding_window < 1:
        raise ValueError(f"paged_attention_forward: sliding_window must be >= 1 or None, got {sliding_window}")
    if not causal:
        raise NotImplementedError(
            "paged_attention_forward: sliding_window must be None for a layer that is not causal "
            f"(its width to the right is not agreed on), got {sliding_window}"
        )
    return sliding_window - 1, 0


def find_kv_shape(name: str, config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the (num_kv_heads, head_dim, value_head_dim) of all layers of a text config."""
    is_heterogeneous = getattr(config, "is_heterogeneous", False)
    layers = config.per_layer_config if is_heterogeneous else [config]
    shapes = sorted({_kv_shape_of(name, layer) for layer in layers})
    if len(shapes) > 1:
        raise NotImplementedError(
            f"{name}: the model's layers must have one KV shape, got (num_kv_heads, head_dim, "
            f"value_head_dim) = {' and '.join(map(str, shapes))}; make one PagedKVCache for each "
            "and pass the model a list of (key_cache, value_cache) by layer as kv_cache"
        )
    return shapes[0]


def _kv_shape_of(name: str, config: PretrainedConfig) -> tuple[int, int, int]:
    num_heads = getattr(config, "num_attention_heads", None)
    if num_heads is None:
        raise NotImplementedError(
            f"{name}: config must have num_attention_heads, got a {type(config).__name__} without"
        )
    if getattr(config, "qk_nope_head_dim", None):
        # Latent attention: transformers expands keys and values to all heads.
        return num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim
