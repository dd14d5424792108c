// The warp that leads a team of warps: it looks for work, decides and tells. On a GPU its lanes share that
// (kLeaderLanes is 32); on the host, where lanes are fibers, one of them does all (1). Every lane that leads
// calls these, and code between them is the same for both.
#pragma once

#include "device/device.cuh"

namespace ep {

// Whether this lane of a warp that leads takes part.
EP_DEVICE bool is_leader_lane() { return lane_id() < kLeaderLanes; }

// f(i) for each i in [0, n), each on one lane.
template <class F>
EP_DEVICE void leader_for(int n, F f) {
    EP_UNROLL(1)
    for (int i = lane_id(); i < n; i += kLeaderLanes) f(i);
}

// The bits below bit n <= 32.
EP_DEVICE uint32_t bits_below(int n) { return n == 32 ? ~0u : (1u << n) - 1; }

// A bit for each lane.
EP_DEVICE uint32_t leader_ballot(bool predicate) {
    if constexpr (kLeaderLanes == 1) return predicate ? 1 : 0;
    return ballot(predicate);
}
EP_DEVICE bool leader_any(bool predicate) { return leader_ballot(predicate) != 0; }

EP_DEVICE int leader_min(int value) {
    if constexpr (kLeaderLanes == 1) return value;
    return warp_reduce<Min>(value);
}

// What `lane` has.
EP_DEVICE int leader_value(int value, int lane) {
    if constexpr (kLeaderLanes == 1) return value;
    return shuffle(value, lane);
}

// spin_until(); ready() and note() are the leader's.
template <class Predicate, class Note>
[[nodiscard]] EP_DEVICE bool leader_spin_until(Predicate ready, Deadline deadline, Note note) {
    if constexpr (kLeaderLanes == 1) return spin_until(ready, deadline, note);
    return warp_spin_until(ready, deadline, note);
}

// Orders memory among the lanes.
EP_DEVICE void leader_sync() {
    if constexpr (kLeaderLanes > 1) warp_sync();
}

}  // namespace ep
