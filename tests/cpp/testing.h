// The test programs' harness: TEST(name) registers a case, CHECK ends it when something is wrong.
// A program runs all its cases, or those named on its command line:
//   test_x [--list] [--stop] [--seed N] [name ...]
// --stop ends it with the first case that fails.
// RACE(name) is a case that ThreadSanitizer must object to; it runs only when it is named.
// Each case has a generator of its own, seeded with --seed (default 1); a failure prints the command
// that repeats it. Include once per program: main() is here.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "device/host/schedule.h"

#if defined(__SANITIZE_THREAD__)
#define EP_UNDER_TSAN 1
#else
#define EP_UNDER_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__)
#define EP_UNDER_ASAN 1
#else
#define EP_UNDER_ASAN 0
#endif

namespace ep::testing {

class Failure : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct Case {
    const char* name;
    void (*body)();
    bool is_race;
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

inline uint64_t& seed() {
    static uint64_t value = 1;
    return value;
}

// How long ranks wait for each other before that is a failure.
inline uint64_t patience_ns() {
    const char* seconds = std::getenv("DEEP_EP_TIMEOUT_S");
    return (seconds == nullptr ? 40 : std::strtoull(seconds, nullptr, 10)) * 1'000'000'000;
}

struct Registration {
    Registration(const char* name, void (*body)(), bool is_race = false) {
        cases().push_back({name, body, is_race});
    }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
    const char* slash = std::strrchr(file, '/');
    throw Failure(std::string(slash ? slash + 1 : file) + ":" + std::to_string(line) + ": " + text);
}

template <class T>
std::string text_of(const T& value) {
    std::ostringstream stream;
    if constexpr (sizeof(T) == 1) {
        stream << static_cast<int>(value);
    } else {
        stream << value;
    }
    return stream.str();
}

// Numbers beyond SeededRandom's: ranges and subsets.
class Random {
  public:
    explicit Random(uint64_t seed) : source_(seed) {}
    uint64_t bits() { return source_.next(); }
    // Both ends included.
    int between(int low, int high) {
        return low + static_cast<int>(source_.below(static_cast<uint64_t>(high - low) + 1));
    }
    double unit() { return static_cast<double>(source_.next() >> 11) * 0x1p-53; }

  private:
    host::SeededRandom source_;
};

// body(rank) on a thread per rank; rethrows the first exception after all have ended.
inline void on_ranks(int num_ranks, const std::function<void(int)>& body) {
    std::vector<std::exception_ptr> errors(static_cast<size_t>(num_ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                body(rank);
            } catch (...) {
                errors[static_cast<size_t>(rank)] = std::current_exception();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

inline int run_main(int argc, char** argv) {
    std::vector<std::string> names;
    bool stops = false;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--list") {
            for (const Case& test : cases()) std::printf("%s\n", test.name);
            return 0;
        }
        if (argument == "--stop") {
            stops = true;
        } else if (argument == "--seed" && i + 1 < argc) {
            seed() = std::strtoull(argv[++i], nullptr, 10);
        } else {
            names.push_back(argument);
        }
    }
    int num_run = 0;
    int num_failed = 0;
    for (const Case& test : cases()) {
        bool selected = names.empty() && !test.is_race;
        for (const std::string& name : names) selected = selected || name == test.name;
        if (!selected) continue;
        ++num_run;
        std::string error;
        try {
            test.body();
        } catch (const std::exception& exception) {
            error = exception.what();
        }
        std::printf("%s  %s\n", error.empty() ? "passed" : "FAILED", test.name);
        if (!error.empty()) {
            ++num_failed;
            std::printf("%s\nreplay: %s --seed %llu %s\n",
                        error.c_str(),
                        argv[0],
                        static_cast<unsigned long long>(seed()),
                        test.name);
        }
        std::fflush(stdout);
        if (stops && num_failed != 0) break;
    }
    if (num_run == 0) std::printf("no such test; --list names them\n");
    return num_run == 0 || num_failed != 0;
}

}  // namespace ep::testing

#define TEST(name)                                                                \
    static void test_##name();                                                    \
    static const ::ep::testing::Registration register_##name{#name, test_##name}; \
    static void test_##name()

#define CHECK(condition) \
    if (!(condition)) ::ep::testing::fail(__FILE__, __LINE__, #condition)

#define RACE(name)                                                                      \
    static void race_##name();                                                          \
    static const ::ep::testing::Registration register_##name{#name, race_##name, true}; \
    static void race_##name()

// With a text that is only built on failure.
#define CHECK_THAT(condition, text) \
    if (!(condition)) ::ep::testing::fail(__FILE__, __LINE__, std::string(#condition ": ") + (text))

#define CHECK_EQUAL(got, expected)                                                                \
    do {                                                                                          \
        const auto got_value = (got);                                                             \
        const auto expected_value = (expected);                                                   \
        if (!(got_value == expected_value)) {                                                     \
            ::ep::testing::fail(__FILE__,                                                         \
                                __LINE__,                                                         \
                                #got " is " + ::ep::testing::text_of(got_value) + ", expected " + \
                                    ::ep::testing::text_of(expected_value));                      \
        }                                                                                         \
    } while (false)

int main(int argc, char** argv) { return ep::testing::run_main(argc, argv); }
