"""The driver: the loop that turns the world into events and commands into I/O."""

from elastic_driver.driver.loop import ElasticDriver

__all__ = ["ElasticDriver"]
