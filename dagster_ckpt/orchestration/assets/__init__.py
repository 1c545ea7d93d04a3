"""Streaming assets: the decorators, their definitions, and support for downstream assets."""
