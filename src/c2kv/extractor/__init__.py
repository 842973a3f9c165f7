"""The C2Extractor: its config, its weights, who sees whom, and the pass itself."""

from c2kv.extractor.config import ExtractorConfig
from c2kv.extractor.extract import extract
from c2kv.extractor.model import Extractor

__all__ = ["Extractor", "ExtractorConfig", "extract"]
