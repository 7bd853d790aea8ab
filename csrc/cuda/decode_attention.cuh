// Decode attention: up to 16 query rows of a sequence meet its keys, tile after tile.
//
// Every warp of a CTA folds its own keys of each tile into its own softmax state, with copies of the
// next ones in flight; at the end of a segment the states of the warps are joined, in their order. A
// second launch joins the parts of the items that more than one CTA had a share of, in their order.

#pragma once

#include "decode_fragments.cuh"
#include "softmax_state.cuh"

namespace torch_pagedkv {

// The states of the warps of a CTA, for each row.
struct WarpStates {
  float maximum[kWarps][kRows];
  float total[kWarps][kRows];
  float query_factor[kRows];
  uint32_t loaded[kWarps][8];  // which keys of each stage were loaded
};

// Where the rows of an item go. Threads 8r to 8r + 7 of a CTA have row r.
struct RowPlace {
  bool exists;
  int token, head;     // of the call
  int64_t out, lse;    // in elements, of a row's first

  __device__ RowPlace(
      const DecodeProblem& problem, const Sequence& sequence, int first_head, int heads) {
    const int row = threadIdx.x / 8;
    const int token_of_sequence = row / problem.heads_of_tile, of_tile = row % problem.heads_of_tile;
    exists = token_of_sequence < sequence.query_length && of_tile < heads;
    token = sequence.start + token_of_sequence;
    head = first_head + of_tile;
    out = (static_cast<int64_t>(token) * problem.num_heads + head) * problem.value_dim;
    lse = static_cast<int64_t>(head) * problem.num_tokens + token;
  }
};

__device__ inline void store_four(
    const DecodeProblem& problem, int64_t place, const float (&values)[4]) {
  const uint2 pairs =
      problem.query_is_bfloat16
          ? uint2{BFloat16Math::pair(values[0], values[1]), BFloat16Math::pair(values[2], values[3])}
          : uint2{HalfMath::pair(values[0], values[1]), HalfMath::pair(values[2], values[3])};
  *reinterpret_cast<uint2*>(problem.out + place * 2) = pairs;
}

// Which heads an item has: [first, first + count) of the call, all of one KV head.
struct ItemHeads {
  int kv_head, first, count;

  __device__ ItemHeads(const DecodeProblem& problem, int item) {
    kv_head = item / problem.head_tiles;
    const int first_of_group = item % problem.head_tiles * problem.heads_of_tile;
    first = kv_head * problem.group + first_of_group;
    count = min(problem.heads_of_tile, problem.group - first_of_group);
  }
};

__device__ inline RowEnd end_of_row(
    const DecodeProblem& problem, int head, int kv_head, float maximum, float total) {
  const bool has_sink = problem.sinks.data != nullptr;
  const float sink = has_sink ? problem.sinks.at(head, 0.0f) : 0.0f;
  return RowEnd(maximum, total, has_sink, sink, problem.v_scales.at(kv_head, 1.0f));
}

// Joins the states of the warps and writes rows of the output, or a part of them. Called by the whole
// CTA; `results` are the warps' accumulated values.
template <class TILE>
__device__ inline void finish_segment(
    const DecodeProblem& problem, const Sequence& sequence, const Segment& segment,
    const ItemHeads& heads, const WarpStates& states, const char* results) {
  const RowPlace place(problem, sequence, heads.first, heads.count);
  const int row = threadIdx.x / 8, part = threadIdx.x % 8;
  if (!place.exists) return;
  float maximum = -INFINITY, total = 0.0f, weights[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) maximum = fmaxf(maximum, states.maximum[warp][row]);
  const float reference = reference_of(maximum);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    weights[warp] = weight_of(states.maximum[warp][row], reference);
    total += weights[warp] * states.total[warp][row];
  }
  const bool is_whole = segment.parts == 1;
  const RowEnd end = end_of_row(problem, place.head, heads.kv_head, maximum, total);
  const int64_t partial =
      problem.num_splits == 0
          ? segment.slot * problem.rows_of_slot + row
          : segment.part * static_cast<int64_t>(problem.num_tokens) * problem.num_heads +
                static_cast<int64_t>(place.token) * problem.num_heads + place.head;
  for (int column = part * 4; column < problem.value_dim; column += 32) {
    float sums[4] = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float4 values = *reinterpret_cast<const float4*>(
          results + warp * TILE::kWarpBytes + (row * TILE::kResultStride + column) * 4);
      sums[0] += weights[warp] * values.x;
      sums[1] += weights[warp] * values.y;
      sums[2] += weights[warp] * values.z;
      sums[3] += weights[warp] * values.w;
    }
    if (is_whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = end.value(sums[i]);
      store_four(problem, place.out + column, sums);
    } else {
      *reinterpret_cast<float4*>(problem.partials + partial * problem.value_dim + column) =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
  }
  if (part != 0) return;
  if (is_whole) {
    problem.lse[place.lse] = end.lse;
  } else {
    float* const maxima = problem.partials + problem.partial_rows * problem.value_dim;
    maxima[partial] = maximum;
    maxima[problem.partial_rows + partial] = total;
  }
}

// The softmax state of a warp: rows g and g + 8 of each lane, g being its number of four lanes.
template <class TILE>
struct WarpState {
  float acc[TILE::kDim / 8][4];
  float maximum[2], total[2];  // totals are of this lane's keys until they are summed up

  __device__ WarpState() {
#pragma unroll
    for (int tile = 0; tile < TILE::kDim / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[tile][i] = 0.0f;
    }
    maximum[0] = maximum[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // Turns scores into weights and makes the state relative to the new maxima.
  __device__ void take(float (&scores)[TILE::kKeys / 8][4]) {
    float largest[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int tile = 0; tile < TILE::kKeys / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], scores[tile][i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xFFFFFFFF, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xFFFFFFFF, largest[half], 2));
    }
    const float reference[2] = {reference_of(largest[0]), reference_of(largest[1])};
    // Where no maximum moves all factors are 1, and multiplying by them changes no bit.
    if (__any_sync(0xFFFFFFFF, largest[0] != maximum[0] || largest[1] != maximum[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float decay = weight_of(maximum[half], reference[half]);
        total[half] *= decay;
        maximum[half] = largest[half];
#pragma unroll
        for (int tile = 0; tile < TILE::kDim / 8; ++tile) {
          acc[tile][2 * half] *= decay;
          acc[tile][2 * half + 1] *= decay;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILE::kKeys / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[tile][i] = weight_of(scores[tile][i], reference[i / 2]);
        total[i / 2] += scores[tile][i];
      }
    }
  }

  // Hands the state over to the CTA. All copies into the stages of the warp have ended.
  __device__ void store(WarpStates& states, char* result) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] += __shfl_xor_sync(0xFFFFFFFF, total[half], 1);
      total[half] += __shfl_xor_sync(0xFFFFFFFF, total[half], 2);
      if (t == 0) {
        states.maximum[warp][g + 8 * half] = maximum[half];
        states.total[warp][g + 8 * half] = total[half];
      }
      float* const row = reinterpret_cast<float*>(result) + (g + 8 * half) * TILE::kResultStride;
#pragma unroll
      for (int tile = 0; tile < TILE::kDim / 8; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) row[TILE::Pool::column(tile, t, e)] = acc[tile][2 * half + e];
      }
    }
  }
};

// Folds a segment's tiles into the state of each warp. Called by the whole CTA.
template <class TILE>
__device__ inline void attend_segment(
    const DecodeProblem& problem, const Sequence& sequence, const Segment& segment,
    const ItemHeads& heads, WarpStates& states, char* shared) {
  using Pool = typename TILE::Pool;
  constexpr int kKeys = TILE::kKeys, kStages = TILE::kStages, kSteps = TILE::kDim / 16;
  constexpr int kKept = TILE::kDim <= 128 ? kSteps : 1;  // steps of the query that stay in registers
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  char* const stages = shared + TILE::kQueryBytes + warp * TILE::kWarpBytes;
  const uint32_t query = shared_address(shared);
  const WarpLoader<TILE> loader(
      problem, sequence, segment.sequence, heads.kv_head, shared_address(stages),
      states.loaded[warp]);
  const auto start_of = [&](int index) {
    return ((sequence.first_tile + segment.first + index) * kWarps + warp) * kKeys;
  };
  typename WarpLoader<TILE>::Entry ahead[kStages];
#pragma unroll
  for (int index = 0; index < kStages; ++index) ahead[index] = loader.look_up(start_of(index));
#pragma unroll
  for (int index = 0; index < kStages - 1; ++index) {
    if (index < segment.count) loader.issue(index, ahead[index]);
    commit_copies();
  }
  typename WarpLoader<TILE>::Entry next = ahead[kStages - 1];

  stage_query<TILE>(problem, sequence, heads.first, heads.count, shared, states.query_factor);
  __syncthreads();
  const LanePlace place(lane);
  uint32_t kept[kKept][4];
  if constexpr (kKept == kSteps) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_query_step<TILE>(kept[step], query, place, step);
  }
  ScoreTerms terms[2];
  KeyRange seen[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = g + 8 * half, token = row / problem.heads_of_tile;
    const int head = heads.first + min(row % problem.heads_of_tile, heads.count - 1);
    terms[half].factor = states.query_factor[row];
    terms[half].scale = problem.softmax_scale * problem.k_scales.at(heads.kv_head, 1.0f);
    terms[half].softcap = problem.softcap;
    terms[half].inverse_softcap = problem.inverse_softcap;
    terms[half].slope = problem.slopes.at(head, 0.0f);
    terms[half].position = sequence.position_of(token);
    terms[half].has_more = problem.softcap > 0.0f || problem.slopes.data != nullptr;
    seen[half] = keys_seen(problem, terms[half].position, sequence.length);
    if (token >= sequence.query_length) seen[half] = {0, 0};
  }

  WarpState<TILE> state;
  int stage = 0;
  for (int index = 0; index < segment.count; ++index) {
    wait_copies<kStages - 2>();
    __syncwarp();  // the copies of all lanes are here, and all have read the stage before
    const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
    if (index + kStages - 1 < segment.count) loader.issue(free_stage, next);
    commit_copies();
    next = loader.look_up(start_of(index + kStages));

    const uint32_t keys = shared_address(stages + stage * TILE::kStageBytes);
    const uint32_t values = keys + kKeys * TILE::kRowBytes;
    const int start = start_of(index);
    const uint32_t loaded = loader.loaded(stage);
    const bool is_edge = loaded != loader.kAllKeys || start < sequence.seen_by_all_from ||
                         start + kKeys > sequence.seen_by_all_to;
    float scores[kKeys / 8][4];
    multiply_keys<TILE>(scores, kept, query, keys, place);
    uint32_t seen_keys[2] = {0, 0};
#pragma unroll
    for (int tile = 0; tile < kKeys / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = tile * 8 + 2 * t + i % 2, position = start + key;
        const KeyRange& range = seen[i / 2];
        scores[tile][i] = terms[i / 2].score(scores[tile][i], position);
        if (is_edge) {
          const bool is_seen =
              (loaded >> key & 1) && position >= range.lower && position < range.upper;
          scores[tile][i] = is_seen ? scores[tile][i] : -INFINITY;
        }
      }
    }
    state.take(scores);
    const bool is_partial = is_edge && sequence.query_length > 1;
    const bool dropped = multiply_values<TILE>(state.acc, scores, values, place, is_partial);
    if (is_partial && __any_sync(0xFFFFFFFF, dropped)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for (int key = 0; key < kKeys; ++key) {
          const int position = start + key;
          const bool is_seen = position >= seen[half].lower && position < seen[half].upper;
          seen_keys[half] |= static_cast<uint32_t>(is_seen) << key;
        }
        seen_keys[half] &= loaded;
      }
      const char* const slice = stages + stage * TILE::kStageBytes;
      add_nonfinite_values<TILE>(
          state.acc, slice + kKeys * TILE::kRowBytes, seen_keys[0], seen_keys[1]);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies<0>();
  __syncwarp();
  state.store(states, stages);
  __syncthreads();
  finish_segment<TILE>(
      problem, sequence, segment, heads, states, shared + TILE::kQueryBytes);
  __syncthreads();  // the next segment writes the query and the stages
}

// Rows past the last prefix sum see no key.
__device__ inline void write_padding(const DecodeProblem& problem) {
  if (problem.starts.data == nullptr) return;
  const int64_t tokens = problem.num_tokens;
  const int64_t first =
      min(max(problem.starts[problem.num_sequences], int64_t{0}), tokens) * problem.num_heads;
  const int64_t stop = tokens * problem.num_heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDecodeThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kDecodeThreads + threadIdx.x;
  for (int64_t row = first + thread; row < stop; row += step) {
    const int head = static_cast<int>(row % problem.num_heads);
    const int64_t token = row / problem.num_heads;
    for (int column = 0; column < problem.value_dim; column += 4) {
      *reinterpret_cast<uint2*>(problem.out + (row * problem.value_dim + column) * 2) = uint2{0, 0};
    }
    problem.lse[head * tokens + token] = problem.sinks.at(head, -INFINITY);
  }
}

template <class TILE>
__global__ void __launch_bounds__(kDecodeThreads, TILE::kCtas)
    decode_attention(const __grid_constant__ DecodeProblem problem) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ WarpStates states;
  write_padding(problem);
  const int items = problem.items_of_sequence();
  int64_t tile = 0, stop = 1, share = 1;
  Place place{0, 0};
  if (problem.num_splits > 0) {
    place.sequence = static_cast<int>(blockIdx.x / (items * problem.num_splits));
    if (place.sequence >= problem.num_sequences) return;
  } else {
    const TileSums sums = sum_tiles<TILE::kTile>(problem);
    share = share_of_cta(problem, sums.total);
    tile = blockIdx.x * share;
    stop = min(tile + share, sums.total * items);
    if (tile >= stop) return;
    place = find_tile<TILE::kTile>(problem, sums, tile);
  }
  Walk<TILE::kTile> walk(problem, tile, stop, share, place);
  while (!walk.is_done()) {
    Segment segment;
    if (problem.num_splits > 0) {
      const int part = static_cast<int>(blockIdx.x % problem.num_splits);
      segment = part_of_item(walk.sequence.tiles, part, problem.num_splits);
      segment.sequence = place.sequence;
      segment.item = static_cast<int>(blockIdx.x / problem.num_splits % items);
      walk.tile = walk.stop;  // a CTA for each part
      if (walk.sequence.tiles == 0 || segment.count == 0) return;
    } else {
      segment = walk.next(problem, blockIdx.x);
    }
    const ItemHeads heads(problem, segment.item);
    attend_segment<TILE>(problem, walk.sequence, segment, heads, states, shared);
  }
}

// Joins the parts of an item, always in the same order, and the sink once.
template <class TILE>
__global__ void __launch_bounds__(kDecodeThreads)
    merge_parts(const __grid_constant__ DecodeProblem problem) {
  const int items = problem.items_of_sequence();
  const int index = blockIdx.x / items, item = blockIdx.x % items;
  const Sequence sequence = sequence_of<TILE::kTile>(problem, index);
  if (sequence.tiles == 0) return;
  int parts;
  int64_t first_cta = 0;
  if (problem.num_splits > 0) {
    parts = part_of_item(sequence.tiles, 0, problem.num_splits).parts;
  } else {
    const TileSums sums = sum_tiles<TILE::kTile>(problem);
    const int64_t first_of_item = tiles_before<TILE::kTile>(problem, sums, index) +
                                  static_cast<int64_t>(item) * sequence.tiles;
    const ItemParts cut =
        parts_of_item(first_of_item, sequence.tiles, share_of_cta(problem, sums.total));
    parts = cut.parts, first_cta = cut.first_cta;
  }
  const ItemHeads heads(problem, item);
  const RowPlace place(problem, sequence, heads.first, heads.count);
  if (parts == 1 || !place.exists) return;
  const int row = threadIdx.x / 8;
  const int64_t rows_of_part = static_cast<int64_t>(problem.num_tokens) * problem.num_heads;
  const auto partial_of = [&](int part) {
    if (problem.num_splits == 0) {
      const int64_t slot = slot_of(problem, first_cta + part, index, item, part == 0);
      return slot * problem.rows_of_slot + row;
    }
    return part * rows_of_part + static_cast<int64_t>(place.token) * problem.num_heads + place.head;
  };
  const float* const maxima = problem.partials + problem.partial_rows * problem.value_dim;
  const float* const totals = maxima + problem.partial_rows;
  float maximum = -INFINITY, total = 0.0f;
#pragma unroll 4
  for (int part = 0; part < parts; ++part) maximum = fmaxf(maximum, maxima[partial_of(part)]);
  const float reference = reference_of(maximum);
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const int64_t partial = partial_of(part);
    total += weight_of(maxima[partial], reference) * totals[partial];
  }
  const RowEnd end = end_of_row(problem, place.head, heads.kv_head, maximum, total);
  for (int column = threadIdx.x % 8 * 4; column < problem.value_dim; column += 32) {
    float sums[4] = {};
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
      const int64_t partial = partial_of(part);
      const float weight = weight_of(maxima[partial], reference);
      const float4 values = *reinterpret_cast<const float4*>(
          problem.partials + partial * problem.value_dim + column);
      sums[0] += weight * values.x;
      sums[1] += weight * values.y;
      sums[2] += weight * values.z;
      sums[3] += weight * values.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = end.value(sums[i]);
    store_four(problem, place.out + column, sums);
  }
  if (threadIdx.x % 8 == 0) problem.lse[place.lse] = end.lse;
}

}  // namespace torch_pagedkv
