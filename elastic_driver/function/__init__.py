"""``elastic_driver.run``: a Python function as the job."""
