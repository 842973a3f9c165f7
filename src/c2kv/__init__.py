"""c2kv: compressed, composable KV cache reuse for frozen LLMs (arXiv 2607.17715).

Importing the package is cheap: the names below load torch when first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from c2kv.backbone import Backbone as Backbone
    from c2kv.composition import Composition as Composition
    from c2kv.document import Document as Document
    from c2kv.engine import Answer as Answer
    from c2kv.engine import Engine as Engine
    from c2kv.errors import C2KVError as C2KVError
    from c2kv.extractor import Extractor as Extractor
    from c2kv.extractor import ExtractorConfig as ExtractorConfig
    from c2kv.extractor import extract as extract
    from c2kv.models import load_backbone as load_backbone
    from c2kv.segment import Segment as Segment
    from c2kv.store import FolderStore as FolderStore

__version__ = version("c2kv")

_HOMES = {
    "Answer": "engine",
    "Backbone": "backbone",
    "C2KVError": "errors",
    "Composition": "composition",
    "Document": "document",
    "Engine": "engine",
    "Extractor": "extractor",
    "ExtractorConfig": "extractor",
    "FolderStore": "store",
    "Segment": "segment",
    "extract": "extractor.extract",
    "load_backbone": "models",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'c2kv' has no attribute '{name}'")
    return getattr(import_module(f"c2kv.{_HOMES[name]}"), name)
