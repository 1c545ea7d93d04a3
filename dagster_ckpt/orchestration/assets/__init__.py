"""Streaming assets: the decorators, the definitions they need, and what downstream assets read."""
