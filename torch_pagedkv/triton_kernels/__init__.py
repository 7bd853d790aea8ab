"""The ops on GPUs, in Triton: a module for each op, with a ``launch`` that takes checked arguments.

Nothing here is imported before a kernel is needed, and nothing here checks arguments: that is done
behind the dispatcher, in ``torch_pagedkv.ops``. Only values that live on the device (slots, block
ids, lengths, scales) are untrusted; a bad one is skipped or clamped and never leads out of a pool.
"""
