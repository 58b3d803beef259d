"""Decoding: how tokens are chosen and texts grow, for any model that scores the next token."""

from raffia.lm.decoding.config import DecodeConfig, TokenPlanConfig

__all__ = ["DecodeConfig", "TokenPlanConfig"]
