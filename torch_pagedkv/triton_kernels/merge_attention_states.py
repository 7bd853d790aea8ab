"""merge_attention_states in Triton: rows are (token, head) pairs."""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.grid_sizes import cdiv, next_power_of_2
from torch_pagedkv.triton_kernels.strides import row_strides

# Elements of a tile.
_TILE = 1024


@triton.jit(do_not_specialize=["num_tokens", "a_lse_stride", "b_lse_stride"])
def _merge_kernel(
    out, lse, out_a, lse_a, out_b, lse_b,
    a_strides, b_strides, a_lse_stride, b_lse_stride, num_tokens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    in_range = token < num_tokens
    log_a = tl.load(lse_a + head * a_lse_stride + token, mask=in_range, other=float("-inf"))
    log_b = tl.load(lse_b + head * b_lse_stride + token, mask=in_range, other=float("-inf"))
    a_empty = log_a == float("-inf")
    b_empty = log_b == float("-inf")
    maximum = tl.maximum(log_a, log_b, propagate_nan=tl.PropagateNan.ALL)
    weight_a = tl.exp(log_a - maximum)
    weight_b = tl.exp(log_b - maximum)
    total = weight_a + weight_b
    merged_lse = tl.where(b_empty, log_a, tl.where(a_empty, log_b, maximum + tl.log(total)))
    tl.store(lse + head * num_tokens + token, merged_lse, mask=in_range)

    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = in_range[:, None] & (dim < HEAD_DIM)
    place_a = (token * a_strides.token + head * a_strides.head)[:, None] + dim
    place_b = (token * b_strides.token + head * b_strides.head)[:, None] + dim
    # What stands in an empty part, NaN included, is not even read.
    a = tl.load(out_a + place_a, mask=mask & ~a_empty[:, None], other=0.0)
    b = tl.load(out_b + place_b, mask=mask & ~b_empty[:, None], other=0.0)
    summed = weight_a[:, None] * a.to(tl.float32) + weight_b[:, None] * b.to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    merged = (summed / total[:, None]).to(dtype)
    # Beside an empty part the other one stays as it is, to the bit. Two empty ones, whose weights are
    # NaN, were read as 0.
    merged = tl.where(b_empty[:, None], a.to(dtype), merged)
    merged = tl.where(a_empty[:, None], b.to(dtype), merged)
    tl.store(out + row[:, None] * HEAD_DIM + dim, merged, mask=mask)


def launch(out, lse, out_a, lse_a, out_b, lse_b) -> None:
    num_tokens, num_heads, head_dim = out.shape
    block_d = next_power_of_2(head_dim)
    rows = max(1, _TILE // block_d)
    grid = (cdiv(num_tokens * num_heads, rows),)
    if num_tokens * num_heads == 0:
        return
    with device_of(out):
        _merge_kernel[grid](
            out, lse, out_a, lse_a, out_b, lse_b, row_strides(out_a), row_strides(out_b),
            lse_a.stride(0), lse_b.stride(0), num_tokens, num_heads, head_dim, rows, block_d,
        )  # fmt: skip
