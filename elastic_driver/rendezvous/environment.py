"""Names of the environment variables by which a worker finds the rendezvous.

The names of keys are in :mod:`elastic_driver.rendezvous.credentials`; the HOROVOD_* names are in docs/design.md.
"""

from __future__ import annotations

ENV_RENDEZVOUS = "ELASTIC_DRIVER_RENDEZVOUS"  # http://host:port, or unix:/PATH on this machine
ENV_WORKER = "ELASTIC_DRIVER_WORKER"  # WorkerId.key
ENV_JOB = "ELASTIC_DRIVER_JOB"  # job id
# Marks all processes that one agent (and, beside it, the driver) has started, whatever their parent. Not the job:
# several agents of one job may share a machine, and each ends only its own processes.
ENV_MARK = "ELASTIC_DRIVER_MARK"
ENV_HEARTBEAT = "ELASTIC_DRIVER_HEARTBEAT_S"  # longest time between two heartbeats of a member
ENV_MAY_CHANGE = "ELASTIC_DRIVER_MAY_CHANGE"  # "1": hosts may join and leave
ENV_HOST_TIMEOUT = "ELASTIC_DRIVER_HOST_TIMEOUT_S"  # how long a peer may acknowledge nothing
ENV_ROUND = "ELASTIC_DRIVER_ROUND"  # the round running when this worker was started; 0 for none
# The place planned for it then: the numbers of its SlotInfo, separated by commas.
ENV_PLACE = "ELASTIC_DRIVER_PLACE"
ENV_LOCAL_RANK = "ELASTIC_DRIVER_LOCAL_RANK"  # value of ${local_rank} in the command, where that is a macro
# "1" in a worker that is restarted at each change, as long as none of the job's workers calls init().
ENV_RESTARTED = "ELASTIC_DRIVER_RESTARTED"
ENV_PORTS = "ELASTIC_DRIVER_PORT_RANGE"  # LOW-HIGH: ports on which workers may listen
# The driver's process (system/process_name.py): while it lives, workers keep retrying.
ENV_OWNER = "ELASTIC_DRIVER_OWNER"
# In the chief of a job with parameter servers: the number of this start.
ENV_CHIEF = "ELASTIC_DRIVER_CHIEF"
# In a server that a chief uses: its task, "worker N" or "ps N".
ENV_TASK = "ELASTIC_DRIVER_TASK"
ENV_PATIENCE = "ELASTIC_DRIVER_PATIENCE_S"  # how long a driver of unknown state may be silent
PATIENCE_S = 60.0  # default: the driver or its network may be restarting
GLOO_TIMEOUT_S = 30.0  # Horovod's default of HOROVOD_GLOO_TIMEOUT_SECONDS
MOST_GLOO_S = 1e7  # 115 days, well below what the milliseconds of a system call can count
ENV_VITALS = "ELASTIC_DRIVER_VITALS"  # the agent's file to which it writes its state
# Where a training may report figures: a file in memory of its agent, to which lines are appended, and the number of the
# descriptor that the worker has inherited. Scripts use them: docs/page.md.
ENV_REPORT = "ELASTIC_DRIVER_REPORT"
ENV_REPORT_FD = "ELASTIC_DRIVER_REPORT_FD"
FIGURES_FILE = "elastic-driver-figures"  # its name in /proc/PID/fd
ENV_WARM = "ELASTIC_DRIVER_WARM"  # in a process that is held at its start so that workers can be forked from it

# Variables that torch's NCCL groups read when they are made, in workers that reset inside their processes; they
# override the driver's environment. By default the groups' watchdog ends the process when a collective fails or times
# out, or when the watchdog itself is blocked. Here a failed collective ends a round. Set before the process starts,
# because no thread should change the environment of a running one. A worker that turns out to be of this kind sets them
# in its first init().
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # aborts communicators, but not the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # polls the store every second
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}
