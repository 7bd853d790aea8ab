// What a launch of decode attention knows: shapes, strides and addresses. Lengths stay on the device.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device_index.cuh"

namespace torch_pagedkv {

// Query rows that a warp takes at once: (token, head) pairs of one sequence and one KV head.
inline constexpr int kRows = 16;
// Up to so many are multiplied in half the products.
inline constexpr int kFewRows = 8;
// What is known of the rows of items, which decides what a kernel is made for.
enum class ItemRows {
  kFew,    // up to kFewRows of every item: such a kernel takes no more
  kMany,   // probably more of most
  kMixed,  // anything
};
// Warps that walk the heads of a sequence side by side, at most.
inline constexpr int kMostOfTeam = 8;
// Shares that cut no more than they must may be larger than equal ones by 1 / kSharesOfSlack.
inline constexpr int kSharesOfSlack = 16;
// CTAs that join parts: each lane of a group has eight columns.
inline constexpr int kMergeThreads = 128;
inline constexpr int kMergingCtasAtOnce = 4;  // on a multiprocessor
inline constexpr int kLanesOfJoin = 8;
inline constexpr int kMostJoiningShift = 4;  // of the number of groups that share the parts of the same columns
inline constexpr int kColumnsOfJoin = 8 * kLanesOfJoin;
inline constexpr int kGroupsOfMerge = kMergeThreads / kLanesOfJoin;
inline constexpr int kGroupsOfWarp = 32 / kLanesOfJoin;
static_assert(1 << kMostJoiningShift == kGroupsOfMerge);

// One float for each head, in device memory; null: none given.
struct HeadFloats {
  const float* data = nullptr;
  int64_t stride = 0;

  __device__ float at(int64_t head, float otherwise) const {
    return data ? data[head * stride] : otherwise;
  }
};

// Keys or values. Strides are in bytes.
struct PoolRows {
  const char* data;
  int64_t block_stride, offset_stride, head_stride;
  int row_bytes;
};

// Prefill attention that may run beside decode attention, on multiprocessors that this leaves to it.
struct PrefillBeside {
  int tokens_of_tile;   // of a sequence, that it takes at once; 0: it does not run beside
  int multiprocessors;  // of the device
  int warps;            // of decode attention, on each
  int keys_of_tile;     // that such a warp takes at a time
};

// Divides numbers of up to 2**10 by a positive one that is no larger.
struct SmallDivisor {
  uint32_t inverse;

  SmallDivisor() = default;
  explicit SmallDivisor(int divisor) : inverse(((1u << 20) + divisor - 1) / divisor) {}
  __host__ __device__ int quotient(int number) const {
    return static_cast<int>(static_cast<uint32_t>(number) * inverse >> 20);
  }
};

// What the launch that joins parts has to know of the place where a team starts.
struct TeamStart {
  int64_t before, share;  // places before its sequence, of all groups; those of a team
  int sequence, tiles;    // of one of its items; 0: the team has none
  int span;               // places of every sequence; 0: as many as it has tiles
};

struct DecodeProblem {
  char* out;
  float* lse;
  float* partials;  // [partial_rows, value_dim] rows, then a maximum and a total for each
  int64_t partial_rows;

  const char* query;
  int64_t query_token_stride, query_head_stride;  // in bytes
  bool query_is_bfloat16, query_is_aligned;

  PoolRows keys, values;
  bool rows_are_aligned;       // all rows of both pools start at multiples of 16 bytes
  bool tiles_have_one_block;   // aligned rows, and those of a tile lie in one block, with strides of 32 bits
  const char* table;
  int64_t table_stride;  // in bytes
  bool table_is_wide;
  DeviceIndices lengths, starts;  // starts.data null: one query token for each sequence
  HeadFloats slopes, sinks, k_scales, v_scales;

  int num_tokens, num_sequences, num_blocks, block_size, block_shift, max_positions;
  int num_heads, num_kv_heads, group;
  int head_tiles, heads_of_tile;  // the heads of a group, cut so that one token's fit kRows
  int most_tokens;                // of a sequence, whose rows fit kRows
  int inverse_heads;              // 256 / heads_of_tile, rounded up
  int key_dim, value_dim;

  float softmax_scale, softcap, inverse_softcap;
  int window_left, window_right;  // -1: unlimited

  // 0: all tiles are shared out evenly. Otherwise the most parts of an item.
  int parts;
  int team, teams;  // warps that walk side by side, one item each; how many such teams there are
  uint32_t inverse_team;  // 2**31 / team, rounded up
  int groups;       // of `team` items, of a sequence
  int least_tiles;  // of a part
  int rows_of_slot;
  bool slots_by_group;
  // Where teams start: written by the first launch where it is not null. Then the CTAs that join parts have a cut
  // between teams each, else a group of items.
  TeamStart* team_starts;
  SmallDivisor by_pieces_of_row, by_pieces_of_rows;  // set where parts are joined
  // Of items that CTAs of prefill attention took: it is launched after and finds 0 here. Null: it is not launched.
  unsigned long long* prefill_counter;
  PrefillBeside beside;

  // From `group` on.
  void cut_heads() {
    head_tiles = (group + kRows - 1) / kRows;
    heads_of_tile = (group + head_tiles - 1) / head_tiles;
    most_tokens = kRows / heads_of_tile;
    inverse_heads = (256 + heads_of_tile - 1) / heads_of_tile;
  }

  // Heads side by side, as many as divide the items of a sequence.
  void form_teams() {
    const int items = items_of_sequence();
    team = items < kMostOfTeam ? items : kMostOfTeam;
    while (items % team != 0) --team;
    groups = items / team;
    inverse_team = ((1u << 31) + team - 1) / team;
  }

  // Groups of items, of all sequences.
  int64_t groups_of_all() const { return static_cast<int64_t>(num_sequences) * groups; }

  // warp / team, for warps up to 2**25: as many run at once on no GPU.
  __host__ __device__ int64_t team_of_warp(int64_t warp) const {
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(warp)) * inverse_team >> 31);
  }

  // Pieces are runs of columns of a row, each joined by some groups of lanes.
  __host__ __device__ int pieces_of_row() const { return (value_dim + kColumnsOfJoin - 1) / kColumnsOfJoin; }
  // Those of one row of each item of a group.
  __host__ __device__ int pieces_of_rows() const { return team * pieces_of_row(); }

  // row / heads_of_tile, for rows of an item.
  __host__ __device__ int token_of_row(int row) const { return row * inverse_heads >> 8; }

  // A sequence's items: its keys once for each KV head and each tile of heads.
  __host__ __device__ int items_of_sequence() const { return num_kv_heads * head_tiles; }
};

// The kernels of one pool dtype and one width of heads; what a grid is made from.
struct DecodeVariant {
  int tile;          // positions that a warp takes at a time
  int warps;         // of a CTA at most, each with tiles of its own
  int ctas;          // of a multiprocessor
  bool leaves;       // multiprocessors to prefill attention
  int warp_bytes;    // of shared memory, of each warp
  int cta_bytes;     // of shared memory besides
  cudaError_t (*request_memory)(int32_t device, int warps);  // before the first launch on it
  cudaError_t (*attend)(
      const DecodeProblem& problem, int64_t ctas, int warps, cudaStream_t stream);
  cudaError_t (*merge)(
      const DecodeProblem& problem, const dim3& grid, bool overlaps, cudaStream_t stream);
};

inline constexpr int kMostDecodeDim = 256;

// The variant for heads of up to kMostDecodeDim elements, the wider of keys and values.
const DecodeVariant& decode_variant_bfloat16(int dim, ItemRows rows);
const DecodeVariant& decode_variant_float16(int dim, ItemRows rows);
const DecodeVariant& decode_variant_e4m3(int dim, ItemRows rows);
const DecodeVariant& decode_variant_e5m2(int dim, ItemRows rows);

}  // namespace torch_pagedkv
