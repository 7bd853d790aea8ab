"""copy_blocks, one block after the other."""

from __future__ import annotations

import torch

from torch_pagedkv.reference.value_checks import check_block_copies


@torch.inference_mode()  # which may write to pools of either mode
def copy_blocks(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
) -> None:
    check_block_copies("copy_blocks", src_blocks, dst_blocks, key_cache.shape[0])
    for source, destination in zip(src_blocks.tolist(), dst_blocks.tolist()):
        key_cache[destination].copy_(key_cache[source])
        value_cache[destination].copy_(value_cache[source])
