// The host's side of decode attention: how its launches share out the tiles, and in which order they go.

#include "decode_launch.h"

#include <algorithm>
#include <optional>

#include "launch.h"
#include "prefill_launch.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "paged_attention";

// Partial results take no more memory than so many for each row of the output.
constexpr int64_t kMostSplits = 128;
// A part of fewer positions costs more to merge than it saves.
constexpr int kLeastPositionsOfPart = 64;

const DecodeVariant& variant_of(
    const Tensor& key_cache, const Tensor& value_cache, ItemRows rows) {
  const int dim = static_cast<int>(std::max(key_cache.size(3), value_cache.size(3)));
  switch (key_cache.scalar_type()) {
    case ScalarType::BFloat16: return decode_variant_bfloat16(dim, rows);
    case ScalarType::Half: return decode_variant_float16(dim, rows);
    case ScalarType::Float8_e4m3fn: return decode_variant_e4m3(dim, rows);
    default: return decode_variant_e5m2(dim, rows);
  }
}

// Without lengths: from their mean. Where tiles are shared out alike it changes no bit.
ItemRows rows_of_items(const DecodeProblem& problem) {
  if (problem.rows_of_slot <= kFewRows) return ItemRows::kFew;
  if (problem.heads_of_tile > kFewRows) return ItemRows::kMany;  // of one token already
  const int64_t rows = static_cast<int64_t>(problem.num_tokens) * problem.heads_of_tile;
  const int64_t items = problem.num_sequences;
  return rows > kFewRows * items && rows <= kRows * items ? ItemRows::kMany : ItemRows::kMixed;
}

// As many warps of a CTA as the device's shared memory holds.
int warps_on(int32_t device, const DecodeVariant& variant) {
  const int bytes = device_attribute(kOp, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return std::min(variant.warps, std::max(0, bytes - variant.cta_bytes) / variant.warp_bytes);
}

int64_t tiles_of_longest(const DecodeProblem& problem, const DecodeVariant& variant) {
  return std::max(1, (problem.max_positions + variant.tile - 1) / variant.tile);
}

// How many teams of those that run at once take tiles. Where sequences are about as long as each other, a group of
// items is read by a whole number of teams then, or a whole number of groups by a team. Where they are not, the few
// teams fewer read about as fast.
int64_t teams_of_alike(int64_t resident, int64_t groups) {
  if (groups == 0) return resident;
  const int64_t groups_of_team = (groups + resident - 1) / resident;
  const int64_t teams = groups <= resident ? resident / groups * groups : (groups + groups_of_team - 1) / groups_of_team;
  return teams * (kSharesOfSlack + 1) >= resident * kSharesOfSlack ? teams : resident;
}

// Teams of warps that share out the tiles, and the slots of their partial results.
void share_out(
    DecodeProblem& problem, const DecodeVariant& variant, int warps, int32_t device) {
  const int64_t groups = problem.groups_of_all();
  const int64_t rows = static_cast<int64_t>(problem.num_tokens) * problem.num_heads;
  const int64_t most_tiles = tiles_of_longest(problem, variant);
  const int64_t multiprocessors =
      device_attribute(kOp, cudaDevAttrMultiProcessorCount, device);
  const int64_t resident =
      std::max<int64_t>(1, warps * variant.ctas * multiprocessors / problem.team);
  const int64_t most_pairs = kMostSplits * rows / problem.rows_of_slot / problem.team;
  const int64_t most_shares =
      std::max(groups, (groups * most_tiles + problem.least_tiles - 1) / problem.least_tiles);
  int64_t teams = std::min(teams_of_alike(resident, groups), most_shares);
  problem.slots_by_group = groups < teams && groups <= most_pairs;
  teams = std::min(teams, problem.slots_by_group ? most_pairs - groups + 1 : most_pairs / 2);
  teams = std::max<int64_t>(teams, 1);
  problem.teams = static_cast<int>(teams);
  const int64_t pairs = problem.slots_by_group ? teams + groups - 1 : 2 * teams;
  const bool is_cut = teams > 1 && most_tiles > 1;
  problem.partial_rows = is_cut ? pairs * problem.team * problem.rows_of_slot : 0;
}

// CTAs that join parts, for each group of items, or for each cut where teams tell of their starts: as many of those
// that run at once as a few parts of each row take. Any group may have most of the parts, so each gets at least its
// share of one CTA for each multiprocessor. About so many start before decode attention ends; more start after it.
dim3 merging_grid(const DecodeProblem& problem, int32_t device) {
  const int64_t cut = problem.team_starts ? problem.teams - 1 : problem.groups_of_all();
  const int64_t pieces = static_cast<int64_t>(problem.rows_of_slot) * problem.pieces_of_rows();
  const auto ctas = [](int64_t lane_groups) { return (lane_groups + kGroupsOfMerge - 1) / kGroupsOfMerge; };
  const int64_t multiprocessors = device_attribute(kOp, cudaDevAttrMultiProcessorCount, device);
  const int64_t of_few = std::min(ctas(pieces), multiprocessors * kMergingCtasAtOnce / cut);
  const int64_t of_many = std::min(ctas(pieces << kMostJoiningShift), multiprocessors / cut);
  const int64_t of_each = std::max({of_few, of_many, int64_t{1}});
  return dim3(static_cast<unsigned>(cut), static_cast<unsigned>(of_each));
}

// Whether 32 bits hold the strides of blocks and of their rows.
bool is_near(const PoolRows& rows) {
  return std::max(rows.block_stride, rows.offset_stride) <= UINT32_MAX;
}

// Lets prefill attention run beside decode attention, where some sequence is surely long.
void share_device(
    DecodeProblem& problem, const DecodeVariant& variant, const Tensor& key_cache,
    const Tensor& value_cache, int32_t device) {
  const int64_t most_short = static_cast<int64_t>(problem.num_sequences) * problem.most_tokens;
  if (!variant.leaves || problem.num_tokens <= most_short) return;
  problem.beside.tokens_of_tile = tokens_of_prefill_tile(problem, key_cache, value_cache);
  problem.beside.multiprocessors = device_attribute(kOp, cudaDevAttrMultiProcessorCount, device);
  problem.beside.warps = warps_on(device, variant);
  problem.beside.keys_of_tile = variant.tile;
}

}  // namespace

bool has_decode_kernel(const Tensor& key_cache, const Tensor& value_cache) {
  const int32_t device = key_cache.get_device_index();
  return device_attribute(kOp, cudaDevAttrComputeCapabilityMajor, device) >= 8 &&
         warps_on(device, variant_of(key_cache, value_cache, ItemRows::kMany)) > 0;
}

void attend_short_and_long(
    DecodeProblem problem, const Tensor& key_cache, const Tensor& value_cache, int32_t device,
    int64_t num_splits) {
  const DecodeVariant& variant = variant_of(key_cache, value_cache, rows_of_items(problem));
  if (problem.prefill_counter != nullptr && num_splits == 0) {
    share_device(problem, variant, key_cache, value_cache, device);
  }
  const int64_t items = static_cast<int64_t>(problem.num_sequences) * problem.items_of_sequence();
  problem.tiles_have_one_block = problem.block_size % variant.tile == 0 &&
                                 problem.rows_are_aligned && is_near(problem.keys) &&
                                 is_near(problem.values);
  problem.least_tiles = std::max(1, kLeastPositionsOfPart / variant.tile);
  problem.form_teams();
  const int most_of_cta = warps_on(device, variant);
  int warps_of_cta = most_of_cta;
  int64_t warps;
  if (num_splits == 0) {
    share_out(problem, variant, most_of_cta, device);
    warps = static_cast<int64_t>(problem.teams) * problem.team;
  } else {
    const int64_t most_tiles = tiles_of_longest(problem, variant);
    const int64_t most = (most_tiles + problem.least_tiles - 1) / problem.least_tiles;
    // Partial results take no more memory than num_splits for each row of the output.
    const int64_t rows = static_cast<int64_t>(problem.num_tokens) * problem.num_heads;
    const int64_t splits = std::min(num_splits, most);
    const int64_t kept = splits * rows / std::max<int64_t>(1, items * problem.rows_of_slot);
    const int64_t parts = std::max<int64_t>(1, std::min(splits, kept));
    problem.parts = static_cast<int>(parts);
    problem.partial_rows = parts == 1 ? 0 : items * parts * problem.rows_of_slot;
    warps = std::max<int64_t>(1, items * parts);
    // Few warps do not share a multiprocessor while others have none.
    const int64_t multiprocessors =
        device_attribute(kOp, cudaDevAttrMultiProcessorCount, device);
    const int64_t shared_by = (warps + multiprocessors - 1) / multiprocessors;
    warps_of_cta = static_cast<int>(std::min<int64_t>(most_of_cta, shared_by));
  }
  const int64_t ctas = (warps + warps_of_cta - 1) / warps_of_cta;
  if (std::max({ctas, items, problem.partial_rows}) > INT32_MAX) {
    const std::string actual = std::to_string(num_splits);
    refuse(kOp, "num_splits", actual, "give less than 2**31 parts of all sequences and heads");
  }
  std::optional<torch::stable::Tensor> scratch;
  const bool is_cut = problem.partial_rows > 0;
  if (is_cut || problem.lse == nullptr) {
    // There are fewer cuts than groups of items, or more sequences than a CTA's threads can look at.
    const bool tells_starts =
        is_cut && num_splits == 0 &&
        (problem.teams <= problem.groups_of_all() || problem.num_sequences > kMergeThreads);
    constexpr int64_t kFloatsOfStart = sizeof(TeamStart) / sizeof(float);
    const int64_t starts = tells_starts ? problem.teams * kFloatsOfStart : 0;
    const int64_t size = problem.partial_rows * (problem.value_dim + 2);
    // The kernels write an LSE in any case; one that nobody asked for goes here.
    const int64_t lses = problem.lse ? 0 : static_cast<int64_t>(problem.num_tokens) * problem.num_heads;
    scratch.emplace(new_tensor(aoti_torch_dtype_float32(), device, {starts + size + lses}));
    float* const memory = static_cast<float*>(scratch->data_ptr());
    if (starts > 0) problem.team_starts = reinterpret_cast<TeamStart*>(memory);
    problem.partials = memory + starts;
    if (lses > 0) problem.lse = problem.partials + size;
  }
  const cudaStream_t stream = current_stream(device);
  check_cuda(kOp, variant.request_memory(device, most_of_cta));
  check_cuda(kOp, variant.attend(problem, ctas, warps_of_cta, stream));
  // What joins parts waits on multiprocessors that prefill attention could have.
  const bool is_beside = problem.beside.tokens_of_tile > 0;
  if (is_beside) attend_prefill(problem, key_cache, value_cache);
  if (problem.partial_rows > 0 && items > 0) {
    problem.by_pieces_of_row = SmallDivisor(problem.pieces_of_row());
    problem.by_pieces_of_rows = SmallDivisor(problem.pieces_of_rows());
    const bool can_overlap = device_attribute(kOp, cudaDevAttrComputeCapabilityMajor, device) >= 9;
    check_cuda(kOp, variant.merge(problem, merging_grid(problem, device), can_overlap, stream));
  }
  if (problem.prefill_counter != nullptr && !is_beside) {
    attend_prefill(problem, key_cache, value_cache);
  }
}

}  // namespace torch_pagedkv
