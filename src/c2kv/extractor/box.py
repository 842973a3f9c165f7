"""The extractors in the box: trained ones that are installed with the package."""

from __future__ import annotations

from pathlib import Path

from c2kv.extractor.config import CONFIG_FILE, ExtractorConfig

FOLDER = Path(__file__).parents[1] / "extractors"
# The one to prefer for a backbone comes first.
NAMES: tuple[str, ...] = (
    "smollm2-135m-residual-k4",
    "smollm2-135m-residual-multi",
    "smollm2-135m-plain-k4",
)


def box() -> dict[str, Path]:
    """Folders by name, in order of preference."""
    return {name: FOLDER / name for name in NAMES}


def find(backbone_digest: str, ratio: int | None = None, variant: str | None = None) -> Path | None:
    """The first extractor in the box made for these backbone weights and, where asked for, this
    ratio and variant."""
    for folder in box().values():
        config = ExtractorConfig.load(folder / CONFIG_FILE)
        if (
            config.backbone_digest == backbone_digest
            and ratio in (None, config.ratio, *config.ratios)
            and variant in (None, config.variant)
        ):
            return folder
    return None
