// Normal operations as the runtime runs them: ranks as threads of one process, one node, several, or a
// node a rank; small queues, so that they are full again and again; any schedule, delivery order and launch
// shape, against a scalar reference; under address with work shared out as a GPU does.
// sanitize: address:-DEP_NUMBERS_OF_GPU thread
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "normal_exchange.h"
#include "runtime/runtime.h"
#include "testing.h"

using namespace ep;
using namespace ep::testing;

namespace {

// `count` rounds with new data each, on all ranks at once.
void exchange_rounds(
    Group& group, const Shape& shape, const Setting& setting, int count, Random& random) {
    std::vector<Round> rounds;
    for (int i = 0; i < count; ++i) rounds.push_back(random_round(shape, setting, random));
    on_ranks(shape.num_ranks(), [&](int rank) {
        for (const Round& round : rounds) Exchange(group[rank], rank, shape, round).run();
    });
}

// Sanitizers take their time.
constexpr int kNumOrders = EP_UNDER_TSAN || EP_UNDER_ASAN ? 3 : 200;
constexpr int kNumRepeats = EP_UNDER_TSAN || EP_UNDER_ASAN ? 1 : 4;

void exchange_shape(const Shape& shape) {
    Random random(ep::testing::seed());
    Group group(shape);
    exchange_rounds(group, shape, {2, 2, 2 * shape.num_nodes, 2, 2}, 2, random);
    for (int i = 0; i < kNumRepeats; ++i) {
        group.shake(random);
        exchange_rounds(group, shape, random_setting(shape, random), 2, random);
    }
}

}  // namespace

// ---- results

TEST(a_rank_by_itself_equals_the_reference) { exchange_shape(kOneRank); }
TEST(a_node_equals_the_reference) { exchange_shape(kOneNode); }
TEST(two_nodes_equal_the_reference) { exchange_shape(kTwoNodes); }
TEST(a_node_per_rank_equals_the_reference) { exchange_shape(kNodePerRank); }

TEST(many_rounds_under_random_orders) {
    constexpr std::array kShapes = {kOneNode, kTwoNodes, kNodePerRank};
    Random random(ep::testing::seed());
    for (int i = 0; i < kNumOrders; ++i) {
        const Shape& shape = kShapes[i % kShapes.size()];
        Group group(shape);
        group.shake(random);
        exchange_rounds(group, shape, random_setting(shape, random), 2, random);
    }
}

// Queues, and what lies in them, move from operation to operation.
TEST(settings_may_change_between_operations) {
    Random random(ep::testing::seed());
    for (const Shape& shape : {kOneNode, kTwoNodes}) {
        Group group(shape);
        for (int i = 0; i < kNumRepeats; ++i) {
            std::vector<Round> rounds;
            for (int round = 0; round < 4; ++round)
                rounds.push_back(random_round(shape, random_setting(shape, random), random));
            on_ranks(shape.num_ranks(), [&](int rank) {
                for (const Round& round : rounds) Exchange(group[rank], rank, shape, round).run();
            });
            group.shake(random);
        }
    }
}

TEST(queues_move_when_nothing_is_on_its_way_any_more) {
    Random random(ep::testing::seed());
    Group group(kTwoNodes);
    const auto num_quiets = [&](int rank) {
        uint64_t sum = 0;
        for (const auto& path : group[rank].memory().transport().link->traffic().to)
            sum += path.quiets;
        return sum;
    };
    exchange_rounds(group, kTwoNodes, {1, 1, 4, 1, 2}, 2, random);
    for (int rank = 0; rank < kTwoNodes.num_ranks(); ++rank) CHECK_EQUAL(num_quiets(rank), 0u);
    exchange_rounds(group, kTwoNodes, {2, 1, 4, 1, 2}, 1, random);
    for (int rank = 0; rank < kTwoNodes.num_ranks(); ++rank) CHECK(num_quiets(rank) > 0);
}

TEST(rows_say_when_they_were_handed_over) {
    for (const Shape& shape : {kOneNode, kTwoNodes}) {
        Group group(shape);
        const Round round{{1, 1, 2 * shape.num_nodes, 1, 2},
                          std::vector(shape.num_ranks(), everything_to_all(shape)),
                          true,
                          true,
                          0,
                          false};
        on_ranks(shape.num_ranks(), [&](int rank) {
            for (int repeat = 0; repeat < 2; ++repeat) {
                Exchange exchange(group[rank], rank, shape, round);
                exchange.run();
                const uint64_t op = exchange.handle.dispatch_op;
                for (int source = 0; source < shape.num_ranks(); ++source) {
                    const CounterView view = exchange.received_rows.view();
                    const int64_t* seen =
                        view.ring_row(view.ring_slot(op), source, shape.num_ranks());
                    CHECK(seen[kRingSource_issued] > seen[kRingSource_entered]);
                }
            }
        });
    }
}

// ---- failures

namespace {

// A fresh dispatch that all ranks enter and none gets through.
template <class Enter>
void fail_together(Group& group, const Shape& shape, Random& random, Enter enter) {
    const Round round = random_round(shape, random_setting(shape, random), random);
    on_ranks(shape.num_ranks(), [&](int rank) {
        Exchange exchange(group[rank], rank, shape, round);
        enter(exchange, rank);
    });
}

// What rank 2 says of its tokens does not agree with where they go.
void refuse_numbers(Exchange& exchange, int rank) {
    std::vector<int32_t> numbers = exchange.mine.num_tokens_per_rank;
    if (rank == 2) ++numbers[1];
    CHECK(!exchange.notify(numbers));
}

}  // namespace

TEST(numbers_that_do_not_agree_are_refused_and_the_group_works_on) {
    Random random(ep::testing::seed());
    Group group(kTwoNodes);
    for (int repeat = 0; repeat < 1 + kNumRepeats; ++repeat) {
        fail_together(group, kTwoNodes, random, [&](Exchange& exchange, int rank) {
            refuse_numbers(exchange, rank);
            exchange.abandon();
            const auto failure = group[rank].take_failure();
            if (rank == 2) return check_failure(failure, FailureReason::kCounts, {2});
            check_abandoned(failure, rank);
        });
        exchange_rounds(group, kTwoNodes, random_setting(kTwoNodes, random), 1, random);
        group.shake(random);
    }
}

// Both may have been launched before the host looks, as on a GPU.
TEST(the_empty_handle_of_a_failed_dispatch_does_not_hide_why_it_failed) {
    Random random(ep::testing::seed());
    Group group(kTwoNodes);
    fail_together(group, kTwoNodes, random, [&](Exchange& exchange, int rank) {
        refuse_numbers(exchange, rank);
        exchange.abandon();
        exchange.combine(0);
        const auto failure = group[rank].take_failure();
        CHECK(failure->operation == Operation::kNormalDispatch);
        if (rank == 2) return check_failure(failure, FailureReason::kCounts, {2});
        check_abandoned(failure, rank);
    });
}

// Another rank may still read those of an earlier dispatch.
TEST(who_refuses_sends_no_notice) {
    Random random(ep::testing::seed());
    Group group(kTwoNodes);
    fail_together(group, kTwoNodes, random, [&](Exchange& exchange, int rank) {
        refuse_numbers(exchange, rank);
        const Traffic& traffic = group[rank].memory().transport().link->traffic();
        for (int dst = 0; dst < kTwoNodes.num_ranks(); ++dst) {
            const uint64_t num_headers = dst == rank ? 0 : 1;
            CHECK_EQUAL(traffic.to[dst].puts, num_headers + (rank == 2 ? 0 : 1));
        }
        exchange.abandon();
    });
}

TEST(more_rows_than_there_is_room_for_are_refused_and_the_group_works_on) {
    Random random(ep::testing::seed());
    Group group(kTwoNodes);
    for (int repeat = 0; repeat < 1 + kNumRepeats; ++repeat) {
        const bool lacks_rows = repeat % 2 == 0;
        Round round = random_round(kTwoNodes, random_setting(kTwoNodes, random), random);
        round.inputs.assign(kTwoNodes.num_ranks(), everything_to_all(kTwoNodes));
        on_ranks(kTwoNodes.num_ranks(), [&](int rank) {
            Exchange exchange(group[rank], rank, kTwoNodes, round);
            // Another rank may already have failed before this one knows what it receives.
            if (!exchange.notify(exchange.mine.num_tokens_per_rank)) {
                CHECK(rank != 3);
                exchange.abandon();
                return check_abandoned(group[rank].take_failure(), rank);
            }
            exchange.check_counts();
            Received received(kTwoNodes, exchange.handle.num_rows);
            auto call = exchange.dispatch_call(0, received);
            if (rank == 3) --(lacks_rows ? call.num_recv_rows : call.num_relay_rows);
            group[rank].normal_dispatch(call);
            const auto failure = group[rank].take_failure();
            CHECK_EQUAL(exchange.handle.dispatch_op, 0u);
            if (rank == 3) return check_failure(failure, FailureReason::kRoom, {3});
            check_abandoned(failure, rank);
        });
        exchange_rounds(group, kTwoNodes, random_setting(kTwoNodes, random), 1, random);
        group.shake(random);
    }
}

TEST(settings_that_differ_are_refused_and_the_group_works_on) {
    Random random(ep::testing::seed());
    Group group(kTwoNodes);
    for (const bool is_nvl : {false, true}) {
        const Round round = random_round(kTwoNodes, {1, 1, 4, 1, 2}, random);
        Round other = round;
        ++(is_nvl ? other.setting.nvl_recv : other.setting.rdma_recv);
        on_ranks(kTwoNodes.num_ranks(), [&](int rank) {
            Exchange exchange(group[rank], rank, kTwoNodes, rank == 1 ? other : round);
            CHECK(!exchange.notify(exchange.mine.num_tokens_per_rank));
            exchange.abandon();
            const auto failure = group[rank].take_failure();
            CHECK(failure.has_value());
            // Or who has seen it first.
            if (failure->reason != FailureReason::kMismatch) return check_abandoned(failure, rank);
            check_failure(failure,
                          FailureReason::kMismatch,
                          rank == 1 ? std::vector{0, 2, 3} : std::vector{1});
        });
        exchange_rounds(group, kTwoNodes, random_setting(kTwoNodes, random), 1, random);
    }
}

// The handle of a dispatch that failed, and those of different dispatches.
TEST(handles_that_do_not_fit_are_refused_and_the_group_works_on) {
    Random random(ep::testing::seed());
    Group group(kTwoNodes);
    for (int repeat = 0; repeat < 1 + kNumRepeats; ++repeat) {
        const bool is_empty = repeat % 2 == 0;
        const Round round = random_round(kTwoNodes, random_setting(kTwoNodes, random), random);
        on_ranks(kTwoNodes.num_ranks(), [&](int rank) {
            Exchange first(group[rank], rank, kTwoNodes, round);
            first.run();
            Exchange second(group[rank], rank, kTwoNodes, round);
            second.run();
            Exchange& used = rank == 1 ? first : second;
            if (is_empty && rank == 1) used.handle.dispatch_op = 0;
            used.combine(0);
            const auto failure = group[rank].take_failure();
            CHECK(failure.has_value());
            if (rank != 1) {
                CHECK(failure->ranks == std::vector{1});
            } else if (is_empty) {
                check_failure(failure, FailureReason::kHandle, {1});
            } else {
                check_failure(failure, FailureReason::kMismatch, {0, 2, 3});
            }
        });
        exchange_rounds(group, kTwoNodes, random_setting(kTwoNodes, random), 1, random);
        group.shake(random);
    }
}

TEST(fewer_rows_than_were_dispatched_are_refused) {
    Random random(ep::testing::seed());
    Group group(kOneNode);
    Round round = random_round(kOneNode, {1, 1, 2, 1, 1}, random);
    round.inputs.assign(kOneNode.num_ranks(), everything_to_all(kOneNode));
    on_ranks(kOneNode.num_ranks(), [&](int rank) {
        Exchange exchange(group[rank], rank, kOneNode, round);
        exchange.run();
        if (rank == 0) exchange.rows.pop_back();
        exchange.combine(0);
        const auto failure = group[rank].take_failure();
        if (rank == 0) check_failure(failure, FailureReason::kHandle, {0});
        CHECK(failure.has_value());
    });
}
