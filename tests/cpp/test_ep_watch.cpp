// patches/ep_watch.cuh, which goes into other projects, with a clock and cells that are made up.
// sanitize: address
#include "../../patches/ep_watch.cuh"

#include <array>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "testing.h"

namespace {

constexpr int kRanks = 3;

struct Cell {
    unsigned long long sum, count;
};

// A machine whose clock moves when the test says so.
struct Machine {
    static constexpr int kHops = ep_watch::kNumHops;
    static inline std::vector<unsigned long long> cells;
    static inline ep_watch::Target where{};
    static inline unsigned long long time = 0;

    static void reset(bool on) {
        cells.assign(2 * ep_watch::kNumHops * kRanks, 0);
        where = {on ? cells.data() : nullptr, kRanks, 0};
        time = 100;
    }
    static const ep_watch::Target& target() { return where; }
    static unsigned long long now() { return time; }
    static void add(unsigned long long* cell, unsigned long long value) { *cell += value; }
    static Cell cell(int hop, int rank) {
        const size_t at = 2 * static_cast<size_t>(hop * kRanks + rank);
        return {cells[at], cells[at + 1]};
    }
    static unsigned long long everything() {
        unsigned long long total = 0;
        for (const auto value : cells) total += value;
        return total;
    }
};

using Wait = ep_watch::BasicWait<Machine>;

// Three waits of a thread: of 30 ns, of 5 ns, and for what is there at once.
void three_waits(int hop, int source, bool active = true) {
    for (const int ns : {30, 5, 0}) {
        Wait wait(hop, source, active);
        wait.look(ns > 0);
        Machine::time += ns;
        wait.look(ns > 5);  // Missing still, or it has come meanwhile.
        wait.end();
        Machine::time += 1000;  // Work between waits is not waiting.
    }
}

}  // namespace

TEST(a_wait_counts_from_the_first_look_that_finds_nothing) {
    Machine::reset(true);
    three_waits(ep_watch::kDispatchRows, 2);
    const Cell cell = Machine::cell(ep_watch::kDispatchRows, 2);
    CHECK_EQUAL(cell.sum, 35u);
    CHECK_EQUAL(cell.count, 3u);
    CHECK_EQUAL(Machine::everything(), 38u);  // Nothing is anywhere else.
}

TEST(what_has_come_does_not_wait_for_the_others) {
    for (const unsigned ns : {7u, 0u}) {  // A clock may stand still between two looks.
        Machine::reset(true);
        Wait wait(ep_watch::kCombineEntry, 0, true);
        wait.look(true);
        Machine::time += ns;
        wait.look(false);
        Machine::time += 100;
        wait.look(false);
        wait.end();
        CHECK_EQUAL(Machine::cell(ep_watch::kCombineEntry, 0).sum, ns);
        CHECK_EQUAL(Machine::cell(ep_watch::kCombineEntry, 0).count, 1u);
    }
}

TEST(cells_are_added_to) {
    Machine::reset(true);
    for (int warp = 0; warp < 4; ++warp) three_waits(ep_watch::kCombineRows, 1);
    CHECK_EQUAL(Machine::cell(ep_watch::kCombineRows, 1).sum, 140u);
    CHECK_EQUAL(Machine::cell(ep_watch::kCombineRows, 1).count, 12u);
}

TEST(off_nothing_is_added) {
    Machine::reset(false);
    three_waits(ep_watch::kDispatchRows, 2);
    CHECK_EQUAL(Machine::everything(), 0u);
}

TEST(switched_off_in_the_middle_nothing_is_added) {
    Machine::reset(true);
    Wait wait(ep_watch::kDispatchRows, 2, true);
    wait.look(true);
    Machine::time += 10;
    Machine::where.cells = nullptr;
    wait.end();
    CHECK_EQUAL(Machine::everything(), 0u);
}

TEST(threads_that_do_not_measure_add_nothing) {
    Machine::reset(true);
    three_waits(ep_watch::kDispatchRows, 2, false);
    CHECK_EQUAL(Machine::everything(), 0u);
}

TEST(time_for_which_nothing_came_is_no_wait_and_counts_as_time) {
    Machine::reset(true);
    for (const bool missing : {false, true}) {
        Wait wait(ep_watch::kDispatchRdmaRows, 1, true);
        wait.look(missing);
        Machine::time += 10;
        wait.end(false);
    }
    CHECK_EQUAL(Machine::cell(ep_watch::kDispatchRdmaRows, 1).sum, 10u);
    CHECK_EQUAL(Machine::cell(ep_watch::kDispatchRdmaRows, 1).count, 0u);
}

TEST(hops_and_ranks_out_of_range_write_nowhere) {
    Machine::reset(true);
    const std::array<std::pair<int, int>, 4> outside{
        {{-1, 0}, {ep_watch::kNumHops, 0}, {0, -1}, {0, kRanks}}};
    for (const auto& [hop, rank] : outside) {
        three_waits(hop, rank);
    }
    CHECK_EQUAL(Machine::everything(), 0u);
}

TEST(every_hop_has_one_name) {
    std::istringstream words{ep_watch::hops()};
    std::vector<std::string> names;
    for (std::string word; words >> word;) {
        for (const auto& other : names) CHECK(word != other);
        names.push_back(word);
    }
    CHECK_EQUAL(names.size(), static_cast<size_t>(ep_watch::kNumHops));
    CHECK(names[ep_watch::kDispatchRows] == "dispatch_rows");
    CHECK(names[ep_watch::kCombineRdmaCredit] == "combine_rdma_credit");
}

namespace {
std::vector<ep_watch::Target> set;
const char* remember(const ep_watch::Target& target) {
    set.push_back(target);
    return nullptr;
}
const char* refuse(const ep_watch::Target&) { return "no device"; }
}  // namespace

TEST(every_translation_unit_gets_the_same_target) {
    set.clear();
    ep_watch::setters() = {remember, remember};
    ep_watch::set(0x1000, 32, 19);
    ep_watch::setters().clear();
    CHECK_EQUAL(set.size(), 2u);
    for (const auto& target : set) {
        CHECK(target.cells == reinterpret_cast<unsigned long long*>(0x1000));
        CHECK_EQUAL(target.ranks, 32);
        CHECK_EQUAL(target.node_begin, 16);
    }
}

TEST(what_cannot_be_is_refused_with_its_reason) {
    set.clear();
    ep_watch::setters() = {remember};
    const auto said = [](std::uintptr_t cells, int ranks, int rank) -> std::string {
        try {
            ep_watch::set(cells, ranks, rank);
        } catch (const std::exception& error) {
            return error.what();
        }
        return "";
    };
    CHECK(said(0x1000, 8, 8) == "rank 8 is not in a group of 8 ranks");
    CHECK(said(0x1000, 0, 0) == "rank 0 is not in a group of 0 ranks");
    CHECK(said(0x1000, 8, -1) == "rank -1 is not in a group of 8 ranks");
    CHECK(said(0x1004, 8, 1) == "cells are not aligned to 8 bytes");
    CHECK_EQUAL(set.size(), 0u);
    ep_watch::setters() = {refuse};
    CHECK(said(0x1000, 8, 1) == "ep_watch_set: no device");
    ep_watch::setters().clear();
}

namespace {
struct Module {
    std::vector<std::string> names;
    template <class Function>
    void def(const char* name, Function) {
        names.emplace_back(name);
    }
};
}  // namespace

TEST(python_gets_two_functions) {
    Module module;
    ep_watch::bind(module);
    CHECK((module.names == std::vector<std::string>{"ep_watch_set", "ep_watch_hops"}));
}
