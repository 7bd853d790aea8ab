// reshape_and_cache: every new token's key and value into its slot of the pools.
//
// A token's heads are cut into packs of 16 bytes (of the target, where it is the smaller one), or less
// where an address, a stride or a head size is no multiple of that. Adjacent threads take adjacent packs
// of a token, its key's first, then its value's. Nothing is asked of a slot before all loads are on their way.

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

constexpr int kThreads = 256;       // at most, of a CTA
constexpr int kLeastThreads = 128;  // of a CTA that looks through slots, and about so many where rows are short
// Tokens that a thread has in flight; no row is cut into fewer packs, a key's and a value's.
constexpr int kTokensInFlight = 2;
// Up to so many tokens a CTA looks through the later slots for its own, so that of two tokens with
// one slot one is stored whole. The search is quadratic; above, rows of both may mix.
constexpr int64_t kLongestSearch = 1024;
constexpr int kSlotsAhead = 2;  // later slots that a thread loads before it knows its own

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
  int64_t tokens, num_slots;
  BlockSize block_size;
};

// Where a token's rows go, in bytes from the start of the pools; below zero: nowhere.
struct Place {
  int64_t key, value;
};

__device__ inline Place place_of(const Write& write, int64_t slot) {
  if (slot < 0 || slot >= write.num_slots) return {-1, -1};
  const int64_t block = write.block_size.block_of(slot);
  const int64_t offset = slot - block * write.block_size.size;
  return {
      block * write.key.block_stride + offset * write.key.offset_stride,
      block * write.value.block_stride + offset * write.value.offset_stride};
}

// One pack of each of a thread's tokens.
template <class Move, int TOKENS>
struct Packs {
  char* target;
  bool is_key;
  float scale;
  typename Move::Pack packs[TOKENS];

  // Of the last token where there are no more: loads without a condition wait for nothing.
  __device__ void load(const Write& write, uint32_t pack, int64_t first_token) {
    is_key = pack < write.key.packs;
    const Side& side = is_key ? write.key : write.value;
    pack -= is_key ? 0 : write.key.packs;
    int64_t head = 0, part = pack;
    if (side.packs != side.packs_of_head) {
      head = pack / side.packs_of_head;
      part = pack % side.packs_of_head;
    }
    const char* const source =
        side.source + head * side.source_head_stride + part * Move::kSourceBytes;
    target = side.cache + head * side.cache_head_stride + part * Move::kTargetBytes;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int64_t token = min(first_token + i * blockDim.y, write.tokens - 1);
      packs[i] = Move::load(source + token * side.token_stride);
    }
    scale = 1.0f;
    if (Move::kScales && side.scales) scale = side.scales[head * side.scale_stride];
  }

  // Stores token i of the thread at places[i * stride].
  __device__ void store(const Place* places, int stride) const {
    const Move move(scale);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int64_t place = is_key ? places[i * stride].key : places[i * stride].value;
      if (place >= 0) move.store(target + place, packs[i]);
    }
  }
};

// A CTA for each token. All its threads look for a later token with its slot: then it is not stored.
template <class Move, bool SEARCHES>
__global__ void __launch_bounds__(kThreads) write_few(const __grid_constant__ Write write) {
  const int token = static_cast<int>(blockIdx.x), last = static_cast<int>(write.tokens) - 1;
  const uint32_t all_packs = write.key.packs + write.value.packs;
  const LoadedIndex own = write.slots.load(token);
  uint32_t pack = threadIdx.x;
  Packs<Move, 1> packs;
  if (pack < all_packs) packs.load(write, pack, token);
  LoadedIndex ahead[kSlotsAhead];
  const int threads = static_cast<int>(blockDim.x);
  int later = token + 1 + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; SEARCHES && i < kSlotsAhead; ++i) {
    ahead[i] = write.slots.load(min(later + i * threads, last));
  }
  const int64_t slot = own.value(write.slots.is_wide);
  bool is_repeated = false;
#pragma unroll
  for (int i = 0; SEARCHES && i < kSlotsAhead; ++i) {
    is_repeated |= later <= last && ahead[i].value(write.slots.is_wide) == slot;
    later += threads;
  }
  for (; SEARCHES && later <= last; later += threads) is_repeated |= write.slots[later] == slot;
  // Without a barrier the loads of packs would be moved behind what depends on the slot.
  if (__syncthreads_or(is_repeated)) return;
  const Place place = place_of(write, slot);
  while (pack < all_packs) {
    packs.store(&place, 0);
    pack += blockDim.x;
    if (pack < all_packs) packs.load(write, pack, token);
  }
}

// A CTA for blockDim.y times TOKENS tokens. Its first threads find the places, one each.
template <class Move, int TOKENS>
__global__ void __launch_bounds__(kThreads) write_many(const __grid_constant__ Write write) {
  __shared__ Place places[kThreads];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, tokens = blockDim.y * TOKENS;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens, last = write.tokens - 1;
  const uint32_t all_packs = write.key.packs + write.value.packs;
  LoadedIndex slot{0, 0};
  if (thread < tokens) slot = write.slots.load(min(first + thread, last));
  uint32_t pack = threadIdx.x;
  Packs<Move, TOKENS> packs;
  packs.load(write, pack, first + threadIdx.y);
  if (thread < tokens) {
    const bool is_there = first + thread <= last;
    places[thread] = place_of(write, is_there ? slot.value(write.slots.is_wide) : -1);
  }
  __syncthreads();
  while (true) {
    packs.store(places + threadIdx.y, blockDim.y);
    pack += blockDim.x;
    if (pack >= all_packs) break;
    packs.load(write, pack, first + threadIdx.y);
  }
}

template <class Move>
void launch(const Write& write, int32_t device) {
  const uint32_t packs = write.key.packs + write.value.packs;
  const uint32_t passes = (packs + kThreads - 1) / kThreads;
  const uint32_t lanes = (packs + passes - 1) / passes;
  const cudaStream_t stream = current_stream(device);
  if (write.tokens == 1) {
    write_few<Move, false><<<1, lanes, 0, stream>>>(write);
  } else if (write.tokens <= kLongestSearch) {
    const uint32_t threads = std::max<uint32_t>(lanes, kLeastThreads);
    write_few<Move, true><<<static_cast<uint32_t>(write.tokens), threads, 0, stream>>>(write);
  } else {
    const dim3 threads(lanes, std::max(1u, kLeastThreads / lanes));
    const int64_t tokens = threads.y * kTokensInFlight;
    const auto ctas = static_cast<uint32_t>((write.tokens + tokens - 1) / tokens);
    write_many<Move, kTokensInFlight><<<ctas, threads, 0, stream>>>(write);
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
    const int64_t elements = Move::kTargetBytes / key.pool.element_size;
    launch<Move>(
        {key.side(elements, k_scales),
         value.side(elements, v_scales),
         slots,
         tokens,
         key.pool.num_slots(),
         BlockSize(key.pool.block_size)},
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
