"""Tiny random models of many families: paged attention gives the logits of eager attention."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers")

from torch_pagedkv import PagedBatch  # noqa: E402
from torch_pagedkv.integrations import transformers as paged  # noqa: E402

WINDOW = 8
BASE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = {
    "Llama": {},
    "Qwen2": dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "Qwen3": dict(head_dim=24),
    "Mistral": dict(sliding_window=WINDOW),
    "Gemma2": dict(head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=4),
    "Gemma3Text": dict(
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "GptOss": dict(head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "Phi3": dict(hidden_size=192, num_attention_heads=2, num_key_value_heads=1),  # head_dim 96
    "Gemma3nText": dict(  # the last layer takes an earlier one's keys and values
        head_dim=16,
        sliding_window=WINDOW,
        num_hidden_layers=3,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        intermediate_size=[64] * 3,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 3,
    ),
    # The next two leave the window to the mask, the last has value heads of their own size.
    "Qwen2Moe": dict(use_sliding_window=True, sliding_window=WINDOW, shared_expert_intermediate_size=16, **MOE),
    "Phimoe": dict(sliding_window=WINDOW, num_local_experts=4),
    "DeepseekV3": dict(
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
}
LENGTHS = (21, 9, 14)
BLOCK_SIZE = 4
NUM_BLOCKS = 16
BLOCK_TABLES = ([7, 2, 9, 0, 11, 5], [3, 14, 1], [13, 6, 15, 4])

# Steps of (sequence, new tokens): whole prompts; chunks that mix with decodes; decodes alone.
PLANS = {
    "whole": [[(0, 21), (1, 9), (2, 14)]],
    "chunks": [[(0, 8)], [(0, 8), (1, 5)], [(2, 13), (1, 1), (0, 1)], [(0, 4), (1, 3), (2, 1)]],
    "decode": [[(1, 3), (2, 8), (0, 15)], *[[(0, 1), (2, 1), (1, 1)]] * 6],
}


def make_config(family: str, **changes):
    return getattr(transformers, f"{family}Config")(**{**BASE, **FAMILIES[family], **changes})


def make_model(family: str, device: str = "cpu", **changes):
    """Return a model whose attention matters: weights that make the softmax uneven, sinks too."""
    config = make_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else 1.0 + 0.3 * noise)
    return model.to(device).eval()


def make_prompts(device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (n,), generator=generator).to(device) for n in LENGTHS]


@torch.no_grad()
def eager_logits(model, prompts) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")
    logits = [model(prompt[None], use_cache=False).logits[0] for prompt in prompts]
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    return logits


def make_cache(model, **options):
    options = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "dtype": torch.float32,
        **options,
    }
    cache = paged.make_cache(model.config, device=model.device, **options)
    cache.storage.view(torch.uint8).fill_(0x7F)  # NaN, whatever the dtype
    return cache


def run_step(model, prompts, stored, step, cache, forward=paged.forward) -> list[torch.Tensor]:
    """Run one step, advance ``stored``, and return each of its sequences' new rows of logits."""
    pieces, positions = [], []
    for sequence, num_new in step:
        stop = stored[sequence] + num_new
        pieces.append(prompts[sequence][stored[sequence] : stop])
        positions.append(torch.arange(stored[sequence], stop, device=model.device))
        stored[sequence] = stop
    batch = PagedBatch.from_sequences(
        [BLOCK_TABLES[sequence] for sequence, _ in step],
        [stored[sequence] for sequence, _ in step],
        [num_new for _, num_new in step],
        block_size=BLOCK_SIZE,
        device=model.device,
    )
    input_ids, positions = torch.cat(pieces), torch.cat(positions)
    for tensor in (input_ids, positions, batch.slot_mapping):
        torch._dynamo.mark_dynamic(tensor, 0)
    logits = forward(model, input_ids, positions, cache, batch)
    return list(logits.split([num_new for _, num_new in step]))


def run_plan(model, prompts, plan, cache, forward=paged.forward) -> list[torch.Tensor]:
    """Run all steps; return each sequence's logits, row by row as if it had run in one piece."""
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    stored = [0] * len(prompts)
    for step in plan:
        logits = run_step(model, prompts, stored, step, cache, forward)
        for (sequence, _), piece in zip(step, logits, strict=True):
            rows[sequence].append(piece)
    return [torch.cat(pieces) for pieces in rows]


def assert_logits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def registered():
    paged.register()
    paged.register()  # again: nothing changes


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager_attention(family, plan, device):
    model, prompts = make_model(family, device), make_prompts(device)
    expected = eager_logits(model, prompts)
    actual = run_plan(model, prompts, PLANS[plan], make_cache(model))
    assert_logits(actual, expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {"sliding_window": 64}),
        ("Mistral", {"sliding_window": None}),
        ("Gemma2", {"sliding_window": 64}),
        ("Gemma2", {"attn_logit_softcapping": None}),
        ("Gemma2", {"query_pre_attn_scalar": 16}),
        ("Gemma3Text", {"sliding_window": 64}),
        ("Gemma3Text", {"query_pre_attn_scalar": 16}),
        ("GptOss", {"sliding_window": 64}),
        ("Qwen2Moe", {"sliding_window": 64}),
        ("Phimoe", {"sliding_window": None}),
    ],
    ids=str,
)
def test_options_of_the_models_matter_here(family, changes):
    """The inputs tell an option from its absence, in eager attention and in ours alike."""
    prompts = make_prompts()
    logits = []
    for model in (make_model(family), make_model(family, **changes)):
        logits.append(run_plan(model, prompts, PLANS["chunks"], make_cache(model), forward_paged))
    assert (logits[0][0] - logits[1][0]).abs().max() > 1e-2


def forward_paged(model, *args):
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    return paged.forward(model, *args)


def test_sinks_of_gpt_oss_matter_here():
    model, prompts = make_model("GptOss"), make_prompts()
    with_sinks = run_plan(model, prompts, PLANS["whole"], make_cache(model), forward_paged)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    without = run_plan(model, prompts, PLANS["whole"], make_cache(model))
    assert (with_sinks[0] - without[0]).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_to_one_graph_for_all_token_counts(family, device):
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(paged.forward, fullgraph=True, backend=backend)
    model, prompts = make_model(family, device), make_prompts(device)
    expected = eager_logits(model, prompts)
    plan = [[(1, 1), (2, 5), (0, 9)], *[[(0, 1), (2, 1), (1, 1)]] * 3, [(0, 9), (1, 5), (2, 6)]]
    actual = run_plan(model, prompts, plan, make_cache(model), forward)
    assert_logits(actual, expected)
    assert backend.frame_count == 1


def test_step_of_fixed_shape_pads_with_nothing(device):
    model, prompts = make_model("Llama", device), make_prompts(device)
    expected = eager_logits(model, prompts)
    cache = make_cache(model, kv_layout="HND")
    batch = PagedBatch.fixed(4, max_blocks=8, max_tokens=40, device=device)
    input_ids = torch.full((40,), 5, device=device)
    positions = torch.zeros_like(input_ids)
    num_tokens = LENGTHS[0] + LENGTHS[1]
    input_ids[:num_tokens] = torch.cat(prompts[:2])
    positions[:num_tokens] = torch.cat([torch.arange(n, device=device) for n in LENGTHS[:2]])
    batch.update_(BLOCK_TABLES[:2], LENGTHS[:2], LENGTHS[:2], block_size=BLOCK_SIZE)
    last_rows = batch.cu_seqlens_q[1:3].long() - 1
    before = cache.storage.clone()
    logits = paged.forward(model, input_ids, positions, cache, batch, logits_rows=last_rows)
    assert_logits(list(logits), [expected[0][-1], expected[1][-1]])
    written = (cache.storage.view(torch.int32) != before.view(torch.int32)).sum().item()
    assert written == num_tokens * 2 * 2 * 2 * 16  # layers, keys and values, heads, head_dim


def test_pools_may_be_a_list_of_pairs():
    model, prompts = make_model("Llama"), make_prompts()
    expected = eager_logits(model, prompts)
    assert_logits(run_plan(model, prompts, PLANS["chunks"], list(make_cache(model))), expected)


def test_scales_of_an_fp8_cache_are_used(device):
    model, prompts = make_model("Llama", device), make_prompts(device)
    expected = eager_logits(model, prompts)
    errors = []
    for scale in (0.25, 1e6):  # well chosen; so large that every value is stored as 0
        scales = {name: torch.tensor(scale, device=device) for name in ("k_scale", "v_scale")}
        cache = make_cache(model, dtype=torch.float8_e4m3fn, **scales)
        logits = run_plan(model, prompts, PLANS["chunks"], cache)
        errors.append((torch.cat(logits) - torch.cat(expected)).abs().mean().item())
    assert errors[0] < 0.1 < 0.3 < errors[1]


def call_model(model, *, batch_size=1, **changes):
    """Call the model as ``forward`` does, but for the changes."""
    cache = make_cache(model, num_blocks=32)
    batch = PagedBatch.from_sequences([BLOCK_TABLES[0]], [6], [6], block_size=BLOCK_SIZE)
    arguments = dict(
        input_ids=torch.full((batch_size, 6), 5),
        position_ids=torch.arange(6)[None],
        use_cache=False,
        kv_cache=cache,
        paged_batch=batch,
    )
    with torch.no_grad():
        return model(**{**arguments, **changes}).logits


def past_key_values():
    past = transformers.DynamicCache()
    for layer in range(2):
        past.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), layer)
    return past


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"kv_cache": None}, ValueError, "kv_cache must be passed to the model, .*, got None"),
        ({"paged_batch": None}, ValueError, "paged_batch must be passed to the model"),
        ({"attention_mask": torch.ones(1, 6)}, ValueError, r"mask must be None .* shape \[1, 6\]"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, ValueError, "mask must be None .* a Tensor"),
        ({"batch_size": 2}, ValueError, r"query must have batch size 1 .*, got 2"),
        ({"past_key_values": past_key_values()}, ValueError, "6 query tokens .* got 9"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions must be absent"),
        ({"position_bias": torch.zeros(6, 6)}, NotImplementedError, "position_bias .* a Tensor"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be >= 1 or None, got 0"),
        ({"sliding_window": 4, "is_causal": False}, NotImplementedError, "a layer .* not causal"),
        ({"softcap": -1.0}, ValueError, "softcap must be >= 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refuses_what_it_cannot_honour(changes, error, sentence):
    model = make_model("Llama")
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    assert call_model(model).isfinite().all()
    with pytest.raises(error, match=sentence):
        call_model(model, **changes)


def test_refuses_dropout_and_layers_of_another_kind():
    model = make_model("Llama", attention_dropout=0.1).train()
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    with pytest.raises(ValueError, match=r"dropout must be 0, call model.eval\(\) first, got 0.1"):
        call_model(model)
    model.eval().config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(NotImplementedError, match="or sliding_attention, got chunked_attention"):
        paged.make_cache(model.config, num_blocks=1, dtype=torch.float32, device="cpu")
    with pytest.raises(NotImplementedError, match="forward: the model's layers must be"):
        paged.paged_attention_forward(model.model.layers[0].self_attn, *[torch.zeros(1, 2, 3, 4)] * 3, None)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (transformers.DiffLlamaConfig(), "layers must attend once, to one set of values, got diffllama"),
        (transformers.RecurrentGemmaConfig(), "layers must be full_attention .*, got recurrent"),
        (transformers.RwkvConfig(), "config must have num_attention_heads, got a RwkvConfig without"),
    ],
)
def test_refuses_models_with_another_state(config, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        paged.make_cache(config, num_blocks=1, dtype=torch.float32, device="cpu")


def test_refuses_models_with_attention_of_their_own():
    options = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "vocab_size": 64}
    config = transformers.CodeGenConfig(**options, attn_implementation=paged.ATTN_IMPLEMENTATION)
    model = transformers.CodeGenForCausalLM(config).eval()
    cache = paged.make_cache(config, num_blocks=2, dtype=torch.float32, device="cpu")
    batch = PagedBatch.from_sequences([[0]], [3], [3], block_size=16, device="cpu")
    with pytest.raises(NotImplementedError, match="attention interface, got CodeGenForCausalLM, which"):
        paged.forward(model, torch.arange(3), torch.arange(3), cache, batch)


def test_refuses_masks_joined_with_a_rule_of_the_model():
    model = make_model("Gemma3Text", use_bidirectional_attention=True)
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    with pytest.raises(NotImplementedError, match="mask must be causal or a sliding window"):
        call_model(model)


def test_forward_refuses_another_attention_implementation():
    model, prompts = make_model("Llama"), make_prompts()
    with pytest.raises(ValueError, match=r"must have attn_implementation='torch_pagedkv'.*'eager'"):
        run_plan(model, prompts, PLANS["whole"], make_cache(model))


def test_make_cache_reads_the_config():
    options = dict(num_blocks=3, dtype=torch.bfloat16, device="cpu", kv_layout="HND")
    cache = paged.make_cache(make_config("Phi3"), block_size=8, **options)
    assert len(cache) == 2 and cache[0][0].shape == (3, 8, 1, 96) and cache.kv_layout == "HND"
    cache = paged.make_cache(make_config("DeepseekV3"), **options)
    assert cache[1][0].shape == (3, 16, 4, 24) and cache[1][1].shape == (3, 16, 4, 12)
    layered = transformers.Gemma4TextConfig(num_hidden_layers=6)
    with pytest.raises(NotImplementedError, match=r"layers must have one KV shape, got .* and .*"):
        paged.make_cache(layered, **options)
