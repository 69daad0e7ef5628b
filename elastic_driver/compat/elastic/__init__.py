"""Horovod's elastic driver and discovery (``horovod.runner.elastic``), as adapters for this package's."""
