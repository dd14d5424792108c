// Transport on the host target: see transport/transport.cuh for the contract. All ranks are
// addressable; the link adds stamps, wake-ups and injected faults.
#pragma once

#include "device/host/device.h"
#include "device/host/row_copy.h"
#include "transport/host/link.h"

namespace ep {

struct Transport {
    std::byte* const* peers;
    host::Link* link;
    int rank;
    int num_ranks;

    bool all_direct() const { return link->all_direct(); }
    void* direct(int dst, size_t offset) const {
        return link->is_direct(dst) ? peers[dst] + offset : nullptr;
    }
    std::byte* local(size_t offset) const { return peers[rank] + offset; }

    // Called by every lane for every row: a call each would be one percent of a round.
    [[gnu::always_inline]] void put_warp(
        int dst, size_t offset, const void* src, size_t bytes, int qp) const {
        host::current_executor->interleave();
        if (!link->in_order()) {
            if (elect_one()) link->put(dst, offset, src, bytes, qp, host::Step::kCopyWarp);
            return;
        }
        copy_warp(peers[dst] + offset, src, bytes);
        if (host::kThreadSanitizer) warp_sync();  // as on a GPU, where all lanes have copied
        if (elect_one()) link->account(dst, bytes);
    }
    [[gnu::always_inline]] void put_row(int dst, size_t offset, RowCopy& row, int qp) const {
        host::current_executor->interleave();
        if (!link->in_order()) {
            const auto copy = row.is_staged() ? host::Step::kGiveRow : host::Step::kCopyWarp;
            if (elect_one()) link->put(dst, offset, row.source(), row.bytes(), qp, copy);
            return;
        }
        row.give(peers[dst] + offset);
        if (elect_one()) link->account(dst, row.bytes());
    }
    void put(int dst, size_t offset, const void* src, size_t bytes, int qp) const {
        host::current_executor->interleave();
        if (!link->in_order()) {
            link->put(dst, offset, src, bytes, qp);
            return;
        }
        std::memcpy(peers[dst] + offset, src, bytes);
        link->account(dst, bytes);
    }
    void put_word(int dst, size_t offset, uint64_t value, int qp) const {
        host::current_executor->interleave();
        if (!link->in_order()) {
            link->put_word(dst, offset, value, qp);
            return;
        }
        store_relaxed<Scope::kSystem>(reinterpret_cast<uint64_t*>(peers[dst] + offset), value);
        link->account_word(dst);
    }
    void fence(int dst, int qp) const { link->fence(dst, qp); }
    void quiet(int dst, int qp) const { link->quiet(dst, qp); }
    void signal(int dst, size_t offset, uint64_t value, int qp) const {
        host::current_executor->interleave();
        link->signal(dst, offset, value, qp);
    }
    void flush() const { link->ring(); }
    uint64_t poll(size_t offset) const { return link->poll(offset); }
    uint64_t newest(size_t offset) const { return link->newest(offset); }
    uint64_t arrival_ns(size_t offset) const { return link->arrival_ns(offset); }
    bool stamps_arrivals() const { return link->stamps_arrivals(); }
};

}  // namespace ep
