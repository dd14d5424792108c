// The low-latency protocol as the runtime runs it: ranks as threads of one process, small shapes,
// any schedule, delivery order and launch shape, against a scalar reference. Under ThreadSanitizer
// this checks that every access to memory of another rank is ordered; with EP_WEAKEN_SIGNAL, which
// takes the release out of signal(), it must object.
// (the address variant shares work out as a GPU does.)
// sanitize: address:-DEP_NUMBERS_OF_GPU thread thread-must-fail:-DEP_WEAKEN_SIGNAL=1
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models.h"
#include "runtime/runtime.h"
#include "testing.h"

using namespace ep;
using ep::testing::on_ranks;
using ep::testing::Random;

namespace {

const uint64_t kPatienceNs = ep::testing::patience_ns();

struct Shape {
    int num_ranks;
    int num_local_experts;
    int num_max_tokens;
    int hidden;
    int num_topk;

    int num_experts() const { return num_ranks * num_local_experts; }
    size_t rows() const { return static_cast<size_t>(num_ranks) * num_max_tokens; }
    LowLatencySize size() const { return {num_max_tokens, hidden, num_experts()}; }
};

template <class Call>
Call call_of(const Shape& shape) {
    Call call;
    static_cast<LowLatencySize&>(call) = shape.size();
    return call;
}

// ---- ranks

struct Group {
    explicit Group(int num_ranks,
                   size_t bytes,
                   uint64_t timeout_ns = kPatienceNs,
                   bool verify = false,
                   bool enable_shrink = false) {
        std::vector<std::string> handles;
        for (int rank = 0; rank < num_ranks; ++rank) {
            RuntimeOptions options;
            options.rank = rank;
            options.num_ranks = num_ranks;
            options.num_rdma_bytes = bytes;
            options.low_latency_mode = true;
            options.timeout_ns = timeout_ns;
            options.ranks_per_node = num_ranks;
            options.verify = verify;
            options.enable_shrink = enable_shrink;
            ranks.push_back(std::make_unique<Runtime>(options));
            handles.push_back(ranks.back()->local_handle());
        }
        for (const auto& rank : ranks) rank->connect(handles);
        for (const auto& rank : ranks) rank->release_handle();
    }
    explicit Group(const Shape& shape, bool verify = false)
        : Group(shape.num_ranks,
                Runtime::low_latency_bytes(shape.size(), shape.num_ranks),
                kPatienceNs,
                verify) {}

    Runtime& operator[](int rank) { return *ranks[rank]; }
    int size() const { return static_cast<int>(ranks.size()); }

    void shake(Random& random) {
        for (const auto& rank : ranks) {
            rank->device().set_schedule("random", random.bits());
            rank->memory().set_delivery(random.between(0, 3) == 0 ? "in-order" : "random",
                                        random.bits());
            rank->set_launch_shape(random.between(1, 2), random.between(1, 2));
        }
    }

    std::vector<std::unique_ptr<Runtime>> ranks;
};

// ---- one exchange, its inputs on all ranks, and what must come out

struct Inputs {
    int num_tokens = 0;
    std::vector<bf16> x;              // [num_tokens, hidden]
    std::vector<int64_t> topk_idx;    // [num_tokens, num_topk]
    std::vector<float> topk_weights;  // [num_tokens, num_topk]
};

bf16 to_bf16(float value) { return {ep::testing::nearest_bf16(value)}; }
float to_float(bf16 value) { return static_cast<float>(ep::testing::value_of_bf16(value.bits)); }

std::vector<Inputs> random_inputs(const Shape& shape, Random& random) {
    std::vector<Inputs> all(shape.num_ranks);
    for (Inputs& inputs : all) {
        const int choice = random.between(0, 3);
        inputs.num_tokens = choice == 0   ? 0
                            : choice == 1 ? shape.num_max_tokens
                                          : random.between(1, shape.num_max_tokens);
        inputs.x.resize(static_cast<size_t>(inputs.num_tokens) * shape.hidden);
        for (bf16& value : inputs.x) value = to_bf16(static_cast<float>(random.unit() * 8 - 4));
        for (int token = 0; token < inputs.num_tokens; ++token) {
            std::vector<int64_t> experts(shape.num_experts());
            for (size_t i = 0; i < experts.size(); ++i) experts[i] = static_cast<int64_t>(i);
            for (int k = 0; k < shape.num_topk; ++k) {
                std::swap(experts[k], experts[random.between(k, shape.num_experts() - 1)]);
                const bool dropped = random.between(0, 9) == 0;
                inputs.topk_idx.push_back(dropped ? -1 : experts[k]);
                inputs.topk_weights.push_back(static_cast<float>(random.unit()));
            }
        }
    }
    return all;
}

// Some rows cannot be encoded: somewhere in them is an infinity.
void put_infinities(const Shape& shape, std::vector<Inputs>& all, Random& random) {
    for (Inputs& inputs : all) {
        for (int token = 0; token < inputs.num_tokens; token += 2) {
            const int channel = random.between(0, shape.hidden - 1);
            inputs.x[static_cast<size_t>(token) * shape.hidden + channel] =
                to_bf16(std::numeric_limits<float>::infinity());
        }
    }
}

struct Origin {
    int source;
    int token;
};

// Rows of one expert in the order in which they must be packed.
std::vector<Origin> rows_of_expert(const Shape& shape,
                                   const std::vector<Inputs>& inputs,
                                   int expert) {
    std::vector<Origin> rows;
    for (int source = 0; source < shape.num_ranks; ++source) {
        for (int token = 0; token < inputs[source].num_tokens; ++token) {
            for (int k = 0; k < shape.num_topk; ++k) {
                if (inputs[source].topk_idx[token * shape.num_topk + k] == expert)
                    rows.push_back({source, token});
            }
        }
    }
    return rows;
}

struct Mode {
    Payload payload = Payload::kBf16;
    bool hooks = false;
    bool zero_copy = false;
    bool logfmt = false;
};

struct Received {
    std::vector<std::byte> x;
    std::vector<uint32_t> scales;
    std::vector<int32_t> count;
    std::vector<int32_t> src_info;
    std::vector<int64_t> layout_range;
};

struct Counters {
    explicit Counters(int num_ranks)
        : totals(static_cast<size_t>(kNumSourceCounters) * num_ranks),
          own(kNumOwnCounters),
          ring(static_cast<size_t>(kCapacity) * (num_ranks + 1) * kNumRingFields) {}
    static constexpr int kCapacity = 4;
    CounterView view() { return {totals.data(), own.data(), ring.data(), kCapacity}; }
    int64_t total(SourceCounter counter, int source) const {
        return totals[counter * (totals.size() / kNumSourceCounters) + source];
    }

    std::vector<int64_t> totals;
    std::vector<int64_t> own;
    std::vector<int64_t> ring;
};

// What an expert makes of a row: differs per expert, so that a row in a wrong place shows.
float expert_output(int expert, float value) {
    return value * 0.5f + static_cast<float>(expert % 7);
}

void check_received(const Shape& shape,
                    const std::vector<Inputs>& inputs,
                    int rank,
                    Payload payload,
                    const Received& received) {
    const DispatchMessage message{shape.hidden, payload};
    for (int local = 0; local < shape.num_local_experts; ++local) {
        const auto rows = rows_of_expert(shape, inputs, rank * shape.num_local_experts + local);
        CHECK_EQUAL(received.count[local], static_cast<int>(rows.size()));
        int64_t begin = 0;
        for (int source = 0; source < shape.num_ranks; ++source) {
            const int64_t count = std::count_if(
                rows.begin(), rows.end(), [&](const Origin& row) { return row.source == source; });
            CHECK_EQUAL(received.layout_range[local * shape.num_ranks + source],
                        begin << 32 | count);
            begin += count;
        }
        for (size_t row = 0; row < rows.size(); ++row) {
            const size_t index = local * shape.rows() + row;
            CHECK_EQUAL(received.src_info[index], rows[row].token);
            const bf16* x = inputs[rows[row].source].x.data() +
                            static_cast<size_t>(rows[row].token) * shape.hidden;
            const std::byte* got = received.x.data() + index * message.data_bytes();
            if (payload == Payload::kBf16) {
                CHECK(std::memcmp(got, x, message.data_bytes()) == 0);
                continue;
            }
            for (int group = 0; group < message.num_groups(); ++group) {
                float abs_max = 0;
                for (int i = 0; i < kChannelsPerScale; ++i)
                    abs_max =
                        std::max(abs_max, std::fabs(to_float(x[group * kChannelsPerScale + i])));
                const Fp8Scale scale = fp8_scale(abs_max, payload != Payload::kFp8);
                for (int i = 0; i < kChannelsPerScale; ++i) {
                    const int channel = group * kChannelsPerScale + i;
                    CHECK_EQUAL(static_cast<uint8_t>(got[channel]),
                                ep::testing::nearest_e4m3(to_float(x[channel]) * scale.multiplier));
                }
                const bool packed = payload == Payload::kFp8Ue8m0;
                const int item = packed ? group / 4 : group;
                const uint32_t word =
                    received
                        .scales[(static_cast<size_t>(local) * message.num_scale_items() + item) *
                                    shape.rows() +
                                row];
                if (packed) {
                    CHECK_EQUAL(word >> (8 * (group % 4)) & 0xFF,
                                static_cast<uint32_t>(ue8m0(scale.stored)));
                } else {
                    CHECK_EQUAL(word, float_to_bits(scale.stored));
                }
            }
        }
    }
}

void check_combined(const Shape& shape,
                    const Inputs& inputs,
                    bool logfmt,
                    const std::vector<bf16>& out) {
    // Between equal steps of 2^(32/510): half of one, relative to the largest term; measured 2.2 %.
    constexpr float kLogTolerance = 0.023f;
    for (int token = 0; token < inputs.num_tokens; ++token) {
        for (int channel = 0; channel < shape.hidden; ++channel) {
            float sum = 0;
            float magnitude = 0;
            for (int k = 0; k < shape.num_topk; ++k) {
                const int64_t expert = inputs.topk_idx[token * shape.num_topk + k];
                if (expert < 0) continue;
                const float weight = inputs.topk_weights[token * shape.num_topk + k];
                const float x =
                    to_float(inputs.x[static_cast<size_t>(token) * shape.hidden + channel]);
                const float y = to_float(to_bf16(expert_output(static_cast<int>(expert), x)));
                sum = std::fma(y, weight, sum);
                magnitude += std::fabs(y * weight);
            }
            const bf16 got = out[static_cast<size_t>(token) * shape.hidden + channel];
            if (!std::isfinite(sum)) {
                CHECK(!std::isfinite(to_float(got)));
            } else if (logfmt) {
                CHECK(std::fabs(to_float(got) - sum) <=
                      magnitude * kLogTolerance + std::fabs(sum) * 0x1p-8f + 1e-6f);
            } else {
                CHECK_EQUAL(got.bits, to_bf16(sum).bits);
            }
        }
    }
}

// Dispatch, experts, combine on one rank; checks both. `passed`: topk_idx as the rank passes it where `inputs` has -1
// for entries that get no row; what is said of them is left to the caller.
void exchange(Group& group,
              int rank,
              const Shape& shape,
              const std::vector<Inputs>& inputs,
              const Mode& mode,
              Counters* counters,
              const std::vector<int64_t>* passed = nullptr) {
    Runtime& runtime = group[rank];
    const Inputs& mine = inputs[rank];
    const int64_t* topk_idx = passed == nullptr ? mine.topk_idx.data() : passed->data();
    const DispatchMessage message{shape.hidden, mode.payload};
    const size_t num_rows = shape.num_local_experts * shape.rows();
    Received received;
    received.x.resize(num_rows * message.data_bytes());
    received.scales.resize(num_rows * message.num_scale_items());
    received.count.resize(shape.num_local_experts);
    received.src_info.resize(runtime.handle_words(shape.size(), mine.num_tokens, shape.num_topk));
    received.layout_range.resize(shape.num_experts());

    const auto in_phases = [&](auto call, auto operation) {
        for (const int phases : mode.hooks ? std::vector<int>{kPhaseSend, kPhaseReceive}
                                           : std::vector<int>{kPhaseSend | kPhaseReceive}) {
            call.phases = phases;
            operation(call);
        }
        if (passed == nullptr) CHECK(!runtime.take_failure().has_value());
    };
    auto dispatch = call_of<DispatchCall>(shape);
    dispatch.x = mine.x.data();
    dispatch.num_tokens = mine.num_tokens;
    dispatch.topk_idx = topk_idx;
    dispatch.num_topk = shape.num_topk;
    dispatch.use_fp8 = mode.payload != Payload::kBf16;
    dispatch.round_scale = mode.payload == Payload::kFp8PowerOfTwo;
    dispatch.use_ue8m0 = mode.payload == Payload::kFp8Ue8m0;
    dispatch.recv_x = received.x.data();
    dispatch.recv_scales = received.scales.data();
    dispatch.recv_count = received.count.data();
    dispatch.src_info = received.src_info.data();
    dispatch.layout_range = received.layout_range.data();
    if (counters != nullptr) dispatch.counters = counters->view();
    in_phases(dispatch, [&](const DispatchCall& call) { runtime.low_latency_dispatch(call); });
    check_received(shape, inputs, rank, mode.payload, received);

    std::vector<bf16> y;
    bf16* output = nullptr;
    size_t stride = shape.hidden;
    if (mode.zero_copy) {
        const auto [first, stride_bytes] = runtime.next_combine_buffer(shape.size());
        output = static_cast<bf16*>(first);
        stride = stride_bytes / sizeof(bf16);
    } else {
        y.resize(num_rows * shape.hidden);
        output = y.data();
    }
    for (int local = 0; local < shape.num_local_experts; ++local) {
        const int expert = rank * shape.num_local_experts + local;
        const auto rows = rows_of_expert(shape, inputs, expert);
        for (size_t row = 0; row < rows.size(); ++row) {
            const bf16* x = inputs[rows[row].source].x.data() +
                            static_cast<size_t>(rows[row].token) * shape.hidden;
            bf16* to = output + (local * shape.rows() + row) * stride;
            for (int i = 0; i < shape.hidden; ++i)
                to[i] = to_bf16(expert_output(expert, to_float(x[i])));
        }
    }
    std::vector<bf16> out(static_cast<size_t>(mine.num_tokens) * shape.hidden);
    auto combine = call_of<CombineCall>(shape);
    combine.x = y.data();
    combine.num_tokens = mine.num_tokens;
    combine.topk_idx = topk_idx;
    combine.topk_weights = mine.topk_weights.data();
    combine.num_topk = shape.num_topk;
    combine.src_info = received.src_info.data();
    combine.layout_range = received.layout_range.data();
    combine.out = out.data();
    combine.use_logfmt = mode.logfmt;
    combine.zero_copy = mode.zero_copy;
    in_phases(combine, [&](const CombineCall& call) { runtime.low_latency_combine(call); });
    check_combined(shape, mine, mode.logfmt, out);
}

// `rounds` exchanges with new data each, on all ranks at once.
void exchange_rounds(
    Group& group, const Shape& shape, int rounds, const Mode& mode, Random& random) {
    std::vector<std::vector<Inputs>> inputs;
    for (int round = 0; round < rounds; ++round) inputs.push_back(random_inputs(shape, random));
    on_ranks(shape.num_ranks, [&](int rank) {
        for (const auto& round : inputs) exchange(group, rank, shape, round, mode, nullptr);
    });
}

const std::vector<Shape> kShapes = {
    {1, 3, 4, 128, 2},
    {2, 2, 4, 256, 3},
    {3, 1, 5, 128, 2},
    {4, 2, 3, 128, 4},
};

void exchange_shapes(const Mode& mode, bool shaken) {
    Random random(ep::testing::seed());
    for (const Shape& shape : kShapes) {
        Group group(shape);
        exchange_rounds(group, shape, 2, mode, random);
        for (int i = 0; shaken && i < 2; ++i) {
            group.shake(random);
            exchange_rounds(group, shape, 2, mode, random);
        }
    }
}

std::string text_of(const Failure& failure) {
    std::string text = "reason " + std::to_string(static_cast<int>(failure.reason)) + " ranks";
    for (const int rank : failure.ranks) text += " " + std::to_string(rank);
    return text;
}

void check_failure(const std::optional<Failure>& failure,
                   FailureReason reason,
                   const std::vector<int>& ranks) {
    CHECK(failure.has_value());
    CHECK_THAT(failure->reason == reason && failure->ranks == ranks, text_of(*failure));
}

// A dispatch of nothing, which still needs everybody.
void dispatch_nothing(Runtime& runtime, const Shape& shape) {
    const size_t num_rows = shape.num_local_experts * shape.rows();
    std::vector<std::byte> recv_x(num_rows * shape.hidden * 2);
    std::vector<int32_t> recv_count(shape.num_local_experts);
    std::vector<int32_t> src_info(runtime.handle_words(shape.size(), 0, shape.num_topk));
    std::vector<int64_t> layout_range(shape.num_experts());
    auto call = call_of<DispatchCall>(shape);
    call.num_topk = shape.num_topk;
    call.recv_x = recv_x.data();
    call.recv_count = recv_count.data();
    call.src_info = src_info.data();
    call.layout_range = layout_range.data();
    runtime.low_latency_dispatch(call);
}

}  // namespace

// ---- results

TEST(bf16_equals_the_reference) { exchange_shapes({}, true); }
TEST(fp8_equals_the_reference) { exchange_shapes({.payload = Payload::kFp8}, true); }
TEST(fp8_with_power_of_two_scales_equals_the_reference) {
    exchange_shapes({.payload = Payload::kFp8PowerOfTwo}, false);
}
TEST(fp8_with_packed_scales_equals_the_reference) {
    exchange_shapes({.payload = Payload::kFp8Ue8m0}, true);
}
TEST(hooks_equal_the_reference) { exchange_shapes({.hooks = true}, true); }
TEST(zero_copy_equals_the_reference) {
    exchange_shapes({.payload = Payload::kFp8, .zero_copy = true}, true);
}
TEST(logfmt_is_close_to_the_reference) { exchange_shapes({.logfmt = true}, true); }
TEST(logfmt_with_hooks_is_close_to_the_reference) {
    exchange_shapes({.hooks = true, .logfmt = true}, true);
}

TEST(logfmt_sends_rows_as_they_are_that_it_cannot_encode) {
    Random random(ep::testing::seed());
    for (const Shape& shape : kShapes) {
        const bool verify = shape.num_ranks % 2 == 0;
        Group group(shape, verify);
        for (int i = 0; i < 3; ++i) {
            auto inputs = random_inputs(shape, random);
            put_infinities(shape, inputs, random);
            on_ranks(shape.num_ranks, [&](int rank) {
                exchange(group, rank, shape, inputs, {.logfmt = true}, nullptr);
            });
            group.shake(random);
        }
    }
}

TEST(many_rounds_under_random_orders) {
    Random random(ep::testing::seed());
    const Shape shape{3, 2, 3, 128, 2};
    Group group(shape);
    for (int i = 0; i < 18; ++i) {
        if (i % 3 == 0) group.shake(random);
        // Formats alternate, so that a header left from the last round is not taken for a new one.
        const Payload payload = i % 2 == 0 ? Payload::kBf16 : Payload::kFp8;
        exchange_rounds(group,
                        shape,
                        1,
                        {.payload = payload, .hooks = i % 4 < 2, .logfmt = i % 2 == 1},
                        random);
    }
}

// Blocks with later tokens count the entries of those before.
TEST(tokens_of_several_blocks_keep_their_order) {
    Random random(ep::testing::seed());
    const Shape shape{2, 1, 24, 128, 1};
    Group group(shape);
    for (const auto& rank : group.ranks) rank->set_launch_shape(3, 2);
    for (int round = 0; round < 4; ++round) {
        std::vector<Inputs> inputs = random_inputs(shape, random);
        for (Inputs& one : inputs) one.topk_idx.assign(one.num_tokens, round % 2);
        on_ranks(2, [&](int rank) { exchange(group, rank, shape, inputs, {}, nullptr); });
    }
}

TEST(rows_that_are_verified_equal_the_reference) {
    Random random(ep::testing::seed());
    for (const Shape& shape : kShapes) {
        Group group(shape, true);
        for (const Mode& mode : {Mode{},
                                 Mode{.payload = Payload::kFp8Ue8m0, .logfmt = true},
                                 Mode{.zero_copy = true}}) {
            exchange_rounds(group, shape, 2, mode, random);
            group.shake(random);
        }
    }
}

TEST(sizes_may_change_between_operations) {
    Random random(ep::testing::seed());
    const Shape small{3, 2, 3, 128, 2};
    const Shape large{3, 2, 4, 256, 2};
    Group group(large);
    std::vector<std::vector<Inputs>> inputs;
    const auto shape_of = [&](size_t round) { return round % 3 == 0 ? large : small; };
    for (size_t round = 0; round < 12; ++round)
        inputs.push_back(random_inputs(shape_of(round), random));
    for (int i = 0; i < 3; ++i) {
        on_ranks(3, [&](int rank) {
            for (size_t round = 0; round < inputs.size(); ++round)
                exchange(group, rank, shape_of(round), inputs[round], {}, nullptr);
        });
        group.shake(random);
    }
}

TEST(counters_of_an_exchange_add_up) {
    Random random(ep::testing::seed());
    const Shape shape{3, 2, 4, 128, 2};
    constexpr int kRounds = 6;
    Group group(shape);
    std::vector<std::vector<Inputs>> inputs;
    for (int round = 0; round < kRounds; ++round) inputs.push_back(random_inputs(shape, random));
    std::vector<Counters> counters(3, Counters(3));
    on_ranks(3, [&](int rank) {
        for (const auto& round : inputs) exchange(group, rank, shape, round, {}, &counters[rank]);
    });
    for (int rank = 0; rank < 3; ++rank) {
        const Counters& mine = counters[rank];
        CHECK_EQUAL(mine.own[kOwn_ops], kRounds);
        // Before its first operation a rank has no gap, and after its last it waits for nobody.
        constexpr int64_t kClockBegins = 1'000'000'000'000;
        CHECK(mine.own[kOwn_gap_ns] >= 0 && mine.own[kOwn_gap_ns] < kClockBegins);
        CHECK(!group[rank].progress().waiting);
        int64_t critical = 0;
        for (int source = 0; source < 3; ++source) {
            CHECK_EQUAL(mine.total(kSource_ops, source), kRounds);
            CHECK_EQUAL(mine.total(kSource_wait_ns, source),
                        mine.total(kSource_late_ns, source) + mine.total(kSource_issue_ns, source) +
                            mine.total(kSource_path_ns, source));
            critical += mine.total(kSource_critical_ops, source);
            int64_t tokens = 0;
            for (const auto& round : inputs) {
                for (const int64_t expert : round[source].topk_idx)
                    tokens += expert >= 0 && expert / shape.num_local_experts == rank;
            }
            CHECK_EQUAL(mine.total(kSource_tokens, source), tokens);
            CHECK_EQUAL(mine.total(kSource_bytes, source), tokens * shape.hidden * 2);
        }
        CHECK(critical <= kRounds);
    }
}

TEST(of_several_looks_the_first_counts) {
    for (const bool first_is_earlier : {false, true}) {
        uint64_t packed = 0;
        note_sight(&packed, {first_is_earlier ? 100u : 200u, true});
        note_sight(&packed, {first_is_earlier ? 200u : 100u, true});
        CHECK_EQUAL(Sight::unpack(packed).at_ns, 100u);
        note_sight(&packed, {100, false});
        CHECK_EQUAL(Sight::unpack(packed).witnessed, false);
    }
}

// Rows to the others are handed over first, then many to this rank itself: what it is waited for ends
// with the first, though it announces them all at the end.
TEST(issued_is_when_the_last_row_for_a_destination_was_handed_over) {
    const Shape shape{2, 1, 64, 2048, 1};
    Group group(shape);
    std::vector<Inputs> inputs(2);
    Inputs& sender = inputs[0];
    sender.num_tokens = shape.num_max_tokens;
    sender.x.resize(static_cast<size_t>(sender.num_tokens) * shape.hidden);
    sender.topk_idx.assign(sender.num_tokens, 0);
    sender.topk_idx[0] = 1;
    sender.topk_weights.assign(sender.num_tokens, 1.0f);
    std::vector<Counters> counters(2, Counters(2));
    on_ranks(2, [&](int rank) {
        for (int round = 0; round < 2; ++round)
            exchange(group, rank, shape, inputs, {}, &counters[rank]);
    });
    constexpr uint64_t kSecondDispatch = 3;
    const int64_t* seen = counters[1].view().ring_row(kSecondDispatch, 0, 2);
    const int64_t* own = counters[0].view().ring_row(kSecondDispatch, 2, 2);
    const int64_t* mine = counters[0].view().ring_row(kSecondDispatch, 0, 2);
    const int64_t until_issued = seen[kRingSource_issued] - seen[kRingSource_entered];
    const int64_t until_sent = own[kRingOwn_sent] - mine[kRingSource_entered];
    CHECK_THAT(0 <= until_issued && until_issued < until_sent / 2,
               std::to_string(until_issued) + " of " + std::to_string(until_sent) + " ns");
}

// ---- small collectives

TEST(barrier_holds_everyone_until_the_last_has_come) {
    Random random(ep::testing::seed());
    Group group(3, 4096);
    group.shake(random);
    std::atomic<int> entered = 0;
    on_ranks(3, [&](int rank) {
        for (int round = 1; round <= 10; ++round) {
            if (rank == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            entered.fetch_add(1);
            group[rank].barrier(0);
            CHECK(entered.load() >= 3 * round);
            CHECK(!group[rank].take_failure().has_value());
        }
    });
}

TEST(clock_offsets_are_recovered_within_the_round_trip) {
    constexpr int kRanks = 4;
    const std::array<int64_t, kRanks> offsets = {0, 5'000'000'000, -3'000'000, 123'456'789};
    Random random(ep::testing::seed());
    Group group(kRanks, 4096);
    for (int rank = 0; rank < kRanks; ++rank)
        group[rank].device().set_clock_fault(offsets[rank], 0);
    // More than once: later ones must not take replies of earlier ones.
    for (int repeat = 0; repeat < 6; ++repeat) {
        on_ranks(kRanks, [&](int rank) {
            const auto measured = group[rank].measure_clock_offsets(8, 0);
            CHECK(!group[rank].take_failure().has_value());
            for (int other = 0; other < kRanks; ++other) {
                const auto [offset, round_trip] = measured[other];
                const int64_t error = std::abs(offset - (offsets[other] - offsets[rank]));
                CHECK_THAT(
                    other == rank ? offset == 0 : error <= round_trip,
                    std::to_string(error) + " ns off, round trip " + std::to_string(round_trip));
            }
        });
        if (repeat > 0) group.shake(random);
    }
}

TEST(measurements_of_any_length_follow_each_other) {
    Group group(2, 4096);
    on_ranks(2, [&](int rank) {
        for (int num_samples = 1; num_samples <= 40; ++num_samples) {
            group[rank].measure_clock_offsets(num_samples % 5 + 1, 0);
            CHECK(!group[rank].take_failure().has_value());
        }
    });
}

TEST(exchanges_of_clocks_take_at_most_a_millionth_of_the_time) {
    constexpr uint64_t kSecond = 1'000'000'000;
    ClockSchedule schedule{kSecond, kSecond, kFirstClockIntervalNs, kSecond, 0};
    // What is free is paid by nobody: the interval doubles, and that is all.
    schedule_next_exchange(schedule, 2 * kSecond, kFreeClockNs);
    CHECK_EQUAL(schedule.next_ns, 2 * kSecond + 2 * kFirstClockIntervalNs);
    schedule_next_exchange(schedule, 3 * kSecond, 4000);
    CHECK_EQUAL(schedule.next_ns, kSecond + 4000 * kClockBudget);
}

// ---- failures

TEST(a_missing_rank_is_named_by_the_others) {
    const Shape shape{3, 2, 2, 128, 2};
    Group group(3, Runtime::low_latency_bytes(shape.size(), 3), 1'500'000'000);
    on_ranks(3, [&](int rank) {
        if (rank == 2) return;
        dispatch_nothing(group[rank], shape);
        check_failure(group[rank].take_failure(), FailureReason::kTimeout, {2});
        CHECK(!group[rank].take_failure().has_value());
    });
    on_ranks(3, [&](int rank) {
        if (rank == 1) return;
        group[rank].barrier(0);
        check_failure(group[rank].take_failure(), FailureReason::kTimeout, {1});
    });
}

TEST(a_group_works_on_after_a_timeout) {
    Random random(ep::testing::seed());
    const Shape shape{3, 2, 2, 128, 2};
    Group group(3, Runtime::low_latency_bytes(shape.size(), 3), 1'500'000'000);
    on_ranks(3, [&](int rank) {
        for (int missed = 0; rank != 1 && missed < 2; ++missed) {
            dispatch_nothing(group[rank], shape);
            check_failure(group[rank].take_failure(), FailureReason::kTimeout, {1});
        }
    });
    // The late rank learns that the others have given both up, and all meet in the next.
    dispatch_nothing(group[1], shape);
    const auto late = group[1].take_failure();
    CHECK(late.has_value());
    exchange_rounds(group, shape, 3, {}, random);
}

TEST(blocks_agree_on_whom_they_leave_out_and_ranks_join_again) {
    Random random(ep::testing::seed());
    const Shape shape{3, 2, 2, 128, 2};
    const size_t bytes = Runtime::low_latency_bytes(shape.size(), 3);
    Group group(3, bytes, 2'000'000'000, false, true);
    for (const auto& rank : group.ranks) {
        rank->device().set_schedule("random", random.bits());
        rank->set_launch_shape(random.between(2, 4), random.between(1, 2));
    }
    exchange_rounds(group, shape, 2, {}, random);
    on_ranks(3, [&](int rank) {
        if (rank == 1) return;
        for (int round = 0; round < 3; ++round) {
            dispatch_nothing(group[rank], shape);
            CHECK(!group[rank].take_failure().has_value());
        }
        const auto masked = group[rank].take_masked();
        CHECK_EQUAL(masked.size(), size_t{1});
        CHECK_EQUAL(masked[0].rank, 1);
        CHECK_EQUAL(masked[0].number, uint64_t{5});
        group[rank].barrier(0);
    });
    on_ranks(3, [&](int rank) { group[rank].clean_masks(0); });
    exchange_rounds(group, shape, 2, {}, random);
    on_ranks(3, [&](int rank) {
        group[rank].barrier(0);
        CHECK(group[rank].take_masked().empty());
        group[rank].part(0);
    });
}

// On a GPU both have run when the host looks: combine must not say something else over it.
TEST(an_entry_that_gets_no_row_is_an_error_of_the_dispatch_and_no_term_of_the_sum) {
    constexpr int64_t kFar = int64_t{1} << 32;
    constexpr int kWrong = 1;
    const Shape shape{2, 2, 2, 128, 3};
    // Of no expert, and of an expert that has all rows that a rank may send.
    for (const std::vector<int64_t>& passed : {std::vector<int64_t>{0, 4, -2, -1, kFar, kFar + 1},
                                               std::vector<int64_t>{0, 1, 0, 1, 0, 1}}) {
        Group group(shape);
        Random random(ep::testing::seed());
        auto inputs = random_inputs(shape, random);
        while (inputs[kWrong].num_tokens != shape.num_max_tokens)
            inputs = random_inputs(shape, random);
        inputs[kWrong].topk_idx = passed;
        std::vector<int> num_rows(shape.num_experts());
        for (int64_t& expert : inputs[kWrong].topk_idx) {
            const bool exists = expert >= 0 && expert < shape.num_experts();
            if (!exists || ++num_rows[expert] > shape.num_max_tokens) expert = -1;
        }
        on_ranks(shape.num_ranks, [&](int rank) {
            const bool is_wrong = rank == kWrong;
            exchange(group, rank, shape, inputs, {}, nullptr, is_wrong ? &passed : nullptr);
        });
        check_failure(group[kWrong].take_failure(), FailureReason::kIndex, {kWrong});
        on_ranks(shape.num_ranks,
                 [&](int rank) { exchange(group, rank, shape, inputs, {}, nullptr); });
    }
}

TEST(ranks_that_disagree_are_named_and_the_group_works_on) {
    Random random(ep::testing::seed());
    const Shape shape{3, 2, 2, 128, 2};
    Shape other = shape;
    other.hidden = 256;
    Group group(other);
    on_ranks(3, [&](int rank) {
        dispatch_nothing(group[rank], rank == 1 ? other : shape);
        const auto failure = group[rank].take_failure();
        check_failure(
            failure, FailureReason::kMismatch, rank == 1 ? std::vector{0, 2} : std::vector{1});
        CHECK_EQUAL(failure->expected.shape.hidden, rank == 1 ? 256u : 128u);
        CHECK_EQUAL(failure->seen.shape.hidden, rank == 1 ? 128u : 256u);
    });
    exchange_rounds(group, shape, 3, {}, random);
}

// What the host finds out, while ranks wait for one that is missing, ends their wait.
template <class Tell, class Check>
void check_news_end_the_wait(Tell tell, Check check) {
    const Shape shape{3, 2, 2, 128, 2};
    Group group(shape);
    on_ranks(4, [&](int rank) {
        if (rank == 2) return;
        if (rank == 3) {
            while (!group[0].progress().waiting || !group[1].progress().waiting)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            for (const int other : {0, 1}) tell(group[other]);
            return;
        }
        dispatch_nothing(group[rank], shape);
        const auto failure = group[rank].take_failure();
        CHECK(failure.has_value());
        check(*failure);
        CHECK(failure->reason == FailureReason::kTimeout);
        CHECK(failure->waited_ns < kPatienceNs / 2);
    });
}

TEST(a_rank_that_is_gone_ends_the_wait) {
    check_news_end_the_wait([](Runtime& runtime) { runtime.mark_gone(2, true); },
                            [](const Failure& failure) {
                                CHECK_THAT(failure.ranks == std::vector{2}, text_of(failure));
                            });
}
TEST(an_operation_that_the_host_gives_up_ends) {
    // Who had not been seen yet is named as well.
    check_news_end_the_wait(
        [](Runtime& runtime) { runtime.give_up(1); },
        [](const Failure& failure) { CHECK_THAT(failure.ranks.back() == 2, text_of(failure)); });
}

TEST(ranks_may_close_at_once_after_an_exchange) {
    Random random(ep::testing::seed());
    const Shape shape{3, 1, 2, 128, 1};
    for (int repeat = 0; repeat < 20; ++repeat) {
        Group group(shape);
        const auto inputs = random_inputs(shape, random);
        on_ranks(3, [&](int rank) {
            exchange(group, rank, shape, inputs, {}, nullptr);
            group[rank].close();
        });
    }
}
