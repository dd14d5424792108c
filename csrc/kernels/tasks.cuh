// How the blocks of a normal operation work: on tasks, each of which has one end of a queue or several.
//
//   A block has every num_blocks()-th task. Its first thread looks for one that can go on (slots are free,
//   or filled); then all warps move rows, at most as many as a chunk; then the first thread tells the other
//   ends. No task waits for anything within its step, so a block with several of them, or with all, cannot
//   keep others waiting, and any number of blocks does.
//
// Tasks are described by a type with
//   count()                 all tasks of the rank
//   is_done(task)           one thread
//   ready(task, tokens)     one thread: rows that can be moved now; may note up to kMaxStep tokens
//   move(task, n, tokens)   block
//   tell(task, n, tokens)   one thread
//   blocked_by(task)        one thread: for whom it waits
//   find_surplus(task)      one thread, in vain: refuses a queue in which more rows came than it empties
//   copy                    the RowCopy of the warp, with which move() moves whole rows
#pragma once

#include "kernels/hand_over.cuh"
#include "kernels/queue.cuh"

namespace ep {

// For whom a task waits, and what for.
struct Blocker {
    int rank;
    Owed owed;
};

// Rows of a step, at most.
constexpr int kMaxStep = 32;

// One thread. Rows of a step of a producer: a chunk of Config, or what the target needs for a step to pay.
EP_DEVICE int rows_of_step(int chunk, int left) {
    const int most = chunk < kLeastStep ? kLeastStep : chunk > kMaxStep ? kMaxStep : chunk;
    return left < most ? left : most;
}

struct TaskShared {
    int* step;    // [3]: task, rows, whether the block has ended
    int* tokens;  // [kMaxStep]
    int* left;    // [tasks of the block], those that are not done
    SharedArena rest;

    EP_DEVICE explicit TaskShared(int num_tasks) {
        step = rest.take<int>(3);
        tokens = rest.take<int>(kMaxStep);
        left = rest.take<int>(of_block(num_tasks, num_blocks()));
    }
    EP_HOST_DEVICE static int of_block(int num_tasks, int blocks) {
        return (num_tasks + blocks - 1) / blocks;
    }
    EP_HOST_DEVICE static size_t bytes(int num_tasks, int blocks) {
        return (3 + kMaxStep + of_block(num_tasks, blocks)) * sizeof(int);
    }
};

// Warp. Its own piece is in shared memory behind all that a block has otherwise.
EP_DEVICE RowCopy row_copy_of_warp(const NormalArgs& args, SharedArena rest) {
    struct alignas(RowCopy::kAlignment) Unit {
        std::byte bytes[RowCopy::kAlignment];
    };
    if (args.row_piece_bytes == 0) return RowCopy(nullptr, 0);
    const auto units = static_cast<int>(args.row_piece_bytes / sizeof(Unit));
    Unit* piece = rest.take<Unit>(num_warps() * units) + warp_id() * units;
    return RowCopy(piece->bytes, args.row_piece_bytes);
}

// One thread. Whether a rank has given this operation up, or has gone on without it. Nobody does the latter
// who has not given it up, since all wait for all at its begin; so one word a rank is looked at.
EP_DEVICE bool somebody_gave_up(const OperationArgs& args, const OpenOperation& open) {
    for (int source = 0; source < args.num_ranks(); ++source) {
        const size_t word = args.control.given_up(Series::kOperations, source);
        if (GivenUp::unpack(args.transport.newest(word)).contains(open.op)) return true;
    }
    return false;
}

// One thread: the first of a block. The tasks of a block that are not done, and the search among them.
template <class Tasks>
struct TaskSearch {
    const NormalArgs& args;
    const OpenOperation& open;
    const Tasks& tasks;
    const TaskShared& shared;
    int num_left = 0;
    int next = 0;  // where the search goes on: with the task that moved rows last
    int num_looks = 0;

    EP_DEVICE void begin() {
        for (int task = block_index(); task < tasks.count(); task += num_blocks())
            shared.left[num_left++] = task;
    }
    // Whether the block need not look any more.
    EP_DEVICE bool is_over() {
        if (num_left == 0) return true;
        if (load_relaxed<Scope::kDevice>(&args.common.workspace->failed) != 0) return true;
        // Seldom, for it takes longer than to look for a task.
        if (++num_looks % kLooksPerCheck != 0) return false;
        if (somebody_gave_up(args.common, open)) return true;
        if (load_relaxed<Scope::kSystem>(&args.common.workspace->news.any) == 0) return false;
        bool in_vain = is_lost(args.common, open);
        for (int i = 0; i < num_left; ++i)
            in_vain = in_vain || is_gone(args.common, tasks.blocked_by(shared.left[i]).rank);
        return in_vain;
    }
    // Whether there is a task to go on with, in `shared.step`, or nothing left to look for.
    EP_DEVICE bool look() {
        for (int i = 0; i < num_left; ++i) {
            if (next >= num_left) next = 0;
            const int task = shared.left[next];
            if (tasks.is_done(task)) {
                shared.left[next] = shared.left[--num_left];
                --i;
                continue;
            }
            const int rows = tasks.ready(task, shared.tokens);
            if (rows == 0) {
                ++next;
                continue;
            }
            shared.step[0] = task;
            shared.step[1] = rows;
            return true;
        }
        shared.step[1] = 0;
        return is_over();
    }
    // For the host: it has been waiting for long.
    EP_DEVICE void note() const {
        for (int i = 0; i < num_left; ++i) {
            const Blocker blocker = tasks.blocked_by(shared.left[i]);
            note_missing(args.common, open, blocker.owed, blocker.rank);
        }
    }
};

// Block. Does its tasks. Afterwards the operation has failed, or they are done.
template <class Tasks>
EP_DEVICE void run_tasks(const NormalArgs& args,
                         const OpenOperation& open,
                         const Tasks& tasks,
                         const TaskShared& shared) {
    TaskSearch<Tasks> search{args, open, tasks, shared};
    if (thread_index() == 0) search.begin();
    while (true) {
        if (thread_index() == 0) {
            const bool in_time =
                spin_until([&] { return search.look(); }, open.deadline, [&] { search.note(); });
            shared.step[2] = in_time && shared.step[1] > 0 ? 0 : 1;
        }
        block_sync();
        if (shared.step[2] != 0) break;
        const int task = shared.step[0];
        const int rows = shared.step[1];
        tasks.move(task, rows, shared.tokens);
        tasks.copy.finish();
        block_sync();
        // Of rows that are not what was sent nobody is told.
        if (args.row.verified && has_failed(args.common)) break;
        if (thread_index() == 0) tasks.tell(task, rows, shared.tokens);
    }
    const bool is_done = search.num_left == 0;
    if (!block_any(thread_index() == 0 && !is_done)) return;
    find_given_up(args.common, open);
    // Of any block: who is done with its tasks has gone.
    for (int task = thread_index(); task < tasks.count(); task += num_threads())
        tasks.find_surplus(task);
    if (has_failed(args.common)) return;
    name_missing(args.common, open, [&](auto miss) {
        if (thread_index() != 0) return;
        for (int i = 0; i < search.num_left; ++i) miss(tasks.blocked_by(shared.left[i]).rank);
    });
}

// Block, when an operation is closed: all queues are as at the begin of one.
EP_DEVICE void forget_queues(const NormalArgs& args) {
    const Topology& topology = args.topology();
    const int num_states = 2 * (topology.num_ranks + topology.num_nodes()) * args.num_channels;
    for (int i = thread_index(); i < num_states; i += num_threads()) args.queue_states[i] = {};
}

}  // namespace ep
