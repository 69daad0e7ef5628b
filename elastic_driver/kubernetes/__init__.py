"""A Kubernetes controller for jobs: ElasticJob, a resource with MPIJob's field names.

``spec`` parses a user's resource, ``objects`` builds a job's objects, ``plan`` decides the next actions from the
present state, ``controller`` carries them out through ``api``, and ``driver_link`` queries a job's driver. The first
three are pure. The controller is not part of a job: a job without its controller keeps running, with the pods that it
has.
"""
