"""``horovod.runner``'s small helpers, which scripts and the tests of others import; each module has its name there."""
