"""Paged attention for transformers models: the attention function, and a driver that feeds it.

``register()`` once, choose ``attn_implementation="torch_pagedkv"``, and a model writes its keys and
values into paged pools and reads them through a block table. The pools and the batch travel through
the model's keyword arguments, ``kv_cache`` and ``paged_batch``; nothing is kept in a global.
``make_cache`` sizes the pools from a config, ``forward`` runs a packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from torch_pagedkv import PagedBatch, PagedKVCache, paged_attention, reshape_and_cache
from torch_pagedkv.integrations.transformers_models import (
    NOT_PASSED,
    check_call,
    check_layer_types,
    check_model,
    find_kv_shape,
    find_window,
)

ATTN_IMPLEMENTATION = "torch_pagedkv"


def register() -> None:
    """Make ``attn_implementation="torch_pagedkv"`` known to transformers.

    Registers ``paged_attention_forward`` as the attention function and ``refuse_masks`` as the mask
    function of that name. Calling it again changes nothing.

    Returns:
        None.

    Example:
        >>> from torch_pagedkv.integrations import transformers as paged
        >>> paged.register()

    Source: transformers, ``AttentionInterface`` and ``AttentionMaskInterface``.
    """
    AttentionInterface.register(ATTN_IMPLEMENTATION, paged_attention_forward)
    AttentionMaskInterface.register(ATTN_IMPLEMENTATION, refuse_masks)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kv_cache: PagedKVCache | Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
    paged_batch: PagedBatch | None = None,
    sliding_window: int | None = NOT_PASSED,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Write a layer's new keys and values into its pools, then attend through the block table.

    Models call this function; users register it. Token t of the packed batch is stored at slot
    ``paged_batch.slot_mapping[t]`` = ``physical_block * block_size + offset`` of the pools
    ``kv_cache[module.layer_idx]``, and query t attends to its sequence through
    ``paged_batch.block_table``. A sliding window of W tokens is ``window_size=(W - 1, 0)``; a model
    that leaves its window to the mask has it taken from its config.

    Args:
        module: the attention layer; ``layer_idx`` picks the pools, ``config`` says its layer type.
        query: [1, num_heads, T, head_dim], the tokens of all sequences packed.
        key, value: [1, num_kv_heads, T, head_dim or value_head_dim], the new tokens only.
        attention_mask: None; block table and lengths say what is visible.
        scaling: factor of the scores; None: ``head_dim ** -0.5``.
        dropout: 0; this is inference.
        kv_cache: the pools, **mutated in place**: a PagedKVCache, whose scales are used, or any
            sequence of (key_cache, value_cache) by layer.
        paged_batch: what the tokens are: block table, lengths, prefix sums, slots.
        sliding_window: tokens that a query sees, itself included; None: all.
        softcap: cap of the scores; None: none.
        s_aux: [num_heads], attention sinks; None: none.
        is_causal: None: what the layer says of itself.
        options: what else a model passes. None, False and what is not about attention is ignored.

    Returns:
        out: [1, T, num_heads, value_head_dim], query's dtype, new.
        weights: None, they are never materialised.

    Raises:
        ValueError: no pools or batch, a batch dimension other than 1, keys of a transformers cache,
            a mask, dropout, a window below 1, or what the ops refuse.
        NotImplementedError: an option or a layer type that paged attention does not know.

    Not checked:
        That the batch describes the tokens of ``input_ids`` and that the position ids fit it.

    Source: transformers, ``integrations/sdpa_attention.py``, for the meaning of the arguments.
    """
    check_call(module, query, key, attention_mask, dropout, options)
    if kv_cache is None or paged_batch is None:
        missing = "kv_cache" if kv_cache is None else "paged_batch"
        raise ValueError(
            f"paged_attention_forward: {missing} must be passed to the model, "
            "model(..., kv_cache=cache, paged_batch=batch, use_cache=False), got None"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) and getattr(module.config, "is_causal", True)
    key_cache, value_cache = kv_cache[module.layer_idx]
    scales = {name: getattr(kv_cache, name, None) for name in ("k_scale", "v_scale")}
    # [1, heads, T, head_dim] -> [T, heads, head_dim]: a view, whatever the projection's strides.
    reshape_and_cache(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        key_cache,
        value_cache,
        paged_batch.slot_mapping,
        **scales,
    )
    out = paged_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        paged_batch.block_table,
        paged_batch.seqused_k,
        paged_batch.cu_seqlens_q,
        softmax_scale=scaling,
        causal=is_causal,
        window_size=find_window(module, sliding_window, is_causal),
        softcap=softcap or 0.0,
        sinks=s_aux,
        **scales,
    )
    return out.unsqueeze(0), None


def refuse_masks(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    mask_function: Any = None,
    use_vmap: bool = False,
    **options: Any,
) -> None:
    """Build no mask, and refuse what only a mask could express.

    transformers calls this function where it would build a mask. Causality, the window and the
    bounds of packed sequences need none: block table and lengths give them.

    Args:
        attention_mask: [batch, length] marks of padding; None here, a packed batch has no padding.
        mask_function: transformers' rule of what is visible, looked at only to refuse unions.
        use_vmap: set by transformers where the model overlays a rule of its own.

    Returns:
        None: no mask.

    Raises:
        ValueError: a padding mask.
        NotImplementedError: a rule other than causal, windowed or bidirectional attention.
    """
    if attention_mask is not None:
        raise ValueError(
            "torch_pagedkv: attention_mask must be None (sequences are packed without padding, and "
            f"rows without a token have slot -1), got a mask of shape {list(attention_mask.shape)}"
        )
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":
        raise NotImplementedError(
            "torch_pagedkv: the model's mask must be causal or a sliding window, got one joined "
            "with a rule of the model's own; attn_implementation='eager' or 'sdpa' can build it"
        )


def make_cache(
    config: PretrainedConfig,
    *,
    num_blocks: int | None = None,
    memory_bytes: int | None = None,
    block_size: int = 16,
    kv_layout: str = "NHD",
    dtype: torch.dtype,
    device: torch.device | str,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> PagedKVCache:
    """Make the paged pools that a model of this config needs, one pair for each layer.

    Each pool has shape [num_blocks, block_size, num_kv_heads, head_dim], or value_head_dim, so that
    a token at ``slot = physical_block * block_size + offset`` has the same slot in every layer.

    Args:
        config: ``model.config``; of a multimodal model its text part counts.
        num_blocks: blocks of each pool, or
        memory_bytes: what all pools together may take.
        block_size: tokens in a block.
        kv_layout: "NHD" or "HND", the order in memory.
        dtype: the model's dtype, or float8_e4m3fn or float8_e5m2.
        device: the model's device.
        k_scale, v_scale: scales of fp8 pools, as PagedKVCache takes them.

    Returns:
        A new PagedKVCache.

    Raises:
        NotImplementedError: the model has layers that keep another state than keys and values, or
            layers of different KV shapes.
        ValueError: what PagedKVCache refuses.

    Not checked:
        That the model's layers really produce the shapes its config says; the ops refuse others.

    Example:
        >>> import torch, transformers
        >>> from torch_pagedkv.integrations import transformers as paged
        >>> config = transformers.LlamaConfig(num_hidden_layers=2, num_key_value_heads=4)
        >>> cache = paged.make_cache(config, num_blocks=8, dtype=torch.bfloat16, device="cpu")
        >>> cache[1][0].shape
        torch.Size([8, 16, 4, 128])
    """
    text_config = config.get_text_config(decoder=True)
    check_layer_types("make_cache", text_config)
    num_kv_heads, head_dim, value_head_dim = find_kv_shape("make_cache", text_config)
    return PagedKVCache(
        text_config.num_hidden_layers,
        num_kv_heads,
        head_dim,
        value_head_dim=value_head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        memory_bytes=memory_bytes,
        kv_layout=kv_layout,
        dtype=dtype,
        device=device,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@torch.no_grad()
def forward(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: PagedKVCache,
    paged_batch: PagedBatch,
    *,
    logits_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a causal language model over a packed batch, its keys and values in paged pools.

    The batch mixes freely: whole prompts, chunks of prompts and single decode tokens of many
    sequences, one after the other. Token t goes to slot ``paged_batch.slot_mapping[t]``. To
    compile, compile the model, or a function that calls this one.

    Args:
        model: with ``attn_implementation="torch_pagedkv"``; its pools are **mutated in place**.
        input_ids: [T] int64, the tokens of all sequences packed; rows past the batch's last token
            are padding.
        positions: [T] int64, each token's position in its sequence.
        kv_cache: the pools, as ``make_cache`` makes them.
        paged_batch: the batch.
        logits_rows: [N] int32 or int64, the rows to compute logits of, such as each sequence's
            last; None: all.

    Returns:
        [T or N, vocab_size], the logits in the model's dtype.

    Raises:
        ValueError: the model has another attention implementation, or what
            ``paged_attention_forward`` refuses.
        NotImplementedError: the model has attention of its own and would not use the pools (looked at
            outside of compiled functions).

    Not checked:
        That positions and the batch describe the same tokens. Rotary embeddings whose scaling
        follows the longest position (dynamic NTK, longrope) take it from the whole batch: a
        sequence past the original length changes those of its batch mates.

    Example:
        >>> import torch, transformers
        >>> from torch_pagedkv import PagedBatch
        >>> from torch_pagedkv.integrations import transformers as paged
        >>> paged.register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, attn_implementation="torch_pagedkv",
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> cache = paged.make_cache(config, num_blocks=4, dtype=torch.float32, device="cpu")
        >>> batch = PagedBatch.from_sequences(
        ...     [[3], [1]], [2, 3], [2, 3], block_size=16, device="cpu"
        ... )
        >>> input_ids, positions = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 1, 0, 1, 2])
        >>> paged.forward(model, input_ids, positions, cache, batch).shape
        torch.Size([5, 64])
    """
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation != ATTN_IMPLEMENTATION:
        raise ValueError(
            f"forward: model must have attn_implementation={ATTN_IMPLEMENTATION!r} (register() it, "
            f"then model.set_attn_implementation({ATTN_IMPLEMENTATION!r})), got {implementation!r}"
        )
    if not torch.compiler.is_compiling():
        check_model("forward", model)
    output = model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=0 if logits_rows is None else logits_rows,
        kv_cache=kv_cache,
        paged_batch=paged_batch,
    )
    return output.logits[0]
