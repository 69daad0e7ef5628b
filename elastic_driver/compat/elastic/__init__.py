"""Horovod's elastic driver and discovery (``horovod.runner.elastic``) as faces of this package's."""
