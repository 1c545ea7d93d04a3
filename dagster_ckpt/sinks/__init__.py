"""Sinks: what each remembers of its batches, and what happens when a batch is written again."""
