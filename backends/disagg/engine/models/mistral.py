"""Mistral 7B (Jiang et al. 2023): Llama whose layers may attend to a sliding window only."""

from backends.disagg.engine.models.variant import Variant

MISTRAL = Variant()
"""The window is the configuration's."""
