// Launches of lambdas on an executor, without ranks or memory.
#pragma once

#include <string>
#include <vector>

#include "device/device.cuh"
#include "testing.h"

namespace ep::testing {

// kernel() on every thread.
template <class F>
void launch(host::Executor& executor, const LaunchShape& shape, F kernel) {
    executor.run(shape, [](void* argument) { (*static_cast<F*>(argument))(); }, &kernel);
}

// One executor for all cases of a program: what a case leaves behind must not disturb the next.
inline host::Executor& executor() {
    static host::Executor instance(host::ClockMode::kRank);
    return instance;
}

template <class F>
void launch(const LaunchShape& shape, F kernel) {
    launch(executor(), shape, kernel);
}

// check() under the plain order and under several random ones.
template <class F>
void under_schedules(F check) {
    Random random(seed());
    executor().set_schedule(host::make_round_robin_schedule());
    check(random);
    for (int i = 0; i < 6; ++i) {
        executor().set_schedule(host::make_random_schedule(random.bits()));
        check(random);
    }
    executor().set_schedule(host::make_round_robin_schedule());
}

// What a launch says when it is wrong; empty when it ends well. A full launch must work after it.
template <class F>
std::string error_of(const LaunchShape& shape, F kernel) {
    std::string text;
    try {
        launch(shape, kernel);
    } catch (const host::DeviceError& error) {
        text = error.what();
    }
    int sum = 0;
    launch({.blocks = 2, .threads = 64, .cooperative = true}, [&] {
        const int total = warp_reduce<Sum>(lane_id());
        grid_sync();
        if (thread_index() == 0) sum += total;
    });
    CHECK_EQUAL(sum, 2 * 31 * 16);
    return text;
}

inline void check_contains(const std::string& text, const std::vector<std::string>& words) {
    for (const std::string& word : words) {
        CHECK_THAT(text.find(word) != std::string::npos, "no \"" + word + "\" in \"" + text + "\"");
    }
}

}  // namespace ep::testing
