// Normal combine: the rows that dispatch delivered go back, and each token's are added up.
//
//   0 Every rank is told that this one has entered, and waits for all. The counts are those of the handle.
//   Then, at the same time (tasks.cuh), for each channel:
//   1 return        Rows go to the rank of their node from which they came: the source, or its gateway.
//   2 relay         The gateway adds up the rows of its node for a token, in fp32 by rank, and sends the sum,
//                   rounded, to the source.
//   3 reduce        The source adds up, in fp32: the biases, then node by node the sum of that node or, of its
//                   own node, the rows by rank. One rounding.
//   The caller may order both sums by the top-k columns of their token: ranks, and nodes, by the last one that names an
//   expert of theirs. Then the sum of the own node is rounded before it is added, as those of the others are.
//   Rows of a queue come in the order of tokens; the handle tells which tokens have one.
#pragma once

#include "kernels/normal/operation.cuh"
#include "kernels/normal/row_sum.cuh"
#include "kernels/normal/verify.cuh"

namespace ep {

struct NormalCombineArgs : NormalArgs, NormalCombineTensors {};

// Of a sum: two biases, the ranks of a node and the other nodes.
EP_HOST_DEVICE int most_rows(const Topology& topology) {
    return 2 + topology.ranks_per_node + topology.num_nodes - 1;
}

// Shared memory of a block: beside that for tasks, the rows of each sum of a step.
struct NormalCombineShared {
    TaskShared tasks;
    RowList::Entry* lists;  // [kMaxStep, RowList::size(most_rows())]
    SharedArena rest;

    EP_DEVICE NormalCombineShared(const Team& team, int most_tasks, const Topology& topology)
        : tasks(team, most_tasks), rest(tasks.rest) {
        lists = rest.take<RowList::Entry>(kMaxStep * RowList::size(most_rows(topology)));
    }
    EP_HOST_DEVICE static size_t bytes(int most_tasks, const Topology& topology, int warps) {
        return TaskShared::bytes(most_tasks, warps) + alignof(RowList::Entry) +
               kMaxStep * RowList::size(most_rows(topology)) * sizeof(RowList::Entry);
    }
};

// Warp. Puts a row and its pack, which holds the weights.
EP_DEVICE void put_row_back(
    const NormalCombineArgs& args, const Queue& to, RowCopy& copy, int index, int64_t number) {
    const NormalRow& row = args.row;
    const auto* x = reinterpret_cast<const std::byte*>(args.x);
    const std::byte* pack = args.packs + number * static_cast<int64_t>(row.pack_bytes());
    put_row_and_pack(args,
                     to,
                     copy,
                     slot_of(args, to, true, index),
                     x + number * static_cast<int64_t>(row.row_bytes),
                     row.returns_packs() ? pack : nullptr);
}

struct CombineTasks {
    const NormalCombineArgs& args;
    const OpenOperation& open;
    RowList::Entry* lists;  // see NormalCombineShared
    RowCopy& copy;

    enum Kind { kReturn, kRelay, kReduce };

    EP_HOST_DEVICE static int num_returns(const Topology& topology, int num_channels) {
        return topology.num_ranks * num_channels;
    }
    EP_HOST_DEVICE static int count(const Topology& topology, int num_channels) {
        return num_returns(topology, num_channels) + topology.num_nodes * num_channels;
    }
    // Sums read many rows for a token, so a block works on each; returns go to many queues, a warp for each. With
    // more than one block half of them do either.
    EP_DEVICE static Share share(const Topology& topology, int num_channels) {
        const int returns = num_returns(topology, num_channels);
        const int all = count(topology, num_channels);
        const int half = num_blocks() / 2;
        if (half == 0) return {0, all, Team::of_block(0, 1)};
        if (block_index() < half) return {returns, all, Team::of_block(block_index(), half)};
        return {0, returns, Team::of_warp(block_index() - half, num_blocks() - half)};
    }
    EP_HOST_DEVICE static int most_tasks(const Topology& topology,
                                         int num_channels,
                                         int blocks,
                                         int warps) {
        const int returns = num_returns(topology, num_channels);
        const int all = count(topology, num_channels);
        if (blocks == 1) return all;
        const int of_returns = tasks_of_team(returns, (blocks - blocks / 2) * warps);
        const int of_sums = tasks_of_team(all - returns, blocks / 2);
        return of_returns > of_sums ? of_returns : of_sums;
    }
    EP_DEVICE int count() const { return count(args.topology(), args.num_channels); }
    EP_DEVICE Task task(int number) const {
        const Topology& topology = args.topology();
        const int channel = number % args.num_channels;
        const int index = number / args.num_channels;
        if (index < topology.num_ranks) {
            const int source = wrapped(args.common.rank() + index, topology.num_ranks);
            return {kReturn, topology.node_of(source), topology.local_of(source), channel};
        }
        const int node = wrapped(args.node + 1 + index - topology.num_ranks, topology.num_nodes);
        return {node == args.node ? kReduce : kRelay, node, 0, channel};
    }

    EP_DEVICE Queue outbound(const Task& task) const {
        return task.kind == kReturn ? nvl_queue(args, task.node, task.local, task.channel)
                                    : rdma_queue(args, task.node, task.channel);
    }
    // Source of kReturn.
    EP_DEVICE int rank(const Task& task) const {
        return args.topology().rank_of(task.node, task.local);
    }
    // Rows of a task; of kReduce: tokens.
    EP_DEVICE int total(const Task& task) const {
        if (task.kind == kReturn) return args.from_rank(rank(task), task.channel);
        if (task.kind == kRelay) return args.relayed(task.node, task.channel);
        const TokenRange range = args.tokens_of(task.channel);
        return range.end - range.begin;
    }
    // Its cursor tells how many have been done. A reduction has no queue of its own to a node; it uses the
    // state of the one that would lead to the own node.
    EP_DEVICE QueueState& state(const Task& task) const {
        return state_of(args, outbound(task), true);
    }

    // The queues that a task empties, in the order of its sums: of the ranks of a node; of a reduction also of the
    // other nodes, before and behind the own one.
    EP_DEVICE int num_queues(const Task& task) const {
        const Topology& topology = args.topology();
        return topology.ranks_per_node + (task.kind == kReduce ? topology.num_nodes - 1 : 0);
    }
    struct Place {
        bool is_local;
        int index;  // local rank, or node
    };
    EP_DEVICE Place place_of(const Task& task, int number) const {
        const int ranks_per_node = args.topology().ranks_per_node;
        const int before = task.kind == kReduce ? args.node : 0;
        if (number < before) return {false, number};
        if (number < before + ranks_per_node) return {true, number - before};
        return {false, number - ranks_per_node + 1};
    }
    EP_DEVICE Queue queue_of(const Task& task, int number) const {
        return queue_at(task, place_of(task, number));
    }
    EP_DEVICE Queue queue_at(const Task& task, const Place& place) const {
        return place.is_local ? nvl_queue(args, task.node, place.index, task.channel)
                              : rdma_queue(args, place.index, task.channel);
    }
    // The slot in such a queue of the row for token or relayed row `row` of a task; -1: it has none.
    EP_DEVICE int slot_in(const Task& task, int row, int number) const {
        return slot_at(task, row, place_of(task, number));
    }
    EP_DEVICE int slot_at(const Task& task, int row, const Place& place) const {
        const Topology& topology = args.topology();
        if (!place.is_local)
            return args.node_head[token_of(task, row) * topology.num_nodes + place.index];
        const int64_t head = task.kind == kRelay ? args.first_relayed(task.node, task.channel) + row
                                                 : token_of(task, row);
        return args.nvl_head[head * topology.ranks_per_node + place.index];
    }
    // Calls f(queue, slot) for each queue that has a row for token or relayed row `row` of a task; while f() holds.
    template <class F>
    EP_DEVICE bool for_each_row(const Task& task, int row, F f) const {
        const int queues = num_queues(task);
        for (int i = 0; i < queues; ++i) {
            const int slot = slot_in(task, row, i);
            if (slot >= 0 && !f(queue_of(task, i), slot)) return false;
        }
        return true;
    }

    // Rows of such a queue. A gateway does not know.
    EP_DEVICE int total_of(const Task& task, const Queue& queue) const {
        if (task.kind == kRelay) return INT32_MAX;
        return queue.hop == Hop::kNvl ? args.to_rank(queue.peer, queue.channel)
                                      : args.to_node(queue.here, queue.channel);
    }

    EP_DEVICE bool is_done(const Task& task) const { return state(task).cursor == total(task); }
    EP_DEVICE Blocker blocked_by(const Task& task) const {
        const Blocker next{outbound(task).peer, Owed::kSlots};
        if (task.kind == kReturn) return next;
        int rank = args.common.rank();
        const bool has_come =
            for_each_row(task, state(task).cursor, [&](const Queue& queue, int slot) {
                rank = queue.peer;
                return slot < static_cast<int>(state_of(args, queue, false).seen);
            });
        return has_come && task.kind == kRelay ? next : Blocker{rank, Owed::kRows};
    }
    EP_DEVICE int movable(const Task& task) const {
        const int left = total(task) - state(task).cursor;
        if (task.kind == kReduce) return rows_of_step(kMaxStep, left);
        const int chunk = task.kind == kRelay ? args.num_max_rdma_chunked_send_tokens
                                              : args.num_max_nvl_chunked_send_tokens;
        return free_slots(args, open, outbound(task), rows_of_step(chunk, left));
    }
    // Leader. Of a sum: the tokens of which every row has come, with a list of these.
    EP_DEVICE int prepare(const Task& task, int rows) const {
        if (task.kind == kReturn) return rows;
        leader_for(num_queues(task), [&](int i) {
            const Queue queue = queue_of(task, i);
            filled_slots(args, open, queue, total_of(task, queue));
        });
        leader_sync();
        const int done = state(task).cursor;
        for (int first = 0; first < rows; first += kLeaderLanes) {
            const int mine = first + lane_id();
            const bool is_missing = mine >= rows || !list_rows(task, done + mine, list_of(mine));
            const uint32_t missing = leader_ballot(is_missing);
            if (missing != 0) return first + lowest_bit(missing);
        }
        return rows;
    }

    EP_DEVICE void find_surplus(const Task& task) const {
        if (task.kind == kReturn) return;
        for (int i = 0; i < num_queues(task); ++i) {
            const Queue queue = queue_of(task, i);
            refuse_surplus(args, open, queue, total_of(task, queue));
        }
    }

    // Token of a reduction.
    EP_DEVICE int64_t token_of(const Task& task, int number) const {
        return args.tokens_of(task.channel).begin + number;
    }
    EP_DEVICE RowList list_of(int i) const {
        return {lists + static_cast<int64_t>(i) * RowList::size(most_rows(args.topology()))};
    }
    // One thread. The rows of one sum, as far as they have come; whether all have.
    EP_DEVICE bool list_rows(const Task& task, int number, RowList list) const {
        list.clear();
        const auto add_bias = [&](const bf16* bias) {
            if (task.kind != kReduce || bias == nullptr) return;
            const int64_t first = token_of(task, number) * bytes_of_row();
            list.add_bias(reinterpret_cast<const std::byte*>(bias) + first);
        };
        add_bias(args.bias_0);
        add_bias(args.bias_1);
        const bool is_by_rank = args.order_experts_per_rank == 0;
        const bool have_come = for_each_row(task, number, [&](const Queue& queue, int slot) {
            if (slot >= static_cast<int>(state_of(args, queue, false).seen)) return false;
            if (is_by_rank) list.add(row_at(queue, slot));
            return true;
        });
        if (have_come && !is_by_rank) list_by_column(task, number, list);
        return have_come;
    }
    // One thread. The rows of one sum in the order of the columns of its token; ranks and nodes that none names have
    // none. Whatever the caller's tensor holds, each is there once at most.
    EP_DEVICE void list_by_column(const Task& task, int number, RowList list) const {
        const Topology& topology = args.topology();
        if (task.kind == kRelay || topology.num_nodes == 1) {
            list_own_node(task, number, args.order_topk - 1, list);
        } else {
            const int experts_per_node = args.order_experts_per_rank * topology.ranks_per_node;
            for (int k = args.order_topk - 1; k >= 0; --k) {
                const int expert = expert_in(task, number, k);
                const int node = expert / experts_per_node;
                if (expert < 0 || is_named_behind(task, number, k, experts_per_node)) continue;
                if (node == args.node) {
                    const int begin = list.count();
                    list_own_node(task, number, k, list);
                    list.group_from(begin);
                } else {
                    list_row(task, number, {false, node}, list);
                }
            }
        }
        list.reverse();
    }
    // The rows of the ranks of the own node that the columns up to `last` name, from the last one on.
    EP_DEVICE void list_own_node(const Task& task, int number, int last, RowList list) const {
        const int first_rank = args.topology().rank_of(args.node, 0);
        uint64_t named = 0;  // local ranks, by the columns behind
        for (int k = last; k >= 0; --k) {
            const int expert = expert_in(task, number, k);
            const int local = expert / args.order_experts_per_rank - first_rank;
            if (expert < 0 || local < 0 || local >= args.topology().ranks_per_node) continue;
            if ((named >> local & 1) != 0) continue;
            named |= uint64_t{1} << local;
            list_row(task, number, {true, local}, list);
        }
    }
    EP_DEVICE void list_row(const Task& task, int number, const Place& place, RowList list) const {
        const int slot = slot_at(task, number, place);
        if (slot >= 0) list.add(row_at(queue_at(task, place), slot));
    }
    // Whether a column behind names an expert of the same node.
    EP_DEVICE bool is_named_behind(const Task& task,
                                   int number,
                                   int column,
                                   int experts_per_node) const {
        const int node = expert_in(task, number, column) / experts_per_node;
        for (int k = column + 1; k < args.order_topk; ++k) {
            const int expert = expert_in(task, number, k);
            if (expert >= 0 && expert / experts_per_node == node) return true;
        }
        return false;
    }
    // What a column of a sum's token names; -1 if that is no expert.
    EP_DEVICE int expert_in(const Task& task, int number, int column) const {
        const int num_experts = args.order_experts_per_rank * args.topology().num_ranks;
        int64_t expert = 0;
        if (task.kind == kRelay) {
            const int64_t row =
                args.first_relayed(task.node, task.channel) - args.num_tokens + number;
            expert = args.order_relay_topk_idx[row * args.order_topk + column];
        } else {
            expert = args.order_topk_idx[token_of(task, number) * args.order_topk + column];
        }
        return expert >= 0 && expert < num_experts ? static_cast<int>(expert) : -1;
    }
    EP_DEVICE const std::byte* row_at(const Queue& queue, int slot) const {
        return args.common.transport.local(slot_of(args, queue, false, slot));
    }
    EP_DEVICE int64_t bytes_of_row() const { return static_cast<int64_t>(args.row.row_bytes); }
    // Warp. Adds up the rows of one token.
    EP_DEVICE void sum_token(int i, std::byte* out, float* weights) const {
        const RowList list = list_of(i);
        if (list.has_group()) {
            add_up<true>(list, args.row.row_bytes, out);
        } else {
            add_up(list, args.row.row_bytes, out);
        }
        if (args.row.num_topk > 0) sum_weights(list, args.row, weights);
    }
    EP_DEVICE void move(const Task& task, int rows, const Team& team) const {
        const int done = state(task).cursor;
        if (task.kind == kReturn) {
            const int first = args.first_row(rank(task), task.channel);
            for (int i = done + team.warp; i < done + rows; i += team.warps)
                put_row_back(args, outbound(task), copy, i, first + i);
            return;
        }
        if (task.kind == kReduce) {
            auto* out = reinterpret_cast<std::byte*>(args.combined_x);
            for (int i = team.warp; i < rows; i += team.warps) {
                const int64_t token = token_of(task, done + i);
                sum_token(i,
                          out + token * bytes_of_row(),
                          args.combined_topk_weights + token * args.row.num_topk);
                if (args.row.verified) verify(task, done + i);
            }
        } else {
            relay_sums(task, done, rows, team);
        }
    }
    // Warp. The rows of one sum.
    EP_DEVICE void verify(const Task& task, int number) const {
        const bool is_own = task.kind == kReduce;
        const int owner = args.topology().rank_of(is_own ? args.node : task.node, args.local_rank);
        const int token = is_own ? static_cast<int>(token_of(task, number)) : -1;
        for_each_row(task, number, [&](const Queue& queue, int slot) {
            const size_t offset = slot_of(args, queue, false, slot);
            verify_slot(args,
                        open,
                        queue,
                        slot,
                        {owner, queue.peer, token},
                        args.common.transport.local(offset));
            return true;
        });
    }
    // One thread. Of the rows of one sum, which are of one token.
    EP_DEVICE uint32_t token_of_sum(const Task& task, int number) const {
        uint32_t token = 0;
        for_each_row(task, number, [&](const Queue& queue, int slot) {
            token = proof_in(args, queue, slot).encoding_or_token;
            return false;
        });
        return token;
    }
    EP_DEVICE void verify_and_prove(const Task& task, int number, std::byte* sum) const {
        verify(task, number);
        const uint32_t token = token_of_sum(task, number);
        prove_row(args.row, open.op, args.common.rank(), token, sum, sum + args.row.pack_offset());
    }
    // Team.
    EP_DEVICE void relay_sums(const Task& task, int done, int rows, const Team& team) const {
        const Queue to = outbound(task);
        const NormalRow& row = args.row;
        for (int i = team.warp; i < rows; i += team.warps) {
            std::byte* staged = args.common.transport.local(staging_of(args, to, done + i));
            std::byte* weights = staged + row.pack_offset() + row.weights_offset();
            sum_token(i, staged, reinterpret_cast<float*>(weights));
            if (row.verified) verify_and_prove(task, done + i, staged);
        }
        const size_t bytes = row.returns_packs() ? row.bytes() : row.row_bytes;
        put_staged(args, to, done, rows, bytes, team);
    }

    EP_DEVICE void tell(const Task& task, int rows) const {
        QueueState& state = this->state(task);
        const int done = state.cursor;
        leader_sync();
        if (elect_one()) {
            state.cursor = done + rows;
            if (task.kind != kReduce) {
                const uint64_t now = now_ns();
                max_relaxed<Scope::kDevice>(&args.common.workspace->sent_ns, now);
                tell_filled(args, open, outbound(task), rows, done + rows == total(task), now);
            }
        }
        if (task.kind == kReturn) return;
        leader_for(num_queues(task), [&](int i) {
            int slot = -1;
            for (int row = done + rows; slot < 0 && row-- > done;) slot = slot_in(task, row, i);
            if (slot < 0) return;
            const Queue queue = queue_of(task, i);
            if (args.row.verified) note_token(args, queue, slot);
            const int emptied = slot + 1 - static_cast<int>(state_of(args, queue, false).moved);
            give_back(args, open, queue, emptied, total_of(task, queue));
        });
    }
};

// Block. Whether the caller's rows are all that dispatch delivered.
EP_DEVICE bool returns_all(const NormalCombineArgs& args, const OpenOperation& open) {
    if (rows_lie_within(args, args.num_rows, args.num_relay_rows)) return true;
    if (elect_one()) record_failure(args.common, open, FailureReason::kHandle, args.common.rank());
    return false;
}

// Block. What the operation adds to the counters of its hops.
EP_DEVICE void count_combine(const NormalCombineArgs& args, const OpenOperation& open) {
    const Topology& topology = args.topology();
    count_hop(args, open, args.relay_counters, nullptr, [&](int source, QueuesSeen& seen) {
        if (topology.node_of(source) != args.node) return false;
        for (int node = 0; node < topology.num_nodes; ++node) {
            if (node == args.node) continue;
            for (int channel = 0; channel < args.num_channels; ++channel)
                seen.add(args, nvl_queue(args, node, topology.local_of(source), channel));
        }
        return true;
    });
    const auto reduced = [&](int source, QueuesSeen& seen) {
        const int node = topology.node_of(source);
        const bool is_gateway = topology.local_of(source) == args.local_rank;
        if (node != args.node && !is_gateway) return false;
        for (int channel = 0; channel < args.num_channels; ++channel) {
            seen.add(args,
                     node == args.node ? nvl_queue(args, node, topology.local_of(source), channel)
                                       : rdma_queue(args, node, channel));
        }
        return true;
    };
    count_hop(args, open, args.common.counters, args.common.wait_stats, reduced);
}

EP_KERNEL void normal_combine(const EP_GRID_CONSTANT NormalCombineArgs args) {
    const OperationArgs& common = args.common;
    const OpenOperation open = current_operation(common);
    const Share share = CombineTasks::share(args.topology(), args.num_channels);
    const int most_tasks =
        CombineTasks::most_tasks(args.topology(), args.num_channels, num_blocks(), num_warps());
    const NormalCombineShared shared(share.team, most_tasks, args.topology());
    RowCopy copy = row_copy_of_warp(args.row_piece_bytes, shared.rest);
    const CombineTasks tasks{args, open, shared.lists, copy};
    if (begin_normal(args, open, false) && returns_all(args, open))
        run_tasks(args, open, tasks, share, shared.tasks);
    close_normal(args, open, [&] { count_combine(args, open); });
}

}  // namespace ep
