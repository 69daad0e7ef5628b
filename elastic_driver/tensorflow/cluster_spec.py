"""Cluster specs with one task added or removed."""

from __future__ import annotations

import tensorflow as tf

from elastic_driver.tensorflow.addresses import checked_address


def add_task(spec: tf.train.ClusterSpec, job: str, address: str) -> tf.train.ClusterSpec:
    """Return a spec with one more task, whose index is one above the highest.

    Args:
        spec: the cluster's spec; stays unchanged.
        job: the task's job, such as "worker".
        address: "host:port".

    Raises:
        ValueError: the job has a task with this address already, or the address is invalid.
    """
    jobs = _jobs(spec)
    tasks = jobs.setdefault(job, {})
    address = checked_address(address)
    if address in tasks.values():
        raise ValueError(f"job {job!r} has a task at {address}")
    tasks[max(tasks, default=-1) + 1] = address
    return tf.train.ClusterSpec(jobs)


def remove_task(spec: tf.train.ClusterSpec, job: str, address: str) -> tf.train.ClusterSpec:
    """Return a spec without one task. The other tasks keep their indices.

    Args:
        spec: the cluster's spec; stays unchanged.
        job: the task's job, such as "worker".
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
