"""The checkpoint page: a small web page over the client, which `dagster-ckpt ui` serves.

The pages are HTML that the server renders, without a build step. They read only the catalog and,
for one snapshot, its metadata. Start with `app.py`.
"""
