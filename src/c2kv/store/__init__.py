"""Where segments live between requests."""

from c2kv.store.folder import FolderStore, StoredSegment

__all__ = ["FolderStore", "StoredSegment"]
