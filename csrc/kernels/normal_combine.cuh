// Normal combine: the rows that dispatch delivered go back, and each token's are added up.
//
//   0 Every rank is told that this one has entered, and waits for all. The counts are those of the handle.
//   Then, at the same time (tasks.cuh), for each channel:
//   1 return        Rows go to the rank of their node from which they came: the source, or its gateway.
//   2 relay         The gateway adds up the rows of its node for a token, in fp32 by rank, and sends the sum,
//                   rounded, to the source.
//   3 reduce        The source adds up, in fp32: the biases, then node by node the sum of that node or, of its
//                   own node, the rows by rank. One rounding.
//   Rows of a queue come in the order of tokens; the handle tells which tokens have one.
#pragma once

#include "kernels/normal_operation.cuh"
#include "kernels/normal_verify.cuh"
#include "kernels/row_sum.cuh"

namespace ep {

struct NormalCombineArgs : NormalArgs, NormalCombineTensors {};

// Of a sum: two biases, the ranks of a node and the other nodes.
EP_HOST_DEVICE int most_rows(const Topology& topology) {
    return 2 + topology.ranks_per_node + topology.num_nodes() - 1;
}

// Shared memory of a block: beside that for tasks, the rows of each sum of a step.
struct NormalCombineShared {
    TaskShared tasks;
    RowList::Entry* lists;  // [kMaxStep, RowList::size(most_rows())]

    EP_DEVICE NormalCombineShared(int num_tasks, const Topology& topology) : tasks(num_tasks) {
        lists = tasks.rest.take<RowList::Entry>(kMaxStep * RowList::size(most_rows(topology)));
    }
    EP_HOST_DEVICE static size_t bytes(int num_tasks, const Topology& topology, int blocks) {
        return TaskShared::bytes(num_tasks, blocks) + alignof(RowList::Entry) +
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
    struct Task {
        Kind kind;
        int index;  // kReturn: source; kRelay: node
        int channel;
    };

    EP_HOST_DEVICE static int count(const Topology& topology, int num_channels) {
        return (topology.num_ranks + topology.num_nodes()) * num_channels;
    }
    EP_DEVICE int count() const { return count(args.topology(), args.num_channels); }
    EP_DEVICE Task task(int number) const {
        const Topology& topology = args.topology();
        const int channel = number % args.num_channels;
        const int index = number / args.num_channels;
        if (index < topology.num_ranks)
            return {kReturn, (args.common.rank() + index) % topology.num_ranks, channel};
        const int node = (args.node() + 1 + index - topology.num_ranks) % topology.num_nodes();
        return {node == args.node() ? kReduce : kRelay, node, channel};
    }

    EP_DEVICE Queue outbound(const Task& task) const {
        const Topology& topology = args.topology();
        return task.kind == kReturn ? nvl_queue(args,
                                                topology.node_of(task.index),
                                                topology.local_of(task.index),
                                                task.channel)
                                    : rdma_queue(args, task.index, task.channel);
    }
    // Rows of a task; of kReduce: tokens.
    EP_DEVICE int total(const Task& task) const {
        if (task.kind == kReturn) return args.from_rank(task.index, task.channel);
        if (task.kind == kRelay) return args.relayed(task.index, task.channel);
        const TokenRange range = TokenRange::of(task.channel, args.num_channels, args.num_tokens);
        return range.end - range.begin;
    }
    // Its cursor tells how many have been done. A reduction has no queue of its own to a node; it uses the
    // state of the one that would lead to the own node.
    EP_DEVICE QueueState& state(const Task& task) const {
        return state_of(args, outbound(task), true);
    }

    // Calls f(queue, place) for each queue that has a row for token or relayed row `number` of a task;
    // while f() holds. Sums are in this order.
    template <class F>
    EP_DEVICE bool for_each_row(const Task& task, int number, F f) const {
        const Topology& topology = args.topology();
        const auto of_own_node = [&](int64_t head) {
            for (int local = 0; local < topology.ranks_per_node; ++local) {
                const int place = args.nvl_head[head * topology.ranks_per_node + local];
                if (place < 0) continue;
                if (!f(nvl_queue(args, task.index, local, task.channel), place)) return false;
            }
            return true;
        };
        if (task.kind == kRelay)
            return of_own_node(args.first_relayed(task.index, task.channel) + number);
        const int64_t token =
            TokenRange::of(task.channel, args.num_channels, args.num_tokens).begin + number;
        for (int node = 0; node < topology.num_nodes(); ++node) {
            if (node == args.node()) {
                if (!of_own_node(token)) return false;
                continue;
            }
            const int place = args.node_head[token * topology.num_nodes() + node];
            if (place >= 0 && !f(rdma_queue(args, node, task.channel), place)) return false;
        }
        return true;
    }
    // Calls f(queue) for each queue that a task empties.
    template <class F>
    EP_DEVICE void for_each_queue(const Task& task, F f) const {
        const Topology& topology = args.topology();
        for (int local = 0; local < topology.ranks_per_node; ++local)
            f(nvl_queue(args, task.index, local, task.channel));
        for (int node = 0; task.kind == kReduce && node < topology.num_nodes(); ++node)
            if (node != args.node()) f(rdma_queue(args, node, task.channel));
    }

    // Rows of such a queue. A gateway does not know.
    EP_DEVICE int total_of(const Task& task, const Queue& queue) const {
        if (task.kind == kRelay) return INT32_MAX;
        return queue.hop == Hop::kNvl
                   ? args.to_rank(queue.peer, queue.channel)
                   : args.to_node(args.topology().node_of(queue.peer), queue.channel);
    }

    EP_DEVICE bool is_done(int number) const {
        const Task task = this->task(number);
        return state(task).cursor == total(task);
    }
    EP_DEVICE Blocker blocked_by(int number) const {
        const Task task = this->task(number);
        const Blocker next{outbound(task).peer, Owed::kSlots};
        if (task.kind == kReturn) return next;
        int rank = args.common.rank();
        const bool has_come =
            for_each_row(task, state(task).cursor, [&](const Queue& queue, int place) {
                rank = queue.peer;
                return place < static_cast<int>(state_of(args, queue, false).seen);
            });
        return has_come && task.kind == kRelay ? next : Blocker{rank, Owed::kRows};
    }
    // Rows of a task for which everything has come, up to `most`.
    EP_DEVICE int summable(const Task& task, int most) const {
        for_each_queue(task, [&](const Queue& queue) {
            filled_slots(args, open, queue, total_of(task, queue));
        });
        const int done = state(task).cursor;
        int rows = 0;
        while (rows < most && for_each_row(
                                  task,
                                  done + rows,
                                  [&](const Queue& queue, int place) {
                                      return place <
                                             static_cast<int>(state_of(args, queue, false).seen);
                                  })) {
            ++rows;
        }
        return rows;
    }
    EP_DEVICE int ready(int number, int*) const {
        const Task task = this->task(number);
        const int left = total(task) - state(task).cursor;
        if (task.kind == kReduce) return summable(task, rows_of_step(kMaxStep, left));
        const int chunk = task.kind == kRelay ? args.num_max_rdma_chunked_send_tokens
                                              : args.num_max_nvl_chunked_send_tokens;
        const int free = free_slots(args, open, outbound(task), rows_of_step(chunk, left));
        return task.kind == kReturn || free == 0 ? free : summable(task, free);
    }

    EP_DEVICE void find_surplus(int number) const {
        const Task task = this->task(number);
        if (task.kind == kReturn) return;
        for_each_queue(task, [&](const Queue& queue) {
            refuse_surplus(args, open, queue, total_of(task, queue));
        });
    }

    // Token of a reduction.
    EP_DEVICE int64_t token_of(const Task& task, int number) const {
        return TokenRange::of(task.channel, args.num_channels, args.num_tokens).begin + number;
    }
    EP_DEVICE RowList list_of(int i) const {
        return {lists + static_cast<int64_t>(i) * RowList::size(most_rows(args.topology()))};
    }
    // Block. The rows of each sum of a step.
    EP_DEVICE void list_rows(const Task& task, int done, int rows) const {
        for (int i = thread_index(); i < rows; i += num_threads()) {
            RowList list = list_of(i);
            list.clear();
            const auto add_bias = [&](const bf16* bias) {
                if (task.kind != kReduce || bias == nullptr) return;
                const int64_t first = token_of(task, done + i) * bytes_of_row();
                list.add_bias(reinterpret_cast<const std::byte*>(bias) + first);
            };
            add_bias(args.bias_0);
            add_bias(args.bias_1);
            for_each_row(task, done + i, [&](const Queue& queue, int place) {
                list.add(args.common.transport.local(slot_of(args, queue, false, place)));
                return true;
            });
        }
        block_sync();
    }
    EP_DEVICE int64_t bytes_of_row() const { return static_cast<int64_t>(args.row.row_bytes); }
    // Warp. Adds up the rows of one token.
    EP_DEVICE void sum_token(int i, std::byte* out, float* weights) const {
        const RowList list = list_of(i);
        sum_rows(list, args.row.row_bytes, out);
        if (args.row.num_topk > 0) sum_weights(list, args.row, weights);
    }
    EP_DEVICE void move(int number, int rows, const int*) const {
        const Task task = this->task(number);
        const int done = state(task).cursor;
        if (task.kind == kReturn) {
            const int first = args.first_row(task.index, task.channel);
            for (int i = done + warp_id(); i < done + rows; i += num_warps())
                put_row_back(args, outbound(task), copy, i, first + i);
            return;
        }
        list_rows(task, done, rows);
        if (task.kind == kReduce) {
            auto* out = reinterpret_cast<std::byte*>(args.combined_x);
            for (int i = warp_id(); i < rows; i += num_warps()) {
                const int64_t token = token_of(task, done + i);
                sum_token(i,
                          out + token * bytes_of_row(),
                          args.combined_topk_weights + token * args.row.num_topk);
                if (args.row.verified) verify(task, done + i);
            }
        } else {
            relay_sums(task, done, rows);
        }
    }
    // Warp. The rows of one sum.
    EP_DEVICE void verify(const Task& task, int number) const {
        const bool is_own = task.kind == kReduce;
        const int owner =
            args.topology().rank_of(is_own ? args.node() : task.index, args.local_rank());
        const int token = is_own ? static_cast<int>(token_of(task, number)) : -1;
        for_each_row(task, number, [&](const Queue& queue, int place) {
            const std::byte* slot = args.common.transport.local(slot_of(args, queue, false, place));
            verify_slot(args, open, queue, place, {owner, queue.peer, token}, slot);
            return true;
        });
    }
    // One thread. Of the rows of one sum, which are of one token.
    EP_DEVICE uint32_t token_of_sum(const Task& task, int number) const {
        uint32_t token = 0;
        for_each_row(task, number, [&](const Queue& queue, int place) {
            token = proof_in(args, queue, place).encoding_or_token;
            return false;
        });
        return token;
    }
    EP_DEVICE void verify_and_prove(const Task& task, int number, std::byte* sum) const {
        verify(task, number);
        const uint32_t token = token_of_sum(task, number);
        prove_row(args.row, open.op, args.common.rank(), token, sum, sum + args.row.pack_offset());
    }
    // Block.
    EP_DEVICE void relay_sums(const Task& task, int done, int rows) const {
        const Queue to = outbound(task);
        const Transport& transport = args.common.transport;
        const NormalRow& row = args.row;
        const auto staged = [&](int i) { return transport.local(staging_of(args, to, done + i)); };
        for (int i = warp_id(); i < rows; i += num_warps()) {
            std::byte* weights = staged(i) + row.pack_offset() + row.weights_offset();
            sum_token(i, staged(i), reinterpret_cast<float*>(weights));
            if (row.verified) verify_and_prove(task, done + i, staged(i));
        }
        block_sync();
        const size_t bytes = row.returns_packs() ? row.bytes() : row.row_bytes;
        for (int i = warp_id(); i < rows; i += num_warps())
            transport.put_warp(
                to.peer, slot_of(args, to, true, done + i), staged(i), bytes, to.channel);
    }

    EP_DEVICE void tell(int number, int rows, const int*) const {
        const Task task = this->task(number);
        QueueState& state = this->state(task);
        const int done = state.cursor;
        state.cursor += rows;
        if (task.kind != kReduce) {
            const uint64_t now = now_ns();
            max_relaxed<Scope::kDevice>(&args.common.workspace->sent_ns, now);
            tell_filled(args, open, outbound(task), rows, state.cursor == total(task), now);
        }
        if (task.kind == kReturn) return;
        for (int i = done; i < done + rows; ++i) {
            for_each_row(task, i, [&](const Queue& queue, int place) {
                state_of(args, queue, false).cursor = place + 1;
                if (args.row.verified) note_token(args, queue, place);
                return true;
            });
        }
        for_each_queue(task, [&](const Queue& queue) {
            const QueueState& inward = state_of(args, queue, false);
            const int emptied = inward.cursor - static_cast<int>(inward.moved);
            if (emptied > 0) give_back(args, open, queue, emptied, total_of(task, queue));
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
        if (topology.node_of(source) != args.node()) return false;
        for (int node = 0; node < topology.num_nodes(); ++node) {
            if (node == args.node()) continue;
            for (int channel = 0; channel < args.num_channels; ++channel)
                seen.add(args, nvl_queue(args, node, topology.local_of(source), channel));
        }
        return true;
    });
    const auto reduced = [&](int source, QueuesSeen& seen) {
        const int node = topology.node_of(source);
        const bool is_gateway = topology.local_of(source) == args.local_rank();
        if (node != args.node() && !is_gateway) return false;
        for (int channel = 0; channel < args.num_channels; ++channel) {
            seen.add(args,
                     node == args.node() ? nvl_queue(args, node, topology.local_of(source), channel)
                                         : rdma_queue(args, node, channel));
        }
        return true;
    };
    count_hop(args, open, args.common.counters, args.common.wait_stats, reduced);
}

EP_KERNEL void normal_combine(const EP_GRID_CONSTANT NormalCombineArgs args) {
    const OperationArgs& common = args.common;
    const OpenOperation open = current_operation(common);
    const NormalCombineShared shared(CombineTasks::count(args.topology(), args.num_channels),
                                     args.topology());
    RowCopy copy = row_copy_of_warp(args, shared.tasks.rest);
    const CombineTasks tasks{args, open, shared.lists, copy};
    if (begin_normal(args, open, false) && returns_all(args, open))
        run_tasks(args, open, tasks, shared.tasks);
    close_normal(args, open, [&] { count_combine(args, open); });
}

}  // namespace ep
