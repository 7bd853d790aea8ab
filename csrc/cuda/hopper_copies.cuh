// Barriers in shared memory, and copies by Hopper's copy engine that complete on them.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace torch_pagedkv {

// Counts arrivals and bytes of copies; a phase ends when both are complete.
struct Barrier {
  uint64_t state;

  __device__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&state));
  }
  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address()), "r"(arrivals));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address()) : "memory");
  }
  // Arrives, and announces bytes that copies will bring.
  __device__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(address()), "r"(bytes) : "memory");
  }
  // Waits for the end of a phase of this parity. Before the first one the parity 1 counts as ended.
  __device__ void wait(uint32_t parity) {
    uint32_t ended;
    do {
      asm volatile("{\n.reg .pred ended;\n"
                   "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2, 1000000;\n"
                   "selp.u32 %0, 1, 0, ended;\n}"
                   : "=r"(ended) : "r"(address()), "r"(parity) : "memory");
    } while (ended == 0);
  }
};

// Makes the barriers that a thread has initialised known to the copy engine.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread wrote to shared memory is seen by products and copies after the next barrier.
__device__ inline void publish_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One of the CTA's numbered barriers: `threads` of them meet, or arrive and go on.
__device__ inline void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// True for one lane of a whole warp; what it guards needs no loop over lanes.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred elected;\n"
               "elect.sync _|elected, 0xFFFFFFFF;\n"
               "selp.u32 %0, 1, 0, elected;\n}"
               : "=r"(elected));
  return elected != 0;
}

template <int REGISTERS>
__device__ inline void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Starts a copy of whole groups of 8 rows, all panels of each. What lies outside the pool becomes zeros.
__device__ inline void copy_groups(
    uint32_t target, const CUtensorMap& map, Barrier& barrier, int head, int group) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %3, %3, %4, %5}], [%2];"
      :: "r"(target), "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier.address()), "r"(0), "r"(head),
         "r"(group)
      : "memory");
}

// Starts a copy of rows of a pool's block, 64 elements wide. What lies outside the pool becomes zeros.
__device__ inline void copy_rows(
    uint32_t target, const CUtensorMap& map, Barrier& barrier, int element, int offset, int head,
    int block) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :: "r"(target), "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier.address()), "r"(element),
         "r"(offset), "r"(head), "r"(block)
      : "memory");
}

// The same for rows (token, head) of the query.
__device__ inline void copy_query_rows(
    uint32_t target, const CUtensorMap& map, Barrier& barrier, int element, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];"
      :: "r"(target), "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier.address()), "r"(element),
         "r"(head), "r"(token)
      : "memory");
}

}  // namespace torch_pagedkv
