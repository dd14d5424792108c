// The interpreter's lock, given back while an operation runs.
#pragma once

#include <pybind11/pybind11.h>

#include <cxxabi.h>
#include <unistd.h>

#include <utility>

namespace ep {

// Once the interpreter exits, it ends every other thread that asks for its lock, up to Python 3.13
// by unwinding it. That would abort the process, because our frames cannot be unwound. So such a
// thread sleeps until the process is gone, as in Python 3.14.
inline void take_gil(PyThreadState* thread) {
    try {
        PyEval_RestoreThread(thread);
    } catch (const abi::__forced_unwind&) {
        for (;;) pause();
    }
}

// The thread's state while it has given the lock back. The interpreter looks it up by the thread
// otherwise, in tables that are gone when it exits.
inline thread_local PyThreadState* thread_without_gil = nullptr;

class ReleaseGil {
  public:
    ReleaseGil() { thread_without_gil = PyEval_SaveThread(); }
    ~ReleaseGil() { take_gil(std::exchange(thread_without_gil, nullptr)); }
    ReleaseGil(const ReleaseGil&) = delete;
    ReleaseGil& operator=(const ReleaseGil&) = delete;
};

// Within a ReleaseGil.
class AcquireGil {
  public:
    AcquireGil() { take_gil(thread_without_gil); }
    ~AcquireGil() { thread_without_gil = PyEval_SaveThread(); }
    AcquireGil(const AcquireGil&) = delete;
    AcquireGil& operator=(const AcquireGil&) = delete;
};

}  // namespace ep
