"""The checkpoint page: a small web page over the client, which `dagster-ckpt ui` serves.

The server renders HTML from the catalog and, for one snapshot, its metadata.
"""
