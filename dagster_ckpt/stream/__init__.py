"""A stream as the packages above see it: its handle, its lease, and its snapshots."""
