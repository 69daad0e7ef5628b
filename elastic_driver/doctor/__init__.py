"""``elasticrun doctor``: run a small job of one worker a host, to find problems that would stop or slow a real job.

The driver, the agents and the workers' engine are those of training, so that whatever works here works there.
``checkup`` runs the job, and ``attendance`` serves its workers; each of them runs ``worker``, and ``examine`` inspects
its machine. ``facts`` are a worker's report, ``seen`` collects the job's events, and ``findings`` judges both: these
three are pure.
"""
