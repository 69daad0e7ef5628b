"""``elasticrun doctor``: a small job of one worker a host, which finds out what would stop or slow a real one.

It is a job like any other: the driver, the agents and the workers' engine are those of training, so that what works
here works there. ``checkup`` runs it, and ``attendance`` is asked by its workers; ``worker`` is what each runs, and
``examine`` looks at its machine. ``facts`` are what a worker says, ``seen`` is what the job's events say besides, and
``findings`` judges both: these three are pure.
"""
