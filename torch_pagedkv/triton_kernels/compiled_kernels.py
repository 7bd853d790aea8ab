"""How many kernels this process holds compiled."""

import importlib

from triton.runtime.jit import JITFunction

_MODULES = (
    "reshape_and_cache", "paged_attention", "merge_attention_states", "gather_kv", "copy_blocks",
    "compute_slot_mapping",
)  # fmt: skip


def num_compiled() -> int:
    """Return the number of compiled kernels of all ops on all devices."""
    modules = [importlib.import_module(f"torch_pagedkv.triton_kernels.{name}") for name in _MODULES]
    found = [kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, JITFunction)]
    return sum(len(cache[0]) for kernel in found for cache in kernel.device_caches.values())
