"""The membership core: pure values, ``step(state, event, now)``, and every decision about a job.

Imports the ground only. Knows nothing of processes, connections, requests, files or clocks.

Two rules for whoever edits it
==============================

1. Everything that decides who is in the job, when, and why it ends, is in here, as the answer to an event. If the
   driver would have to ask "and is it still the case that ...?", the question is a missing event or a missing field.
2. A decision looks at levels (what there is), never at edges (what has just changed). An event changes what is known,
   in ``intake``; then ``settle`` decides from the state alone. So an event twice is harmless, changes that cancel out
   do nothing, and a state that was written down and read back goes on as if nothing had been.

A job
=====

The phase of a job is not stored. It is which values its state has:

====================  ===================  ============================================================================
.                     no round yet         a round
====================  ===================  ============================================================================
no reset under way    WAITING for slots    RUNNING: the round trains
a reset under way     STARTING             RESETTING: the round is over, the next is being formed
====================  ===================  ============================================================================

and ENDED, when ``State.end`` says how; then only the ends of processes are taken in. Steps between phases:

==========  =====================================================  ===================================================
from        when                                                   to
==========  =====================================================  ===================================================
WAITING     there are -np usable slots                             STARTING: workers are started, all are expected
STARTING    all have reported, enough are READY                    RUNNING, in round 1
RUNNING     a member is READY, or has failed                       RESETTING: all members are expected
RESETTING   all have reported, enough are READY, nothing waits     RUNNING, in the next round
RESETTING   all have reported, too few are READY                   RESETTING, with a deadline for slots
RUNNING     all members have ended with code 0                     ENDED, with success
any         a limit is reached, or the closed registry says so     ENDED, with the first failure in words
==========  =====================================================  ===================================================

The registry is the barrier between two rounds, kept as data: who is expected, and who said READY, SUCCESS or FAILURE.
Who is silent until the reset's deadline is voted out. Nothing waits inside a step.

A worker
========

========  ==============================================  =======================================  ===================
phase     it is                                           it leaves the phase when                 its deadline
========  ==============================================  =======================================  ===================
BOOTING   started, and has asked for no round             it asks (READY); its place goes, it is   --start-timeout
                                                          late (LEAVING)
READY     waiting: for the round, or as a standby         a round has it (MEMBER); no place is     none
                                                          left for it (LEAVING, dismissed)
MEMBER    in the round                                    it asks for the next (READY); its host   that of the reset
                                                          fails, it is voted out, it dies
                                                          (LEAVING, stopped)
LEAVING   dismissed, stopped or dying: no news any more   its process has ended                    a grace if dismissed
========  ==============================================  =======================================  ===================

Until its process has ended a worker holds its place, so that no place ever has two.

The ways in which a worker ends
===============================

The first five are moves of :class:`~elastic_driver.core.transition.Transition`.

===========  ==============================================  =============================  ============================
move, event  for whom                                        command, by ``Ending``         ``WorkerRecord`` then says
===========  ==============================================  =============================  ============================
dismiss      one that is READY, and has no place             DismissWorker                  LEAVING, DISMISSED
retire       one that has no place, or is to start again     StopWorker, USUAL              LEAVING, STOPPED
.            the same, with time for a checkpoint            StopWorker, PLANNED            LEAVING, CHECKPOINTS
.            the same, and its peers are lost                StopWorker, BROKEN             LEAVING, BROKEN
hurry        one with time for a checkpoint, of which the    StopWorker, BROKEN             LEAVING, BROKEN
.            peers are lost now
stop         one that has failed: it is late, or its host    StopWorker, USUAL              LEAVING, STOPPED; FAILURE in
.            is taken out                                                                   the registry
kill         one that hangs, or has not left in time         KillWorker                     its phase; ``killed``: why,
.                                                                                           and whose ``Fault`` that is
WorkerDying  one that is seen to end by itself, not well     none                           LEAVING, DYING
HostLost     one whose host is lost                          none                           nothing: it has ended
===========  ==============================================  =============================  ============================

The end of one that is LEAVING is no news. Any other end is a success or a failure, and each kind of jobs says of what.
Whose doing a failure is (``Fault``) decides whether it is a setback: of one that was killed its ``Kill`` says so, of
others :func:`~elastic_driver.core.setbacks.fault_of`.

Kinds of jobs
=============

All this is for workers that reset in place. There are three other kinds. Each is a module, chosen by the policy
(:mod:`~elastic_driver.core.kinds`), which has what a worker's start, its clean exit and its failure mean, and the
deciders: :mod:`~elastic_driver.core.in_place`, :mod:`~elastic_driver.core.restarting`,
:mod:`~elastic_driver.core.roundless` and :mod:`~elastic_driver.core.chief`. Places, limits and ends are shared.

===========  ===================================================================  =====================================
.            RESTART                                                              NO_ROUNDS
===========  ===================================================================  =====================================
STARTING     ``State.launch``: the round is fixed, its processes are started      never
RUNNING      all of them run                                                      from the first start on
RESETTING    the round is over; who is left is stopped, and the next one          too few run, or one has failed beside
             launched when they are gone                                          others' success
READY        its process runs                                                     never
MEMBER       in the round, which has begun                                        its process runs
notices      none                                                                 none
===========  ===================================================================  =====================================

A job that is not known to be of one kind begins with RESTART, and becomes IN_PLACE with the first request for a round
(:mod:`~elastic_driver.core.becoming`): ``Policy.on_change``, which stands in the state, is what its workers are now.
Restarted workers are told how they end (``Ending``): as planned, with time for a checkpoint, while all members live;
else at once. Slots that come wait a moment for others (``State.last_call``), and before that until their host has
imported what workers import (``State.preparing``), unless there are too few without them.

A job with parameter servers is one without rounds, and has a chief (:mod:`~elastic_driver.core.chief`): a script
beside the driver, which uses the workers and keeps its variables on the servers. Its members are those that answer.

==========  ====================================================  ====================================================
chief       it is                                                 it leaves the phase when
==========  ====================================================  ====================================================
None        not started yet, or to be started again               all parameter servers and enough workers answer
RUNNING     working with these parameter servers, and no others   it ends; it has lost one, or one is to move (STOPPING)
STOPPING    told to end, to be started again                      its process has ended
FAILED      ended, and not well: for no longer than a step        another is to be started, or the job has ended
==========  ====================================================  ====================================================

What members are told
=====================

=============  ==================  ====================================================================================
notice         phase               it says
=============  ==================  ====================================================================================
NONE           any                 go on
HOSTS_UPDATED  RUNNING, RESETTING  the next round would be another: leave at the next commit. Taken back while RUNNING
                                   if that changes; once one has left, all do
ABORT          RESETTING           a member is lost or has lost the round: end what blocks, now. Never taken back
=============  ==================  ====================================================================================

A new round begins with NONE. The version of a notice grows over the whole job.

One step
========

``step`` expires blacklist entries, takes the event in (:mod:`~elastic_driver.core.intake`), and settles. The deciders
of the job's kind run in an order that matters, and stop at once when one of them has ended the job. Of workers that
reset in place:

1. the late are stopped and the silent voted out: then the registry may be complete;
2. the first round is started, misplaced blanks leave, free places are filled: then those who are expected are the right
   ones, and a worker that has just lost its place is not counted as READY;
3. the registry is closed: the round is judged (was it a setback?), the job ends, waits, or has its next round, which
   may want standbys; a round that runs is told of changes instead;
4. the limits of the waits are looked at last, since all of the above may have ended a wait;
5. what there is no room for is told, when nothing else changes any more;
6. silent hosts are given up, or it is said why not: who is left is known now. What comes of it are other events.

Whatever they decide leaves a deadline, an end, or a round that runs. :mod:`~elastic_driver.core.invariants` has this as
assertions; ``next_deadline`` knows every time at which something is due without an event.

The past
========

It is dropped in one place, :mod:`~elastic_driver.core.past`: ``forget_round`` (what a new round forgets),
``forget_worker`` (what the end of a process forgets), ``record_unless_late`` (which reports come too late and change
nothing). What can never have been raises there. A field that belongs to a round or a reset goes into ``Round``,
``Reset`` or ``RoundSoFar``, and is forgotten with it.

A driver that is another
========================

The next driver has the state, and asks each agent which processes it runs: :mod:`~elastic_driver.core.redo` makes the
commands that are still due there from the two. So every order to a process can be made anew from the state: whoever
adds one adds it there too.

What else has to be kept in mind
================================

A point in time is a ``Moment``: :mod:`~elastic_driver.core.document` moves it to the clock of whoever reads the
state. No set is iterated. Nothing grows with the names that hosts have had.
"""
