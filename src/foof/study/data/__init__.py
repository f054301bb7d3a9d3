"""Formats, downloads, data sets, and the images that come with the package."""

from foof.study.data.datasets import SOURCES, SPECS, Data, Found, available, data_folder, load, read, test_records, there

__all__ = ["SOURCES", "SPECS", "Data", "Found", "available", "data_folder", "load", "read", "test_records", "there"]
