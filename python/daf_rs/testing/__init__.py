"""Helpers for testing and measuring code that uses `daf_rs`: small, seeded models and their batches."""

from daf_rs.testing.models import (
    GPT,
    LSTMLM,
    MODELS,
    Batch,
    Llama,
    ResNet20,
    TrainableModel,
    ViT,
    build,
    gpt,
    llama,
    lstm_lm,
    resnet20,
    vit,
)

__all__ = [
    "GPT",
    "LSTMLM",
    "MODELS",
    "Batch",
    "Llama",
    "ResNet20",
    "TrainableModel",
    "ViT",
    "build",
    "gpt",
    "llama",
    "lstm_lm",
    "resnet20",
    "vit",
]
