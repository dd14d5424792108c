/* The protocol of low-latency operations between ranks, as a model for Spin: every interleaving of a few ranks and
   of what is under way between them. It stands for csrc/kernels/protocol/operation.cuh, hand_over.cuh and failure.cuh.

   A rank runs operations 1 .. OPS. Headers and rows are puts, which read the sender's memory when they are
   delivered, as a NIC does; signals carry their word. In a queue pair, what follows a fence is delivered after
   what precedes it; nothing else is ordered. A wait ends when its words are there, or at its deadline: when
   nothing else can happen, for the rank that opened its operation first. Up to operation FAULTY, TIMEOUTS
   waits may also end at any moment: somebody came too late.

   Checked: rows of an operation that succeeded on a rank are those of this operation and of their source. Without
   faults none fails, and no rank waits for ever. With faults all meet again, and the last operation succeeds.

   WITHOUT_... leaves a part of the protocol out; test_model.py expects Spin to find a run that breaks a check. */

#ifndef N
#define N 2          /* ranks */
#endif
#ifndef OPS
#define OPS 4
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
#ifndef FAULTY
#define FAULTY 1
#endif

#define ROOM 7       /* messages under way in a queue pair; who finds none waits */
#ifdef WITHOUT_HALVES
#define HALF(op) 0
#else
#define HALF(op) ((op) % 2)
#endif
/* Sizes change before operation CHANGE: its rows lie where those of the one before it lay. */
#ifndef CHANGE
#define CHANGE (OPS + 1)
#endif
#define LAYOUT(op) ((op) >= CHANGE)
#define ROWS(op) HALF((op) + LAYOUT(op))
#define SLOT(op, source) (((source) + LAYOUT(op)) % N)
#define ROW_OF(op, source) ((op) * N + (source))
#define AT(rank, half, source) (((rank) * 2 + (half)) * N + (source))
#define QP(src, dst, i) (((src) * N + (dst)) * 2 + (i))

mtype = { none, fence, contents, header, row, count, given_up, handed_over };
typedef Queue { byte used; mtype kind[ROOM]; byte op[ROOM]; byte more[ROOM] };
Queue queues[N * N * 2];  /* qp 0: headers and words of the protocol; qp 1: rows and counts */

/* A rank's memory. Zero: nothing has come. */
byte headers[2 * N * N], hands_over[2 * N * N], rows[2 * N * N], counts[2 * N * N];
byte given_up_newest[N * N], given_up_count[N * N], handed[N * N];
/* What puts read when they are delivered. */
byte own_header[2 * N], staging[2 * N];

byte timeouts = TIMEOUTS;
byte lost;  /* newest operation that the group has given up */
/* Ranks in the order in which they opened their operations, which is that of their deadlines; 0: the first. */
byte age[N];

inline push(queue, what, number, extra) {
    atomic {
        queues[queue].used < ROOM;
        queues[queue].kind[queues[queue].used] = what;
        queues[queue].op[queues[queue].used] = number;
        queues[queue].more[queues[queue].used] = extra;
        queues[queue].used++
    }
}

inline remove(queue, place) {
    queues[queue].used--;
    i = place;
    do
    :: i < queues[queue].used ->
        queues[queue].kind[i] = queues[queue].kind[i + 1];
        queues[queue].op[i] = queues[queue].op[i + 1];
        queues[queue].more[i] = queues[queue].more[i + 1];
        i++
    :: else -> break
    od;
    queues[queue].kind[i] = none;
    queues[queue].op[i] = 0;
    queues[queue].more[i] = 0;
    i = 0
}

/* Delivers what is under way in a queue pair, in any order that its fences allow. */
proctype Wire(byte src, dst, index) {
    byte place, i, op;
    mtype kind;
    byte more;
end:
    do
    :: atomic {
        queues[QP(src, dst, index)].used > 0 ->
        place = 0;
        do
        :: place + 1 < queues[QP(src, dst, index)].used &&
           queues[QP(src, dst, index)].kind[place] != fence &&
           queues[QP(src, dst, index)].kind[place + 1] != fence -> place++
        :: break
        od;
        kind = queues[QP(src, dst, index)].kind[place];
        op = queues[QP(src, dst, index)].op[place];
        more = queues[QP(src, dst, index)].more[place];
        remove(QP(src, dst, index), place);
        if
        :: kind == contents -> hands_over[AT(dst, HALF(op), src)] = own_header[src * 2 + HALF(op)]
        :: kind == header -> headers[AT(dst, HALF(op), src)] = op
        :: kind == row -> rows[AT(dst, ROWS(op), SLOT(op, src))] = staging[src * 2 + ROWS(op)]
        :: kind == count -> counts[AT(dst, HALF(op), src)] = op
        :: kind == given_up ->
            given_up_newest[dst * N + src] = op;
            given_up_count[dst * N + src] = more
        :: kind == handed_over -> handed[dst * N + src] = op
        :: kind == fence
        fi;
        if
        :: queues[QP(src, dst, index)].used > 0 && queues[QP(src, dst, index)].kind[0] == fence ->
            remove(QP(src, dst, index), 0)
        :: else
        fi;
        place = 0; op = 0; more = 0; kind = none
    }
    od
}

/* Ends when `condition` holds. What may end it otherwise fails the operation. */
inline become_youngest() {
    dst = 0;
    do
    :: dst == N -> break
    :: else ->
        if
        :: age[dst] > age[r] -> age[dst]--
        :: else
        fi;
        dst++
    od;
    age[r] = N - 1
}

/* The ranks that time out decide for all. */
inline time_out() {
    failed = true;
    if
    :: op > lost -> lost = op
    :: else
    fi
}

inline await(condition) {
    if
    :: condition
    :: atomic { timeouts > 0 && op <= FAULTY && !(condition) -> timeouts--; time_out() }
#if TIMEOUTS > 0
    :: atomic { timeout && age[r] == 0 -> time_out() }
    :: atomic { lost >= op && !(condition) -> failed = true }
#endif
    fi
}

#define HEADERS_CAME ALL(headers[AT(r, HALF(op), 0)] >= op, headers[AT(r, HALF(op), 1)] >= op, headers[AT(r, HALF(op), 2 % N)] >= op)
#define COUNTED(s) COUNT_IS(counts[AT(r, HALF(op), s)])
#ifdef WITHOUT_TAGS
#define COUNT_IS(word) (word != 0)
#else
#define COUNT_IS(word) (word == op)
#endif
#define ALL(a, b, c) ((a) && (b) && (c))
#define ANY(a, b, c) ((a) || (b) || (c))
#define IS_NEW(s) (COUNTED(s) && !(counted & (1 << (s))))
#define NEWS (ANY(IS_NEW(0), IS_NEW(1), IS_NEW(2 % N)) || (HEADERS_CAME && HOPELESS))
#define EVERYBODY ((1 << N) - 1)
#define LATER(s) (headers[AT(r, HALF(op), s)] > op)
#define CAME_TOO(s) ((s) != r && headers[AT(r, HALF(op), s)] >= op)
#define CAME ANY(CAME_TOO(0), CAME_TOO(1), CAME_TOO(2 % N))
#define HANDED(s) (!hands_over[AT(r, HALF(op), s)] || handed[r * N + (s)] >= op)
#define LEFT_BEHIND(s) (LATER(s) || (op <= given_up_newest[r * N + (s)] && op + given_up_count[r * N + (s)] > given_up_newest[r * N + (s)]))
#define GIVEN_UP ANY(LEFT_BEHIND(0), LEFT_BEHIND(1), LEFT_BEHIND(2 % N))
#define HOPELESS ANY(LATER(0), LATER(1), LATER(2 % N))
#define ROW_IS(s) (rows[AT(r, ROWS(op), SLOT(op, s))] == ROW_OF(op, s))
#define ROWS_ARE_OURS ALL(ROW_IS(0), ROW_IS(1), ROW_IS(2 % N))
#define STEP(s) (hands_over[AT(r, HALF(op), s)] != hands)
#define OUT_OF_STEP ANY(STEP(0), STEP(1), STEP(2 % N))
#define DELIVERED(d) (queues[QP(r, d, 0)].used == 0 && queues[QP(r, d, 1)].used == 0)
#define ALL_DELIVERED ALL(DELIVERED(0), DELIVERED(1), DELIVERED(2 % N))

proctype Rank(byte r) {
    byte op, closed, num_given_up, dst, counted;
    bool failed, hands, unknown, intact, may_send;
    do
    :: closed >= OPS -> break
    :: else ->
        /* open: a header to every rank */
        atomic {
            become_youngest();
            /* behind what the group has given up, if it has heard of that */
            op = closed;
            if
            :: lost > closed -> op = lost
            :: true
            fi;
            num_given_up = num_given_up + op - closed;
            hands = unknown || op > closed;
            op = op + 1;
            failed = false;
            counted = 0;
            may_send = true
        }
        /* who skips enters with another one; if it is late, none comes before it gives up waiting */
        if
        :: op == closed + 1
        :: op > closed + 1 && CAME
        :: atomic {
            op > closed + 1 ->
            op--;
            num_given_up--;
            failed = true;
            goto close
        }
        fi;
        atomic {
#ifdef WITHOUT_HAND_OVER
            hands = false;
#else
            hands = hands || (op > 1 && LAYOUT(op) != LAYOUT(closed));
#endif
            own_header[r * 2 + HALF(op)] = hands;
            hands_over[AT(r, HALF(op), r)] = hands;
            headers[AT(r, HALF(op), r)] = op;
            dst = 0
        }
        do
        :: dst == N -> break
        :: dst == r -> dst++
        :: else ->
            atomic {
                queues[QP(r, dst, 0)].used + 3 <= ROOM ->
                push(QP(r, dst, 0), contents, op, 0);
#ifndef WITHOUT_HEADER_FENCE
                push(QP(r, dst, 0), fence, 0, 0);
#endif
                push(QP(r, dst, 0), header, op, 0);
                dst++
            }
        od;
        /* hand over, after a failure */
        if
        :: hands ->
            await(HEADERS_CAME);
            atomic {
                if
                :: !failed && GIVEN_UP -> failed = true
                :: else
                fi
            }
            if
            :: !failed ->
#ifndef WITHOUT_QUIET
                ALL_DELIVERED;
#endif
                atomic { handed[r * N + r] = op; dst = 0 }
                do
                :: dst == N -> break
                :: dst == r -> dst++
                :: else -> atomic { push(QP(r, dst, 0), handed_over, op, 0); dst++ }
                od;
#ifndef WITHOUT_ANSWERS
                await(ALL(HANDED(0), HANDED(1), HANDED(2 % N)))
#endif
            :: else
            fi;
            may_send = !failed
        :: else
        fi;
        /* send: rows, then the word that announces them */
        if
        :: may_send ->
            atomic {
                staging[r * 2 + ROWS(op)] = ROW_OF(op, r);
                rows[AT(r, ROWS(op), SLOT(op, r))] = ROW_OF(op, r);
                counts[AT(r, HALF(op), r)] = op;
                dst = 0
            }
            do
            :: dst == N -> break
            :: dst == r -> dst++
            :: else ->
                atomic {
                    queues[QP(r, dst, 1)].used + 3 <= ROOM ->
                    push(QP(r, dst, 1), row, op, 0);
#ifndef WITHOUT_FENCE
                    push(QP(r, dst, 1), fence, 0, 0);
#endif
                    push(QP(r, dst, 1), count, op, 0);
                    dst++
                }
            od
        :: else
        fi;
        /* receive */
        if
        :: failed ->
            await(HEADERS_CAME)
        :: else ->
            /* words that were seen once are not looked at again */
            do
            :: failed || counted == EVERYBODY || (HEADERS_CAME && HOPELESS) -> break
            :: else ->
                await(NEWS);
                atomic {
                    dst = 0;
                    do
                    :: dst == N -> break
                    :: else ->
                        if
                        :: COUNT_IS(counts[AT(r, HALF(op), dst)]) -> counted = counted | (1 << dst)
                        :: else
                        fi;
                        dst++
                    od;
                    dst = 0
                }
            od;
            await(HEADERS_CAME)
        fi;
        atomic {
            if
            :: !failed && HOPELESS -> failed = true
            :: else
            fi
        }
        intact = ROWS_ARE_OURS;  /* the first rows are read, then */
        intact = intact && ROWS_ARE_OURS;  /* the last ones */
        /* close */
close:
        atomic {
            if
            :: !failed && GIVEN_UP -> failed = true
            :: else
            fi;
            assert(failed || intact);
            assert(TIMEOUTS > 0 || !failed);
            unknown = failed || OUT_OF_STEP;
            closed = op;
            dst = 0;
            if
            :: failed -> num_given_up++
            :: else -> num_given_up = 0
            fi
        }
        do
        :: !failed || dst == N -> break
        :: failed && dst == r -> dst++
        :: else -> atomic { push(QP(r, dst, 0), given_up, op, num_given_up); dst++ }
        od;
        atomic {
            if
            :: failed ->
                dst = 0;
                do
                :: dst == N -> break
                :: else ->
                    if
                    :: given_up_newest[r * N + dst] > closed ->
                        num_given_up = num_given_up + given_up_newest[r * N + dst] - closed;
                        closed = given_up_newest[r * N + dst]
                    :: else
                    fi;
                    dst++
                od
            :: else
            fi;
            intact = false; may_send = false; dst = 0
        }
    od;
    atomic { become_youngest(); assert(!failed) }  /* the last operation */
}

init {
    byte a, b;
    atomic {
        do
        :: a == N -> break
        :: else ->
            age[a] = a;
            run Rank(a);
            b = 0;
            do
            :: b == N -> break
            :: a == b -> b++
            :: else -> run Wire(a, b, 0); run Wire(a, b, 1); b++
            od;
            a++
        od;
        a = 0; b = 0
    }
}
