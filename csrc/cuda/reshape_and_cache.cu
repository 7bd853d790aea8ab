// reshape_and_cache: every new token's key and value into its slot of the pools.
//
// A token's heads are cut into packs of 16 bytes (of the target, where it is the smaller one), or less
// where an address, a stride or a head size is no multiple of that. Adjacent threads take adjacent packs
// of a token, its key's first, then its value's; each thread has several tokens in flight.

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "checks.h"
#include "device_index.cuh"
#include "fp8_encode.cuh"
#include "launch.h"
#include "row_packs.cuh"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "reshape_and_cache";

constexpr int kThreads = 256;
// Tokens that a thread has in flight where there are enough to fill the device all the same.
constexpr int kTokensInFlight = 4;
constexpr int64_t kCtasToFill = 4;  // of each multiprocessor
// Up to so many tokens a CTA looks through the later slots for its own, so that of two tokens with
// one slot one is stored whole. The search is quadratic; above, rows of both may mix.
constexpr int64_t kLongestSearch = 1024;

// Keys into the key pool, or values into the value pool. Strides are in bytes.
struct Side {
  const char* source;
  char* cache;
  const float* scales;
  int64_t scale_stride;
  int64_t token_stride, source_head_stride;
  int64_t block_stride, offset_stride, cache_head_stride;
  uint32_t packs, packs_of_head;
};

struct Write {
  Side key, value;
  DeviceIndices slots;
  int64_t tokens, num_slots, block_size;
  int block_shift;  // of a block size that is a power of two, else -1
};

// Which slots of the CTA's own tokens a later token has too. Called by the whole CTA.
__device__ bool is_repeated(const Write& write, int64_t first_token, int64_t slot) {
  __shared__ int64_t own[kThreads];
  __shared__ int repeated[kThreads];
  const int rows = blockDim.y, threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) {
    own[threadIdx.y] = slot;
    repeated[threadIdx.y] = 0;
  }
  __syncthreads();
  for (int64_t later = first_token + 1 + thread; later < write.tokens; later += threads) {
    const int64_t other = write.slots[later];
    for (int row = 0; row < rows && first_token + row < later; ++row) {
      if (own[row] == other) repeated[row] = 1;
    }
  }
  __syncthreads();
  return repeated[threadIdx.y] != 0;
}

// One pack of each of a thread's tokens.
template <class Move, int TOKENS>
struct Packs {
  char* target;
  const Side* side;
  float scale;
  typename Move::Pack packs[TOKENS];

  __device__ void load(const Write& write, uint32_t pack, int64_t first_token) {
    const bool is_key = pack < write.key.packs;
    side = is_key ? &write.key : &write.value;
    pack -= is_key ? 0 : write.key.packs;
    const int64_t head = pack / side->packs_of_head, part = pack % side->packs_of_head;
    const char* const source =
        side->source + head * side->source_head_stride + part * Move::kSourceBytes;
    target = side->cache + head * side->cache_head_stride + part * Move::kTargetBytes;
    scale = 1.0f;
    if (Move::kScales && side->scales) scale = side->scales[head * side->scale_stride];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int64_t token = first_token + i * blockDim.y;
      if (token < write.tokens) packs[i] = Move::load(source + token * side->token_stride);
    }
  }

  __device__ void store(const int64_t (&block)[TOKENS], const int64_t (&offset)[TOKENS]) const {
    const Move move(scale);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      if (block[i] < 0) continue;
      move.store(target + block[i] * side->block_stride + offset[i] * side->offset_stride, packs[i]);
    }
  }
};

template <class Move, int TOKENS, bool SEARCHES>
__global__ void __launch_bounds__(kThreads) write_tokens(const __grid_constant__ Write write) {
  const int64_t first_of_cta = static_cast<int64_t>(blockIdx.x) * blockDim.y * TOKENS;
  const int64_t first_token = first_of_cta + threadIdx.y;
  const uint32_t all_packs = write.key.packs + write.value.packs;
  int64_t block[TOKENS], offset[TOKENS];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    const int64_t token = first_token + i * blockDim.y;
    block[i] = token < write.tokens ? write.slots[token] : -1;
  }
  uint32_t pack = threadIdx.x;
  Packs<Move, TOKENS> packs;
  if (pack < all_packs) packs.load(write, pack, first_token);
  if (SEARCHES) {
    static_assert(!SEARCHES || TOKENS == 1, "a CTA keeps one slot for each of its rows");
    if (is_repeated(write, first_of_cta, block[0])) block[0] = -1;
  }
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    const int64_t slot = block[i];
    const bool is_stored = slot >= 0 && slot < write.num_slots;
    block[i] = -1;
    if (is_stored) block[i] = block_of(slot, write.num_slots, write.block_size, write.block_shift);
    offset[i] = slot - block[i] * write.block_size;
  }
  while (pack < all_packs) {
    packs.store(block, offset);
    pack += blockDim.x;
    if (pack < all_packs) packs.load(write, pack, first_token);
  }
}

template <class Move>
void launch(const Write& write, int32_t device) {
  const int64_t packs = static_cast<int64_t>(write.key.packs) + write.value.packs;
  const int64_t passes = (packs + kThreads - 1) / kThreads;
  const uint32_t lanes = static_cast<uint32_t>((packs + passes - 1) / passes);
  const dim3 threads(lanes, std::max(1u, kThreads / lanes));
  const int64_t least_ctas =
      kCtasToFill * device_attribute(kOp, cudaDevAttrMultiProcessorCount, device);
  const auto ctas = [&](int64_t tokens) {
    return static_cast<uint32_t>((write.tokens + tokens * threads.y - 1) / (tokens * threads.y));
  };
  const cudaStream_t stream = current_stream(device);
  if (write.tokens > 1 && write.tokens <= kLongestSearch) {
    write_tokens<Move, 1, true><<<ctas(1), threads, 0, stream>>>(write);
  } else if (ctas(kTokensInFlight) < least_ctas) {
    write_tokens<Move, 1, false><<<ctas(1), threads, 0, stream>>>(write);
  } else {
    write_tokens<Move, kTokensInFlight, false>
        <<<ctas(kTokensInFlight), threads, 0, stream>>>(write);
  }
  check_launch(kOp);
}

// The sides of a call, cut into packs once the size of a pack is known.
struct Rows {
  TokenRows source;
  Pool pool;
  bool is_one_head;  // heads adjoin on both sides and share a scale

  Rows(const Tensor& source_tensor, const Tensor& cache, const HeadValues& scales)
      : source(source_tensor), pool(cache) {
    const bool adjoin =
        source.head_stride == source.row_bytes() && pool.head_stride == pool.row_bytes();
    is_one_head = source.heads == 1 || (adjoin && scales.is_one_for_all());
  }

  int64_t elements_of_head() const { return is_one_head ? source.heads * source.dim : source.dim; }

  // Whether every pack of so many elements starts at a multiple of its size.
  bool takes_packs_of(int64_t elements) const {
    const int64_t source_heads = is_one_head ? 0 : source.head_stride;
    const int64_t cache_heads = is_one_head ? 0 : pool.head_stride;
    return elements_of_head() % elements == 0 &&
           is_multiple(
               elements * source.element_size,
               {address_of(source.data), source.token_stride, source_heads}) &&
           is_multiple(
               elements * pool.element_size,
               {address_of(pool.data), pool.block_stride, pool.offset_stride, cache_heads});
  }

  Side side(int64_t pack_elements, const HeadValues& scales) const {
    const int64_t packs_of_head = elements_of_head() / pack_elements;
    const int64_t packs = is_one_head ? packs_of_head : packs_of_head * source.heads;
    return {
        source.data, pool.data, scales.data(), scales.stride(),
        source.token_stride, source.head_stride,
        pool.block_stride, pool.offset_stride, pool.head_stride,
        static_cast<uint32_t>(packs), static_cast<uint32_t>(packs_of_head)};
  }
};

struct Call {
  Rows key, value;
  const HeadValues &k_scales, &v_scales;
  DeviceIndices slots;
  int64_t tokens;
  int32_t device;

  bool takes_packs_of(int64_t elements) const {
    return key.takes_packs_of(elements) && value.takes_packs_of(elements);
  }

  template <class Move>
  void run() const {
    const int64_t block_size = key.pool.block_size;
    const int64_t elements = Move::kTargetBytes / key.pool.element_size;
    launch<Move>(
        {key.side(elements, k_scales),
         value.side(elements, v_scales),
         slots,
         tokens,
         key.pool.num_slots(),
         block_size,
         shift_of(block_size)},
        device);
  }

  void copy() const {
    const int64_t size = key.source.element_size;
    const auto takes = [&](int64_t bytes) {
      return bytes >= size && takes_packs_of(bytes / size);
    };
    if (takes(16)) return run<CopyPack<16>>();
    if (takes(8)) return run<CopyPack<8>>();
    if (takes(4)) return run<CopyPack<4>>();
    if (takes(2)) return run<CopyPack<2>>();
    return run<CopyPack<1>>();
  }

  template <class Source, class Format>
  void quantise() const {
    if constexpr (sizeof(Source) == 2) {
      if (takes_packs_of(16)) return run<QuantisePack<Source, Format, 16>>();
    }
    constexpr int kElements = 16 / sizeof(Source);
    if (takes_packs_of(kElements)) return run<QuantisePack<Source, Format, kElements>>();
    return run<QuantisePack<Source, Format, 1>>();
  }

  template <class Format>
  void quantise_from() const {
    switch (key.source.dtype) {
      case ScalarType::BFloat16: return quantise<__nv_bfloat16, Format>();
      case ScalarType::Half: return quantise<__half, Format>();
      default: return quantise<float, Format>();
    }
  }
};

void check_source(
    const char* argument, const Tensor& source, const Tensor& cache, int64_t num_tokens) {
  check_rows(kOp, argument, source, {num_tokens, cache.size(2), cache.size(3)});
  if (source.scalar_type() == cache.scalar_type()) return;
  if (!is_fp8(cache.scalar_type())) check_dtype(kOp, argument, source, cache.scalar_type());
  check_query_dtype(kOp, argument, source);
}

void write(
    const Tensor& key,
    const Tensor& value,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& slot_mapping,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale) {
  check_pools(kOp, key_cache, value_cache);
  check_source("key", key, key_cache, kAnySize);
  check_source("value", value, value_cache, key.size(0));
  check_dtype(kOp, "value", value, key.scalar_type());
  check_not_expanded(kOp, "key_cache", key_cache);
  check_not_expanded(kOp, "value_cache", value_cache);
  if (key.scalar_type() == key_cache.scalar_type()) {
    check_no_scale(kOp, "k_scale", k_scale);
    check_no_scale(kOp, "v_scale", v_scale);
  }
  check_index(kOp, "slot_mapping", slot_mapping, {kAnySize});
  const int64_t tokens = slot_mapping.size(0);
  if (tokens > key.size(0)) {
    const std::string actual = std::to_string(tokens);
    refuse(kOp, "slot_mapping", actual, "have at most ", key.size(0), " elements");
  }
  const int64_t num_kv_heads = key_cache.size(2);
  const HeadValues k_scales(kOp, "k_scale", k_scale, num_kv_heads, 1.0f);
  const HeadValues v_scales(kOp, "v_scale", v_scale, num_kv_heads, 1.0f);
  const int32_t device = key_cache.get_device_index();
  check_one_device(
      kOp,
      device,
      {{"key", key},
       {"value", value},
       {"value_cache", value_cache},
       {"slot_mapping", slot_mapping},
       {"k_scale", k_scale},
       {"v_scale", v_scale}});
  if (tokens == 0 || key_cache.size(0) == 0) return;

  const Call call{
      Rows(key, key_cache, k_scales),
      Rows(value, value_cache, v_scales),
      k_scales,
      v_scales,
      DeviceIndices(slot_mapping),
      tokens,
      device};
  const OnDevice on_device(device);
  if (key.scalar_type() == key_cache.scalar_type()) return call.copy();
  if (key_cache.scalar_type() == ScalarType::Float8_e4m3fn) {
    return call.quantise_from<Float8E4M3FN>();
  }
  return call.quantise_from<Float8E5M2>();
}

void reshape_and_cache(
    const torch::stable::Tensor& key,
    const torch::stable::Tensor& value,
    const torch::stable::Tensor& key_cache,
    const torch::stable::Tensor& value_cache,
    const torch::stable::Tensor& slot_mapping,
    const std::optional<torch::stable::Tensor>& k_scale,
    const std::optional<torch::stable::Tensor>& v_scale) {
  write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale);
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_cuda, library) {
  library.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_cuda, CUDA, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&torch_pagedkv::reshape_and_cache));
}
