"""The membership core: pure values, ``step(state, event, now)``, and every decision about a job.

Imports only the lowest layer. Knows nothing of processes, connections, requests, files or clocks.

Two rules for whoever edits the core
====================================

1. Every decision on who is in the job, when, and why the job ends, is made here, in response to an event. If the
   driver would have to ask "and is it still the case that ...?", an event or a field is missing.
2. A decision looks at levels (what there is), never at edges (what has just changed). An event updates what is known,
   in ``intake``; then ``settle`` decides from the state alone. So a duplicate event is harmless, changes that cancel
   out have no effect, and a state that was written to disk and read back continues as if nothing had happened.

A job
=====

The phase of a job is not stored. It follows from which values the state has:

====================  ===================  ============================================================================
.                     no round yet         a round
====================  ===================  ============================================================================
no reset under way    WAITING for slots    RUNNING: the round trains
a reset under way     STARTING             RESETTING: the round is over, the next is being formed
====================  ===================  ============================================================================

and ENDED, when ``State.end`` says how; from then on only the ends of processes are processed. Phase transitions:

==========  =====================================================  ===================================================
from        when                                                   to
==========  =====================================================  ===================================================
WAITING     there are -np usable slots                             STARTING: workers are started, all are expected
STARTING    all have reported, enough are READY                    RUNNING, in round 1
RUNNING     a member is READY, or has failed                       RESETTING: all members are expected
RESETTING   all have reported, enough are READY, nothing waits     RUNNING, in the next round
RESETTING   all have reported, too few are READY                   RESETTING, with a deadline for slots
RUNNING     all members have ended with code 0                     ENDED, with success
any         a limit is reached, or the closed registry says so     ENDED, with the first failure as its reason
==========  =====================================================  ===================================================

The registry is the barrier between two rounds, kept as data: which workers are expected, and which reported READY,
SUCCESS or FAILURE. A worker that is silent until the reset's deadline is voted out. Nothing blocks inside a step.

A worker
========

========  ==============================================  =======================================  ===================
phase     it is                                           it leaves the phase when                 its deadline
========  ==============================================  =======================================  ===================
BOOTING   started, and has not asked for a round yet      it asks (READY); its place goes, it is   --start-timeout
                                                          late (LEAVING)
READY     waiting: for the round, or as a standby         a round has it (MEMBER); no place is     none
                                                          left for it (LEAVING, dismissed)
MEMBER    in the round                                    it asks for the next (READY); its host   that of the reset
                                                          fails, it is voted out, it dies
                                                          (LEAVING, stopped)
LEAVING   dismissed, stopped or dying: its end is no      its process has ended                    a grace if dismissed
          news any more
========  ==============================================  =======================================  ===================

A worker holds its place until its process has ended, so no place ever has two workers.

The ways in which a worker ends
===============================

The first five are moves of :class:`~elastic_driver.core.transition.Transition`.

===========  ==============================================  =============================  ============================
move, event  applies to                                      command, by ``Ending``         ``WorkerRecord`` then says
===========  ==============================================  =============================  ============================
dismiss      a READY worker without a place                  DismissWorker                  LEAVING, DISMISSED
retire       a worker without a place, or to be restarted    StopWorker, USUAL              LEAVING, STOPPED
.            the same, with time for a checkpoint            StopWorker, PLANNED            LEAVING, CHECKPOINTS
.            the same, after its peers were lost             StopWorker, BROKEN             LEAVING, BROKEN
hurry        a worker with time for a checkpoint, whose      StopWorker, BROKEN             LEAVING, BROKEN
.            peers are lost now
stop         a worker that has failed: it is late, or its    StopWorker, USUAL              LEAVING, STOPPED; FAILURE in
.            host is taken out                                                              the registry
kill         a worker that hangs, or has not left in time    KillWorker                     its phase; ``killed``: why,
.                                                                                           and whose ``Fault`` it is
WorkerDying  a worker that is failing by itself              none                           LEAVING, DYING
HostLost     a worker whose host is lost                     none                           nothing: it has ended
===========  ==============================================  =============================  ============================

The end of a LEAVING worker is ignored. Any other end is a success or a failure, and each kind of job defines which.
The ``Fault`` of a failure decides whether it is a setback: for a killed worker it is in its ``Kill``, for all others
:func:`~elastic_driver.core.setbacks.fault_of` determines it.

Kinds of jobs
=============

All of the above applies to workers that reset in place. There are three other kinds. Each kind is a module, chosen by
the policy (:mod:`~elastic_driver.core.kinds`), that defines what a worker's start, clean exit and failure mean, and
the deciders: :mod:`~elastic_driver.core.in_place`, :mod:`~elastic_driver.core.restarting`,
:mod:`~elastic_driver.core.roundless` and :mod:`~elastic_driver.core.chief`. They share places, limits and endings.

===========  ===================================================================  =====================================
.            RESTART                                                              NO_ROUNDS
===========  ===================================================================  =====================================
STARTING     ``State.launch``: the round is fixed, its processes are started      never
RUNNING      all of them run                                                      from the first start on
RESETTING    the round is over; the remaining workers are stopped, and the next   too few run, or one has failed beside
             round is launched when they have ended                               others' success
READY        its process runs                                                     never
MEMBER       in the round, which has begun                                        its process runs
notices      none                                                                 none
===========  ===================================================================  =====================================

A job whose kind is not known begins with RESTART, and becomes IN_PLACE with the first request for a round
(:mod:`~elastic_driver.core.becoming`): ``Policy.on_change``, a part of the state, is the current kind of its workers.
Restarted workers are stopped as planned, with time for a checkpoint, while all members live; otherwise at once
(``Ending``). New slots wait a moment for others (``State.last_call``), and before that until their host has imported
the workers' modules (``State.preparing``), unless there are too few slots without them.

A job with parameter servers has no rounds, but a chief (:mod:`~elastic_driver.core.chief`): a script beside the
driver that uses the workers and keeps its variables on the servers. Its members are the workers that answer.

==========  ====================================================  ====================================================
chief       it is                                                 it leaves the phase when
==========  ====================================================  ====================================================
None        not started yet, or to be restarted                   all parameter servers and enough workers answer
RUNNING     working with these parameter servers, and no others   it ends; it has lost one, or one is to move (STOPPING)
STOPPING    asked to end, to be restarted                         its process has ended
FAILED      it has failed: for no longer than one step            another is to be started, or the job has ended
==========  ====================================================  ====================================================

Notices to members
==================

=============  ==================  ====================================================================================
notice         phase               meaning
=============  ==================  ====================================================================================
NONE           any                 continue
HOSTS_UPDATED  RUNNING, RESETTING  the next round would be another: leave at the next commit. Withdrawn while RUNNING
                                   if that changes; once one member has left, all do
ABORT          RESETTING           a member is lost or has lost the round: abort blocking calls now. Never withdrawn
=============  ==================  ====================================================================================

A new round begins with NONE. The version of a notice grows over the whole job.

One step
========

``step`` expires blacklist entries, applies the event (:mod:`~elastic_driver.core.intake`), and settles. The deciders
of the job's kind run in a significant order, and stop as soon as one of them has ended the job. For workers that
reset in place:

1. late workers are stopped and silent ones voted out: then the registry may be complete;
2. the first round is started, misplaced blank workers leave, free places are filled: then the right workers are
   expected, and a worker that has just lost its place does not count as READY;
3. the registry is closed: the round is judged (was it a setback?), and the job ends, waits, or gets its next round,
   which may want standbys; a running round is notified of changes instead;
4. the limits of the waits are checked last, since all of the above may have ended a wait;
5. slots and standbys without room are reported, when nothing else changes any more;
6. silent hosts are given up, or the reason why not is reported: the remaining workers are known now. The consequences
   arrive as other events.

Every outcome leaves a deadline, an end, or a running round. :mod:`~elastic_driver.core.invariants` asserts this;
``next_deadline`` knows every time at which something is due without an event.

The past
========

State is dropped in one place, :mod:`~elastic_driver.core.past`: ``forget_round`` (what a new round drops),
``forget_worker`` (what the end of a process drops), ``record_unless_late`` (which reports come too late and change
nothing). An impossible report raises there. A field that belongs to a round or a reset goes into ``Round``, ``Reset``
or ``RoundSoFar``, and is dropped with it.

Takeover by another driver
==========================

The next driver has the state, and asks each agent which processes it runs; from the two,
:mod:`~elastic_driver.core.redo` derives the commands that are still due there. So every command to a process can be
derived from the state: whoever adds one adds it there too.

What else to keep in mind
=========================

A point in time is a ``Moment``: :mod:`~elastic_driver.core.document` moves it to the clock of the process that reads
the state. No set is iterated. Nothing grows with the number of host names ever seen.
"""
