// Passes a descriptor to other processes over a Unix socket. It reaches what /proc/<pid>/fd does not:
// processes of another PID namespace. Its name is abstract, so no file stays behind.
#pragma once

#include <string>
#include <thread>

#include "transport/host/descriptor.h"

namespace ep::host {

class DescriptorServer {
  public:
    // Listens, if sockets are allowed here. Nobody is answered before start().
    DescriptorServer();
    ~DescriptorServer();
    DescriptorServer(const DescriptorServer&) = delete;
    DescriptorServer& operator=(const DescriptorServer&) = delete;

    // Where fetch_descriptor() finds it. No secret: every process of the machine can list it.
    const Token& name() const { return name_; }
    // Sends `descriptor` to processes of this user that know `secret`, until the server is destroyed.
    void start(int descriptor, const Token& secret);

  private:
    void serve(int descriptor, const Token& secret) const;

    Token name_;
    Descriptor listening_;
    std::thread thread_;
};

// What the server of that name sends. Empty if there is none, or none that accepts the secret; then
// errno says why. Waits up to 30 s for its start().
Descriptor fetch_descriptor(const Token& name, const Token& secret);

}  // namespace ep::host
