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

#include "kernels/normal/operation.cuh"
#include "kernels/normal/verify.cuh"

namespace ep {

struct NormalDispatchArgs : NormalArgs, NormalDispatchTensors, NormalDispatchFlags {};

// Shared memory of a block for the steps of its teams.
struct NormalDispatchShared {
    TaskShared tasks;
    int* tokens;       // [kMaxStep], of a sender's step
    RelayMark* marks;  // [kMaxStep], of a step to or from another node
    // [ranks_per_node], of a relay's step: bit i, if row i goes to the local rank; and where in its ring the first of
    // them will stand.
    uint32_t* passed;
    uint32_t* places;
    SharedArena rest;

    EP_DEVICE NormalDispatchShared(const Team& team, int most_tasks, int ranks_per_node)
        : tasks(team, most_tasks), rest(tasks.rest) {
        tokens = rest.take<int>(num_warps() * kMaxStep) + team.place() * kMaxStep;
        marks = rest.take<RelayMark>(num_warps() * kMaxStep) + team.place() * kMaxStep;
        passed = rest.take<uint32_t>(num_warps() * ranks_per_node) + team.place() * ranks_per_node;
        places = rest.take<uint32_t>(num_warps() * ranks_per_node) + team.place() * ranks_per_node;
    }
    EP_HOST_DEVICE static size_t bytes(int most_tasks, int ranks_per_node, int warps) {
        const size_t of_step = kMaxStep * (sizeof(int) + sizeof(RelayMark));
        return TaskShared::bytes(most_tasks, warps) + alignof(RelayMark) +
               warps * (of_step + 2 * ranks_per_node * sizeof(uint32_t));
    }
};

// ---- 1, 2: from the caller's rows

// Leader. The next tokens of a channel that `is_for` names, up to `count`; how many there are. Fewer only if the
// handle contradicts itself.
template <class IsFor>
EP_DEVICE int find_tokens(
    const TokenRange& range, int cursor, int count, int* tokens, IsFor is_for) {
    int found = 0;
    for (int token = range.begin + cursor; found < count && token < range.end;
         token += kLeaderLanes) {
        const int mine = token + lane_id();
        const bool is_found = mine < range.end && is_for(mine);
        const uint32_t lanes = leader_ballot(is_found);
        const int place = found + popcount(lanes & bits_below(lane_id()));
        if (is_found && place < count) tokens[place] = mine;
        found += popcount(lanes);
    }
    return found < count ? found : count;
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

// One thread. Whom a token is for on a node. When it was handed over is not known yet.
EP_DEVICE RelayMark
mark_of(const NormalArgs& args, const OpenOperation& open, int node, int channel, int token) {
    const TokenRange range = args.tokens_of(channel);
    const uint64_t local_ranks = args.local_ranks(token, node);
    uint64_t last_of = local_ranks;
    for (int later = token + 1; later < range.end && last_of != 0; ++later)
        last_of &= ~args.local_ranks(later, node);
    RelayMark mark{local_ranks, last_of, 0, 0};
    if (args.row.verified) mark.proof = proof_of_mark(mark, open.op, static_cast<uint32_t>(token));
    return mark;
}

// Warp. Puts a row and its mark into the memory of another node.
EP_DEVICE void put_marked_token(const NormalDispatchArgs& args,
                                const Queue& queue,
                                RowCopy& copy,
                                int index,
                                int token,
                                const RelayMark& mark) {
    const size_t slot = slot_of(args, queue, true, index);
    put_token(args, queue, copy, slot, token);
    if (!elect_one()) return;
    const auto put = [&](size_t field, uint64_t value) {
        args.common.transport.put_word(
            queue.peer, slot + args.row.relay_offset() + field, value, queue.channel);
    };
    put(offsetof(RelayMark, local_ranks), mark.local_ranks);
    put(offsetof(RelayMark, last_of), mark.last_of);
    put(offsetof(RelayMark, issued_ns), now_ns());
    if (args.row.verified) put(offsetof(RelayMark, proof), mark.proof);
}

// Warp. Prepares a row and its mark for put_staged().
EP_DEVICE void stage_marked_token(
    const NormalDispatchArgs& args, const Queue& queue, int index, int token, RelayMark mark) {
    const NormalRow& row = args.row;
    std::byte* staged = args.common.transport.local(staging_of(args, queue, index));
    copy_warp(staged, args.x + token * row.row_bytes, row.row_bytes);
    copy_warp(staged + row.pack_offset(), args.packs + token * row.pack_bytes(), row.pack_bytes());
    if (!elect_one()) return;
    mark.issued_ns = now_ns();
    *reinterpret_cast<RelayMark*>(staged + row.relay_offset()) = mark;
}

// ---- 3: from a queue of another node

EP_DEVICE const std::byte* relayed_row(const NormalArgs& args, const Queue& from, int index) {
    return args.common.transport.local(slot_of(args, from, false, index));
}

EP_DEVICE const RelayMark& mark_in(const NormalArgs& args, const Queue& from, int index) {
    return *reinterpret_cast<const RelayMark*>(relayed_row(args, from, index) +
                                               args.row.relay_offset());
}

// Warp. Passes one row of a step on to the local ranks it is marked for. At all of them the queue has the same number.
EP_DEVICE void relay_row(const NormalDispatchArgs& args,
                         const NormalDispatchShared& shared,
                         RowCopy& copy,
                         int node,
                         int channel,
                         int done,
                         int i) {
    const Topology& topology = args.topology();
    const Queue from = rdma_queue(args, node, channel);
    copy.take(relayed_row(args, from, done + i), args.row.bytes());
    const size_t first = slot_of(args, nvl_queue(args, node, 0, channel), true, 0);
    const size_t bytes = slot_bytes(args, Hop::kNvl);
    for (int local = 0; local < topology.ranks_per_node; ++local) {
        const uint32_t passed = shared.passed[local];
        if ((passed >> i & 1) == 0) continue;
        const int place = static_cast<int>(shared.places[local]) + popcount(passed & bits_below(i));
        args.common.transport.put_row(topology.rank_of(args.node, local),
                                      first + wrapped(place, args.nvl_slots) * bytes,
                                      copy,
                                      channel);
    }
}

// Warp. Keeps the experts of a relayed row for the sums of combines; `number` of it among those that are relayed.
EP_DEVICE void keep_experts(const NormalDispatchArgs& args, const std::byte* slot, int64_t number) {
    const NormalRow& row = args.row;
    const auto* experts =
        reinterpret_cast<const int32_t*>(slot + row.pack_offset() + row.experts_offset());
    for (int k = lane_id(); k < row.num_topk; k += kWarpSize)
        args.relay_topk_idx[number * row.num_topk + k] = experts[k];
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
    const NormalDispatchShared& shared;
    RowCopy& copy;

    enum Kind { kToNode, kToRank, kRelay, kReceive };

    EP_HOST_DEVICE static int count(const Topology& topology, int num_channels) {
        const int others = topology.num_nodes - 1;
        return (2 * others + topology.ranks_per_node + topology.num_ranks) * num_channels;
    }
    EP_HOST_DEVICE static int most_tasks(const Topology& topology,
                                         int num_channels,
                                         int blocks,
                                         int warps) {
        return tasks_of_team(count(topology, num_channels), blocks * warps);
    }
    EP_DEVICE int count() const { return count(args.topology(), args.num_channels); }
    EP_DEVICE Task task(int number) const {
        const Topology& topology = args.topology();
        const int others = topology.num_nodes - 1;
        const int channel = number % args.num_channels;
        int index = number / args.num_channels;
        // The own node comes last; the next one first, so that not all send to the same one.
        const auto other = [&](int i) { return wrapped(args.node + 1 + i, topology.num_nodes); };
        if (index < others) return {kToNode, other(index), 0, channel};
        index -= others;
        if (index < topology.ranks_per_node) {
            const int local = wrapped(args.local_rank + index, topology.ranks_per_node);
            return {kToRank, args.node, local, channel};
        }
        index -= topology.ranks_per_node;
        if (index < others) return {kRelay, other(index), 0, channel};
        const int source = wrapped(args.common.rank() + index - others, topology.num_ranks);
        return {kReceive, topology.node_of(source), topology.local_of(source), channel};
    }

    EP_DEVICE Queue inbound(const Task& task) const {
        return task.kind == kRelay ? rdma_queue(args, task.node, task.channel)
                                   : nvl_queue(args, task.node, task.local, task.channel);
    }
    EP_DEVICE Queue outbound(const Task& task) const {
        return task.kind == kToNode ? rdma_queue(args, task.node, task.channel)
                                    : nvl_queue(args, task.node, task.local, task.channel);
    }
    EP_DEVICE bool is_sender(const Task& task) const { return task.kind <= kToRank; }
    // Destination of kToRank, source of kReceive.
    EP_DEVICE int rank(const Task& task) const {
        return args.topology().rank_of(task.node, task.local);
    }
    // Rows of a task.
    EP_DEVICE int total(const Task& task) const {
        switch (task.kind) {
            case kToNode:
                return args.to_node(task.node, task.channel);
            case kToRank:
                return args.to_rank(rank(task), task.channel);
            case kRelay:
                return args.relayed(task.node, task.channel);
            default:
                return args.from_rank(rank(task), task.channel);
        }
    }
    EP_DEVICE QueueState& state(const Task& task) const {
        return is_sender(task) ? state_of(args, outbound(task), true)
                               : state_of(args, inbound(task), false);
    }

    EP_DEVICE bool is_done(const Task& task) const {
        return state(task).moved == static_cast<uint32_t>(total(task));
    }
    EP_DEVICE Blocker blocked_by(const Task& task) const {
        if (is_sender(task)) return {outbound(task).peer, Owed::kSlots};
        const Queue from = inbound(task);
        const QueueState& inward = state_of(args, from, false);
        const Blocker source{from.peer, Owed::kRows};
        if (task.kind != kRelay || inward.seen == inward.moved) return source;
        for (int local = 0; local < args.topology().ranks_per_node; ++local) {
            const Queue to = nvl_queue(args, task.node, local, task.channel);
            const QueueState& outward = state_of(args, to, true);
            if (outward.moved - outward.seen == static_cast<uint32_t>(to.slots))
                return {to.peer, Owed::kSlots};
        }
        return source;
    }
    EP_DEVICE int movable(const Task& task) const {
        const int rows = total(task);
        if (task.kind == kReceive || task.kind == kRelay) {
            const int filled = filled_slots(args, open, inbound(task), rows);
            return rows_of_step(
                task.kind == kRelay ? args.num_max_nvl_chunked_send_tokens : kMaxStep, filled);
        }
        const Queue to = outbound(task);
        const int chunk = task.kind == kToNode ? args.num_max_rdma_chunked_send_tokens
                                               : args.num_max_nvl_chunked_send_tokens;
        const int left = rows - static_cast<int>(state_of(args, to, true).moved);
        return free_slots(args, open, to, rows_of_step(chunk, left));
    }
    EP_DEVICE int prepare(const Task& task, int rows) const {
        if (task.kind == kReceive) return rows;
        return task.kind == kRelay ? prepare_relay(task, rows) : prepare_sender(task, rows);
    }
    // Leader. Which tokens go, where they will stand, and whom on a node they are for.
    EP_DEVICE int prepare_sender(const Task& task, int rows) const {
        const QueueState& state = this->state(task);
        const TokenRange range = args.tokens_of(task.channel);
        const auto is_for = [&](int token) {
            return task.kind == kToNode ? args.local_ranks(token, task.node) != 0
                                        : args.is_token_for(token, rank(task));
        };
        const int found = find_tokens(range, state.cursor, rows, shared.tokens, is_for);
        if (found == 0 && elect_one())
            record_failure(args.common, open, FailureReason::kHandle, args.common.rank());
        leader_sync();
        const auto done = static_cast<int>(state.moved);
        leader_for(found, [&](int i) {
            const int token = shared.tokens[i];
            if (task.kind == kToNode) {
                shared.marks[i] = mark_of(args, open, task.node, task.channel, token);
                if (args.fresh)
                    args.node_head[token * args.topology().num_nodes + task.node] = done + i;
            } else if (args.fresh) {
                args.nvl_head[token * args.topology().ranks_per_node + task.local] = done + i;
            }
        });
        return found;
    }
    // Leader. How many of the rows that have come can be passed on: there must be slots in every queue. And where
    // they will stand in each.
    EP_DEVICE int prepare_relay(const Task& task, int rows) const {
        const Queue from = inbound(task);
        const auto done = static_cast<int>(state_of(args, from, false).moved);
        bool holds = true;
        leader_for(rows, [&](int i) {
            shared.marks[i] = mark_in(args, from, done + i);
            holds = holds && (!args.row.verified || mark_holds(from, done + i, shared.marks[i]));
        });
        if (leader_any(!holds)) return 0;
        leader_sync();
        const int ranks_per_node = args.topology().ranks_per_node;
        int most = rows;
        leader_for(ranks_per_node, [&](int local) {
            uint32_t passed = 0;
            for (int i = 0; i < rows; ++i)
                passed |= static_cast<uint32_t>(shared.marks[i].local_ranks >> local & 1) << i;
            shared.passed[local] = passed;
            if (passed == 0) return;
            const Queue to = nvl_queue(args, task.node, local, task.channel);
            int free = free_slots(args, open, to, popcount(passed));
            shared.places[local] = state_of(args, to, true).moved;
            for (; passed != 0 && free > 0; --free) passed &= passed - 1;
            if (passed != 0 && lowest_bit(passed) < most) most = lowest_bit(passed);
        });
        most = leader_min(most);
        const uint32_t kept = bits_below(most);
        const int first = args.first_relayed(task.node, task.channel) + done;
        leader_for(ranks_per_node, [&](int local) {
            const uint32_t passed = shared.passed[local] &= kept;
            if (passed == 0) return;
            auto place = static_cast<int>(shared.places[local]);
            shared.places[local] %= args.nvl_slots;
            if (!args.fresh) return;
            for (uint32_t left = passed; left != 0; left &= left - 1) {
                const int64_t head = first + lowest_bit(left);
                args.nvl_head[head * ranks_per_node + local] = place++;
            }
        });
        return most;
    }
    EP_DEVICE void find_surplus(const Task& task) const {
        if (!is_sender(task)) refuse_surplus(args, open, inbound(task), total(task));
    }

    EP_DEVICE void move(const Task& task, int rows, const Team& team) const {
        const int done = static_cast<int>(state(task).moved);
        const Queue queue = is_sender(task) ? outbound(task) : inbound(task);
        const bool is_staged = task.kind == kToNode && !is_direct(args, queue);
        for (int i = team.warp; i < rows; i += team.warps) {
            if (task.kind == kReceive) {
                const int64_t number = args.first_row(rank(task), task.channel) + done + i;
                deliver_row(args,
                            copy,
                            rank(task),
                            args.common.transport.local(slot_of(args, queue, false, done + i)),
                            number);
                const std::byte* data =
                    args.recv_x + number * static_cast<int64_t>(args.row.row_bytes);
                if (!args.row.verified) continue;
                copy.finish();
                verify(queue, done + i, rank(task), data);
            } else if (task.kind == kRelay) {
                relay_row(args, shared, copy, task.node, task.channel, done, i);
                if (args.row.verified)
                    verify(queue, done + i, queue.peer, relayed_row(args, queue, done + i));
            } else if (is_staged) {
                stage_marked_token(args, queue, done + i, shared.tokens[i], shared.marks[i]);
            } else if (task.kind == kToNode) {
                put_marked_token(args, queue, copy, done + i, shared.tokens[i], shared.marks[i]);
            } else {
                put_token(
                    args, queue, copy, slot_of(args, queue, true, done + i), shared.tokens[i]);
            }
        }
        if (task.kind == kRelay && args.relay_topk_idx != nullptr) {
            const int first = args.first_relayed(task.node, task.channel) - args.num_tokens + done;
            for (int i = team.warp; i < rows; i += team.warps)
                keep_experts(args, relayed_row(args, queue, done + i), first + i);
        }
        const size_t bytes = args.row.relay_offset() + sizeof(RelayMark);
        if (is_staged) put_staged(args, queue, done, rows, bytes, team);
    }

    EP_DEVICE void verify(const Queue& from, int index, int source, const std::byte* data) const {
        verify_slot(args, open, from, index, {source, source}, data);
    }

    // One thread. Whether a row is for whom its mark says; a rank for which none is may give no slot back, so this is
    // known before slots are looked for.
    EP_DEVICE bool mark_holds(const Queue& from, int index, const RelayMark& mark) const {
        const uint32_t token = proof_in(args, from, index).encoding_or_token;
        if (mark.proof == proof_of_mark(mark, open.op, token)) return true;
        const RowPlace place{token, from.peer, from.peer, from.hop};
        record_failure(args.common, open, FailureReason::kCorrupt, from.peer, place);
        return false;
    }

    EP_DEVICE void tell(const Task& task, int rows) const {
        if (task.kind == kRelay) tell_relayed(task.node, inbound(task));
        if (!elect_one()) return;
        if (is_sender(task)) {
            const Queue to = outbound(task);
            // The producer goes on behind the last token that it has sent.
            const int begin = args.tokens_of(task.channel).begin;
            state_of(args, to, true).cursor = shared.tokens[rows - 1] + 1 - begin;
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
        give_back(args, open, from, rows, total(task));
    }
    // Leader. The rows of a step are in the queues of the local ranks.
    EP_DEVICE void tell_relayed(int node, const Queue& from) const {
        leader_for(args.topology().ranks_per_node, [&](int local) {
            const uint32_t passed = shared.passed[local];
            if (passed == 0) return;
            const RelayMark& last = shared.marks[highest_bit(passed)];
            tell_filled(args,
                        open,
                        nvl_queue(args, node, local, from.channel),
                        popcount(passed),
                        (last.last_of >> local & 1) != 0,
                        last.issued_ns);
        });
    }
};

// Block. What the operation adds to the counters of its hops.
EP_DEVICE void count_dispatch(const NormalDispatchArgs& args, const OpenOperation& open) {
    const Topology& topology = args.topology();
    count_hop(args, open, args.relay_counters, nullptr, [&](int source, QueuesSeen& seen) {
        const int node = topology.node_of(source);
        if (node == args.node || topology.local_of(source) != args.local_rank) return false;
        for (int channel = 0; channel < args.num_channels; ++channel)
            seen.add(args, rdma_queue(args, node, channel));
        return true;
    });
    const auto received = [&](int source, QueuesSeen& seen) {
        seen.is_relayed = topology.node_of(source) != args.node;
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
    const Share share{0,
                      DispatchTasks::count(args.topology(), args.num_channels),
                      Team::of_warp(block_index(), num_blocks())};
    const NormalDispatchShared shared(
        share.team, tasks_of_team(share.end, share.team.count), args.topology().ranks_per_node);
    RowCopy copy = row_copy_of_warp(args.row_piece_bytes, shared.rest);
    const DispatchTasks tasks{args, open, shared, copy};
    const bool may_send = begin_normal(args, open, args.fresh);
    if (args.abandon) {
        // What normal_notify() has found stays as it is.
        if (may_send && elect_one())
            record_failure(common, open, FailureReason::kAbandoned, common.rank());
    } else if (may_send && has_room(args, open)) {
        run_tasks(args, open, tasks, share, shared.tasks);
    }
    const bool succeeded = close_normal(args, open, [&] { count_dispatch(args, open); });
    if (succeeded && args.fresh) *args.dispatch_op = open.op;
}

}  // namespace ep
