// Where kernels put what they measured. Written once per operation by its last block, so plain adds
// suffice; readers copy and subtract, they never reset.
#pragma once

#include "device/device.cuh"

namespace ep {

enum SourceCounter : int {
#define EP_SOURCE_COUNTER(name) kSource_##name,
#include "kernels/protocol/counters.def"
    kNumSourceCounters
};

enum OwnCounter : int {
#define EP_OWN_COUNTER(name) kOwn_##name,
#include "kernels/protocol/counters.def"
    kNumOwnCounters
};

// One entry of the ring of recent operations: a row per source, then one for the rank itself.
enum RingSourceField : int {
#define EP_RING_SOURCE(name) kRingSource_##name,
#include "kernels/protocol/counters.def"
    kNumRingSourceFields
};

enum RingOwnField : int {
#define EP_RING_OWN(name) kRingOwn_##name,
#include "kernels/protocol/counters.def"
    kNumRingOwnFields
};

// Of a row of an entry; the shorter kind of row ends with zeros.
constexpr int kNumRingFields = int{kNumRingSourceFields} > int{kNumRingOwnFields}
                                   ? int{kNumRingSourceFields}
                                   : int{kNumRingOwnFields};

struct CounterView {
    int64_t* totals;  // [kNumSourceCounters, num_ranks]
    int64_t* own;     // [kNumOwnCounters]
    int64_t* ring;    // [ring_capacity, num_ranks + 1, kNumRingFields]
    int ring_capacity;

    EP_DEVICE bool on() const { return totals != nullptr; }
    // Of an operation's entry, if there is a ring.
    EP_DEVICE int ring_slot(uint64_t op) const {
        return ring_capacity == 0 ? 0 : static_cast<int>(op % ring_capacity);
    }
    // A source's row of an entry, or the rank's own, which is number num_ranks.
    EP_DEVICE int64_t* ring_row(int slot, int row, int num_ranks) const {
        return ring + (static_cast<int64_t>(slot) * (num_ranks + 1) + row) * kNumRingFields;
    }
};

// One source in one operation, all stamps on the receiving rank's clock.
struct SourceTiming {
    int64_t wait_begin;
    int64_t entered;
    int64_t issued;
    int64_t arrival;

    EP_HOST_DEVICE int64_t wait() const { return arrival > wait_begin ? arrival - wait_begin : 0; }
    EP_HOST_DEVICE int64_t late() const { return clamped(entered) - wait_begin; }
    EP_HOST_DEVICE int64_t issue() const {
        return clamped(issued > entered ? issued : entered) - clamped(entered);
    }
    EP_HOST_DEVICE int64_t path() const { return wait() - late() - issue(); }
    EP_HOST_DEVICE int64_t slack() const { return wait_begin > issued ? wait_begin - issued : 0; }

  private:
    // Into the waiting interval, so that the parts of a wait add up whatever the clocks say.
    EP_HOST_DEVICE int64_t clamped(int64_t stamp) const {
        const int64_t end = wait_begin + wait();
        return stamp < wait_begin ? wait_begin : stamp > end ? end : stamp;
    }
};

}  // namespace ep
