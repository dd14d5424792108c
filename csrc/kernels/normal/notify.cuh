// The first half of a fresh dispatch: what each rank will send to each other one, before any row.
//
//   1 Block 0 tells every rank that this one has entered (operation.cuh), and hands over if it must.
//   2 The tokens for each rank, and for each node, are counted channel by channel: each row of counts by one block.
//     Behind that block 0 is alone.
//   3 Every rank gets a notice: its tokens up to each channel, those that it is to relay as a gateway, and
//     the entries that name its experts.
//   4 From the notices of all ranks follow the rows of the outputs. The host learns how many.
//
// The operation stays open; normal_dispatch() goes on with it, also if it has failed.
#pragma once

#include "kernels/normal/counters.cuh"
#include "kernels/protocol/operation.cuh"

namespace ep {

struct NotifyArgs : NormalArgs, NotifyTensors {
    uint64_t ticket;  // by which the host knows the counts
};

// Block, the number `block` of those that share the rows. Tokens of this rank that `is_for` names, up to and with each
// channel: prefix[row, channel]. Where a block has fewer of these than threads, several count one.
template <class IsFor>
EP_DEVICE void count_channels(
    const NotifyArgs& args, int rows, int32_t* prefix, int block, IsFor is_for) {
    const int channels = args.num_channels;
    const int rows_here = (rows - block + num_blocks() - 1) / num_blocks();
    const int counts_here = rows_here * channels;
    const auto row_of = [&](int i) { return block + i * num_blocks(); };
    for (int i = thread_index(); i < counts_here; i += num_threads())
        prefix[row_of(i / channels) * channels + i % channels] = 0;
    block_sync();
    const bool shares = counts_here > 0 && counts_here < num_threads();
    const int parts = shares ? num_threads() / counts_here : 1;
    for (int i = thread_index(); i < counts_here * parts; i += num_threads()) {
        const int row = row_of(i / parts / channels);
        const int channel = i / parts % channels;
        const TokenRange range = args.tokens_of(channel);
        const int tokens = range.end - range.begin;
        const TokenRange part = TokenRange::of(i % parts, TokenRange::size(parts, tokens), tokens);
        int count = 0;
        for (int token = range.begin + part.begin; token < range.begin + part.end; ++token)
            count += is_for(token, row) ? 1 : 0;
        add_relaxed<Scope::kDevice>(&prefix[row * channels + channel], count);
    }
    block_sync();
    for (int i = thread_index(); i < rows_here; i += num_threads()) {
        int32_t* counts = prefix + row_of(i) * channels;
        for (int channel = 1; channel < channels; ++channel) counts[channel] += counts[channel - 1];
    }
}

// Block. Its share of the tokens for each rank, and for each node.
EP_DEVICE void count_tokens(const NotifyArgs& args) {
    const Topology& topology = args.topology();
    count_channels(
        args, topology.num_ranks, args.channel_prefix, block_index(), [&](int token, int rank) {
            return args.is_token_for(token, rank);
        });
    if (topology.num_nodes == 1) return;
    // From the last block on: it may have fewer rows of ranks.
    count_channels(args,
                   topology.num_nodes,
                   args.node_channel_prefix,
                   num_blocks() - 1 - block_index(),
                   [&](int token, int node) { return args.local_ranks(token, node) != 0; });
}

// Block. Whether it is block 0, which returns when all blocks have counted.
EP_DEVICE bool gather_counts(const OperationArgs& common, const OpenOperation& open) {
    uint32_t* blocks_done = &common.workspace->blocks_done;
    if (block_index() != 0) {
        block_sync();
        if (thread_index() == 0) add_release<Scope::kDevice>(blocks_done, 1u);
        return false;
    }
    if (thread_index() == 0) {
        const auto others = static_cast<uint32_t>(num_blocks() - 1);
        const auto look = [&] { return load_acquire<Scope::kDevice>(blocks_done) == others; };
        while (!spin_until(look, open.deadline)) {  // they wait for nobody
        }
        *blocks_done = 0;
    }
    block_sync();
    return true;
}

// Block. The counts must be those that the caller gave.
EP_DEVICE void check_counts(const NotifyArgs& args, const OpenOperation& open) {
    const int last = args.num_channels - 1;
    for (int rank = thread_index(); rank < args.topology().num_ranks; rank += num_threads()) {
        if (args.channel_prefix[rank * args.num_channels + last] != args.num_tokens_per_rank[rank])
            record_failure(args.common, open, FailureReason::kCounts, args.common.rank());
    }
}

EP_DEVICE size_t notice_bytes(const NotifyArgs& args) {
    return NormalControlMap::notice_bytes(args.num_channels,
                                          args.num_experts / args.common.num_ranks());
}

// One number of the notice for a rank.
EP_DEVICE int32_t notice_item(const NotifyArgs& args, int dst, int item) {
    const Topology& topology = args.topology();
    const int channels = args.num_channels;
    const int nodes_begin = NormalControlMap::notice_node_channels(channels);
    const int experts_begin = NormalControlMap::notice_experts(channels);
    if (item == NormalControlMap::notice_tokens()) return args.num_tokens;
    if (item == NormalControlMap::notice_issue_ns())
        return static_cast<int32_t>(now_ns() - args.common.workspace->entered_ns);
    if (item < NormalControlMap::notice_channels()) return 0;
    if (item < nodes_begin) {
        const int channel = item - NormalControlMap::notice_channels();
        return args.channel_prefix[dst * channels + channel];
    }
    if (item < experts_begin) {
        const int node = topology.node_of(dst);
        const bool relays = node != args.node && topology.local_of(dst) == args.local_rank;
        return relays ? args.node_channel_prefix[node * channels + item - nodes_begin] : 0;
    }
    const int num_local_experts = args.num_experts / topology.num_ranks;
    const int expert = item - experts_begin;
    return expert < num_local_experts ? args.num_tokens_per_expert[dst * num_local_experts + expert]
                                      : 0;
}

EP_DEVICE void send_notices(const NotifyArgs& args, const OpenOperation& open, bool refuses) {
    const Transport& transport = args.common.transport;
    const size_t bytes = notice_bytes(args);
    const auto items = static_cast<int>(bytes / sizeof(int32_t));
    const int rank = args.common.rank();
    // Who refuses may not have handed over, so that others may still read this half.
    for (int dst = warp_id(); dst < args.common.num_ranks() && !refuses; dst += num_warps()) {
        const size_t staged = args.words.staged_notice(open.half, dst, bytes);
        auto* notice = reinterpret_cast<int32_t*>(transport.local(staged));
        for (int item = lane_id(); item < items; item += kWarpSize)
            notice[item] = notice_item(args, dst, item);
        warp_sync();
        transport.put_warp(dst, args.words.notice(open.half, rank, bytes), notice, bytes, 0);
    }
    block_sync();
    for (int dst = thread_index(); dst < args.common.num_ranks(); dst += num_threads()) {
        transport.fence(dst, 0);
        transport.signal(dst, args.words.noticed(rank), NoticeWord{open.op, refuses}.pack(), 0);
    }
}

EP_DEVICE const int32_t* notice_of(const NotifyArgs& args, const OpenOperation& open, int source) {
    return reinterpret_cast<const int32_t*>(
        args.common.transport.local(args.words.notice(open.half, source, notice_bytes(args))));
}

// Block. Waits for the notices of all ranks, and notes when they came. Whether they are there; all threads
// agree.
EP_DEVICE bool await_notices(const NotifyArgs& args, const OpenOperation& open) {
    const OperationArgs& common = args.common;
    uint64_t* sights = common.workspace->header_sight;
    const uint64_t begin_ns = common.workspace->wait_begin_ns;
    const uint64_t expected = NoticeWord{open.op, false}.pack();
    int num_looks = 0;  // of this thread, at its first source
    const auto is_missing = [&](int source) {
        if (source == thread_index()) ++num_looks;
        if (sights[source] != 0) return false;
        const size_t word = args.words.noticed(source);
        if (common.transport.poll(word) < expected) return true;
        note_sight(&sights[source], sight_of(common, word, num_looks == 1, begin_ns));
        return false;
    };
    await_all(
        common,
        open,
        expected,
        [&](int s) { return args.words.noticed(s); },
        is_missing,
        Owed::kRows);
    if (has_failed(common)) return false;
    for (int source = thread_index(); source < common.num_ranks(); source += num_threads()) {
        is_missing(source);  // it may have come between two looks
        // It may already be in the next one, whose notices go to the other half.
        const auto word = NoticeWord::unpack(common.transport.poll(args.words.noticed(source)));
        if (word.op > open.op + 1 || (word.op == open.op && word.refuses))
            record_failure(common, open, FailureReason::kAbandoned, source);
    }
    // Who is in the next one after a refusal has said so before.
    find_given_up(common, open);
    return !has_failed(common);
}

// Block. What the exchange adds to its counters, if it has some.
EP_DEVICE void count_notices(const NotifyArgs& args, const OpenOperation& open) {
    uint64_t* sights = args.common.workspace->header_sight;
    count_hop(args, open, args.notify_counters, args.wait_stats, [&](int source, QueuesSeen& seen) {
        const Sight sight = Sight::unpack(sights[source]);
        const auto issue_ns = static_cast<uint32_t>(
            notice_of(args, open, source)[NormalControlMap::notice_issue_ns()]);
        const uint64_t entered_ns =
            header_word(args.common, open.half, source, offsetof(OpHeader, entered_ns));
        seen.arrival_ns = sight.at_ns;
        seen.witnessed = sight.witnessed;
        seen.issued_ns = entered_ns + issue_ns;
        return true;
    });
}

// Block. Adds up what sources have told from `item` on: their rows up to each channel. `ends` of a source: the rows
// up to and with it. What no tensor could hold ends the operation.
template <class SourceOf>
EP_DEVICE void add_told(const NotifyArgs& args,
                        const OpenOperation& open,
                        int num_sources,
                        SourceOf source_of,
                        int item,
                        int32_t* ends,
                        int stride) {
    const auto told = [&](int i) { return notice_of(args, open, source_of(i)) + item; };
    const auto refuse = [&](int i) {
        record_failure(args.common, open, FailureReason::kSurplus, source_of(i));
    };
    const int last = args.num_channels - 1;
    for (int i = warp_id(); i < num_sources; i += num_warps()) {
        for (int channel = lane_id(); channel <= last; channel += kWarpSize) {
            const int32_t before = channel == 0 ? 0 : told(i)[channel - 1];
            if (told(i)[channel] < before) refuse(i);
        }
    }
    for (int i = thread_index(); i < num_sources; i += num_threads()) {
        int64_t begin = 0;
        for (int before = 0; before < i; ++before) begin += told(before)[last];
        const int64_t end = begin + told(i)[last];
        if (begin <= INT32_MAX && end > INT32_MAX) refuse(i);
        ends[i * stride] = static_cast<int32_t>(end);
    }
}

// Block. Where the rows of every source and channel come to lie, and those that are relayed. Whether that can
// be; all threads agree.
EP_DEVICE bool place_rows(const NotifyArgs& args, const OpenOperation& open) {
    const Topology& topology = args.topology();
    const int channels = args.num_channels;
    const int num_nodes = topology.num_nodes == 1 ? 0 : topology.num_nodes;
    const int first = NormalControlMap::notice_channels();
    const int first_relayed = NormalControlMap::notice_node_channels(channels);
    const auto relayed_from = [&](int node) { return topology.rank_of(node, args.local_rank); };
    add_told(
        args,
        open,
        topology.num_ranks,
        [](int source) { return source; },
        first,
        args.source_prefix,
        args.source_stride);
    add_told(args, open, num_nodes, relayed_from, first_relayed, args.recv_node_prefix, 1);
    if (has_failed(args.common)) return false;
    for (int source = warp_id(); source < topology.num_ranks; source += num_warps()) {
        const int32_t* told = notice_of(args, open, source) + first;
        const int begin = source == 0 ? 0 : args.source_end(source - 1);
        for (int channel = lane_id(); channel < channels; channel += kWarpSize)
            args.recv_channel_prefix[source * channels + channel] =
                begin + (channel == 0 ? 0 : told[channel - 1]);
    }
    for (int i = thread_index(); i < num_nodes * channels; i += num_threads()) {
        const int32_t* told = notice_of(args, open, relayed_from(i / channels)) + first_relayed;
        args.recv_node_channel_prefix[i] = told[i % channels];
    }
    return true;
}

// Block. What the host waits for.
EP_DEVICE void tell_host(const NotifyArgs& args, const OpenOperation& open, bool succeeded) {
    ReceiveCounts& counts = *args.receive_counts;
    const Topology& topology = args.topology();
    if (succeeded) {
        const int num_local_experts = args.num_experts / topology.num_ranks;
        const int first = NormalControlMap::notice_experts(args.num_channels);
        for (int expert = thread_index(); expert < num_local_experts; expert += num_threads()) {
            int32_t rows = 0;
            for (int source = 0; source < topology.num_ranks; ++source)
                rows += notice_of(args, open, source)[first + expert];
            counts.per_expert[expert] = rows;
        }
    }
    block_sync();
    if (thread_index() != 0) return;
    counts.refused = succeeded ? 0 : 1;
    if (succeeded) {
        counts.num_rows = args.source_end(topology.num_ranks - 1);
        counts.num_relayed =
            topology.num_nodes == 1 ? 0 : args.recv_node_prefix[topology.num_nodes - 1];
    }
    store_release<Scope::kSystem>(&counts.ticket, args.ticket);
}

EP_KERNEL void normal_notify(const EP_GRID_CONSTANT NotifyArgs args) {
    const OperationArgs& common = args.common;
    const OpenOperation open = current_operation(common);
    send_headers(common, open);
    count_tokens(args);
    if (!gather_counts(common, open)) return;
    if (hand_over(common, open)) check_counts(args, open);
    const bool refuses = has_failed(common);
    if (!stays_away(common, open)) send_notices(args, open, refuses);
    begin_waiting(common);
    const bool succeeded = !refuses && meet_headers(common, open) && await_notices(args, open) &&
                           place_rows(args, open);
    if (succeeded) count_notices(args, open);
    for (int source = thread_index(); source < common.num_ranks(); source += num_threads())
        common.workspace->header_sight[source] = 0;
    tell_host(args, open, succeeded);
    common.transport.flush();
}

}  // namespace ep
