// How rows of normal operations prove themselves (verify.cuh): the proof leads a pack, and its sum is over the
// row, the rest of the pack, the token and the rank that proves it. In dispatch this is the source, whose proofs
// gateways pass on; in combine whoever sends a row, so a gateway proves its sums itself.
#pragma once

#include "kernels/normal/queue.cuh"
#include "kernels/protocol/verify.cuh"

namespace ep {

// Odd, and makes small numbers differ in all bits.
constexpr uint64_t kProofFactor = 0x9E3779B97F4A7C15;

// Warp; all lanes get it. The row is read where it lies now, the rest in the pack.
EP_DEVICE uint64_t sum_with_pack(const NormalRow& row,
                                 int prover,
                                 uint32_t token,
                                 const std::byte* data,
                                 const std::byte* pack) {
    const auto* words = reinterpret_cast<const uint32_t*>(data);
    const auto* others = reinterpret_cast<const uint32_t*>(pack + row.experts_offset());
    const auto num_words = static_cast<int>(row.row_bytes / sizeof(uint32_t));
    const auto num_others =
        static_cast<int>((row.pack_bytes() - row.experts_offset()) / sizeof(uint32_t));
    warp_sync();
    const uint64_t sum = sum_words(num_words + num_others, [&](int i) {
        return i < num_words ? words[i] : others[i - num_words];
    });
    return sum + (static_cast<uint64_t>(prover) << 32 | token) * kProofFactor;
}

// Warp.
EP_DEVICE void prove_row(const NormalRow& row,
                         uint64_t op,
                         int prover,
                         uint32_t token,
                         const std::byte* data,
                         std::byte* pack) {
    const uint64_t sum = sum_with_pack(row, prover, token, data, pack);
    if (elect_one()) *reinterpret_cast<RowProof*>(pack) = {token, static_cast<uint32_t>(op), sum};
}

// What goes with a row between nodes differs from node to node, and so has a proof of its own.
EP_DEVICE uint64_t proof_of_mark(const RelayMark& mark, uint64_t op, uint32_t token) {
    const uint64_t local_ranks = mark.local_ranks * kProofFactor + mark.last_of;
    return (local_ranks * kProofFactor + op) * kProofFactor + token;
}

EP_DEVICE const RowProof& proof_in(const NormalArgs& args, const Queue& from, int index) {
    const std::byte* slot = args.common.transport.local(slot_of(args, from, false, index));
    return *reinterpret_cast<const RowProof*>(slot + args.row.pack_offset());
}

// One thread. Rows of a queue come in the order of tokens: one of an earlier round of the ring is not taken
// for one that follows `index`.
EP_DEVICE void note_token(const NormalArgs& args, const Queue& from, int index) {
    state_of(args, from, false).next_token = proof_in(args, from, index).encoding_or_token + 1;
}

// Whose row is looked at.
struct RowOrigin {
    int owner;       // the rank whose token it is
    int prover;      // who has proved the row, and is named
    int token = -1;  // -1: known from the row only
};

// Warp, after the row number `index` of a queue has been used. Where it was copied to is `data`, because what
// lies in the slot may change.
EP_DEVICE void verify_slot(const NormalArgs& args,
                           const OpenOperation& open,
                           const Queue& from,
                           int index,
                           const RowOrigin& origin,
                           const std::byte* data) {
    const RowProof& proof = proof_in(args, from, index);
    const uint32_t said = proof.encoding_or_token;
    const uint32_t next = state_of(args, from, false).next_token;
    const uint32_t due = said < next ? next : said;
    const uint32_t token = origin.token >= 0 ? static_cast<uint32_t>(origin.token) : due;
    const auto* pack = reinterpret_cast<const std::byte*>(&proof);
    const uint64_t sum = sum_with_pack(args.row, origin.prover, token, data, pack);
    if (!elect_one()) return;
    check_row(args.common,
              open,
              proof,
              {token, static_cast<uint32_t>(open.op), sum},
              origin.prover,
              {origin.token >= 0 ? token : said, origin.owner, from.peer, from.hop});
}

}  // namespace ep
