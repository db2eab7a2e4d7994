"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from backends.disagg.engine.models.variant import Variant

LLAMA = Variant()
