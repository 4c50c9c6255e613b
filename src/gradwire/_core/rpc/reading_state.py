"""A state machine that decides which thread reads the answers that arrive on a connection.

A thread that waits for an answer (a *caller*) gets the read token of the connection, which is the
right to read it, and reads the answer itself: no other thread has to be woken. If no caller reads,
the poller is *armed*: when an answer arrives, it notifies the *leader*, the thread of the executor
that waits at the poller, and the leader reads. The poller notifies once; then it must be armed
again. A poller that is *disarmed* notifies only when the peer closes the connection.

This module decides when the poller is armed and disarmed: `TABLE` has the next state and the action
for each state and event. `ClientChannel` reports the events, carries out the actions, and has two
attributes:

`_state`
    One of `State`. Written in one method, `ClientChannel._move`, under a lock.
`_caller_reads`
    Whether a caller reads. Only a caller that has the read token writes this attribute, so the
    attribute needs no lock. Thus most synchronous calls do not take the lock of `_state`.

Which threads cause which events
--------------------------------

================  =================================================================================
ANSWER_EXPECTED   any thread that has sent an asynchronous call or a heartbeat, failed a call at its
                  deadline, or found an unanswered call when it looked (see below); unless a caller
                  reads. (A synchronous call does not cause this event: its thread reads soon.)
NOTHING_EXPECTED  the leader after it has read, or a caller that has stopped reading, if it looked
                  and found no call without an answer
CALLER_READS      a caller that has the read token and found the state ARMED
NOTIFIED          the leader, before it reads (its *turn* begins)
CONNECTION_ENDED  any thread that closes the connection or finds it broken
================  =================================================================================

Why no answer stays unread
--------------------------

To *look* is to check whether an answer is expected, and to report ANSWER_EXPECTED or, if the state
is NOTIFIED, NOTHING_EXPECTED.

*Invariant:* if an answer is expected, then a caller reads, or the poller is armed, or the leader is
being notified, or a thread is about to look.

These rules keep the invariant true:

1. *One event at a time.* A move (consult the table, arm or disarm the poller, write the state) is
   made under a lock, so two events that race are handled one after the other. The state is ARMED
   only if the poller is armed or its notification is on the way.
2. *The state never promises too much.* The poller is armed before the state becomes ARMED, and is
   disarmed after the state was changed. So an interrupt between the two steps can leave an armed
   poller in a state other than ARMED. This costs one needless turn of the leader. The opposite, the
   state ARMED with a poller that is not armed, would leave answers unread.
3. *First expect, then read.* A thread adds its call to the open calls before it reads
   `_caller_reads` and `_state`. It needs no lock for this: Python's threads see each other's
   writes in order. If a caller reads, or the state is ARMED, the thread relies on the caller or the
   poller and reports nothing. Otherwise it reports ANSWER_EXPECTED.
4. *First write, then look.* Other threads rely on a caller that reads, and on the state ARMED. So a
   caller that stops reading must look, and so must the leader, which replaces ARMED by NOTIFIED.
   The caller looks after it has cleared `_caller_reads` and given back the read token. (Not
   earlier: as long as the token is taken, the leader cannot read.) The leader looks at the end of
   its turn. If it loses the leadership during its turn, the next leader looks (see
   `Executor.set_successor_work`). If the leader is refused the read token, it does not look: the
   thread that has the token will look, and will do so after the event NOTIFIED.

Rules 3 and 4 are the core of Dekker's algorithm (E. W. Dijkstra, Cooperating Sequential Processes,
1965): each of two sides first writes, then reads what the other side writes, so at least one of
them sees the other. Here, one side is a thread that adds a call (rule 3), and the other side is the
caller or the leader (rule 4). If the first side still reads the old value of `_caller_reads` or
`_state`, it has added its call before the second side wrote the new value. So the second side finds
the call when it looks. In Dekker's algorithm the sides must also take turns, so that only one acts.
That is not needed here, because it does no harm if both sides act.

NOTHING_EXPECTED may be out of date when it is reported. That does no harm: it disarms the poller
only in the state NOTIFIED, and a thread that expects an answer in that state arms the poller
itself, before or after.

A caller may begin to read while another thread arms the poller. Then the answer wakes the leader
as well as the caller. The leader is refused the read token, and the caller looks when it stops.
"""

from __future__ import annotations

import enum


class State(enum.IntEnum):
    """The states of the state machine. A state says whether the poller notifies the leader when an
    answer arrives. The text of the module explains the poller and the leader."""

    #: No data is expected. The poller wakes the leader, the thread that reads for the worker, only
    #: when the peer closes the connection.
    IDLE = 0
    #: The poller wakes the leader when an answer arrives, or has just done so.
    ARMED = 1
    #: The poller has woken the leader once, and will not do so again before it is armed again.
    NOTIFIED = 2
    #: The connection has ended. An ended connection looks readable for ever, so the poller is never
    #: armed again.
    ENDED = 3


class Event(enum.IntEnum):
    """What changes the state. The text of the module says which threads cause which event."""

    #: An answer is expected, and no waiting thread (caller) reads.
    ANSWER_EXPECTED = 0
    #: No answer is expected, not even a late answer to a call that has failed at its deadline.
    NOTHING_EXPECTED = 1
    #: A thread that waits for an answer (a caller) begins to read.
    CALLER_READS = 2
    #: The poller has notified the leader, which is about to read.
    NOTIFIED = 3
    #: The connection was closed, by either side.
    CONNECTION_ENDED = 4


class Action(enum.Enum):
    """What is done when the state changes. A poller that is armed notifies the leader when the next
    answer arrives. A poller that is disarmed does not notify the leader of answers."""

    NONE = "none"
    ARM = "arm"
    DISARM = "disarm"


_RULES: dict[State, dict[Event, tuple[State, Action]]] = {
    State.IDLE: {
        Event.ANSWER_EXPECTED: (State.ARMED, Action.ARM),
        Event.NOTHING_EXPECTED: (State.IDLE, Action.NONE),
        Event.CALLER_READS: (State.IDLE, Action.NONE),
        # The leader can be notified in the state IDLE for two reasons: the peer has closed the
        # connection, or the poller was disarmed too late to stop the notification.
        Event.NOTIFIED: (State.NOTIFIED, Action.NONE),
        Event.CONNECTION_ENDED: (State.ENDED, Action.NONE),
    },
    State.ARMED: {
        Event.ANSWER_EXPECTED: (State.ARMED, Action.NONE),
        # The poller stays armed although no answer is expected. This costs the leader at most one
        # needless turn.
        Event.NOTHING_EXPECTED: (State.ARMED, Action.NONE),
        # The poller is disarmed, because otherwise the answer would wake both the caller and the
        # leader.
        Event.CALLER_READS: (State.IDLE, Action.DISARM),
        Event.NOTIFIED: (State.NOTIFIED, Action.NONE),
        Event.CONNECTION_ENDED: (State.ENDED, Action.NONE),
    },
    State.NOTIFIED: {
        # The poller is armed at once. If this were left to the leader at the end of its turn, the
        # answer might wait long.
        Event.ANSWER_EXPECTED: (State.ARMED, Action.ARM),
        # A disarmed poller still notifies the leader when the peer closes the connection.
        Event.NOTHING_EXPECTED: (State.IDLE, Action.DISARM),
        # The poller is left alone. The caller will arm or disarm it when it stops reading.
        Event.CALLER_READS: (State.NOTIFIED, Action.NONE),
        Event.NOTIFIED: (State.NOTIFIED, Action.NONE),
        Event.CONNECTION_ENDED: (State.ENDED, Action.NONE),
    },
    State.ENDED: dict.fromkeys(Event, (State.ENDED, Action.NONE)),
}

#: `TABLE[state][event]` is (next state, action).
TABLE: tuple[tuple[tuple[State, Action], ...], ...] = tuple(
    tuple(_RULES[state][event] for event in Event) for state in State
)
