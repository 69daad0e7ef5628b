"""The driver: the loop that turns what happens outside into events, and commands into I/O."""

from elastic_driver.driver.loop import ElasticDriver

__all__ = ["ElasticDriver"]
