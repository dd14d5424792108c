// What a call throws, in words.
#pragma once

#include <exception>
#include <string>

namespace ep {

template <class F>
std::string error_of(F f) {
    try {
        f();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace ep
