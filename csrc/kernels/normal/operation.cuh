// How a normal operation begins and ends; see operation.cuh for what it shares with low latency.
#pragma once

#include "kernels/normal/counters.cuh"
#include "kernels/normal/tasks.cuh"
#include "kernels/protocol/operation.cuh"

namespace ep {

// Block. Enters the operation, unless normal_notify() has done so, and waits for all ranks: whoever is in it
// has emptied every queue of the one before. Whether rows may be sent; all threads agree.
EP_DEVICE bool begin_normal(const NormalArgs& args, const OpenOperation& open, bool is_entered) {
    const OperationArgs& common = args.common;
    if (!is_entered) send_headers(common, open);
    begin_waiting(common);
    if (is_entered) return !has_failed(common);
    // All threads see the same. Only block 0 may look at the header, which it has just written.
    if (*args.dispatch_op == 0) {
        if (block_index() == 0 && elect_one())
            record_failure(common, open, FailureReason::kHandle, common.rank());
        return false;
    }
    return hand_over(common, open) && meet_headers(common, open);
}

// Block. Whether the rows that a handle tells of lie within `num_rows`, and those that are relayed within
// `num_relay_rows`, whoever may have changed it: it is the caller's. All threads agree.
EP_DEVICE bool rows_lie_within(const NormalArgs& args, int num_rows, int num_relay_rows) {
    const Topology& topology = args.topology();
    bool is_outside = false;
    const auto look = [&](int first, int rows, int most) {
        is_outside = is_outside || first < 0 || rows < 0 || rows > most - first;
    };
    const int channels = args.num_channels;
    for (int i = thread_index(); i < topology.num_ranks * channels; i += num_threads()) {
        const int source = i / channels;
        look(args.first_row(source, i % channels), args.from_rank(source, i % channels), num_rows);
    }
    const int nodes = topology.num_nodes == 1 ? 0 : topology.num_nodes;
    for (int i = thread_index(); i < nodes * channels; i += num_threads()) {
        const int node = i / channels;
        look(args.first_relayed(node, i % channels) - args.num_tokens,
             args.relayed(node, i % channels),
             num_relay_rows);
    }
    return !block_any(is_outside);
}

// Warp. Puts a row and its pack, nullptr for none, next to each other. The pack is on its way while the row is
// read.
EP_DEVICE void put_row_and_pack(const NormalArgs& args,
                                const Queue& to,
                                RowCopy& copy,
                                size_t slot,
                                const std::byte* row,
                                const std::byte* pack) {
    const Transport& transport = args.common.transport;
    copy.take(row, args.row.row_bytes);
    if (pack != nullptr) {
        const size_t place = slot + args.row.pack_offset();
        transport.put_warp(to.peer, place, pack, args.row.pack_bytes(), to.channel);
    }
    transport.put_row(to.peer, slot, copy, to.channel);
}

// Team, when its warps have prepared `rows` slots from number `done` on for put_warp(), of each of which `bytes` count.
// Slots that lie next to each other go through a NIC as one put; into memory that can be addressed each warp puts its own.
EP_DEVICE void put_staged(const NormalArgs& args,
                          const Queue& queue,
                          int done,
                          int rows,
                          size_t bytes,
                          const Team& team) {
    const Transport& transport = args.common.transport;
    team_sync(team);
    const auto put = [&](int i, size_t size) {
        transport.put_warp(queue.peer,
                           slot_of(args, queue, true, done + i),
                           transport.local(staging_of(args, queue, done + i)),
                           size,
                           queue.channel);
    };
    if (is_direct(args, queue)) {
        for (int i = team.warp; i < rows; i += team.warps) put(i, bytes);
        return;
    }
    for (int i = 0; team.warp == 0 && i < rows;) {
        const int before_end = queue.slots - (done + i) % queue.slots;
        const int run = rows - i < before_end ? rows - i : before_end;
        put(i, (run - 1) * slot_bytes(args, queue.hop) + bytes);
        i += run;
    }
}

// Block. True for one thread of the launch, if the operation succeeded. count_hops() adds it to the counters.
template <class CountHops>
EP_DEVICE bool close_normal(const NormalArgs& args,
                            const OpenOperation& open,
                            CountHops count_hops) {
    return close_operation(args.common, open, [&](int, bool succeeded) {
        if (succeeded) count_hops();
        block_sync();
        forget_queues(args);
    });
}

}  // namespace ep
