"""Health of the workers: hangs, silence, stragglers, and stalls of the whole round. A second pure core.

Imports the core, whose state it reads, and the lowest layer. Knows nothing of processes, connections, requests, files
or clocks. Kills and drains nothing itself: such findings are events of the core.

Two rules for whoever edits this package
========================================

1. Every decision on whether a worker is suspected, killed or drained, and on the order of the reports, is made here, in
   response to an event. The driver feeds events and acts on findings (:mod:`elastic_driver.driver.health`).
2. A suspicion takes time; a kill takes proof. A waiting worker is innocent, and what cannot be observed proves nothing:
   after a gap between observations, a stopped host, or a stack that cannot be taken, evidence is collected anew.

One step
========

:class:`~elastic_driver.health.watch.HealthWatch` has the state. It is mutated in place, since thousands of observations
arrive each second; only its ``step(event, now)`` changes it, and the same events give the same findings.

=============  ==================================================  =====================================================
event          meaning                                             effect
=============  ==================================================  =====================================================
JobChanged     the core has made a step: its new state             a new round starts afresh; a stall that it ends is
                                                                   reported; workers without a place may be silent
VitalsSeen     an agent has observed a worker                      it is recorded
WorkerHeard    a worker has asked for its round, or for its        it must send heartbeats from now on, or no more if it
               notices                                             leaves
WorkerGone     a worker's process has ended                        its records are dropped
StackTaken     the result of a StackWanted                         the suspicion is reported with it; it is evidence
CommitFound    there is a commit on disk                           no worker is spared any more as the sole owner of the
                                                                   state
TimePassed     it is ``next_deadline``                             the watches check their rules
=============  ==================================================  =====================================================

=================================================  ==============================================================
finding                                            what the driver does
=================================================  ==============================================================
WorkerSuspected, WorkerCleared, StragglerFound,    reports it unchanged
StragglerGone, Stalled, StallEnded
Spared, NotDrained                                 warns of it
StackWanted                                        takes the stack, and responds with StackTaken
WorkerHung, DrainRequested                         feeds it to the core unchanged
=================================================  ==============================================================

The rules
=========

All are rules of the same watch, on one timer of the driver's loop.

=======================  ==============================================  =======================  ======================
rule                     finds a worker that                             from                     consequence
=======================  ==============================================  =======================  ======================
hangs                    makes no progress while others wait for it      vitals                   it is suspected; once
                         (``cases``), for longer than a learned limit                             proven, it hangs
                         (``limits``)
stopped                  is stopped by a signal, for 10 s                vitals                   the same
``--hang-timeout``       finishes no operation and waits in none         vitals, its own reports  it hangs, whatever it
                         (``heartbeats``)                                                         does
``--heartbeat-timeout``  sends nothing, and has no pulse, though no      the same                 it hangs, silently
                         debugger has stopped it (``heartbeats``)
standstills              runs a script without this library, or whose    vitals, steps, silent    it is suspected
                         agent is silent                                 agents
stragglers               needs longer than the others for its steps      own times in the vitals  it is reported
drains                   is a straggler, with ``--straggler-action       pauses, the core's       it is drained, or why
                         drain``                                         state                    not is reported
stalls                   (the round as a whole)                          vitals                   it is reported
=======================  ==============================================  =======================  ======================

A worker that hangs
===================

=========  ==============================================================  ===========================================
it is      while                                                           until
=========  ==============================================================  ===========================================
seen       it is observed                                                  others wait for it longer than the limit
suspected  it makes no progress. Its stack is requested, and the report    it makes progress, leaves, ends, a look is
           includes it; later outcomes are reported after that             missed, or its round is over: cleared
proven     for the whole deadline it has neither computed, moved data nor  the core has it killed; later observations
           woken, has waited for nothing outside the job, and its stacks   do not count
           are the same at the beginning, in the middle and at the end
spared     it is proven, and the training's state would be lost with it    others have the state, or a commit is on
           (``survivors``): one warning                                    disk
=========  ==============================================================  ===========================================

Scenarios of all this are in ``tests/scenarios``, beside those of the core.

Outside the step
================

``dumps`` parses the output of faulthandler; ``last_words`` finds the error in a process's last output.
``vitals_table`` keeps the latest vitals, for the status.
"""
