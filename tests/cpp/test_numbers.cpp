// Number formats against slow models of their definitions, and what travels between ranks: words
// that pack several fields, memory maps, and the parts of a wait.
// sanitize: address
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/low_latency/handle.cuh"
#include "kernels/protocol/counters.cuh"
#include "kernels/protocol/measuring.cuh"
#include "kernels/protocol/messages.cuh"
#include "models.h"
#include "testing.h"

using namespace ep;
using ep::testing::Random;

namespace {

float any_float(Random& random) { return bits_to_float(static_cast<uint32_t>(random.bits())); }

// Sign and 10 binary exponents around one: where data live.
float ordinary_float(Random& random) {
    return static_cast<float>(std::ldexp(random.unit() * 2 - 1, random.between(-12, 12)));
}

std::string hex(uint32_t value) {
    char text[16];
    std::snprintf(text, sizeof(text), "%08x", value);
    return text;
}

void compare_e4m3(const float (&values)[kVectorElements]) {
    const uint64_t codes = to_e4m3(values);
    for (int i = 0; i < kVectorElements; ++i) {
        const auto code = static_cast<uint8_t>(codes >> (8 * i));
        const uint8_t expected = ep::testing::nearest_e4m3(values[i]);
        CHECK_THAT(code == expected,
                   hex(float_to_bits(values[i])) + " became " + hex(code) + " instead of " +
                       hex(expected));
    }
}

void compare_pack(const float (&values)[kVectorElements]) {
    const Vector packed = pack(values);
    uint16_t codes[kVectorElements];
    std::memcpy(codes, &packed, sizeof(codes));
    for (int i = 0; i < kVectorElements; ++i) {
        if (std::isnan(values[i])) {
            CHECK(std::isnan(ep::testing::value_of_bf16(codes[i])));
            continue;
        }
        const uint16_t expected = ep::testing::nearest_bf16(values[i]);
        CHECK_THAT(codes[i] == expected,
                   hex(float_to_bits(values[i])) + " became " + hex(codes[i]) + " instead of " +
                       hex(expected));
    }
}

// Vectors of all bf16 values, 8 at a time.
template <class F>
void for_all_bf16(F f) {
    for (uint32_t first = 0; first < 0x10000; first += kVectorElements) {
        uint16_t codes[kVectorElements];
        for (uint32_t i = 0; i < kVectorElements; ++i) codes[i] = static_cast<uint16_t>(first + i);
        Vector vector;
        std::memcpy(&vector, codes, sizeof(vector));
        f(codes, vector);
    }
}

}  // namespace

TEST(to_e4m3_of_every_bf16) {
    for_all_bf16([](const uint16_t(&)[kVectorElements], const Vector& vector) {
        float values[kVectorElements];
        unpack(vector, values);
        compare_e4m3(values);
    });
}

TEST(to_e4m3_of_random_floats) {
    Random random(ep::testing::seed());
    for (int i = 0; i < 40'000; ++i) {
        float values[kVectorElements];
        for (float& value : values) value = i % 2 == 0 ? any_float(random) : ordinary_float(random);
        compare_e4m3(values);
    }
}

TEST(to_e4m3_at_ties_and_limits) {
    // Every code, the midpoint to the next, and their neighbours.
    std::vector<float> points = {448.0f, 464.0f, 1e30f, INFINITY, NAN, 0.0f};
    for (uint8_t code = 0; code < 0x7E; ++code) {
        const double here = ep::testing::value_of_e4m3(code);
        const double next = ep::testing::value_of_e4m3(static_cast<uint8_t>(code + 1));
        for (const double point : {here, (here + next) / 2}) {
            const auto value = static_cast<float>(point);
            points.insert(points.end(),
                          {value, std::nextafter(value, 0.0f), std::nextafter(value, 1e9f)});
        }
    }
    for (const float point : points) {
        compare_e4m3({point, -point, point, -point, point, -point, point, -point});
    }
}

TEST(unpack_and_pack_every_bf16) {
    for_all_bf16([](const uint16_t(&codes)[kVectorElements], const Vector& vector) {
        float values[kVectorElements];
        unpack(vector, values);
        for (int i = 0; i < kVectorElements; ++i) {
            CHECK_EQUAL(float_to_bits(values[i]), static_cast<uint32_t>(codes[i]) << 16);
        }
        compare_pack(values);
    });
}

TEST(pack_rounds_to_nearest_even) {
    Random random(ep::testing::seed());
    for (int i = 0; i < 40'000; ++i) {
        float values[kVectorElements];
        for (float& value : values) value = i % 2 == 0 ? any_float(random) : ordinary_float(random);
        if (i % 4 == 3) {
            for (float& value : values)
                value = bits_to_float((float_to_bits(value) & 0xFFFF0000u) | 0x8000u);
        }
        compare_pack(values);
    }
    constexpr float kLargest = std::numeric_limits<float>::max();
    compare_pack({kLargest, -kLargest, INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 1e-45f});
}

TEST(fp8_scale_is_the_specification_s) {
    Random random(ep::testing::seed());
    std::vector<float> maxima = {0.0f, 1e-5f, 1e-4f, 448.0f, 1.0f, 3e38f};
    for (int exponent = -10; exponent <= 20; ++exponent)
        maxima.push_back(448.0f * std::ldexp(1.0f, exponent));
    for (int i = 0; i < 20'000; ++i) maxima.push_back(std::fabs(ordinary_float(random)));
    for (const float abs_max : maxima) {
        const float bounded = std::max(abs_max, 1e-4f);
        const Fp8Scale plain = fp8_scale(abs_max, false);
        CHECK_EQUAL(plain.multiplier, 448.0f / bounded);
        CHECK_EQUAL(plain.stored, bounded * (1.0f / 448.0f));

        const Fp8Scale power = fp8_scale(abs_max, true);
        int exponent = 0;
        CHECK_EQUAL(std::frexp(power.stored, &exponent), 0.5f);
        CHECK_EQUAL(power.multiplier * power.stored, 1.0f);
        // The smallest power of two that is not below the plain scale.
        CHECK(power.stored >= plain.stored && power.stored * 0.5f < plain.stored);
        CHECK_EQUAL(std::ldexp(1.0, ue8m0(power.stored) - 127), static_cast<double>(power.stored));
    }
    CHECK(std::isnan(fp8_scale(NAN, false).stored));
}

TEST(logfmt_round_trip_error_is_bounded) {
    Random random(ep::testing::seed());
    for (int group = 0; group < 2000; ++group) {
        const int spread = random.between(0, 60);  // binary exponents between smallest and largest
        std::vector<float> values(kLogGroup);
        float smallest = INFINITY;
        float largest = 0;
        for (float& value : values) {
            value = random.between(0, 20) == 0
                        ? 0.0f
                        : static_cast<float>(
                              std::ldexp(random.unit() + 0.5, random.between(-spread, 0)));
            if (random.between(0, 1) == 0) value = -value;
            if (value != 0.0f) smallest = std::min(smallest, std::fabs(value));
            largest = std::max(largest, std::fabs(value));
        }
        const LogScale scale = log_scale(smallest, largest);
        const double lowest = std::exp2(scale.low);
        const double half_step = (std::exp2(scale.step) - 1) / 2;
        CHECK(scale.step <= kLogRange / (kLogCodes - 1) * (1 + 1e-6));
        for (const float value : values) {
            const uint32_t code = log_encode(value, scale);
            CHECK(code < 1024);
            const float back = log_decode(code, scale);
            if (value == 0.0f) {
                CHECK_EQUAL(back, 0.0f);
                continue;
            }
            CHECK(back == 0.0f || std::signbit(back) == std::signbit(value));
            const double magnitude = std::fabs(value);
            // Nearest of two neighbours; below the range, nearest of zero and its lower end.
            const double bound = magnitude >= lowest ? magnitude * half_step : lowest / 2;
            CHECK_THAT(std::fabs(back - value) <= bound + magnitude * 1e-5,
                       std::to_string(value) + " became " + std::to_string(back));
        }
    }
}

TEST(logfmt_special_groups) {
    const LogScale equal = log_scale(3.0f, 3.0f);
    CHECK_EQUAL(equal.step, 0.0f);
    CHECK(std::fabs(log_decode(log_encode(3.0f, equal), equal) - 3.0f) < 1e-5f);
    CHECK(std::fabs(log_decode(log_encode(-3.0f, equal), equal) + 3.0f) < 1e-5f);
    const LogScale no_smallest = log_scale(0.0f, 2.0f);
    CHECK_EQUAL(log_decode(log_encode(0.0f, no_smallest), no_smallest), 0.0f);
    CHECK(std::fabs(log_decode(log_encode(2.0f, no_smallest), no_smallest) - 2.0f) < 1e-4f);
}

// ---- words

TEST(count_word_round_trip) {
    Random random(ep::testing::seed());
    for (int i = 0; i < 10'000; ++i) {
        const CountWord word{CountWord::tag_of(random.bits()),
                             static_cast<uint32_t>(random.between(0, kMaxCount)),
                             static_cast<uint32_t>(random.bits())};
        const CountWord back = CountWord::unpack(word.pack());
        CHECK(back.tag == word.tag && back.count == word.count && back.issued_lo == word.issued_lo);
        CHECK(word.tag >= 1 && word.tag <= 0xFFFF);
        CHECK(word.pack() != 0);
    }
    for (const uint64_t op : {1ull, 0xFFFEull, 0xFFFFull, 0x10000ull, 0x123456789ull}) {
        CHECK(CountWord::tag_of(op) != CountWord::tag_of(op + 1));
        CHECK(CountWord::tag_of(op) != CountWord::tag_of(op + 2));
    }
}

TEST(count_word_recovers_the_full_stamp) {
    Random random(ep::testing::seed());
    for (int i = 0; i < 10'000; ++i) {
        const uint64_t entered = random.bits() >> 4;
        const uint64_t issued = entered + (random.bits() >> 32);  // less than 2^32 ns later
        const CountWord word{1, 0, static_cast<uint32_t>(issued)};
        CHECK_EQUAL(entered + CountWord::unpack(word.pack()).issue_ns(entered), issued);
    }
}

TEST(op_shape_round_trips) {
    Random random(ep::testing::seed());
    for (int i = 0; i < 10'000; ++i) {
        const OpShape shape{static_cast<uint32_t>(random.bits()),
                            static_cast<uint32_t>(random.bits()),
                            static_cast<uint32_t>(random.bits()),
                            static_cast<uint16_t>(random.bits()),
                            static_cast<uint16_t>(random.bits())};
        const OpShape same = OpShape::from_words(shape.word(0), shape.word(1));
        CHECK(same.num_max_tokens == shape.num_max_tokens && same.hidden == shape.hidden &&
              same.num_experts == shape.num_experts &&
              same.message_format == shape.message_format && same.operation == shape.operation);
    }
}

// ---- maps

namespace {

struct Region {
    size_t begin;
    size_t bytes;
    std::string name;
};

void check_disjoint(std::vector<Region> regions, size_t begin, size_t end) {
    std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) {
        return a.begin < b.begin;
    });
    size_t last_end = begin;
    std::string last = "the begin";
    for (const Region& region : regions) {
        CHECK_THAT(region.begin >= last_end, region.name + " overlaps " + last);
        last_end = region.begin + region.bytes;
        last = region.name;
    }
    CHECK_THAT(last_end <= end, last + " ends behind the end");
}

std::string indexed(const char* name, int a, int b, size_t c) {
    return std::string(name) + "(" + std::to_string(a) + ", " + std::to_string(b) + ", " +
           std::to_string(c) + ")";
}

}  // namespace

TEST(low_latency_map_regions_do_not_overlap) {
    Random random(ep::testing::seed());
    for (int repeat = 0; repeat < 60; ++repeat) {
        const int num_ranks = random.between(1, 5);
        const LowLatencyMap map{num_ranks,
                                num_ranks * random.between(1, 3),
                                random.between(1, 9),
                                kChannelsPerScale * random.between(1, 9),
                                4096u * random.between(0, 3)};
        const int num_local = map.num_local_experts();
        std::vector<Region> regions;
        for (int half = 0; half < kNumHalves; ++half) {
            for (int token = 0; token < map.num_max_tokens; ++token) {
                regions.push_back({map.dispatch_staging(half, token),
                                   map.max_dispatch_bytes(),
                                   indexed("dispatch_staging", half, token, 0)});
            }
            for (int expert = 0; expert < num_local; ++expert) {
                for (size_t row = 0; row < map.rows_per_expert(); ++row) {
                    regions.push_back({map.combine_staging(half, expert, row),
                                       map.combine_bytes(),
                                       indexed("combine_staging", half, expert, row)});
                }
            }
            regions.push_back(
                {map.receive(half), map.receive_bytes(), indexed("receive", half, 0, 0)});
        }
        for (const Region& region : regions)
            CHECK_THAT(region.begin % kRowAlignment == 0, region.name);
        check_disjoint(regions, map.begin, map.begin + map.bytes());
    }
}

TEST(low_latency_map_rows_stay_in_their_half) {
    Random random(ep::testing::seed());
    for (int repeat = 0; repeat < 30; ++repeat) {
        const int num_ranks = random.between(1, 4);
        const LowLatencyMap map{num_ranks,
                                num_ranks * random.between(1, 3),
                                random.between(1, 6),
                                kChannelsPerScale * random.between(1, 9),
                                0};
        for (int half = 0; half < kNumHalves; ++half) {
            const size_t begin = map.receive(half);
            const size_t end = begin + map.receive_bytes();
            for (const Payload payload :
                 {Payload::kBf16, Payload::kFp8, Payload::kFp8PowerOfTwo, Payload::kFp8Ue8m0}) {
                const DispatchMessage message{map.hidden, payload};
                CHECK(message.bytes() <= map.max_dispatch_bytes());
                CHECK(message.scales_offset() + message.num_scale_items() * sizeof(uint32_t) <=
                      message.bytes());
                std::vector<Region> rows;
                for (int expert = 0; expert < map.num_local_experts(); ++expert) {
                    for (int source = 0; source < num_ranks; ++source) {
                        for (int position = 0; position < map.num_max_tokens; ++position) {
                            rows.push_back({map.dispatched_row(
                                                half, expert, source, position, message.stride()),
                                            message.bytes(),
                                            indexed("dispatched_row", expert, source, position)});
                        }
                    }
                }
                for (const Region& row : rows) CHECK_THAT(row.begin % kRowAlignment == 0, row.name);
                check_disjoint(rows, begin, end);
            }
            std::vector<Region> rows;
            for (int expert = 0; expert < map.num_experts; ++expert) {
                for (int position = 0; position < map.num_max_tokens; ++position) {
                    rows.push_back({map.combined_row(half, expert, position),
                                    map.combine_bytes(),
                                    indexed("combined_row", expert, position, 0)});
                }
            }
            check_disjoint(rows, begin, end);
            const CombineMessage message{map.hidden};
            CHECK(message.data_offset() + message.log_bytes() <= message.stride());
            CHECK(message.data_offset() % kRowAlignment == 0);
        }
    }
}

TEST(a_rank_without_tokens_gets_blocks_for_what_it_may_receive) {
    const LowLatencyMap map{8, 32, 128, 7168, 0};
    constexpr int kWarps = 8;
    const int all_rows = 4 * 8 * 128;
    CHECK(operation_blocks(map, 0, kWarps) == all_rows / kWarps);
    CHECK(operation_blocks(map, 128, kWarps) == all_rows / kWarps);
    const LowLatencyMap small{2, 2, 4, 7168, 0};
    CHECK(operation_blocks(small, 0, kWarps) == 1);
    CHECK(operation_blocks(small, 4, kWarps) == 4);
}

TEST(an_entry_of_a_handle_is_intact_within_its_bounds_alone) {
    constexpr LowLatencyMap kMap{2, 4, 3, kChannelsPerScale, 0};
    for (const size_t index : {0u, 1u, 8u}) {
        for (int32_t expert = 0; expert < 6; ++expert) {
            for (uint32_t position = 0; position < 5; ++position) {
                const HandleEntry entry = HandleEntry::of(index, expert, position);
                CHECK(entry.was_sent_to(expert) && entry.allows(expert) && entry.allows(-1));
                CHECK(!entry.was_sent_to(-1) && !entry.allows(expert + 1));
                CHECK_EQUAL(entry.named(), expert);
                CHECK_EQUAL(entry.place(), static_cast<int>(position));
                const bool intact = expert < kMap.num_experts && position < 3;
                CHECK_EQUAL(entry.is_intact(index, kMap), intact);
            }
        }
    }
}

TEST(an_entry_of_a_handle_without_a_row_allows_its_expert_alone) {
    for (const int64_t expert : {0, 1, kMaxExperts - 1}) {
        const HandleEntry entry = HandleEntry::without_row(expert);
        CHECK_EQUAL(entry.named(), expert);
        CHECK(!entry.was_sent_to(expert) && entry.allows(expert) && !entry.allows(expert + 1));
    }
    const HandleEntry none = HandleEntry::without_row(-3);
    CHECK_EQUAL(none.named(), -1);
    CHECK(none.allows(-1) && !none.allows(0) && !none.allows(1));
    // None of those that are no experts is taken for one.
    for (int bit = 12; bit < 63; ++bit) {
        for (const int64_t offset : {-3, -2, -1, 0, 1}) {
            const int64_t far = (int64_t{1} << bit) + offset;
            const HandleEntry entry = HandleEntry::without_row(far);
            CHECK(entry.expert < 0 && entry.allows(far));
        }
    }
}

TEST(control_map_words_do_not_overlap) {
    for (const int num_ranks : {1, 2, 3, 8, 64}) {
        const ControlMap map{num_ranks};
        std::vector<Region> regions;
        for (int half = 0; half < kNumHalves; ++half) {
            for (int rank = 0; rank < num_ranks; ++rank) {
                regions.push_back(
                    {map.header(half, rank), sizeof(OpHeader), indexed("header", half, rank, 0)});
            }
            regions.push_back(
                {map.count(half, 0), kMaxExperts * sizeof(uint64_t), indexed("count", half, 0, 0)});
        }
        for (int rank = 0; rank < num_ranks; ++rank) {
            for (int exchange = 0; exchange < static_cast<int>(ClockExchange::kEnd); ++exchange) {
                regions.push_back({map.clock_slot(static_cast<ClockExchange>(exchange), rank),
                                   sizeof(ClockSlot),
                                   indexed("clock_slot", exchange, rank, 0)});
            }
            regions.push_back(
                {map.barrier(rank), sizeof(uint64_t), indexed("barrier", rank, 0, 0)});
            for (int series = 0; series < static_cast<int>(Series::kEnd); ++series) {
                regions.push_back({map.given_up(static_cast<Series>(series), rank),
                                   sizeof(uint64_t),
                                   indexed("given_up", series, rank, 0)});
            }
        }
        for (const Region& region : regions)
            CHECK_THAT(region.begin % sizeof(uint64_t) == 0, region.name);
        check_disjoint(regions, 0, map.bytes());
    }
}

// ---- sights

TEST(the_earliest_sight_has_the_largest_value_and_none_the_smallest) {
    Random random(ep::testing::seed());
    for (int i = 0; i < 1000; ++i) {
        const Sight one{random.bits() >> 3, random.between(0, 1) == 1};
        const Sight other{random.bits() >> 3, random.between(0, 1) == 1};
        const Sight same = Sight::unpack(one.pack());
        CHECK_EQUAL(same.at_ns, one.at_ns);
        CHECK_EQUAL(same.witnessed, one.witnessed);
        CHECK(one.pack() > 0);
        if (one.at_ns != other.at_ns)
            CHECK_EQUAL(one.pack() > other.pack(), one.at_ns < other.at_ns);
    }
}

// ---- the parts of a wait

TEST(a_wait_is_late_plus_issue_plus_path) {
    Random random(ep::testing::seed());
    const auto stamp = [&] { return static_cast<int64_t>(random.between(0, 1000)); };
    for (int i = 0; i < 200'000; ++i) {
        // Any order: clock offsets are estimates, so stamps may contradict each other.
        const SourceTiming timing{stamp(), stamp(), stamp(), stamp()};
        CHECK_EQUAL(timing.late() + timing.issue() + timing.path(), timing.wait());
        CHECK_EQUAL(timing.wait(), std::max<int64_t>(0, timing.arrival - timing.wait_begin));
        CHECK(timing.late() >= 0 && timing.issue() >= 0 && timing.path() >= 0 &&
              timing.slack() >= 0);
        const bool ordered = timing.wait_begin <= timing.entered &&
                             timing.entered <= timing.issued && timing.issued <= timing.arrival;
        if (!ordered) continue;
        CHECK_EQUAL(timing.late(), timing.entered - timing.wait_begin);
        CHECK_EQUAL(timing.issue(), timing.issued - timing.entered);
        CHECK_EQUAL(timing.path(), timing.arrival - timing.issued);
    }
}
