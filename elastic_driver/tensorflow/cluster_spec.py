"""Cluster specs with one task more, or one less."""

from __future__ import annotations

import tensorflow as tf

from elastic_driver.tensorflow.addresses import checked_address


def add_task(spec: tf.train.ClusterSpec, job: str, address: str) -> tf.train.ClusterSpec:
    """The spec with another task, whose index is the one after the highest.

    Args:
        spec: of the cluster; it stays as it is.
        job: such as "worker".
        address: "host:port".

    Raises:
        ValueError: the job has a task with this address, or this is no address.
    """
    jobs = _jobs(spec)
    tasks = jobs.setdefault(job, {})
    address = checked_address(address)
    if address in tasks.values():
        raise ValueError(f"job {job!r} has a task at {address}")
    tasks[max(tasks, default=-1) + 1] = address
    return tf.train.ClusterSpec(jobs)


def remove_task(spec: tf.train.ClusterSpec, job: str, address: str) -> tf.train.ClusterSpec:
    """The spec without one task. All others keep their indices.

    Args:
        spec: of the cluster; it stays as it is.
        job: such as "worker".
        address: "host:port".

    Raises:
        ValueError: the job has no task with this address.
    """
    jobs = _jobs(spec)
    tasks = jobs.get(job, {})
    index = next((index for index, there in tasks.items() if there == address), None)
    if index is None:
        raise ValueError(f"job {job!r} has no task at {address}")
    del tasks[index]
    if not tasks:
        del jobs[job]
    return tf.train.ClusterSpec(jobs)


def _jobs(spec: tf.train.ClusterSpec) -> dict[str, dict[int, str]]:
    return {job: {index: spec.task_address(job, index) for index in spec.task_indices(job)} for job in spec.jobs}
