"""What mpirun's and srun's variables say of a process."""

from __future__ import annotations

import pytest

from elastic_driver.errors import SettingsError
from elastic_driver.worker.launched.launcher import launch_of

pytestmark = pytest.mark.unit

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "124977153",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_FD": "8"}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
}


def test_a_process_that_nobody_has_started_with_others_has_no_launch() -> None:
    assert launch_of({}) is None
    assert launch_of({"OMPI_COMM_WORLD_RANK": "", "PMI_RANK": "", "SLURM_PROCID": ""}) is None


@pytest.mark.parametrize(
    ("environ", "launcher", "is_mpi", "place", "on_one_host"),
    [
        (OPEN_MPI, "Open MPI's mpirun", True, (1, 4), True),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI's mpirun", True, (1, 4), False),
        (HYDRA, "MPICH's mpirun", True, (2, 3), False),
        (HYDRA | {"MPI_LOCALNRANKS": "3"}, "MPICH's mpirun", True, (2, 3), True),
        (SLURM, "srun", False, (0, 2), True),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, "srun", False, (0, 2), False),
        (SLURM | {"PMI_RANK": "0", "PMI_SIZE": "2", "PMIX_RANK": "0"}, "srun", False, (0, 2), True),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "a launcher that sets PMI_RANK", True, (1, 2), False),
        ({"PMIX_RANK": "1"}, "a launcher that sets PMIX_RANK", True, (1, 0), False),
    ],
)
def test_who_has_started_it_as_which(
    environ: dict[str, str], launcher: str, is_mpi: bool, place: tuple[int, int], on_one_host: bool
) -> None:
    launch = launch_of(environ)
    assert launch is not None
    assert (launch.launcher, launch.is_mpi, (launch.rank, launch.size)) == (launcher, is_mpi, place)
    assert launch.is_on_one_host == on_one_host


def test_the_innermost_launcher_counts() -> None:
    allocation = SLURM | {"SLURM_STEP_ID": "0"}
    for inner, name in ((OPEN_MPI, "Open MPI's mpirun"), (HYDRA, "MPICH's mpirun")):
        launch = launch_of(allocation | inner)
        assert launch is not None
        assert launch.launcher == name


def test_a_worker_of_torchrun_is_no_task_of_the_slurm_step_that_its_agent_is() -> None:
    assert launch_of(SLURM | {"TORCHELASTIC_RUN_ID": "job"}) is None


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291", "4294967292", "batch"])
def test_a_batch_script_and_an_interactive_shell_of_slurm_are_no_step(step: str) -> None:
    assert launch_of(SLURM | {"SLURM_STEP_ID": step}) is None


def test_two_jobs_have_two_names() -> None:
    jobs = [
        OPEN_MPI,
        OPEN_MPI | {"PMIX_NAMESPACE": "124977154"},
        SLURM,
        SLURM | {"SLURM_STEP_ID": "4"},
        SLURM | {"SLURM_JOB_ID": "8"},
        SLURM | {"SLURM_WORKING_CLUSTER": "other:127.0.0.1:6817:9728:102"},
        SLURM | {"SLURM_STEP_LAUNCHER_PORT": "36529"},
    ]
    launches = [launch_of(job) for job in jobs]
    assert len({launch.job for launch in launches if launch is not None}) == len(jobs)
    hydra = launch_of(HYDRA)
    assert hydra is not None
    assert hydra.job == ""


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK='one'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE=''"),
        (HYDRA | {"PMI_SIZE": "-1"}, "PMI_SIZE='-1'"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "9" * 5000}, "SLURM_STEP_NUM_TASKS='9999"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "rank 4 of 4"),
    ],
)
def test_rubbish_is_refused_by_name(environ: dict[str, str], name: str) -> None:
    with pytest.raises(SettingsError, match="cannot use") as refused:
        launch_of(environ)
    assert name in str(refused.value)
    assert len(str(refused.value)) < 200
