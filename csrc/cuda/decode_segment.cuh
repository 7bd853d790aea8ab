// How a warp reads a segment: folds its tiles into a softmax state, and writes the rows, or a part of them.

#pragma once

#include "decode_loader.cuh"
#include "decode_output.cuh"
#include "decode_state.cuh"

namespace torch_pagedkv {

// The score of a key whose product with the row is scaled already.
__device__ inline float finish_score(
    const DecodeProblem& problem, const RowTerms& terms, float score, int position_of_key) {
  score = without_infinity(score);
  if (problem.softcap > 0.0f) score = problem.softcap * safe_tanh(score * problem.inverse_softcap);
  if (problem.slopes.data == nullptr) return score;
  return without_infinity(score + terms.slope * static_cast<float>(position_of_key - terms.position));
}

// A warp's own, of the rows of a segment.
struct SharedRows {
  RowTerms terms[kRows];
  float maximum[8], total[8];
};

// A warp's reading of one segment. TILE has as many rows as the sequence at least.
template <class TILE>
class SegmentReader {
 public:
  // `stages`: the warp's tiles.
  __device__ SegmentReader(
      const DecodeProblem& problem, const Work& work, SharedRows& shared, char* stages)
      : problem_(problem),
        work_(work),
        shared_(shared),
        stages_(stages),
        start_(0),
        seen_by_all_{0, 0},
        has_one_token_(false) {
    const LanePlace<TILE> place(static_cast<int>(threadIdx.x) % 32);
    keys_ = kept(shared_address(stages) + place.key);
    values_ = kept(shared_address(stages) + TILE::kKeys * TILE::kRowBytes + place.value);
    // All of them are set here: a compiler would keep an undefined one over the segments before, with the state
    // of other rows.
    query_.clear();
    scales_[0] = scales_[1] = 0.0f;
    state_.clear();
  }

  // Loads the query, and keeps what makes the scores of each row.
  __device__ void begin() {
    start_ = (work_.sequence.first_tile + work_.segment.first) * TILE::kKeys;
    seen_by_all_ = {work_.sequence.seen_by_all_from, work_.sequence.seen_by_all_to};
    has_one_token_ = work_.sequence.query_length == 1;
    const ItemHeads heads(problem_, work_.segment.item, work_.segment.kv_head);
    query_.load(problem_, work_.sequence, heads.first, heads.count, shared_.terms);
    __syncwarp();
    const int lane = lane_here(), row = lane;
    if (row < TILE::kRows) {
      const int token = problem_.token_of_row(row);
      const int head =
          heads.first + min(row - token * problem_.heads_of_tile, heads.count - 1);
      RowTerms& terms = shared_.terms[row];
      terms.scale *= problem_.softmax_scale * problem_.k_scales.at(heads.kv_head, 1.0f);
      terms.slope = problem_.slopes.at(head, 0.0f);
      terms.position = work_.sequence.position_of(token);
      terms.seen = token < work_.sequence.query_length
                       ? keys_seen(problem_, terms.position, work_.sequence.length)
                       : KeyRange{0, 0};
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) scales_[i] = shared_.terms[TILE::row_of_lane(lane, i)].scale;
  }

  // Folds the next tile. `loaded`: which of its keys were loaded; `is_whole`: all.
  __device__ void fold(int stage, const uint32_t& loaded, bool is_whole) {
    const bool is_edge = !is_whole || start_ < seen_by_all_.lower ||
                         start_ + TILE::kKeys > seen_by_all_.upper;
    const bool is_plain = !is_edge && !(problem_.softcap > 0.0f || problem_.slopes.data);
    const uint32_t before = stage * TILE::kStageBytes;
    Scores<TILE> scores;
    multiply_keys<TILE>(scores, query_, keys_ + before);
    each_product(scores, [&](float& score, int, int, int i) { score *= scales_[TILE::row_of_element(i)]; });
    if (__builtin_expect(!is_plain, false)) finish_scores(scores, loaded);
    state_.take(scores, is_plain);
    if (__builtin_expect(is_edge && !has_one_token_, false)) set_nonfinite_apart(stage, loaded);
    multiply_values<TILE>(state_.sums, scores, values_ + before);
    start_ += TILE::kKeys;
  }

  // Writes the rows, or a part of them. `stage`: that was folded last; its memory is used.
  __device__ void finish(int stage) {
    const ItemHeads heads(problem_, work_.segment.item, work_.segment.kv_head);
    if (!work_.segment.is_whole) {
      write_part(heads);
      return;
    }
    float* const values = reinterpret_cast<float*>(stages_ + stage * TILE::kStageBytes);
#pragma unroll
    for (int column = 0; column < TILE::kRows / 8; ++column) {
      __syncwarp();  // all have read the tile, or the rows before
      state_.store(column, shared_.maximum, shared_.total, values);
      __syncwarp();
      const int row = lane_here() / 4;
      const RowPlace place(problem_, work_.sequence, heads.first, heads.count, column * 8 + row);
      if (place.exists) write_row(heads, place, row, values);
    }
  }

 private:
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
  __device__ void write_part(const ItemHeads& heads) const {
    const int lane = lane_here();
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const float total = state_.total_of(own);
      const int row = TILE::row_of_lane(lane, own);
      const RowPlace place(problem_, work_.sequence, heads.first, heads.count, row);
      if (!place.exists) continue;
      const PartialRow partial(
          problem_, static_cast<int>(work_.segment.slot) * problem_.rows_of_slot + row);
      if (TILE::is_first_of_same_rows(lane)) *partial.maximum = state_.maximum[own], *partial.total = total;
      // The number of columns is a multiple of four.
      state_.each_run(lane, own, [&](int first, const auto& run) {
        if (first < problem_.value_dim) store_run(partial.values + first, run);
      });
    }
  }

  // Where rows see different keys, a weight of 0 would not hide NaN and infinities from a row that does not
  // see them: adds them to the rows that do, and leaves zeros in their place.
  __device__ void set_nonfinite_apart(int stage, uint32_t loaded) {
    char* const values = stages_ + stage * TILE::kStageBytes + TILE::kKeys * TILE::kRowBytes;
    if (!__any_sync(0xFFFFFFFF, finds_nonfinite<TILE>(values))) return;
    const int lane = lane_here();
    uint32_t seen[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen[i] = loaded & keys_of(shared_.terms[TILE::row_of_lane(lane, i)].seen, start_);
    }
    add_nonfinite_values<TILE>(state_.sums, values, seen);
    __syncwarp();  // all have read them
    drop_nonfinite_values<TILE>(values);
    __syncwarp();
  }

  // The rest of what makes a score, and minus infinity where a row does not see a key.
  __device__ void finish_scores(Scores<TILE>& scores, uint32_t loaded) const {
    const int lane = lane_here();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowTerms terms = shared_.terms[TILE::row_of_lane(lane, row)];
      each_product(scores, [&](float& score, int tile, int right, int i) {
        if (TILE::row_of_element(i) != row) return;
        const int key = tile * 16 + TILE::key_of_element(lane, right, i);
        const int position = start_ + key;
        const bool is_seen = (loaded >> key & 1) && position >= terms.seen.lower &&
                             position < terms.seen.upper;
        score = is_seen ? finish_score(problem_, terms, score, position) : -INFINITY;
      });
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
  const Work& work_;
  SharedRows& shared_;
  char* stages_;
  int start_;  // the next tile's first position
  KeyRange seen_by_all_;
  bool has_one_token_;
  uint32_t keys_, values_;  // where this lane points at in the first stage
  WarpQuery<TILE> query_;
  LaneRows scales_;
  WarpState<TILE> state_;
};

}  // namespace torch_pagedkv
