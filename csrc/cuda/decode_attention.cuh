// Decode attention: up to 16 query rows of a sequence meet its keys, tile after tile.
//
// Every warp has tiles of its own, of one KV head, and folds them into its own softmax state, with copies
// of the next ones in flight, those of the next segment too. A second launch joins the parts of the items
// that more than one warp had a share of, in their order.

#pragma once

#include "decode_loader.cuh"
#include "decode_output.cuh"
#include "decode_state.cuh"
#include "grid_dependency.cuh"

namespace torch_pagedkv {

// The score of a key whose product with the row is scaled already.
__device__ inline float finish_score(
    const DecodeProblem& problem, const RowTerms& terms, float score, int position_of_key) {
  score = without_infinity(score);
  if (problem.softcap > 0.0f) score = problem.softcap * safe_tanh(score * problem.inverse_softcap);
  if (problem.slopes.data == nullptr) return score;
  return without_infinity(score + terms.slope * static_cast<float>(position_of_key - terms.position));
}

// Reads all segments of a warp: folds their tiles into a state, and writes their rows.
template <class TILE>
class WarpReader {
 public:
  using Loader = WarpLoader<TILE>;

  // A warp's own.
  struct Shared {
    RowTerms terms[TILE::kRows];
    float maximum[8], total[8];
    typename Loader::Shared loader;
  };

  __device__ WarpReader(
      const DecodeProblem& problem, const Walk<TILE::kKeys>& walk, Shared& shared, char* stages)
      : problem_(problem),
        shared_(shared),
        stages_(stages),
        loader_(problem, walk, stages, shared.loader) {}

  __device__ void read_all() {
    const LanePlace<TILE> place(threadIdx.x % 32);
    const uint32_t keys = kept(shared_address(stages_) + place.key);
    const uint32_t values =
        kept(shared_address(stages_) + TILE::kKeys * TILE::kRowBytes + place.value);
    WarpQuery<TILE> query;
    LaneRows scales;
    WarpState<TILE> state;
    int taken = 0, left = 0, start = 0, stage = 0;
    KeyRange seen_by_all{};
    bool has_one_token = true;
    // A tile is looked up kStages and issued kStages - 1 steps before it is read.
    for (int step = 0;; ++step) {
      __syncwarp();  // all have read the stage that is issued now
      loader_.advance();
      if (step < TILE::kStages) continue;
      const Work& work = shared_.loader.works[(left == 0 ? taken : taken - 1) % Loader::kWorks];
      if (left == 0) {
        if (taken == loader_.works()) return;
        ++taken;
        begin(work, query, scales);
        state.clear();
        left = work.segment.count;
        start = (work.sequence.first_tile + work.segment.first) * TILE::kKeys;
        seen_by_all = {work.sequence.seen_by_all_from, work.sequence.seen_by_all_to};
        has_one_token = work.sequence.query_length == 1;
      }
      wait_copies<TILE::kStages - 1>();
      __syncwarp();  // the copies of all lanes are here
      const bool is_edge = !loader_.is_whole() || start < seen_by_all.lower ||
                           start + TILE::kKeys > seen_by_all.upper;
      const uint32_t before = stage * TILE::kStageBytes;
      fold(
          state, scales, query, keys + before, values + before, stage, start, is_edge,
          has_one_token);
      start += TILE::kKeys;
      if (--left == 0) finish(work, state, stages_ + before);
      stage = stage == TILE::kStages - 1 ? 0 : stage + 1;
    }
  }

 private:
  // Loads the query, and keeps what makes the scores of each row.
  __device__ void begin(const Work& work, WarpQuery<TILE>& query, LaneRows& scales) {
    const ItemHeads heads(problem_, work.segment.item, work.segment.kv_head);
    query.load(problem_, work.sequence, heads.first, heads.count, shared_.terms);
    __syncwarp();
    const int lane = lane_here(), row = lane;
    if (row < TILE::kRows) {
      const int token = problem_.token_of_row(row);
      const int head =
          heads.first + min(row - token * problem_.heads_of_tile, heads.count - 1);
      RowTerms& terms = shared_.terms[row];
      terms.scale *= problem_.softmax_scale * problem_.k_scales.at(heads.kv_head, 1.0f);
      terms.slope = problem_.slopes.at(head, 0.0f);
      terms.position = work.sequence.position_of(token);
      terms.seen = token < work.sequence.query_length
                       ? keys_seen(problem_, terms.position, work.sequence.length)
                       : KeyRange{0, 0};
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[i] = shared_.terms[TILE::row_of_lane(lane, i)].scale;
  }

  // Writes the rows, or a part of them.
  __device__ void finish(const Work& work, const WarpState<TILE>& state, char* tile_memory) {
    const ItemHeads heads(problem_, work.segment.item, work.segment.kv_head);
    if (!work.segment.is_whole) {
      write_part(work, heads, state);
      return;
    }
    float* const values = reinterpret_cast<float*>(tile_memory);
#pragma unroll
    for (int column = 0; column < TILE::kRows / 8; ++column) {
      __syncwarp();  // all have read the tile, or the rows before
      state.store(column, shared_.maximum, shared_.total, values);
      __syncwarp();
      const int row = lane_here() / 4;
      const RowPlace place(problem_, work.sequence, heads.first, heads.count, column * 8 + row);
      if (place.exists) write_row(heads, place, row, values);
    }
  }

  // Writes a row by four lanes.
  __device__ void write_row(
      const ItemHeads& heads, const RowPlace& place, int row_of_column, const float* values) {
    const int part = lane_here() % 4;
    const float maximum = shared_.maximum[row_of_column], total = shared_.total[row_of_column];
    const RowEnd end = end_of_row(problem_, place.head, heads.kv_head, maximum, total);
    for (int column = part * 4; column < problem_.value_dim; column += 16) {
      const float4 four =
          *reinterpret_cast<const float4*>(values + TILE::result_place(row_of_column, column));
      const float ended[4] = {
          end.value(four.x), end.value(four.y), end.value(four.z), end.value(four.w)};
      store_four(problem_, place.out + column, ended);
    }
    if (part == 0) problem_.lse[place.lse] = end.lse;
  }

  // Writes a part of the rows as it lies in the lanes: some of them have adjacent columns.
  __device__ void write_part(
      const Work& work, const ItemHeads& heads, const WarpState<TILE>& state) const {
    const int lane = lane_here();
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const float total = state.total_of(own);
      const int row = TILE::row_of_lane(lane, own);
      const RowPlace place(problem_, work.sequence, heads.first, heads.count, row);
      if (!place.exists) continue;
      const PartialRow partial(
          problem_, static_cast<int>(work.segment.slot) * problem_.rows_of_slot + row);
      if (TILE::is_first_of_same_rows(lane)) *partial.maximum = state.maximum[own], *partial.total = total;
      // The number of columns is a multiple of four.
      state.each_run(lane, own, [&](int first, const auto& run) {
        if (first < problem_.value_dim) store_run(partial.values + first, run);
      });
    }
  }

  // Folds a tile of keys into the warp's state. `keys`, `values`: where this lane points at.
  __device__ void fold(
      WarpState<TILE>& state, const LaneRows& scales, const WarpQuery<TILE>& query,
      uint32_t keys, uint32_t values, int stage, int start, bool is_edge,
      bool has_one_token) const {
    const bool is_plain = !is_edge && !(problem_.softcap > 0.0f || problem_.slopes.data);
    Scores<TILE> scores;
    multiply_keys<TILE>(scores, query, keys);
#pragma unroll
    for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
#pragma unroll
      for (int right = 0; right < TILE::kRights; ++right) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][right][i] *= scales[TILE::row_of_element(i)];
      }
    }
    if (__builtin_expect(!is_plain, false)) finish_scores(scores, start, shared_.loader.loaded[stage]);
    state.take(scores, is_plain);
    if (__builtin_expect(is_edge && !has_one_token, false)) set_nonfinite_apart(state, stage, start);
    multiply_values<TILE>(state.sums, scores, values);
  }

  // Where rows see different keys, a weight of 0 would not hide NaN and infinities from a row that does not
  // see them: adds them to the rows that do, and leaves zeros in their place.
  __device__ void set_nonfinite_apart(WarpState<TILE>& state, int stage, int start) const {
    char* const values = stages_ + stage * TILE::kStageBytes + TILE::kKeys * TILE::kRowBytes;
    if (!__any_sync(0xFFFFFFFF, finds_nonfinite<TILE>(values))) return;
    const int lane = lane_here();
    uint32_t seen[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen[i] = shared_.loader.loaded[stage] &
                keys_of(shared_.terms[TILE::row_of_lane(lane, i)].seen, start);
    }
    add_nonfinite_values<TILE>(state.sums, values, seen);
    __syncwarp();  // all have read them
    drop_nonfinite_values<TILE>(values);
    __syncwarp();
  }

  // The rest of what makes a score, and minus infinity where a row does not see a key.
  __device__ void finish_scores(Scores<TILE>& scores, int start, uint32_t loaded) const {
    const int lane = lane_here();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowTerms terms = shared_.terms[TILE::row_of_lane(lane, row)];
#pragma unroll
      for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
#pragma unroll
        for (int right = 0; right < TILE::kRights; ++right) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (TILE::row_of_element(i) != row) continue;
            const int key = tile * 16 + TILE::key_of_element(lane, right, i);
            const int position = start + key;
            const bool is_seen = (loaded >> key & 1) && position >= terms.seen.lower &&
                                 position < terms.seen.upper;
            float& score = scores[tile][right][i];
            score = is_seen ? finish_score(problem_, terms, score, position) : -INFINITY;
          }
        }
      }
    }
  }

  // Which of a tile's keys lie in a range.
  __device__ static uint32_t keys_of(const KeyRange& range, int start) {
    uint32_t keys = 0;
    for (int key = 0; key < TILE::kKeys; ++key) {
      const bool is_seen = start + key >= range.lower && start + key < range.upper;
      keys |= static_cast<uint32_t>(is_seen) << key;
    }
    return keys;
  }

  const DecodeProblem& problem_;
  Shared& shared_;
  char* stages_;
  Loader loader_;
};

// Rows past the last prefix sum see no key.
__device__ inline void write_padding(const DecodeProblem& problem) {
  if (problem.starts.data == nullptr) return;
  const int64_t tokens = problem.num_tokens;
  const int64_t first =
      min(max(problem.starts[problem.num_sequences], int64_t{0}), tokens) * problem.num_heads;
  const int64_t stop = tokens * problem.num_heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t row = first + thread; row < stop; row += step) {
    const int head = static_cast<int>(row % problem.num_heads);
    const int64_t token = row / problem.num_heads;
    for (int column = 0; column < problem.value_dim; column += 4) {
      *reinterpret_cast<uint2*>(problem.out + (row * problem.value_dim + column) * 2) = uint2{0, 0};
    }
    problem.lse[head * tokens + token] = problem.sinks.at(head, -INFINITY);
  }
}

// Lets the launches behind start. Prefill attention counts its items before this launch ends: no CTA of it starts
// before all of these allow it, so the counter is 0 by then; both use it by atomic operations alone. The last CTA
// has the least to read.
__device__ inline void begin_launches_behind(const DecodeProblem& problem) {
  const bool sets_counter = problem.prefill_counter != nullptr && blockIdx.x == gridDim.x - 1;
  if (sets_counter) {
    if (threadIdx.x != 0) return;
    atomicExch(problem.prefill_counter, 0ull);
    __threadfence();
  }
  allow_dependents();
}

// The CTA's place in the order of tiles. Those with neighbouring numbers run on multiprocessors that share their
// way to memory: where some have nothing to read, it is one of such two.
__device__ inline int64_t place_of_cta(bool leaves) {
  if (!leaves) return blockIdx.x;
  return blockIdx.x % 2 * ((gridDim.x + 1) / 2) + blockIdx.x / 2;
}

// Where a warp goes, nowhere perhaps. Called by the whole CTA.
template <int TILE, int THREADS, bool LEAVES>
__device__ inline Walk<TILE> way_of_warp(const DecodeProblem& problem) {
  __shared__ TeamStarts<TILE, THREADS, LEAVES> starts;
  const int64_t place = place_of_cta(LEAVES && problem.beside.tokens_of_tile > 0);
  const int64_t warps = blockDim.x / 32, first_warp = place * warps;
  const int64_t number = first_warp + threadIdx.x / 32;
  if (problem.parts > 0) {  // a warp for each part; those of the items of a sequence are neighbours
    const int64_t items = problem.items_of_sequence(), before = quotient(number, items);
    const int64_t sequence = quotient(before, problem.parts);
    if (sequence >= problem.num_sequences) return Walk<TILE>{};
    return Walk<TILE>::through_part(
        problem, static_cast<int>(sequence), static_cast<int>(number - before * items),
        static_cast<int>(before - sequence * problem.parts));
  }
  const int64_t first_team = problem.team_of_warp(first_warp);
  const int64_t team = problem.team_of_warp(number);
  starts.find(problem, first_team, problem.team_of_warp(first_warp + warps - 1));
  const int64_t first = team * starts.share;
  const int64_t tiles = min(starts.share, starts.total * problem.groups - first);
  if (team >= problem.teams || tiles <= 0) return Walk<TILE>{};
  return Walk<TILE>::through_share(
      problem, team, static_cast<int>(number - team * problem.team),
      starts.places[team - first_team], first, tiles);
}

template <class TILE>
__global__ void __launch_bounds__(TILE::kThreads, TILE::kCtas)
    decode_attention(const __grid_constant__ DecodeProblem problem) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ typename WarpReader<TILE>::Shared shared[TILE::kWarps];
  begin_launches_behind(problem);
  if (problem.num_sequences > 0) {
    const int warp = threadIdx.x / 32;
    const auto walk = way_of_warp<TILE::kKeys, TILE::kThreads, TILE::kLeaves>(problem);
    if (!walk.is_done()) {
      WarpReader<TILE>(problem, walk, shared[warp], memory + warp * TILE::kWarpBytes).read_all();
    }
  }
  write_padding(problem);
}

}  // namespace torch_pagedkv
