"""Tables and progress bars, under the name that the command line's modules and the examples use."""

from ..text import progress, table

__all__ = ["progress", "table"]
