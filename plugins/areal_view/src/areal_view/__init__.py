"""The report of an areal run: one HTML page with its curves and samples."""

__version__ = "0.1.0"
