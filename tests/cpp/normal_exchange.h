// An exchange of normal operations and what must come out of it: fresh dispatch, combine, and both again
// with the handle, on ranks that are threads of the test.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models.h"
#include "runtime/runtime.h"
#include "testing.h"

namespace ep::testing {

// ---- sizes

// What callers may change from call to call.
struct Setting {
    int num_channels;
    int nvl_send;
    int nvl_recv;  // per channel, of all nodes together
    int rdma_send;
    int rdma_recv;
};

struct Shape {
    int num_nodes;
    int ranks_per_node;
    int num_local_experts;
    int num_topk;
    int hidden;
    int num_scales;
    int num_max_tokens;

    int num_ranks() const { return num_nodes * ranks_per_node; }
    int num_experts() const { return num_ranks() * num_local_experts; }
    int row_bytes() const { return hidden * 2; }
    int node_of(int rank) const { return rank / ranks_per_node; }
    Topology topology() const { return {num_ranks(), ranks_per_node}; }
};

inline NormalSize size_of(
    const Shape& shape, const Setting& setting, int num_tokens, int num_topk, int num_scales) {
    return {num_tokens,
            shape.num_experts(),
            num_topk,
            num_scales,
            shape.row_bytes(),
            setting.num_channels,
            setting.nvl_send,
            setting.nvl_recv,
            setting.rdma_send,
            setting.rdma_recv};
}

// With queues of one slot to three, in pieces of one row or two.
inline Setting random_setting(const Shape& shape, Random& random) {
    return {random.between(1, 3),
            random.between(1, 2),
            shape.num_nodes * random.between(1, 3),
            random.between(1, 2),
            random.between(1, 3)};
}

// For every setting of random_setting().
inline NormalBytes bytes_for(const Shape& shape) {
    const Setting largest{3, 2, shape.num_nodes * 3, 2, 3};
    return Runtime::normal_bytes(
        size_of(shape, largest, shape.num_max_tokens, shape.num_topk, shape.num_scales),
        shape.topology());
}

inline RuntimeOptions options_of(const Shape& shape, int rank, uint64_t timeout_ns) {
    const NormalBytes bytes = bytes_for(shape);
    RuntimeOptions options;
    options.rank = rank;
    options.num_ranks = shape.num_ranks();
    options.num_nvl_bytes = bytes.nvl;
    options.num_rdma_bytes = bytes.rdma;
    options.timeout_ns = timeout_ns;
    options.ranks_per_node = shape.ranks_per_node;
    options.bulk_copies = rank % 2 == 0;  // ranks may differ in it
    return options;
}

// ---- ranks

struct Group {
    explicit Group(const Shape& shape) {
        std::vector<std::string> handles;
        for (int rank = 0; rank < shape.num_ranks(); ++rank) {
            ranks.push_back(std::make_unique<Runtime>(options_of(shape, rank, patience_ns())));
            handles.push_back(ranks.back()->local_handle());
        }
        for (const auto& rank : ranks) rank->connect(handles);
        for (const auto& rank : ranks) rank->release_handle();
    }
    Runtime& operator[](int rank) { return *ranks[rank]; }

    void shake(Random& random) {
        for (const auto& rank : ranks) {
            rank->device().set_schedule("random", random.bits());
            rank->memory().set_delivery(random.between(0, 3) == 0 ? "in-order" : "random",
                                        random.bits());
            rank->set_launch_shape(random.between(1, 3), random.between(1, 2));
        }
    }

    std::vector<std::unique_ptr<Runtime>> ranks;
};

// ---- one exchange, its inputs on all ranks, and what must come out

inline bf16 to_bf16(float value) { return {nearest_bf16(value)}; }
inline float to_float(bf16 value) { return static_cast<float>(value_of_bf16(value.bits)); }

struct Inputs {
    int num_tokens = 0;
    std::vector<bf16> x[2];  // [num_tokens, hidden], of the fresh and of the cached dispatch
    std::vector<uint32_t> scales[2];  // [num_tokens, num_scales]
    std::vector<int64_t> topk_idx;    // [num_tokens, num_topk]
    std::vector<float> topk_weights;
    std::vector<bf16> biases[2];  // [num_tokens, hidden]
    // What dispatch_layout() makes of topk_idx.
    std::vector<char> is_token_in_rank;  // [num_tokens, num_ranks]
    std::vector<int32_t> num_tokens_per_rank;
    std::vector<int32_t> num_tokens_per_expert;

    bool is_for(const Shape& shape, int token, int rank) const {
        return is_token_in_rank[static_cast<size_t>(token) * shape.num_ranks() + rank] != 0;
    }
    const bf16* row(const Shape& shape, int which, int token) const {
        return x[which].data() + static_cast<size_t>(token) * shape.hidden;
    }
};

inline void lay_out(const Shape& shape, Inputs& inputs) {
    inputs.is_token_in_rank.assign(static_cast<size_t>(inputs.num_tokens) * shape.num_ranks(), 0);
    inputs.num_tokens_per_rank.assign(shape.num_ranks(), 0);
    inputs.num_tokens_per_expert.assign(shape.num_experts(), 0);
    for (int token = 0; token < inputs.num_tokens; ++token) {
        for (int k = 0; k < shape.num_topk; ++k) {
            const int64_t expert = inputs.topk_idx[token * shape.num_topk + k];
            if (expert < 0) continue;
            ++inputs.num_tokens_per_expert[expert];
            const auto rank = static_cast<int>(expert / shape.num_local_experts);
            char& is_in = inputs.is_token_in_rank[token * shape.num_ranks() + rank];
            if (!is_in) ++inputs.num_tokens_per_rank[rank];
            is_in = 1;
        }
    }
}

// Ranks have no tokens, a few or all; some of them send everything to one rank.
inline std::vector<Inputs> random_inputs(const Shape& shape, Random& random) {
    std::vector<Inputs> all(shape.num_ranks());
    for (Inputs& inputs : all) {
        const int choice = random.between(0, 5);
        inputs.num_tokens = choice == 0   ? 0
                            : choice <= 2 ? shape.num_max_tokens
                                          : random.between(1, shape.num_max_tokens);
        const int favourite = random.between(-3, shape.num_experts() - 1);
        const auto elements = static_cast<size_t>(inputs.num_tokens) * shape.hidden;
        for (int which = 0; which < 2; ++which) {
            for (size_t i = 0; i < elements; ++i) {
                inputs.x[which].push_back(to_bf16(static_cast<float>(random.unit() * 8 - 4)));
                inputs.biases[which].push_back(to_bf16(static_cast<float>(random.unit() - 0.5)));
            }
            for (int i = 0; i < inputs.num_tokens * shape.num_scales; ++i)
                inputs.scales[which].push_back(static_cast<uint32_t>(random.bits()));
        }
        for (int token = 0; token < inputs.num_tokens; ++token) {
            std::vector<int64_t> experts(shape.num_experts());
            for (size_t i = 0; i < experts.size(); ++i) experts[i] = static_cast<int64_t>(i);
            if (favourite >= 0) std::swap(experts[0], experts[favourite]);
            for (int k = 0; k < shape.num_topk; ++k) {
                const int last = shape.num_experts() - 1;
                if (favourite < 0 || k > 0) std::swap(experts[k], experts[random.between(k, last)]);
                const bool dropped = random.between(0, 3) == 0;
                inputs.topk_idx.push_back(dropped ? -1 : experts[k]);
                inputs.topk_weights.push_back(static_cast<float>(random.unit()));
            }
        }
        lay_out(shape, inputs);
    }
    return all;
}

struct Origin {
    int source;
    int token;
};

// Rows of a rank in the order in which they must come.
inline std::vector<Origin> rows_of(const Shape& shape,
                                   const std::vector<Inputs>& inputs,
                                   int rank) {
    std::vector<Origin> rows;
    for (int source = 0; source < shape.num_ranks(); ++source) {
        for (int token = 0; token < inputs[source].num_tokens; ++token) {
            if (inputs[source].is_for(shape, token, rank)) rows.push_back({source, token});
        }
    }
    return rows;
}

// Rows that a rank passes on: from those of its place on other nodes.
inline int num_relayed(const Shape& shape, const std::vector<Inputs>& inputs, int rank) {
    int rows = 0;
    for (int source = 0; source < shape.num_ranks(); ++source) {
        const bool is_peer = source % shape.ranks_per_node == rank % shape.ranks_per_node;
        if (!is_peer || shape.node_of(source) == shape.node_of(rank)) continue;
        for (int token = 0; token < inputs[source].num_tokens; ++token) {
            bool crosses = false;
            for (int other = 0; other < shape.num_ranks(); ++other) {
                crosses = crosses || (shape.node_of(other) == shape.node_of(rank) &&
                                      inputs[source].is_for(shape, token, other));
            }
            rows += crosses ? 1 : 0;
        }
    }
    return rows;
}

// What a rank makes of a row, and of a weight: differs per rank, so that a row in a wrong place shows, and
// so does another order of the sum.
inline float output(int rank, float value) {
    return value * (0.5f + 0.3f * static_cast<float>(rank)) + static_cast<float>(rank);
}
inline float returned_weight(int rank, const Origin& origin, int k) {
    return 1.0f / static_cast<float>(3 + 31 * rank + 7 * origin.source + 3 * origin.token + k);
}

// What a rank counts of one hop.
struct HopCounters {
    explicit HopCounters(int num_ranks)
        : num_ranks(num_ranks),
          totals(static_cast<size_t>(kNumSourceCounters) * num_ranks),
          own(kNumOwnCounters),
          ring(static_cast<size_t>(kCapacity) * (num_ranks + 1) * kNumRingFields) {}
    static constexpr int kCapacity = 2;
    CounterView view() { return {totals.data(), own.data(), ring.data(), kCapacity}; }
    int64_t tokens() const {
        int64_t sum = 0;
        for (int source = 0; source < num_ranks; ++source)
            sum += totals[kSource_tokens * num_ranks + source];
        return sum;
    }

    int num_ranks;
    std::vector<int64_t> totals;
    std::vector<int64_t> own;
    std::vector<int64_t> ring;
};

struct Handle {
    Handle(const Shape& shape, const Setting& setting, int num_tokens)
        : source_prefix(shape.num_ranks()),
          channel_prefix(shape.num_ranks() * setting.num_channels, kUnwritten),
          recv_channel_prefix(shape.num_ranks() * setting.num_channels),
          node_channel_prefix(shape.num_nodes * setting.num_channels, kUnwritten),
          recv_node_channel_prefix(shape.num_nodes * setting.num_channels),
          recv_node_prefix(shape.num_nodes),
          node_head(num_tokens * shape.num_nodes, -1) {}

    static constexpr int32_t kUnwritten = 7;  // what memory may hold before
    std::vector<int32_t> source_prefix;
    std::vector<int32_t> channel_prefix;
    std::vector<int32_t> recv_channel_prefix;
    std::vector<int32_t> node_channel_prefix;
    std::vector<int32_t> recv_node_channel_prefix;
    std::vector<int32_t> recv_node_prefix;
    std::vector<int32_t> node_head;
    std::vector<int32_t> nvl_head;  // once it is known what is relayed
    uint64_t dispatch_op = 0;
    int num_rows = 0;
    int num_relayed = 0;
};

struct Received {
    Received(const Shape& shape, size_t rows)
        : x(rows * shape.hidden),
          scales(rows * shape.num_scales),
          topk_idx(rows * shape.num_topk),
          topk_weights(rows * shape.num_topk),
          src_idx(rows),
          src_meta(2 * rows) {}

    std::vector<bf16> x;
    std::vector<uint32_t> scales;
    std::vector<int64_t> topk_idx;
    std::vector<float> topk_weights;
    std::vector<int32_t> src_idx;
    std::vector<int32_t> src_meta;
};

// What a round is made of, beside its tokens.
struct Round {
    Setting setting;
    std::vector<Inputs> inputs;
    bool has_topk;     // with rows
    bool has_weights;  // with rows that go back
    int num_biases;
    bool again;  // a cached dispatch follows, and its combine
    bool combines = true;
};

inline Round random_round(const Shape& shape, const Setting& setting, Random& random) {
    return {setting,
            random_inputs(shape, random),
            random.between(0, 3) != 0,
            random.between(0, 3) != 0,
            random.between(0, 2),
            random.between(0, 1) == 0};
}

// One rank in one round.
struct Exchange {
    Exchange(Runtime& runtime, int rank, const Shape& shape, const Round& round)
        : runtime(runtime),
          rank(rank),
          shape(shape),
          round(round),
          mine(round.inputs[rank]),
          rows(rows_of(shape, round.inputs, rank)),
          handle(shape, round.setting, mine.num_tokens),
          received_rows(shape.num_ranks()),
          relayed_rows(shape.num_ranks()),
          notices(shape.num_ranks()) {}

    template <class Call>
    Call call_of(int num_topk, int num_scales) {
        Call call;
        static_cast<NormalSize&>(call) =
            size_of(shape, round.setting, mine.num_tokens, num_topk, num_scales);
        call.is_token_in_rank = reinterpret_cast<const bool*>(mine.is_token_in_rank.data());
        call.source_prefix = handle.source_prefix.data();
        call.source_stride = 1;
        call.channel_prefix = handle.channel_prefix.data();
        call.recv_channel_prefix = handle.recv_channel_prefix.data();
        call.node_channel_prefix = handle.node_channel_prefix.data();
        call.recv_node_channel_prefix = handle.recv_node_channel_prefix.data();
        call.recv_node_prefix = handle.recv_node_prefix.data();
        call.node_head = handle.node_head.data();
        call.nvl_head = handle.nvl_head.data();
        call.dispatch_op = &handle.dispatch_op;
        packs.resize(std::max<size_t>(std::max<size_t>(mine.num_tokens, rows.size()), 1) *
                     NormalRow{0, num_topk, num_scales, false}.pack_bytes());
        return call;
    }
    int dispatched_topk() const { return round.has_topk ? shape.num_topk : 0; }

    // The first half of a fresh dispatch. Whether there are counts.
    bool notify(const std::vector<int32_t>& num_tokens_per_rank) {
        auto call = call_of<NotifyCall>(dispatched_topk(), shape.num_scales);
        call.num_tokens_per_rank = num_tokens_per_rank.data();
        call.num_tokens_per_expert = mine.num_tokens_per_expert.data();
        call.notify_counters = notices.view();
        runtime.normal_notify(call);
        const auto counts = runtime.normal_counts();
        if (!counts.has_value()) return false;
        handle.num_rows = counts->num_rows;
        handle.num_relayed = counts->num_relayed;
        handle.nvl_head.assign((mine.num_tokens + counts->num_relayed) * shape.ranks_per_node, -1);
        per_expert = counts->per_expert;
        return true;
    }
    void check_counts() const {
        CHECK_EQUAL(handle.num_rows, static_cast<int>(rows.size()));
        CHECK_EQUAL(handle.num_relayed, num_relayed(shape, round.inputs, rank));
        for (int local = 0; local < shape.num_local_experts; ++local) {
            int32_t expected = 0;
            for (const Inputs& inputs : round.inputs)
                expected += inputs.num_tokens_per_expert[rank * shape.num_local_experts + local];
            CHECK_EQUAL(per_expert[local], expected);
        }
    }
    NormalDispatchCall dispatch_call(int which, Received& received) {
        const bool fresh = which == 0;
        auto call = call_of<NormalDispatchCall>(fresh ? dispatched_topk() : 0, shape.num_scales);
        call.fresh = fresh;
        call.x = reinterpret_cast<const std::byte*>(mine.x[which].data());
        call.scales = mine.scales[which].data();
        call.scale_row_stride = shape.num_scales;
        call.scale_column_stride = 1;
        call.topk_idx = mine.topk_idx.data();
        call.topk_weights = mine.topk_weights.data();
        call.packs = packs.data();
        call.recv_x = reinterpret_cast<std::byte*>(received.x.data());
        call.recv_scales = received.scales.data();
        call.recv_topk_idx = received.topk_idx.data();
        call.recv_topk_weights = received.topk_weights.data();
        call.recv_src_idx = shape.num_nodes == 1 ? received.src_idx.data() : nullptr;
        call.recv_src_meta = shape.num_nodes == 1 ? nullptr : received.src_meta.data();
        call.num_recv_rows = handle.num_rows;
        call.num_relay_rows = handle.num_relayed;
        call.counters = received_rows.view();
        call.relay_counters = relayed_rows.view();
        return call;
    }
    // `which`: 0, fresh, after notify(); 1, with its handle.
    Received dispatch(int which) {
        Received received(shape, handle.num_rows);
        runtime.normal_dispatch(dispatch_call(which, received));
        return received;
    }
    // Ends what notify() has begun.
    void abandon() {
        Received nothing(shape, 0);
        auto call = dispatch_call(0, nothing);
        call.abandon = true;
        runtime.normal_dispatch(call);
    }
    void check_received(int which, const Received& received) const {
        for (size_t row = 0; row < rows.size(); ++row) {
            const auto [source, token] = rows[row];
            const Inputs& theirs = round.inputs[source];
            CHECK(std::equal(theirs.row(shape, which, token),
                             theirs.row(shape, which, token) + shape.hidden,
                             received.x.data() + row * shape.hidden,
                             [](bf16 a, bf16 b) { return a.bits == b.bits; }));
            for (int i = 0; i < shape.num_scales; ++i)
                CHECK_EQUAL(received.scales[row * shape.num_scales + i],
                            theirs.scales[which][token * shape.num_scales + i]);
            if (which == 1) continue;
            if (shape.num_nodes == 1) CHECK_EQUAL(received.src_idx[row], token);
            if (shape.num_nodes > 1) {
                CHECK_EQUAL(received.src_meta[2 * row], shape.node_of(source));
                CHECK_EQUAL(received.src_meta[2 * row + 1], token);
            }
            for (int k = 0; k < dispatched_topk(); ++k) {
                const int64_t expert = theirs.topk_idx[token * shape.num_topk + k];
                const bool is_here = expert >= 0 && expert / shape.num_local_experts == rank;
                CHECK_EQUAL(received.topk_idx[row * shape.num_topk + k],
                            is_here ? expert % shape.num_local_experts : -1);
                CHECK_EQUAL(received.topk_weights[row * shape.num_topk + k],
                            is_here ? theirs.topk_weights[token * shape.num_topk + k] : 0.0f);
            }
        }
    }

    // Returns what experts make of the rows.
    void combine(int which) {
        std::vector<bf16> x;
        std::vector<float> weights;
        for (const Origin& origin : rows) {
            const bf16* row = round.inputs[origin.source].row(shape, which, origin.token);
            for (int i = 0; i < shape.hidden; ++i)
                x.push_back(to_bf16(output(rank, to_float(row[i]))));
            for (int k = 0; k < shape.num_topk; ++k)
                weights.push_back(returned_weight(rank, origin, k));
        }
        const int num_topk = round.has_weights ? shape.num_topk : 0;
        combined.assign(static_cast<size_t>(mine.num_tokens) * shape.hidden, {});
        combined_weights.assign(static_cast<size_t>(mine.num_tokens) * shape.num_topk, 0.0f);
        auto call = call_of<NormalCombineCall>(num_topk, 0);
        call.x = x.data();
        call.topk_weights = weights.data();
        call.packs = packs.data();
        call.bias_0 = round.num_biases > 0 ? mine.biases[0].data() : nullptr;
        call.bias_1 = round.num_biases > 1 ? mine.biases[1].data() : nullptr;
        call.combined_x = combined.data();
        call.combined_topk_weights = combined_weights.data();
        call.num_rows = static_cast<int>(rows.size());
        call.num_relay_rows = handle.num_relayed;
        runtime.normal_combine(call);
    }
    // The sum of a token in fp32: first(), then the own node rank by rank, and the sums of the others.
    template <class Term, class Round>
    float sum_of(int token, float sum, Term term, Round rounded) const {
        for (int node = 0; node < shape.num_nodes; ++node) {
            const bool is_own = node == shape.node_of(rank);
            float of_node = 0.0f;
            bool has_any = false;
            for (int local = 0; local < shape.ranks_per_node; ++local) {
                const int other = node * shape.ranks_per_node + local;
                if (!mine.is_for(shape, token, other)) continue;
                has_any = true;
                (is_own ? sum : of_node) += term(other);
            }
            if (!is_own && has_any) sum += rounded(of_node);
        }
        return sum;
    }
    void check_combined(int which) const {
        for (int token = 0; token < mine.num_tokens; ++token) {
            for (int i = 0; i < shape.hidden; ++i) {
                const size_t index = static_cast<size_t>(token) * shape.hidden + i;
                float begin = 0.0f;
                for (int bias = 0; bias < round.num_biases; ++bias)
                    begin += to_float(mine.biases[bias][index]);
                const auto rounded = [](float value) { return to_float(to_bf16(value)); };
                const auto term = [&](int other) {
                    return rounded(output(other, to_float(mine.row(shape, which, token)[i])));
                };
                CHECK_EQUAL(combined[index].bits,
                            to_bf16(sum_of(token, begin, term, rounded)).bits);
            }
            for (int k = 0; round.has_weights && k < shape.num_topk; ++k) {
                const auto term = [&](int other) {
                    return returned_weight(other, {rank, token}, k);
                };
                CHECK_EQUAL(combined_weights[token * shape.num_topk + k],
                            sum_of(token, 0.0f, term, [](float value) { return value; }));
            }
        }
    }

    // All of it, with checks.
    void run() {
        CHECK(notify(mine.num_tokens_per_rank));
        check_counts();
        for (int which = 0; which < (round.again ? 2 : 1); ++which) {
            const Received received = dispatch(which);
            CHECK(!runtime.take_failure().has_value());
            check_received(which, received);
            CHECK_EQUAL(received_rows.tokens(), (which + 1) * handle.num_rows);
            CHECK_EQUAL(relayed_rows.tokens(), (which + 1) * handle.num_relayed);
            if (!round.combines) continue;
            combine(which);
            CHECK(!runtime.take_failure().has_value());
            check_combined(which);
        }
    }

    Runtime& runtime;
    int rank;
    const Shape& shape;
    const Round& round;
    const Inputs& mine;
    std::vector<Origin> rows;
    Handle handle;
    HopCounters received_rows;
    HopCounters relayed_rows;
    HopCounters notices;
    std::vector<int> per_expert;
    std::vector<std::byte> packs;
    std::vector<bf16> combined;
    std::vector<float> combined_weights;
};

// ---- shapes, and what fails

//                                    nodes, ranks, experts, top-k, hidden, scales, tokens
inline constexpr Shape kOneRank = /*      */ {1, 1, 3, 2, 16, 0, 5};
inline constexpr Shape kOneNode = /*      */ {1, 4, 2, 4, 24, 3, 9};
inline constexpr Shape kTwoNodes = /*     */ {2, 2, 2, 4, 16, 2, 9};
inline constexpr Shape kNodePerRank = /*  */ {4, 1, 1, 2, 40, 0, 7};

// As many tokens as there may be, each for every rank.
inline Inputs everything_to_all(const Shape& shape) {
    Inputs all;
    all.num_tokens = shape.num_max_tokens;
    for (int which = 0; which < 2; ++which) {
        all.x[which].resize(all.num_tokens * shape.hidden);
        all.biases[which].resize(all.num_tokens * shape.hidden);
        all.scales[which].resize(all.num_tokens * shape.num_scales);
    }
    for (int i = 0; i < all.num_tokens * shape.num_topk; ++i)
        all.topk_idx.push_back(i % shape.num_topk * shape.num_experts() / shape.num_topk);
    all.topk_weights.resize(all.topk_idx.size());
    lay_out(shape, all);
    return all;
}

inline void check_failure(const std::optional<ep::Failure>& failure,
                          FailureReason reason,
                          const std::vector<int>& ranks) {
    CHECK(failure.has_value());
    std::string text = "reason " + std::to_string(static_cast<int>(failure->reason)) + " ranks";
    for (const int rank : failure->ranks) text += " " + std::to_string(rank);
    CHECK_THAT(failure->reason == reason && failure->ranks == ranks, text);
}

// Others have given up, those that began with it or those that followed them.
inline void check_abandoned(const std::optional<ep::Failure>& failure, int rank) {
    CHECK(failure.has_value());
    CHECK(failure->reason == FailureReason::kAbandoned && !failure->ranks.empty());
    CHECK(std::count(failure->ranks.begin(), failure->ranks.end(), rank) == 0);
}

}  // namespace ep::testing
