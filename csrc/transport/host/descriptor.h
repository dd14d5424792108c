// A file descriptor that closes itself, and random values that cannot be guessed.
#pragma once

#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace ep::host {

class Descriptor {
  public:
    Descriptor() = default;
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor() { reset(); }

    explicit operator bool() const { return number_ >= 0; }
    int number() const { return number_; }
    void reset() {
        if (number_ >= 0) close(number_);
        number_ = -1;
    }

  private:
    int number_ = -1;
};

using Token = std::array<uint64_t, 2>;

inline Token random_token() {
    Token token;
    if (getrandom(token.data(), sizeof(token), 0) != sizeof(token))
        throw std::runtime_error("getrandom failed");
    return token;
}

}  // namespace ep::host
