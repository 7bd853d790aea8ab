// Spreads work items over torch's threads.
//
// Threads draw items one at a time, since items differ in cost (short and long sequences, causal
// triangles). An item's result must not depend on which thread computes it, nor on how many do.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace torch_pagedkv {

// Waking a thread costs about as much as moving this many bytes.
inline constexpr int64_t kBytesPerThread = 64 * 1024;

inline int64_t useful_threads(int64_t items, int64_t bytes) {
  const int64_t threads = torch::stable::get_num_threads();
  return std::max<int64_t>(1, std::min({items, threads, bytes / kBytesPerThread}));
}

// Calls body(thread, item, next) for every item; `thread` is below `threads` and names a scratch space
// that no other thread has; `next` is the item that the thread takes after this one, or `items` where
// that is not settled yet. body must not throw.
template <class Body>
void for_each_item_and_next(int64_t threads, int64_t items, const Body& body) {
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) body(0, item, item + 1);
    return;
  }
  std::atomic<int64_t> drawn{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const auto draw = [&] { return drawn.fetch_add(1, std::memory_order_relaxed); };
    for (int64_t thread = begin; thread < end; ++thread) {
      int64_t item = draw();
      while (item < items) {
        // Nobody takes two of the last items while another thread has none.
        const bool is_settled = drawn.load(std::memory_order_relaxed) <= items - threads;
        const int64_t next = is_settled ? std::min(draw(), items) : items;
        body(thread, item, next);
        item = is_settled ? next : draw();
      }
    }
  });
}

// Calls body(thread, item) for every item.
template <class Body>
void for_each_item(int64_t threads, int64_t items, const Body& body) {
  for_each_item_and_next(
      threads, items, [&](int64_t thread, int64_t item, int64_t) { body(thread, item); });
}

}  // namespace torch_pagedkv
