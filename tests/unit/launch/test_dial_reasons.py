"""What the last lines of ssh, kubectl and others mean: which words reach the user, and whether it is tried again."""

from __future__ import annotations

import pytest

from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.dial.reasons import failure

pytestmark = pytest.mark.unit

_CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Offending ED25519 key in /root/.ssh/known_hosts:3
Host key for b has changed and you have requested strict checking.
Host key verification failed.
"""

_TRIED_AGAIN = {
    "ssh: connect to host b port 22: Connection refused": "ssh: connect to host b port 22: Connection refused",
    "ssh: Could not resolve hostname b: Name or service not known": (
        "ssh: Could not resolve hostname b: Name or service not known"
    ),
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.2 port 22": (
        "ssh: b: Connection closed by 10.0.0.2 port 22"
    ),
    "Connection timed out during banner exchange\nConnection to b port 22 timed out": (
        "ssh: Connection to b port 22 timed out"
    ),
    "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\n"
    "Connection closed by UNKNOWN port 65535": "ssh: b: channel 0: open failed: connect failed: Connection refused",
    "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\n"
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535": (
        "ssh: b: channel 0: open failed: connect failed: Connection refused"
    ),
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535": (
        "ssh: b: kex_exchange_identification: Connection closed by remote host"
    ),
    "Connection to b closed by remote host.": "ssh: Connection to b closed by remote host",
    "": "ssh: b: exited with code 255 without output",
}
_PERMANENT = {
    "root@b: Permission denied (publickey).": "ssh: root@b: Permission denied (publickey)",
    _CHANGED: ("ssh: Host key for b has changed and you have requested strict checking. Host key verification failed"),
    "Host key verification failed.": (
        "ssh: b: Host key verification failed (its host key is unknown here: log in once manually, or see "
        "StrictHostKeyChecking in ssh's configuration)"
    ),
    "/root/.ssh/config: line 3: Bad configuration option: hots\n/root/.ssh/config: terminating, 1 bad "
    "configuration options": "ssh: b: /root/.ssh/config: line 3: Bad configuration option: hots",
    "Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures\n"
    "Disconnected from 10.0.0.2 port 22": (
        "ssh: b: Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures"
    ),
}


@pytest.mark.parametrize(("said", "reason"), _TRIED_AGAIN.items())
def test_what_may_get_better_by_itself(said: str, reason: str) -> None:
    assert failure("ssh", "b", 255, said.splitlines()) == DialFailure(reason, permanent=False)


@pytest.mark.parametrize(("said", "reason"), _PERMANENT.items())
def test_what_somebody_has_to_change(said: str, reason: str) -> None:
    assert failure("ssh", "b", 255, said.splitlines()) == DialFailure(reason, permanent=True)


@pytest.mark.parametrize(
    ("returncode", "said"),
    [
        (127, "sh: 1: /opt/python: not found"),
        (126, "env: '/opt/python': Permission denied"),
        (1, "error: exec: /opt/python: not found\ncommand terminated with exit code 127"),
        (2, "slurmstepd-b: error: execve(): /opt/python: No such file or directory"),
        (1, "/usr/bin/python3: No module named elastic_driver"),
        (
            1,
            "/usr/bin/python3: Error while finding module specification for 'elastic_driver.launch.agent' "
            "(ModuleNotFoundError: No module named 'elastic_driver')",
        ),
        (2, "Unknown option: -P\nusage: python3 [option] ...\nTry `python -h' for more information."),
    ],
)
def test_what_is_missing_on_the_host(returncode: int, said: str) -> None:
    told = failure("kubectl", "b", returncode, said.splitlines())
    assert told.permanent
    assert said.splitlines()[0] in told.reason


def test_words_of_a_shell_that_traces_its_commands_are_no_reason() -> None:
    said = ["+ POD_NAME=b", 'Error from server (NotFound): pods "b" not found', "++ true"]
    assert failure("kubexec.sh", "b", 1, said) == DialFailure(
        'kubexec.sh: Error from server (NotFound): pods "b" not found'
    )


def test_what_comes_along_with_every_step_is_no_reason() -> None:
    said = [
        "srun: cluster configuration lacks support for cpu binding",
        "bye",
        "srun: error: b: task 0: Exited with exit code 1",
    ]
    assert failure("srun", "b", 1, said) == DialFailure("srun: b: bye")
    assert failure("srun", "b", 1, said[:1]) == DialFailure("srun: b: exited with code 1 without output")


def test_a_host_whose_name_is_part_of_another_is_named() -> None:
    assert failure("", "node1", 1, ["cannot reach node10"]).reason == "node1: cannot reach node10"
    assert failure("", "node1", 1, ["cannot reach node1: it is off"]).reason == "cannot reach node1: it is off"


@pytest.mark.parametrize(("returncode", "how"), [(-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")])
def test_a_signal_is_named(returncode: int, how: str) -> None:
    assert failure("srun", "b", returncode, []) == DialFailure(f"srun: b: {how}")


def test_what_is_to_be_hidden_is() -> None:
    told = failure("rsh", "b", 2, ["unrecognized arguments: --bootstrap eyJ0"], hidden="eyJ0")
    assert told.reason == "rsh: b: unrecognized arguments: --bootstrap ..."
    assert failure("rsh", "b", 1, ["+ exec b --bootstrap eyJ0"]).reason == "rsh: b: exited with code 1 without output"
