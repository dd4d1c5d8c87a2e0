"""Data: readers of file formats, named data sets, fixed feature extractors.

All preparation is per record or by public constants, so nothing here spends privacy.
"""

from equipoise.data.named import NAMED, load
from equipoise.data.padding import PadTo
from equipoise.data.readers.files import DataFileError, MissingDataError
from equipoise.data.records import DataSet, Records

__all__ = ["NAMED", "DataFileError", "DataSet", "MissingDataError", "PadTo", "Records", "load"]
