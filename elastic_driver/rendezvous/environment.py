"""Names of the variables a worker finds the rendezvous by.

The keys' names are in :mod:`elastic_driver.rendezvous.credentials`; the HOROVOD_* names beside them are in
docs/design.md.
"""

from __future__ import annotations

ENV_RENDEZVOUS = "ELASTIC_DRIVER_RENDEZVOUS"  # http://host:port, or unix:/PATH on this machine
ENV_WORKER = "ELASTIC_DRIVER_WORKER"  # WorkerId.key
ENV_JOB = "ELASTIC_DRIVER_JOB"  # job id
# Marks all that one agent (and, beside it, the driver) has started, whatever its parent. Not the job: several agents of
# one job may be on one machine, and each ends what is its own.
ENV_MARK = "ELASTIC_DRIVER_MARK"
ENV_HEARTBEAT = "ELASTIC_DRIVER_HEARTBEAT_S"  # at least as often a member is to be heard
ENV_MAY_CHANGE = "ELASTIC_DRIVER_MAY_CHANGE"  # "1": hosts may come and go
ENV_HOST_TIMEOUT = "ELASTIC_DRIVER_HOST_TIMEOUT_S"  # how long a peer may acknowledge nothing
ENV_ROUND = "ELASTIC_DRIVER_ROUND"  # the round that ran when this worker was started; 0 for none
# The place planned for it then: the numbers of its SlotInfo, with commas.
ENV_PLACE = "ELASTIC_DRIVER_PLACE"
ENV_LOCAL_RANK = "ELASTIC_DRIVER_LOCAL_RANK"  # what stands for ${local_rank} in the command, where that is a macro
# In a worker that is restarted at each change, as long as none of the job's workers calls init(): "1".
ENV_RESTARTED = "ELASTIC_DRIVER_RESTARTED"
ENV_PORTS = "ELASTIC_DRIVER_PORT_RANGE"  # LOW-HIGH: the ports at which they may listen
# The driver's process, as system/process_name.py names it: while it lives, it is waited for.
ENV_OWNER = "ELASTIC_DRIVER_OWNER"
# In the chief of a job with parameter servers: which of its starts this is.
ENV_CHIEF = "ELASTIC_DRIVER_CHIEF"
# In a server that a chief uses: what it is, "worker N" or "ps N".
ENV_TASK = "ELASTIC_DRIVER_TASK"
ENV_PATIENCE = "ELASTIC_DRIVER_PATIENCE_S"  # how long a driver may be silent of which nothing else is known
PATIENCE_S = 60.0  # without it: the driver may be restarted, or its network be
GLOO_TIMEOUT_S = 30.0  # Horovod's, without HOROVOD_GLOO_TIMEOUT_SECONDS
MOST_GLOO_S = 1e7  # 115 days, and some way from what the milliseconds of a system call can count
ENV_VITALS = "ELASTIC_DRIVER_VITALS"  # the file of its agent's on which it says how it is
# Where a worker's training may tell of itself: a file in memory of its agent's that lines are appended to, and the
# number of the descriptor of it that the worker has inherited. Scripts use them: docs/page.md.
ENV_REPORT = "ELASTIC_DRIVER_REPORT"
ENV_REPORT_FD = "ELASTIC_DRIVER_REPORT_FD"
FIGURES_FILE = "elastic-driver-figures"  # its name in /proc/PID/fd
ENV_WARM = "ELASTIC_DRIVER_WARM"  # in a process that is to be held in its start, for workers to be forked from

# What torch's NCCL groups read when they are made, whatever the driver's environment says, in workers that reset inside
# their processes. By default their watchdog ends the process when a collective fails or takes too long, or when the
# watchdog itself is blocked. Here a failed collective ends a round. Set before the process starts: in a running one no
# thread should change the environment. One that turns out to be such a worker does it in its first init().
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # aborts communicators, leaves the process alone
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # asks the store each second
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}
