"""Arithmetic of launches. Triton's own takes microseconds a call outside of kernels."""


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of ``size`` hold ``count``."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
