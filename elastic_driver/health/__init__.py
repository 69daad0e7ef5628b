"""How the workers are: who hangs, who is silent, who is slow, whether the round goes on at all. A second pure core.

Imports the core, whose state it looks at, and the ground. Knows nothing of processes, connections, requests, files or
clocks. Ends nobody and drains nobody: what it finds of that are events of the core.

Two rules for whoever edits it
==============================

1. Everything that decides whether a worker is suspected, ended or drained, and in which order that is told, is in here,
   as the answer to an event. The driver feeds events and does what findings say (:mod:`elastic_driver.driver.health`).
2. To suspect takes time; to end takes proof. Whoever waits is innocent, and what cannot be seen proves nothing: a gap
   in the looks, a host that was stopped, a stack that cannot be had begin the evidence anew.

One step
========

:class:`~elastic_driver.health.watch.HealthWatch` has the state. It is changed in place, since thousands of looks come
each second; nobody but its ``step(event, now)`` changes it, and the same events give the same findings.

=============  ==================================================  =====================================================
event          it says                                             what comes of it
=============  ==================================================  =====================================================
JobChanged     the core has made a step: its state                 a new round begins anew; a stall that ends with it is
                                                                   told; who has no place in it need not be heard
VitalsSeen     an agent has looked at a worker                     it is remembered
WorkerHeard    a worker has asked for its round, or for its        it is to be heard from here on, or no more where it
               notices                                             leaves
WorkerGone     a worker's process has ended                        nothing of it is kept
StackTaken     the stack that was wanted                           the suspicion is told with it; it is evidence
CommitFound    there is a commit on disc                           nobody is spared any more for having the state alone
TimePassed     it is ``next_deadline``                             the watches look, and find
=============  ==================================================  =====================================================

=================================================  ==============================================================
finding                                            what the driver does
=================================================  ==============================================================
WorkerSuspected, WorkerCleared, StragglerFound,    tells it, as it is
StragglerGone, Stalled, StallEnded
Spared, NotDrained                                 warns of it
StackWanted                                        has the stack taken, and answers StackTaken
WorkerHung, DrainRequested                         feeds it to the core, as it is
=================================================  ==============================================================

The rules
=========

All are rules of the same watch; the driver's loop has one timer for them.

=======================  ==============================================  =======================  ======================
rule                     finds a worker that                             by                       and then
=======================  ==============================================  =======================  ======================
hangs                    others wait for, and that does not go on        vitals                   it is suspected; when
                         (``cases``), for longer than a learned limit                             proven, it hangs
                         (``limits``)
stopped                  is stopped by a signal, for 10 s                vitals                   likewise
``--hang-timeout``       finishes no operation and waits in none         vitals, its own words    it hangs, whatever it
                         (``heartbeats``)                                                         does
``--heartbeat-timeout``  says nothing, and has no pulse; no debugger     likewise                 it hangs, silently
                         has stopped it (``heartbeats``)
standstills              runs a script without this library, or whose    vitals, steps, hosts     it is suspected
                         agent says nothing                              that are not heard
stragglers               needs longer than the others for its steps      own times in the vitals  it is told
drains                   is a straggler, with ``--straggler-action       pauses, the core's       it is drained, or why
                         drain``                                         state                    not
stalls                   (the round as a whole)                          vitals                   it is told
=======================  ==============================================  =======================  ======================

A worker that hangs
===================

=========  ==============================================================  ===========================================
it is      while                                                           until
=========  ==============================================================  ===========================================
seen       looks come of it                                                others wait for it longer than the limit
suspected  it does not go on. Its stack is asked for, and with that it is  it goes on, leaves, ends, a look is missed,
           told; what becomes of it is told after that                     or its round is over: cleared
proven     for the whole deadline it has neither computed, moved data nor  the core has it killed; what is seen of it
           woken, has waited for nothing outside the job, and its stacks   from then on counts for nothing
           are the same at the beginning, in the middle and at the end
spared     it is proven, and the training's state would be lost with it    others have the state, or a commit is on
           (``survivors``): warned of once                                 disc
=========  ==============================================================  ===========================================

Histories of all this are in ``tests/scenarios``, beside those of the core.

Beside the step
===============

``dumps`` reads what faulthandler prints, for all who ask something of it; ``last_words``, how a process says its end.
``vitals_table`` keeps the last looks, for the status.
"""
