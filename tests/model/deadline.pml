/*
 * The protocol of `deadline` (docs/updates.md, "Late and lost ranks") for spin: ranks that go to rounds at their own
 * pace, of which some are killed at any moment and started again. test_model.py runs it.
 *
 *   here                          in python/sidcomp/local
 *   the record                    rendezvous.Rounds: one JSON text in the store. An `atomic` that changes it is one
 *                                 compare-and-set (Rounds._change), a guard that waits for it a look
 *   train                         steps.Updates._exchange_if_due; elastic.Meetings.count, .missed, .begin
 *   join, arrive, enter           rendezvous.Rounds.meet; elastic.Attendance.begin, of a rank without parameters
 *   founded, newer, close         rendezvous._founded, _lacks, Rounds._close
 *   unstick, advance              rendezvous.Rounds._unstick, _advance
 *   send, came                    elastic.Attendance._take_part; rendezvous.RoundExchange
 *   done, limit                   rendezvous.Rounds.conclude, .check
 *   undo                          elastic.Attendance._undo
 *   apply                         elastic.Meetings.arrive; steps.Updates._apply
 *   save, load                    steps.Updates.state_dict, .load_state_dict; elastic.Meetings.is_old
 *   patient, again                elastic.Meetings.average, .awaited
 *   leave                         rendezvous.Rounds.leave
 *
 * What a rank does before a round is a bit, its work. Work is in the rank's parameters (away), in its residual, or in
 * the common point. Version 0: no point yet, which is -1 in Python.
 *
 * The deadline may pass at any moment. The limit of an exchange passes where a member was killed and, SLOW times, where
 * none was: then a message, or what a member confirms, is late. Not modelled: delay, stale, updates that are not finite,
 * outer momentum, buffers, a store that is lost, and two processes of one rank at a time.
 *
 * Sizes: KILLS, of any rank or of VICTIM; GOES, rounds that each rank goes to; SLOW. FRESH: the ranks have no common
 * point yet. PARTLY: the codec may send no more than the residual. AVERAGES: the last round of each rank is run.average(),
 * after which nothing is unsent.
 *
 * Programs that are broken, in each of which spin must find an error:
 *   ONEPHASE    a member applies the mean before all have said that they have it
 *   KEPT        a round that does not count leaves the residual as the codec left it
 *   REUSED      a round that does not count leaves its process group, whose late messages then come in the next one
 *   EARLY       a rank that is started again asks too early whether its last round counted
 *   OPENS       a rank without parameters opens a round, because none had any when it looked
 *   HASTY       a round takes place when the deadline has passed, also if a rank that is late has a newer point
 *   MISSES      average() returns when its round has been closed
 *   PATIENT     no deadline
 *   UNLIMITED   no limit of an exchange
 */

#ifndef KILLS
#define KILLS 1
#endif
#ifndef GOES
#define GOES 2
#endif
#ifndef SLOW
#define SLOW 1
#endif

#define RANKS 3
#define ALL 7
#define ATTEMPTS 6
#define VERSIONS 16
#define bit(r) (1 << (r))
#define in(r, set) (((set) >> (r)) & 1)
#define work(r, go, life) (life -> bit(6 + (r)) : bit(2 * (r) + (go)))
#define START(r) bit(10 + (r)) /* the parameters that a process begins with */
#define STARTS (7 << 10)

/* ---- the record ------------------------------------------------------------------------------------------------ */

#ifdef FRESH
#define FIRST 0
#else
#define FIRST 1
#endif
byte number = 1, version = FIRST, expected = ALL, next, here, done, left, group;
bool closed;
byte here_version[RANKS], here_group[RANKS]; /* of the ranks in `here` */
byte last_number[RANKS], last_version[RANKS] = FIRST;

/* ---- what travels, and what has happened ----------------------------------------------------------------------- */

typedef Message { byte group; short point, sent };
Message wire[9];        /* the last one from each rank to each, until it is taken */
byte slow = SLOW;
byte kills = KILLS;
bool killed[RANKS];     /* its first process */
byte lost_in[RANKS];    /* the attempt at which it was killed */
byte trained = FIRST * ALL; /* ranks that have parameters, and have not ended */
short sent[RANKS];      /* in the attempt in progress */
short truth[VERSIONS];  /* what the members of a round have sent, by the version that it led to */
short point_of[VERSIONS];
byte applies[VERSIONS]; /* members that have not applied it yet; then the two above are forgotten */
short origin = FIRST * START(0); /* of the first common point */

inline advance(members, to, counts) {
    d_step {
        if
        :: counts ->
            version = to;
            applies[to] = members;
            r = 0;
            do
            :: r < RANKS ->
                if
                :: in(r, members) ->
                    last_number[r] = number;
                    last_version[r] = to;
                    truth[to] = truth[to] | sent[r]
                :: else
                fi;
                r++
            :: else -> break
            od
        :: else
        fi;
        expected = members | next;
        number++;
        here = 0;
        closed = false;
        group = 0;
        done = 0;
        next = 0;
        r = 0;
        do
        :: r < RANKS -> here_version[r] = 0; here_group[r] = 0; sent[r] = 0; lost_in[r] = 0; r++
        :: else -> break
        od;
        r = 0
    }
}

/* The process group of an earlier round, if all who came have it, and no other rank has; else a new one. */
inline close() {
    d_step {
        closed = true;
        group = 0;
        same = true;
        r = 0;
        do
        :: r < RANKS ->
            if
            :: in(r, here) && group == 0 -> group = here_group[r]; same = same && group != 0
            :: in(r, here) && group != 0 -> same = same && here_group[r] == group
            :: else
            fi;
            r++
        :: else -> break
        od;
        if
        :: same && (group & 7) == here
        :: else -> group = number * 8 + here
        fi;
        same = false;
        r = 0
    }
}

inline enter() {
    assert(attempts < ATTEMPTS);
    attempts++;
    here = here | bit(me);
    left = left & ~bit(me);
    here_version[me] = mine;
    here_group[me] = own_group;
    number_here = number
}

/* A rank with parameters is there, or the run has not begun. */
#define has(r) (r != me && in(r, here) && here_version[r] > 0)
#define trained_here (here_version[0] > 0 || here_version[1] > 0 || here_version[2] > 0)
#ifdef OPENS
#define may_join (opens || here != 0)
#define founded true
#else
#define may_join (version == 0 || has(0) || has(1) || has(2))
#define founded (version == 0 || trained_here)
#endif

inline step_back() {
    expected = expected | bit(me);
    here = here & ~bit(me);
    here_version[me] = 0;
    here_group[me] = 0
}

/* All members of a closed round were killed, or are slow. */
#define gone(r) (!in(r, here) || lost_in[r] == number)
#define stuck (closed && ((gone(0) && gone(1) && gone(2)) || slow > 0))

inline unstick() {
    if
    :: gone(0) && gone(1) && gone(2)
    :: else -> slow--
    fi;
    advance(0, 0, false)
}

/* Ranks that have a newer common point than all who are here are waited for beyond the deadline. Not for ever; but
 * one that comes even later is not modelled. */
#define newer(r) (!in(r, here | left) && !killed[r] && last_version[r] > here_version[0] && \
                  last_version[r] > here_version[1] && last_version[r] > here_version[2])
#define all_here ((expected & ~here) == 0)
#ifdef PATIENT
#define may_close all_here
#else
#ifdef HASTY
#define may_close true
#else
#define may_close !(newer(0) || newer(1) || newer(2))
#endif
#endif

#ifdef UNLIMITED
#define limit false
#else
#define limit (lost || slow > 0)
#endif
#define lost (lost_in[0] == number_here || lost_in[1] == number_here || lost_in[2] == number_here)
#define spend if :: lost :: else -> slow-- fi

/* This rank's message of the attempt, to some of the others. */
inline send(from, until) {
    r = from;
    do
    :: r < until ->
        if
        :: r != me && in(r, members) ->
            wire[me * 3 + r].group = own_group;
            wire[me * 3 + r].point = point;
            wire[me * 3 + r].sent = mean
        :: else
        fi;
        r++
    :: else -> break
    od;
    r = 0
}

inline forget() {
    mean = 0;
    taken = 0;
    before = 0;
    members = 0;
    newest = 0;
    source = 0;
    to = 0;
    number_here = 0
}

inline undo() {
#ifndef KEPT
    residual = before;
#endif
#ifndef REUSED
    own_group = 0;
#endif
    forget()
}

inline applied(which) {
    applies[which] = applies[which] & ~bit(me);
    if
    :: applies[which] == 0 -> truth[which] = 0; point_of[which] = 0
    :: else
    fi
}

inline apply() {
    if
    :: mine < newest || newest == 0 -> point = taken
    :: else
    fi;
    assert((point & mean) == 0); /* nothing counts twice */
    point = point | mean;
    mine = to;
    if
    :: origin == 0 -> origin = point & STARTS
    :: else
    fi;
    assert((point & STARTS) == origin); /* the common point is never what a rank that came back began with */
    if
    :: point_of[to] == 0 -> point_of[to] = point
    :: else
    fi;
    /* All who confirm apply the same set: what each of them has sent. */
    assert(point_of[to] == point);
#ifndef ONEPHASE
    assert(truth[to] == mean);
#endif
    applied(to);
    trained = trained | bit(me);
    away = 0;
    behind = false;
    attempts = 0;
    forget();
    if
    :: joining && (saved_version == 0 || saved_version < attended) -> joining = false /* no checkpoint, or an old one */
    :: joining && saved_version > 0 && saved_version >= attended -> /* load */
        joining = false;
        mine = saved_version;
        point = saved_point;
        away = saved_away;
        residual = saved_residual;
        did = away | residual;
        own_group = 0
    :: else
    fi;
    attended = 0
}

#ifdef VICTIM
#define chosen(r) (r == VICTIM)
#else
#define chosen(r) true
#endif

active [RANKS] proctype Rank() {
    byte me = _pid, life, r;
    bool same, joining, opens, behind, again;
    byte patient;                /* rounds that it goes to in average(); then it misses none */
    byte goes, attempts, attended;
    byte mine, own_group;        /* this rank's version and process group */
    short point, away, residual; /* its work, by where it is */
    short did;                   /* all of it */
    byte number_here, members, newest, source, to;
    short before, mean, taken;
    byte saved_version;
    short saved_point, saved_away, saved_residual;

    d_step {
#ifdef FRESH
        joining = true;
        point = START(me);
#else
        point = origin;
        mine = FIRST;
        own_group = ALL;
#endif
    }
process:
    {
        if
        :: joining -> goto join
        :: else
        fi;

train:
        if
        :: d_step { goes < (life -> 1 : GOES) ->
                away = away | work(me, goes, life);
                did = did | away;
                goes++;
#if defined(AVERAGES) && !defined(MISSES)
                patient = (goes == (life -> 1 : GOES));
#endif
                if
                :: kills > 0 && chosen(me) -> /* save */
                    saved_version = mine;
                    saved_point = point;
                    saved_away = away;
                    saved_residual = residual
                :: else
                fi
            };
            goto arrive
        :: behind && !closed && here != 0 -> goto arrive
        :: goes == (life -> 1 : GOES) -> goto leave
        fi;

join:
        atomic {
            attended = last_version[me];
            opens = version == 0
        };

arrive:
        do
        :: atomic { !joining && !closed -> enter(); break }
        :: atomic { !joining && !patient && closed -> /* it has missed the round */
                next = next | bit(me);
                behind = true;
                attempts = 0;
                goto train
            }
        :: atomic { !joining && !patient && stuck ->
                unstick();
                next = next | bit(me);
                behind = true;
                attempts = 0;
                goto train
            }
        :: atomic { joining && !closed && may_join ->
                enter();
#ifndef EARLY
                attended = last_version[me];
#endif
                opens = false;
                break
            }
        :: atomic { (joining || patient) && closed && !in(me, next) -> next = next | bit(me) }
        :: atomic { joining && !closed && !may_join && (!in(me, expected) || in(me, here)) -> step_back() }
        :: joining && opens && version > 0 -> opens = false
        :: atomic { (joining || patient) && stuck -> unstick() }
        :: joining && version > 0 && trained == 0 -> goto leave /* an error: no rank that has parameters comes */
        od;

        do
        :: number != number_here -> goto arrive
        :: atomic { number == number_here && !closed && !founded -> step_back(); attempts--; goto arrive }
        :: atomic { number == number_here && !closed && founded && may_close -> close() }
        :: d_step { number == number_here && closed ->
                members = here;
                newest = 0;
                source = RANKS;
                to = version;
                r = 0;
                do
                :: r < RANKS ->
                    if
                    :: in(r, members) && (source == RANKS || here_version[r] > newest) ->
                        newest = here_version[r];
                        source = r
                    :: else
                    fi;
                    if
                    :: in(r, members) && here_version[r] > to -> to = here_version[r]
                    :: else
                    fi;
                    r++
                :: else -> break
                od;
                r = 0;
                to++;
                own_group = group
            };
            break
        od;

        /* The codec sends everything, or no more than what it had not sent before. */
        if
        :: d_step { true -> before = residual; mean = away | residual; residual = 0 }
#ifdef PARTLY
        :: d_step { away != 0 -> before = residual; mean = residual; residual = away }
#endif
        fi;
        atomic {
            assert((away & before) == 0);
            sent[me] = mean;
            taken = point;
            send(0, 1 + (me == 0))
        };
        atomic { send(1 + (me == 0), RANKS) };

#define came(r) (r == me || !in(r, members) || wire[r * 3 + me].group == own_group)
        if
        :: atomic { came(0) && came(1) && came(2) ->
                r = 0;
                do
                :: r < RANKS ->
                    if
                    :: r != me && in(r, members) ->
                        mean = mean | wire[r * 3 + me].sent;
                        taken = (r == source -> wire[r * 3 + me].point : taken);
                        wire[r * 3 + me].group = 0;
                        wire[r * 3 + me].point = 0;
                        wire[r * 3 + me].sent = 0
                    :: else
                    fi;
                    r++
                :: else -> break
                od;
                r = 0
#ifdef ONEPHASE
                ;
                if
                :: number == number_here ->
                    done = done | bit(me);
                    if
                    :: done == members -> advance(members, to, true)
                    :: else
                    fi
                :: else
                fi;
                apply();
                goto train
#else
                ;
                if
                :: number == number_here -> /* conclude */
                    done = done | bit(me);
                    if
                    :: done == members -> advance(members, to, true)
                    :: else
                    fi
                :: else
                fi
#endif
            }
        :: atomic { number != number_here -> undo(); goto arrive }
        :: atomic { number == number_here && limit -> spend; advance(members, 0, false); undo(); goto arrive }
        fi;

        if
        :: atomic { number != number_here && last_number[me] == number_here ->
                again = patient && patient < RANKS && (expected & ~members) != 0;
                apply();
                if
                :: again -> again = false; patient++; goto arrive /* one came too late */
                :: else -> patient = 0; goto train
                fi
            }
        :: atomic { number != number_here && last_number[me] != number_here -> undo(); goto arrive }
        :: atomic { number == number_here && limit -> spend; advance(members, 0, false); undo(); goto arrive }
        fi
    } unless { killed[me] && life == 0 };

    /* Killed. It may be started again. */
    d_step {
        life = 1;
        trained = trained & ~bit(me);
        joining = true;
        point = START(me);
        behind = false;
        opens = false;
        patient = 0;
        again = false;
        goes = 0;
        attempts = 0;
        attended = 0;
        mine = 0;
        own_group = 0;
        away = 0;
        residual = 0;
        did = 0;
        forget();
        r = 0;
        do
        :: r < VERSIONS -> applied(r); r++
        :: else -> break
        od;
        r = 0
    };
    if
    :: goto process
    :: goto over
    fi;

leave:
    atomic {
        expected = expected & ~bit(me);
        next = next & ~bit(me);
        left = left | bit(me);
        trained = trained & ~bit(me);
        /* Nothing is lost: what this rank did is in the common point, or still its own. */
        assert((did & ~(point | away | residual)) == 0);
#ifdef AVERAGES
        assert(away == 0 || goes == 0)
#endif
    };
over:
    skip
}

#define kill(r) kills > 0 && chosen(r) && !killed[r] -> \
                killed[r] = true; kills--; lost_in[r] = (in(r, here) -> number : 0)

active proctype Killer() {
    do
    :: d_step { kill(0) }
    :: d_step { kill(1) }
    :: d_step { kill(2) }
    :: atomic { kills = 0; break }
    od
}
