"""Errors that users meet. Each message is one line: what was wrong, then what to do about it."""


class C2KVError(Exception):
    """Base of every error raised on purpose by c2kv."""


class ModelReferenceError(C2KVError):
    """A model reference names nothing that can be loaded."""


class UnsupportedModelError(C2KVError):
    """The backbone cannot work with position-free KV; the message says why."""


class ConfigError(C2KVError, ValueError):
    """A setting is outside its allowed values."""


class ExtractorMismatchError(C2KVError):
    """An extractor was made for other backbone weights or dimensions."""


class MissingExtractorError(C2KVError):
    """No extractor was given and none is shipped for this backbone."""


class MissingPackageError(C2KVError):
    """An optional package is not installed."""


class PromptError(C2KVError):
    """A chat template cannot be split into reusable pieces."""


class DocumentError(C2KVError):
    """A document (or question) cannot be read or holds nothing to extract."""


class ContextOverflowError(C2KVError):
    """Spans, question and answer exceed the positions the backbone was made for."""


class StoreError(C2KVError):
    """The segment store could not read or write."""


class CorruptSegmentError(StoreError):
    """A stored segment failed its verification."""


class NumericalError(C2KVError):
    """A computation gave values that are not finite."""


class DataError(C2KVError):
    """A data set cannot be read, or holds a record that cannot be used."""


class TrainingError(C2KVError):
    """A training run cannot go on; the message says where the last good state is."""
