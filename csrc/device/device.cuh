// What a kernel may use. The two targets offer the same names with the same contracts; this header
// picks one. Contracts are written here, implementations are in cuda/ and host/.
//
// Identity      thread_index() num_threads() block_index() num_blocks() lane_id() warp_id() num_warps()
// Warp          All lanes of `mask` call; every one of them returns with the result.
//   warp_sync(mask)                orders memory among the lanes
//   shuffle(value, lane, mask)     the value `lane` passed
//   ballot(predicate, mask)        bit per lane
//   warp_reduce<Op>(value, mask)   Op is Sum, Max or Min
//   warp_prefix_sum(value)         exclusive, in lane order; full warp
//   group_reduce<G, Op>(values)    element-wise over groups of G consecutive lanes, G a power of two;
//                                  an array of N values is one rendezvous
//   elect_one()                    true on exactly one lane of a converged warp
// Block, grid   block_sync() bar_sync(id, num_threads) grid_sync() (cooperative launches only)
//   block_any(predicate)           a block_sync() that tells all threads whether it held on one of them
// Shared memory SharedArena arena; T* p = arena.take<T>(count): same sequence on every thread
// Atomics       load_acquire<S> load_relaxed<S> store_release<S> store_relaxed<S> add_relaxed<S>
//               add_release<S> add_acq_rel<S>(pointer, value) -> old value; max_relaxed<S>(pointer,
//               value); S names the scope
// Waiting       spin_until(predicate, deadline) -> false when the deadline passed; the only way to poll.
//               spin_until(predicate, deadline, note) calls note() every kNoteIntervalNs
//               warp_spin_until(predicate, deadline, note): all lanes, for all of which the predicate is the same
// Time          now_ns(): this rank's clock, for stamps. deadline_in(ns): real time, for giving up.
//               kClockPatienceNs: how long a clock exchange waits for a rank
// Copies        copy_warp(dst, src, bytes), copy_block(dst, src, bytes): 16-byte aligned, multiples of
//               16. The source must be visible to the whole warp (block) before; the destination is
//               after the next warp_sync (block_sync).
// Rows          RowCopy row(piece, piece_bytes): a warp's way to move whole rows, 16-byte aligned, multiples of
//               16. All lanes call each member.
//   RowCopy::piece_bytes(row_bytes)  of shared memory, aligned to RowCopy::kAlignment, of which the warp needs a
//                                    piece of its own; piece nullptr: as copy_warp()
//   take(src, bytes)   begins to read a row. The source must be visible to elect_one()'s lane before, and
//                      stay until finish() or the next take().
//   give(dst)          writes the row; to several places in turn. They may be written since take().
//   finish()           ends what was begun. Destinations are visible after the next warp_sync (block_sync).
// Loops         warp_for(n, f), block_for(n, f): f(i) for each i in [0, n), once, on some thread
//               warp_for_tiles<V>(n, full, single): full(first, stride) for V indices from `first`,
//                              single(i) for one; together [0, n)
//               block_for_tiles<V>(n, f): f(tile) with up to V indices tile.index(j), j < tile.count;
//                              tile.clamped(j) is the last one beyond that
// Hints         prefetch_ahead(vector): what follows it is read soon
// Numbers       bf16, load_vector/store_vector, to_e4m3, ... see numbers.cuh
#pragma once

#include "device/target.h"

#if defined(EP_TARGET_CUDA)
#include "device/cuda/device.cuh"
#include "device/cuda/row_copy.cuh"
#else
#include "device/host/device.h"
#include "device/host/row_copy.h"
#endif

#include "device/numbers.cuh"
