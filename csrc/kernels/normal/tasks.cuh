// How the warps of a normal operation work: in teams, on tasks, each of which has one end of a queue or several.
//
//   A team is a warp, or all warps of a block. It has every n-th task of its share. Its leader (leader.cuh)
//   looks for one that can go on (slots are free, or filled); then all warps move rows, at most kMaxStep; then
//   the leader tells the other ends. No task waits for anything within its step, so a team with several of
//   them, or with all, cannot keep others waiting, and any number of blocks does. While one team waits for its
//   writes, others of the block move.
//
// Tasks are described by a type with
//   count()                all tasks of the rank
//   task(number)           one of them
//   is_done(task)          one thread
//   movable(task)          one thread: rows that can be moved, as far as one queue tells; 0: none
//   prepare(task, rows)    leader: how many of them can be; what move() needs is then in shared memory
//   move(task, n, team)    team
//   tell(task, n)          leader
//   blocked_by(task)       one thread: for whom it waits
//   find_surplus(task)     one thread, in vain: refuses a queue in which more rows came than it empties
//   copy                   the RowCopy of the warp, with which move() moves whole rows
#pragma once

#include "kernels/normal/leader.cuh"
#include "kernels/normal/queue.cuh"
#include "kernels/protocol/hand_over.cuh"

namespace ep {

// One end of a queue, or several; what is not needed is 0. As small as a number, since shared memory holds many.
struct Task {
    uint32_t kind : 2;
    uint32_t node : 17;
    uint32_t local : 6;  // rank of the node
    uint32_t channel : 7;

    EP_DEVICE Task(int kind, int node, int local, int channel)
        : kind(kind), node(node), local(local), channel(channel) {}
};
static_assert(kMaxExperts <= 1 << 17 && kMaxRanksPerNode <= 1 << 6 && kMaxChannels <= 1 << 7);

// For whom a task waits, and what for.
struct Blocker {
    int rank;
    Owed owed;
};

// Rows of a step, at most: a bit each in a word.
constexpr int kMaxStep = 32;

// One thread. Rows of a step of a producer: a chunk of Config, or what the target needs for a step to pay.
EP_DEVICE int rows_of_step(int chunk, int left) {
    const int most = chunk < kLeastStep ? kLeastStep : chunk > kMaxStep ? kMaxStep : chunk;
    return left < most ? left : most;
}

// Warps that work together, as one of them sees it.
struct Team {
    int number;  // among those that share tasks
    int count;   // of those
    int warp;    // this one's number in it
    int warps;   // 1, or all of the block

    // Each warp of `blocks` blocks, of which this is one, by itself.
    EP_DEVICE static Team of_warp(int block, int blocks) {
        return {block * num_warps() + warp_id(), blocks * num_warps(), 0, 1};
    }
    // All warps of a block.
    EP_DEVICE static Team of_block(int block, int blocks) {
        return {block, blocks, warp_id(), num_warps()};
    }

    EP_DEVICE bool leads() const { return warp == 0 && is_leader_lane(); }
    // Its place among the teams of the block.
    EP_DEVICE int place() const { return warps == 1 ? warp_id() : 0; }
};

// Team. Orders memory among its threads.
EP_DEVICE void team_sync(const Team& team) {
    if (team.warps == 1) {
        warp_sync();
    } else {
        block_sync();
    }
}
// The same, and tells all of them whether it held on one.
EP_DEVICE bool team_any(const Team& team, bool predicate) {
    return team.warps == 1 ? ballot(predicate) != 0 : block_any(predicate);
}

// The tasks that some teams share.
struct Share {
    int begin;
    int end;
    Team team;

    EP_DEVICE int count() const {
        return (end - begin - team.number + team.count - 1) / team.count;
    }
    EP_DEVICE int number(int i) const { return begin + team.number + i * team.count; }
};

// What a team does next; no rows: it has ended.
struct Step {
    Task task;
    int rows;
};

// Shared memory of a block for the teams of it.
struct TaskShared {
    Step* step;
    Task* left;  // [most_tasks], those that are not done
    SharedArena rest;

    // most_tasks: of a team.
    EP_DEVICE TaskShared(const Team& team, int most_tasks) {
        step = rest.take<Step>(num_warps()) + team.place();
        left = rest.take<Task>(num_warps() * most_tasks) + team.place() * most_tasks;
    }
    EP_HOST_DEVICE static size_t bytes(int most_tasks, int warps) {
        return warps * (sizeof(Step) + most_tasks * sizeof(Task));
    }
};

// Tasks of a team, if that many share `count`.
EP_HOST_DEVICE int tasks_of_team(int count, int teams) { return (count + teams - 1) / teams; }

// Warp. Its own piece is in shared memory behind all that a block has otherwise.
EP_DEVICE RowCopy row_copy_of_warp(size_t row_piece_bytes, SharedArena rest) {
    struct alignas(RowCopy::kAlignment) Unit {
        std::byte bytes[RowCopy::kAlignment];
    };
    if (row_piece_bytes == 0) return RowCopy(nullptr, 0);
    const auto units = static_cast<int>(row_piece_bytes / sizeof(Unit));
    Unit* piece = rest.take<Unit>(num_warps() * units) + warp_id() * units;
    return RowCopy(piece->bytes, row_piece_bytes);
}

// Leader. Whether a rank has given this operation up, or has gone on without it. Nobody does the latter who has
// not given it up, since all wait for all at its begin; so one word a rank is looked at.
EP_DEVICE bool somebody_gave_up(const OperationArgs& args, const OpenOperation& open) {
    bool found = false;
    leader_for(args.num_ranks(), [&](int source) {
        const size_t word = args.control.given_up(Series::kOperations, source);
        found = found || GivenUp::unpack(args.transport.newest(word)).contains(open.op);
    });
    return leader_any(found);
}

// Leader. The tasks of a team that are not done, and the search among them: for the first, in their order, that can
// go on. So who has received rows early still sends its own first, and does not get later and later.
template <class Tasks>
struct TaskSearch {
    const NormalArgs& args;
    const OpenOperation& open;
    const Tasks& tasks;
    const TaskShared& shared;
    int num_left = 0;
    int chosen = 0;  // place of the step's task among those left
    int num_looks = 0;

    EP_DEVICE void begin(const Share& share) {
        for (int i = 0; i < share.count(); i += kLeaderLanes) {
            const int mine = i + lane_id();
            const Task task = tasks.task(share.number(mine));
            const bool is_left = mine < share.count() && !tasks.is_done(task);
            const uint32_t lanes = leader_ballot(is_left);
            if (is_left) shared.left[num_left + popcount(lanes & bits_below(lane_id()))] = task;
            num_left += popcount(lanes);
        }
        leader_sync();
    }
    // Whether the team need not look any more.
    EP_DEVICE bool is_over() {
        if (num_left == 0) return true;
        const bool has_failed =
            elect_one() && load_relaxed<Scope::kDevice>(&args.common.workspace->failed) != 0;
        if (leader_any(has_failed)) return true;
        // Seldom, for it takes longer than to look for a task.
        if (++num_looks % kLooksPerCheck != 0) return false;
        if (somebody_gave_up(args.common, open)) return true;
        const bool has_news =
            elect_one() && load_relaxed<Scope::kSystem>(&args.common.workspace->news.any) != 0;
        if (!leader_any(has_news)) return false;
        bool in_vain = is_lost(args.common, open);
        leader_for(num_left, [&](int i) {
            in_vain = in_vain || is_gone(args.common, tasks.blocked_by(shared.left[i]).rank);
        });
        return leader_any(in_vain);
    }
    // Whether there is a task to go on with, in `shared.step`, or nothing left to look for.
    EP_DEVICE bool look() {
        for (int first = 0; first < num_left; first += kLeaderLanes) {
            const int mine = first + lane_id();
            const int rows = mine < num_left ? tasks.movable(shared.left[mine]) : 0;
            for (uint32_t lanes = leader_ballot(rows > 0); lanes != 0; lanes &= lanes - 1) {
                const int lane = lowest_bit(lanes);
                chosen = leader_value(mine, lane);
                const int prepared = tasks.prepare(shared.left[chosen], leader_value(rows, lane));
                if (prepared == 0) continue;
                if (elect_one()) *shared.step = {shared.left[chosen], prepared};
                return true;
            }
        }
        return is_over();
    }
    // The next step; none, if nothing is left to do, or nothing can be done in time.
    EP_DEVICE void find_step() {
        if (elect_one()) shared.step->rows = 0;
        static_cast<void>(
            leader_spin_until([&] { return look(); }, open.deadline, [&] { note(); }));
    }
    EP_DEVICE void tell() {
        tasks.tell(shared.step->task, shared.step->rows);
        leader_sync();
        if (!tasks.is_done(shared.step->task)) return;
        --num_left;
        // The others keep their order.
        for (int first = chosen; first < num_left; first += kLeaderLanes) {
            const int mine = first + lane_id();
            const Task moved = shared.left[mine < num_left ? mine + 1 : num_left];
            leader_sync();
            if (mine < num_left) shared.left[mine] = moved;
            leader_sync();
        }
    }
    // For the host: it has been waiting for long.
    EP_DEVICE void note() const {
        leader_for(num_left, [&](int i) {
            const Blocker blocker = tasks.blocked_by(shared.left[i]);
            note_missing(args.common, open, blocker.owed, blocker.rank);
        });
    }
};

// Block. Does its teams' tasks. Afterwards the operation has failed, or they are done.
template <class Tasks>
EP_DEVICE void run_tasks(const NormalArgs& args,
                         const OpenOperation& open,
                         const Tasks& tasks,
                         const Share& share,
                         const TaskShared& shared) {
    const Team& team = share.team;
    TaskSearch<Tasks> search{args, open, tasks, shared};
    if (team.leads()) search.begin(share);
    while (true) {
        if (team.leads()) search.find_step();
        team_sync(team);
        const Step& step = *shared.step;
        if (step.rows == 0) break;
        tasks.move(step.task, step.rows, team);
        tasks.copy.finish();
        team_sync(team);
        // Of rows that are not what was sent nobody is told.
        if (args.row.verified &&
            team_any(team, load_relaxed<Scope::kDevice>(&args.common.workspace->failed) != 0))
            break;
        if (team.leads()) search.tell();
    }
    if (!block_any(team.leads() && search.num_left != 0)) return;
    find_given_up(args.common, open);
    // Of any team: who is done with its tasks has gone.
    for (int number = thread_index(); number < tasks.count(); number += num_threads())
        tasks.find_surplus(tasks.task(number));
    if (has_failed(args.common)) return;
    name_missing(args.common, open, [&](auto miss) {
        if (!team.leads()) return;
        leader_for(search.num_left, [&](int i) { miss(tasks.blocked_by(shared.left[i]).rank); });
    });
}

// Block, when an operation is closed: all queues are as at the begin of one.
EP_DEVICE void forget_queues(const NormalArgs& args) {
    const Topology& topology = args.topology();
    const int num_states = 2 * (topology.num_ranks + topology.num_nodes) * args.num_channels;
    for (int i = thread_index(); i < num_states; i += num_threads()) args.queue_states[i] = {};
}

}  // namespace ep
