"""The page: a running job in a browser. See :mod:`elastic_driver.report.page.site`."""
