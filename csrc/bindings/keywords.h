// Functions that take a struct, whose members Python gives by keyword.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <tuple>

#include "kernels/protocol/counters.cuh"

namespace ep {

// A member and what Python calls it. Whoever leaves an optional one out gets the default of C++.
template <auto kMember, bool kOptional = false>
struct Keyword {
    const char* name;
};
// Of an argument (type, name, default) in a list of a .def file.
#define EP_KEYWORD(Struct, type, name, ...) ::ep::Keyword<&Struct::name __VA_OPT__(, true)>{#name},

// How a member crosses the binding: pointers as integers.
template <class T>
struct Wire {
    using Type = T;
    static const T& read(const Type& value) { return value; }
};
template <class T>
struct Wire<T*> {
    using Type = uintptr_t;
    static T* read(Type address) { return reinterpret_cast<T*>(address); }
};
template <>
struct Wire<CounterView> {
    using Type = std::tuple<uintptr_t, uintptr_t, uintptr_t, int>;
    static CounterView read(const Type& value) {
        return {Wire<int64_t*>::read(std::get<0>(value)),
                Wire<int64_t*>::read(std::get<1>(value)),
                Wire<int64_t*>::read(std::get<2>(value)),
                std::get<3>(value)};
    }
};
template <class Owner, class Member>
Wire<Member> wire_of(Member Owner::*);
template <auto kMember>
using WireOf = decltype(wire_of(kMember));

template <class Struct, auto kMember, bool kOptional>
auto argument(const Keyword<kMember, kOptional>& keyword) {
    if constexpr (kOptional) {
        return pybind11::arg(keyword.name) = Struct{}.*kMember;
    } else {
        return pybind11::arg(keyword.name);
    }
}

// Calls define(function, annotations...) for pybind11, with a function that takes Args and the
// keywords, makes a Struct of these and returns run(args, struct).
template <class Struct, class... Args, class Run, class Define, auto... kMembers, bool... kOptional>
void with_keywords(const std::tuple<Keyword<kMembers, kOptional>...>& keywords,
                   Run run,
                   Define define) {
    const auto function = [run](Args... args, const typename WireOf<kMembers>::Type&... values) {
        Struct call;
        ((call.*kMembers = WireOf<kMembers>::read(values)), ...);
        return std::invoke(run, args..., call);
    };
    const auto with_names = [&](const auto&... keyword) {
        define(function, pybind11::kw_only(), argument<Struct>(keyword)...);
    };
    std::apply(with_names, keywords);
}

}  // namespace ep
