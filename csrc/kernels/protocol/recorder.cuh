// What a kernel tells the host of itself while it runs: stamps of its operation, and for whom it waits. A few
// stores per operation; those about waiting only where that lasts long, by each thread that waits.
#pragma once

#include "kernels/protocol/operation_state.cuh"

namespace ep {

// That a rank was missing. A note is as good as its time, which begins anew with each launch of an operation; so who
// waits before others do in the same operation clears its own.
struct WaitNote {
    static constexpr uint64_t kUnitNs = 10'000'000;

    uint64_t series;  // 2 bits
    uint64_t number;  // 30 bits, of the operation in it
    uint64_t waited;  // 32 bits, units since its launch began

    EP_HOST_DEVICE uint64_t pack() const {
        return series << 62 | (number & 0x3FFFFFFF) << 32 | (waited & 0xFFFFFFFF);
    }
    EP_HOST_DEVICE static WaitNote unpack(uint64_t word) {
        return {word >> 62, word >> 32 & 0x3FFFFFFF, word & 0xFFFFFFFF};
    }
    EP_HOST_DEVICE bool is_of(Series s, uint64_t op) const {
        return waited != 0 && series == static_cast<uint64_t>(s) && number == (op & 0x3FFFFFFF);
    }
};

template <class T>
EP_DEVICE void show_host(T* word, T value) {
    store_relaxed<Scope::kSystem>(word, value);
}

// One thread of the launch.
EP_DEVICE void record_entry(const OperationArgs& args, uint64_t number, uint64_t entered_ns) {
    RecordedEntry* entry = args.record.entry;
    if (entry == nullptr) return;
    // A captured graph enters again, so that the stamps of its last replay may be there.
    show_host(&entry->finished_ns, uint64_t{0});
    show_host(&entry->sent_ns, uint64_t{0});
    show_host(&entry->failed, 0u);
    show_host(&entry->number, number);
    show_host(&entry->entered_ns, entered_ns);
}

// Block, which has sent all that it sends, whether it waits afterwards or leaves.
EP_DEVICE void record_sent(const OperationArgs& args) {
    RecordedEntry* entry = args.record.entry;
    if (entry == nullptr) return;
    block_sync();
    if (thread_index() != 0) return;
    const uint64_t now = now_ns();
    const uint32_t others = add_relaxed<Scope::kDevice>(&args.workspace->blocks_sent, 1u);
    if (others + 1 < static_cast<uint32_t>(num_blocks())) return;
    // For the next launch that sends; this operation may be received after it.
    args.workspace->blocks_sent = 0;
    show_host(&entry->sent_ns, now);
}

// One thread of the launch; `failed` as in the workspace.
EP_DEVICE void record_end(const OperationArgs& args, uint32_t failed, uint64_t now) {
    RecordedEntry* entry = args.record.entry;
    if (entry == nullptr) return;
    show_host(&entry->failed, failed);
    show_host(&entry->finished_ns, now);
}

// One thread, which has been waiting for long.
EP_DEVICE void note_missing(const OperationArgs& args,
                            const OpenOperation& open,
                            Owed owed,
                            int source) {
    if (args.record.waits == nullptr) return;
    const uint64_t waited_ns = args.timeout_ns - left_ns(open.deadline);
    const WaitNote note{
        static_cast<uint64_t>(open.series), open.op, 1 + waited_ns / WaitNote::kUnitNs};
    show_host(&args.record.waits->noted[static_cast<int>(owed)][source], note.pack());
}

// One thread, which no longer waits for what it has noted.
EP_DEVICE void forget_missing(const OperationArgs& args, Owed owed, int source) {
    if (args.record.waits == nullptr) return;
    show_host(&args.record.waits->noted[static_cast<int>(owed)][source], uint64_t{0});
}

}  // namespace ep
