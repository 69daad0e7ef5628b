"""Helpers of ``horovod.runner`` that scripts and other projects' tests import, under Horovod's module names."""
