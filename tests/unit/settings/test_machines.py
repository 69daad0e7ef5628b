"""The notations for many machines, and which variables travel."""

from __future__ import annotations

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.settings.machines import node_environment, read_passed, read_port_range, remote_environment

pytestmark = [pytest.mark.unit]


def test_port_ranges() -> None:
    assert read_port_range("4000-4999") == (4000, 4999)
    assert read_port_range(" 4000 - 4999 ") == (4000, 4999)
    assert read_port_range("4000") == (4000, 4000)
    for text in ("", "-", "4000-", "-5", "a-b", "1-2-3", "1" * 5000, "4000:5000"):
        with pytest.raises(ValueError, match="is not a range of ports such as"):
            read_port_range(text)


def test_passed_variables() -> None:
    environ = {"A": "1", "EMPTY": ""}
    assert read_passed(["A", "B=2", "C=", "D=x=y", "EMPTY"], environ) == {
        "A": "1",
        "B": "2",
        "C": "",
        "D": "x=y",
        "EMPTY": "",
    }
    assert read_passed(["A", "A=3"], environ) == {"A": "3"}
    assert read_passed([], environ) == {}


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("ABSENT", "-x ABSENT: the variable is not set here; write -x ABSENT=VALUE"),
        ("", "-x '' does not begin with a variable name"),
        ("=1", "-x '=1' does not begin"),
        ("A B=1", "does not begin"),
        ("1A=1", "does not begin"),
        ("A=\0", "-x A: its value contains a NUL byte"),
    ],
)
def test_what_cannot_be_passed(word: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_passed([word], {})
    assert complaint in str(caught.value)


def test_what_travels() -> None:
    travels = {"PATH": "p", "PYTHONPATH": "q", "LD_LIBRARY_PATH": "l", "NCCL_DEBUG": "i", "TERMS": "t", "MY_HOME": "h"}
    travels["ETCDCTL_ENDPOINTS"] = "e"
    stays = dict.fromkeys(
        (
            "BASH_FUNC_which%%",
            "OLDPWD",
            "CUDA_VISIBLE_DEVICES",
            "PWD",
            "_",
            "HOME",
            "USER",
            "HOSTNAME",
            "SSH_AUTH_SOCK",
            "XDG_RUNTIME_DIR",
            "OMPI_MCA_plm_rsh_agent",
            "K_MPI_JOB_ROLE",
            "I_MPI_PERHOST",
            "I_MPI_HYDRA_HOST_FILE",
            "HYDRA_LAUNCH_EXTRA_ARGS",
            "NVIDIA_VISIBLE_DEVICES",
            "ELASTIC_DRIVER_JOIN_TOKEN",
            "_HOROVOD_SECRET_KEY",
            "ELASTIC_DRIVER_BESIDE",
            "ELASTIC_DRIVER_AGENTS_ETCDCTL_PASSWORD",
            "ETCDCTL_USER",
            "ETCDCTL_KEY",
            "not-a-name",
        ),
        "x",
    )
    assert remote_environment(travels | stays) == travels


def test_workers_of_a_node_have_its_own_variables_below_the_drivers() -> None:
    own = {"PATH": "/own", "RANK": "7", "OMP_NUM_THREADS": "5", "PYTHONPATH": "/own/lib:/both"}
    given = {"RANK": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/shim:/both", "HOROVOD_ELASTIC": "1"}
    assert node_environment(own, given) == {
        "PATH": "/own",
        "RANK": "0",
        "OMP_NUM_THREADS": "5",
        "PYTHONPATH": "/shim:/both:/own/lib",
        "HOROVOD_ELASTIC": "1",
    }
    # What is a default in one job is an order in another.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert node_environment({name: "3"}, {name: "1"}) == {name: "3"}
    assert node_environment({name: "3"}, {name: "2"}) == {name: "2"}
    assert node_environment({}, given) == given
    assert node_environment(own, {}) == own
