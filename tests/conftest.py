"""Fixtures shared by the tests: tiny backbones of every architecture and extractors for them."""

from functools import cache

import pytest
import torch
import transformers

from c2kv.backbone import Backbone
from c2kv.extractor import Extractor
from c2kv.models import EMBEDDED, load_backbone
from tiny import TINY_MODELS, tiny_model


def pytest_report_header():
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@cache
def backbone_of(name):
    return Backbone(tiny_model(name), name=name)


def noisy_extractor(backbone, ratio=4, variant="plain", seed=1):
    """A fresh extractor moved away from its initialisation, so that every weight matters."""
    extractor = Extractor.from_backbone(backbone, ratio=ratio, variant=variant)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in extractor.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return extractor


def random_ids(count, seed=0, vocabulary=199):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count,), generator=generator).tolist()


@pytest.fixture(params=TINY_MODELS)
def backbone(request):
    return backbone_of(request.param)


@pytest.fixture
def llama():
    return backbone_of("llama")


@pytest.fixture(scope="session")
def embedded():
    """The embedded model itself, in float32."""
    return load_backbone(EMBEDDED, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded):
    return embedded.tokenizer
