// Normal dispatch: every token goes once to each rank that has one of its experts, and crosses the network
// once for each node. Rows lie by source rank, then by token.
//
//   0 A fresh dispatch goes on where normal_notify() ended. Otherwise every rank is told that this one has
//     entered, and waits for all; the counts are those of the handle.
//   Then, at the same time (tasks.cuh), for each channel:
//   1 to a node     Tokens with an expert on another node go to the rank of equal place there, the gateway,
//                   with a mark of the local ranks they are for.
//   2 to a rank     Tokens for a rank of the own node go there.
//   3 relay         The gateway passes what came from a node on to the local ranks that are marked.
//   4 receive       Rows of a source and channel come in order, so their number in the queue is their place
//                   in the outputs.
//   Where a token stands in each queue is kept in the handle: combine returns rows by the same ways.
#pragma once

#include "kernels/normal_operation.cuh"
#include "kernels/normal_verify.cuh"

namespace ep {

struct NormalDispatchArgs : NormalArgs, NormalDispatchTensors, NormalDispatchFlags {};

// ---- 1, 2: from the caller's rows

// One thread. The next tokens of a channel that `is_for` names, up to `count`; how many there are. Fewer
// only if the handle contradicts itself.
template <class IsFor>
EP_DEVICE int find_tokens(
    const TokenRange& range, int cursor, int count, int* tokens, IsFor is_for) {
    int found = 0;
    for (int token = range.begin + cursor; found < count && token < range.end; ++token) {
        if (is_for(token)) tokens[found++] = token;
    }
    return found;
}

// Warp.
EP_DEVICE void put_token(
    const NormalDispatchArgs& args, const Queue& queue, RowCopy& copy, size_t slot, int token) {
    const NormalRow& row = args.row;
    put_row_and_pack(args,
                     queue,
                     copy,
                     slot,
                     args.x + token * row.row_bytes,
                     args.packs + token * row.pack_bytes());
}

// One thread. Whom a token is for on a node.
EP_DEVICE RelayMark
mark_of(const NormalArgs& args, const OpenOperation& open, int node, int channel, int token) {
    const TokenRange range = TokenRange::of(channel, args.num_channels, args.num_tokens);
    const uint64_t local_ranks = args.local_ranks(token, node);
    uint64_t last_of = local_ranks;
    for (int later = token + 1; later < range.end && last_of != 0; ++later)
        last_of &= ~args.local_ranks(later, node);
    RelayMark mark{local_ranks, last_of, now_ns(), 0};
    if (args.row.verified) mark.proof = proof_of_mark(mark, open.op, static_cast<uint32_t>(token));
    return mark;
}

// Warp. Puts a row with its mark; from staging memory if the other node cannot be addressed.
EP_DEVICE void put_marked_token(const NormalDispatchArgs& args,
                                const OpenOperation& open,
                                const Queue& queue,
                                RowCopy& copy,
                                int node,
                                int index,
                                int token) {
    const Transport& transport = args.common.transport;
    const NormalRow& row = args.row;
    const size_t slot = slot_of(args, queue, true, index);
    if (transport.direct(queue.peer, 0) != nullptr) {
        put_token(args, queue, copy, slot, token);
        if (!elect_one()) return;
        const RelayMark mark = mark_of(args, open, node, queue.channel, token);
        const auto put = [&](size_t field, uint64_t value) {
            transport.put_word(queue.peer, slot + row.relay_offset() + field, value, queue.channel);
        };
        put(offsetof(RelayMark, local_ranks), mark.local_ranks);
        put(offsetof(RelayMark, last_of), mark.last_of);
        put(offsetof(RelayMark, issued_ns), mark.issued_ns);
        if (row.verified) put(offsetof(RelayMark, proof), mark.proof);
        return;
    }
    std::byte* staged = transport.local(staging_of(args, queue, index));
    copy_warp(staged, args.x + token * row.row_bytes, row.row_bytes);
    copy_warp(staged + row.pack_offset(), args.packs + token * row.pack_bytes(), row.pack_bytes());
    if (elect_one())
        *reinterpret_cast<RelayMark*>(staged + row.relay_offset()) =
            mark_of(args, open, node, queue.channel, token);
    warp_sync();
    transport.put_warp(
        queue.peer, slot, staged, row.relay_offset() + sizeof(RelayMark), queue.channel);
}

// ---- 3: from a queue of another node

EP_DEVICE const std::byte* relayed_row(const NormalArgs& args, const Queue& from, int index) {
    return args.common.transport.local(slot_of(args, from, false, index));
}

EP_DEVICE const RelayMark& mark_in(const NormalArgs& args, const Queue& from, int index) {
    return *reinterpret_cast<const RelayMark*>(relayed_row(args, from, index) +
                                               args.row.relay_offset());
}

EP_DEVICE bool is_marked(const NormalArgs& args, const Queue& from, int index, int local) {
    return (mark_in(args, from, index).local_ranks >> local & 1) != 0;
}

// One thread. How many rows can be passed on, up to `available`: there must be slots in every queue.
EP_DEVICE int relayable(
    const NormalArgs& args, const OpenOperation& open, int node, const Queue& from, int available) {
    const int done = static_cast<int>(state_of(args, from, false).moved);
    int rows = available;
    for (int local = 0; local < args.topology().ranks_per_node; ++local) {
        const Queue to = nvl_queue(args, node, local, from.channel);
        int wanted = 0;
        for (int i = 0; i < rows; ++i) wanted += is_marked(args, from, done + i, local) ? 1 : 0;
        int free = wanted == 0 ? 0 : free_slots(args, open, to, wanted);
        if (free == wanted) continue;
        int i = 0;
        for (; i < rows; ++i) {
            if (is_marked(args, from, done + i, local) && free-- == 0) break;
        }
        rows = i;
    }
    return rows;
}

// Warp. Passes one row on to the local ranks it is marked for, behind `before` other rows of the step.
EP_DEVICE void relay_row(const NormalDispatchArgs& args,
                         RowCopy& copy,
                         int node,
                         const Queue& from,
                         int done,
                         int before) {
    const int index = done + before;
    copy.take(relayed_row(args, from, index), args.row.bytes());
    const int head = args.first_relayed(node, from.channel) + index;
    for (int local = 0; local < args.topology().ranks_per_node; ++local) {
        if (!is_marked(args, from, index, local)) continue;
        const Queue to = nvl_queue(args, node, local, from.channel);
        int place = static_cast<int>(state_of(args, to, true).moved);
        for (int i = 0; i < before; ++i) place += is_marked(args, from, done + i, local) ? 1 : 0;
        args.common.transport.put_row(to.peer, slot_of(args, to, true, place), copy, to.channel);
        if (args.fresh && elect_one())
            args.nvl_head[static_cast<int64_t>(head) * args.topology().ranks_per_node + local] =
                place;
    }
}

// ---- 4: to the caller's tensors

// Warp. `number` of the row in the outputs.
EP_DEVICE void deliver_row(const NormalDispatchArgs& args,
                           RowCopy& copy,
                           int source,
                           const std::byte* slot,
                           int64_t number) {
    const NormalRow& row = args.row;
    copy.take(slot, row.row_bytes);
    const std::byte* pack = slot + row.pack_offset();
    const auto* scales = reinterpret_cast<const uint32_t*>(pack + row.scales_offset());
    for (int i = lane_id(); i < row.num_scales; i += kWarpSize)
        args.recv_scales[number * row.num_scales + i] = scales[i];
    const auto* experts = reinterpret_cast<const int32_t*>(pack + row.experts_offset());
    const auto* weights = reinterpret_cast<const float*>(pack + row.weights_offset());
    const int num_local_experts = args.num_experts / args.common.num_ranks();
    const int first = args.common.rank() * num_local_experts;
    for (int k = lane_id(); k < row.num_topk; k += kWarpSize) {
        const bool is_here = experts[k] >= first && experts[k] < first + num_local_experts;
        args.recv_topk_idx[number * row.num_topk + k] = is_here ? experts[k] - first : -1;
        args.recv_topk_weights[number * row.num_topk + k] = is_here ? weights[k] : 0.0f;
    }
    copy.give(args.recv_x + number * static_cast<int64_t>(row.row_bytes));
    if (!elect_one() || !args.fresh) return;
    const auto token = static_cast<int>(reinterpret_cast<const RowProof*>(pack)->encoding_or_token);
    if (args.recv_src_idx != nullptr) args.recv_src_idx[number] = token;
    if (args.recv_src_meta != nullptr) {
        args.recv_src_meta[2 * number] = args.topology().node_of(source);
        args.recv_src_meta[2 * number + 1] = token;
    }
}

// Block. Whether the tensors hold what arrives.
EP_DEVICE bool has_room(const NormalDispatchArgs& args, const OpenOperation& open) {
    if (rows_lie_within(args, args.num_recv_rows, args.num_relay_rows)) return true;
    const FailureReason reason = args.fresh ? FailureReason::kRoom : FailureReason::kHandle;
    if (elect_one()) record_failure(args.common, open, reason, args.common.rank());
    return false;
}

// ---- the tasks of a rank

struct DispatchTasks {
    const NormalDispatchArgs& args;
    const OpenOperation& open;
    RowCopy& copy;

    enum Kind { kToNode, kToRank, kRelay, kReceive };
    struct Task {
        Kind kind;
        int index;  // kToNode, kRelay: node; kToRank: local rank; kReceive: source
        int channel;
    };

    EP_HOST_DEVICE static int count(const Topology& topology, int num_channels) {
        const int others = topology.num_nodes() - 1;
        return (2 * others + topology.ranks_per_node + topology.num_ranks) * num_channels;
    }
    EP_DEVICE int count() const { return count(args.topology(), args.num_channels); }
    EP_DEVICE Task task(int number) const {
        const Topology& topology = args.topology();
        const int others = topology.num_nodes() - 1;
        const int channel = number % args.num_channels;
        int index = number / args.num_channels;
        // The own node comes last; the next one first, so that not all send to the same one.
        const auto other = [&](int i) { return (args.node() + 1 + i) % topology.num_nodes(); };
        if (index < others) return {kToNode, other(index), channel};
        index -= others;
        if (index < topology.ranks_per_node) {
            return {kToRank, (args.local_rank() + index) % topology.ranks_per_node, channel};
        }
        index -= topology.ranks_per_node;
        if (index < others) return {kRelay, other(index), channel};
        return {kReceive, index - others, channel};
    }

    EP_DEVICE Queue inbound(const Task& task) const {
        const Topology& topology = args.topology();
        return task.kind == kRelay ? rdma_queue(args, task.index, task.channel)
                                   : nvl_queue(args,
                                               topology.node_of(task.index),
                                               topology.local_of(task.index),
                                               task.channel);
    }
    EP_DEVICE Queue outbound(const Task& task) const {
        return task.kind == kToNode ? rdma_queue(args, task.index, task.channel)
                                    : nvl_queue(args, args.node(), task.index, task.channel);
    }
    EP_DEVICE bool is_sender(const Task& task) const { return task.kind <= kToRank; }
    EP_DEVICE int destination(const Task& task) const {
        return args.topology().rank_of(args.node(), task.index);
    }
    // Rows of a task.
    EP_DEVICE int total(const Task& task) const {
        switch (task.kind) {
            case kToNode:
                return args.to_node(task.index, task.channel);
            case kToRank:
                return args.to_rank(destination(task), task.channel);
            case kRelay:
                return args.relayed(task.index, task.channel);
            default:
                return args.from_rank(task.index, task.channel);
        }
    }
    EP_DEVICE QueueState& state(const Task& task) const {
        return is_sender(task) ? state_of(args, outbound(task), true)
                               : state_of(args, inbound(task), false);
    }

    EP_DEVICE bool is_done(int number) const {
        const Task task = this->task(number);
        return state(task).moved == static_cast<uint32_t>(total(task));
    }
    EP_DEVICE Blocker blocked_by(int number) const {
        const Task task = this->task(number);
        if (is_sender(task)) return {outbound(task).peer, Owed::kSlots};
        const Queue from = inbound(task);
        const QueueState& inward = state_of(args, from, false);
        const Blocker source{from.peer, Owed::kRows};
        if (task.kind != kRelay || inward.seen == inward.moved) return source;
        for (int local = 0; local < args.topology().ranks_per_node; ++local) {
            const Queue to = nvl_queue(args, task.index, local, task.channel);
            const QueueState& outward = state_of(args, to, true);
            if (outward.moved - outward.seen == static_cast<uint32_t>(to.slots))
                return {to.peer, Owed::kSlots};
        }
        return source;
    }
    EP_DEVICE int ready(int number, int* tokens) const {
        const Task task = this->task(number);
        const int rows = total(task);
        if (!is_sender(task)) {
            const Queue from = inbound(task);
            const int filled = filled_slots(args, open, from, rows);
            if (task.kind == kReceive || filled == 0) return rows_of_step(kMaxStep, filled);
            const int most = rows_of_step(args.num_max_nvl_chunked_send_tokens, filled);
            if (args.row.verified && !marks_hold(from, most)) return 0;
            return relayable(args, open, task.index, from, most);
        }
        const Queue to = outbound(task);
        QueueState& state = state_of(args, to, true);
        const int chunk = task.kind == kToNode ? args.num_max_rdma_chunked_send_tokens
                                               : args.num_max_nvl_chunked_send_tokens;
        const int left = rows - static_cast<int>(state.moved);
        const int free = free_slots(args, open, to, rows_of_step(chunk, left));
        if (free == 0) return 0;
        const TokenRange range = TokenRange::of(task.channel, args.num_channels, args.num_tokens);
        const auto is_for = [&](int token) {
            return task.kind == kToNode ? args.local_ranks(token, task.index) != 0
                                        : args.is_token_for(token, destination(task));
        };
        const int found = find_tokens(range, state.cursor, free, tokens, is_for);
        if (found == 0)
            record_failure(args.common, open, FailureReason::kHandle, args.common.rank());
        return found;
    }
    EP_DEVICE void find_surplus(int number) const {
        const Task task = this->task(number);
        if (!is_sender(task)) refuse_surplus(args, open, inbound(task), total(task));
    }

    EP_DEVICE void move(int number, int rows, const int* tokens) const {
        const Task task = this->task(number);
        const int done = static_cast<int>(state(task).moved);
        const Queue queue = is_sender(task) ? outbound(task) : inbound(task);
        for (int i = warp_id(); i < rows; i += num_warps()) {
            if (task.kind == kReceive) {
                const int64_t number = args.first_row(task.index, task.channel) + done + i;
                deliver_row(args,
                            copy,
                            task.index,
                            args.common.transport.local(slot_of(args, queue, false, done + i)),
                            number);
                const std::byte* data =
                    args.recv_x + number * static_cast<int64_t>(args.row.row_bytes);
                if (!args.row.verified) continue;
                copy.finish();
                verify(queue, done + i, task.index, data);
            } else if (task.kind == kRelay) {
                relay_row(args, copy, task.index, queue, done, i);
                if (args.row.verified)
                    verify(queue, done + i, queue.peer, relayed_row(args, queue, done + i));
            } else if (task.kind == kToNode) {
                put_marked_token(args, open, queue, copy, task.index, done + i, tokens[i]);
                if (args.fresh && elect_one())
                    args.node_head[tokens[i] * args.topology().num_nodes() + task.index] = done + i;
            } else {
                put_token(args, queue, copy, slot_of(args, queue, true, done + i), tokens[i]);
                if (args.fresh && elect_one())
                    args.nvl_head[tokens[i] * args.topology().ranks_per_node + task.index] =
                        done + i;
            }
        }
    }

    EP_DEVICE void verify(const Queue& from, int index, int source, const std::byte* data) const {
        verify_slot(args, open, from, index, {source, source}, data);
    }

    // One thread. Whether the next rows are for whom their marks say; a rank for which none is may give no slot
    // back, so this is known before slots are looked for.
    EP_DEVICE bool marks_hold(const Queue& from, int rows) const {
        const int done = static_cast<int>(state_of(args, from, false).moved);
        for (int i = done; i < done + rows; ++i) {
            const RelayMark& mark = mark_in(args, from, i);
            const uint32_t token = proof_in(args, from, i).encoding_or_token;
            if (mark.proof == proof_of_mark(mark, open.op, token)) continue;
            const RowPlace place{token, from.peer, from.peer, from.hop};
            record_failure(args.common, open, FailureReason::kCorrupt, from.peer, place);
            return false;
        }
        return true;
    }

    EP_DEVICE void tell(int number, int rows, const int* tokens) const {
        const Task task = this->task(number);
        if (is_sender(task)) {
            const Queue to = outbound(task);
            // The producer goes on behind the last token that it has sent.
            const int begin =
                TokenRange::of(task.channel, args.num_channels, args.num_tokens).begin;
            state_of(args, to, true).cursor = tokens[rows - 1] + 1 - begin;
            const uint64_t now = now_ns();
            max_relaxed<Scope::kDevice>(&args.common.workspace->sent_ns, now);
            const bool is_last =
                state_of(args, to, true).moved + rows == static_cast<uint32_t>(total(task));
            tell_filled(args, open, to, rows, is_last, now);
            return;
        }
        const Queue from = inbound(task);
        if (args.row.verified)
            note_token(args, from, static_cast<int>(state_of(args, from, false).moved) + rows - 1);
        if (task.kind == kRelay) tell_relayed(task.index, from, rows);
        give_back(args, open, from, rows, total(task));
    }
    // One thread. The rows of a step are in the queues of the local ranks.
    EP_DEVICE void tell_relayed(int node, const Queue& from, int rows) const {
        const int done = static_cast<int>(state_of(args, from, false).moved);
        for (int local = 0; local < args.topology().ranks_per_node; ++local) {
            int passed = 0;
            bool is_last = false;
            uint64_t issued_ns = 0;
            for (int i = 0; i < rows; ++i) {
                const RelayMark& mark = mark_in(args, from, done + i);
                if (!(mark.local_ranks >> local & 1)) continue;
                ++passed;
                is_last = (mark.last_of >> local & 1) != 0;
                issued_ns = mark.issued_ns;
            }
            if (passed == 0) continue;
            const Queue to = nvl_queue(args, node, local, from.channel);
            tell_filled(args, open, to, passed, is_last, issued_ns);
        }
    }
};

// Block. What the operation adds to the counters of its hops.
EP_DEVICE void count_dispatch(const NormalDispatchArgs& args, const OpenOperation& open) {
    const Topology& topology = args.topology();
    count_hop(args, open, args.relay_counters, nullptr, [&](int source, QueuesSeen& seen) {
        const int node = topology.node_of(source);
        if (node == args.node() || topology.local_of(source) != args.local_rank()) return false;
        for (int channel = 0; channel < args.num_channels; ++channel)
            seen.add(args, rdma_queue(args, node, channel));
        return true;
    });
    const auto received = [&](int source, QueuesSeen& seen) {
        seen.is_relayed = topology.node_of(source) != args.node();
        for (int channel = 0; channel < args.num_channels; ++channel) {
            seen.add(args,
                     nvl_queue(args, topology.node_of(source), topology.local_of(source), channel));
        }
        return true;
    };
    count_hop(args, open, args.common.counters, args.common.wait_stats, received);
}

EP_KERNEL void normal_dispatch(const EP_GRID_CONSTANT NormalDispatchArgs args) {
    const OperationArgs& common = args.common;
    const OpenOperation open = current_operation(common);
    const TaskShared shared(DispatchTasks::count(args.topology(), args.num_channels));
    RowCopy copy = row_copy_of_warp(args, shared.rest);
    const DispatchTasks tasks{args, open, copy};
    const bool may_send = begin_normal(args, open, args.fresh);
    if (args.abandon) {
        // What normal_notify() has found stays as it is.
        if (may_send && elect_one())
            record_failure(common, open, FailureReason::kAbandoned, common.rank());
    } else if (may_send && has_room(args, open)) {
        run_tasks(args, open, tasks, shared);
    }
    const bool succeeded = close_normal(args, open, [&] { count_dispatch(args, open); });
    if (succeeded && args.fresh) *args.dispatch_op = open.op;
}

}  // namespace ep
