"""A small decoder around PagedAttention, its pools and its batches, for the tests of compilers."""

from __future__ import annotations

import torch

from cases import FP32
from torch_pagedkv import PagedAttention, PagedBatch, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16
WIDTH = HEADS * DIM
ROWS = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]  # of query, key and value in a fused projection


class Layer(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.fused = torch.nn.Linear(WIDTH, sum(ROWS), device=device)
        self.attention = PagedAttention(HEADS, DIM, KV_HEADS)

    def forward(self, hidden, pools, batch):
        query, key, value = self.fused(hidden).split(ROWS, dim=1)
        return hidden + self.attention(query, key, value, pools, batch)


class Decoder(torch.nn.Module):
    def __init__(self, layers: int, device: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(device) for _ in range(layers))

    def forward(self, hidden, pools, batch):
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, pools[number], batch)
        return hidden


def tables(num_sequences: int, blocks: int) -> list[list[int]]:
    return [[row * blocks + column for column in range(blocks)][::-1] for row in range(num_sequences)]


def decode_batch(lengths: list[int], device: str, blocks: int = 8) -> PagedBatch:
    return PagedBatch.from_sequences(tables(len(lengths), blocks), lengths, block_size=BLOCK, device=device)


def prefill_batch(lengths: list[int], device: str, blocks: int = 8) -> PagedBatch:
    return PagedBatch.from_sequences(tables(len(lengths), blocks), lengths, lengths, block_size=BLOCK, device=device)


def new_cache(layers: int, device: str, num_blocks: int = 64) -> PagedKVCache:
    cache = PagedKVCache(layers, KV_HEADS, DIM, block_size=BLOCK, num_blocks=num_blocks, dtype=FP32, device=device)
    cache.storage.zero_()
    return cache
