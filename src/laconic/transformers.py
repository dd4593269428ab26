"""laconic.transformers: what its users import."""

from laconic.attach.transformers import LaconicMixin, LaconicTrainer

__all__ = ["LaconicMixin", "LaconicTrainer"]
