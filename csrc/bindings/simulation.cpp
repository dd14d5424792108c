#include "device/host/simulation.h"

#include <pybind11/stl.h>

#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/keywords.h"

namespace py = pybind11;
using py::operator""_a;

namespace ep {
namespace {

using host::SimulationOptions;

host::CostModel costs_of(const std::map<std::string, double>& given) {
    host::CostModel costs;
    const std::map<std::string, double host::CostModel::*> members{
#define EP_COST(name) {#name, &host::CostModel::name},
#include "device/host/costs.def"
    };
    for (const auto& [name, member] : members) {
        if (!given.contains(name)) throw std::invalid_argument("costs: " + name + " is missing");
        costs.*member = given.at(name);
    }
    for (const auto& [name, value] : given)
        if (!members.contains(name)) throw std::invalid_argument("costs: there is no " + name);
    return costs;
}

constexpr std::tuple kOptions{
    Keyword<&SimulationOptions::num_ranks>{"num_ranks"},
    Keyword<&SimulationOptions::ranks_per_node>{"ranks_per_node"},
    Keyword<&SimulationOptions::seed>{"seed"},
    Keyword<&SimulationOptions::points_per_step>{"points_per_step"},
    Keyword<&SimulationOptions::step_ns>{"step_ns"},
    Keyword<&SimulationOptions::shortest_delivery_ns>{"shortest_delivery_ns"},
    Keyword<&SimulationOptions::longest_delivery_ns>{"longest_delivery_ns"},
    Keyword<&SimulationOptions::end_ns>{"end_ns"},
};

}  // namespace

// The test machine of tests/explore.
void bind_simulation(py::module_& m) {
    using host::RankDied;
    using host::Seat;
    using host::Simulation;
    using Release = py::call_guard<py::gil_scoped_release>;
    m.attr("SPENT_FIELDS") =
        std::vector<std::string>{std::begin(host::kSpentNames), std::end(host::kSpentNames)};
    // No mere Exception: what a program does about failed operations is no way to survive its death.
    py::register_local_exception<RankDied>(m, "RankDied", PyExc_BaseException);
    const auto seat = [](Simulation& self) -> Seat& {
        Seat* found = Simulation::seat();
        if (found == nullptr || &found->simulation() != &self)
            throw std::runtime_error("Simulation: this thread has not entered; call enter() first");
        return *found;
    };
    py::class_<Simulation, std::shared_ptr<Simulation>> simulation(
        m,
        "Simulation",
        py::module_local(),
        "Ranks of one process in virtual time; see simulation.h.");
    with_keywords<SimulationOptions>(
        kOptions,
        [](const SimulationOptions& options) { return std::make_shared<Simulation>(options); },
        [&](auto make, auto... names) { simulation.def(py::init(make), names...); });
    simulation.def("enter", &Simulation::enter, "rank"_a, Release())
        .def("leave", &Simulation::leave, Release())
        .def("now_ns", &Simulation::now_ns)
        .def("has_ended", &Simulation::has_ended)
        .def(
            "sleep",
            [seat](Simulation& self, uint64_t ns) {
                if (!seat(self).sleep_until(self.now_ns() + ns)) throw RankDied();
            },
            "ns"_a,
            Release())
        .def(
            "stop_after",
            [seat](Simulation& self, uint64_t points, uint64_t ns) {
                seat(self).stop_after(points, ns);
            },
            "points"_a,
            "ns"_a)
        .def(
            "set_costs",
            [](Simulation& self, const std::map<std::string, double>& costs) {
                self.set_costs(costs_of(costs));
            },
            "costs"_a)
        .def(
            "launches",
            [](const Simulation& self, int rank) {
                py::list all;
                for (const host::LaunchRecord& one : self.launches(rank)) {
                    const std::vector<double> spent(std::begin(one.spent_ns),
                                                    std::end(one.spent_ns));
                    all.append(py::make_tuple(one.name,
                                              one.begin_ns,
                                              one.end_ns,
                                              spent,
                                              one.looks.all,
                                              one.looks.in_vain));
                }
                return all;
            },
            "rank"_a)
        .def("has_stopped", [seat](Simulation& self) { return seat(self).has_stopped(); })
        .def(
            "die_after",
            [seat](Simulation& self, uint64_t points) { seat(self).die_after(points); },
            "points"_a);
}

}  // namespace ep
