// Prefill attention on Hopper: tiles of query rows meet the keys that they see, tile after tile.
//
// Warpgroups of 64 rows multiply and take the softmax, each with a state of its own for every row. A
// warpgroup starts the product with the next keys before it takes the softmax of these, and warpgroups
// take turns in starting products, so that one's softmax falls into the other's products (as in
// FlashAttention-3, Shah et al. 2024). CTAs stay, and fetch one tile of rows after another.

#pragma once

#include "grid_dependency.cuh"
#include "prefill_loads.cuh"
#include "prefill_softmax.cuh"

namespace torch_pagedkv {

// One for each warpgroup that attends: whose turn it is.
inline constexpr int kFirstTurnBarrier = 1;

// The largest of a warp's numbers, which the compiler knows to be the same in all lanes.
__device__ inline int uniform(int number) { return __reduce_max_sync(0xFFFFFFFF, number); }

// The lower one of two lanes gives its second element for the first element of the upper one.
__device__ inline void exchange(uint32_t& first, uint32_t& second, bool is_upper, int distance) {
  const uint32_t got = __shfl_xor_sync(0xFFFFFFFF, is_upper ? first : second, distance);
  first = is_upper ? got : first;
  second = is_upper ? second : got;
}

// Element i of lane j of four goes to element j of lane i.
__device__ inline void transpose_of_four(uint32_t (&elements)[4]) {
  const bool is_upper = threadIdx.x & 2, is_odd = threadIdx.x & 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) exchange(elements[i], elements[i + 2], is_upper, 2);
#pragma unroll
  for (int i = 0; i < 4; i += 2) exchange(elements[i], elements[i + 1], is_odd, 1);
}

template <class SHAPE, bool IS_PLAIN>
class Attendant {
 public:
  using Math = typename SHAPE::Math;
  static constexpr int kKeys = SHAPE::kKeys, kDim = SHAPE::kDim;

  __device__ Attendant(
      const DecodeProblem& problem, const PrefillGrid& grid, PrefillControl<SHAPE>& control,
      char* shared)
      : problem_(problem),
        grid_(grid),
        control_(control),
        group_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)),
        places_{
            PlaceInTile(problem, row_of_tile()),
            PlaceInTile(problem, row_of_tile() + 8)},
        key_stages_(shared_address(shared)),
        value_stages_(key_stages_ + SHAPE::kKeyStages * SHAPE::kStageBytes),
        query_(
            value_stages_ + SHAPE::kValueStages * SHAPE::kStageBytes +
            group_ * 64 * kPanelRowBytes) {}

  __device__ void run() {
    Ring<kWorkSlots> slot;
    if (group_ == 0) arrive_at(kFirstTurnBarrier, 256);
    while (true) {
      control_.work_full[slot.index].wait(slot.parity);
      const PrefillWork& work = control_.work[slot.index];
      if (work.tiles < 0) break;
      attend(work);
      __syncwarp();
      leave(control_.work_empty[slot.index]);
      slot.advance();
    }
    if (group_ == 0) meet(kFirstTurnBarrier, 256);  // the last turn was handed back
  }

 private:
  // A warp says that it is done with what a barrier guards.
  __device__ void leave(Barrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  // The first of this lane's two rows.
  __device__ static int row_of_tile() {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    return thread / 32 * 16 + thread % 32 / 4;
  }

  // Behind the product with a tile's keys comes that with the values of the tile before, which is summed up
  // while weights are made of the former. One code serves all tiles, the first and edges too: what is run
  // once for each tile of rows has to be fetched from far away each time.
  __device__ void attend(const PrefillWork& work) {
    const LaneTerms<IS_PLAIN> rows(problem_, grid_, work, places_);
    SoftmaxState state;
    float scores[kKeys / 2], acc[kDim / 2];
    uint32_t weights[kKeys / 4];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i] = 0;
    control_.query_full.wait(query_ring_.parity);
    query_ring_.advance();
    const int first = work.first_tile, stop = first + work.tiles;
    const int whole_from = (work.seen_by_all_from + kKeys - 1) / kKeys;
    const int whole_to = work.seen_by_all_to / kKeys;
    bool was_cleaned = false;
    if (work.tiles > 0) {
      int tile = first;
      control_.keys_full[key_ring_.index].wait(key_ring_.parity);
      multiply_keys(scores);
      wait_products<0>();
      pin(scores);
      bool was_edge = false;
      while (true) {
        const bool is_edge = tile < whole_from || tile >= whole_to;
        const bool is_missing = control_.is_missing[key_ring_.index];
        rows.score(scores, tile * kKeys);
        if (__builtin_expect(is_edge || is_missing, false)) {
          rows.mask(scores, tile * kKeys, is_missing ? control_.missing[key_ring_.index] : nullptr);
        }
        leave_keys(tile + 1 == stop);
        float decays[2];
        const bool moves =
            state.prepare(scores, rows.exponent_scale, IS_PLAIN && !is_edge && !is_missing, decays);
        state.weigh(scores, rows.exponent_scale);
        pin(scores);
        wait_products<0>();
        pin(acc);
        pin(weights);
        if (tile != first) was_cleaned |= leave_values(was_edge);
        was_edge = is_edge;
        if (moves) {
#pragma unroll
          for (int i = 0; i < kDim / 2; ++i) acc[i] *= decays[i / 2 % 2];
        }
        // Not before: products read these registers until now, which the compiler does not keep in mind from
        // one iteration to the next.
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) weights[i] = Math::pair(scores[2 * i], scores[2 * i + 1]);
        if (++tile == stop) break;
        control_.keys_full[key_ring_.index].wait(key_ring_.parity);
        meet(kFirstTurnBarrier + group_, 256);
        multiply_keys(scores);
        control_.values_full[value_ring_.index].wait(value_ring_.parity);
        multiply_values(acc, weights);
        arrive_at(kFirstTurnBarrier + (group_ + 1) % SHAPE::kGroups, 256);
        wait_products<1>();
        pin(scores);
      }
      control_.values_full[value_ring_.index].wait(value_ring_.parity);
      multiply_values(acc, weights);
      wait_products<0>();
      pin(acc);
      was_cleaned |= leave_values(was_edge);
    } else {
      __syncwarp();  // no lane still waits for the query
      leave(control_.query_empty);
    }
    if (was_cleaned) {
      rows.template add_nonfinite<SHAPE>(work, acc, work.lowest, min(work.seen_by_all_from, work.highest));
      rows.template add_nonfinite<SHAPE>(work, acc, max(work.seen_by_all_to, work.lowest), work.highest);
    }
    write_rows(work, rows, state, acc);
  }

  // Starts scores = query . keys.
  __device__ void multiply_keys(float (&scores)[kKeys / 2]) {
    const uint64_t query = describe_matrix(query_, kPieceBytes, 16);
    const uint64_t keys = describe_matrix(
        key_stages_ + key_ring_.index * SHAPE::kStageBytes, SHAPE::kGroupBytes, 16);
    pin(scores);
    begin_products();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int panel = step / 4, byte = step % 4 * 32;
      WarpgroupProduct<Math, kKeys>::of_shared(
          scores, farther(query, panel * SHAPE::kQueryPanelBytes + byte),
          farther(keys, panel * kPieceBytes + byte), step > 0);
    }
    commit_products();
  }

  // Starts acc += weights . values.
  __device__ void multiply_values(float (&acc)[kDim / 2], uint32_t (&weights)[kKeys / 4]) {
    const uint64_t values = describe_matrix(
        value_stages_ + value_ring_.index * SHAPE::kStageBytes, SHAPE::kGroupBytes, kPieceBytes);
    pin(acc);
    pin(weights);
    begin_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      WarpgroupProduct<Math, kDim>::of_registers(
          acc, weights + step * 4, farther(values, step * 2 * SHAPE::kGroupBytes));
    }
    commit_products();
  }

  // No product with a tile's keys is on its way any more: gives their stage back.
  __device__ void leave_keys(bool is_last) {
    __syncwarp();
    leave(control_.keys_empty[key_ring_.index]);
    if (is_last) leave(control_.query_empty);
    key_ring_.advance();
  }

  // The same of values. Returns whether any of an edge were cleaned.
  __device__ bool leave_values(bool is_edge) {
    const bool was_cleaned = is_edge && control_.was_cleaned[value_ring_.index];
    __syncwarp();
    leave(control_.values_empty[value_ring_.index]);
    value_ring_.advance();
    return was_cleaned;
  }

  // Four lanes have a row. They exchange pieces, so that each writes 16 bytes at a time.
  __device__ void write_rows(
      const PrefillWork& work, const LaneTerms<IS_PLAIN>& rows, SoftmaxState& state,
      const float (&acc)[kDim / 2]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = state.sum_up(half);
      const TileRow row(grid_, work, places_[half]);
      const bool has_sink = problem_.sinks.data != nullptr;
      const float sink = has_sink && row.exists ? problem_.sinks.at(row.head, 0.0f) : 0.0f;
      const RowEnd end(rows.as_score(state.reference[half]), total, has_sink, sink, 1.0f);
      const float factor = end.value(1.0f);
      if (t == 0 && row.exists) {
        problem_.lse[static_cast<int64_t>(row.head) * problem_.num_tokens + row.token] = end.lse;
      }
      const int64_t place = static_cast<int64_t>(row.token) * problem_.num_heads + row.head;
      uint4* const out = reinterpret_cast<uint4*>(problem_.out) + place * (kDim / 8) + t;
#pragma unroll
      for (int tile = 0; tile < kDim / 8; tile += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const two = acc + 4 * (tile + i) + 2 * half;
          pairs[i] = Math::pair(two[0] * factor, two[1] * factor);
        }
        transpose_of_four(pairs);
        if (row.exists) out[tile] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }

  const DecodeProblem& problem_;
  const PrefillGrid& grid_;
  PrefillControl<SHAPE>& control_;
  int group_;  // of those that attend
  PlaceInTile places_[2];  // of this lane's rows
  uint32_t key_stages_, value_stages_, query_;
  Ring<SHAPE::kKeyStages> key_ring_;
  Ring<SHAPE::kValueStages> value_ring_;
  Ring<1> query_ring_;
};

// On other GPUs than Hopper's this is empty, which PrefillVariant::is_there tells by its shared memory.
template <class SHAPE, bool IS_PLAIN>
__global__ void __launch_bounds__(SHAPE::kThreads, 1) prefill_attention(
    const __grid_constant__ DecodeProblem problem, const __grid_constant__ PrefillGrid grid,
    const __grid_constant__ PrefillMaps maps) {
#if defined(TORCH_PAGEDKV_HOPPER)
  extern __shared__ __align__(1024) char unaligned[];
  __shared__ PrefillControl<SHAPE> control;
  allow_dependents();
  char* const shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  if (threadIdx.x == 0) {
    constexpr int kAttending = 4 * SHAPE::kGroups;
    for (int stage = 0; stage < SHAPE::kKeyStages; ++stage) {
      control.keys_full[stage].init(1);
      control.keys_empty[stage].init(kAttending);
    }
    for (int stage = 0; stage < SHAPE::kValueStages; ++stage) {
      control.values_full[stage].init(1);
      control.values_empty[stage].init(kAttending);
      control.values_raw[stage].init(1);
    }
    control.work_wanted.init(1);
    control.query_full.init(1);
    control.query_empty.init(kAttending);
    for (int slot = 0; slot < kWorkSlots; ++slot) {
      control.work_full[slot].init(1);
      control.work_empty[slot].init(kAttending + 4);
    }
    publish_barriers();
    prefetch_map(maps.keys);
    prefetch_map(maps.values);
  }
  __syncthreads();
  char* const value_stages = shared + SHAPE::kKeyStages * SHAPE::kStageBytes;
  if (threadIdx.x < 128) {
    give_up_registers<SHAPE::kLoadRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
      copy_tiles<SHAPE>(problem, grid, maps, control, shared, warp == 0);
    } else if (warp == 2) {
      bring_queries<SHAPE>(
          problem, grid, maps.query, control,
          value_stages + SHAPE::kValueStages * SHAPE::kStageBytes);
    } else {
      clean_edges<SHAPE>(grid, control, value_stages);
    }
  } else {
    take_registers<SHAPE::kAttendRegisters>();
    Attendant<SHAPE, IS_PLAIN>(problem, grid, control, shared).run();
  }
  await_dependency();  // what comes after this launch also comes after those before it
#endif
}

}  // namespace torch_pagedkv
