"""A plain Llama on a paged KV cache, compiled whole: prefill and decode, batches that grow and shrink.

    python docs/examples/llama.py                      # compiled, random weights, checked against eager
    python docs/examples/llama.py --pools buffers --mode reduce-overhead --device cuda

The model below is all there is to it. Its pools come as arguments, as buffers of the module, or as
views of one tensor for all layers; each of these compiles to one graph that copies no pool.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torch_pagedkv import BlockAllocator, PagedAttention, PagedBatch, PagedKVCache, blocks_for

BLOCK_SIZE, NUM_BLOCKS = 16, 64


@dataclass(frozen=True)
class Config:
    vocab: int = 512
    width: int = 128
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    rope_theta: float = 10000.0


def rotation(positions: torch.Tensor, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of rotary embeddings, [T, 1, head_dim // 2] each."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    angles = positions[:, None, None] * config.rope_theta**-exponents
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    (first, second), (cos, sin) = heads.float().chunk(2, dim=-1), rope
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        self.attention = PagedAttention(config.heads, config.head_dim, config.kv_heads)
        self.fused = None  # see fuse_projections

    def project(self, x, rope):
        if self.fused is None:
            query, key = (rotate(linear(x).unflatten(-1, (-1, self.head_dim)), rope) for linear in (self.wq, self.wk))
            return query, key, self.wv(x)
        rows, kv_heads = self.fused(x).unflatten(-1, (-1, self.head_dim)), self.attention.num_kv_heads
        rotated = rotate(rows[:, :-kv_heads], rope)
        return rotated[:, :-kv_heads], rotated[:, -kv_heads:], rows[:, -kv_heads:]

    def forward(self, x, rope, kv_cache, batch):
        query, key, value = self.project(x, rope)
        return self.wo(self.attention(query, key, value, kv_cache, batch).flatten(1))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        self.fused = None

    def forward(self, x):
        gate, up = (self.gate(x), self.up(x)) if self.fused is None else self.fused(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x, rope, kv_cache, batch):
        x = x + self.attention(self.attention_norm(x), rope, kv_cache, batch)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def begin(self, tokens, positions):
        return self.embed(tokens), rotation(positions, self.config)

    def finish(self, x):
        return self.head(self.norm(x))

    def forward(self, tokens, positions, pools, batch):
        """Return the logits of packed tokens [T]; ``pools[layer]`` gives the pair of pools of a layer."""
        x, rope = self.begin(tokens, positions)
        for number, layer in enumerate(self.layers):
            key_cache, value_cache = pools[number]
            x = layer(x, rope, (key_cache, value_cache), batch)
        return self.finish(x)


def compile_parts(model: Llama, **how) -> None:
    """Compile a layer, which serves all layers, and what comes before and after them: much sooner done than the whole.

    Pools have to be two tensors of their own for each layer.
    """
    model.begin, model.finish = (torch.compile(part, fullgraph=True, **how) for part in (model.begin, model.finish))
    for layer in model.layers:
        layer.compile(fullgraph=True, **how)


def fused(*linears: nn.Linear) -> nn.Linear:
    """Return one projection for several of the same rows: a GPU reads one large matrix faster than three."""
    weights = [linear.weight for linear in linears]
    # Of a weight that is spread over ranks column-wise, a rank has rows of its own.
    weight = torch.cat([weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights])
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def fuse_projections(model: Llama) -> None:
    """Put queries, keys and values into one matrix, and gate and up into another, in every layer."""
    for layer in model.layers:
        for module, names in ((layer.attention, ("wq", "wk", "wv")), (layer.feed_forward, ("gate", "up"))):
            module.fused = fused(*(getattr(module, name) for name in names))
            for name in names:
                delattr(module, name)


class LlamaWithBuffers(Llama):
    """The same model, owning the memory of its pools."""

    def __init__(self, config: Config, pool: torch.Tensor) -> None:
        super().__init__(config)
        self.register_buffer("pool", pool, persistent=False)

    def forward(self, tokens, positions, batch):
        return super().forward(tokens, positions, self.pool, batch)


def decode_step(model: Llama, tokens: torch.Tensor, pools, batch: PagedBatch) -> torch.Tensor:
    """Store the sequences' newest tokens and replace them by the next ones; return the logits.

    Nothing goes through the host: compiled or captured once, it serves every step until a sequence
    needs a block that its row of the table has not.
    """
    batch.advance_(block_size=pools[0][0].shape[1])
    logits = model(tokens, batch.seqused_k - 1, pools, batch)
    tokens.copy_(logits.argmax(-1))
    return logits


def make_pool(config: Config, device: str) -> torch.Tensor:
    """One tensor for the keys and values of all layers: ``pool[layer]`` unpacks to a pair."""
    sizes = (config.layers, 2, NUM_BLOCKS, BLOCK_SIZE, config.kv_heads, config.head_dim)
    return torch.empty(sizes, device=device)  # never zeroed: what was not written is never seen


def build(kind: str, device: str):
    """Return a function (tokens, positions, batch) -> logits whose module ``torch.compile`` takes, and its pools."""
    torch.manual_seed(0)
    config = Config()
    if kind == "buffers":
        return LlamaWithBuffers(config, make_pool(config, device)).to(device), ()
    if kind == "one-pool":
        return Llama(config).to(device), (make_pool(config, device),)
    sizes = dict(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, dtype=torch.float32, device=device)
    return Llama(config).to(device), (PagedKVCache(config.layers, config.kv_heads, config.head_dim, **sizes),)


@torch.no_grad()
def generate(model, pools, prompts: list[list[int]], num_new: int, device: str) -> list[list[int]]:
    """Serve prompts greedily: every step, one more joins (its whole prompt) while the others decode or leave."""
    allocator = BlockAllocator(NUM_BLOCKS)
    texts, tables = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    waiting, running = list(range(len(prompts))), []
    while waiting or running:
        joining = [waiting.pop(0)] if waiting else []
        new = [texts[i][-1:] for i in running] + [texts[i] for i in joining]
        running += joining
        for i in running:
            tables[i] += allocator.allocate(blocks_for(len(texts[i]), BLOCK_SIZE) - len(tables[i]))
        lengths, counts = [len(texts[i]) for i in running], [len(tokens) for tokens in new]
        only_decode = all(count == 1 for count in counts)
        batch = PagedBatch.from_sequences(
            [tables[i] for i in running], lengths, None if only_decode else counts, block_size=BLOCK_SIZE, device=device
        )
        tokens = torch.tensor([token for tokens in new for token in tokens], device=device)
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]).to(device)
        logits = model(tokens, positions, *pools, batch)
        ends = torch.tensor(counts).cumsum(0).to(device) - 1
        for i, token in zip(running, logits[ends].argmax(-1).tolist(), strict=True):
            texts[i].append(token)
        for i in [i for i in running if len(texts[i]) == len(prompts[i]) + num_new]:
            allocator.free(tables[i])
            running.remove(i)
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pools", default="arguments", choices=("arguments", "buffers", "one-pool"))
    parser.add_argument("--mode", default="default", choices=("default", "reduce-overhead"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args = parser.parse_args()
    prompts = [[1, 2, 3], [7] * 40, [5], list(range(100, 117)), [9, 8]]
    model, pools = build(args.pools, args.device)
    for memory in pools:  # torch records no CUDA graph of what writes to arguments that may move
        torch._dynamo.mark_static_address(getattr(memory, "storage", memory))
    expected = generate(model, pools, prompts, args.max_new_tokens, args.device)
    print(f"eager: {sum(map(len, expected))} tokens; compiling, once for each form of the batch ...", flush=True)
    compiled = torch.compile(model, fullgraph=True, mode=args.mode)
    same = generate(compiled, pools, prompts, args.max_new_tokens, args.device) == expected
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"compiled with pools as {args.pools}, mode {args.mode}: {graphs} graphs, tokens as eager: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
