// How many multiprocessors decode attention leaves to prefill attention, which then runs beside it.
//
// Decode waits for memory, and prefill for its products: beside each other both come to an end in about the
// time of the longer one. Lengths decide, in the same way wherever they are asked: decode leaves its last CTAs
// without tiles, and the launch that joins parts has to know of it.

#pragma once

#include "key_range.cuh"

namespace torch_pagedkv {

// What an item of prefill attention costs is counted in products of its rows with so many keys. Besides there
// is what it costs to begin and to end it, more beside decode attention than alone.
inline constexpr int kKeysOfProduct = 128;
inline constexpr int kProductsBesides = 6;
// Keys of one KV head, with their values, that all multiprocessors read in the time of one product on one of
// them: 12600 rows of 512 bytes in 1.5 us (H200).
inline constexpr int kKeysReadInProduct = 12600;

// What prefill attention has to do: how many items, and the products of the largest.
struct PrefillLoad {
  uint32_t items, largest;

  static constexpr uint32_t kMost = 1u << 26;  // the sum of a warp's fits 32 bits

  // In any order the same.
  TORCH_PAGEDKV_ANYWHERE_MEMBER void add(const PrefillLoad& other) {
    items = min(items + other.items, kMost);
    largest = max(largest, other.largest);
  }

#if defined(__CUDACC__)
  // Of a warp.
  __device__ PrefillLoad of_warp() const {
    return {min(__reduce_add_sync(0xFFFFFFFF, items), kMost), __reduce_max_sync(0xFFFFFFFF, largest)};
  }
#endif

  // Of a sequence that prefill attention takes.
  TORCH_PAGEDKV_ANYWHERE_MEMBER static PrefillLoad of(
      const DecodeProblem& problem, int query_length, int length) {
    const KeyRange of_first = keys_seen(problem, length - query_length, length);
    const KeyRange of_last = keys_seen(problem, length - 1, length);
    const int keys = max(of_first.upper - of_first.lower, of_last.upper - of_last.lower);
    const int tokens = problem.beside.tokens_of_tile;
    const int64_t items =
        quotient(query_length + tokens - 1, tokens) * problem.items_of_sequence();
    return {
        static_cast<uint32_t>(min(items, static_cast<int64_t>(kMost))),
        static_cast<uint32_t>(keys / kKeysOfProduct + kProductsBesides)};
  }
};

// `tiles`: of one item of all sequences that decode attention takes. Up to half are left: the other half reads
// nearly as fast as all.
TORCH_PAGEDKV_ANYWHERE int multiprocessors_left(
    const DecodeProblem& problem, int64_t tiles, const PrefillLoad& load) {
  if (load.items == 0 || tiles == 0) return 0;
  const int64_t time = quotient(
      tiles * problem.beside.keys_of_tile * problem.items_of_sequence(), kKeysReadInProduct);
  // Items one behind the other, on one multiprocessor, while decode reads.
  const int64_t rounds = max(quotient(time, load.largest), static_cast<int64_t>(1));
  const int64_t wanted = quotient(load.items + rounds - 1, rounds);
  return static_cast<int>(min(wanted, static_cast<int64_t>(problem.beside.multiprocessors / 2)));
}

}  // namespace torch_pagedkv
