#include "transport/host/descriptor_server.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace ep::host {
namespace {

constexpr time_t kFetchTimeoutS = 30;
// A client has its secret at hand.
constexpr time_t kServeTimeoutS = 2;

Descriptor new_socket(time_t timeout_s) {
    Descriptor result(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const timeval timeout{.tv_sec = timeout_s, .tv_usec = 0};
    if (result && timeout_s > 0)
        setsockopt(result.number(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    return result;
}

struct Address {
    explicit Address(const Token& name) {
        value.sun_family = AF_UNIX;
        // The leading zero makes it abstract.
        const int length = std::snprintf(value.sun_path + 1,
                                         sizeof(value.sun_path) - 1,
                                         "deep_ep-%016llx%016llx",
                                         static_cast<unsigned long long>(name[0]),
                                         static_cast<unsigned long long>(name[1]));
        bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }

    sockaddr_un value{};
    socklen_t bytes = 0;
};

// One byte with one descriptor, laid out for sendmsg() and recvmsg().
struct Message {
    Message() {
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = sizeof(control);
    }
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;

    char byte = 0;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec part{.iov_base = &byte, .iov_len = 1};
    msghdr header{};
};

bool is_of_this_user(int client) {
    ucred credentials{};
    socklen_t bytes = sizeof(credentials);
    return getsockopt(client, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) == 0 &&
           credentials.uid == geteuid();
}

void send_descriptor(int client, int descriptor) {
    Message message;
    cmsghdr* control = CMSG_FIRSTHDR(&message.header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(descriptor));
    std::memcpy(CMSG_DATA(control), &descriptor, sizeof(descriptor));
    sendmsg(client, &message.header, MSG_NOSIGNAL);
}

}  // namespace

DescriptorServer::DescriptorServer() : name_(random_token()), listening_(new_socket(0)) {
    const Address address(name_);
    if (!listening_) return;
    if (bind(listening_.number(), address.get(), address.bytes) != 0 ||
        listen(listening_.number(), SOMAXCONN) != 0) {
        listening_.reset();
    }
}

DescriptorServer::~DescriptorServer() {
    if (!thread_.joinable()) return;
    shutdown(listening_.number(), SHUT_RDWR);  // ends accept4()
    thread_.join();
}

void DescriptorServer::start(int descriptor, const Token& secret) {
    if (!listening_ || thread_.joinable()) return;
    // Signals are for the program's threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this, descriptor, secret] { serve(descriptor, secret); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void DescriptorServer::serve(int descriptor, const Token& secret) const {
    for (;;) {
        const Descriptor client(accept4(listening_.number(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!client && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (!client) return;
        const timeval timeout{.tv_sec = kServeTimeoutS, .tv_usec = 0};
        setsockopt(client.number(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
        Token told{};
        if (is_of_this_user(client.number()) &&
            recv(client.number(), &told, sizeof(told), 0) == sizeof(told) && told == secret) {
            send_descriptor(client.number(), descriptor);
        }
    }
}

Descriptor fetch_descriptor(const Token& name, const Token& secret) {
    const Descriptor server = new_socket(kFetchTimeoutS);
    const Address address(name);
    if (!server || connect(server.number(), address.get(), address.bytes) != 0 ||
        send(server.number(), &secret, sizeof(secret), MSG_NOSIGNAL) < 0) {
        return {};
    }
    Message message;
    const ssize_t bytes = recvmsg(server.number(), &message.header, MSG_CMSG_CLOEXEC);
    if (bytes < 0) return {};
    const cmsghdr* control = CMSG_FIRSTHDR(&message.header);
    if (bytes == 0 || control == nullptr || control->cmsg_level != SOL_SOCKET ||
        control->cmsg_type != SCM_RIGHTS || control->cmsg_len != CMSG_LEN(sizeof(int))) {
        errno = EACCES;
        return {};
    }
    int received = -1;
    std::memcpy(&received, CMSG_DATA(control), sizeof(received));
    return Descriptor(received);
}

}  // namespace ep::host
