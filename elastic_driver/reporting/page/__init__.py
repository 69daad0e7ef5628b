"""The page: a running job in a browser. Begin with :mod:`elastic_driver.reporting.page.site`."""
