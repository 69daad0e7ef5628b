"""A Kubernetes controller for jobs: ElasticJob, a resource with MPIJob's field names.

``spec`` reads what a user has written, ``objects`` makes the objects that a job consists of, ``plan`` decides what is
to be done next from what is there, ``controller`` does it over ``api``, and ``driver_link`` asks a job's driver. The
first three are pure. The controller is no part of a job: a job whose controller is gone goes on, with the pods that it
has.
"""
