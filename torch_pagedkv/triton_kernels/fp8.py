"""float8 bytes to float and back by integer operations.

Bytes instead of Triton's float8 types, because a GPU without float8 conversion instructions must
give the same bits, and because Triton's conversions do not saturate as the contract asks.
"""

import torch
import triton
import triton.language as tl

# What a kernel calls the format of a tensor's bytes; None for tensors that are not float8.
FORMATS = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}


def decoded_format(dtype: torch.dtype, hardware: bool) -> str | None:
    """Return the format name for decoding, by conversion instructions where a device has them."""
    name = FORMATS.get(dtype)
    return f"hardware_{name}" if name and hardware else name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or its bytes if it is float8: kernels never see a float8 type."""
    return tensor.view(torch.uint8) if tensor.dtype in FORMATS else tensor


@triton.jit
def fp8_to_float(byte, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Decode bytes to DTYPE: float16, bfloat16 and float32 hold every value of both formats."""
    if FORMAT == "hardware_e4m3fn":
        decoded = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "hardware_e5m2":
        decoded = byte.to(tl.float8e5, bitcast=True).to(tl.float16)
    elif FORMAT == "e5m2":
        decoded = (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        # The byte at the upper end of 16 bits, its exponent field shifted to the lower end of
        # float16's wider one; the bias then differs by 8. The product is taken in float32 because
        # some GPUs flush float16 subnormals.
        shifted = ((byte.to(tl.uint16) << 8).to(tl.int16, bitcast=True) >> 1) & -0x4001
        decoded = shifted.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        decoded = tl.where(tl.abs(decoded) > 448.0, float("nan"), decoded)
    return decoded.to(DTYPE)


@triton.jit
def load_as(pointers, mask, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Load elements as DTYPE, decoding bytes if FORMAT names a float8; 0 where mask is False."""
    if mask is None:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=mask, other=0)
    if FORMAT is None:
        return loaded
    else:
        return fp8_to_float(loaded, FORMAT, DTYPE)


@triton.jit
def sign_bit(x):
    """The sign of floats of any width as 0 or 0x80, NaN's too: conversions may lose that one."""
    WIDTH: tl.constexpr = x.dtype.primitive_bitwidth
    if WIDTH == 16:
        return (x.to(tl.uint16, bitcast=True) >> 8).to(tl.uint32) & 0x80
    else:
        return (x.to(tl.uint32, bitcast=True) >> 24) & 0x80


@triton.jit
def float32_to_fp8(x, nan_sign, FORMAT: tl.constexpr):
    """Encode float32 as bytes: nearest even, saturating; NaN becomes ``0x7F | nan_sign``."""
    if FORMAT == "e4m3fn":
        DROPPED: tl.constexpr = 20  # mantissa bits that float32 has more
        REBIAS: tl.constexpr = 120  # exponent bias that float32 has more
        LARGEST: tl.constexpr = 0x7E
        # Adding this aligns float32's last bit with the format's smallest subnormal (2**-9).
        ALIGNER: tl.constexpr = 16384.0
    else:
        DROPPED: tl.constexpr = 21
        REBIAS: tl.constexpr = 112
        LARGEST: tl.constexpr = 0x7B
        ALIGNER: tl.constexpr = 128.0  # the same for 2**-16
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    last_kept = (magnitude >> DROPPED) & 1
    rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + last_kept
    normal = (rounded >> DROPPED) - (REBIAS << (23 - DROPPED))
    aligned = magnitude.to(tl.float32, bitcast=True) + ALIGNER
    subnormal = aligned.to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < ((REBIAS + 1) << 23), subnormal, normal)
    code = tl.minimum(code, LARGEST) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F | nan_sign, code).to(tl.uint8)
